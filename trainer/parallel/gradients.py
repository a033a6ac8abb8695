"""Sums the gradients of a step over the ranks: after the backward pass on a CPU, during it on a device.

A device reduces flat buckets (Li et al. 2020, "PyTorch Distributed", section 3.2.3): as soon as the last micro-batch of
the step has computed all gradients of a bucket, their all-reduce starts, while the backward pass goes on. Buckets are
filled from the last layer to the first, the order in which gradients are computed, and start in this order on every
rank. Where the optimizer state of a parameter is sharded, a rank gets only the sum of its range (reduce-scatter), half
of the bytes of an all-reduce.

From ZeRO stage 2 on (Rajbhandari et al. 2020, section 5.2; `optimizer_level`) a rank keeps only its ranges of these
gradients: each is reduce-scattered as soon as the backward pass of a micro-batch has computed it, and the ranges are
added up over the micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from trainer.parallel.layout import SHARD_GROUPS, SUM_GROUPS, SumGroup
from trainer.parallel.sharding import FLOAT32_BYTES

if TYPE_CHECKING:
    from mindspore import Parameter, Tensor

    from trainer.parallel.collectives import PendingResult, ProcessGroup


# Groups whose ranks shard the optimizer state.
_STATE_GROUPS: tuple[SumGroup, ...] = (*SHARD_GROUPS, *(shard for shard, _ in SHARD_GROUPS.values()))
_MAX_PENDING = 2  # buckets: while one travels the next one waits, so that the link is never idle


class HasGradients(Protocol):
    """A dataclass with gradients: the result of a backward pass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def gradients(self) -> Sequence[Tensor]:
        """Returns the gradients, in the order of the parameters."""


MicroBatch = TypeVar("MicroBatch", bound=HasGradients)


class ReducedGradients(NamedTuple):
    """The gradients of a step, summed over micro-batches and ranks.

    Attributes:
        gradients: In the order of the parameters; this rank's flat range of the reduce-scattered ones.
        seconds: How long the sum took, including the wait for the last rank. None on a device, where the host does not
            wait, and in a single process.
    """

    gradients: Sequence[Tensor]
    seconds: float | None = None


@dataclass(frozen=True)
class _Gradients:
    gradients: Sequence[Tensor]


class GradientReducer:
    """Sums the gradients of a step over micro-batches and ranks.

    Args:
        parameters: The parameters whose gradients the backward pass computes, in the order of its results.
        is_sharded: Whether the optimizer state of each is sharded over ranks.
        groups: The groups over which the gradient of each is summed, in the order of `SUM_GROUPS`; empty for a single
            process.
        shards_gradients: ZeRO stage 2: reduce the gradients of each micro-batch during its backward pass, and keep
            only this rank's ranges of the gradients whose optimizer state is sharded.
        overlaps: Reduce in buckets during the backward pass (of the last micro-batch, unless `shards_gradients`); for
            devices. False: all-reduce the gradients that are not sharded after the last backward pass.
        in_float32: Return the sums in float32, in which they are computed; False: in the dtype of each gradient.
        bucket_bytes: Limit of gradients that travel together; a larger one travels alone, without a copy.

    Attributes:
        returns_ranges: Whether the results contain only this rank's ranges of the sharded gradients.
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
        self.returns_ranges = (self.shards_gradients or self.overlaps) and any(is_sharded)
        if self.overlaps:
            from trainer.parallel.collectives import BUCKET_BYTES

            kinds = [(sharded, *its.items()) for sharded, its in zip(is_sharded, groups, strict=True)]
            sizes = [parameter.size for parameter in parameters]
            if bucket_bytes is None:
                bucket_bytes = BUCKET_BYTES
            self.buckets = plan_buckets(sizes, kinds, bucket_bytes)
        else:  # all ranks reduce in one order, in which gradients are usually computed
            self.buckets = [[place] for place in reversed(range(len(is_sharded))) if is_sharded[place]]

    def add(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        """Runs the backward pass of a micro-batch, except the last one of the step.

        Args:
            total: Sums of the gradients of earlier micro-batches; None before the first. They are changed in place.

        Returns:
            The result of `backward` without its gradients, and the new sums.
        """
        result, gradients = self._add(total, backward)
        if total is None and not self.shards_gradients:
            gradients = _compact(gradients)
        return result, gradients

    def add_last(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, ReducedGradients]:
        """Runs the backward pass of the last micro-batch and sums the gradients over the ranks.

        Args:
            total: Sums of the gradients of the other micro-batches. They are changed in place.

        Returns:
            The result of `backward` without its gradients, so that no third set of gradients exists, and the sums.
        """
        if self.overlaps and not self.shards_gradients:
            result, gradients = self._reduce_during_backward(total, backward)
        else:
            result, gradients = self._add(total, backward)
        if not self.overlaps:
            gradients = self._sum_after_backward(gradients)
        return result, self._finish(gradients)

    def local_gradient(self, place: int, gradient: Tensor) -> Tensor:
        """Returns the part of a micro-batch's gradient that this rank adds up: its range if gradients are sharded.

        For pipelines, which compute the micro-batches in the order of their schedule. It has the dtype of the sums.
        """
        from mindspore import dtype as mstype

        dtype = gradient.dtype
        if self.in_float32:
            dtype = mstype.float32
        if not self.overlaps and self.shards_gradients and self.is_sharded[place]:
            gradient = self._scatter(place, gradient)
        if gradient.dtype == dtype:
            return gradient
        return gradient.astype(dtype)

    def reduce_total(self, total: list[Tensor]) -> ReducedGradients:
        """Sums over the ranks the sums of `local_gradient` over all micro-batches; for pipelines."""
        if self.overlaps:
            return self._finish(self._reduce_during_backward(None, lambda: _Gradients(total))[1])
        return self._finish(self._sum_after_backward(total))

    def _add(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        if self.shards_gradients:
            result, gradients = self._reduce_during_backward(None, backward)
            return result, add_gradients(total, gradients)
        result = backward()
        return replace(result, gradients=()), add_gradients(total, result.gradients)

    def _finish(self, gradients: list[Tensor]) -> ReducedGradients:
        seconds = None
        if self.groups and not self.overlaps:
            seconds = self.seconds
        self.seconds = 0.0
        return ReducedGradients(gradients, seconds)

    def _sum_after_backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """Sums the gradients over their groups, one kind of group after the other.

        Gradients that are reduce-scattered already are summed only over the groups that follow.
        """
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

    def _reduce_during_backward(
        self, total: list[Tensor] | None, backward: Callable[[], MicroBatch]
    ) -> tuple[MicroBatch, list[Tensor]]:
        """Reduces the sum of `total` and the gradients of a micro-batch, bucket by bucket, during its backward pass.

        Gradients in no bucket are returned as they are.
        """
        from mindspore import dtype as mstype

        places = {place for bucket in self.buckets for place in bucket}
        reduced: list[Any] = [None] * len(self.parameters)
        ready: dict[int, Tensor] = {}
        dtypes: dict[int, Any] = {}
        pending: list[PendingResult] = []

        def on_gradient(place: int, gradient: Tensor) -> None:
            """Adds a gradient to the sum of earlier micro-batches, and starts each bucket that is complete."""
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
                total[place] = None
            while len(pending) < len(self.buckets) and ready.keys() >= set(self.buckets[len(pending)]):
                bucket = self.buckets[len(pending)]
                pending.append(self._start(bucket, [ready.pop(each) for each in bucket]))
                if len(pending) > _MAX_PENDING:  # lets the memory of its inputs be used again
                    pending[-1 - _MAX_PENDING].wait()

        result = run_with_grad_hooks(self.parameters, on_gradient, backward)
        for bucket, started in zip(self.buckets, pending, strict=True):
            for place, gradient in zip(bucket, self._parts(bucket, started.wait()), strict=True):
                if gradient.dtype == dtypes[place]:
                    reduced[place] = gradient
                else:
                    reduced[place] = gradient.astype(dtypes[place])
        return result, reduced

    def _start(self, bucket: list[int], gradients: list[Tensor]) -> PendingResult:
        """Starts to reduce the gradients of a bucket, in float32, over its groups."""
        from mindspore import dtype as mstype
        from mindspore import ops

        from trainer.parallel import collectives

        if not self.overlaps:
            return collectives.PendingResult(self._scatter(bucket[0], gradients[0]))
        gradients = [each if each.dtype == mstype.float32 else each.astype(mstype.float32) for each in gradients]
        groups = self.groups[bucket[0]]
        if self.is_sharded[bucket[0]]:
            ranks = self._state_group(bucket[0]).size
            rows = [collectives.shard_rows(gradient, ranks) for gradient in gradients]
        else:
            rows = [gradient.reshape(-1) for gradient in gradients]
        joined = rows[0]
        if len(rows) > 1:
            joined = ops.concat(rows, -1)
        pending = collectives.PendingResult(joined)
        for kind, group in groups.items():
            if self.is_sharded[bucket[0]] and kind in _STATE_GROUPS:
                pending = collectives.start_reduce_scatter(pending.wait(), group)
            else:
                pending = collectives.start_all_reduce(pending.wait(), group)
        return pending

    def _parts(self, bucket: list[int], flat: Tensor) -> list[Tensor]:
        """Splits a reduced bucket into its gradients, or this rank's ranges of them."""
        if not self.overlaps:
            return [flat]
        from mindspore import ops

        from trainer.parallel.collectives import local_range

        parameters = [self.parameters[place] for place in bucket]
        if not self.is_sharded[bucket[0]]:
            parts = ops.split(flat, [parameter.size for parameter in parameters])
            return [part.reshape(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
        group = self._state_group(bucket[0])
        parts = ops.split(flat, [-(-parameter.size // group.size) for parameter in parameters])
        return [local_range(part, parameter.size, group) for part, parameter in zip(parts, parameters, strict=True)]

    def _scatter(self, place: int, gradient: Tensor) -> Tensor:
        """Returns this rank's range of the sum of a gradient over the ranks, flat, in float32, on a CPU."""
        from trainer.parallel.collectives import all_reduce, reduce_scatter_range

        gradient.asnumpy()  # waits until it is computed: the time below is that of the sum alone
        began = time.perf_counter()
        for kind, group in self.groups[place].items():
            if kind in ("tp", "kv"):
                [gradient] = all_reduce([gradient], group)
        group = self._state_group(place)
        assert group.on_host
        local = reduce_scatter_range(gradient, group)
        for kind, group in self.groups[place].items():
            if kind in ("dp_replicas", "expert_replicas"):
                [local] = all_reduce([local], group)
        self.seconds += time.perf_counter() - began
        return local

    def _state_group(self, place: int) -> ProcessGroup:
        """Returns the ranks over which the optimizer state of a parameter is sharded."""
        return next(group for kind, group in self.groups[place].items() if kind in _STATE_GROUPS)


def add_gradients(total: list[Tensor] | None, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Adds gradients to `total` in place, tensor by tensor, so that a third set of gradients never exists."""
    if total is None:
        return list(gradients)
    from mindspore import Tensor, ops

    on_host = _is_on_host()
    for place, gradient in enumerate(gradients):
        if on_host:
            array = total[place].asnumpy()  # a copy, where an operator has made the gradient as a view
            total[place] = Tensor.from_numpy(np.add(array, gradient.asnumpy(), out=array))
        else:
            total[place] = ops.add(total[place], gradient)
    return total


def _compact(gradients: list[Tensor]) -> list[Tensor]:
    """Copies gradients that stay to new memory; on a CPU only.

    The gaps between them are too small for the activations of the next micro-batch.
    """
    if not _is_on_host():
        return gradients
    from mindspore import Tensor

    return [Tensor(gradient.asnumpy().copy()) for gradient in gradients]


def _is_on_host() -> bool:
    import mindspore

    return mindspore.get_context("device_target") == "CPU"


def run_with_grad_hooks(
    parameters: Sequence[Parameter], on_gradient: Callable[[int, Tensor], None], backward: Callable[[], MicroBatch]
) -> MicroBatch:
    """Runs a backward pass and calls `on_gradient` as soon as a gradient is computed; nothing else keeps the gradient.

    Args:
        on_gradient: (index of a parameter, its gradient) -> None.

    Returns:
        The result of `backward` without its gradients.
    """
    from mindspore import ops

    computed: set[int] = set()
    placeholder = ops.zeros(1)  # the backward pass returns it instead of a gradient, whose memory is then free

    def hook(gradient: Tensor, place: int) -> Tensor:
        """Passes the gradient on, and returns the placeholder instead of it."""
        assert place not in computed, "the hook of a parameter gets the sum over all of its uses, once"
        computed.add(place)
        on_gradient(place, gradient)
        return placeholder

    hooks = [
        parameter.register_hook(lambda gradient, place=place: hook(gradient, place))
        for place, parameter in enumerate(parameters)
    ]
    try:
        result = backward()
    finally:
        for each in hooks:
            each.remove()
    for place, gradient in enumerate(result.gradients):
        if place not in computed:  # nothing depends on the parameter in this micro-batch
            on_gradient(place, gradient)
    return replace(result, gradients=())


def plan_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int) -> list[list[int]]:
    """Returns buckets of indices of gradients, from the last to the first; each has gradients of one kind."""
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
    # The remaining buckets contain the gradients that are computed last.
    return buckets + sorted((bucket for bucket, _ in filling.values()), key=min, reverse=True)
