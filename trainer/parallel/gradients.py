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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from trainer.parallel.layout import SUM_GROUPS, SumGroup
from trainer.parallel.sharding import FLOAT32_BYTES

if TYPE_CHECKING:
    from mindspore import Parameter, Tensor

    from trainer.parallel.collectives import PendingResult, ProcessGroup


_SCATTERING: tuple[SumGroup, ...] = ("dp_cp", "expert_dp")  # those whose ranks share the optimizer state
_MOST_UNDER_WAY = 2  # buckets: while one travels the next one waits, so that the link is never idle


class HasGradients(Protocol):
    gradients: Sequence[Tensor]


MicroBatch = TypeVar("MicroBatch", bound=HasGradients)


class ReducedGradients(NamedTuple):
    """The gradients of a step, summed over micro-batches and ranks.

    Attributes:
        gradients: In the order of the parameters; flat, this rank's range of those that are reduced and scattered.
        seconds: How long the sum took, with the wait for the last rank. None on a device, where the host does not wait,
            and in a single process.
    """

    gradients: Sequence[Tensor]
    seconds: float | None = None


@dataclass(frozen=True)
class _Gradients:
    gradients: Sequence[Tensor]


class GradientReducer:
    """Sums the gradients of a step over micro-batches and ranks.

    Args:
        parameters: Those whose gradients the backward pass computes, in its order of results.
        is_sharded: Whether the optimizer state of each is sharded among ranks.
        groups: The groups over which the gradient of each is summed, in the order of `SUM_GROUPS`; empty for a single
            process.
        shards_gradients: ZeRO stage 2: reduce the gradients of each micro-batch during its backward pass, and keep
            only this rank's ranges of the gradients whose optimizer state is sharded.
        overlaps: Reduce in buckets during the backward pass (of the last micro-batch, unless `shards_gradients`); for
            devices. False: all-reduce the gradients that are not sharded after the last backward pass.
        in_float32: Leave the sums in float32, in which they are made; False: in the dtype of each gradient.
        bucket_bytes: Limit of gradients that travel together; a larger one travels alone, without a copy.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter] = (),
        is_sharded: Sequence[bool] = (),
        groups: Sequence[Mapping[SumGroup, ProcessGroup]] = (),
        *,
        shards_gradients: bool = False,
        overlaps: bool = False,
        in_float32: bool = True,
        bucket_bytes: int | None = None,
    ) -> None:
        self.parameters = parameters
        self.is_sharded = is_sharded
        self.groups = groups
        self.shards_gradients = shards_gradients and bool(groups)
        self.overlaps = overlaps and bool(groups)
        self.in_float32 = in_float32
        self.seconds = 0.0  # of this step, in collectives that the host waits for
        self.returns_ranges = (self.shards_gradients or self.overlaps) and any(is_sharded)  # of the sharded ones
        if self.overlaps:
            from trainer.parallel.collectives import BUCKET_BYTES

            kinds = [(sharded, *its.items()) for sharded, its in zip(is_sharded, groups, strict=True)]
            sizes = [parameter.size for parameter in parameters]
            self.buckets = plan_buckets(sizes, kinds, BUCKET_BYTES if bucket_bytes is None else bucket_bytes)
        else:  # all ranks reduce in one order: that in which gradients come as a rule
            self.buckets = [[place] for place in reversed(range(len(is_sharded))) if is_sharded[place]]

    def add(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        """Runs the backward pass of a micro-batch that is not the last one; returns what `backward` did, without its
        gradients, and the sum of these and `total`."""
        part, gradients = self._add(total, backward)
        return part, _compact(gradients) if total is None and not self.shards_gradients else gradients

    def add_last(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, ReducedGradients]:
        """Runs the backward pass of the last micro-batch and adds its gradients to those of the others, `total`.

        The returned result of `backward`, a dataclass, keeps none of its gradients: while ranks add up theirs, there
        are two sets of them and no third.
        """
        if self.overlaps and not self.shards_gradients:
            part, gradients = self._reduce_as_they_come(total, backward)
        else:
            part, gradients = self._add(total, backward)
        return part, self._reduced(gradients if self.overlaps else self._sum_rest(gradients))

    def local_gradient(self, place: int, gradient: Tensor) -> Tensor:
        """For what computes the micro-batches in an order of its own, as a pipeline does: what is added up of the
        gradient of a micro-batch."""
        if self.overlaps or not (self.shards_gradients and self.is_sharded[place]):
            return gradient
        own = self._scatter(place, gradient)
        if self.in_float32:
            return own
        return own.astype(gradient.dtype)

    def reduce_total(self, total: list[Tensor]) -> ReducedGradients:
        """For the same: the sum over the ranks of what was added up."""
        if self.overlaps:
            return self._reduced(self._reduce_as_they_come(None, lambda: _Gradients(total))[1])
        return self._reduced(self._sum_rest(total))

    def _add(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        if self.shards_gradients:
            part, gradients = self._reduce_as_they_come(None, backward)
            return part, add_gradients(total, gradients)
        part = backward()
        return replace(part, gradients=()), add_gradients(total, part.gradients)

    def _reduced(self, gradients: list[Tensor]) -> ReducedGradients:
        seconds = None
        if self.groups and not self.overlaps:
            seconds = self.seconds
        self.seconds = 0.0
        return ReducedGradients(gradients, seconds)

    def _sum_rest(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients summed over their groups, one kind after the other; those that are scattered already over what
        follows the scattering."""
        if not self.groups:
            return gradients
        from trainer.parallel.collectives import all_reduce

        for gradient in gradients:
            gradient.asnumpy()  # waits until it is computed: the time below is that of the sum alone
        began = time.perf_counter()
        summed = list(gradients)
        for kind in SUM_GROUPS:
            places = [
                place for place, groups in enumerate(self.groups)
                if kind in groups and (kind == "embedding" or not (self.shards_gradients and self.is_sharded[place]))
            ]  # fmt: skip
            if places:
                group = self.groups[places[0]][kind]
                for place, total in zip(places, all_reduce([summed[place] for place in places], group), strict=True):
                    summed[place] = total
        self.seconds += time.perf_counter() - began
        return summed

    def _reduce_as_they_come(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        """Reduces the sum of `total` and the gradients of a micro-batch, bucket by bucket; what is in no bucket stays.
        """
        from mindspore import dtype as mstype

        places = {place for bucket in self.buckets for place in bucket}
        reduced: list[Any] = [None] * len(self.parameters)
        ready: dict[int, Tensor] = {}
        dtypes: dict[int, Any] = {}
        under_way: list[PendingResult] = []

        def arrived(place: int, gradient: Tensor) -> None:
            if place not in places:
                reduced[place] = gradient
                return
            if self.in_float32:
                dtypes[place] = mstype.float32
            else:
                dtypes[place] = gradient.dtype
            if total is None:
                ready[place] = gradient
            else:
                ready[place] = total[place] + gradient
            if total is not None:
                total[place] = None
            while len(under_way) < len(self.buckets) and ready.keys() >= set(self.buckets[len(under_way)]):
                bucket = self.buckets[len(under_way)]
                under_way.append(self._start(bucket, [ready.pop(each) for each in bucket]))
                if len(under_way) > _MOST_UNDER_WAY:  # lets the memory of its inputs be used again
                    under_way[-1 - _MOST_UNDER_WAY].wait()

        part = run_with_grad_hooks(self.parameters, arrived, backward)
        for bucket, started in zip(self.buckets, under_way, strict=True):
            for place, gradient in zip(bucket, self._parts(bucket, started.wait()), strict=True):
                if gradient.dtype == dtypes[place]:
                    reduced[place] = gradient
                else:
                    reduced[place] = gradient.astype(dtypes[place])
        return part, reduced

    def _start(self, bucket: list[int], gradients: list[Tensor]) -> PendingResult:
        """Begins to reduce the gradients of a bucket, in float32, over its groups."""
        from mindspore import dtype as mstype
        from mindspore import ops

        from trainer.parallel import collectives

        if not self.overlaps:
            return collectives.PendingResult(self._scatter(bucket[0], gradients[0]))
        gradients = [each if each.dtype == mstype.float32 else each.astype(mstype.float32) for each in gradients]
        groups = self.groups[bucket[0]]
        if self.is_sharded[bucket[0]]:
            ranks = self._scattering_group(bucket[0]).size
            rows = [collectives.shard_rows(gradient, ranks) for gradient in gradients]
        else:
            rows = [gradient.reshape(-1) for gradient in gradients]
        started = collectives.PendingResult(rows[0] if len(rows) == 1 else ops.concat(rows, -1))
        for kind, group in groups.items():
            shards_gradients = self.is_sharded[bucket[0]] and kind in _SCATTERING
            if shards_gradients:
                start = collectives.start_reduce_scatter
            else:
                start = collectives.start_all_reduce
            started = start(started.wait(), group)
        return started

    def _parts(self, bucket: list[int], flat: Tensor) -> list[Tensor]:
        """The gradients of a bucket, or this rank's ranges of them."""
        if not self.overlaps:
            return [flat]
        from mindspore import ops

        from trainer.parallel.collectives import local_range

        parameters = [self.parameters[place] for place in bucket]
        if not self.is_sharded[bucket[0]]:
            parts = ops.split(flat, [parameter.size for parameter in parameters])
            return [part.reshape(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
        group = self._scattering_group(bucket[0])
        parts = ops.split(flat, [-(-parameter.size // group.size) for parameter in parameters])
        return [local_range(part, parameter.size, group) for part, parameter in zip(parts, parameters, strict=True)]

    def _scatter(self, place: int, gradient: Tensor) -> Tensor:
        """This rank's range of a gradient, summed over the ranks of a CPU up to the scattering: flat, in float32."""
        from trainer.parallel.collectives import all_reduce, reduce_scatter_range

        gradient.asnumpy()  # waits until it is computed: the time below is that of the sum alone
        began = time.perf_counter()
        for kind, group in self.groups[place].items():
            if kind in ("tp", "kv"):
                [gradient] = all_reduce([gradient], group)
        own = reduce_scatter_range(gradient, self._scattering_group(place))
        self.seconds += time.perf_counter() - began
        return own

    def _scattering_group(self, place: int) -> ProcessGroup:
        return next(group for kind, group in self.groups[place].items() if kind in _SCATTERING)


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


def run_with_grad_hooks(
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


def plan_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int) -> list[list[int]]:
    """Buckets of the places of gradients, from the last to the first; each has gradients of one kind alone."""
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for place in reversed(range(len(sizes))):
        kind = kinds[place]
        size = FLOAT32_BYTES * sizes[place]
        bucket, used = filling.pop(kind, ([], 0))
        if bucket and used + size > bucket_bytes:
            buckets.append(bucket)
            bucket = []
            used = 0
        filling[kind] = ([*bucket, place], used + size)
    # What is left holds the gradients that come last.
    return buckets + sorted((bucket for bucket, _ in filling.values()), key=min, reverse=True)
