"""Sockets between the ranks of a job on CPUs, one for each pair. Pure Python.

MindSpore's collectives on a CPU cannot do what the kinds of parallelism need: a group of some of the ranks has
AllReduce only, sums are right in float32 alone, there is no all-to-all. So the ranks have connections of their own:
Unix sockets on one host, TCP over several. Who connects must know the key of the job, which rank 0 makes: nobody else
can send.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainer.errors import RunError

_NONCE_BYTES, _RANK_BYTES, _MAC_BYTES = 32, 4, 32
_BUFFER_BYTES = 4 << 20  # what the system holds for a pair at most; it may allow less
_HANDSHAKE_SECONDS = 10
_NOTICE_SECONDS = 3.0

Share = Callable[[bytes], list[bytes]]
"""Gives every rank's bytes, in the order of ranks: how ranks tell each other their addresses."""


class Connections:
    """This rank's connections to other ranks of the job.

    Args:
        rank: Of this process.
        sockets: Connected sockets by the rank at their other end.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self.rank, self.sockets = rank, dict(sockets)
        self.one_at_a_time = threading.Lock()  # a compiled graph communicates in a thread of its own
        for each in self.sockets.values():
            each.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                each.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
            if each.family != socket.AF_UNIX:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(
        self, outgoing: Mapping[int, Sequence[memoryview]], incoming: Mapping[int, Sequence[memoryview]]
    ) -> None:
        """Sends and receives at once, so that no order among the ranks can block them.

        Args:
            outgoing: Buffers of bytes for each rank, sent one after the other.
            incoming: Writable buffers, filled with what each rank sends.

        Raises:
            RunError: Another rank has ended.
        """
        with self.one_at_a_time:
            self._exchange(outgoing, incoming)

    def _exchange(
        self, outgoing: Mapping[int, Sequence[memoryview]], incoming: Mapping[int, Sequence[memoryview]]
    ) -> None:
        sends = {rank: [each for each in buffers if len(each)] for rank, buffers in outgoing.items()}
        receives = {rank: [each for each in buffers if len(each)] for rank, buffers in incoming.items()}
        poll, by_descriptor = select.poll(), {}
        for rank in {*sends, *receives}:
            events = select.POLLOUT * bool(sends.get(rank)) | select.POLLIN * bool(receives.get(rank))
            if events:
                descriptor = self.sockets[rank].fileno()
                by_descriptor[descriptor] = rank, events
                poll.register(descriptor, events)
        while by_descriptor:
            for descriptor, _ in poll.poll():
                rank, events = by_descriptor[descriptor]
                # The end of a connection is an event too: reading or writing says so.
                left = self._advance(rank, sends.get(rank), receives.get(rank))
                if not left:
                    poll.unregister(descriptor)
                    del by_descriptor[descriptor]
                elif left != events:
                    poll.modify(descriptor, left)
                    by_descriptor[descriptor] = rank, left

    def _advance(self, rank: int, sends: list[memoryview] | None, receives: list[memoryview] | None) -> int:
        """Sends and receives what is possible now; returns the events to wait for."""
        connection = self.sockets[rank]
        try:
            with contextlib.suppress(BlockingIOError):
                while receives:
                    count = connection.recv_into(receives[0])
                    if not count:
                        raise ConnectionResetError
                    _drop(receives, count)
            with contextlib.suppress(BlockingIOError):
                while sends:
                    _drop(sends, connection.send(sends[0]))
        except OSError as error:
            raise lost(f"rank {self.rank} has lost rank {rank}") from error
        return select.POLLOUT * bool(sends) | select.POLLIN * bool(receives)

    def close(self) -> None:
        for each in self.sockets.values():
            each.close()


def lost(what: str) -> RunError:
    """The error of a rank that another one has left, after a while: the launcher then sees the end of the other one
    first, which is the cause, and not what follows from it."""
    time.sleep(_NOTICE_SECONDS)
    return RunError(f"{what}, which has ended")


def _drop(buffers: list[memoryview], count: int) -> None:
    """Removes the first bytes of the first buffer, which has at least so many."""
    buffers[0] = buffers[0][count:]
    if not buffers[0]:
        del buffers[0]


def connect(rank: int, ranks: int, share: Share, on_one_host: bool, limit_seconds: float) -> Connections:
    """Connects all ranks of a job; all of them call it.

    Raises:
        RunError: Another rank did not answer within the time limit.
    """
    key = share(secrets.token_bytes(32) if rank == 0 else b"")[0]
    with contextlib.ExitStack() as stack:
        listening, address = stack.enter_context(_listening(on_one_host))
        addresses = share(address)
        connected: dict[int, socket.socket] = {}
        deadline = time.monotonic() + limit_seconds
        for other in range(rank):
            connected[other] = _call(addresses[other], rank, other, key, deadline)
        while len(connected) < ranks - 1:
            _accept(listening, key, connected, rank, deadline)
        share(b"")  # nobody removes an address that another rank still needs
    return Connections(rank, connected)


@contextlib.contextmanager
def _listening(on_one_host: bool) -> Iterator[tuple[socket.socket, bytes]]:
    """A listening socket and its address for `_call`."""
    with contextlib.ExitStack() as stack:
        if on_one_host:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="run_trainer-"))  # of mode 700
            address: object = os.path.join(folder, "socket")
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(address)
            listening.listen(1024)
            name = os.fsencode(address)
        else:
            listening = stack.enter_context(socket.create_server((_own_address(), 0), backlog=1024))
            name = ":".join(map(str, listening.getsockname()[:2])).encode()
        yield listening, name


def _own_address() -> str:
    """The address of this host in the network in which the job's scheduler is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MS_SCHED_HOST", "127.0.0.1"), 9))  # sends nothing
        return probe.getsockname()[0]


def _call(address: bytes, rank: int, other: int, key: bytes, deadline: float) -> socket.socket:
    """Connects to a rank and proves to know the key: answers its nonce with the rank and their HMAC."""
    host, _, port = os.fsdecode(address).rpartition(":")
    connection = socket.socket(socket.AF_INET if host else socket.AF_UNIX)
    try:
        connection.settimeout(max(1.0, deadline - time.monotonic()))
        connection.connect((host, int(port)) if host else os.fsdecode(address))
        nonce = _receive(connection, _NONCE_BYTES)
        number = rank.to_bytes(_RANK_BYTES, "big")
        connection.sendall(number + hmac.digest(key, nonce + number, "sha256"))
        return connection
    except OSError as error:
        connection.close()
        raise RunError(f"rank {rank} cannot reach rank {other}: {error}") from error


def _accept(
    listening: socket.socket, key: bytes, connected: dict[int, socket.socket], rank: int, deadline: float
) -> None:
    """Adds the next connection to `connected` if it comes from a rank of the job; drops any other."""
    listening.settimeout(max(0.0, deadline - time.monotonic()) or 1e-3)
    try:
        connection, _ = listening.accept()
    except TimeoutError as error:
        raise RunError(f"no other rank has reached rank {rank} in time") from error
    try:
        connection.settimeout(_HANDSHAKE_SECONDS)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        number = _receive(connection, _RANK_BYTES)
        if hmac.compare_digest(_receive(connection, _MAC_BYTES), hmac.digest(key, nonce + number, "sha256")):
            connected[int.from_bytes(number, "big")] = connection
            return
    except OSError:
        pass
    connection.close()


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        data += part
    return data
