"""How arrays are sharded over ranks and packed into buckets, and the bytes that collectives send. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

FLOAT32_BYTES = 4
SMALL_BYTES = 1 << 15
"""Up to this size ranks on CPUs sum an array by one all-gather, which is faster than two exchanges of shards."""

BUCKET_BYTES = 25 << 20
"""Small tensors are summed together up to this size."""

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class HasSize(Protocol):
    """An array or tensor."""

    size: int


Array = TypeVar("Array", bound=HasSize)


class Shard(NamedTuple):
    """A rank's shard of an array: where it starts on each axis, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """Returns this shard of the unsharded array."""
        return array[self.slices]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Returns the shard's range on each axis."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


class ShardSpec(NamedTuple):
    """Which numbers of an array a rank has: a shard, or a range of the flattened shard.

    The fields are those of Megatron-Core's ShardedTensor: global shape, global offset and flattened range.

    Attributes:
        global_shape: Shape of the unsharded array.
        flat_range: Range of the flattened shard; None: all of it.
    """

    global_shape: tuple[int, ...]
    shard: Shard
    flat_range: slice | None = None

    @property
    def range(self) -> slice:
        """Returns the range of the flattened shard."""
        if self.flat_range is None:
            return slice(0, math.prod(self.shard.shape))
        return self.flat_range

    @property
    def size(self) -> int:
        """Returns how many numbers these are."""
        return self.range.stop - self.range.start

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of an array of these numbers: the shard's, or flat."""
        if self.flat_range is None:
            return self.shard.shape
        return (self.size,)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yields runs of consecutive numbers: start in the flattened array, start in the flat shard, and length."""
        start, shape = self.shard
        sharded_axes = [axis for axis, size in enumerate(shape) if size != self.global_shape[axis]]
        last = 0  # no axis after it is sharded
        if sharded_axes:
            last = sharded_axes[-1]
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
            if start:
                position += start[last] * inner
            yield position + within, at - self.range.start, count
            at += count

    def rows(self, bounds: Sequence[int]) -> Iterator[tuple[int, ShardSpec, slice]]:
        """Splits the shard by blocks of rows, that is along the first axis.

        Args:
            bounds: Block n has the rows from bounds[n] to bounds[n + 1].

        Yields:
            The number of a block, the spec of this shard within the block, and its range of this flattened shard.
        """
        (first, *start), (count, *shape) = self.shard
        row_size = math.prod(shape)
        for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            low = max(begin, first)
            high = min(end, first + count)
            at = (low - first) * row_size  # start of the block in the flattened shard
            local = slice(max(at, self.range.start), min((high - first) * row_size, self.range.stop))
            if low < high and local.start < local.stop:
                shard = Shard((low - begin, *start), (high - low, *shape))
                flat_range = None
                if local.stop - local.start < (high - low) * row_size:
                    flat_range = slice(local.start - at, local.stop - at)
                spec = ShardSpec((end - begin, *self.global_shape[1:]), shard, flat_range)
                yield number, spec, slice(local.start - self.range.start, local.stop - self.range.start)

    def items(self) -> Iterator[tuple[int, ShardSpec, slice]]:
        """Splits the shard by the items of the first axis; yields what `rows` does, with specs without this axis."""
        for number, spec, local in self.rows(range(self.global_shape[0] + 1)):
            shard = Shard(spec.shard.start[1:], spec.shard.shape[1:])
            yield number, ShardSpec(spec.global_shape[1:], shard, spec.flat_range), local


def full_shard_spec(shape: Sequence[int]) -> ShardSpec:
    """Returns the spec of a single shard that is the whole array."""
    return ShardSpec(tuple(shape), Shard((0,) * len(shape), tuple(shape)))


class ShardedArray(NamedTuple):
    """A shard of an array: its spec, and its numbers in the same order as an array of any shape."""

    spec: ShardSpec
    array: np.ndarray


def as_sharded_array(array: np.ndarray | ShardedArray) -> ShardedArray:
    """Returns an array as the single shard of itself; a sharded array as it is."""
    if isinstance(array, ShardedArray):
        return array
    return ShardedArray(full_shard_spec(array.shape), array)


class OptimizerShard(NamedTuple):
    """One rank's shard of the optimizer state (ZeRO stage 1): its range of every large parameter, flattened."""

    rank: int  # of this process among the ranks over which the state is sharded
    ranks: int
    threshold_bytes: int = 0  # the state of smaller parameters is replicated
    all_gather: Callable[[Sequence[Any], Sequence[Any] | None], None] | None = None
    """Completes parameters in place after an update, see `trainer.parallel.collectives.all_gather_ranges`."""
    gather: Callable[[Any, int], Any] | None = None
    """(this rank's range of a tensor, flat; size of the tensor) -> the flat tensor, see `gather_range` there."""
    shards_weights: bool = False  # ZeRO stage 3: a rank has only its range of the weights

    def is_sharded(self, numbers: int) -> bool:
        """Returns whether a parameter of this size is sharded over the ranks."""
        return numbers >= self.ranks and numbers * FLOAT32_BYTES >= self.threshold_bytes

    def local_range(self, numbers: int) -> slice:
        """Returns this rank's range of a flattened, sharded parameter."""
        return shard_range(numbers, self.rank, self.ranks)


def shard_range(numbers: int, rank: int, ranks: int) -> slice:
    """Returns one rank's range of `numbers` elements; the ranges of all ranks differ in length by one at most."""
    return slice(rank * numbers // ranks, (rank + 1) * numbers // ranks)


def bytes_sent(
    kind: Collective, input_bytes: int, ranks: int, rank: int = 0, *, on_host: bool = False, item: int = 4
) -> int:
    """Returns the bytes that a rank sends to the others in a collective of a group.

    A device sends the bytes of a ring, which no algorithm undercuts (Patarasuk and Yuan 2009, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations").

    Args:
        input_bytes: Bytes of the rank's input: its shard for an all-gather, the full array for the other collectives.
        rank: Its index in the group.
        on_host: The ranks are on CPUs, which sum small arrays by one all-gather: see `CpuGroup`.
        item: Bytes of a number.
    """
    if ranks == 1:
        return 0
    if kind == "send":
        return input_bytes
    if kind == "all_gather" or (kind == "all_reduce" and on_host and input_bytes <= SMALL_BYTES):
        return (ranks - 1) * input_bytes
    local = shard_range(input_bytes // item, rank, ranks)
    local_bytes = (local.stop - local.start) * item
    if kind == "all_reduce":
        return input_bytes + local_bytes * (ranks - 2)
    return input_bytes - local_bytes


def buckets(arrays: Sequence[Array], bucket_bytes: int) -> Iterator[list[Array]]:
    """Groups consecutive arrays into buckets of up to `bucket_bytes` in float32; a larger array has its own bucket."""
    bucket: list[Array] = []
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
