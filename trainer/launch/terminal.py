"""A terminal of its own for the worker that the user follows, so that it draws its progress as it does alone.

Everything goes on to the launcher as it is, through a named pipe, and to the log in its final form: a line that was
drawn again and again is there once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path
from typing import BinaryIO

# Control sequences (colours, cursor), operating system commands (titles), and two-character escapes.
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_ERASED = re.compile(rb".*(?:\r|\x1b\[[012]?K)", re.DOTALL)

SHOW_CURSOR = b"\x1b[?25h"


class PlainText:
    """Takes a terminal's output in any pieces; gives the lines that stay on it, without colours."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        *lines, rest = (self._rest + data).split(b"\n")
        # Of a line that is drawn again and again only the last drawing counts.
        self._rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        return b"".join(self._final(line) + b"\n" for line in lines)

    def end(self) -> bytes:
        """The last line, where it has no end."""
        text, self._rest = self._final(self._rest), b""
        return text + b"\n" if text.strip() else b""

    @staticmethod
    def _final(line: bytes) -> bytes:
        return _ESCAPES.sub(b"", _ERASED.sub(b"", line.rstrip(b"\r")))


class WorkerTerminal:
    """The master's side of a worker's terminal.

    Args:
        log: Gets the plain text.
        pipe: Path of the launcher's named pipe; what does not fit while it is busy is dropped, as it is in the log.
        size: Columns and lines.
    """

    def __init__(self, log: BinaryIO, pipe: str, size: tuple[int, int]) -> None:
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        settings = termios.tcgetattr(self.slave)
        settings[1] &= ~termios.OPOST  # line ends are made by the user's terminal
        termios.tcsetattr(self.slave, termios.TCSANOW, settings)
        self._log, self._plain, self._pipe = log, PlainText(), None
        with contextlib.suppress(OSError):
            self._pipe = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        self.resize(size)

    def fileno(self) -> int:
        return self.master

    def resize(self, size: tuple[int, int]) -> None:
        columns, lines = size
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def started(self) -> None:
        """The worker has its side now: with its end the terminal ends."""
        os.close(self.slave)

    def pump(self) -> bool:
        """Passes on what is there; whether more may come."""
        try:
            while data := os.read(self.master, 1 << 16):
                with contextlib.suppress(OSError):  # a full disk stops no worker
                    self._log.write(self._plain.feed(data))
                if self._pipe is not None:
                    with contextlib.suppress(OSError):
                        os.write(self._pipe, data)
        except BlockingIOError:
            return True
        except OSError:  # nobody has the worker's side open any more
            pass
        return False

    def close(self) -> None:
        """Passes on the rest; the worker has ended."""
        self.pump()
        with contextlib.suppress(OSError):
            self._log.write(self._plain.end())
        self._log.close()
        os.close(self.master)
        if self._pipe is not None:
            os.close(self._pipe)


def make_pipe(path: Path) -> int:
    """Makes a named pipe and opens it for reading, without waiting for a writer.

    Returns:
        Its descriptor. A second one, for writing, stays open in this process: no writer is no end of the text.
    """
    os.mkfifo(path, 0o600)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    return reading


def terminal_size(descriptor: int) -> tuple[int, int]:
    """Columns and lines of a terminal; 80 and 24 of anything else."""
    try:
        columns, lines = os.get_terminal_size(descriptor)
    except OSError:
        return 80, 24
    return columns or 80, lines or 24
