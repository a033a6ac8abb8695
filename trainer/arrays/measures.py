"""Measures of losses, gradients and routers that a step reports, computed on the host; sums are in float64.

`trainer/ops/ascend/measures.py` has the same functions for results that stay on the device.

Legend: P gradients, L MoE layers, E experts, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, Tensor

from trainer.arrays.memory import shared_array
from trainer.ops.routing import Routing, RoutingCounts


def keep_scalar(scalar: Tensor) -> float:
    """Converts a scalar result of a micro-batch to a Python number, which waits until it is computed.

    Then the next micro-batch can reuse the memory of this one.
    """
    return float(scalar.asnumpy())


def sum_scalars(kept: Sequence[float]) -> float:
    """Returns the sum of results of `keep_scalar`, added one after the other."""
    return sum(kept)


def sum_of_squares(tensor: Tensor) -> float:
    """Returns the sum of the squares of all elements: float32 products over short rows, then float64 sums of the rows.

    The error is below 1e-7 of the sum. MindSpore's L2Loss adds in one float32 running sum on a CPU, which makes the
    result 0.3 % too small for three million values.
    """
    flat = shared_array(tensor).reshape(-1)
    if flat.dtype != np.float32:
        flat = flat.astype(np.float32)
    row = 1024
    rows = flat[: flat.size // row * row].reshape(-1, 1, row)
    rest = flat[rows.size :]
    sums = np.matmul(rows, rows.reshape(-1, row, 1))  # one dot product a row
    return float(sums.sum(dtype=np.float64)) + float(np.dot(rest, rest))


def squares(gradients: Sequence[Tensor]) -> np.ndarray:
    """Returns the sum of the squared elements of each gradient, [P]."""
    return np.array([sum_of_squares(gradient) for gradient in gradients], np.float64)


def square_sums(squares_P: np.ndarray, groups: Sequence[Sequence[int]], include_squares: bool) -> np.ndarray:
    """Returns the sums of squares that a step reports, in one array.

    These are the sum over all gradients; P minus the index of the first non-finite gradient, or 0 if all are finite;
    the sum over the gradients of each group; and with `include_squares` the squares themselves.
    """
    nonfinite = next((len(squares_P) - place for place, square in enumerate(squares_P) if not math.isfinite(square)), 0)
    group_sums = [math.fsum(squares_P[place] for place in group) for group in groups]
    sums = [math.fsum(squares_P), nonfinite, *group_sums]
    if include_squares:
        sums += list(squares_P)
    return np.array(sums)


def scatter_squares(squares_P: np.ndarray, factors_P: np.ndarray, places: Sequence[int]) -> np.ndarray:
    """Returns for each of the places the product of its square and its factor; zero for place P."""
    return np.append(squares_P * factors_P, 0.0)[list(places)]


def routing_counts(
    layers: Sequence[int], routings: Sequence[Routing], scores: Sequence[np.ndarray | Tensor]
) -> RoutingCounts:
    """Returns the counts of a micro-batch from the routing and the router's scores [N, E] of each layer."""
    requested = np.stack([np.asarray(routing.requested_E) for routing in routings])
    entropy = np.array([_entropy(np.asarray(scores_NE)) for scores_NE in scores])
    kept = np.stack([np.asarray(routing.kept_E) for routing in routings])
    return RoutingCounts(tuple(layers), kept, requested, entropy * requested.sum(1))


def pad_to_all_layers(counts: RoutingCounts | None, layers: Sequence[int], experts: int) -> RoutingCounts:
    """Returns the counts of all `layers`, with zeros for the layers of other ranks, which `counts` lacks."""
    kept, requested = (np.zeros((len(layers), experts)) for _ in range(2))
    entropy_L = np.zeros(len(layers))
    if counts is not None:
        rows = [layers.index(layer) for layer in counts.layers]
        kept[rows] = counts.kept
        requested[rows] = counts.requested
        entropy_L[rows] = counts.entropy_sum
    return RoutingCounts(tuple(layers), kept, requested, entropy_L)


def _entropy(scores_NE: np.ndarray) -> float:
    """Returns the entropy of the normalised scores, in nats: the mean over the tokens."""
    p_NE = scores_NE / (scores_NE.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return float(-(p_NE * np.log(p_NE + np.float32(1e-20))).sum(axis=1, dtype=np.float64).mean())


def router_rates(counts: RoutingCounts) -> np.ndarray:
    """Returns drop rate, load imbalance and entropy of each layer, [3, L]; `RoutingCounts` defines them."""
    return np.stack([counts.drop_rate, counts.load_imbalance, counts.entropy])


def update_expert_bias(bias_E: Parameter, requested_E: np.ndarray, rate: float) -> None:
    """Adds `rate` to the bias of experts with less than the mean load, and subtracts it for those with more."""
    step_E = np.sign(requested_E.mean() - requested_E) * rate
    bias_E.set_data(Tensor((bias_E.asnumpy() + step_E).astype(np.float32)))
