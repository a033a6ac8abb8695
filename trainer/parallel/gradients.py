"""Sums the gradients of a step over the ranks: after the backward pass on a CPU, during it on a device.

A device reduces flat buckets (Li et al. 2020, "PyTorch Distributed", section 3.2.3): as soon as the last micro-batch of
the step has given all gradients of a bucket, their sum over the ranks is under way, while the backward pass goes on.
Buckets are filled in the order in which gradients come, from the last layer to the first, and start in this order on
every rank. Where the optimizer state of a parameter is sharded, a rank gets the sum of its own range alone
(ReduceScatter), half of the bytes of an AllReduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from trainer.parallel.sharding import FLOAT32_BYTES

if TYPE_CHECKING:
    from mindspore import Parameter, Tensor

    from trainer.parallel.collectives import Group, Started


_MOST_UNDER_WAY = 2  # buckets: while one travels the next one waits, so that the link is never idle


class HasGradients(Protocol):
    gradients: Sequence[Tensor]


MicroBatch = TypeVar("MicroBatch", bound=HasGradients)


class Reduced(NamedTuple):
    """The gradients of a step, summed over micro-batches and ranks.

    Attributes:
        gradients: In the order of the parameters; this rank's range, flat, where the state is sharded on a device.
        counted: What this rank adds to the sum over ranks of each gradient's squares: 1 for its own range, and for
            whole gradients 1 on rank 0 and 0 elsewhere. None where each rank has all gradients whole.
        seconds: How long the sum took, with the wait for the last rank. None on a device, where the host does not wait.
    """

    gradients: Sequence[Tensor]
    counted: np.ndarray | None = None
    seconds: float | None = None


class SumAfterBackward:
    """Sums whole gradients over the ranks when all of them are there. `sum_gradients` None: a single process."""

    def __init__(self, sum_gradients: Callable[[Sequence[Tensor]], list[Tensor]] | None = None) -> None:
        self.sum_gradients = sum_gradients

    def last(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, Reduced]:
        """Runs the backward pass of the last micro-batch and adds its gradients to those of the others, `total`.

        The returned result of `backward`, a dataclass, keeps none of its gradients: while ranks add up theirs, there
        are two sets of them and no third.
        """
        part = backward()
        gradients = add_gradients(total, part.gradients)
        part = replace(part, gradients=())
        if self.sum_gradients is None:
            return part, Reduced(gradients)
        for gradient in gradients:
            gradient.asnumpy()  # waits until it is computed: the time below is that of the sum alone
        began = time.perf_counter()
        return part, Reduced(self.sum_gradients(gradients), seconds=time.perf_counter() - began)


def add_gradients(total: list[Tensor] | None, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Adds to `total` in place, tensor by tensor, so that a third set of gradients never exists."""
    if total is None:
        return list(gradients)
    from mindspore import ops

    for place, gradient in enumerate(gradients):
        total[place] = ops.add(total[place], gradient)
    return total


class SumDuringBackward:
    """Reduces buckets of gradients during the backward pass of the last micro-batch.

    Args:
        parameters: Those whose gradients the backward pass computes, in its order of results.
        is_sharded: Whether the optimizer state of each is divided among the ranks of its last group.
        groups: Those over which the gradient of each is summed, one after the other.
        in_float32: Leave the sums in float32, in which they are made; False: in the dtype of each gradient.
        bucket_bytes: Limit of gradients that travel together; a larger one travels alone, without a copy.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        is_sharded: Sequence[bool],
        groups: Sequence[Sequence[Group]],
        in_float32: bool = True,
        bucket_bytes: int | None = None,
    ) -> None:
        from trainer.parallel import collectives

        self.collectives, self.parameters, self.is_sharded, self.groups = collectives, parameters, is_sharded, groups
        self.in_float32 = in_float32
        kinds = list(zip(is_sharded, map(tuple, groups), strict=True))
        counts = [sharded or not own or own[-1].rank == 0 for sharded, own in kinds]
        self.counted = np.array(counts, np.float32)
        limit = collectives.BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self.buckets = plan_buckets([parameter.size for parameter in parameters], kinds, limit)

    def last(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, Reduced]:
        """As `SumAfterBackward.last`; the result of `backward` has placeholders for gradients."""
        from mindspore import dtype as mstype
        from mindspore import ops

        ready: dict[int, Tensor] = {}
        dtypes: dict[int, Any] = {}
        under_way: list[Started] = []
        # What the backward pass returns instead of a gradient that is here: so a scattered one can be let go.
        nothing = ops.zeros(1)

        def arrived(place: int, gradient: Tensor) -> Tensor:
            assert place not in dtypes, "the sum over all uses of a parameter comes once"
            dtypes[place] = mstype.float32 if self.in_float32 else gradient.dtype
            ready[place] = gradient if total is None else total[place] + gradient
            if total is not None:
                total[place] = None
            while len(under_way) < len(self.buckets) and ready.keys() >= set(self.buckets[len(under_way)]):
                gradients = [ready.pop(each) for each in self.buckets[len(under_way)]]
                under_way.append(self.start(self.buckets[len(under_way)], gradients))
                if len(under_way) > _MOST_UNDER_WAY:  # lets the memory of its inputs be used again
                    under_way[-1 - _MOST_UNDER_WAY].wait()
            return nothing

        hooks = [
            parameter.register_hook(lambda gradient, place=place: arrived(place, gradient))
            for place, parameter in enumerate(self.parameters)
        ]
        try:
            part = backward()
        finally:
            for hook in hooks:
                hook.remove()
        for place, gradient in enumerate(part.gradients):
            if place not in dtypes:  # nothing depends on the parameter in this micro-batch
                arrived(place, gradient)
        gradients: list[Any] = [None] * len(self.parameters)
        for bucket, started in zip(self.buckets, under_way, strict=True):
            for place, gradient in zip(bucket, self.parts(bucket, started.wait()), strict=True):
                gradients[place] = gradient if gradient.dtype == dtypes[place] else gradient.astype(dtypes[place])
        return part, Reduced(gradients, self.counted if any(self.is_sharded) else None)

    def start(self, bucket: list[int], gradients: Sequence[Tensor]) -> Started:
        """Begins to reduce the gradients of a bucket, in float32: over the last of its groups, after all others."""
        from mindspore import dtype as mstype
        from mindspore import ops

        gradients = [each if each.dtype == mstype.float32 else each.astype(mstype.float32) for each in gradients]
        groups = self.groups[bucket[0]]
        if self.is_sharded[bucket[0]]:
            own = [self.collectives.rows_of_whole(gradient, groups[-1].size) for gradient in gradients]
        else:
            own = [gradient.reshape(-1) for gradient in gradients]
        started = self.collectives.Started(own[0] if len(own) == 1 else ops.concat(own, -1))
        for group in groups:
            scatters = self.is_sharded[bucket[0]] and group is groups[-1]
            start = self.collectives.start_reduce_scatter if scatters else self.collectives.start_all_reduce
            started = start(started.wait(), group)
        return started

    def parts(self, bucket: list[int], flat: Tensor) -> list[Tensor]:
        """The gradients of a bucket, or this rank's ranges of them."""
        from mindspore import ops

        parameters = [self.parameters[place] for place in bucket]
        if not self.is_sharded[bucket[0]]:
            parts = ops.split(flat, [parameter.size for parameter in parameters])
            return [part.reshape(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
        group = self.groups[bucket[0]][-1]
        parts = ops.split(flat, [-(-parameter.size // group.size) for parameter in parameters])
        return [
            self.collectives.own_range(part, parameter.size, group)
            for part, parameter in zip(parts, parameters, strict=True)
        ]


def plan_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int) -> list[list[int]]:
    """Buckets of the places of gradients, from the last to the first; each has gradients of one kind alone."""
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for place in reversed(range(len(sizes))):
        kind, size = kinds[place], FLOAT32_BYTES * sizes[place]
        bucket, used = filling.pop(kind, ([], 0))
        if bucket and used + size > bucket_bytes:
            buckets.append(bucket)
            bucket, used = [], 0
        filling[kind] = ([*bucket, place], used + size)
    # What is left holds the gradients that come last.
    return buckets + sorted((bucket for bucket, _ in filling.values()), key=min, reverse=True)
