"""Messages between launchers: each is signed with the secret of the job, and fits a schema.

Each side begins with a nonce. A message is a line with its content and the HMAC-SHA256, under the secret, of both
nonces and all contents that were sent in its direction. So it can be neither forged, changed, repeated nor moved to
another connection; it is not encrypted. `multiprocessing.connection` authenticates only the beginning of a connection:
others could add messages later. It also waits for the rest of half a message.
"""

from __future__ import annotations

import hmac
import re
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from trainer.launch.terminal import printable
from trainer.launch.wire import Lines, scale_timeout

LOST_SECONDS = 5.0
LONGEST_LINE = 2000
_MOST_LINES = 100
_GREETING = re.compile(rb"run_trainer-4 [0-9a-f]{32}")
_MAX_LINE_BYTES = 1 << 20  # of a node: a report of 100 lines of 2000 characters, each at most 6 bytes in JSON
_MAX_STRANGER_BYTES = 1 << 10

Line = Annotated[str, Field(max_length=LONGEST_LINE), AfterValidator(printable)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class NodeMessage(BaseModel):
    """A message between launchers, or an event for the supervisor of a node.

    Attributes:
        kind: hello: a node calls; welcome: node 0 accepts it, and the line may name the checkpoint to continue from;
            refused: node 0 does not, and the line says why; start: all nodes are connected; beat: a heartbeat; moved: a
            heartbeat, and a rank made progress since the last one; failed: a node's part of the job failed; stop: a
            launcher received a signal, which is for all workers; done: the workers of the node, and from node 0 of all
            nodes, have ended well. Never sent are lost: the connection has ended; note: lines to print.
        number: The exit code of a failure, or the signal.
        attempt: How often the job has been restarted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: Literal["hello", "welcome", "refused", "start", "beat", "moved", "failed", "stop", "done", "lost", "note"]
    node: Count = 0
    worker_num: Count = 0
    attempt: Count = 0
    number: Annotated[int, Field(ge=0, le=255)] = 0
    lines: Annotated[list[Line], Field(max_length=_MOST_LINES)] = []

    @model_validator(mode="after")
    def _check_number(self) -> NodeMessage:
        if self.kind == "failed" and not self.number:
            raise ValueError("a failure has an exit code")
        if self.kind == "stop" and self.number not in (signal.SIGINT, signal.SIGTERM):
            raise ValueError("it is not a signal to end")
        return self


def failure_message(exit_code: int, lines: Sequence[str]) -> NodeMessage:
    """Returns the message about a failure; long reports are cut."""
    return NodeMessage(kind="failed", number=exit_code, lines=[line[:LONGEST_LINE] for line in lines[:_MOST_LINES]])


class SignedChannel(Lines):
    """One end of a connection between launchers; `closed` means that the other end is gone or a stranger.

    Args:
        called: Whether the other end has called this one.

    Attributes:
        has_nonce: Whether the other end has sent its nonce, which needs no secret.
    """

    def __init__(self, connection: socket.socket, secret: bytes, called: bool) -> None:
        super().__init__(connection, _MAX_STRANGER_BYTES)
        self.has_nonce = False
        self._heard_at = time.monotonic()
        self._greeting = b"run_trainer-4 " + secrets.token_hex(16).encode("ascii")
        self._sent = hmac.new(secret, b"called: %d " % called, "sha256")  # the code of all that this end has sent
        self._received = hmac.new(secret, b"called: %d " % (not called), "sha256")
        self._unsent: list[NodeMessage] = []
        self.send_line(self._greeting)

    def send(self, *messages: NodeMessage) -> None:
        """Sends messages, once the nonce of the other end has arrived."""
        self._unsent += messages
        while self.has_nonce and self._unsent:
            data = self._unsent.pop(0).model_dump_json(exclude_defaults=True).encode("utf-8")
            self.send_line(sign(self._sent, data) + b" " + data)

    def receive(self) -> list[NodeMessage]:
        """Returns what has arrived since the last call; a line that is not a valid message closes the channel."""
        messages: list[NodeMessage] = []
        try:
            for line in self.receive_lines():
                if self.has_nonce:
                    mac, _, data = line.partition(b" ")
                    if not hmac.compare_digest(mac, sign(self._received, data)):
                        raise ValueError("not from a launcher with the secret, or not the next of its messages")
                    messages.append(NodeMessage.model_validate_json(data))
                    self.max_line_bytes = _MAX_LINE_BYTES
                    self._heard_at = time.monotonic()
                elif _GREETING.fullmatch(line):  # both codes begin with both nonces, that of the sender first
                    sign(self._sent, self._greeting + line)
                    sign(self._received, line + self._greeting)
                    self.has_nonce = True
                    self.send()
                else:
                    raise ValueError("not a launcher")
        except ValueError:
            self.close()
        return messages

    def is_lost(self, now: float) -> bool:
        """Returns whether the connection has ended, or brought no message for too long."""
        return self.closed or now - self._heard_at > scale_timeout(LOST_SECONDS)


def sign(mac: hmac.HMAC, data: bytes) -> bytes:
    """Returns the code, in hexadecimal, of all that was signed with `mac`; this content is the last."""
    mac.update(data + b"\n")
    return mac.hexdigest().encode("ascii")
