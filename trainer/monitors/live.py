"""Draws the live line of a run, with rich on a terminal: its newest step, or its current activity.

The line fits the current width of the terminal. The least important fields are left out; no number is cut.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from trainer.monitors import formatting
from trainer.monitors.metrics import RunInfo, StepMetrics

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

REFRESHES_PER_SECOND = 4
NOTEBOOK_COLUMNS = 100
_GAP = 2  # columns between two fields
_BARS = {160: 30, 105: 20, 80: 12, 60: 8}  # terminal columns -> columns of the bar
_NOTEBOOK_SECONDS = 0.5  # between two updates, because each one is a message to the browser
_SHOWN_SECONDS = 2.0  # the duration of a longer activity is shown


class Eta:
    """Estimates the seconds until the last step of this run.

    It adds an exponential mean of step times, over about twenty steps, and the mean pause between two steps, which
    evaluations and checkpoints take.
    """

    _FORGET = 0.05

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_seconds: float | None = None
        self._pause_seconds = 0.0
        self._ended_at = 0.0
        self._steps_seen = 0

    def add(self, metrics: StepMetrics) -> None:
        """Adds a step that has just ended to the mean, except the first, which compiles."""
        now = self._clock()
        self._steps_seen += 1
        if self._steps_seen > 1:
            self._pause_seconds += max(0.0, now - self._ended_at - metrics.step_seconds)
        self._ended_at = now
        if self._steps_seen == 2:
            self._mean_seconds = metrics.step_seconds
        elif self._mean_seconds is not None:
            self._mean_seconds += self._FORGET * (metrics.step_seconds - self._mean_seconds)

    def seconds(self, metrics: StepMetrics) -> float | None:
        """Returns the seconds from ``metrics`` to the last step; None at the last step, and before the second step."""
        steps_left = metrics.last_step - metrics.step
        if self._mean_seconds is None or steps_left <= 0:
            return None
        return steps_left * (self._mean_seconds + self._pause_seconds / (self._steps_seen - 1))


_LEFT_OUT_FIRST = ("more", "lr", "utilization", "norm", "rate", "eta", "bar", "loss", "activity", "step")
"""The kinds of fields that a narrow terminal leaves out, in this order."""


class StatusField(NamedTuple):
    """A field of the line."""

    kind: str
    text: str
    style: str = "dim"


class LiveState:
    """The values that the line shows; rich renders it. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._eta = Eta(clock)
        self._info: RunInfo | None = None
        self._step = 0
        self._newest: StepMetrics | None = None
        self._activity = ("", 0, 0)
        self._activity_at = clock()
        self._ended = False

    def start(self, info: RunInfo) -> None:
        """Shows the activity of the first step."""
        self._info = info
        self._step = info.start_step
        self.set_activity("compiling" if info.compiles else "first step")

    def add(self, metrics: StepMetrics) -> None:
        """Shows a step that has ended."""
        self._eta.add(metrics)
        if self._newest is None:
            self.set_activity("")
        self._newest = metrics
        self._step = metrics.step

    def set_activity(self, name: str, done: int = 0, total: int = 0) -> None:
        """Shows an activity, see `Monitor.on_activity`."""
        if name != self._activity[0]:
            self._activity_at = self._clock()
        self._activity = (name, done, total)

    def end(self) -> None:
        """Removes the activity and the estimate."""
        self.set_activity("")
        self._ended = True

    @property
    def is_empty(self) -> bool:
        """Returns whether no step has ended."""
        return self._newest is None

    def fields(self, bar_columns: int) -> Iterator[StatusField]:
        """Yields all fields of the line in their order. A field of `bar_columns` spaces stands for the bar."""
        metrics = self._newest
        info = self._info
        if info is not None:
            yield StatusField("step", f"step {self._step:>{len(str(info.last_step))}}/{info.last_step}", "")
            if bar_columns:
                yield StatusField("bar", " " * bar_columns)
        name, done, total = self._activity
        if name:
            progress = ""
            if total:
                progress = f" {done}/{total}"
            yield StatusField("activity", f"{name}{progress}", "")
            seconds = self._clock() - self._activity_at
            if seconds >= _SHOWN_SECONDS:
                yield StatusField("activity", formatting.duration(round(seconds)))
        if metrics is None:
            return
        yield StatusField("loss", f"loss {metrics.loss:.4f}", "bold")
        if metrics.global_norm is not None:
            yield StatusField("norm", f"norm {metrics.global_norm:#.3g}")
        for extra, value in metrics.extra.items():
            yield StatusField("more", f"{extra} {value:.4g}")
        yield StatusField("lr", f"lr {metrics.lr:.2e}")
        yield StatusField("rate", formatting.rate(metrics))
        if formatting.utilization(metrics):
            yield StatusField("utilization", formatting.utilization(metrics))
        eta = self._eta.seconds(metrics)
        if eta is not None and not self._ended:
            yield StatusField("eta", f"eta {formatting.duration(max(1, round(eta)))}")
        if info is not None and info.start_step:
            steps = info.last_step - info.start_step
            yield StatusField("more", f"{metrics.step - info.start_step}/{steps} in this run")

    def fit_fields(self, columns: int) -> list[StatusField]:
        """Returns the fields that fit into this number of columns."""
        fields = list(self.fields(next((length for minimum, length in _BARS.items() if columns >= minimum), 0)))
        # The last column stays empty: some terminals wrap a line that fills all of them.
        while fields and sum(len(field.text) + _GAP for field in fields) - _GAP >= columns:
            fields.remove(min(reversed(fields), key=lambda field: _LEFT_OUT_FIRST.index(field.kind)))
        return fields

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        cells: list[ProgressBar | Text] = []
        for field in self.fit_fields(options.max_width):
            if field.kind == "bar" and self._info is not None:
                first = self._info.start_step
                steps = max(1, self._info.last_step - first)
                cells.append(ProgressBar(steps, self._step - first, len(field.text), complete_style="cyan"))
            else:
                cells.append(Text(field.text, field.style))
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        grid.add_row(*cells)
        yield grid


class TerminalLine:
    """Draws the line on a terminal, below all other lines. It must be stopped, also after a failure.

    Args:
        print_above: Whether text that the program prints to standard output and error appears above the line.
    """

    def __init__(self, console: Console, state: LiveState, print_above: bool = False) -> None:
        from rich.live import Live

        self._console = console
        self.state = state
        self._live = Live(
            state, console=console, refresh_per_second=REFRESHES_PER_SECOND, redirect_stdout=print_above,
            redirect_stderr=print_above,
        )  # fmt: skip

    def start(self) -> None:
        """Starts to draw the line."""
        self._live.start()

    def refresh(self) -> None:
        """Does nothing, because rich's thread draws the line a few times a second."""

    def print(self, line: str) -> None:
        """Prints text above the live line, wrapped between words. A long path is not broken."""
        from rich.text import Text

        for paragraph in line.split("\n"):
            wrapped = textwrap.wrap(
                paragraph, self._console.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            self._console.print(Text("\n".join(wrapped)), overflow="ignore", crop=False)

    def stop(self) -> None:
        """Stops drawing; the last state stays on the terminal if there was a step."""
        self._live.transient = self.state.is_empty
        self._live.stop()


class FaultTolerantStream:
    """A terminal's stream without errors: a run continues after its terminal was closed, and its log has all lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


class NotebookLine:
    """Draws the line in the output of a notebook's cell, from the thread that runs it."""

    def __init__(self, state: LiveState) -> None:
        self.state = state
        self._display: Any = None
        self._drawn_at = 0.0

    def start(self) -> None:
        """Shows the line."""
        from IPython.display import display

        if self._display is None:
            self._display = display(self._content(), raw=True, display_id=True)

    def refresh(self) -> None:
        """Updates the line, at most every half second."""
        if self._display is not None and time.monotonic() - self._drawn_at > _NOTEBOOK_SECONDS:
            self._display.update(self._content(), raw=True)

    def print(self, line: str) -> None:
        """Prints text in the cell."""
        print(line, flush=True)

    def stop(self) -> None:
        """Updates the line once more."""
        self._drawn_at = 0.0
        self.refresh()
        self._display = None

    def _content(self) -> dict[str, str]:
        self._drawn_at = time.monotonic()
        fields = self.state.fit_fields(NOTEBOOK_COLUMNS)
        return {"text/plain": (" " * _GAP).join(field.text for field in fields if field.kind != "bar")}


def in_notebook() -> bool:
    """Returns whether a Jupyter kernel runs this program."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
