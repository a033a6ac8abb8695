"""Gradients of a window of micro-batches, normalised once by all valid tokens of the window."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from mindspore import Tensor, ops

from trainer.data.batches.batch import IGNORE_INDEX, Batch
from trainer.ops.routing import RoutingCounts
from trainer.parallel.communicator import Communicator, SingleProcess


@dataclass(frozen=True)
class MicroBatch:
    """Result of one forward and backward pass.

    Attributes:
        loss_sum: Sum of the token losses.
        other_sums: Auxiliary losses before their factors, by their name in the metrics: the sum, and the number of
            labels to divide it by.
    """

    loss_sum: float
    other_sums: Mapping[str, tuple[float, float]]
    routing: RoutingCounts | None  # None for a dense model
    gradients: Sequence[Tensor]


@dataclass(frozen=True)
class WindowGradients:
    """Loss, tokens and gradients of one window.

    Attributes:
        loss: Sum of token losses / valid tokens, in nats.
        tokens: Valid tokens of the window.
        empty: Micro-batches of the window without a valid token, on all ranks.
        gradients: Gradients of the minimised loss times the loss scale, one for each parameter; None when the window
            has no valid token.
        others: Auxiliary losses by name, each the mean over its own labels, before their factors.
        reduce_seconds: Time to sum the gradients over the ranks, including the wait for the last rank.
    """

    loss: float
    tokens: int
    empty: int
    gradients: Sequence[Tensor] | None
    others: Mapping[str, float] = field(default_factory=dict)
    routing: RoutingCounts | None = None
    reduce_seconds: float | None = None


def valid_tokens(batch: Batch) -> int:
    """Number of labels that carry a loss."""
    return int(np.count_nonzero(batch.labels != IGNORE_INDEX))


def accumulate(
    micro_batches: Sequence[Batch],
    backward: Callable[[Batch, int, float], MicroBatch],
    loss_scale: float = 1.0,
    communicator: Communicator | None = None,
    skips_empty: bool = True,
) -> WindowGradients:
    """Forward and backward over a window, summing gradients over its micro-batches and then over the ranks.

    The number of valid tokens of all ranks is known before the first backward pass. Every micro-batch's loss is divided
    by that total, so the summed gradients equal those of one large batch, however the tokens are distributed.

    Args:
        micro_batches: This rank's window; all ranks have equally many. The last window of an epoch may be shorter.
        backward: (batch, its number in the window, loss scale / tokens of the window) -> losses as sums over tokens,
            and their gradients times the factor. It is not called for a micro-batch without a valid token, whose
            gradient is zero, unless this rank has no other one: every rank must take part in the sums.
        skips_empty: False: it is called for those too, as every rank takes part in sums of each micro-batch.
    """
    communicator = SingleProcess() if communicator is None else communicator
    counts = [valid_tokens(batch) for batch in micro_batches]
    tokens, empty = (int(number) for number in communicator.all_sum([sum(counts), counts.count(0)]))
    if tokens == 0:
        return WindowGradients(0.0, 0, empty, None, reduce_seconds=0.0)
    loss_sum, others, routing, total = 0.0, {}, None, None
    for number, (batch, count) in enumerate(zip(micro_batches, counts, strict=True)):
        if skips_empty and count == 0 and (any(counts) or number > 0):
            continue
        part = backward(batch, number, loss_scale / tokens)
        loss_sum += part.loss_sum
        others = {name: np.add(others.get(name, 0.0), pair) for name, pair in part.other_sums.items()}
        routing = part.routing if routing is None else routing + part.routing
        # Each set is added and dropped at once: memory does not grow with the number of micro-batches.
        total = list(part.gradients) if total is None else _add(total, part.gradients)
        del part
    loss_sum, *sums = communicator.all_sum([loss_sum, *(float(number) for pair in others.values() for number in pair)])
    pairs = zip(others, sums[::2], sums[1::2], strict=True)
    means = {name: value / max(weight, 1) for name, value, weight in pairs}
    routing = None if routing is None else _over_ranks(routing, communicator)
    began = time.perf_counter()
    total = communicator.sum_gradients(total)
    reduce_seconds = time.perf_counter() - began
    return WindowGradients(loss_sum / tokens, tokens, empty, total, means, routing, reduce_seconds)


def _over_ranks(routing: RoutingCounts, communicator: Communicator) -> RoutingCounts:
    if communicator.size == 1:
        return routing
    assigned_L = routing.requested.sum(1)
    numbers = [*routing.kept.ravel(), *routing.requested.ravel(), *(routing.entropy * assigned_L)]
    sums, size = np.array(communicator.all_sum([float(number) for number in numbers])), routing.kept.size
    kept, requested = sums[: 2 * size].reshape(2, *routing.kept.shape).astype(np.int64)
    return RoutingCounts(routing.layers, kept, requested, sums[2 * size :] / np.maximum(requested.sum(1), 1))


def _add(total: list[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Adds to `total` in place, tensor by tensor, so that a third set of gradients never exists."""
    for i, gradient in enumerate(gradients):
        total[i] = ops.add(total[i], gradient)
    return total
