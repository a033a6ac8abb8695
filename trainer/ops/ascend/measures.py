"""Computes the metrics of a step (losses, gradient norms, routers) as float32 tensors that stay on the device.

`trainer/arrays/measures.py` has the same functions for a CPU, and documents them. The host reads all results of a step
together, in one small tensor.

Legend: as in trainer/arrays/measures.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, Tensor, mint
from mindspore import dtype as mstype

from trainer.ops.routing import Routing, RoutingCounts

_TINY = 1e-20


def keep_scalar(scalar: Tensor) -> Tensor:
    """Returns the scalar, which stays on the device."""
    return scalar


def sum_scalars(kept: Sequence[Tensor | float]) -> Tensor | float:
    """Sums the results of `keep_scalar`."""
    if not isinstance(kept[0], Tensor):  # zeros: the losses are on another rank
        return sum(kept)
    if len(kept) == 1:
        return kept[0]
    return mint.sum(mint.stack(list(kept)))


def squares(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squared elements of each gradient, [P]."""
    if not gradients:  # a pipeline stage without trainable parameters; `scatter_squares` does not read the result
        return mint.zeros(1)
    # One operator without a copy of the gradient; its square overflows only where the sum of squares would.
    norms_P = mint.stack([mint.norm(gradient, dtype=mstype.float32) for gradient in gradients])
    return norms_P * norms_P


def square_sums(squares_P: Tensor, groups: Sequence[Sequence[int]], include_squares: bool) -> Tensor:
    """Sums `squares` over all gradients and over groups, as described for a CPU."""
    number = squares_P.shape[0]
    # P for gradient 0, 1 for the last: the largest of those that are not finite names the first of them.
    from_end_P = Tensor(np.arange(number, 0, -1, dtype=np.float32))
    nonfinite = mint.max(mint.where(mint.isfinite(squares_P), mint.zeros_like(squares_P), from_end_P))
    group_sums = [mint.sum(mint.index_select(squares_P, 0, Tensor(np.array(group, np.int32)))) for group in groups]
    parts = [mint.stack([mint.sum(squares_P), nonfinite, *group_sums])]
    if include_squares:
        parts.append(squares_P)
    return mint.cat(parts)


def scatter_squares(squares_P: Tensor, factors_P: np.ndarray, places: Sequence[int]) -> Tensor:
    """Returns for each of the places its square times its factor; zero for place P."""
    scaled = mint.zeros(1)
    if len(factors_P):
        scaled = mint.cat([squares_P * Tensor(factors_P.astype(np.float32)), scaled])
    return mint.index_select(scaled, 0, Tensor(np.array(places, np.int32)))


def routing_counts(layers: Sequence[int], routings: Sequence[Routing], scores: Sequence[Tensor]) -> RoutingCounts:
    """Counts a micro-batch from the routing and the router's scores [N, E] of each layer."""
    kept_LE = mint.stack([routing.kept_E for routing in routings]).astype(mstype.float32)
    requested_LE = mint.stack([routing.requested_E for routing in routings]).astype(mstype.float32)
    entropy_L = mint.stack([_entropy(scores_NE) for scores_NE in scores])
    return RoutingCounts(tuple(layers), kept_LE, requested_LE, entropy_L * mint.sum(requested_LE, 1))


def pad_to_all_layers(counts: RoutingCounts | None, layers: Sequence[int], experts: int) -> RoutingCounts:
    """Adds zeros for the layers of other ranks."""
    if counts is None:
        zeros_LE = mint.zeros((len(layers), experts))
        return RoutingCounts(tuple(layers), zeros_LE, zeros_LE, mint.zeros(len(layers)))
    numbers = {layer: number for number, layer in enumerate(counts.layers)}
    indices = Tensor(np.array([numbers.get(layer, len(numbers)) for layer in layers], np.int32))

    def pad(values: Tensor, *shape: int) -> Tensor:
        """Inserts zeros for the MoE layers of other stages."""
        return mint.index_select(mint.cat([values, mint.zeros((1, *shape))]), 0, indices)

    return RoutingCounts(
        tuple(layers), pad(counts.kept, experts), pad(counts.requested, experts), pad(counts.entropy_sum)
    )


def _entropy(scores_NE: Tensor) -> Tensor:
    p_NE = scores_NE / (mint.sum(scores_NE, 1, keepdim=True) + _TINY)
    return -mint.sum(p_NE * mint.log(p_NE + _TINY)) / scores_NE.shape[0]


def router_rates(counts: RoutingCounts) -> Tensor:
    """Returns drop rate, load imbalance and entropy of each layer, [3, L]."""
    total_L = mint.sum(counts.requested, 1)
    most_one_L = mint.clamp(total_L, 1.0)
    dropped_L = (total_L - mint.sum(counts.kept, 1)) / most_one_L
    busiest_L = mint.amax(counts.requested, 1) * counts.requested.shape[1] / most_one_L
    uneven_L = mint.where(total_L > 0, busiest_L, mint.ones_like(busiest_L))
    return mint.stack([dropped_L, uneven_L, counts.entropy_sum / most_one_L])


def update_expert_bias(bias_E: Parameter, requested_E: Tensor, rate: float) -> None:
    """Adds `rate` to the bias of experts below the mean load, and subtracts it for those above."""
    bias_E.copy_(bias_E + mint.sign(mint.mean(requested_E) - requested_E) * rate)
