"""Collective communication of NumPy arrays between the ranks of a group, over `Connections`: a CPU's collectives.

Every sum is made in the order of the group's ranks, so all ranks get the same bits. Nothing waits for more ranks than
those of the group, and what travels is in proportion to what is asked for: n ranks sum an array by exchanging 2 (n - 1)
/ n of it, and each sends another one in an all-to-all what is meant for that one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.parallel.connections import Connections, connect
from trainer.parallel.sharding import SMALL_BYTES, shard_range


class CpuGroup:
    """Some ranks of a job, this one among them.

    Attributes:
        ranks: In the job, in the order of the group.
        rank: This process's place in `ranks`.
        size: Number of ranks.
    """

    on_host = True

    def __init__(self, connections: Connections, ranks: Sequence[int]) -> None:
        self.connections = connections
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(connections.rank)
        self.size = len(self.ranks)
        self._memory = np.empty(0, np.uint8)  # for what other ranks send to be summed

    def new_subgroup(self, ranks: Sequence[int], name: str = "") -> CpuGroup:
        """A group of some ranks of the job; without a call of the others. `name` is for groups of devices."""
        return CpuGroup(self.connections, ranks)

    def clone_connections(self, on_one_host: bool, limit_seconds: float = 60) -> CpuGroup:
        """The same ranks with connections of their own, for a thread that communicates while others do. All ranks of
        the group call this."""
        found = connect(self.rank, self.size, self.gather_bytes, on_one_host, limit_seconds)
        sockets, memories = (
            {self.ranks[place]: one for place, one in each.items()} for each in (found.sockets, found.memories)
        )
        return CpuGroup(Connections(self.ranks[self.rank], sockets, memories), self.ranks)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """[size, ...]: the arrays of all ranks, which have the same shape and dtype."""
        array = np.asarray(array, order="C")
        rows = np.empty((self.size, *array.shape), array.dtype)
        rows[self.rank] = array
        self._exchange([array] * self.size, _each(rows))
        return rows

    def all_gather_rows(self, array: np.ndarray) -> np.ndarray:
        """[size n, ...]: [n, ...] of each rank, one after the other."""
        rows = self.all_gather(array)
        return rows.reshape(-1, *rows.shape[2:])

    def all_reduce(self, array: np.ndarray) -> np.ndarray:
        """The sum over all ranks, in the dtype of the array; sums of float16 are made in float32."""
        if self.size == 1:
            return array
        return self.all_reduce_into(array, np.empty(array.shape, array.dtype))

    def all_reduce_into(self, array: np.ndarray, out: np.ndarray) -> np.ndarray:
        """The same into a contiguous array that is there, `array` itself too: other memory, which the system makes
        ready, takes longer than the sum of a large one."""
        if array.nbytes <= SMALL_BYTES or self.size == 1:
            return _sum(self.all_gather(array), out)
        flat = out.reshape(-1)
        own = flat[shard_range(flat.size, self.rank, self.size)]
        _sum(self._received(self._ranges(np.asarray(array, order="C").reshape(-1))), own)
        self.complete_ranges([flat])
        return out

    def reduce_scatter_range(self, array: np.ndarray) -> np.ndarray:
        """This rank's range (`shard_range`) of the sum over all ranks, flat: the same bits as `all_reduce` has."""
        return self._sum_of_own(self._ranges(np.asarray(array, order="C").reshape(-1)))

    def complete_ranges(self, flats: Sequence[np.ndarray]) -> None:
        """Fills flat arrays in place: each rank has its own range (`shard_range`) of each and gets those of the
        others."""
        ranges = [self._ranges(flat) for flat in flats]
        others = [(place, rank) for place, rank in enumerate(self.ranks) if place != self.rank]
        own = [_bytes(each[self.rank]) for each in ranges]
        self.connections.exchange(
            {rank: own for _, rank in others},
            {rank: [_bytes(each[place]) for each in ranges] for place, rank in others},
        )

    def _ranges(self, flat: np.ndarray) -> list[np.ndarray]:
        """Views of each rank's range."""
        return [flat[shard_range(flat.size, place, self.size)] for place in range(self.size)]

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        """This rank's rows of the sum over all ranks of [size n, ...]: [n, ...]."""
        return self._sum_of_own(np.split(np.asarray(array, order="C"), self.size))

    def all_to_all(self, arrays: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Sends one array to each rank and returns what each rank sent, in the order of ranks.

        Args:
            arrays: For each rank; all of one dtype.
            shapes: Of what each rank sends to this one.
        """
        received = [np.empty(shape, arrays[0].dtype) for shape in shapes]
        self.all_to_all_into(arrays, received)
        return received

    def all_to_all_into(self, arrays: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """The same into contiguous arrays that are there."""
        received[self.rank][...] = arrays[self.rank]
        self._exchange([np.asarray(each, order="C") for each in arrays], received)

    def broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        """The array of the group's rank `root`; shapes and dtypes are equal on all ranks."""
        if self.rank == root:
            given = np.asarray(array, order="C")
            others = [each for place, each in enumerate(self.ranks) if place != root]
            self.connections.exchange({each: [_bytes(given)] for each in others}, {})
            return given
        received = np.empty_like(array, order="C")
        self.connections.exchange({}, {self.ranks[root]: [_bytes(received)]})
        return received

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes; lengths may differ."""
        lengths = self.all_gather(np.array([len(data)], np.int64)).reshape(-1).tolist()
        given = np.frombuffer(data, np.uint8)
        received = self.all_to_all([given] * self.size, [(length,) for length in lengths])
        return [each.tobytes() for each in received]

    def _sum_of_own(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The sum over the ranks of what each of them has for this one; `parts`, for each rank, are contiguous."""
        return _sum(self._received(parts))

    def _received(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """What each rank has for this one, [size, ...], in memory that the next call takes again."""
        own = parts[self.rank]
        size = self.size * own.nbytes
        if self._memory.size < size:
            self._memory = np.empty(size, np.uint8)
        rows = self._memory[:size].view(own.dtype).reshape(self.size, *own.shape)
        rows[self.rank] = own
        self._exchange(parts, _each(rows))
        return rows

    def _exchange(self, given: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Sends each rank its array and fills `received`; this rank's own are left as they are."""
        others = [(place, rank) for place, rank in enumerate(self.ranks) if place != self.rank]
        self.connections.exchange(
            {rank: [_bytes(given[place])] for place, rank in others},
            {rank: [_bytes(received[place])] for place, rank in others},
        )


def _sum(rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The sum of the rows, from the first to the last."""
    first, *others = _each(rows)
    if out is None:
        out = np.empty_like(first)
    if not others:
        np.copyto(out, first)
        return out
    total = np.add(first, others[0], **({"dtype": np.float32} if rows.dtype == np.float16 else {"out": out}))
    for row in others[1:]:
        total += row
    if total is not out:
        np.copyto(out, total, casting="same_kind")
    return out


def _each(rows: np.ndarray) -> list[np.ndarray]:
    """Views of the rows, where they are single numbers too."""
    return [rows[place, ...] for place in range(len(rows))]


def _bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))
