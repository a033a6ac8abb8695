"""The control ports: between launchers of several nodes, and between a launcher and its workers."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from pathlib import Path

from fuzz import Attempt, check
from pydantic import ValidationError

from fuzzing.mutate import changed_bytes, json_bytes
from trainer.errors import UserError
from trainer.launch.arguments import LaunchOptions
from trainer.launch.control.messages import NodeMessage, SignedChannel, failure_message, sign
from trainer.launch.control.nodes import NodeServer
from trainer.launch.wire import Channel, ListeningSocket

_SECRET = b"s" * 32
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RIGHT = (
    NodeMessage(kind="hello", node=1, worker_num=8), NodeMessage(kind="welcome", lines=[""]), NodeMessage(kind="beat"),
    NodeMessage(kind="done"), failure_message(1, ["a line", "\x1b[2J"]),
)  # fmt: skip


def _junk(rng: random.Random) -> bytes:
    how = rng.randrange(6)
    if how == 0:
        return b"[" * 200_000 + b"\n"
    if how == 1:
        return rng.randbytes(rng.choice((1, 100, 70_000))) + b"\n" * (rng.random() < 0.5)
    if how == 2:
        return b"a" * (2 << 20)
    if how == 3:
        return b"\n" * 5000
    return changed_bytes(json_bytes(json.loads(rng.choice(_RIGHT).model_dump_json()), rng), rng) + b"\n"


def _send(caller: socket.socket, data: bytes, read) -> None:
    """Sends as much as the other end takes, which reads between."""
    caller.setblocking(False)
    while data:
        try:
            data = data[caller.send(data[: 1 << 16]) :]
        except BlockingIOError:
            if not read():
                return
        except OSError:
            return


def _strangers(folder: Path) -> Attempt:
    """Tries a caller without the secret, or with a wrong use of it: no message is accepted, and the channel is
    closed."""

    def attempt(rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            called = rng.random() < 0.5
            channel = SignedChannel(ours, _SECRET, called=called)
            taken: list = []

            def read() -> bool:
                taken.extend(channel.receive())
                return not channel.closed

            if rng.random() < 0.5:
                _send(theirs, _junk(rng), read)
            else:  # a right start, then a message whose signature is of something else
                secret = _SECRET if rng.random() < 0.7 else b"t" * 32
                other = SignedChannel(theirs, secret, called=not called)
                read()
                other.receive()
                data = rng.choice(_RIGHT).model_dump_json().encode()
                wrong = changed_bytes(data, rng)
                mac = sign(other._sent, data)
                _send(theirs, mac + b" " + wrong.replace(b"\n", b" ") + b"\n", read)
                if wrong == data and secret == _SECRET:
                    return
            for _ in range(5):
                read()
            check(not taken, f"taken from a stranger: {taken}")
        raise UserError("refused", fix="none")

    return attempt


def _listener(folder: Path) -> Attempt:
    """Tries several callers at once: only the one with the secret is accepted, and each stranger is named at most
    once."""

    def attempt(rng: random.Random) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = NodeServer(
                options=LaunchOptions(worker_num=8, local_worker_num=4),
                listening=ListeningSocket(listening),
                secret=_SECRET,
                secret_path=folder / "secret",
            )
            address = listening.getsockname()
            callers = [socket.create_connection(address) for _ in range(rng.choice((1, 3)))]
            node = SignedChannel(socket.create_connection(address), _SECRET, called=False)
            node.send(_RIGHT[0])
            named: list[NodeMessage] = []

            def accept() -> None:
                events = server.poll(time.monotonic())
                named.extend(event for event in events if "called the control port" in str(event.lines))

            for caller in callers:
                for _ in range(2):
                    caller.setblocking(False)
                    try:
                        caller.send(_junk(rng)[:50_000])
                    except OSError:
                        pass
                    accept()
            end = time.monotonic() + 10
            while not server.links and time.monotonic() < end:
                node.receive()
                accept()
            check(list(server.links) == [1], f"nodes that came in: {server.links}")
            check(len(named) <= 1, f"strangers are named more than once: {named}")
            for one in (*callers, node, server):
                one.close()

    return attempt


def _messages(folder: Path) -> Attempt:
    """Messages with the right secret and the wrong content."""

    def attempt(rng: random.Random) -> None:
        data = json_bytes(json.loads(rng.choice(_RIGHT).model_dump_json()), rng)
        try:
            message = NodeMessage.model_validate_json(data)
        except ValidationError:
            raise UserError("refused", fix="none") from None
        read = json.loads(data)
        check(set(read) <= set(NodeMessage.model_fields), f"{data!r:.300}")
        lines = message.lines
        check(not any(_CONTROL.search(line) for line in lines), "control characters in a line")
        check(len(lines) <= 100 and all(len(line) < 20_000 for line in lines), "lines without a bound")

    return attempt


def _workers(folder: Path) -> Attempt:
    """Tries the pipe of a worker of this node, whose process may print anything into it."""

    def attempt(rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel = Channel(ours)
            taken: list = []

            def read() -> bool:
                taken.extend(channel.receive())
                return not channel.closed

            _send(theirs, _junk(rng), read)
            read()
            check(all(isinstance(message, dict) for message in taken), f"{taken}"[:300])

    return attempt


KINDS = {"strangers": _strangers, "listener": _listener, "messages": _messages, "workers": _workers}
