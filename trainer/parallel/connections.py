"""Connections between the ranks of a job on CPUs, one for each pair. Pure Python.

MindSpore's collectives on a CPU cannot do what parallelism needs: a group of some of the ranks has AllReduce only, sums
are right only in float32, there is no all-to-all. So the ranks connect to each other: by Unix sockets on one host, by
TCP over several. They tell each other their addresses through rank 0 (`Rendezvous`). Only processes that know the key
of the job, which rank 0 makes, can connect.

On one Linux host the bytes go through memory that both ranks share: a socket takes twice the time. The memory has no
name, and the system frees it when the last of its processes ends, even by a kill.
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
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import RunError
from trainer.parallel.world import address_of_node_0

_NONCE_BYTES = 32
_RANK_BYTES = 4
_MAC_BYTES = 32
_BUFFER_BYTES = 4 << 20  # the socket buffers that we ask for; the system may allow less
_RING_BYTES = 1 << 20  # shared memory for each direction between two ranks
_PORTIONS = 4  # of a ring: the ranks send a note after each portion that is written or read
_NOTE = struct.Struct("<q")
_HANDSHAKE_SECONDS = 10
_NOTE_SECONDS = 3.0
_HELLO = struct.Struct("<16sII")  # what a rank says to rank 0: a fixed word, its rank, the number of ranks
_WORD = b"run_trainer 1"
_WELCOME = b"+"
_UNWELCOME = b"-"
_HELLO_SECONDS = 2  # a rank says it as soon as it is connected
_RETRY_SECONDS = 0.02
_SEE_LOGS = "see the logs of the ranks; --cluster_time_out sets the limit"
_BACKLOG = 1024
_LENGTH_BYTES = 4
_LONGEST_BYTES = 1 << 20  # of what a rank shares at a rendezvous

Share = Callable[[bytes], list[bytes]]
"""Gathers the bytes of every rank, in the order of ranks: so ranks learn each other's addresses."""


class Link(Protocol):
    """A connection to another rank."""

    socket: socket.socket

    def advance(self, sends: list[memoryview], receives: list[memoryview]) -> int:
        """Sends and receives as much as is possible now, and removes it from both lists, whose buffers are not empty.

        Returns:
            The events of the socket to wait for; 0 when all is done.

        Raises:
            OSError: The other end is closed.
        """


class SocketLink:
    """A link that sends all bytes through a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def advance(self, sends: list[memoryview], receives: list[memoryview]) -> int:
        """Sends and receives as `Link.advance` describes."""
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
    """A link that sends bytes through shared memory, with a ring buffer for each direction.

    The socket carries notes: how many bytes an end has written, or as a negative number how many it has read, so that
    the other end may overwrite them.

    Args:
        memory: The two rings: from the end that is `first` to the other one, and back.
    """

    def __init__(self, connection: socket.socket, memory: mmap.mmap, first: bool) -> None:
        self.socket = connection
        self.size = len(memory) // 2
        rings = memoryview(memory)[: self.size], memoryview(memory)[self.size :]
        if first:
            self.outgoing, self.incoming = rings
        else:
            self.outgoing, self.incoming = rings[::-1]
        # positions and bytes in `outgoing`
        self.write_at = 0
        self.free = self.size
        # positions and bytes in `incoming`
        self.read_at = 0
        self.unread = 0
        self.unreported = 0  # bytes read since the last note about reading
        self.notes = bytearray()  # to be sent
        self.received_notes = bytearray()  # the last one may be incomplete
        self.ended = False  # the other end is closed

    def advance(self, sends: list[memoryview], receives: list[memoryview]) -> int:
        """Sends and receives as `Link.advance` describes."""
        self._receive_notes()
        while receives and self.unread:
            count = min(len(receives[0]), self.unread, self.size - self.read_at)
            receives[0][:count] = self.incoming[self.read_at : self.read_at + count]
            self.read_at = (self.read_at + count) % self.size
            self.unread = self.unread - count
            self._report_read(count)
            _drop(receives, count)
        if self.ended and (sends or receives):  # everything that it wrote before is read
            raise ConnectionResetError
        while sends and self.free:
            count = min(len(sends[0]), self.free, self.size - self.write_at, self.size // _PORTIONS)
            self.outgoing[self.write_at : self.write_at + count] = sends[0][:count]
            self.write_at = (self.write_at + count) % self.size
            self.free = self.free - count
            self._send_note(count)  # at once: the other end reads while this one writes
            _drop(sends, count)
        self._send_note(0)
        return select.POLLOUT * bool(self.notes) | select.POLLIN * bool(sends or receives)

    def _report_read(self, count: int) -> None:
        """Sends a note once a portion is read: the remaining free memory is enough for the other end to go on."""
        self.unreported += count
        if self.unreported >= self.size // _PORTIONS:
            self._send_note(-self.unreported)
            self.unreported = 0

    def _send_note(self, count: int) -> None:
        """Sends a note, unless it is 0, and the notes that could not be sent before."""
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
            self.notes.clear()  # the other end is closed: nobody waits for free memory

    def _receive_notes(self) -> None:
        """Reads the notes that have arrived."""
        try:
            while data := self.socket.recv(_NOTE.size * 512):
                self.received_notes += data
            self.ended = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.ended = True
        complete = len(self.received_notes) - len(self.received_notes) % _NOTE.size
        for (count,) in _NOTE.iter_unpack(self.received_notes[:complete]):
            self.unread += max(count, 0)
            self.free -= min(count, 0)
        del self.received_notes[:complete]


class Connections:
    """This rank's connections to other ranks of the job.

    Args:
        rank: The rank of this process.
        sockets: Connected sockets by the rank at their other end.
        memories: Memory shared with some of these ranks, see `MemoryLink`.
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
        self.links: dict[int, Link] = {}
        for other, connection in self.sockets.items():
            if other in self.memories:
                self.links[other] = MemoryLink(connection, self.memories[other], first=rank < other)
            else:
                self.links[other] = SocketLink(connection)

    def exchange(
        self, outgoing: Mapping[int, Sequence[memoryview]], incoming: Mapping[int, Sequence[memoryview]]
    ) -> None:
        """Sends and receives at the same time, so that no order among the ranks can block them.

        Args:
            outgoing: Buffers of bytes for each rank, sent one after the other.
            incoming: Writable buffers for each rank, filled with the bytes that it sends.

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
                # The end of a connection is an event too: reading or writing raises it.
                awaited = self._advance(rank, *work)
                if not awaited:
                    poll.unregister(descriptor)
                    del by_descriptor[descriptor]
                elif awaited != events:
                    poll.modify(descriptor, awaited)
                    by_descriptor[descriptor] = rank, awaited, work

    def _advance(self, rank: int, sends: list[memoryview], receives: list[memoryview]) -> int:
        try:
            return self.links[rank].advance(sends, receives)
        except OSError as error:
            raise connection_lost(f"rank {self.rank} lost its connection to rank {rank}") from error

    def close(self) -> None:
        """Closes all sockets."""
        for each in self.sockets.values():
            each.close()


def connection_lost(what: str) -> RunError:
    """Waits a while, then returns the error of a rank that lost another one.

    So the launcher sees the end of the other rank first, which is the cause of this error.
    """
    time.sleep(_NOTE_SECONDS)
    return RunError(f"{what}, which has ended")


def _drop(buffers: list[memoryview], count: int) -> None:
    """Removes the first `count` bytes of the first buffer, which has at least as many."""
    buffers[0] = buffers[0][count:]
    if not buffers[0]:
        del buffers[0]


class Rendezvous:
    """Gathers bytes of all ranks through rank 0, to which every other rank connects; all of them must make one.

    MindSpore's join takes 5 to 10 seconds on a busy CPU: a rank that its scheduler does not see in time starts again.

    Args:
        address: Where rank 0 listens: the path of a Unix socket, or HOST:PORT.

    Raises:
        RunError: Not all ranks have come within the time limit, or two say that they are the same one.
    """

    def __init__(self, rank: int, ranks: int, address: str, limit_seconds: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.address = address
        self.limit_seconds = limit_seconds
        self.deadline = time.monotonic() + limit_seconds
        self.sockets: dict[int, socket.socket] = {}
        try:
            if rank:
                self.sockets[0] = self._reach()
            else:
                self._await_others()
        except BaseException:
            self.close()
            raise

    def share(self, data: bytes) -> list[bytes]:
        """Gathers the bytes of every rank, in the order of ranks.

        Raises:
            RunError: Another rank has ended, or does not answer within the time limit.
        """
        other = 0
        try:
            if self.rank:
                self.sockets[0].sendall(_block(data))
                return [_receive_block(self.sockets[0]) for _ in range(self.ranks)]
            gathered = [data]
            for other in range(1, self.ranks):
                gathered.append(_receive_block(self.sockets[other]))
            answer = b"".join(map(_block, gathered))
            for other in range(1, self.ranks):
                self.sockets[other].sendall(answer)
            return gathered
        except TimeoutError as error:
            rule = f"rank {self.rank} has waited {self.limit_seconds:g} s for rank {other}, which waits or hangs"
            raise RunError(rule, fix=_SEE_LOGS) from error
        except OSError as error:
            raise connection_lost(f"rank {self.rank} lost rank {other} while the ranks joined") from error

    def close(self) -> None:
        """Closes all sockets."""
        for each in self.sockets.values():
            each.close()

    def _await_others(self) -> None:
        """Lets all other ranks connect; then nobody else can."""
        with contextlib.ExitStack() as stack:
            try:
                listening = stack.enter_context(_listen_at(self.address))
            except OSError as error:
                rule = f"rank 0 cannot listen at {self.address}, where the other ranks look for it: {error}"
                fix = "give another port with --master_port"
                if self.address.startswith("/"):
                    fix = "set TMPDIR to a folder where sockets can be made"
                raise RunError(rule, fix=fix) from error
            while len(self.sockets) < self.ranks - 1:
                listening.settimeout(max(self.deadline - time.monotonic(), 1e-3))
                try:
                    connection, _ = listening.accept()
                except TimeoutError as error:
                    missing = ", ".join(str(rank) for rank in range(1, self.ranks) if rank not in self.sockets)
                    rule = f"rank 0 has waited {self.limit_seconds:g} s for other ranks; these have not come: {missing}"
                    raise RunError(rule, fix=_SEE_LOGS) from error
                except OSError as error:
                    raise RunError(f"rank 0 cannot accept the connection of another rank: {error}") from error
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Keeps the connection of a rank that is awaited, and closes any other."""
        with contextlib.suppress(OSError):
            connection.settimeout(_HELLO_SECONDS)
            word, rank, ranks = _HELLO.unpack(_receive(connection, _HELLO.size))
            if word.rstrip(b"\0") == _WORD:
                if ranks == self.ranks and 0 < rank < ranks and rank not in self.sockets:
                    connection.sendall(_WELCOME)
                    connection.settimeout(max(self.deadline - time.monotonic(), 1.0))
                    self.sockets[rank] = connection
                    return
                connection.sendall(_UNWELCOME)
        connection.close()

    def _reach(self) -> socket.socket:
        """Connects to rank 0, which may not listen yet, or may still be in an earlier rendezvous."""
        while True:
            connection = None
            try:
                family, target = _target(self.address)
                connection = socket.socket(family)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # it may get rank 0's port as its own
                connection.settimeout(max(self.deadline - time.monotonic(), _RETRY_SECONDS))
                connection.connect(target)
                if connection.getsockname() == connection.getpeername():
                    raise ConnectionRefusedError("it connected to itself")
                connection.sendall(_HELLO.pack(_WORD, self.rank, self.ranks))
                answer = _receive(connection, 1)
                if answer not in (_WELCOME, _UNWELCOME):
                    raise ConnectionRefusedError("another program listens there")
            except OSError as error:
                if connection is not None:
                    connection.close()
                if time.monotonic() > self.deadline:
                    what = f"rank {self.rank} cannot join the {self.ranks} ranks of the job"
                    rule = f"{what}: no answer of rank 0 at {self.address} within {self.limit_seconds:g} s ({error})"
                    raise RunError(rule, fix=_SEE_LOGS) from error
                time.sleep(_RETRY_SECONDS)
                continue
            if answer == _WELCOME:
                return connection
            connection.close()
            rule = f"rank 0 has another rank {self.rank} already, or its job does not have {self.ranks} ranks"
            raise RunError(rule, fix="start the job with `run_trainer.py launch`")


def _block(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def _receive_block(connection: socket.socket) -> bytes:
    length = int.from_bytes(_receive(connection, _LENGTH_BYTES), "big")
    if length > _LONGEST_BYTES:
        raise ConnectionResetError(f"a message of {length} bytes is too long")
    return _receive(connection, length)


def _target(address: str) -> tuple[socket.AddressFamily, Any]:
    """Returns the family of an address and what a socket of that connects to: the path of a socket, or HOST:PORT."""
    if address.startswith("/"):
        return socket.AF_UNIX, address
    host, _, port = address.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return family, target


@contextlib.contextmanager
def _listen_at(address: str) -> Iterator[socket.socket]:
    """Yields a socket that listens at an address."""
    family, target = _target(address)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(family))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing do no harm
        listening.bind(target)
        if isinstance(target, str):
            stack.callback(Path(target).unlink, missing_ok=True)
        listening.listen(_BACKLOG)
        yield listening


def connect(
    rank: int, ranks: int, share: Share, on_one_host: bool, limit_seconds: float, *, memory: bool = True
) -> Connections:
    """Connects all ranks of a job, which must all call this.

    Args:
        share: Gathers bytes of all ranks.
        memory: Share memory between the ranks of one host; False: all bytes go through the sockets.

    Raises:
        RunError: Another rank did not answer within the time limit.
    """
    local_key = b""
    if rank == 0:
        local_key = secrets.token_bytes(32)
    key = share(local_key)[0]
    with contextlib.ExitStack() as stack:
        listening, address = stack.enter_context(_listening(on_one_host))
        addresses = share(address)
        connected: dict[int, socket.socket] = {}
        deadline = time.monotonic() + limit_seconds
        for other in range(rank):
            connected[other] = _call(addresses[other], rank, other, key, deadline)
        while len(connected) < ranks - 1:
            _accept(listening, key, connected, rank, deadline)
        share(b"")  # waits: another rank may still need this rank's address
    memories = None
    if memory and on_one_host:
        memories = _share_memory(rank, connected)
    return Connections(rank, connected, memories)


def _share_memory(rank: int, connected: Mapping[int, socket.socket]) -> dict[int, mmap.mmap]:
    """Returns memory shared with other ranks of the host, except where the system has no memory to share.

    The later rank of a pair makes the memory and sends its descriptor, with a byte that says whether there is one.
    """
    memories: dict[int, mmap.mmap] = {}
    for other, connection in connected.items():
        if other < rank:
            descriptor = _new_memory()
            if descriptor is None:
                connection.sendall(b"-")
            else:
                socket.send_fds(connection, [b"+"], [descriptor])
                memories[other] = _map_memory(descriptor)
    for other, connection in connected.items():
        if other > rank:
            connection.settimeout(_HANDSHAKE_SECONDS)
            data, descriptors, *_ = socket.recv_fds(connection, 1, 1)
            if not data:
                raise RunError(f"rank {rank} lost its connection to rank {other} while they connected")
            if descriptors:
                memories[other] = _map_memory(descriptors[0])
    return memories


def _new_memory() -> int | None:
    """Returns a descriptor of new memory; None where the system cannot share memory."""
    try:
        descriptor = os.memfd_create("run_trainer")
    except (AttributeError, OSError):
        return None
    os.truncate(descriptor, 2 * _RING_BYTES)
    return descriptor


def _map_memory(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 2 * _RING_BYTES)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _listening(on_one_host: bool) -> Iterator[tuple[socket.socket, bytes]]:
    """Yields a listening socket and its address for `_call`."""
    with contextlib.ExitStack() as stack:
        if on_one_host:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="run_trainer-"))  # of mode 700
            address = os.path.join(folder, "socket")
            listening = stack.enter_context(_listen_at(address))
        else:
            listening = stack.enter_context(_listen_at(f"{_host_address()}:0"))
            address = ":".join(map(str, listening.getsockname()[:2]))
        yield listening, os.fsencode(address)


def _host_address() -> str:
    """Returns the address of this host in the network that leads to node 0."""
    family, target = _target(f"{address_of_node_0()}:9")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0]


def _call(address: bytes, rank: int, other: int, key: bytes, deadline: float) -> socket.socket:
    """Connects to a rank and proves to know the key: answers its nonce with this rank and the HMAC of both."""
    family, target = _target(os.fsdecode(address))
    connection = socket.socket(family)
    try:
        connection.settimeout(max(1.0, deadline - time.monotonic()))
        connection.connect(target)
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
    """Receives `count` bytes."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        data += part
    return data
