"""How arrays are divided among ranks, packed into buckets to travel, and how many bytes that takes. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

FLOAT32_BYTES = 4
SMALL_BYTES = 1 << 15
"""Up to this size ranks on CPUs sum an array by one exchange of whole arrays, which is faster than two of parts."""

BUCKET_BYTES = 25 << 20
"""Small tensors are summed together up to this size."""

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class HasSize(Protocol):
    size: int


Array = TypeVar("Array", bound=HasSize)


class Shard(NamedTuple):
    """A rank's part of an array: where it begins on each axis, and its size."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """This shard of a whole array."""
        return array[self.slices]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


class ShardSpec(NamedTuple):
    """Which numbers of an array a rank has: those of a shard, or a range of the flattened shard.

    Megatron-Core's ShardedTensor describes them the same way: global shape, global offset, flattened range.

    Attributes:
        global_shape: Shape of the whole array.
        flat_range: Range of the flattened shard; None: all of it.
    """

    global_shape: tuple[int, ...]
    shard: Shard
    flat_range: slice | None = None

    @property
    def range(self) -> slice:
        if self.flat_range is None:
            return slice(0, math.prod(self.shard.shape))
        return self.flat_range

    @property
    def size(self) -> int:
        return self.range.stop - self.range.start

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an array of these numbers: that of the shard, or flat."""
        if self.flat_range is None:
            return self.shard.shape
        return (self.size,)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Consecutive numbers: where they begin in the flattened whole and in the flattened part, and how many."""
        start, shape = self.shard
        cut = [axis for axis, size in enumerate(shape) if size != self.global_shape[axis]]
        # all axes after it are whole
        last = 0
        if cut:
            last = cut[-1]
        inner = math.prod(self.global_shape[last + 1 :])
        length = math.prod(shape[last:])
        at = self.range.start
        end = self.range.stop
        while at < end:
            row, within = divmod(at, length)
            position = 0
            stride = math.prod(self.global_shape[last:])
            for axis in reversed(range(last)):
                row, index = divmod(row, shape[axis])
                position += (start[axis] + index) * stride
                stride *= self.global_shape[axis]
            count = min(end - at, length - within)
            yield position + (start[last] * inner if start else 0) + within, at - self.range.start, count
            at += count

    def rows(self, bounds: Sequence[int]) -> Iterator[tuple[int, ShardSpec, slice]]:
        """What the part has of blocks of rows (of the first axis): the block's number, the part of the block, and the
        range of the flattened part that it is.

        Args:
            bounds: Block n has the rows from bounds[n] to bounds[n + 1].
        """
        (first, *start), (count, *shape) = self.shard
        of_row = math.prod(shape)
        for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            low = max(begin, first)
            high = min(end, first + count)
            at = (low - first) * of_row  # of the block in the flattened shard
            mine = slice(max(at, self.range.start), min((high - first) * of_row, self.range.stop))
            if low < high and mine.start < mine.stop:
                shard = Shard((low - begin, *start), (high - low, *shape))
                is_all = mine.stop - mine.start == (high - low) * of_row
                if is_all:
                    flat = None
                else:
                    flat = slice(mine.start - at, mine.stop - at)
                part = ShardSpec((end - begin, *self.global_shape[1:]), shard, flat)
                yield number, part, slice(mine.start - self.range.start, mine.stop - self.range.start)

    def items(self) -> Iterator[tuple[int, ShardSpec, slice]]:
        """`rows` for each item of the first axis, as an array with an axis less."""
        for number, part, own in self.rows(range(self.global_shape[0] + 1)):
            shard = Shard(part.shard.start[1:], part.shard.shape[1:])
            yield number, ShardSpec(part.global_shape[1:], shard, part.flat_range), own


def full_shard_spec(shape: Sequence[int]) -> ShardSpec:
    """The part that is all of an array."""
    return ShardSpec(tuple(shape), Shard((0,) * len(shape), tuple(shape)))


class ShardedArray(NamedTuple):
    """Numbers of a larger array: those of the part, in its order, as an array of any shape."""

    spec: ShardSpec
    array: np.ndarray


def as_sharded_array(array: np.ndarray | ShardedArray) -> ShardedArray:
    """The array as a part, which is all of it."""
    if isinstance(array, ShardedArray):
        return array
    return ShardedArray(full_shard_spec(array.shape), array)


class OptimizerShard(NamedTuple):
    """One rank's shard of the optimizer state (ZeRO stage 1): its range of every large parameter, flattened."""

    rank: int  # of this process among the ranks that share the state
    ranks: int
    threshold_bytes: int = 0  # every rank keeps the whole state of smaller parameters
    all_gather: Callable[[Sequence[Any], Sequence[Any] | None], None] | None = None
    """Completes parameters in place after an update, see `trainer.parallel.collectives.all_gather_ranges`."""
    gather: Callable[[Any, int], Any] | None = None
    """(this rank's range of a tensor of so many numbers, flat; these) -> all of it, see `gather_range` there."""
    shards_weights: bool = False  # a rank has no more than its range of the weights

    def is_sharded(self, numbers: int) -> bool:
        """Whether a parameter of so many numbers is divided among the ranks."""
        return numbers >= self.ranks and numbers * FLOAT32_BYTES >= self.threshold_bytes

    def local_range(self, numbers: int) -> slice:
        """This rank's range of a flattened parameter that is divided."""
        return shard_range(numbers, self.rank, self.ranks)


def shard_range(numbers: int, rank: int, ranks: int) -> slice:
    """The range of one rank; those of all ranks differ in length by at most one and follow each other."""
    return slice(rank * numbers // ranks, (rank + 1) * numbers // ranks)


def bytes_sent(kind: Collective, given: int, ranks: int, rank: int = 0, *, on_host: bool = False, item: int = 4) -> int:
    """Bytes that a rank sends to others in a collective of a group.

    On a device those of a ring, which no algorithm undercuts (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations").

    Args:
        given: Bytes that it hands to the collective; its own part of a gather, all that it has of the others.
        rank: Its place in the group.
        on_host: On a CPU, where the ranks sum small arrays whole: see `CpuGroup`.
        item: Bytes of a number.
    """
    if ranks == 1:
        return 0
    if kind == "send":
        return given
    if kind == "all_gather" or (kind == "all_reduce" and on_host and given <= SMALL_BYTES):
        return (ranks - 1) * given
    own = shard_range(given // item, rank, ranks)
    own_bytes = (own.stop - own.start) * item
    return given - own_bytes + (own_bytes * (ranks - 1) if kind == "all_reduce" else 0)


def buckets(arrays: Sequence[Array], bucket_bytes: int) -> Iterator[list[Array]]:
    """Groups consecutive arrays into buckets of up to so many bytes in float32; a larger array has its own bucket."""
    bucket = []
    used = 0
    for array in arrays:
        size = FLOAT32_BYTES * array.size
        if bucket and used + size > bucket_bytes:
            yield bucket
            bucket = []
            used = 0
        bucket.append(array)
        used += size
    if bucket:
        yield bucket
