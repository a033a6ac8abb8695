"""Connections between launchers: every message is signed with the secret of the job, and fits a schema.

Each side begins with a nonce; the key of the connection derives from the secret and both nonces. A message is a line
with its content and the HMAC-SHA256 of all contents that were sent in its direction. So it can be neither forged,
changed, repeated nor moved to another connection; it is not encrypted. `multiprocessing.connection` authenticates only
the beginning of a connection: others could add messages later. It also waits for the rest of half a message.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket

from trainer.launch.control.messages import NodeMessage, parse
from trainer.launch.wire import Lines

_GREETING = re.compile(rb"run_trainer-3 ([0-9a-f]{32})")
_MAX_LINE_BYTES = 1 << 20  # of a node: a report of 100 lines of 2000 characters, each at most 6 bytes in JSON
_MAX_STRANGER_BYTES = 1 << 10


class SignedChannel(Lines):
    """One end of a connection between launchers; `closed` means that the other end is gone or does not know the secret.

    Args:
        called: Whether the other end has called this one.

    Attributes:
        has_key: Whether the other end has sent its nonce, which needs no secret.
    """

    def __init__(self, connection: socket.socket, secret: bytes, called: bool) -> None:
        super().__init__(connection, _MAX_LINE_BYTES)
        if called:
            self.max_line_bytes = _MAX_STRANGER_BYTES
        self.has_key = False
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
