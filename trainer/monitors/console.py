"""What a run shows: a live progress line on a terminal, lines everywhere else and in the log file.

The live line is drawn by a thread of Rich a few times a second, so that a step only leaves its metrics behind.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from trainer.errors import RunError
from trainer.monitors import wording
from trainer.monitors.metrics import EvalMetrics, Monitor, RunInfo, RunSummary, StepMetrics

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task
    from rich.text import Text

REFRESHES_PER_SECOND = 4
_WIDTH_WITH_BAR = 105  # columns; a narrower terminal has room for the figures only

DetailLines = Callable[[StepMetrics], list[str]]
"""Makes the lines that follow that of a step."""


def no_details(metrics: StepMetrics) -> list[str]:
    """Nothing follows."""
    return []


class Interval:
    """Which steps have their line: every so many, and the first and the last of a run."""

    def __init__(self, every: int) -> None:
        self._every, self._first_step, self._last_step = every, 1, 0

    def start(self, info: RunInfo) -> None:
        self._first_step, self._last_step = info.start_step + 1, info.last_step

    def __contains__(self, step: int) -> bool:
        return step % self._every == 0 or step in (self._first_step, self._last_step)


class Eta:
    """Seconds until the last step, from a mean of step times that forgets after about twenty steps."""

    _FORGET = 0.05

    def __init__(self) -> None:
        self._last_step = 0
        self._mean_seconds: float | None = None
        self._steps_seen = 0

    def start(self, info: RunInfo) -> None:
        """Counts towards the last step of this run, which ``stop_step`` may put before the schedule's end."""
        self._last_step = info.last_step

    def add(self, metrics: StepMetrics) -> None:
        """Takes one step into the mean; the first one compiles and says nothing about the others."""
        self._steps_seen += 1
        if self._steps_seen == 2:
            self._mean_seconds = metrics.step_seconds
        elif self._mean_seconds is not None:
            self._mean_seconds += self._FORGET * (metrics.step_seconds - self._mean_seconds)

    def seconds(self, metrics: StepMetrics) -> float | None:
        """Seconds from ``metrics`` to the last step; None at the last step, and while nothing is known."""
        steps_left = (self._last_step or metrics.total_steps) - metrics.step
        return steps_left * self._mean_seconds if self._mean_seconds is not None and steps_left > 0 else None


class LineMonitor(Monitor):
    """One line for every ``every``-th step, and for everything else that happens.

    Args:
        write: Takes one line without its newline.
        step_line: Makes the line of a step from its metrics and the seconds left, None when unknown or done.
        every: Steps from one line to the next; the first and the last step of a run always have theirs.
        details: Makes the lines that follow that of a step.
        release: Called once at the end, for example to close a file.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        step_line: wording.StepLine = wording.plain_step,
        every: int = 1,
        release: Callable[[], None] | None = None,
        details: DetailLines = no_details,
    ) -> None:
        self._write, self._step_line, self._details, self._release = write, step_line, details, release
        self._eta, self._interval = Eta(), Interval(every)

    def on_start(self, info: RunInfo) -> None:
        self._eta.start(info)
        self._interval.start(info)
        self._write(wording.start_line(info))

    def on_step(self, metrics: StepMetrics) -> None:
        self._eta.add(metrics)
        if metrics.step in self._interval or metrics.overflow:
            self._write(self._step_line(metrics, self._eta.seconds(metrics)))
        if metrics.step in self._interval:
            for line in self._details(metrics):
                self._write(line)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._write(wording.eval_line(metrics))

    def on_checkpoint(self, path: Path, step: int) -> None:
        self._write(f"checkpoint of step {step}: {path}")

    def on_notice(self, text: str) -> None:
        self._write(f"note: {text}")

    def close(self, summary: RunSummary | None) -> None:
        if summary is not None:
            for line in wording.summary_lines(summary):
                self._write(line)
        if self._release is not None:
            self._release()
            self._release = None


class ProgressMonitor(Monitor):
    """A live line with the newest step; evaluations, checkpoints and notices scroll past above it.

    Must be closed, after a failure too: until then a thread draws and the cursor is hidden.

    Args:
        console: A Rich console on a terminal.
        every: Steps from one step's details to the next.
        details: Makes them, lines that scroll past above the live line.
    """

    def __init__(self, console: Console, every: int = 1, details: DetailLines = no_details) -> None:
        self._console, self._details, self._interval = console, details, Interval(every)
        self._progress: Progress | None = None
        self._bar_task: Task | None = None
        self._eta = Eta()
        self._last_step = 0
        self.newest: StepMetrics | None = None

    def on_start(self, info: RunInfo) -> None:
        from rich.progress import BarColumn, Progress, ProgressColumn
        from rich.table import Column

        monitor = self

        class Figures(ProgressColumn):
            def render(self, task: object) -> Text:
                return monitor.figures()

        self._eta.start(info)
        self._interval.start(info)
        self._print(wording.start_line(info))
        self._last_step = info.last_step
        bar = [BarColumn(bar_width=20)] if self._console.width >= _WIDTH_WITH_BAR else []
        columns = (Figures(table_column=Column(no_wrap=True)), *bar)
        self._progress = Progress(*columns, console=self._console, refresh_per_second=REFRESHES_PER_SECOND)
        self._progress.add_task("", total=info.last_step, completed=info.start_step)
        self._bar_task = self._progress.tasks[0]
        self._progress.start()

    def on_step(self, metrics: StepMetrics) -> None:
        self._eta.add(metrics)
        self.newest = metrics
        if self._bar_task is not None:
            # Not Progress.update, which locks and redraws: the drawing thread reads one number when it next comes by.
            self._bar_task.completed = metrics.step
        if metrics.overflow:
            self._print(f"step {metrics.step}: overflow, update skipped (loss scale {metrics.loss_scale:g})")
        if metrics.step in self._interval:
            for line in self._details(metrics):
                self._print(line)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._print(wording.eval_line(metrics))

    def on_checkpoint(self, path: Path, step: int) -> None:
        self._print(f"checkpoint of step {step}: {path}")

    def on_notice(self, text: str) -> None:
        self._print(f"note: {text}")

    def close(self, summary: RunSummary | None) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if summary is not None:
            self._print_summary(summary)

    def figures(self) -> Text:
        """The figures of the newest step, for the live line."""
        from rich.text import Text

        metrics = self.newest
        if metrics is None:
            return Text("first step: compiling", style="dim")
        step = f"step {metrics.step:>{len(str(self._last_step))}}/{self._last_step}  "
        norm = "" if metrics.global_norm is None else f"norm {metrics.global_norm:.3g}  "
        rate = f"{wording.count(metrics.tokens_per_second)} {metrics.labels}/s"
        left = self._eta.seconds(metrics)
        eta = f"  eta {wording.duration(left)}" if left is not None else ""
        more = "".join(f"{name} {value:.4g}  " for name, value in metrics.extra.items())
        rest = f"  lr {metrics.lr:.2e}  {norm}{more}{rate}{eta}"
        return Text.assemble(step, ("loss ", "dim"), (f"{metrics.loss:.4f}", "bold"), (rest, "dim"))

    def _print(self, line: str) -> None:
        # Rich would read "[1/2]" as markup and colour numbers and paths.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _print_summary(self, summary: RunSummary) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in wording.summary_rows(summary):
            table.add_row(Text(name), Text(value))  # as text: a path may hold brackets
        self._console.print(table)


def console_monitor(
    log_format: str, per_print_times: int = 1, stream: TextIO | None = None, details: DetailLines = no_details
) -> Monitor:
    """The monitor that talks to the user.

    Args:
        log_format: ``rich`` (a live line on a terminal, plain lines elsewhere), ``plain``, ``mindformers`` or
            ``mindspore``.
        per_print_times: Steps from one line to the next; the live line shows every step.
        stream: Where to; standard output when None.
        details: Makes the lines that follow that of a step.
    """
    stream = sys.stdout if stream is None else stream
    if log_format == "rich" and stream.isatty():
        from rich.console import Console

        console = Console(file=stream)
        if not console.is_dumb_terminal:
            return ProgressMonitor(console, per_print_times, details)

    def write(line: str) -> None:
        # Whoever read the lines may be gone, as in `| head`. The training goes on, and the log file has them all.
        with contextlib.suppress(BrokenPipeError):
            print(line, file=stream, flush=True)

    return LineMonitor(write, wording.STEP_LINES[log_format], per_print_times, details=details)


def worker_log_monitor(
    path: Path, log_format: str, every: int = 1, details: DetailLines = no_details, *, anew: bool = True
) -> Monitor:
    """The lines of ``log_format`` and nothing else, as a process prints them; `anew` replaces a file that is there.

    Raises:
        RunError: The file cannot be opened or written.
    """
    if anew:
        path.unlink(missing_ok=True)
    return log_file_monitor(path, every, details, step_line=wording.STEP_LINES[log_format], stamp="")


def log_file_monitor(
    path: Path,
    every: int = 1,
    details: DetailLines = no_details,
    *,
    step_line: wording.StepLine = wording.plain_step,
    stamp: str = "%Y-%m-%d %H:%M:%S ",
) -> Monitor:
    """Lines that start with date and time, added to the end of the file at ``path``.

    Raises:
        RunError: The file cannot be opened or written.
    """

    def failure(error: OSError) -> RunError:
        return RunError(f"the log cannot be written: {error.strerror or error}", value=str(path), key="log file",
                        fix="free space or choose another output_dir")

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise failure(error) from error

    def write(line: str) -> None:
        try:
            log.write(f"{time.strftime(stamp)}{line}\n")
        except OSError as error:
            raise failure(error) from error

    def release() -> None:
        # What a full disk did not take is still in the buffer, and closing would fail on it once more.
        with contextlib.suppress(OSError):
            log.close()

    return LineMonitor(write, step_line, every, release, details)
