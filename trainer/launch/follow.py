"""Logs as they grow: the output of one worker on the terminal, and the last lines of one that failed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

# What MindSpore says while a cluster forms, some dozen lines a worker. The logs keep it.
_CHATTER = re.compile(
    rb"\[(?:INFO|WARNING)\] \w+\([^)]*\):[^\[]*\[mindspore/ccsrc/"
    rb"(?:(?:include/)?cluster|plugin/cpu/res_manager/collective|runtime/hardware_abstract/collective)/"
)
_READ_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16


class Follower:
    """Copies what a worker says to the terminal, without MindSpore's chatter about the cluster.

    Args:
        read: Gives what has come since the last call.
        terminal: Where to copy it to.
    """

    def __init__(self, read: Callable[[], bytes], terminal: BinaryIO) -> None:
        self._read, self._terminal = read, terminal
        self._held = b""  # the beginning of a line that may turn out to be chatter
        self._within_line = False
        self.broken = False

    def new_text(self) -> bytes:
        """What has come since the last call, cleaned; a line that is not finished may come in parts."""
        *lines, last = (self._held + self._read()).split(b"\n")
        shown = b""
        for line in lines:
            if self._within_line or not _CHATTER.match(line):
                shown += line + b"\n"
            self._within_line = False
        self._held = b""
        if self._within_line or (last and not last.startswith(b"[")):
            shown, self._within_line = shown + last, True
        else:
            self._held = last
        return shown

    def copy(self, text: bytes) -> None:
        """Writes to the terminal; once nobody reads there, no more."""
        if text and not self.broken:
            try:
                self._terminal.write(text)
                self._terminal.flush()
            except (OSError, ValueError):
                self.broken = True


def growth_of(path: Path) -> Callable[[], bytes]:
    """A function that gives what has been appended to a file since the last call; it need not exist yet."""
    offset = 0

    def read() -> bytes:
        nonlocal offset
        try:
            with path.open("rb") as log:
                log.seek(offset)
                data = log.read(_READ_BYTES)
        except OSError:
            return b""
        offset += len(data)
        return data

    return read


def out_of_pipe(descriptor: int) -> Callable[[], bytes]:
    """A function that gives what has come through a pipe since the last call."""

    def read() -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(descriptor, _READ_BYTES)
        return b""

    return read


def last_lines(path: Path, count: int = 20) -> list[str]:
    """The end of a log without blank lines, and without chatter where there is more; of progress the last state."""
    data = b""
    with contextlib.suppress(OSError), path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        data = log.read()
    every = [line for line in data.split(b"\n") if line.strip()]
    lines = [line for line in every if not _CHATTER.match(line)] or every
    return [line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace") for line in lines[-count:]]
