"""Trains a small copy of a file, resumes it and reads the results: in this process, or in those of a job."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.checkpoint.store import step_folder_name
from trainer.config import Override, load_config
from trainer.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM, RunError
from trainer.monitors.metrics import Monitor
from trainer.parallel.world import world_from_environment, world_of

if TYPE_CHECKING:
    from trainer.monitors.metrics import EvalMetrics, StepMetrics
    from trainer.smoke.changes import Setup

CONFIG = "smoke.yaml"
LOG = "smoke.log"
"""Files of the folder: the small copy, and what its runs print."""
WORKER = "smoke-worker"
"""The command that each process of a job runs."""
_METRICS = "metrics.jsonl"
_FIRST_METRICS = "metrics-first.jsonl"


class Results(NamedTuple):
    """The losses of the two runs; None stands for a number that is not finite."""

    losses: dict[int, float | None]  # of the training, by step from 1
    resumed: dict[int, float | None]  # those of the steps after the checkpoint are the resumed run's
    evaluation: float | None
    peak_rss_bytes: int


def train_small_copy(setup: Setup, report_progress: Callable[[str], None]) -> None:
    """Trains and resumes the small copy; `results` reads what both runs wrote.

    Args:
        report_progress: Receives a line about each step.

    Raises:
        UserError: The data cannot be read.
        RunError: The training failed.
        KeyboardInterrupt, SystemExit: It was stopped.
    """
    log = setup.folder / LOG
    if setup.ranks == 1:
        report_progress(f"training on the {setup.device}; the first step loads MindSpore")
        code = train_and_resume(setup.folder, setup.steps, report_progress)
    else:
        log = setup.folder / "job/rank-0.log"
        report_progress(f"training on {setup.ranks} processes; the first step loads MindSpore")
        code = _run_job(setup)
    if code == EXIT_SIGINT:
        raise KeyboardInterrupt
    if code == EXIT_SIGTERM:
        raise SystemExit(code)
    if code:
        raise RunError(f"a process of the training ended with exit code {code}; log: {log}")


def train_and_resume(folder: Path, steps: int, report_progress: Callable[[str], None]) -> int:
    """Trains the small copy, and resumes it from its checkpoint before the last step; returns the exit code."""
    from trainer.run.loop import run

    is_first = world_from_environment().rank == 0
    config = load_config(str(folder / CONFIG))
    resume_keys = {"resume_training": step_folder_name(steps - 1)}
    if not config.has_adapters:  # with adapters it names the base model
        resume_keys["load_checkpoint"] = "''"
    for resumed in (False, True):
        overrides = [Override(key, text, "smoke") for key, text in resume_keys.items() if resumed]
        monitors = []
        if is_first:
            monitors.append(_Progress(report_progress, resumed))
        with (folder / LOG).open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            code = run(load_config(str(folder / CONFIG), overrides), monitors)
        if code != EXIT_OK:
            return code
        if is_first and not resumed:
            shutil.copyfile(folder / _METRICS, folder / _FIRST_METRICS)
    return EXIT_OK


class _Progress(Monitor):
    """Reports a line about each step and evaluation."""

    def __init__(self, report_progress: Callable[[str], None], resumed: bool) -> None:
        self.report_progress = report_progress
        self.prefix = ""
        if resumed:
            self.prefix = "resumed: "

    def on_step(self, metrics: StepMetrics) -> None:
        """Reports loss, learning rate and time, and why the update was skipped if it was."""
        why = metrics.skipped
        if metrics.overflow and not why:
            why = "overflow"
        loss = f"loss {metrics.loss:.6f}, lr {metrics.lr:.3e}, {metrics.step_seconds:.1f} s"
        if why:
            loss += f" ({why}: nothing was updated)"
        self.report_progress(f"{self.prefix}step {metrics.step} of {metrics.last_step}: {loss}")

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Reports the loss and time of an evaluation."""
        self.report_progress(f"{self.prefix}evaluation: loss {metrics.loss:.4f}, {metrics.seconds:.1f} s")


def _run_job(setup: Setup) -> int:
    """Starts the processes, which train and resume together."""
    from trainer.launch.arguments import LaunchOptions
    from trainer.launch.command import launch
    from trainer.run.prepare import build_plan

    plan = build_plan(load_config(str(setup.folder / CONFIG)), world_of(setup.ranks))  # wrong data shows here at once
    options = LaunchOptions(
        worker_num=setup.ranks,
        local_worker_num=setup.ranks,
        log_dir=setup.folder / "job",
        arguments=(WORKER, str(setup.folder), str(setup.steps)),
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _stdout_as_stderr():
            return launch(options, device=plan.device)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Sends what the launcher and the workers print to standard error: standard output is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def results(folder: Path) -> Results:
    """Reads what the runs wrote, even if they did not finish."""
    first = _records(folder / _FIRST_METRICS)
    resumed = _records(folder / _METRICS)
    if not first:  # the training did not come to its end
        first = resumed
        resumed = []
    losses = {record["step"]: record["loss"] for record in first if "loss" in record}
    resumed_losses = {record["step"]: record["loss"] for record in resumed if "loss" in record}
    evaluation = next((record["eval_loss"] for record in first if "eval_loss" in record), None)
    peaks = [record["peak_rss_bytes"] for record in (*first, *resumed) if "peak_rss_bytes" in record]
    return Results(losses, resumed_losses, evaluation, max(peaks, default=0))


def _records(path: Path) -> list[dict[str, Any]]:
    if path.exists():
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return []
