"""Messages between processes of a job: a JSON object a line, over a stream socket."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

Message = dict[str, Any]

_MAX_LINE_BYTES = 1 << 20  # nobody of ours says more at once


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

    def say_goodbye(self, seconds: float) -> None:
        """Closes so that the other end gets all that was sent: what it has still sent itself must be read for that."""
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
