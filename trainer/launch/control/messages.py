"""Messages between launchers: each is signed with the secret of the job, and fits a schema.

Each side begins with a nonce; the key of the connection derives from the secret and both nonces. A message is a line
with its content and the HMAC-SHA256 of all contents that were sent in its direction. So it can be neither forged,
changed, repeated nor moved to another connection; it is not encrypted. `multiprocessing.connection` authenticates only
the beginning of a connection: others could add messages later. It also waits for the rest of half a message.
"""

from __future__ import annotations

import hmac
import re
import secrets
import signal
import socket
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.launch.terminal import printable
from trainer.launch.wire import Lines

LONGEST_LINE = 2000
_MOST_LINES = 100
_GREETING = re.compile(rb"run_trainer-3 ([0-9a-f]{32})")
_MAX_LINE_BYTES = 1 << 20  # of a node: a report of 100 lines of 2000 characters, each at most 6 bytes in JSON
_MAX_STRANGER_BYTES = 1 << 10

Line = Annotated[str, Field(max_length=LONGEST_LINE), AfterValidator(printable)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class NodeMessage(BaseModel):
    """A message between launchers, or an event for the supervisor of a node.

    Attributes:
        kind: hello: a node calls; welcome: node 0 accepts it, and the line may name the checkpoint to continue from;
            later, refused: node 0 does not accept it, and the line says why; start: all nodes are connected; beat: a
            heartbeat; moved: a heartbeat, and a rank made progress since the last one; failed: a node's part of the job
            failed; stop: a launcher received a signal, which is for all workers; done: the workers of the node, and
            from node 0 of all nodes, have ended well; note: lines to print, never sent.
        number: The exit code of a failure, or the signal.
        attempt: How often the job has been restarted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: Literal["hello", "welcome", "later", "refused", "start", "beat", "moved", "failed", "stop", "done", "note"]
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


def parse(data: bytes) -> NodeMessage | None:
    """Parses the message of a line; returns None for anything else."""
    try:
        return NodeMessage.model_validate_json(data)
    except ValidationError:
        return None


def failure_message(exit_code: int, lines: Sequence[str]) -> NodeMessage:
    """Returns the message about a failure; long reports are cut."""
    return NodeMessage(kind="failed", number=exit_code, lines=[line[:LONGEST_LINE] for line in lines[:_MOST_LINES]])


class SignedChannel(Lines):
    """One end of a connection between launchers; `closed` means that the other end is gone or does not know the secret.

    Args:
        called: Whether the other end has called this one, from `address`.

    Attributes:
        has_key: Whether the other end has sent its nonce, which needs no secret.
        heard_at: When the last message arrived, or the call.
        is_done: Whether the workers there have ended.
    """

    def __init__(self, connection: socket.socket, secret: bytes, called: bool, address: str = "") -> None:
        super().__init__(connection, _MAX_STRANGER_BYTES)
        self.address = address
        self.has_key = False
        self.heard_at = 0.0
        self.is_done = False
        self._secret = secret
        self._called = called
        self._nonce = secrets.token_hex(16).encode("ascii")
        self._macs: dict[bool, hmac.HMAC] = {}  # of all that was sent by the caller (True), and to it
        self._unsent: list[NodeMessage] = []
        self.send_line(b"run_trainer-3 " + self._nonce)

    def send(self, message: NodeMessage) -> None:
        """Sends a message, once the nonce of the other end has arrived."""
        if not self.has_key:
            self._unsent.append(message)
            return
        data = message.model_dump_json(exclude_defaults=True).encode("utf-8")
        self.send_line(self._sign(data, from_caller=not self._called) + b" " + data)

    def receive(self) -> list[NodeMessage]:
        """Returns what has arrived since the last call; a line that is not a valid message closes the channel."""
        lines = self.receive_lines()
        if lines and not self.has_key:
            self._derive_key(lines.pop(0))
        messages: list[NodeMessage] = []
        for line in lines:
            mac, _, data = line.partition(b" ")
            message = None
            if self.has_key and hmac.compare_digest(mac, self._sign(data, from_caller=self._called)):
                message = parse(data)
            if message is None:
                self.close()
                break
            self.max_line_bytes = _MAX_LINE_BYTES
            messages.append(message)
        return messages

    def _derive_key(self, greeting: bytes) -> None:
        match = _GREETING.fullmatch(greeting)
        if match is None:
            self.close()
            return
        nonces = [self._nonce, match[1]]  # the caller's first
        if self._called:
            nonces.reverse()
        key = hmac.digest(self._secret, b"run_trainer launchers " + b" ".join(nonces), "sha256")
        self._macs = {True: hmac.new(key, b">", "sha256"), False: hmac.new(key, b"<", "sha256")}
        self.has_key = True
        for message in self._unsent:
            self.send(message)

    def _sign(self, data: bytes, from_caller: bool) -> bytes:
        """Returns the code of all that one end has sent, in hexadecimal; this content is the last."""
        mac = self._macs[from_caller]
        mac.update(data + b"\n")
        return mac.hexdigest().encode("ascii")
