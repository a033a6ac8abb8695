"""Trainings started with `run_trainer.py launch` and MindSpore's own msrun: the same results as one process, uneven
data, signals, failures, a hang, prediction. A job of msrun_launcher.sh, as users start it: test_tutorial_run.py.

Promised: loss and norm of the first step are those of one process with the same global batch but for rounding
(tolerances.py), and those of every later step within 1e-4.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from fork_server import ensure_server
from launch_helpers import FORKED_MSRUN, LIMIT_SECONDS, PROGRAM, Launcher
from msrun_helpers import run_job
from ports import free_port
from tolerances import LONG_RUN_LOSSES, RUN_LOCAL_NORMS, RUN_NEAR_ZERO, DecoderLimits, decoder_limits

from trainer.errors import EXIT_HANG
from trainer.launch.msrun import MSRUN_VARIABLE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from run_helpers import (  # noqa: E402
    arrays_of,
    column,
    config_of,
    eval_records,
    step_records,
    train,
    write_config,
    write_corpus,
    write_instructions,
)

# One job at a time: processes of MindSpore on the same cores make each other many times slower.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

JOB_SECONDS = 200  # two cores that other tests use as well
SAVED_EVERY = 5
SHARED = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 1}}
STAGES = {"pipeline_stage": 2, "micro_batch_num": 2, "model_parallel": 2, "use_seq_parallel": True}


SAVING = {
    "runner_config": {"batch_size": 2, "epochs": 5000},
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": SAVED_EVERY}],
    "train_dataset.data_loader.num_samples": 80, "train_dataset.held_out": 0,
}  # fmt: skip


def launch(folder: Path, ranks: int, config: Path, *flags: object, forked: bool = True, **environment: str) -> Launcher:
    """Starts a job whose logs lie in `folder`. `forked`: msrun, of several nodes, and the workers have imported
    MindSpore already."""
    words = ["launch", "--nproc", ranks, "--log_dir", "logs", "--force", "--config", config, *flags]
    program = PROGRAM
    if forked:
        ensure_server()
        program = Path(__file__).with_name("forked_workers.py")
        if "--node_rank" in flags:
            environment = {MSRUN_VARIABLE: str(FORKED_MSRUN)} | environment
    return Launcher(folder, [sys.executable, str(program), *map(str, words)], environment)


def run(folder: Path, ranks: int, config: Path, *flags: object, **environment: str) -> Launcher:
    """Runs a job that ends well; no process of it is left."""
    job = launch(folder, ranks, config, *flags, **environment)
    assert job.end(JOB_SECONDS) == 0, job.errors + job.printed
    return job


def endless(folder: Path, *flags: object, forked: bool = False, **environment: str) -> Launcher:
    """Returns a job of two ranks that has done three steps of very many. Not `forked`: what ends is the worker itself.
    """
    changes = {"runner_config.epochs": 5000, "runner_config.batch_size": 2}
    config, output = write_config(folder, write_corpus(folder / "data"), changes), folder / "output"
    job = launch(folder, 2, config, *flags, forked=forked, **environment)
    return going_on(job, output, 3)


def going_on(job: Launcher, output: Path, step: int) -> Launcher:
    """Returns the job, when it has done a step."""
    job.wait_until(lambda: job.process.poll() is not None or steps_done(output) >= step, JOB_SECONDS)
    return job


def steps_done(output: Path) -> int:
    """Returns the last step that a running training has written down."""
    path = output / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return max((int(found[1]) for line in lines if (found := re.match(r'{"step": (\d+),', line))), default=0)


def checkpoints(output: Path) -> list[str]:
    """Names of the complete and the unfinished ones, in order."""
    folder = output / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def pid(job: Launcher, rank: int, folder: str = "job") -> int | None:
    """Returns the process of a rank; None before it runs, and while a job that begins anew renames its old files."""
    try:
        state = json.loads((job.logs / folder / "state.json").read_text())
    except FileNotFoundError:
        return None
    return {worker["rank"]: worker["pid"] for worker in state["workers"]}[rank]


def limits_of(config: Path) -> DecoderLimits:
    return decoder_limits(config_of(config).decoder, rows=8)


def restarts(output: Path) -> list[dict]:
    """Returns the restarts in metrics.jsonl."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "restart" in record]


def assert_starts_again(job: Launcher, output: Path, done: int) -> int:
    """Kills a rank after a checkpoint; the step from which the job goes on. Those after it are done again."""
    newest = output / "checkpoints" / f"step-{(done // SAVED_EVERY + 1) * SAVED_EVERY:08d}" / "COMPLETE"
    job.wait_until(lambda: job.process.poll() is not None or newest.exists(), JOB_SECONDS)
    job.wait_until(lambda: pid(job, 1) is not None)
    began = time.monotonic()
    os.kill(pid(job, 1), signal.SIGKILL)
    job.wait_until(lambda: "restart 1 of 1" in job.errors)
    assert time.monotonic() - began < LIMIT_SECONDS
    assert "rank 1 failed first: ended by SIGKILL" in job.errors
    job.wait_until(lambda: job.process.poll() is not None or len(restarts(output)) == 1, JOB_SECONDS)
    (again,) = restarts(output)
    why = "rank 1 failed: ended by SIGKILL"
    assert again["restart"] == {"number": 1, "most": 1, "reason": why, "ranks": 2}
    assert f"restart 1 of 1 on 2 ranks: {why}" in job.printed
    assert again["step"] > done and again["step"] % SAVED_EVERY == 0
    return again["step"]


def assert_same_training(ours: Path, right: Path, ended_at: set[int]) -> None:
    """Checks that two runs trained the same; `ended_at` has the steps at which a signal ended ours, perhaps within
    the evaluation after the step."""
    mine, theirs = step_records(ours), step_records(right)
    for name in ("step", "epoch", "lr", "tokens"):
        assert column(mine, name) == column(theirs, name)
    limits = limits_of(right / "config.yaml")
    for name, limit in (("loss", limits.loss), ("global_norm", limits.gradients)):
        assert mine[0][name] == pytest.approx(theirs[0][name], rel=limit), name
        assert column(mine, name) == pytest.approx(column(theirs, name), rel=LONG_RUN_LOSSES), name
    evaluated, expected = ({each["step"]: each["eval_loss"] for each in eval_records(run)} for run in (ours, right))
    assert evaluated.keys() <= expected.keys() and expected.keys() - evaluated.keys() <= ended_at
    assert evaluated == pytest.approx({step: expected[step] for step in evaluated}, rel=LONG_RUN_LOSSES)


def assert_like_one_process(folder: Path, data: Path, output: Path) -> None:
    """Checks that two ranks with `SAVING` trained what one process with their batch does in `folder`."""
    alone = train(write_config(folder, data, SAVING), runner_config__batch_size=4,
                  runner_config__stop_step=step_records(output)[-1]["step"])  # fmt: skip
    assert_same_training(output, alone, set())


def test_a_training_goes_on_with_any_number_of_ranks_like_one_process(tmp_path: Path) -> None:
    """Continues a training on 4 -> 2 -> 4 -> 1 ranks, with masked prompts (unequal tokens), accumulation, last batches
    that do not reach all ranks, and evaluation. It takes more than fifty steps, half of them on one rank, where they
    cost least. The first 4 ranks shard the optimizer state, 2 ranks shard each sequence, 4 ranks are two stages of two
    tensor-parallel ranks, and a single one needs no msrun.

    One of the 2 ranks is killed, while the other one waits for it in a ring or soon will, and the job starts again from
    its newest checkpoint. Then SIGTERM ends them: all ranks agree at the end of a step, save, and exit with code 143.
    Ctrl-C, a signal that MindSpore takes for itself, ends the 4 ranks."""
    data = write_instructions(tmp_path / "instructions.jsonl", records=19)
    changes = {
        "train_dataset.data_loader": {"type": "JsonlDataset", "dataset_dir": str(data)},
        "train_dataset.drop_remainder": False,
        "train_dataset.packing": "cut",
        "runner_config.gradient_accumulation_steps": 2,
        "runner_config.epochs": 100,
        "runner_wrapper": {"use_clip_grad": True},
        "do_eval": True,
        "eval_step_interval": 6,
        "sample_prompt": ["the cat", "on"],
    }
    alone, output = tmp_path / "alone" / "output", tmp_path / "together" / "output"
    done, ended_at = 0, set()
    parts: list[tuple[int, int, signal.Signals | None, dict]] = [
        # ranks, steps, signal that ends them, settings
        (4, 12, None, {"runner_config.batch_size": 2, "parallel": SHARED}),
        (2, 12, signal.SIGTERM, {"parallel_config": {"context_parallel": 2}}),
        (4, 3, signal.SIGINT, {"parallel_config": STAGES}),
        (1, 25, None, {}),
    ]
    for number, (ranks, steps, ended_by, differs) in enumerate(parts):
        own = {"runner_config.batch_size": 8, "output_dir": str(output)} | differs
        if number < 2:  # written beside the training, in the first case also in the middle of it
            every = SAVED_EVERY if number else 10
            own["callbacks"] = [{"type": "CheckpointMonitor", "save_checkpoint_steps": every, "async_save": True,
                                 "keep_checkpoint_max": 3 if number else 1}]  # fmt: skip
        folder, last = tmp_path / f"part-{number}", done + steps
        flags = ["--resume_training"] if done else []
        config = write_config(folder, tmp_path, changes | own)
        kept = checkpoints(output)
        if ended_by is None:
            more = {MSRUN_VARIABLE: "absent.py"} if ranks == 1 else {}
            job = run(folder, ranks, config, *flags, "--stop_step", last, **more)
            assert "finished at step" in job.printed and re.search(f"step +{last}/", job.printed)
        else:
            job = launch(folder, ranks, config, *flags, "--max_restarts", 1)
            if ranks == 2:
                restarted_at = assert_starts_again(job, output, done)
            going_on(job, output, last)
            job.process.send_signal(ended_by)
            assert job.end(JOB_SECONDS) == 128 + ended_by, job.errors + job.printed
            # Rank 0 was followed, without what MindSpore says about its cluster.
            assert re.search(f"step +{last}/", job.printed) and "mindspore/ccsrc" not in job.printed
            assert not any("Traceback" in job.log(rank) for rank in range(ranks))
            last = step_records(output)[-1]["step"]
            ended_at.add(last)
        saved = [f"step-{step:08d}" for step in range(done + 1, last) if ranks == 2 and step % SAVED_EVERY == 0]
        assert checkpoints(output) == [*kept, *saved, f"step-{last:08d}"][-3 if ranks == 2 else 0 :]
        assert column(step_records(output), "step") == list(range(1, last + 1)) and last >= done + steps
        assert ranks == 1 or all("reduce_seconds" in record for record in step_records(output)[done:])
        done = last
    assert [record["step"] for record in restarts(output)] == [restarted_at]
    assert done > 50 and not (job.logs / "job" / "msrun").exists()
    assert (output / "logs" / "rank-1.log").read_text().count("step ") > 0
    single = write_config(alone.parent, tmp_path, changes | {"runner_config.batch_size": 8})
    train(single, runner_config__stop_step=done)
    assert len(step_records(alone)) == done and len(set(column(step_records(alone), "tokens"))) > 1
    assert len(set(column(step_records(alone)[:12], "epoch"))) > 2  # the first ranks come past the ends of epochs
    assert_same_training(output, alone, ended_at)
    assert_samples(output, alone, signals=2)
    right = arrays_of(alone)
    for name, array in arrays_of(output).items():
        assert array == pytest.approx(right[name], rel=RUN_LOCAL_NORMS, abs=RUN_NEAR_ZERO), name


def assert_samples(output: Path, alone: Path, signals: int) -> None:
    """Checks that each evaluation has one sample of each prompt, unless a signal cut it short."""
    for folder, cut in ((output, signals), (alone, 0)):
        records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        steps = column(records, "step")[::2]
        assert column(records, "step") == [step for step in steps for _ in range(2)]
        assert column(records, "prompt") == ["the cat", "on"] * len(steps)
        evaluated = column(eval_records(folder), "step")
        assert steps == sorted(set(steps)) and set(steps) <= set(evaluated)
        assert len(steps) >= len(evaluated) - cut, (steps, evaluated)


def test_ranks_save_and_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    job, output = endless(tmp_path, forked=True), tmp_path / "output"
    job.process.kill()
    job.wait_until(lambda: not job.family())
    (saved,) = checkpoints(output)
    assert saved == f"step-{step_records(output)[-1]['step']:08d}"


def test_a_rank_that_stands_still_is_a_hang(tmp_path: Path) -> None:
    job = endless(tmp_path, "--hang_timeout", 4, RUN_TRAINER_TIME_SCALE="0.5")
    began = time.monotonic()
    os.kill(pid(job, 1), signal.SIGSTOP)
    assert job.end() == EXIT_HANG
    assert time.monotonic() - began < LIMIT_SECONDS + 4
    assert "most recent call first" in job.log(0)


def test_a_rank_that_is_lost_for_good_leaves_a_job_of_fewer_with_the_same_batch(tmp_path: Path) -> None:
    """Kills rank 1 after a checkpoint, and again before its first step: the other one goes on from the checkpoint."""
    data, output = write_corpus(tmp_path / "data"), tmp_path / "job" / "output"
    job = launch(tmp_path / "job", 2, write_config(tmp_path / "job", data, SAVING), "--max_restarts", 2, "--elastic")
    marker = output / "checkpoints" / f"step-{SAVED_EVERY:08d}" / "COMPLETE"
    job.wait_until(lambda: job.process.poll() is not None or marker.exists(), JOB_SECONDS)
    killed: list[int | None] = [None]
    for _ in range(2):
        job.wait_until(lambda: job.process.poll() is not None or pid(job, 1) not in killed, JOB_SECONDS)
        killed.append(pid(job, 1))
        os.kill(killed[-1], signal.SIGKILL)
    job.wait_until(lambda: job.process.poll() is not None or len(restarts(output)) > 0, JOB_SECONDS)
    assert "rank 1 failed twice; the job continues with --worker_num 1" in job.errors
    (again,) = restarts(output)
    why = "rank 1 failed: ended by SIGKILL"
    assert again["restart"] == {"number": 2, "most": 2, "reason": why, "ranks": 1}
    assert again["step"] > 1 and again["step"] % SAVED_EVERY == 0
    going_on(job, output, again["step"] + 3).process.terminate()
    assert job.end(JOB_SECONDS) == 128 + signal.SIGTERM
    assert_like_one_process(tmp_path / "alone", data, output)


def test_a_growing_batch_is_that_of_one_process(tmp_path: Path) -> None:
    """Two ranks of msrun without `launch` train the first steps of a ramp-up, one process the next, which it resumes.
    """
    changes = {
        "runner_config": {"batch_size": 2, "global_batch_size": 16, "rampup_batch_size": [4, 4, 60], "max_steps": 12},
        "train_dataset.data_loader.num_samples": 100, "train_dataset.held_out": 0,
    }  # fmt: skip
    data = write_corpus(tmp_path / "data")
    alone = train(write_config(tmp_path / "alone", data, changes))
    config = write_config(tmp_path / "job", data, changes)
    run_job(PROGRAM, "--config", config, "--stop_step", 7, workers=2, folder=tmp_path / "logs")
    output = train(config, resume_training=True)
    batches = column(step_records(output), "global_batch_size")
    assert batches == column(step_records(alone), "global_batch_size")
    assert batches[0] == 4 < batches[6] < max(batches) == 16
    assert_same_training(output, alone, set())


def test_two_nodes_train_like_one_process_and_start_again_together(tmp_path: Path) -> None:
    """The ranks meet at a port and connect over TCP, a second time after one of them was killed."""
    data, output = write_corpus(tmp_path / "data"), tmp_path / "job" / "output"
    config, port = write_config(tmp_path / "job", data, SAVING), free_port()
    nodes = []
    for node in range(2):
        flags = ["--local_worker_num", 1, "--node_rank", node, "--master_port", port, "--max_restarts", 1]
        (tmp_path / f"node-{node}").mkdir()
        nodes.append(launch(tmp_path / f"node-{node}", 2, config, *flags))
    marker = output / "checkpoints" / f"step-{SAVED_EVERY:08d}" / "COMPLETE"
    nodes[1].wait_until(lambda: nodes[1].process.poll() is not None or marker.exists(), JOB_SECONDS)
    os.kill(pid(nodes[1], 1, "job-node-1"), signal.SIGKILL)
    nodes[0].wait_until(lambda: nodes[0].process.poll() is not None or len(restarts(output)) > 0, JOB_SECONDS)
    (again,) = restarts(output)
    assert again["step"] > 1 and again["step"] % SAVED_EVERY == 0
    going_on(nodes[0], output, again["step"] + 3).process.terminate()
    assert [node.end(JOB_SECONDS) for node in nodes] == [128 + signal.SIGTERM] * 2
    assert_like_one_process(tmp_path / "alone", data, output)


def test_ranks_share_prompts_and_evaluation(tmp_path: Path) -> None:
    changes = {"runner_config.epochs": 2}
    config = write_config(tmp_path / "run", write_corpus(tmp_path / "data"), changes)
    train(config)
    flags = ["--load_checkpoint", tmp_path / "run" / "output" / "checkpoints", "--output_dir"]
    trained = {"load_checkpoint": flags[1]}
    predict = ["--run_mode", "predict", "--model.model_config.max_new_tokens", "5"]
    predict += ["--predict_data", "the", "cat", "on"]
    more = {"predict_data": "['the', 'cat', 'on']", "model__model_config__max_new_tokens": 5}
    train(config, output_dir=tmp_path / "p1", run_mode="predict", **trained, **more)
    job = run(tmp_path / "predict", 2, config, *flags, tmp_path / "p2", *predict)
    alone, together = ((tmp_path / name / "predictions.jsonl").read_text() for name in ("p1", "p2"))
    assert together == alone and len(alone.splitlines()) == 3
    assert "[3/3]" in job.printed
    train(config, output_dir=tmp_path / "e1", run_mode="eval", **trained)
    run(tmp_path / "eval", 2, config, *flags, tmp_path / "e2", "--run_mode", "eval")
    one, two = (json.loads((tmp_path / name / "eval.json").read_text()) for name in ("e1", "e2"))
    assert two["tokens"] == one["tokens"] and two["loss"] == pytest.approx(one["loss"], rel=limits_of(config).loss)
