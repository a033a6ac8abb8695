"""Connections between the ranks of a job on CPUs, one for each pair. Pure Python.

MindSpore's collectives on a CPU cannot do what the kinds of parallelism need: a group of some of the ranks has
AllReduce only, sums are right in float32 alone, there is no all-to-all. So the ranks have connections of their own:
Unix sockets on one host, TCP over several. Who connects must know the key of the job, which rank 0 makes: nobody else
can send.

On one host running Linux the bytes themselves go through memory that both ranks have: a socket takes twice the time. It
has no name, and the system takes it back with the last of its processes, however these end.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import secrets
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from trainer.errors import RunError

_NONCE_BYTES = 32
_RANK_BYTES = 4
_MAC_BYTES = 32
_BUFFER_BYTES = 4 << 20  # what the system holds for a pair at most; it may allow less
_RING_BYTES = 1 << 20  # of memory that two ranks share, for each direction
_PORTIONS = 4  # of a ring: what is written is said after each, what is read, too
_NOTE = struct.Struct("<q")
_HANDSHAKE_SECONDS = 10
_NOTE_SECONDS = 3.0

Share = Callable[[bytes], list[bytes]]
"""Gives every rank's bytes, in the order of ranks: how ranks tell each other their addresses."""


class Link(Protocol):
    """The way to another rank."""

    socket: socket.socket

    def advance(self, sends: list[memoryview], receives: list[memoryview]) -> int:
        """Sends and receives what is possible now, and takes it out of both lists, whose buffers are not empty.

        Returns:
            The events of the socket to wait for; 0 when all is done.

        Raises:
            OSError: The other end is closed.
        """


class SocketLink:
    """All bytes go through the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def advance(self, sends: list[memoryview], receives: list[memoryview]) -> int:
        with contextlib.suppress(BlockingIOError):
            while receives:
                count = self.socket.recv_into(receives[0])
                if not count:
                    raise ConnectionResetError
                _drop(receives, count)
        with contextlib.suppress(BlockingIOError):
            while sends:
                _drop(sends, self.socket.send(sends[0]))
        return select.POLLOUT * bool(sends) | select.POLLIN * bool(receives)


class MemoryLink:
    """The bytes go through memory that both ends have, a ring for each direction. The socket carries notes: how many
    bytes an end has written, or as a negative number how many it has read, so that their place is free again.

    Args:
        memory: The rings: from the end that is `first` to the other one, and back.
    """

    def __init__(self, connection: socket.socket, memory: mmap.mmap, first: bool) -> None:
        self.socket = connection
        self.size = len(memory) // 2
        rings = memoryview(memory)[: self.size], memoryview(memory)[self.size :]
        if first:
            self.outgoing, self.incoming = rings
        else:
            self.outgoing, self.incoming = rings[::-1]
        # of `outgoing`
        self.write_at = 0
        self.free = self.size
        # of `incoming`
        self.read_at = 0
        self.unread = 0
        self.unsaid = 0  # bytes read of which the other end knows nothing
        # to be sent; received, but for their end
        self.notes = bytearray()
        self.heard = bytearray()
        self.ended = False  # the other end is closed

    def advance(self, sends: list[memoryview], receives: list[memoryview]) -> int:
        self._listen()
        while receives and self.unread:
            count = min(len(receives[0]), self.unread, self.size - self.read_at)
            receives[0][:count] = self.incoming[self.read_at : self.read_at + count]
            self.read_at = (self.read_at + count) % self.size
            self.unread = self.unread - count
            self._say_read(count)
            _drop(receives, count)
        if self.ended and (sends or receives):  # what it has written before is read
            raise ConnectionResetError
        while sends and self.free:
            count = min(len(sends[0]), self.free, self.size - self.write_at, self.size // _PORTIONS)
            self.outgoing[self.write_at : self.write_at + count] = sends[0][:count]
            self.write_at = (self.write_at + count) % self.size
            self.free = self.free - count
            self._say(count)  # at once: the other end reads while this one writes
            _drop(sends, count)
        self._say(0)
        return select.POLLOUT * bool(self.notes) | select.POLLIN * bool(sends or receives)

    def _say_read(self, count: int) -> None:
        """Not each time: so much is always free in the end that the other one never waits in vain."""
        self.unsaid += count
        if self.unsaid >= self.size // _PORTIONS:
            self._say(-self.unsaid)
            self.unsaid = 0

    def _say(self, count: int) -> None:
        if count:
            self.notes += _NOTE.pack(count)
        try:
            while self.notes:
                del self.notes[: self.socket.send(self.notes)]
        except BlockingIOError:
            pass
        except OSError:
            if count > 0:
                raise
            self.notes.clear()  # nobody is there who waits for what is read

    def _listen(self) -> None:
        """Takes in the notes that are there."""
        try:
            while heard := self.socket.recv(_NOTE.size * 512):
                self.heard += heard
            self.ended = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.ended = True
        whole = len(self.heard) - len(self.heard) % _NOTE.size
        for (count,) in _NOTE.iter_unpack(self.heard[:whole]):
            self.unread += max(count, 0)
            self.free -= min(count, 0)
        del self.heard[:whole]


class Connections:
    """This rank's connections to other ranks of the job.

    Args:
        rank: Of this process.
        sockets: Connected sockets by the rank at their other end.
        memories: That which it shares with some of them, see `MemoryLink`.
    """

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], memories: Mapping[int, mmap.mmap] | None = None
    ) -> None:
        self.rank = rank
        self.sockets = dict(sockets)
        self.memories = dict(memories or {})
        for each in self.sockets.values():
            each.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                each.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
            if each.family != socket.AF_UNIX:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.links: dict[int, Link] = {
            other: MemoryLink(one, self.memories[other], rank < other) if other in self.memories else SocketLink(one)
            for other, one in self.sockets.items()
        }

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
        poll = select.poll()
        by_descriptor = {}
        for rank in {*outgoing, *incoming}:
            work = [[each for each in buffers.get(rank, ()) if len(each)] for buffers in (outgoing, incoming)]
            if any(work) and (events := self._advance(rank, *work)):
                descriptor = self.sockets[rank].fileno()
                by_descriptor[descriptor] = rank, events, work
                poll.register(descriptor, events)
        while by_descriptor:
            for descriptor, _ in poll.poll():
                rank, events, work = by_descriptor[descriptor]
                # The end of a connection is an event too: reading or writing says so.
                left = self._advance(rank, *work)
                if not left:
                    poll.unregister(descriptor)
                    del by_descriptor[descriptor]
                elif left != events:
                    poll.modify(descriptor, left)
                    by_descriptor[descriptor] = rank, left, work

    def _advance(self, rank: int, sends: list[memoryview], receives: list[memoryview]) -> int:
        try:
            return self.links[rank].advance(sends, receives)
        except OSError as error:
            raise connection_lost(f"rank {self.rank} lost its connection to rank {rank}") from error

    def close(self) -> None:
        for each in self.sockets.values():
            each.close()


def connection_lost(what: str) -> RunError:
    """The error of a rank that another one has left, after a while: the launcher then sees the end of the other one
    first, which is the cause, and not what follows from it."""
    time.sleep(_NOTE_SECONDS)
    return RunError(f"{what}, which has ended")


def _drop(buffers: list[memoryview], count: int) -> None:
    """Removes the first bytes of the first buffer, which has at least so many."""
    buffers[0] = buffers[0][count:]
    if not buffers[0]:
        del buffers[0]


def connect(
    rank: int, ranks: int, share: Share, on_one_host: bool, limit_seconds: float, *, memory: bool = True
) -> Connections:
    """Connects all ranks of a job; all of them call it. Without `memory` all bytes go through the sockets.

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
    return Connections(rank, connected, _share_memory(rank, connected) if memory and on_one_host else None)


def _share_memory(rank: int, connected: Mapping[int, socket.socket]) -> dict[int, mmap.mmap]:
    """Memory shared with other ranks of the host; without those where a system has none to share.

    The later rank of a pair makes it and sends its descriptor, with a byte that says whether there is one.
    """
    found: dict[int, mmap.mmap] = {}
    for other, connection in connected.items():
        if other < rank:
            descriptor = _new_memory()
            if descriptor is None:
                connection.sendall(b"-")
            else:
                socket.send_fds(connection, [b"+"], [descriptor])
                found[other] = _mapped(descriptor)
    for other, connection in connected.items():
        if other > rank:
            connection.settimeout(_HANDSHAKE_SECONDS)
            data, descriptors, *_ = socket.recv_fds(connection, 1, 1)
            if not data:
                raise RunError(f"rank {rank} lost its connection to rank {other} while they connected")
            if descriptors:
                found[other] = _mapped(descriptors[0])
    return found


def _new_memory() -> int | None:
    """A descriptor of it; None where the system has none."""
    try:
        descriptor = os.memfd_create("run_trainer")
    except (AttributeError, OSError):
        return None
    os.truncate(descriptor, 2 * _RING_BYTES)
    return descriptor


def _mapped(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 2 * _RING_BYTES)
    finally:
        os.close(descriptor)


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
