"""How arrays are divided among ranks, and packed into buckets to travel. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

FLOAT32_BYTES = 4


class Sized(Protocol):
    size: int


Array = TypeVar("Array", bound=Sized)


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


class OptimizerShard(NamedTuple):
    """One rank's shard of the optimizer state (ZeRO stage 1): its range of every large parameter, flattened."""

    rank: int  # of this process among the ranks that share the state
    ranks: int
    threshold_bytes: int = 0  # every rank keeps the whole state of smaller parameters
    all_gather: Callable[[Sequence[Any], Sequence[Any] | None], None] | None = None
    """Completes parameters in place after an update, see `trainer.parallel.collectives.all_gather_ranges`."""

    def divides(self, numbers: int) -> bool:
        """Whether a parameter of so many numbers is divided among the ranks."""
        return numbers >= self.ranks and numbers * FLOAT32_BYTES >= self.threshold_bytes

    def own_range(self, numbers: int) -> slice:
        """This rank's range of a flattened parameter that is divided."""
        return range_of_rank(numbers, self.rank, self.ranks)


def range_of_rank(numbers: int, rank: int, ranks: int) -> slice:
    """The range of one rank; those of all ranks differ in length by at most one and follow each other."""
    return slice(rank * numbers // ranks, (rank + 1) * numbers // ranks)


def buckets(arrays: Sequence[Array], bucket_bytes: int) -> Iterator[list[Array]]:
    """Groups consecutive arrays into buckets of up to so many bytes in float32; a larger array has its own bucket."""
    bucket, used = [], 0
    for array in arrays:
        size = FLOAT32_BYTES * array.size
        if bucket and used + size > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(array)
        used += size
    if bucket:
        yield bucket
