"""Collective communication of NumPy arrays between the ranks of a group, over `Connections`: a CPU's collectives.

Every sum is made in the order of the group's ranks, so all ranks get the same bits. Nothing waits for more ranks than
those of the group. An all-reduce of n ranks exchanges 2 (n - 1) / n of the array; in an all-to-all a rank sends each
other rank only the array for that rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from trainer.parallel.connections import Connections, connect
from trainer.parallel.sharding import SMALL_BYTES, shard_range


class CpuGroup:
    """Some ranks of a job, among them this process: the CPU's process group, as gloo's is PyTorch's.

    Attributes:
        ranks: Their numbers in the job, in the order of the group.
        rank: Index of this process in `ranks`.
        size: Number of ranks.
    """

    on_host: Literal[True] = True

    def __init__(self, connections: Connections, ranks: Sequence[int]) -> None:
        self.connections = connections
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(connections.rank)
        self.size = len(self.ranks)
        self._memory = np.empty(0, np.uint8)  # for what other ranks send to be summed

    def new_subgroup(self, ranks: Sequence[int], name: str = "") -> CpuGroup:
        """Returns a group of some ranks of the job; the others need not call this. Only device groups use `name`."""
        return CpuGroup(self.connections, ranks)

    def clone_connections(self, on_one_host: bool, limit_seconds: float = 60) -> CpuGroup:
        """Returns a group of the same ranks with new connections, for a thread that communicates while others do.

        All ranks of the group must call this.
        """
        new = connect(self.rank, self.size, self.gather_bytes, on_one_host, limit_seconds)
        sockets = {self.ranks[place]: connection for place, connection in new.sockets.items()}
        memories = {self.ranks[place]: memory for place, memory in new.memories.items()}
        return CpuGroup(Connections(self.ranks[self.rank], sockets, memories), self.ranks)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Gathers the arrays of all ranks, which have the same shape and dtype: [size, ...]."""
        array = np.asarray(array, order="C")
        rows = np.empty((self.size, *array.shape), array.dtype)
        rows[self.rank] = array
        self._exchange([array] * self.size, _each(rows))
        return rows

    def all_gather_rows(self, array: np.ndarray) -> np.ndarray:
        """Gathers [n, ...] of each rank, one after the other: [size n, ...]."""
        rows = self.all_gather(array)
        return rows.reshape(-1, *rows.shape[2:])

    def all_reduce(self, array: np.ndarray) -> np.ndarray:
        """Sums an array over all ranks, in its dtype; float16 is added up in float32."""
        if self.size == 1:
            return array
        return self.all_reduce_into(array, np.empty(array.shape, array.dtype))

    def all_reduce_into(self, array: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Does `all_reduce` into `out`, a contiguous array, which may be `array` itself.

        For a large array the system takes longer to provide new memory than the sum takes.
        """
        if array.nbytes <= SMALL_BYTES or self.size == 1:
            return _sum(self.all_gather(array), out)
        flat = out.reshape(-1)
        ranges = self._ranges(np.asarray(array, order="C").reshape(-1))
        _sum(self._received(ranges), flat[shard_range(flat.size, self.rank, self.size)])
        self.complete_ranges([flat])
        return out

    def reduce_scatter_range(self, array: np.ndarray) -> np.ndarray:
        """Returns this rank's range (`shard_range`) of the sum over all ranks, flat, with the bits of `all_reduce`."""
        return self._local_sum(self._ranges(np.asarray(array, order="C").reshape(-1)))

    def complete_ranges(self, flats: Sequence[np.ndarray]) -> None:
        """Gathers flat arrays in place: each rank has its range (`shard_range`) of each and gets the other ranges."""
        ranges = [self._ranges(flat) for flat in flats]
        others = [(place, rank) for place, rank in enumerate(self.ranks) if place != self.rank]
        local = [_bytes(each[self.rank]) for each in ranges]
        self.connections.exchange(
            {rank: local for _, rank in others},
            {rank: [_bytes(each[place]) for each in ranges] for place, rank in others},
        )

    def _ranges(self, flat: np.ndarray) -> list[np.ndarray]:
        """Returns a view of each rank's range."""
        return [flat[shard_range(flat.size, place, self.size)] for place in range(self.size)]

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        """Returns this rank's rows, [n, ...], of the sum over all ranks of [size n, ...]."""
        return self._local_sum(np.split(np.asarray(array, order="C"), self.size))

    def all_to_all(self, arrays: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Sends one array to each rank and returns what each rank sent, in the order of ranks.

        Args:
            arrays: One for each rank; all of one dtype.
            shapes: Shape of the array that each rank sends to this one.
        """
        received = [np.empty(shape, arrays[0].dtype) for shape in shapes]
        self.all_to_all_into(arrays, received)
        return received

    def all_to_all_into(self, arrays: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Does `all_to_all` into existing contiguous arrays."""
        received[self.rank][...] = arrays[self.rank]
        self._exchange([np.asarray(each, order="C") for each in arrays], received)

    def broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        """Returns the array of the group's rank `root`; shapes and dtypes are equal on all ranks."""
        if self.rank == root:
            sent = np.asarray(array, order="C")
            others = [each for place, each in enumerate(self.ranks) if place != root]
            self.connections.exchange({each: [_bytes(sent)] for each in others}, {})
            return sent
        received = np.empty_like(array, order="C")
        self.connections.exchange({}, {self.ranks[root]: [_bytes(received)]})
        return received

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers the bytes of every rank, in the order of ranks; lengths may differ."""
        lengths = self.all_gather(np.array([len(data)], np.int64)).reshape(-1).tolist()
        sent = np.frombuffer(data, np.uint8)
        received = self.all_to_all([sent] * self.size, [(length,) for length in lengths])
        return [each.tobytes() for each in received]

    def _local_sum(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Sums over the ranks the part that each of them has for this one; `parts`, one a rank, are contiguous."""
        return _sum(self._received(parts))

    def _received(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the part that each rank has for this one, [size, ...], in memory that the next call reuses."""
        local = parts[self.rank]
        size = self.size * local.nbytes
        if self._memory.size < size:
            self._memory = np.empty(size, np.uint8)
        rows = self._memory[:size].view(local.dtype).reshape(self.size, *local.shape)
        rows[self.rank] = local
        self._exchange(parts, _each(rows))
        return rows

    def _exchange(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Sends each other rank its array and fills `received` from the other ranks."""
        others = [(place, rank) for place, rank in enumerate(self.ranks) if place != self.rank]
        self.connections.exchange(
            {rank: [_bytes(sent[place])] for place, rank in others},
            {rank: [_bytes(received[place])] for place, rank in others},
        )


def _sum(rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Sums the rows, from the first to the last."""
    first, *others = _each(rows)
    if out is None:
        out = np.empty_like(first)
    if not others:
        np.copyto(out, first)
        return out
    if rows.dtype == np.float16:
        total = np.add(first, others[0], dtype=np.float32)
    else:
        total = np.add(first, others[0], out=out)
    for row in others[1:]:
        total += row
    if total is not out:
        np.copyto(out, total, casting="same_kind")
    return out


def _each(rows: np.ndarray) -> list[np.ndarray]:
    """Returns a view of each row, also where a row is a single number."""
    return [rows[place, ...] for place in range(len(rows))]


def _bytes(array: np.ndarray) -> memoryview:
    """Returns the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
