"""What the user of a launcher sees: the output of one worker, what is waited for, and the launcher's own lines."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from trainer.launch.follow import Follower
from trainer.launch.terminal import SHOW_CURSOR, terminal_size

_CLEAR_LINE = "\r\x1b[K"


class Screen:
    """The terminal, or the files in its place.

    Args:
        follower: Copies the output of a worker to standard output.
        drawn: Whether that worker draws as on a terminal of its own.
    """

    def __init__(self, follower: Follower, drawn: bool = False, errors: TextIO | None = None) -> None:
        self._follower, self._drawn = follower, drawn
        self._errors = sys.stderr if errors is None else errors
        self._waiting = ""
        self._spoke = False

    @property
    def size(self) -> tuple[int, int]:
        return terminal_size(1)

    def update(self, started: int, workers: int, seconds: float, quiet: bool = False) -> None:
        """Copies what the worker has said since the last call; before it says anything, shows what is waited for.

        Args:
            started: Workers that run.
            workers: All workers of this host.
            seconds: Since the job began.
            quiet: Whether nothing is waited for any more.
        """
        text = self._follower.new_text()
        if text:
            self._spoke = True
            self._wait("")
        self._follower.copy(text)
        if not self._spoke:
            self._wait("" if quiet else waiting_for(started, workers, seconds))

    def tell(self, lines: list[str]) -> None:
        """Prints lines of the launcher; on a terminal never behind what is drawn there."""
        self._waiting = ""
        clear = _CLEAR_LINE if self._errors.isatty() else ""
        for line in lines:
            self._print(f"{clear}{line}\n")

    def close(self) -> None:
        self._wait("")
        if self._drawn:  # who is killed while drawing leaves the cursor hidden
            self._follower.copy(SHOW_CURSOR)

    def _wait(self, text: str) -> None:
        if text != self._waiting and self._errors.isatty():
            self._waiting = text
            self._print(f"{_CLEAR_LINE}{text}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that was closed is no reason to leave the workers
            print(text, end="", file=self._errors, flush=True)


def waiting_for(started: int, workers: int, seconds: float) -> str:
    """What is waited for before the first worker says anything."""
    if started < workers:
        return f"msrun starts the workers: {started} of {workers} run, {seconds:.0f} s"
    return f"{workers} workers load MindSpore and find each other, {seconds:.0f} s"
