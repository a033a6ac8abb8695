"""Which part of the optimizer's state is whose. Pure Python."""

from __future__ import annotations

from typing import NamedTuple

_FLOAT32_BYTES = 4


class OptimizerShard(NamedTuple):
    """The share of one rank."""

    rank: int
    """Of this process among those that share."""
    ranks: int
    """How many share."""
    threshold_bytes: int = 0
    """Smaller parameters are kept whole on every rank."""

    def cuts(self, numbers: int) -> bool:
        """Whether a parameter of so many numbers is shared."""
        return numbers >= self.ranks and numbers * _FLOAT32_BYTES >= self.threshold_bytes

    def part(self, numbers: int) -> slice:
        """What this rank keeps of a flattened parameter that is shared."""
        return part_of(numbers, self.rank, self.ranks)


def part_of(numbers: int, rank: int, ranks: int) -> slice:
    """The range of one rank; those of all ranks are equally long, give or take one, and follow each other."""
    return slice(rank * numbers // ranks, (rank + 1) * numbers // ranks)
