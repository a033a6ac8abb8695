"""Sums the gradients of a step over the ranks: after the backward pass on a CPU, during it on a device.

A device reduces flat buckets (Li et al. 2020, "PyTorch Distributed", section 3.2.3): as soon as the last micro-batch of
the step has given all gradients of a bucket, their sum over the ranks is under way, while the backward pass goes on.
Buckets are filled in the order in which gradients come, from the last layer to the first, and start in this order on
every rank. Where the optimizer state of a parameter is sharded, a rank gets the sum of its own range alone
(ReduceScatter), half of the bytes of an AllReduce.

From level 2 of `enable_parallel_optimizer` on (ZeRO stage 2, Rajbhandari et al. 2020, section 5.2) a rank keeps nothing
but its ranges of these gradients: each is summed over the ranks as soon as the backward pass of a micro-batch has given
it, and the micro-batches add up ranges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
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
        gradients: In the order of the parameters; flat, this rank's range of those that are reduced and scattered.
        counted: What this rank adds to the sum over ranks of each gradient's squares: 1 for its own range, and for
            whole gradients 1 on rank 0 and 0 elsewhere. None where each rank has all gradients whole.
        seconds: How long the sum took, with the wait for the last rank. None on a device, where the host does not wait.
    """

    gradients: Sequence[Tensor]
    counted: np.ndarray | None = None
    seconds: float | None = None


class GradientReducer(Protocol):
    """Sums the gradients of a step over micro-batches and ranks."""

    def add(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        """Runs the backward pass of a micro-batch that is not the last one; returns what `backward` did, without its
        gradients, and the sum of these and `total`."""

    def last(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, Reduced]:
        """Runs the backward pass of the last micro-batch and adds its gradients to those of the others, `total`.

        The returned result of `backward`, a dataclass, keeps none of its gradients: while ranks add up theirs, there
        are two sets of them and no third.
        """

    def kept(self, place: int, gradient: Tensor) -> Tensor:
        """For what computes the micro-batches in an order of its own, as a pipeline does: what is added up of the
        gradient of a micro-batch."""

    def summed(self, total: list[Tensor]) -> Reduced:
        """For the same: the sum over the ranks of what was added up."""


@dataclass(frozen=True)
class _Gradients:
    gradients: Sequence[Tensor]


class SumAfterBackward:
    """Sums whole gradients over the ranks when all of them are there. `sum_gradients` None: a single process."""

    def __init__(self, sum_gradients: Callable[[Sequence[Tensor]], list[Tensor]] | None = None) -> None:
        self.sum_gradients = sum_gradients

    def add(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        part, gradients = _added(total, backward)
        return part, _compact(gradients) if total is None else gradients

    def last(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, Reduced]:
        part, gradients = _added(total, backward)
        return part, self.summed(gradients)

    def kept(self, place: int, gradient: Tensor) -> Tensor:
        return gradient

    def summed(self, total: list[Tensor]) -> Reduced:
        if self.sum_gradients is None:
            return Reduced(total)
        for gradient in total:
            gradient.asnumpy()  # waits until it is computed: the time below is that of the sum alone
        began = time.perf_counter()
        return Reduced(self.sum_gradients(total), seconds=time.perf_counter() - began)


def add_gradients(total: list[Tensor] | None, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Adds to `total` in place, tensor by tensor, so that a third set of gradients never exists."""
    if total is None:
        return list(gradients)
    from mindspore import ops

    on_host = _is_on_host()
    for place, gradient in enumerate(gradients):
        if on_host:
            array = total[place].asnumpy()
            np.add(array, gradient.asnumpy(), out=array)
        else:
            total[place] = ops.add(total[place], gradient)
    return total


def _compact(gradients: list[Tensor]) -> list[Tensor]:
    """On a CPU, copies gradients that stay to other memory: between them are gaps, too small for the activations of the
    next micro-batch."""
    if not _is_on_host():
        return gradients
    from mindspore import Tensor

    return [Tensor(gradient.asnumpy().copy()) for gradient in gradients]


def _is_on_host() -> bool:
    import mindspore

    return mindspore.get_context("device_target") == "CPU"


def _added(
    total: list[Tensor] | None, backward: Callable[[], MicroBatch]
) -> tuple[MicroBatch, list[Tensor]]:
    part = backward()
    return replace(part, gradients=()), add_gradients(total, part.gradients)


def with_gradients_as_they_come(
    parameters: Sequence[Parameter], arrived: Callable[[int, Tensor], None], backward: Callable[[], MicroBatch]
) -> MicroBatch:
    """Runs a backward pass and calls `arrived` with the place of each parameter and its gradient, as soon as this is
    there; nothing else keeps the gradient. The result has placeholders for gradients."""
    from mindspore import ops

    came: set[int] = set()
    nothing = ops.zeros(1)  # what the backward pass returns instead of a gradient: so this one can be let go

    def hook(gradient: Tensor, place: int) -> Tensor:
        assert place not in came, "the sum over all uses of a parameter comes once"
        came.add(place)
        arrived(place, gradient)
        return nothing

    hooks = [
        parameter.register_hook(lambda gradient, place=place: hook(gradient, place))
        for place, parameter in enumerate(parameters)
    ]
    try:
        part = backward()
    finally:
        for each in hooks:
            each.remove()
    for place, gradient in enumerate(part.gradients):
        if place not in came:  # nothing depends on the parameter in this micro-batch
            arrived(place, gradient)
    return replace(part, gradients=())


class ScatterDuringBackward:
    """Sums each gradient over the ranks of a CPU during the backward pass of each micro-batch; a rank keeps its range.

    Args:
        parameters: Those whose gradients the backward pass computes, in its order of results.
        is_sharded: Of which of them a rank keeps a range. The others are small: they are summed at the end.
        scatter: Number of a parameter, its gradient -> this rank's range of the sum, flat and in float32.
        sum_rest: Sums at the end what is not summed yet of these ranges and of the others; may change the list.
        counted: See `Reduced`.
        in_float32: See `SumDuringBackward`.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        is_sharded: Sequence[bool],
        scatter: Callable[[int, Tensor], Tensor],
        sum_rest: Callable[[list[Tensor]], list[Tensor]],
        counted: np.ndarray | None = None,
        in_float32: bool = True,
    ) -> None:
        self.parameters, self.is_sharded, self.scatter = parameters, is_sharded, scatter
        self.sum_rest, self.counted, self.in_float32 = sum_rest, counted, in_float32
        self.seconds = 0.0  # of this step, in collectives

    def add(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        found: list[Any] = [None] * len(self.parameters)
        # All ranks reduce in one order: that in which gradients come as a rule.
        order = [place for place in range(len(found)) if self.is_sharded[place]]
        waiting: dict[int, Tensor] = {}

        def arrived(place: int, gradient: Tensor) -> None:
            if not self.is_sharded[place]:
                found[place] = gradient
                return
            waiting[place] = gradient
            while order and order[-1] in waiting:
                found[order[-1]] = self.own_range(order[-1], waiting.pop(order[-1]))
                order.pop()

        part = with_gradients_as_they_come(self.parameters, arrived, backward)
        return part, add_gradients(total, found)

    def last(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, Reduced]:
        part, gradients = self.add(total, backward)
        return part, self.summed(gradients)

    def kept(self, place: int, gradient: Tensor) -> Tensor:
        return self.own_range(place, gradient) if self.is_sharded[place] else gradient

    def summed(self, total: list[Tensor]) -> Reduced:
        began = time.perf_counter()
        gradients = self.sum_rest(total)
        seconds, self.seconds = self.seconds + time.perf_counter() - began, 0.0
        return Reduced(gradients, self.counted, seconds)

    def own_range(self, place: int, gradient: Tensor) -> Tensor:
        gradient.asnumpy()  # waits until it is computed: the time below is that of the sum alone
        began = time.perf_counter()
        own = self.scatter(place, gradient)
        self.seconds += time.perf_counter() - began
        return own if self.in_float32 or own.dtype == gradient.dtype else own.astype(gradient.dtype)


class SumDuringBackward:
    """Reduces buckets of gradients during the backward pass of the last micro-batch, or of each one.

    Args:
        parameters: Those whose gradients the backward pass computes, in its order of results.
        is_sharded: Whether the optimizer state of each is divided among the ranks of its last group.
        groups: Those over which the gradient of each is summed, one after the other.
        in_float32: Leave the sums in float32, in which they are made; False: in the dtype of each gradient.
        scatters_each: Reduce those of each micro-batch, of which a rank then keeps its ranges.
        bucket_bytes: Limit of gradients that travel together; a larger one travels alone, without a copy.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        is_sharded: Sequence[bool],
        groups: Sequence[Sequence[Group]],
        in_float32: bool = True,
        bucket_bytes: int | None = None,
        scatters_each: bool = False,
    ) -> None:
        from trainer.parallel import collectives

        self.collectives, self.parameters, self.is_sharded, self.groups = collectives, parameters, is_sharded, groups
        self.in_float32, self.scatters_each = in_float32, scatters_each
        kinds = list(zip(is_sharded, map(tuple, groups), strict=True))
        counts = [sharded or not own or own[-1].rank == 0 for sharded, own in kinds]
        self.counted = np.array(counts, np.float32)
        limit = collectives.BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self.buckets = plan_buckets([parameter.size for parameter in parameters], kinds, limit)

    def add(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        if not self.scatters_each:
            return _added(total, backward)
        part, reduced = self.reduced(None, backward)
        return part, add_gradients(total, reduced.gradients)

    def last(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, Reduced]:
        if not self.scatters_each:
            return self.reduced(total, backward)
        part, reduced = self.reduced(None, backward)
        return part, reduced._replace(gradients=add_gradients(total, reduced.gradients))

    def kept(self, place: int, gradient: Tensor) -> Tensor:
        return gradient

    def summed(self, total: list[Tensor]) -> Reduced:
        return self.reduced(None, lambda: _Gradients(total))[1]

    def reduced(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, Reduced]:
        """The sum over the ranks of `total` and the gradients of a micro-batch."""
        from mindspore import dtype as mstype

        ready: dict[int, Tensor] = {}
        dtypes: dict[int, Any] = {}
        under_way: list[Started] = []

        def arrived(place: int, gradient: Tensor) -> None:
            dtypes[place] = mstype.float32 if self.in_float32 else gradient.dtype
            ready[place] = gradient if total is None else total[place] + gradient
            if total is not None:
                total[place] = None
            while len(under_way) < len(self.buckets) and ready.keys() >= set(self.buckets[len(under_way)]):
                gradients = [ready.pop(each) for each in self.buckets[len(under_way)]]
                under_way.append(self.start(self.buckets[len(under_way)], gradients))
                if len(under_way) > _MOST_UNDER_WAY:  # lets the memory of its inputs be used again
                    under_way[-1 - _MOST_UNDER_WAY].wait()

        part = with_gradients_as_they_come(self.parameters, arrived, backward)
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
