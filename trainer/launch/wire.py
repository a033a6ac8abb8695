"""Messages between the processes of a job on one host, one JSON object per line over a socket, and the scale of timers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

AgentMessage = dict[str, Any]

TIME_SCALE_VARIABLE = "RUN_TRAINER_TIME_SCALE"
"""Environment variable, for tests: a factor for the launcher's own grace periods and time-outs."""

_MAX_LINE_BYTES = 1 << 22  # of a command line: the system allows 2 MiB


class Lines:
    """One end of a connection that carries lines; `closed` means that the other end is gone. Never blocks.

    What cannot be sent at once closes the connection, and so does a line longer than `max_line_bytes`.
    """

    def __init__(self, connection: socket.socket, max_line_bytes: int) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._rest = b""
        self.max_line_bytes = max_line_bytes
        self.closed = False

    def fileno(self) -> int:
        """Returns the socket's file descriptor, as selectors need it."""
        return self._socket.fileno()

    def send_line(self, line: bytes) -> None:
        """Sends a line, passed without its end; a closed channel sends nothing."""
        if self.closed:
            return
        try:
            if self._socket.send(line + b"\n") != len(line) + 1:
                self.closed = True
        except OSError:
            self.closed = True

    def receive_lines(self) -> list[bytes]:
        """Returns the lines that have arrived since the last call, at most about four of the longest; may close the
        connection."""
        most = len(self._rest) + 4 * self.max_line_bytes
        while not self.closed and len(self._rest) < most:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.closed = not data
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if any(len(line) > self.max_line_bytes for line in (*lines, self._rest)):
            self._rest = b""
            self.closed = True
            return []
        return lines

    def close_gracefully(self, seconds: float) -> None:
        """Closes the connection once the other end has read all that was sent; for that its last messages must be read,
        too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(seconds)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self._socket.recv(1 << 16):
                pass
        self.close()

    def close(self) -> None:
        """Closes the connection at once."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()


class Channel(Lines):
    """One end of a connection between the launcher and an agent, which trust each other."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, _MAX_LINE_BYTES)

    def send(self, message: AgentMessage) -> None:
        """Sends a message as one line of JSON."""
        self.send_line(json.dumps(message).encode("ascii"))

    def receive(self) -> list[AgentMessage]:
        """Returns the messages that have arrived since the last call; may close the channel. Other lines are ignored.
        """
        messages = []
        for line in self.receive_lines():
            with contextlib.suppress(ValueError, RecursionError):
                messages.append(json.loads(line))
        return [message for message in messages if isinstance(message, dict)]


class ListeningSocket:
    """Accepts connections. Neither a caller's behaviour nor a lack of file descriptors is an error: callers wait.

    Attributes:
        starved: Whether connections wait that the system cannot open now. Then `sources` is empty, because waiting for
            them would return at once.
    """

    def __init__(self, listening: socket.socket) -> None:
        listening.listen(1024)
        listening.setblocking(False)
        self._socket = listening
        self.starved = False

    @property
    def sources(self) -> list[socket.socket]:
        if self.starved:
            return []
        return [self._socket]

    def accept(self, most: int = 1024) -> list[tuple[socket.socket, Any]]:
        """Returns at most `most` waiting connections, each with the address of its other end."""
        accepted: list[tuple[socket.socket, Any]] = []
        self.starved = False
        try:
            while len(accepted) < most:
                accepted.append(self._socket.accept())
        except BlockingIOError:
            pass
        except OSError as error:  # others are of a caller that is gone again
            self.starved = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        return accepted

    def close(self) -> None:
        self._socket.close()


def wait_for_data(sources: Iterable[int | Lines | socket.socket], seconds: float) -> None:
    """Waits until one of the sources can be read, at most so long."""
    with selectors.PollSelector() as selector:  # needs no file descriptor of its own
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        selector.select(seconds)


def scale_timeout(seconds: float) -> float:
    """Returns a grace period or time-out of the launcher, times the factor that tests set."""
    return seconds * float(os.environ.get(TIME_SCALE_VARIABLE) or 1)


def wakeup_pipe() -> tuple[int, int]:
    """Returns both ends of a pipe for `signal.set_wakeup_fd`, by which a signal ends a wait; neither end blocks."""
    return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
