"""The live line of a run: its newest step, or what else it does right now; on a terminal and in a notebook.

It fits into the columns that there are at the moment: what matters least is left out, and no number is cut. On a
terminal a thread draws it a few times a second, so that a step only stores its metrics.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from trainer.monitors import wording
from trainer.monitors.metrics import RunInfo, StepMetrics

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

REFRESHES_PER_SECOND = 4
NOTEBOOK_COLUMNS = 100
_GAP = 2  # columns between two parts
_BARS = {160: 30, 105: 20, 80: 12, 60: 8}  # from so many columns on a bar of so many
_NOTEBOOK_SECONDS = 0.5  # between two drawings: each is a message to the browser
_SHOWN_SECONDS = 2.0  # from which on the time that an activity takes is shown


class Eta:
    """Seconds until the last step of this run: an exponential mean of the steps, over about twenty of them, and a share
    of the pauses between the steps so far, which evaluations and checkpoints take."""

    _FORGET = 0.05

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_seconds: float | None = None
        self._pause_seconds, self._ended_at, self._steps_seen = 0.0, 0.0, 0

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
        """Seconds from ``metrics`` to the last step; None at the last step, and before the second step."""
        steps_left = metrics.last_step - metrics.step
        if self._mean_seconds is None or steps_left <= 0:
            return None
        return steps_left * (self._mean_seconds + self._pause_seconds / (self._steps_seen - 1))


class Part(NamedTuple):
    """A part of the line.

    Attributes:
        rank: The part with the highest one is left out first.
        texts: What it says, the longest first.
    """

    rank: int
    texts: tuple[str, ...]
    style: str = "dim"


_STEP, _ACTIVITY, _LOSS, _BAR, _ETA, _RATE, _NORM, _MFU, _LR, _MORE = range(10)


class LiveState:
    """What the line shows; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.eta = Eta(clock)
        self._info: RunInfo | None = None
        self._newest: StepMetrics | None = None
        self._newest_at = self._activity_at = clock()
        self._activity = ("", 0, 0)
        self._ended = False

    def begin(self, info: RunInfo) -> None:
        self._info = info
        self.do("compiling" if info.compiles else "first step")

    def add(self, metrics: StepMetrics) -> None:
        self.eta.add(metrics)
        if self._newest is None:
            self.do("")
        self._newest, self._newest_at = metrics, self._clock()

    def do(self, name: str, done: int = 0, total: int = 0) -> None:
        """See `Monitor.on_activity`."""
        if name != self._activity[0]:
            self._activity_at = self._newest_at = self._clock()
        self._activity = (name, done, total)

    def end(self) -> None:
        """Nothing more will come."""
        self.do("")
        self._ended = True

    @property
    def is_empty(self) -> bool:
        return self._newest is None

    def parts(self) -> Iterator[Part]:
        """In the order of the line, without the bar."""
        metrics, info = self._newest, self._info
        if info is not None:
            step = info.start_step if metrics is None else metrics.step
            yield Part(_STEP, (f"step {step:>{len(str(info.last_step))}}/{info.last_step}",), "")
        if self._activity[0]:
            yield Part(_ACTIVITY, self._doing(), "")
        if metrics is None:
            return
        yield Part(_LOSS, (f"loss {metrics.loss:.4f}",), "bold")
        if metrics.global_norm is not None:
            yield Part(_NORM, (f"norm {metrics.global_norm:#.3g}",))
        for name, value in metrics.extra.items():
            yield Part(_MORE, (f"{name} {value:.4g}",))
        yield Part(_LR, (f"lr {metrics.lr:.2e}",))
        yield Part(_RATE, wording.rates(metrics))
        if metrics.mfu is not None:
            yield Part(_MFU, (wording.utilization(metrics.mfu),))
        left = self.eta.seconds(metrics)
        if left is not None and not self._ended:
            since = 0.0 if self._activity[0] else self._clock() - self._newest_at
            yield Part(_ETA, (f"eta {_whole(left - since)}",))
        if info is not None and info.start_step:
            own, of = metrics.step - info.start_step, info.last_step - info.start_step
            yield Part(_MORE, (f"{own}/{of} in this run",))

    def _doing(self) -> tuple[str, ...]:
        name, done, total = self._activity
        shown = f"{name} {done}/{total}" if total else name
        seconds = self._clock() - self._activity_at
        return (f"{shown}, {_whole(seconds)}", shown) if seconds >= _SHOWN_SECONDS else (shown,)

    def share(self) -> float | None:
        """Of the steps of this run, those that are done; None before it has begun."""
        if self._info is None:
            return None
        done = self._newest.step if self._newest is not None else self._info.start_step
        return (done - self._info.start_step) / max(1, self._info.last_step - self._info.start_step)

    def line(self, columns: int, bar: Callable[[float, int], Text]) -> Text:
        """The line in so many columns; `bar` draws a share of so many columns."""
        from rich.text import Text

        parts, share = list(self.parts()), self.share()
        length = next((length for least, length in _BARS.items() if columns + 1 >= least), 0)
        if share is not None and length:
            parts.insert(1, Part(_BAR, (" " * length,)))
        shown = fitted(parts, columns)
        found = [bar(share, length) if part.rank == _BAR else Text(text, part.style) for part, text in shown]
        return Text(" " * _GAP).join(found)


def _whole(seconds: float) -> str:
    """A duration of at least a second, in whole ones, so that the line changes once a second."""
    return wording.duration(max(1, round(seconds)))


def fitted(parts: Sequence[Part], columns: int) -> list[tuple[Part, str]]:
    """The parts up to the first one, by rank, that does not fit; each with the longest of its texts that does."""
    chosen: dict[int, str] = {}
    used = -_GAP
    for place, part in sorted(enumerate(parts), key=lambda each: each[1].rank):
        text = next((text for text in part.texts if used + _GAP + len(text) <= columns), None)
        if text is None:
            break
        chosen[place] = text
        used += _GAP + len(text)
    return [(parts[place], chosen[place]) for place in sorted(chosen)]


def draw_bar(share: float, columns: int, *, coloured: bool = True, ascii_only: bool = False) -> Text:
    """A bar of so many columns; without colours what is left of it is a thinner line."""
    from rich.text import Text

    halves = round(2 * columns * min(max(share, 0.0), 1.0))
    full, half = divmod(halves, 2)
    if ascii_only:
        return Text("#" * full + "-" * (columns - full))
    rest = columns - full - half
    return Text.assemble(
        ("━" * full + "╸" * half, "cyan" if full < columns else "green"),
        ("━" * rest if coloured else "─" * rest, "bright_black"),
    )


class TerminalLine:
    """Draws the line on a terminal, where other lines appear above it.

    The cursor stays at its beginning: where the terminal becomes narrower and wraps it, the next drawing begins there
    and erases all of it. It must be stopped, also after a failure.

    Args:
        print_above: Whether what the program prints itself appears above, too.
    """

    def __init__(self, console: Console, state: LiveState, print_above: bool = False) -> None:
        self._console, self._state, self._prints_above = console, state, print_above
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._shown = ""
        self._streams: dict[str, Any] = {}
        self._write_to = console.file  # not the streams that stand in its place below
        self._renderer = _in_memory(console)

    def start(self) -> None:
        if self._thread is not None:
            return
        if self._prints_above:
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if stream is not None and stream.isatty():
                    self._streams[name] = stream
                    setattr(sys, name, _Above(self, stream))
        self._thread = threading.Thread(target=self._draw_until_ended, name="progress", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """The thread will see it."""

    def print(self, line: str) -> None:
        """Prints a line above the live one. It is wrapped between words; a path that is too long stays whole."""
        # Rich would read "[1/2]" as markup and colour numbers and paths.
        text = self._rendered(self._wrapped(line), markup=False, highlight=False, soft_wrap=True)
        with self._lock:
            if self._thread is None:
                self._write(text)
            else:
                self._write(f"\r\x1b[J{text}{self._drawing()}")

    def stop(self) -> None:
        """Leaves the last state as a line; nothing where there was no step."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._thread = None
            for name, stream in self._streams.items():
                setattr(sys, name, stream)
            self._streams = {}
            self._write("\r\x1b[J" if self._state.is_empty else f"{self._drawing()}\n")

    def _draw_until_ended(self) -> None:
        while True:
            with self._lock:
                before, drawing = self._shown, self._drawing()
                if drawing != before:
                    self._write(drawing)
            if self._ended.wait(1 / REFRESHES_PER_SECOND):
                return

    def _drawing(self) -> str:
        # The last column stays empty: a line that fills all of them is wrapped by some terminals.
        text = self._state.line(self._columns() - 1, self._bar)
        self._shown = f"\r{self._rendered(text, end='', soft_wrap=True)}\x1b[J\r"
        return self._shown

    def _bar(self, share: float, columns: int) -> Text:
        coloured = self._console.color_system is not None and not self._console.no_color
        return draw_bar(share, columns, coloured=coloured, ascii_only=self._console.options.ascii_only)

    def _wrapped(self, text: str) -> str:
        options = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
        lines = (textwrap.wrap(line, self._columns(), **options) or [line] for line in text.split("\n"))
        return "\n".join(itertools.chain.from_iterable(lines))

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._write_to.fileno()).columns or self._console.width
        except (OSError, ValueError):
            return self._console.width

    def _rendered(self, *what: Any, **options: Any) -> str:
        with self._renderer.capture() as captured:
            self._renderer.print(*what, **options)
        return captured.get()

    def _write(self, text: str) -> None:
        try:
            self._write_to.write(text)
            self._write_to.flush()
        except (OSError, ValueError):
            self._ended.set()  # a terminal that was closed is no reason to end the run, and the log file has all lines


def _in_memory(console: Console) -> Console:
    """A console that renders as this one does and writes nowhere: capturing flushes its file, which may be closed."""
    from rich.console import Console

    return Console(
        file=io.StringIO(), force_terminal=console.is_terminal, color_system=console.color_system or None,
        no_color=console.no_color,
    )  # fmt: skip


class _Above:
    """A stream whose lines appear above the live one."""

    def __init__(self, line: TerminalLine, stream: TextIO) -> None:
        self._line, self._stream, self._rest = line, stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._line.print(line)
        return len(text)

    def flush(self) -> None:
        """Waits for the end of the line."""


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
        line = self._state.line(NOTEBOOK_COLUMNS, lambda share, columns: draw_bar(share, columns, coloured=False))
        return {"text/plain": line.plain}


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this program."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
