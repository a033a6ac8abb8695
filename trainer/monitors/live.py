"""The live line of a run: its newest step, or what else it does right now; rich draws it on a terminal.

It fits into the columns that there are at the moment: what matters least is left out, and no number is cut.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from trainer.monitors import formatting
from trainer.monitors.metrics import RunInfo, StepMetrics

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.progress_bar import ProgressBar

REFRESHES_PER_SECOND = 4
NOTEBOOK_COLUMNS = 100
_GAP = 2  # columns between two parts
_BARS = {160: 30, 105: 20, 80: 12, 60: 8}  # terminal columns -> columns of the bar
_NOTEBOOK_SECONDS = 0.5  # between two drawings: each is a message to the browser
_SHOWN_SECONDS = 2.0  # from which on the time that an activity takes is shown


class Eta:
    """Estimates the seconds until the last step of this run: an exponential mean of the steps, over about twenty of
    them, and a share of the pauses between the steps so far, which evaluations and checkpoints take."""

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
        """Returns seconds from ``metrics`` to the last step; None at the last step, and before the second step."""
        steps_left = metrics.last_step - metrics.step
        if self._mean_seconds is None or steps_left <= 0:
            return None
        return steps_left * (self._mean_seconds + self._pause_seconds / (self._steps_seen - 1))


class Part(NamedTuple):
    """A part of the line; the one with the highest rank is left out first."""

    rank: int
    text: str
    style: str = "dim"


_STEP, _ACTIVITY, _LOSS, _BAR, _ETA, _RATE, _NORM, _UTILIZATION, _LR, _MORE = range(10)


class LiveState:
    """Holds what the line shows; rich renders it. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._eta = Eta(clock)
        self._info: RunInfo | None = None
        self._newest: StepMetrics | None = None
        self._activity = ("", 0, 0)
        self._activity_at = clock()
        self._ended = False

    def begin(self, info: RunInfo) -> None:
        self._info = info
        self.do("compiling" if info.compiles else "first step")

    def add(self, metrics: StepMetrics) -> None:
        self._eta.add(metrics)
        if self._newest is None:
            self.do("")
        self._newest = metrics

    def do(self, name: str, done: int = 0, total: int = 0) -> None:
        """Takes what `Monitor.on_activity` is called with."""
        if name != self._activity[0]:
            self._activity_at = self._clock()
        self._activity = (name, done, total)

    def end(self) -> None:
        """Ends the activity and the estimate."""
        self.do("")
        self._ended = True

    @property
    def is_empty(self) -> bool:
        return self._newest is None

    def parts(self) -> Iterator[Part]:
        """Yields what the line could say, in its order, without the bar."""
        metrics = self._newest
        info = self._info
        if info is not None:
            if metrics is None:
                step = info.start_step
            else:
                step = metrics.step
            yield Part(_STEP, f"step {step:>{len(str(info.last_step))}}/{info.last_step}", "")
        name, done, total = self._activity
        if name:
            yield Part(_ACTIVITY, f"{name} {done}/{total}" if total else name, "")
            seconds = self._clock() - self._activity_at
            if seconds >= _SHOWN_SECONDS:
                yield Part(_ACTIVITY, formatting.duration(round(seconds)))
        if metrics is None:
            return
        yield Part(_LOSS, f"loss {metrics.loss:.4f}", "bold")
        if metrics.global_norm is not None:
            yield Part(_NORM, f"norm {metrics.global_norm:#.3g}")
        for extra, value in metrics.extra.items():
            yield Part(_MORE, f"{extra} {value:.4g}")
        yield Part(_LR, f"lr {metrics.lr:.2e}")
        yield Part(_RATE, formatting.rate(metrics))
        if formatting.utilization(metrics):
            yield Part(_UTILIZATION, formatting.utilization(metrics))
        left = self._eta.seconds(metrics)
        if left is not None and not self._ended:
            yield Part(_ETA, f"eta {formatting.duration(max(1, round(left)))}")
        if info is not None and info.start_step:
            steps = info.last_step - info.start_step
            yield Part(_MORE, f"{metrics.step - info.start_step}/{steps} in this run")

    def bar(self, columns: int) -> ProgressBar:
        """Returns a bar of so many columns over the steps of this run."""
        from rich.progress_bar import ProgressBar

        assert self._info is not None, "it has begun"
        first = self._info.start_step
        if self._newest is None:
            step = first
        else:
            step = self._newest.step
        return ProgressBar(max(1, self._info.last_step - first), step - first, columns, complete_style="cyan")

    def fitted(self, columns: int) -> list[Part]:
        """Returns the parts that fit into so many columns, the bar included, whose text is blank."""
        parts = list(self.parts())
        bar_columns = next((length for least, length in _BARS.items() if columns >= least), 0)
        if self._info is not None and bar_columns:
            parts.insert(1, Part(_BAR, " " * bar_columns))
        # The last column stays empty: a line that fills all of them is wrapped by some terminals.
        while parts and sum(len(part.text) + _GAP for part in parts) - _GAP >= columns:
            least = max(part.rank for part in parts)
            del parts[max(place for place, part in enumerate(parts) if part.rank == least)]
        return parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        parts = self.fitted(options.max_width)
        grid = Table.grid(*("" for _ in parts), padding=(0, _GAP, 0, 0))
        cells = [self.bar(len(part.text)) if part.rank == _BAR else Text(part.text, part.style) for part in parts]
        grid.add_row(*cells)
        yield grid


class TerminalLine:
    """Draws the line on a terminal, where other lines appear above it. It must be stopped, also after a failure.

    Args:
        print_above: Whether what the program prints itself appears above, too.
    """

    def __init__(self, console: Console, state: LiveState, print_above: bool = False) -> None:
        from rich.live import Live

        self._console = console
        self._state = state
        self._live = Live(
            state, console=console, refresh_per_second=REFRESHES_PER_SECOND, redirect_stdout=print_above,
            redirect_stderr=print_above,
        )  # fmt: skip

    def start(self) -> None:
        self._live.start()

    def changed(self) -> None:
        """Does nothing: rich's thread draws the line a few times a second."""

    def print(self, line: str) -> None:
        """Prints a line above the live one. It is wrapped between words; a path that is too long stays whole."""
        from rich.text import Text

        options = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
        for paragraph in line.split("\n"):
            wrapped = textwrap.wrap(paragraph, self._console.width, **options)
            self._console.print(Text("\n".join(wrapped)), overflow="ignore", crop=False)

    def stop(self) -> None:
        """Leaves the last state as a line; nothing where there was no step."""
        self._live.transient = self._state.is_empty
        self._live.stop()


class OpenTerminal:
    """A terminal's stream that ignores errors: a terminal that was closed is no reason to end a run, whose log file has
    all lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


class NotebookLine:
    """Draws the line in the output of a notebook's cell, from the thread that runs it."""

    def __init__(self, state: LiveState) -> None:
        self._state = state
        self._display: Any = None
        self._drawn_at = 0.0

    def start(self) -> None:
        from IPython.display import display

        if self._display is None:
            self._display = display(self._content(), raw=True, display_id=True)

    def changed(self) -> None:
        if self._display is not None and time.monotonic() - self._drawn_at > _NOTEBOOK_SECONDS:
            self._display.update(self._content(), raw=True)

    def print(self, line: str) -> None:
        print(line, flush=True)

    def stop(self) -> None:
        if self._display is not None:
            self._display.update(self._content(), raw=True)
            self._display = None

    def _content(self) -> dict[str, str]:
        self._drawn_at = time.monotonic()
        return {"text/plain": plain_line(self._state.fitted(NOTEBOOK_COLUMNS))}


def plain_line(parts: Sequence[Part]) -> str:
    """Returns the line as text, without its bar."""
    return (" " * _GAP).join(part.text for part in parts if part.rank != _BAR)


def in_notebook() -> bool:
    """Checks whether a Jupyter kernel runs this program."""
    ipython = sys.modules.get("IPython")
    shell = None
    if ipython is not None:
        shell = ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
