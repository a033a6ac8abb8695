"""A job that starts again: when, from which checkpoint, on how many ranks, and what it leaves in metrics.jsonl."""

from __future__ import annotations

import json
import signal
import types
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ports import free_port

from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.flags import split_arguments
from trainer.config import Config, load_config
from trainer.errors import UserError
from trainer.launch import command, heartbeat
from trainer.launch.arguments import LaunchOptions
from trainer.launch.command import Restart, worker_specs
from trainer.launch.control.messages import NodeMessage
from trainer.launch.control.nodes import Nodes
from trainer.launch.job import (
    JobFiles,
    JobState,
    Outcome,
    ProcessExit,
    RestartPlan,
    decide_outcome,
    job_files,
    write_outcome,
)
from trainer.launch.restart import make_restart_plan
from trainer.monitors.jsonl import JsonlMonitor
from trainer.monitors.metrics import RunInfo
from trainer.parallel.world import World
from trainer.report.curves import MetricsReader

QUICKSTART = str(Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml")


def fails(rank: int | None, code: int = 137, progressed: bool = True) -> Outcome:
    first = None if rank is None else ProcessExit(rank, code, 1.0)
    return Outcome(code, f"rank {rank} failed", first, progressed=progressed)


DONE = Outcome(0, "finished")


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome], **changes: object
) -> tuple[int, list[tuple[LaunchOptions, Restart]]]:
    """Returns the exit code of a job whose starts end so, and how each was started. Each saves a checkpoint with its
    number."""
    options = replace(LaunchOptions(4, 4, log_dir=tmp_path), **changes)
    starts: list[tuple[LaunchOptions, Restart]] = []

    def supervise(
        attempt: LaunchOptions, files: JobFiles, state: JobState, nodes: Nodes, restart: Restart, signals: deque[int],
        device: str,
    ) -> Outcome:  # fmt: skip
        starts.append((attempt, restart))
        write_outcome(files, state, outcomes[len(starts) - 1])
        return outcomes[len(starts) - 1]

    def fewer(given: LaunchOptions, name: str) -> LaunchOptions | None:
        ranks = given.worker_num // 2
        return replace(given, worker_num=ranks, local_worker_num=ranks) if ranks else None

    def resumed(given: LaunchOptions, name: str) -> LaunchOptions:
        return replace(given, arguments=(*given.arguments, name)) if name else given

    monkeypatch.setattr(command, "_supervise", supervise)
    monkeypatch.setattr(command, "SHARED_PORT", None)
    way = RestartPlan(tmp_path, lambda: f"step-{len(starts)}", resumed, fewer)
    signals: deque[int] = deque()
    with command.collect_signals(signals):
        return command._start_and_restart(options, job_files(tmp_path, 0, 1), way, signals, "CPU"), starts


def test_a_job_that_fails_starts_again_from_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    code, starts = run(tmp_path, monkeypatch, [fails(1), fails(2, 1), DONE], max_restarts=3)
    assert code == 0 and [attempt.arguments for attempt, _ in starts] == [(), ("step-1",), ("step-2",)]
    assert starts[1][1] == Restart(1, 3, "rank 1 failed: ended by SIGKILL", 4)
    assert starts[2][1] == Restart(2, 3, "rank 2 failed: exit code 1", 4)
    assert "restart 2 of 3, from step-2\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcomes", "most", "expected"),
    [
        ([fails(1)], 0, 137),
        ([fails(1), fails(1), fails(1, 7)], 2, 7),
        ([fails(1, 2)], 3, 2),  # bad input stays bad input
        ([fails(1), fails(0, 2)], 3, 2),
        ([Outcome(143, "stopped by SIGTERM")], 3, 143),
        # Stopped, and a rank failed while saving.
        ([decide_outcome([ProcessExit(0, 143, 1.0), ProcessExit(1, 1, 2.0)], 15)], 3, 1),
        ([decide_outcome([], 15, "no step was finished for 600 s")], 3, 124),
        ([Outcome(130, "stopped by SIGINT")], 3, 130),
        ([Outcome(124, "no step was finished for 600 s"), DONE], 1, 0),
        ([Outcome(1, "ended because of another node"), DONE], 1, 0),
    ],
)
def test_when_a_job_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome], most: int, expected: int
) -> None:
    code, starts = run(tmp_path, monkeypatch, outcomes, max_restarts=most)
    assert code == expected and len(starts) == len(outcomes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_after_the_failure_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, number: int
) -> None:
    inherited = signal.signal(number, signal.default_int_handler)  # the tests may run under nohup
    before = signal.getsignal(number)
    monkeypatch.setattr(
        command.Nodes, "close", lambda self: (signal.raise_signal(signal.SIGWINCH), signal.raise_signal(number))
    )
    try:
        code, starts = run(tmp_path, monkeypatch, [fails(1), DONE], max_restarts=3)
        assert code == 137 and len(starts) == 1 and "was asked to stop" in capsys.readouterr().err
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, inherited)


def test_a_signal_ends_the_wait_for_the_other_nodes() -> None:
    told: list[NodeMessage] = []
    nodes = types.SimpleNamespace(connected=False, poll=lambda now: [], send=told.append, options=LaunchOptions())
    outcome = command._wait_for_nodes(nodes, deque([signal.SIGWINCH, signal.SIGINT]))
    assert outcome.exit_code == 130 and [message.number for message in told] == [signal.SIGINT]


def test_nodes_do_not_wait_long_for_a_lost_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_TRAINER_SECRET", "a secret for tests alone")
    way = RestartPlan(tmp_path, lambda: "", lambda given, name: given, lambda given, name: None)
    options = LaunchOptions(4, 2, master_port=free_port())
    for attempt, changes, seconds in ((0, {}, 7200), (1, {}, 600), (1, {"start_timeout": 30.5}, 31)):
        nodes = command._nodes(replace(options, **changes), way, attempt, "")
        assert not [event for event in nodes.poll(nodes.began + seconds - 1) if event.kind == "failed"]
        (event,) = (event for event in nodes.poll(nodes.began + seconds + 1) if event.kind == "failed")
        assert event.lines == ["error: node 1 did not connect."]
        nodes.close()


def test_a_rank_that_is_lost_for_good_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5,6,7")
    outcomes = [fails(2), fails(2, progressed=False), fails(1), fails(1, progressed=False), DONE]
    code, starts = run(tmp_path, monkeypatch, outcomes, max_restarts=9, elastic=True)
    assert code == 0 and [attempt.worker_num for attempt, _ in starts] == [4, 4, 2, 2, 1]
    assert [attempt.devices for attempt, _ in starts] == [(), (), (4, 5, 7), (4, 5, 7), (4, 7)]
    spec = worker_specs(starts[2][0], job_files(tmp_path, 0, 1), starts[2][1])[0]
    assert spec["environment"]["ASCEND_RT_VISIBLE_DEVICES"] == "4,5,7"
    assert json.loads(spec["environment"]["RUN_TRAINER_RESTART"])["ranks"] == 2


@pytest.mark.parametrize(
    "outcomes",
    [
        [fails(2), fails(2), DONE],  # it did steps in between
        [fails(2), fails(1, progressed=False), DONE],  # another one
        [Outcome(124, "a hang"), fails(2, progressed=False), DONE],
    ],
)
def test_a_rank_that_may_come_back_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome]
) -> None:
    _, starts = run(tmp_path, monkeypatch, outcomes, max_restarts=9, elastic=True)
    assert [attempt.worker_num for attempt, _ in starts] == [4, 4, 4]


def test_a_batch_that_allows_no_fewer_ranks_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [fails(0), fails(0, progressed=False)]
    code, starts = run(
        tmp_path, monkeypatch, outcomes, max_restarts=9, elastic=True, worker_num=1, local_worker_num=1
    )
    assert code == 137 and len(starts) == 2


# ---- checkpoints and batches -----------------------------------------------------------------------------------------


def job(tmp_path: Path, *words: str, plan_of: Callable[[Config, World], None] | None = None) -> RestartPlan:
    fits = plan_of or (lambda config, world: None)
    return make_restart_plan(options_of(tmp_path, *words), config_of(tmp_path, *words), fits)


def options_of(tmp_path: Path, *words: str) -> LaunchOptions:
    return LaunchOptions(4, 4, arguments=("--config", QUICKSTART, "--output_dir", str(tmp_path), *words))


def config_of(tmp_path: Path, *words: str) -> Config:
    arguments = split_arguments(options_of(tmp_path, *words).arguments)
    return load_config(arguments.config, arguments.overrides)


def save(folder: Path, step: int) -> str:
    return write_checkpoint(folder / "checkpoints", step, {"model": {"x": np.zeros(1)}}, {}, 0).name


def test_only_checkpoints_of_this_job_count(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save(tmp_path, 70)
    way = job(tmp_path)
    assert way.find_newest() == "" and way.resume_from(options_of(tmp_path), "") == options_of(tmp_path)
    for step in (20, 10):
        name = save(tmp_path, step)
        assert way.find_newest() == name
    weights = tmp_path / "checkpoints" / name / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert way.find_newest() == "step-00000020"
    assert f"{name} is left out: the checkpoint is damaged" in capsys.readouterr().err
    (tmp_path / "checkpoints").rename(tmp_path / "aside")
    assert way.find_newest() == ""
    save(tmp_path, 70)
    assert way.find_newest() == "step-00000070"
    began = options_of(tmp_path, "--resume_training", "--ignore_data_skip", "True")
    words = split_arguments(way.resume_from(began, "step-00000070").arguments)
    config = load_config(words.config, words.overrides)
    assert config.resume_training == "step-00000070" and config.ignore_data_skip is False
    assert config.load_checkpoint == str(tmp_path / "checkpoints")


def test_scripts_and_evaluations_start_as_they_did(tmp_path: Path) -> None:
    script = make_restart_plan(LaunchOptions(log_dir=tmp_path), None, lambda config, world: None)
    evaluation = job(tmp_path, "--run_mode", "eval", "--load_checkpoint", str(tmp_path))
    save(tmp_path, 5)
    for way in (script, evaluation):
        assert way.find_newest() == "" and way.shrink(LaunchOptions(), "") is None


@pytest.mark.parametrize(
    ("words", "ranks", "changed"),
    [
        (["--gradient_accumulation_steps", "3"], 3, ["--gradient_accumulation_steps", "4"]),
        (["--gradient_accumulation_steps", "1"], 2, ["--gradient_accumulation_steps", "2"]),
        (["--runner_config.global_batch_size", "32", "--batch_size", "2"], 3, []),  # the plan knows better
        (
            ["--parallel_config.data_parallel", "4", "--use_parallel"],
            2,
            ["--gradient_accumulation_steps", "2", "--parallel_config.data_parallel", "2"],
        ),
    ],
)
def test_fewer_ranks_take_the_same_sequences(tmp_path: Path, words: list[str], ranks: int, changed: list[str]) -> None:
    smaller = job(tmp_path, *words).shrink(options_of(tmp_path, *words), "")
    assert smaller == replace(options_of(tmp_path, *words, *changed), worker_num=ranks, local_worker_num=ranks)


def test_a_smaller_job_must_have_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plan_of(config: Config, world: World) -> None:
        assert config.resume_training == "step-00000007"
        if world.size > 1:
            raise UserError("does not fit")

    words = ["--gradient_accumulation_steps", "3"]
    smaller = job(tmp_path, *words, plan_of=plan_of).shrink(options_of(tmp_path, *words), "step-00000007")
    assert smaller.worker_num == 1 and "--resume_training" not in smaller.arguments
    told = [f"note: the job cannot continue with --worker_num {ranks}: does not fit" for ranks in (3, 2)]
    assert capsys.readouterr().err.splitlines() == told


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


def test_a_restart_is_in_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in range(1, 6)))
    assert heartbeat.restart_info() == {}
    monkeypatch.setenv("RUN_TRAINER_RESTART", json.dumps(Restart(1, 3, "rank 1 failed: exit code 7", 2)._asdict()))
    for step in (3, 3):  # the second time the job fails before it has done a step
        monitor = JsonlMonitor(path)
        monitor.on_start(RunInfo(tmp_path, 9, 9, start_step=step, restarted=heartbeat.restart_info()))
        monitor.close(None)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 3, 3]
    again = {"number": 1, "most": 3, "reason": "rank 1 failed: exit code 7", "ranks": 2}
    assert records[-1] == {"step": 3, "restart": again}
    assert MetricsReader(path).read().curves.steps == [1, 2, 3]
    for nonsense in ("[1]", '{"x": 1}', json.dumps({**again, "number": "1"}), "[" * 90_000, ""):
        monkeypatch.setenv("RUN_TRAINER_RESTART", nonsense)
        assert heartbeat.restart_info() == {}
