"""The job of MindSpore's tutorial on gradient accumulation, on digits that are drawn: one process, and two workers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fork_server import ensure_server
from ports import free_port
from run_helpers import (
    PROGRAM,
    REPOSITORY,
    arrays_of,
    assert_same_bits,
    call,
    column,
    eval_records,
    figures,
    finish,
    start,
    step_records,
    train,
    wait_until,
)
from tolerances import ACCURACY, DRY_RUN_SMALL_MEMORY, rounding_limit

from trainer.config import Override, load_config
from trainer.config.device_defaults import apply_device_defaults
from trainer.errors import EXIT_SIGTERM
from trainer.launch.msrun import MSRUN_VARIABLE
from trainer.plan.memory import memory_estimate
from trainer.report.record import read_run
from trainer.report.starts import RUN_FILE

pytestmark = pytest.mark.slow

CONFIG = REPOSITORY / "configs" / "mnist_accumulation.yaml"
IMAGES, TESTED, ROWS = 1600, 500, 32
STEPS = IMAGES // ROWS  # of an epoch
HALF, FURTHER = STEPS + 7, STEPS + 12  # where a run is stopped, in the middle of the second epoch, and goes on to
# Weights and a rate with which few images are enough; all else is the tutorial's.
FASTER = {
    "model.classifier.initializer_range": 0.05,
    "optimizer.momentum": 0.9,
    "lr_schedule.learning_rate": 0.03,
}
DEPTH = 784 + 512 + 512 + 10 + 12  # longest path to a loss: the sums, and twelve single operations
LOSS = re.compile(r"^epoch: (\d+) step: (\d+), loss is (\d+\.\d+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    draw = [sys.executable, REPOSITORY / "scripts" / "make_digits.py", folder, "--train", str(IMAGES)]
    subprocess.run([*draw, "--test", str(TESTED)], check=True)
    return folder


@pytest.fixture
def data_path(digits: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DATA_PATH", str(digits))
    return digits


def flags(folder: Path, **more: object) -> dict[str, object]:
    faster = {name.replace(".", "__"): value for name, value in FASTER.items()}
    return faster | {
        "output_dir": folder / "output",
        "worker_log_dir": folder / "log_output",
        "runner_config__epochs": 2,
        "callbacks": [
            {"type": "MFLossMonitor", "per_print_times": 5},
            {"type": "CheckpointMonitor", "save_checkpoint_steps": FURTHER},
        ],
        "report": False,
    } | more


def test_it_learns_the_digits_and_can_be_stopped(
    data_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = train(CONFIG, **flags(tmp_path / "whole"))
    assert eval_records(whole)[-1]["eval_accuracy"] > 0.95
    assert column(eval_records(whole), "step") == [STEPS, 2 * STEPS]
    assert column(step_records(whole), "tokens") == [ROWS] * 2 * STEPS
    assert_the_log(tmp_path / "whole" / "log_output" / "worker_0.log", whole)
    printed = capsys.readouterr().out
    assert f"epoch: 1 step: {STEPS}, loss is " in printed
    assert re.search(rf"eval at step {2 * STEPS}: loss 0\.\d+, accuracy 9\d\.\d+ % \({TESTED} images in ", printed)
    resumed = train(CONFIG, **flags(tmp_path / "halves", runner_config__stop_step=HALF))
    train(CONFIG, **flags(tmp_path / "halves", runner_config__stop_step=FURTHER, resume_training=True))
    assert figures(resumed) == figures(whole)[:FURTHER]
    assert_same_bits(arrays_of(resumed), arrays_of(whole, FURTHER))
    log = (tmp_path / "halves" / "log_output" / "worker_0.log").read_text()
    assert log.count("epoch: 2 step: 5,") == log.count("epoch: 2 step: 10,") == 1
    evaluation = tmp_path / "eval"
    code, said, errors = call(
        "--config", CONFIG, "--run_mode", "eval", "--load_checkpoint", whole / "checkpoints",
        "--output_dir", evaluation, cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, errors
    found = json.loads((evaluation / "eval.json").read_text())
    assert found["accuracy"] == eval_records(whole)[-1]["eval_accuracy"] and "accuracy" in said


def assert_the_log(path: Path, output: Path) -> None:
    losses = {(record["epoch"], record["step"] - STEPS * (record["epoch"] - 1)): record["loss"]
              for record in step_records(output)}  # fmt: skip
    lines = LOSS.findall(path.read_text())
    assert len(lines) > 10
    assert all(losses[int(epoch), int(step)] == float(loss) for epoch, step, loss in lines)


def forked_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns an interpreter for msrun_launcher.sh whose job is forked from a process that has imported MindSpore,
    msrun too.

    Jobs that import it themselves: tests/parallel."""
    ensure_server()
    parallel = Path(__file__).resolve().parents[1] / "parallel"
    monkeypatch.setenv(MSRUN_VARIABLE, str(parallel / "forked_msrun.py"))
    launcher, program = shlex.join([sys.executable, str(parallel / "forked_workers.py")]), folder / "python"
    program.write_text(f'#!/bin/sh\ntest "$1" = {shlex.quote(str(PROGRAM))} || exit 9\nshift\nexec {launcher} "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_two_workers_do_what_one_process_does(
    data_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts the job as the tutorial does: the same images in a step give the same losses, except for rounding."""
    own = FASTER | {"stop_step": 20, "callbacks.0.per_print_times": 10}
    order = f"run_trainer.py --config {CONFIG} " + " ".join(f"--{name} {value}" for name, value in own.items())
    monkeypatch.setenv("PYTHON", forked_python(tmp_path, monkeypatch))
    launcher = REPOSITORY / "scripts" / "msrun_launcher.sh"
    script = ["bash", launcher, order, "2", free_port(), tmp_path / "msrun", "True", "100"]
    done = subprocess.run(list(map(str, script)), cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = train(CONFIG, **flags(tmp_path / "alone", runner_config__batch_size=16, runner_config__stop_step=20))
    together = tmp_path / "output" / "mnist_accumulation"
    assert column(step_records(together), "tokens") == column(step_records(alone), "tokens") == [2 * ROWS] * 20
    losses = column(step_records(together), "loss")
    assert losses == pytest.approx(column(step_records(alone), "loss"), rel=rounding_limit(20 * DEPTH))
    accuracies = [eval_records(output)[-1]["eval_accuracy"] for output in (together, alone)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=ACCURACY)
    for rank in range(2):
        log = (tmp_path / "log_output" / f"worker_{rank}.log").read_text()
        assert [(epoch, step) for epoch, step, _ in LOSS.findall(log)] == [("1", "1"), ("1", "10"), ("1", "20")]
        assert f"loss is {losses[-1]}" in log


def test_data_that_is_not_there_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", str(tmp_path / "nowhere"))
    code, _, errors = finish(start("--config", CONFIG, cwd=tmp_path))
    assert code == 2 and "environment: DATA_PATH" in errors and "make_digits.py" in errors
    assert not (tmp_path / "output").exists()


def test_the_plan_of_an_ascend() -> None:
    config = load_config(CONFIG, [Override("context.device_target", "Ascend", "flag")])
    found = memory_estimate(apply_device_defaults(config, "Ascend"), True, "Ascend")
    assert found["total"] / (1 << 20) == pytest.approx(11.9, rel=DRY_RUN_SMALL_MEMORY)


def test_a_second_sigterm_within_mindspore_is_written_down(tmp_path: Path, data_path: Path) -> None:
    """MindSpore catches exceptions, so the process ends at once, without any clean-up."""
    step = ["--batch_size", 1, "--gradient_accumulation_steps", 1500, "--epochs", 1000]  # takes seconds
    process = start("--config", CONFIG, "--output_dir", tmp_path, "--worker_log_dir", tmp_path, *step, cwd=tmp_path)
    wait_until((tmp_path / RUN_FILE).exists, process)
    for _ in range(2):
        time.sleep(0.5)
        assert process.poll() is None and read_run(tmp_path).state == "running"
        process.terminate()
    returned, _, errors = finish(process, 30)
    assert (returned, errors) == (EXIT_SIGTERM, "stopped by SIGTERM\n")
    record = read_run(tmp_path)
    assert (record.state, record.outcome) == ("stopped", "stopped by SIGTERM") and record.starts[-1].ended
