"""Signals to a running training: it ends cleanly, with a checkpoint and the right exit code; SIGKILL loses one step."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fork_server import FORKED, ensure_server
from run_helpers import (
    PROGRAM,
    arrays_of,
    assert_same_bits,
    eval_records,
    figures,
    files_below,
    finish,
    kill_after,
    start,
    start_and_wait,
    step_records,
    steps_done,
    train,
    wait_until,
    write_config,
)

from trainer.checkpoint.store import newest_complete
from trainer.errors import EXIT_SIGINT, EXIT_SIGTERM
from trainer.report.starts import read_starts

pytestmark = pytest.mark.slow

LONG = {"runner_config": {"batch_size": 4, "epochs": 10_000}, "lr_schedule": {"type": "ConstantWarmUpLR"}}


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> Path:
    """Returns a run that nobody disturbs; the disturbed ones stop long before its end."""
    return train(write_config(home / "quiet", home / "data", LONG), runner_config__stop_step=60)


def assert_stopped_and_goes_on(output: Path, printed: str, name: str, uninterrupted: Path) -> None:
    """Checks that a run was stopped by the signal `name` at the end of a step, saved, and continues without a
    difference."""
    last = step_records(output)[-1]["step"]
    assert f"stopped by {name} at step {last} of" in printed
    assert newest_complete(output / "checkpoints").name == f"step-{last:08d}"
    train(output.parent / "run.yaml", resume_training=True, runner_config__stop_step=last + 2)
    steps = last + 2
    if steps > len(figures(uninterrupted)):  # a fast machine has done many before the signal came
        home = output.parents[1]
        longer = write_config(home / f"quiet-{steps}", home / "data", LONG)
        uninterrupted = train(longer, runner_config__stop_step=steps)
    assert figures(output) == figures(uninterrupted)[:steps]


def test_finishes_the_step_saves_and_can_go_on(home: Path, uninterrupted: Path) -> None:
    """SIGTERM; SIGINT is test_control_c_at_a_terminal. Checkpoints are written beside the training: the last one is of
    the step at which it ended."""
    saves = [{"type": "CheckpointMonitor", "save_checkpoint_steps": 2, "keep_checkpoint_max": 2, "async_save": True}]
    path = write_config(home / "SIGTERM", home / "data", {**LONG, "callbacks": saves})
    process, output = start_and_wait(path, steps=3)
    sent_at = steps_done(output)
    process.send_signal(signal.SIGTERM)
    returned, printed, errors = finish(process)
    assert (returned, errors) == (EXIT_SIGTERM, "")
    last, interrupted = step_records(output)[-1]["step"], arrays_of(output)
    assert sent_at <= last <= sent_at + 3  # it does not wait for the end of the epoch
    assert_stopped_and_goes_on(output, printed, "SIGTERM", uninterrupted)
    again = train(path, output_dir=home / "again", runner_config__stop_step=last)
    assert_same_bits(interrupted, arrays_of(again))


def test_killed_at_any_moment_the_newest_complete_checkpoint_serves(home: Path, uninterrupted: Path) -> None:
    saves = [{"type": "CheckpointMonitor", "save_checkpoint_steps": 1, "keep_checkpoint_max": 2, "async_save": True}]
    path = write_config(home / "killed", home / "data", {**LONG, "callbacks": saves})
    output = kill_after(path, steps=5)
    saved, written = newest_complete(output / "checkpoints"), steps_done(output)
    step = int(saved.name.removeprefix("step-"))
    assert written - 2 <= step <= written  # one save may be in flight
    train(path, resume_training=True, runner_config__stop_step=step + 2)
    assert figures(output) == figures(uninterrupted)[: step + 2]
    kept = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert kept == [f"step-{step + 1:08d}", f"step-{step + 2:08d}"]  # nothing of the killed save is left


def test_during_an_evaluation(home: Path) -> None:
    endless = {"data_loader": {"type": "SyntheticDataset", "num_samples": 10_000_000}}
    changes = {**LONG, "do_eval": True, "eval_step_interval": 2, "eval_dataset": endless}
    path = write_config(home / "evaluating", home / "data", changes)
    process, output = start_and_wait(path, steps=2)
    time.sleep(0.5)  # well into the evaluation
    assert process.poll() is None and steps_done(output) == 2
    process.send_signal(signal.SIGTERM)
    returned, printed, _ = finish(process)
    assert returned == EXIT_SIGTERM and "stopped by SIGTERM at step 2" in printed
    assert eval_records(output) == []  # a part of an evaluation says nothing
    assert newest_complete(output / "checkpoints").name == "step-00000002"


@pytest.mark.parametrize("seconds", [0.3, 3], ids=["while MindSpore loads", "while it evaluates"])
def test_run_mode_eval_says_that_it_was_stopped(home: Path, uninterrupted: Path, seconds: float) -> None:
    endless = {"data_loader": {"type": "SyntheticDataset", "num_samples": 10_000_000}}
    changes = {"run_mode": "eval", "load_checkpoint": str(uninterrupted), "eval_dataset": endless}
    folder = home / f"eval_mode-{seconds}"
    path = write_config(folder, home / "data", changes)
    process = start("--config", path, cwd=home, sigint=signal.SIG_IGN, has_imported=seconds > 1)
    wait_until((folder / "output").is_dir, process)  # MindSpore loads, and the evaluation begins
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    returned, printed, errors = finish(process)
    assert (returned, errors) == (EXIT_SIGINT, "")
    assert "stopped by SIGINT: the evaluation has no result" in printed
    assert not (folder / "output" / "eval.json").exists()


def test_a_second_signal_acts_at_once(home: Path) -> None:
    runner = {"batch_size": 4, "epochs": 10_000, "gradient_accumulation_steps": 100_000}  # one step takes minutes
    synthetic = {"data_loader": {"type": "SyntheticDataset", "num_samples": 400_000}}
    path = write_config(home / "twice", home / "data", {"runner_config": runner, "train_dataset": synthetic})
    output = home / "twice" / "output"
    process = start("--config", path, cwd=home)
    log = output / "logs" / "rank-0.log"
    wait_until(lambda: log.exists() and "training: steps" in log.read_text(), process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # it finishes its step
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    returned, _, errors = finish(process)
    assert time.monotonic() - began < 15  # the step would take minutes
    assert returned == EXIT_SIGINT and errors.strip() == "stopped by SIGINT"
    assert newest_complete(output / "checkpoints") is None and step_records(output) == []
    assert read_starts(output)[0][-1].outcome == "stopped by SIGINT"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, EXIT_SIGINT), (signal.SIGTERM, EXIT_SIGTERM)], ids=["SIGINT", "SIGTERM"]
)
def test_before_the_first_step_nothing_is_waited_for(number: int, code: int, home: Path) -> None:
    path = write_config(home / "early", home / "data", {**LONG, "output_dir": str(home / "early" / f"out{number}")})
    output = home / "early" / f"out{number}"
    process = start("--config", path, cwd=home, has_imported=False)
    wait_until(lambda: (output / "logs" / "rank-0.log").exists(), process)  # MindSpore is about to load,
    time.sleep(0.2)  # which takes more than a second
    process.send_signal(number)
    returned, printed, errors = finish(process)
    assert (returned, errors) == (code, "")
    assert f"stopped by {signal.Signals(number).name} before the first step" in printed
    assert files_below(output) == {"logs/rank-0.log"}  # nothing is replaced by a run that does not start


# A terminal: what is written to standard input is typed there.
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def test_control_c_at_a_terminal(home: Path, uninterrupted: Path) -> None:
    path = write_config(home / "terminal", home / "data", LONG)
    output = home / "terminal" / "output"
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, sys.executable, str(PROGRAM), "--config", str(path)],
        cwd=home,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: steps_done(output) >= 3, process)
    time.sleep(0.5)  # the live line is drawn four times a second
    process.stdin.write("\x03")
    process.stdin.flush()
    returned, shown, errors = finish(process)
    assert (returned, errors) == (EXIT_SIGINT, "")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    figures = r"loss [\d.]+  norm [\d.]+  lr 5.00e-05  [\d.]+k? tokens/s  [\d.]+ GFLOP/s"
    assert re.search(rf"step +\d+/\d+  [━╸╺]{{20}}  {figures}", plain)
    assert "loading MindSpore" in plain
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is there again"
    assert plain.rstrip().splitlines()[-1].startswith("log ")
    assert_stopped_and_goes_on(output, plain, "SIGINT", uninterrupted)


def test_a_reader_that_goes_away_does_not_end_the_training(home: Path) -> None:
    path = write_config(home / "pipe", home / "data", {"runner_config": {"batch_size": 4, "stop_step": 5}})
    ensure_server()
    command = f"{sys.executable} {FORKED} {PROGRAM} --config {path} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=home, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert newest_complete(home / "pipe" / "output" / "checkpoints").name == "step-00000005"


@pytest.mark.parametrize("sigint", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background job"])
def test_while_predicting(home: Path, uninterrupted: Path, sigint: signal.Handlers) -> None:
    changes = {
        "run_mode": "predict",
        "load_checkpoint": str(uninterrupted),
        "predict_data": ["the cat"] * 5000,
        "model.model_config.max_decode_length": 64,
    }
    path = write_config(home / "predicting", home / "data", changes)
    output = home / "predicting" / "output"
    output.mkdir(exist_ok=True)
    (output / "predictions.jsonl").write_text("of an earlier run\n")
    unfinished = output / "predictions.jsonl.tmp"
    unfinished.unlink(missing_ok=True)
    process = start("--config", path, cwd=home, sigint=sigint)
    wait_until(lambda: unfinished.exists() and unfinished.stat().st_size > 0, process)
    process.send_signal(signal.SIGINT)
    returned, _, errors = finish(process)
    assert returned == EXIT_SIGINT and errors.splitlines()[-1] == "stopped by SIGINT", errors
    assert "Traceback" not in errors
    assert (output / "predictions.jsonl").read_text() == "of an earlier run\n"


def test_a_fork_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """However that ends: its handlers of exit do not run after SIGTERM."""
    ensure_server()
    (folder := tmp_path / "server").mkdir()
    script = tmp_path / "starts.py"
    script.write_text(
        f"""
import os, sys
sys.path.insert(0, {str(FORKED.parent)!r})
import fork_server
read, write = os.pipe()
if not os.fork():
    os.dup2(read, 0)
    os.close(write)
    fork_server.serve({str(folder / "socket")!r})
os.close(write)
os.wait()
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(FORKED), str(script)], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    assert not folder.exists()
