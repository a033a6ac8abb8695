"""Gradients of a window of micro-batches, normalised once by all valid tokens of the window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from mindspore import Tensor, ops

from trainer.data.batch import IGNORE_INDEX, Batch
from trainer.ops.routing import RoutingCounts


@dataclass(frozen=True)
class MicroBatch:
    """What a forward and backward pass leaves.

    Attributes:
        loss_sum: Sum of the token losses.
        other_sums: Further losses before their factors, by their name in the metrics.
        routing: What the routers did, None for a dense model.
        gradients: One for each parameter.
    """

    loss_sum: float
    other_sums: Mapping[str, float]
    routing: RoutingCounts | None
    gradients: Sequence[Tensor]


@dataclass(frozen=True)
class WindowGradients:
    """Loss, tokens and gradients of one window.

    Attributes:
        loss: Sum of token losses / valid tokens, in nats.
        tokens: Valid tokens of the window.
        empty: Micro-batches of the window without a valid token.
        gradients: Of what is minimised times the loss scale, one for each parameter; None when the window has no valid
            token.
        others: Further losses by name, as sums / valid tokens, before their factors.
        routing: Over all micro-batches, None for a dense model.
    """

    loss: float
    tokens: int
    empty: int
    gradients: Sequence[Tensor] | None
    others: Mapping[str, float] = field(default_factory=dict)
    routing: RoutingCounts | None = None


def valid_tokens(batch: Batch) -> int:
    """Labels that carry a loss."""
    return int(np.count_nonzero(batch.labels != IGNORE_INDEX))


def accumulate(
    micro_batches: Sequence[Batch],
    backward: Callable[[Batch, int, float], MicroBatch],
    loss_scale: float = 1.0,
) -> WindowGradients:
    """Forward and backward over a window, summing gradients.

    The number of valid tokens is known before the first backward pass, so every micro-batch's loss is divided by the
    window's total and the sum of the gradients is that of one large batch, however the tokens are spread.

    Args:
        micro_batches: The window; a last, partial one of an epoch is simply shorter.
        backward: (batch, its number in the window, loss scale / tokens of the window) -> losses as sums over tokens and
            gradients of these times the factor. Not called for a micro-batch without a valid token, whose gradient is
            zero.
        loss_scale: Factor on the gradients, see `trainer.step.loss_scale`.
    """
    counts = [valid_tokens(batch) for batch in micro_batches]
    tokens, empty = sum(counts), counts.count(0)
    if tokens == 0:
        return WindowGradients(0.0, 0, empty, None)
    loss_sum, others, routing, total = 0.0, {}, None, None
    for number, (batch, count) in enumerate(zip(micro_batches, counts, strict=True)):
        if count == 0:
            continue
        part = backward(batch, number, loss_scale / tokens)
        loss_sum += part.loss_sum
        others = {name: others.get(name, 0.0) + value for name, value in part.other_sums.items()}
        routing = part.routing if routing is None else routing + part.routing
        # Summed one by one and dropped at once: memory does not grow with the number of micro-batches.
        total = list(part.gradients) if total is None else _add(total, part.gradients)
        del part
    means = {name: value / tokens for name, value in others.items()}
    return WindowGradients(loss_sum / tokens, tokens, empty, total, means, routing)


def _add(total: list[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Adds in place of `total`, tensor by tensor, so that no third set of gradients is ever alive."""
    for i, gradient in enumerate(gradients):
        total[i] = ops.add(total[i], gradient)
    return total
