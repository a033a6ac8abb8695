"""How a run talks to the other ranks: sums, flags, bytes, a barrier.

Every decision about the course of a run (tokens, norms, overflow, signals, the end of the data) uses the results of
these methods, which are the same on every rank. So all ranks decide alike, and none waits for a rank that has left. A
single process gets the same results without communication.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from trainer.errors import RunError

if TYPE_CHECKING:
    from mindspore import Parameter, Tensor

    from trainer.parallel.world import World


class Communicator(Protocol):
    """The data-parallel ranks of a job, this one among them."""

    rank: int
    size: int

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, rounded once from the exact sum: the same bits for any order of ranks."""

    def sum_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Each gradient summed over all ranks; the same bits on every rank."""

    def all_gather_ranges(self, parameters: Sequence[Parameter], own: Sequence[Tensor] | None) -> None:
        """Completes parameters in place from the ranges of all ranks; see `OptimizerShard`."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The data of every rank, in the order of ranks."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""

    def barrier(self) -> None:
        """Waits until every rank has called it."""


class SingleProcess:
    """A run of one process."""

    rank, size = 0, 1

    def all_sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def sum_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return list(gradients)

    def all_gather_ranges(self, parameters: Sequence[Parameter], own: Sequence[Tensor] | None) -> None:
        assert own is None, "one rank has all of every parameter"

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self) -> None:
        return None


class ProcessGroup:
    """The ranks of a job, through `trainer.parallel.collectives`. The constructor waits until all ranks have joined."""

    def __init__(self, world: World) -> None:
        from trainer.parallel import collectives

        self.rank, self.size, self.gather_float64 = world.rank, world.size, collectives.gather_float64
        self.sum_gradients, self.all_gather_ranges = collectives.all_reduce_in_buckets, collectives.all_gather_ranges
        self.gather_bytes, self.barrier = collectives.gather_bytes, collectives.barrier
        collectives.start(world)

    def all_sum(self, values: Sequence[float]) -> list[float]:
        every = zip(*self.gather_float64(values), strict=True)
        return [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in every]

    def any(self, flag: bool) -> bool:
        return self.all_sum([float(flag)])[0] > 0


def check_same_values(own: Mapping[str, object], what: str, communicator: Communicator) -> None:
    """Checks that all ranks have the same number or string for each name; a rank need not have all names.

    Raises:
        RunError: Values differ. The message names the ranks that differ from the first rank that has a name.
    """
    first, differing, right = {}, set(), set()
    for rank, data in enumerate(communicator.gather_bytes(json.dumps(own).encode())):
        for name, value in json.loads(data).items():
            first_rank, first_value = first.setdefault(name, (rank, value))
            if first_value != value:
                differing.add(rank)
                right.add(first_rank)
    if differing:
        raise RunError(
            f"the {what} of rank {', '.join(map(str, sorted(differing)))} differ from those of rank"
            f" {', '.join(map(str, sorted(right)))} before the first step",
            fix="give every host the same configuration, data, checkpoint and versions of MindSpore and NumPy",
        )
