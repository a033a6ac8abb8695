"""Prints a run: a live progress line on a terminal, plain lines everywhere else and in the log file.

`trainer/monitors/live.py` draws the live line.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO, cast

from trainer.monitors import formatting
from trainer.monitors.files import write_failure
from trainer.monitors.live import Eta, FaultTolerantStream, LiveState, NotebookLine, TerminalLine, in_notebook
from trainer.monitors.metrics import EvalMetrics, Monitor, RunInfo, RunSummary, StepMetrics


class LineMonitor(Monitor):
    """Prints a line for every ``every``-th step, the first and the last step, and for every other event.

    Args:
        write: Takes a line without its newline.
        moe_layers: The numbers of the MoE layers whose drop rates follow the line of a step.
        release: Called once at the end, for example to close a file.
    """

    def __init__(
        self, write: Callable[[str], None], step_line: formatting.StepLine = formatting.plain_step, every: int = 1,
        moe_layers: Sequence[int] = (), release: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.write = write
        self._step_line = step_line
        self._moe_layers = moe_layers
        self._release = release
        self._eta = Eta()
        self._every = every
        self._always: tuple[int, ...] = ()

    def on_start(self, info: RunInfo) -> None:
        self._always = (info.start_step + 1, info.last_step)
        self.write(formatting.start_line(info))

    def on_step(self, metrics: StepMetrics) -> None:
        """Prints each `per_print_times`-th step, and every step that overflowed."""
        self._eta.add(metrics)
        if self._is_printed(metrics.step) or metrics.overflow:
            self.write(self._step_line(metrics, self._eta.seconds(metrics)))
        self._write_drop_rates(metrics)

    def _is_printed(self, step: int) -> bool:
        return step % self._every == 0 or step in self._always

    def _write_drop_rates(self, metrics: StepMetrics) -> None:
        if self._moe_layers and self._is_printed(metrics.step):
            for line in formatting.drop_rate_lines(metrics, self._moe_layers):
                self.write(line)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self.write(formatting.eval_line(metrics))

    def on_checkpoint(self, path: Path, step: int) -> None:
        self.write(f"checkpoint of step {step}: {path}")

    def on_note(self, text: str) -> None:
        self.write(f"note: {text}")

    def close(self, summary: RunSummary | None) -> None:
        if summary is not None:
            for line in formatting.summary_lines(summary):
                self.write(line)
        self._release()


class ProgressMonitor(LineMonitor):
    """Shows the newest step, or the current activity, in a live line; all other lines are printed above it.

    It must be closed, also after a failure.
    """

    def __init__(self, line: TerminalLine | NotebookLine, every: int = 1, moe_layers: Sequence[int] = ()) -> None:
        super().__init__(line.print, every=every, moe_layers=moe_layers)
        self._line = line
        self._state = line.state

    def on_start(self, info: RunInfo) -> None:
        super().on_start(info)
        self._state.start(info)
        self._line.start()

    def on_step(self, metrics: StepMetrics) -> None:
        """Updates the progress line, and prints a line for a step that overflowed."""
        self._state.add(metrics)
        self._line.refresh()
        if metrics.overflow:
            self.write(f"step {metrics.step}: overflow, update skipped (loss scale {metrics.loss_scale:g})")
        self._write_drop_rates(metrics)

    def on_activity(self, name: str, done: int = 0, total: int = 0) -> None:
        self._state.set_activity(name, done, total)
        if name:
            self._line.start()
        self._line.refresh()

    def close(self, summary: RunSummary | None) -> None:
        self._state.end()
        self._line.stop()
        super().close(summary)


def console_monitor(
    log_format: str, per_print_times: int = 1, stream: TextIO | None = None, moe_layers: Sequence[int] = ()
) -> LineMonitor:
    """Returns the monitor that prints to the user.

    With ``rich`` it shows every step in a live line on a terminal or in a notebook. Elsewhere, and with any other
    `log_format`, it prints a line every `per_print_times` steps. `stream` None is standard output.
    """
    if stream is None:
        stream = sys.stdout
    if log_format == "rich" and stream.isatty():
        from rich.console import Console

        console = Console(file=cast(TextIO, FaultTolerantStream(stream)))
        if not console.is_dumb_terminal:
            line = TerminalLine(console, LiveState(), print_above=stream is sys.stdout)
            return ProgressMonitor(line, per_print_times, moe_layers)
    if log_format == "rich" and stream is sys.stdout and in_notebook():
        return ProgressMonitor(NotebookLine(LiveState()), per_print_times, moe_layers)

    def write(line: str) -> None:
        # The reader may have closed the pipe, as in `| head`. The run continues, and the log file has all lines.
        with contextlib.suppress(BrokenPipeError):
            print(line, file=stream, flush=True)

    return LineMonitor(write, formatting.STEP_LINES[log_format], per_print_times, moe_layers)


def log_file_monitor(
    path: Path, every: int = 1, moe_layers: Sequence[int] = (), *,
    step_line: formatting.StepLine = formatting.plain_step, stamp: str = "%Y-%m-%d %H:%M:%S ", replaces: bool = False,
) -> LineMonitor:  # fmt: skip
    """Returns a monitor that writes lines to a file, each after the date and time in the format `stamp`.

    Args:
        replaces: Whether to replace an existing file; otherwise lines are appended.

    Raises:
        RunError: The file cannot be opened or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if replaces:
            path.unlink(missing_ok=True)
        log = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise write_failure(path, error, "the log", "log file") from error

    def write(line: str) -> None:
        try:
            log.write(f"{time.strftime(stamp)}{line}\n")
        except OSError as error:
            raise write_failure(path, error, "the log", "log file") from error

    def release() -> None:
        # After a full disk the buffer still has data, and closing would fail again.
        with contextlib.suppress(OSError):
            log.close()

    return LineMonitor(write, step_line, every, moe_layers, release)
