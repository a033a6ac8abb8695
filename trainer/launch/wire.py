"""Messages between processes of a job: a JSON object a line, over a stream socket; and how long they are awaited."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any

Message = dict[str, Any]

TIME_SCALE_VARIABLE = "RUN_TRAINER_TIME_SCALE"
"""Environment variable with a factor for the launcher's own grace periods and time-outs, for tests: 0.25 for a quarter.
"""

_MAX_LINE_BYTES = 1 << 20  # no message of this launcher is longer


class Channel:
    """One end of a connection. Never blocks: what cannot be sent at once counts as a lost connection.

    Attributes:
        closed: Whether the other end is gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._rest = b""
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message; to a closed channel, nothing."""
        if self.closed:
            return
        line = json.dumps(message).encode("ascii") + b"\n"
        try:
            if self._socket.send(line) != len(line):
                self.closed = True
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """What has arrived since the last call; may close the channel. Lines that are no messages are left out."""
        while not self.closed:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.closed = not data
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            self.closed = True
        return [message for message in map(_parsed, lines) if message is not None]

    def close_gracefully(self, seconds: float) -> None:
        """Closes once the other end has read all that was sent: for that, its own last messages must be read too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(seconds)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self._socket.recv(1 << 16):
                pass
        self.close()

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()


def _parsed(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def scaled(seconds: float) -> float:
    """A grace period or time-out of the launcher, shorter where a test says so."""
    return seconds * float(os.environ.get(TIME_SCALE_VARIABLE) or 1)


def wakeup_pipe() -> tuple[int, int]:
    """Both ends of a pipe for `signal.set_wakeup_fd`, by which a signal ends a wait; neither end blocks."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends
