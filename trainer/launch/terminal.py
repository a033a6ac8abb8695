"""The output that the user sees: that of one worker, what the launcher waits for, and the launcher's own lines.

On a terminal the worker gets a pseudo-terminal, as if it ran there alone: its output goes through a named pipe to the
launcher, and as plain text to its log. Otherwise the launcher follows the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

# ECMA-48: control sequences (colours, cursor), operating system commands (titles), and short escapes (character sets).
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\-~])")
# What is drawn over, or erased: up to the last return to the beginning of the line, or erasure of what is before.
_ERASED = re.compile(rb".*(?:\r|\x1b\[[12]K)", re.DOTALL)
_READS = 64
"""Reads at once of 4 KiB or more from a terminal: more than the system holds back of the output of a worker that ended.
The agent has other work, too, when a worker prints without end."""


class PlainText:
    """Converts terminal output, in any pieces, into the lines that remain visible, without colours."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Takes further output; returns the lines that it completes."""
        *lines, rest = (self._rest + data).split(b"\n")
        # Of a line that is drawn again and again only the last drawing counts.
        self._rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        return b"".join(self._final(line) + b"\n" for line in lines)

    def flush(self) -> bytes:
        """Returns the last line if it has no end."""
        text = self._final(self._rest)
        self._rest = b""
        if text.strip():
            return text + b"\n"
        return b""

    @staticmethod
    def _final(line: bytes) -> bytes:
        return _ESCAPES.sub(b"", _ERASED.sub(b"", line.rstrip(b"\r")))


class WorkerTerminal:
    """The master's side of a worker's terminal of a given size. The log gets its plain text.

    What does not fit into the launcher's named pipe while it is full is dropped there.
    """

    def __init__(self, log: BinaryIO, pipe: str, size: tuple[int, int]) -> None:
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        settings = termios.tcgetattr(self.slave)
        settings[1] &= ~termios.OPOST  # line ends are made by the user's terminal
        termios.tcsetattr(self.slave, termios.TCSANOW, settings)
        self._log = log
        self._plain = PlainText()
        self._pipe = None
        with contextlib.suppress(OSError):
            self._pipe = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        self.resize(size)

    def resize(self, size: tuple[int, int]) -> None:
        """Sets the columns and lines of the worker's terminal."""
        columns, lines = size
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def pump(self) -> bool:
        """Passes on output that has arrived, up to a limit; returns whether more may come."""
        try:
            for _ in range(_READS):
                data = os.read(self.master, 1 << 16)
                if not data:
                    return False
                with contextlib.suppress(OSError):  # a full disk stops no worker
                    self._log.write(self._plain.feed(data))
                if self._pipe is not None:
                    with contextlib.suppress(OSError):
                        os.write(self._pipe, data)
        except BlockingIOError:
            return True
        except OSError:  # nobody has the worker's side open any more
            return False
        return True

    def close(self) -> None:
        """Passes on the remaining output after the worker has ended."""
        self.pump()
        with contextlib.suppress(OSError):
            self._log.write(self._plain.flush())
        self._log.close()
        os.close(self.master)
        if self._pipe is not None:
            os.close(self._pipe)


def terminal_size() -> tuple[int, int]:
    """Returns columns and lines of standard output; 80 and 24 if it is not a terminal."""
    try:
        columns, lines = os.get_terminal_size(1)
    except OSError:
        return 80, 24
    return columns or 80, lines or 24


# ---- logs as they grow ----------------------------------------------------------------------------------------------

# What MindSpore says while a cluster forms, some dozen lines a worker. The logs keep it.
_CHATTER = re.compile(
    rb"\[(?:INFO|WARNING)\] \w+\([^)]*\):[^\[]*\[mindspore/ccsrc/"
    rb"(?:(?:include/)?cluster|plugin/cpu/res_manager/collective|runtime/hardware_abstract/collective)/"
)
_READ_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16


class LogTail:
    """Copies new output of a worker, which `read` returns, to the terminal, without MindSpore's cluster messages."""

    def __init__(self, read: Callable[[], bytes], terminal: BinaryIO) -> None:
        self._read = read
        self._terminal = terminal
        self._unprinted = b""  # the beginning of a line that may turn out to be chatter
        self._within_line = False
        self.broken = False

    def new_text(self) -> bytes:
        """Returns the cleaned output since the last call; an unfinished line may come in parts."""
        return self._clean(self._read())

    def rest(self) -> Iterator[bytes]:
        """Yields the remaining cleaned output of a worker that has ended, with a last line that is unfinished."""
        while data := self._read():
            yield self._clean(data)
        if not _CHATTER.match(self._unprinted):
            yield self._unprinted

    def _clean(self, data: bytes) -> bytes:
        *lines, last = (self._unprinted + data).split(b"\n")
        shown = b""
        for line in lines:
            if self._within_line or not _CHATTER.match(line):
                shown += line + b"\n"
            self._within_line = False
        self._unprinted = b""
        if self._within_line or (last and not last.startswith(b"[")):
            shown += last
            self._within_line = True
        else:
            self._unprinted = last
        return shown

    def copy(self, text: bytes) -> None:
        """Writes to the terminal, until nobody reads it any more."""
        if text and not self.broken:
            try:
                self._terminal.write(text)
                self._terminal.flush()
            except (OSError, ValueError):
                self.broken = True


def tail_file(path: Path) -> Callable[[], bytes]:
    """Returns a function that reads what was appended to a file since its last call; the file need not exist yet."""
    offset = 0

    def read() -> bytes:
        """Returns at most `_READ_BYTES` bytes that were appended since the last call."""
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


def tail_pipe(path: Path) -> Callable[[], bytes]:
    """Makes a named pipe; returns a function that reads what came through it since its last call."""
    os.mkfifo(path, 0o600)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # stays open: without a writer, reading would find the end

    def read() -> bytes:
        """Returns at most `_READ_BYTES` bytes that are in the pipe."""
        with contextlib.suppress(BlockingIOError):
            return os.read(reading, _READ_BYTES)
        return b""

    return read


def last_lines(path: Path, count: int = 20) -> list[str]:
    """Returns the end of a log without blank lines and cluster messages; of a progress line the last state."""
    data = b""
    with contextlib.suppress(OSError), path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        data = log.read()
    lines = [line for line in data.split(b"\n") if line.strip() and not _CHATTER.match(line)]
    return [printable(line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")) for line in lines[-count:]]


def printable(text: str) -> str:
    """Removes what acts on a terminal from a line: escape sequences, control characters, changes of direction."""
    plain = _ESCAPES.sub(b"", text.encode("utf-8", "replace")).decode("utf-8", "replace")
    spaced = (" " if sign.isspace() else sign for sign in plain)
    return "".join(filter(str.isprintable, spaced))


# ---- the launcher's terminal -----------------------------------------------------------------------------------------

_CLEAR_LINE = "\r\x1b[K"


class Screen:
    """The launcher's standard output and standard error, on a terminal or not.

    Args:
        drawn: Whether the followed worker has a terminal of its own, on which it may draw.
    """

    def __init__(self, follower: LogTail, drawn: bool = False) -> None:
        self._follower = follower
        self._drawn = drawn
        self._waiting = ""
        self._spoke = False

    def update(self, started: int, workers: int, seconds: float, quiet: bool) -> None:
        """Copies the worker's new output. Before the first output it shows what is waited for, unless `quiet`.

        Args:
            started, workers: Number of running workers of this host, and of all its workers.
            seconds: Seconds since the job began.
        """
        if text := self._follower.new_text():
            self._spoke = True
            self._show_waiting("")
        self._follower.copy(text)
        if self._spoke:
            return
        if quiet:
            self._show_waiting("")
        elif started < workers:
            self._show_waiting(f"starting the workers: {started} of {workers} run, {seconds:.0f} s")
        else:
            self._show_waiting(f"{workers} workers load MindSpore and find each other, {seconds:.0f} s")

    def print(self, lines: list[str]) -> None:
        """Prints lines of the launcher; on a terminal it first clears the line that is drawn there."""
        self._waiting = ""
        clear = ""
        if sys.stderr.isatty():
            clear = _CLEAR_LINE
        for line in lines:
            self._write(f"{clear}{line}\n")

    def close(self) -> None:
        """Copies the rest of the worker's output, after its end, and shows the cursor again."""
        self._show_waiting("")
        for text in self._follower.rest():
            self._follower.copy(text)
        if self._drawn:  # a worker that was killed while drawing leaves the cursor hidden
            self._follower.copy(b"\x1b[?25h")

    def _show_waiting(self, text: str) -> None:
        if text != self._waiting and sys.stderr.isatty():
            self._waiting = text
            self._write(f"{_CLEAR_LINE}{text}")

    @staticmethod
    def _write(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that was closed is no reason to leave the workers
            sys.stderr.write(text)
            sys.stderr.flush()
