"""Averages of weights: mean, SLERP, task arithmetic and TIES, tensor by tensor. Needs NumPy only.

All arrays are float32 and of one shape. The formulas, and which numbers have which default, are those of mergekit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_COLINEAR = 0.9995  # cosine of two tensors from which SLERP is the linear interpolation, as in mergekit


def linear(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Returns the sum of the arrays times their weights, divided by the sum of the weights."""
    return _weighted_sum(arrays, [weight / math.fsum(weights) for weight in weights])


def slerp(first: np.ndarray, second: np.ndarray, t: float) -> np.ndarray:
    """Returns the spherical interpolation between two tensors (Shoemake 1985, equation 6): `first` for t = 0.

    The angle is that between the flattened tensors. Tensors in the same direction are interpolated linearly.
    """
    norms = [float(np.linalg.norm(array.astype(np.float64))) for array in (first, second)]
    cosine = 1.0
    if min(norms) > 0:
        cosine = float(np.vdot(first.astype(np.float64), second.astype(np.float64))) / (norms[0] * norms[1])
    if abs(cosine) > _COLINEAR:
        return _weighted_sum((first, second), (1 - t, t))
    angle = math.acos(cosine)
    factors = math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
    return _weighted_sum((first, second), factors)


def task_arithmetic(
    base: np.ndarray, arrays: Sequence[np.ndarray], weights: Sequence[float], scale: float
) -> np.ndarray:
    """Returns base + scale * sum of weight * (array - base) (Ilharco et al. 2023, section 2)."""
    return base + np.float32(scale) * _weighted_sum([array - base for array in arrays], weights)


def ties(
    base: np.ndarray, arrays: Sequence[np.ndarray], weights: Sequence[float], scale: float, density: float
) -> np.ndarray:
    """Returns base + scale * the merged differences of the arrays from the base (Yadav et al. 2023, algorithm 1).

    Of each difference the share `density` with the largest absolute values is kept. Each number then has the sign of
    the weighted sum, and the mean is that of the differences with this sign.
    """
    deltas = [np.float32(weight) * _trim(array - base, density) for array, weight in zip(arrays, weights, strict=True)]
    sign = np.where(np.sum(deltas, 0) >= 0, np.float32(1), np.float32(-1))
    total = np.zeros_like(base)
    divisor = np.zeros_like(base)
    for delta, weight in zip(deltas, weights, strict=True):
        agrees = np.sign(delta) == sign
        total += delta * agrees
        divisor += np.float32(weight) * agrees
    divisor[divisor == 0] = 1
    return base + np.float32(scale) * (total / divisor)


def _weighted_sum(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    total = np.float32(weights[0]) * arrays[0]
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        total += np.float32(weight) * array
    return total


def _trim(delta: np.ndarray, density: float) -> np.ndarray:
    """Returns the array with zeros for all but the largest absolute values."""
    kept = int(density * delta.size)
    if kept >= delta.size:
        return delta
    result = np.zeros(delta.size, np.float32)
    if kept:
        flat = delta.reshape(-1)
        largest = np.argpartition(np.abs(flat), delta.size - kept)[delta.size - kept :]
        result[largest] = flat[largest]
    return result.reshape(delta.shape)
