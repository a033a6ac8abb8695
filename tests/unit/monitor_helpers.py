"""What the tests of monitors and reports share: the records of a run, and a pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from pathlib import Path

from trainer.monitors.metrics import EvalMetrics, RunInfo, StepMetrics

UNIT = Path(__file__).resolve().parent
EVALUATION = EvalMetrics(step=20, epoch=1, loss=2.25, perplexity=9.4877, tokens=16384, seconds=1.2)


def step_metrics(step: int, **changes) -> StepMetrics:
    values = {
        "step": step, "last_step": 200, "epoch": 1, "epochs": 2, "step_in_epoch": step, "steps_per_epoch": 100,
        "loss": 5.612345, "lr": 5e-5, "global_norm": 0.981, "loss_scale": 1.0, "overflow": False, "tokens": 1500,
        "tokens_per_second": 12345.0, "input_tokens_per_second": 12345.0, "step_seconds": 0.123,
        "data_wait_seconds": 0.001, "peak_rss_bytes": 1 << 30,
    }
    return StepMetrics(**{**values, **changes})


def run_info(**changes) -> RunInfo:
    values = {"output_dir": Path("output"), "total_steps": 200, "last_step": 200, "epochs": 2, "steps_per_epoch": 100}
    return RunInfo(**{**values, **changes})


def run_on_terminal(program: str, columns: int) -> str:
    import fcntl
    import pty
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": f"{UNIT.parents[1]}:{UNIT}"}
    environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen([sys.executable, "-c", program], stdin=follower, stdout=follower, stderr=follower,
                               env=environment)
    os.close(follower)
    output = b""
    with contextlib.suppress(OSError):  # the terminal's end is an error on Linux
        while chunk := os.read(leader, 65536):
            output += chunk
    os.close(leader)
    assert process.wait(timeout=30) == 0, output.decode()
    return output.decode()
