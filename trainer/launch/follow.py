"""Logs as they grow: the output of one worker on the terminal, and the last lines of one that failed."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import BinaryIO

# What MindSpore says while a cluster forms, some dozen lines a worker. The logs keep it.
_CHATTER = re.compile(
    rb"\[(?:INFO|WARNING)\] \w+\([^)]*\):[^\[]*\[mindspore/ccsrc/"
    rb"(?:cluster|plugin/cpu/res_manager/collective|runtime/hardware_abstract/collective)/"
)
_TAIL_BYTES = 1 << 16


class Follower:
    """Copies what is appended to a log, without MindSpore's chatter about the cluster.

    Args:
        path: The log, which need not exist yet.
        terminal: Where to copy it to.
    """

    def __init__(self, path: Path, terminal: BinaryIO) -> None:
        self._path, self._terminal = path, terminal
        self._offset = 0
        self._held = b""  # the beginning of a line that may turn out to be chatter
        self._within_line = False
        self.broken = False

    def new_text(self) -> bytes:
        """What has come since the last call, cleaned; a line that is not finished may come in parts."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._offset)
                data = log.read(1 << 20)
        except OSError:
            return b""
        self._offset += len(data)
        *lines, last = (self._held + data).split(b"\n")
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


def last_lines(path: Path, count: int = 20) -> list[str]:
    """The end of a log without chatter and blank lines; of progress that overwrote itself the last state."""
    data = b""
    with contextlib.suppress(OSError), path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        data = log.read()
    lines = [line for line in data.split(b"\n") if line.strip() and not _CHATTER.match(line)]
    return [line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace") for line in lines[-count:]]
