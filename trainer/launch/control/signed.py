"""Connections between launchers: every message is signed with the secret of the job, and fits a schema.

Each side begins with a nonce, from which and the secret both derive the key of the connection. A message is a line with
the HMAC-SHA256 (RFC 2104) of its direction, its number in that direction and its content: it can be neither forged,
changed, repeated nor moved to another connection. Contents are not secret and not encrypted. The authenticated
connections of `multiprocessing` sign nothing after their handshake, and wait for the rest of half a message.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
from collections import Counter
from dataclasses import dataclass

from trainer.launch.control.messages import NodeMessage, parse
from trainer.launch.wire import Lines, ListeningSocket, scale_timeout

_FIRST_LINE = re.compile(rb"run_trainer-2 ([0-9a-f]{32})")
_MAC_BYTES = 64  # in hexadecimal
_MAX_LINE_BYTES = 1 << 20  # of a node: a report of 100 lines of 2000 characters, each at most 6 bytes in JSON
_MAX_STRANGER_BYTES = 1 << 10
_HANDSHAKE_SECONDS = 5.0
_MOST_UNIDENTIFIED = 64
_MOST_WHEN_STARVED = 8  # where the launcher itself would have no file descriptor left
_MOST_NAMED = 20


class SignedChannel(Lines):
    """One end of a connection between launchers; `closed` means that the other end is gone or does not know the secret.

    Args:
        called: Whether the other end has called this one.
    """

    def __init__(self, connection: socket.socket, secret: bytes, called: bool) -> None:
        super().__init__(connection, _MAX_LINE_BYTES)
        if called:
            self.max_line_bytes = _MAX_STRANGER_BYTES
        self._secret = secret
        self._called = called
        self._nonce = secrets.token_hex(16).encode("ascii")
        self._key = b""  # until the other's nonce is there
        self._sent = 0
        self._received = 0
        self._unsent: list[NodeMessage] = []
        self.send_line(b"run_trainer-2 " + self._nonce)

    @property
    def greeted(self) -> bool:
        """Whether the other end has sent its nonce, which needs no secret."""
        return bool(self._key)

    def send(self, message: NodeMessage) -> None:
        """Sends a message, once the nonce of the other end has arrived."""
        if not self._key:
            self._unsent.append(message)
            return
        data = message.model_dump_json(exclude_defaults=True).encode("utf-8")
        self.send_line(self._mac(not self._called, self._sent, data) + b" " + data)
        self._sent += 1

    def receive(self) -> list[NodeMessage]:
        """Returns what has arrived since the last call; a line that is not a valid message closes the channel."""
        messages = []
        for line in self.receive_lines():
            if not self._key and self._take_nonce(line):
                continue
            data = line[_MAC_BYTES + 1 :]
            is_signed = hmac.compare_digest(line[:_MAC_BYTES], self._mac(self._called, self._received, data))
            message = None
            if self._key and is_signed:
                message = parse(data)
            if message is None:
                self.close()
                break
            self._received += 1
            self.max_line_bytes = _MAX_LINE_BYTES
            messages.append(message)
        return messages

    def _take_nonce(self, line: bytes) -> bool:
        match = _FIRST_LINE.fullmatch(line)
        if match is None:
            return False
        nonces = (self._nonce, match[1])  # the caller's first
        if self._called:
            nonces = (match[1], self._nonce)
        self._key = hmac.digest(self._secret, b"run_trainer launchers " + b" ".join(nonces), hashlib.sha256)
        for message in self._unsent:
            self.send(message)
        return True

    def _mac(self, from_caller: bool, number: int, data: bytes) -> bytes:
        direction = b"<"
        if from_caller:
            direction = b">"
        signed = direction + number.to_bytes(8, "big") + data
        return hmac.digest(self._key, signed, hashlib.sha256).hex().encode("ascii")


@dataclass(eq=False)
class _Caller:
    channel: SignedChannel
    address: str
    since: float

    @functools.cached_property
    def network(self) -> str:
        """Returns the network in which one caller can have all addresses: the address itself for IPv4, the /64 for
        IPv6."""
        address = self.address.partition("%")[0]
        if ":" in address:
            return str(ipaddress.ip_network(f"{address}/64", strict=False))
        return address


class ControlListener:
    """The control port, and the callers that have not yet proved that they know the secret."""

    def __init__(self, listening: socket.socket, secret: bytes) -> None:
        self._listening = ListeningSocket(listening)
        self._secret = secret
        self._callers: list[_Caller] = []
        self._named: set[str] = set()

    @property
    def sources(self) -> list[SignedChannel | socket.socket]:
        return [*self._listening.sources, *(caller.channel for caller in self._callers)]

    def accept(self, now: float) -> tuple[list[tuple[SignedChannel, NodeMessage]], list[str]]:
        """Returns nodes that have called, each with its hello, and the addresses of strangers, each of them once."""
        for connection, address in self._listening.accept(_MOST_UNIDENTIFIED):
            self._callers.append(_Caller(SignedChannel(connection, self._secret, True), str(address[0]), now))
        nodes: list[tuple[SignedChannel, NodeMessage]] = []
        waiting: list[_Caller] = []
        strangers: list[str] = []
        for caller in self._callers:
            messages = caller.channel.receive()
            if messages and messages[0].kind == "hello":
                nodes.append((caller.channel, messages[0]))
            elif messages or caller.channel.closed or now - caller.since > scale_timeout(_HANDSHAKE_SECONDS):
                strangers += self._drop(caller)
            else:
                waiting.append(caller)
        counts = Counter(caller.network for caller in waiting)
        # One of the network with most callers, and one without a nonce first: a flood keeps no other network out.
        most = _MOST_UNIDENTIFIED
        if self._listening.starved:
            most = _MOST_WHEN_STARVED
        while len(waiting) > most:
            worst = min(waiting, key=lambda caller: (-counts[caller.network], caller.channel.greeted))
            counts[worst.network] -= 1
            waiting.remove(worst)
            strangers += self._drop(worst)
        self._callers = waiting
        return nodes, strangers

    def _drop(self, caller: _Caller) -> list[str]:
        caller.channel.close()
        if caller.address in self._named or len(self._named) == _MOST_NAMED:
            return []
        self._named.add(caller.address)
        return [caller.address]

    def close(self) -> None:
        self._listening.close()
        for caller in self._callers:
            caller.channel.close()
