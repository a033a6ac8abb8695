"""What each kernel computes, said in the most literal way in float64 numpy, gradients by central differences, and
comparisons of arrays.

Needs numpy only. Legend: as in trainer/arrays/tiles.py (N tokens, D hidden, I/O features, F feed-forward, V
vocabulary, H query heads, K key/value heads, d head size), B rows, Q queries and S keys of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np


def standard_normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def linear(x_NI: np.ndarray, weight_OI: np.ndarray, bias_O: np.ndarray | float = 0.0) -> np.ndarray:
    return np.einsum("ni,oi->no", x_NI, weight_OI) + bias_O


def rms_norm(x_ND: np.ndarray, weight_D: np.ndarray, eps: float) -> np.ndarray:
    return x_ND / np.sqrt((x_ND**2).mean(-1, keepdims=True) + eps) * weight_D


def rotary(
    x_NC: np.ndarray, cos_Nd: np.ndarray, sin_Nd: np.ndarray, size: int | None = None, interleaved: bool = False
) -> np.ndarray:
    """Turns each pair of a head, (x[i], x[i + d/2]) or (x[2i], x[2i + 1]), by its angle, which the tables hold at both.

    Heads of another `size` than the tables' d keep what follows their first d numbers.
    """
    half = cos_Nd.shape[1] // 2
    out_NC = x_NC.copy()
    for start in range(0, x_NC.shape[1], size or 2 * half):
        for i in range(half):
            one, other = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
            first, second = x_NC[:, start + one], x_NC[:, start + other]
            out_NC[:, start + one] = first * cos_Nd[:, one] - second * sin_Nd[:, one]
            out_NC[:, start + other] = second * cos_Nd[:, other] + first * sin_Nd[:, other]
    return out_NC


def swiglu(gate_NF: np.ndarray, up_NF: np.ndarray) -> np.ndarray:
    return gate_NF / (1 + np.exp(-gate_NF)) * up_NF


def relu2(x_NF: np.ndarray) -> np.ndarray:
    return np.where(x_NF.real > 0, x_NF, 0) ** 2


def attention(
    q_NC: np.ndarray, k_NK: np.ndarray, v_NK: np.ndarray, allowed_BQS: np.ndarray, head_size: int,
    keep_BHQS: np.ndarray | None = None, scale: float | None = None,
) -> np.ndarray:
    """Computes one row and head at a time; `keep_BHQS` multiplies the probabilities (dropout)."""
    scale = head_size**-0.5 if scale is None else scale
    rows, queries, keys = allowed_BQS.shape
    heads, kv_heads = q_NC.shape[1] // head_size, k_NK.shape[1] // head_size
    q = q_NC.reshape(rows, queries, heads, head_size)
    k, v = (x.reshape(rows, keys, kv_heads, -1) for x in (k_NK, v_NK))
    out = np.empty((rows, queries, heads, v.shape[-1]), q.dtype)
    for row, head in np.ndindex(rows, heads):
        shared = head // (heads // kv_heads)
        scores_QS = q[row, :, head] @ k[row, :, shared].T * scale
        scores_QS[~allowed_BQS[row]] = -np.inf
        weights_QS = np.exp(scores_QS - scores_QS.max(-1, keepdims=True))
        weights_QS /= weights_QS.sum(-1, keepdims=True)
        if keep_BHQS is not None:
            weights_QS *= keep_BHQS[row, head]
        out[row, :, head] = weights_QS @ v[row, :, shared]
    return out.reshape(q_NC.shape[0], -1)


def cross_entropy(x_ND: np.ndarray, weight_VD: np.ndarray, labels_N: np.ndarray, valid_N: np.ndarray) -> np.ndarray:
    logits_NV = x_ND @ weight_VD.T
    largest_N = logits_NV.max(-1)
    log_sum_N = largest_N + np.log(np.exp(logits_NV - largest_N[:, None]).sum(-1))
    losses_N = log_sum_N - logits_NV[np.arange(len(labels_N)), labels_N]
    return losses_N[valid_N].sum()


def cross_entropy_gradient(
    x_ND: np.ndarray, weight_VD: np.ndarray, labels_N: np.ndarray, valid_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gradients of x and weight by formula, for logits that are too large for central differences."""
    logits_NV = x_ND @ weight_VD.T
    grad_NV = np.exp(logits_NV - logits_NV.max(-1, keepdims=True))
    grad_NV /= grad_NV.sum(-1, keepdims=True)
    grad_NV[np.arange(len(labels_N)), labels_N] -= 1
    grad_NV *= valid_N[:, None]
    return grad_NV @ weight_VD, grad_NV.T @ x_ND


def central_differences(
    function: Callable[..., np.ndarray], arguments: list[np.ndarray], upstream: np.ndarray, step: float = 1e-4
) -> list[np.ndarray]:
    """Returns the gradients of sum(function(*arguments) * upstream) with respect to every argument.

    Fourth order: with a step of 1e-4 and values around 1 its own error is near 1e-11, far below float32's.
    """
    arguments = [np.array(argument, np.float64) for argument in arguments]
    gradients = []
    for argument in arguments:
        gradient = np.empty_like(argument)
        for place in np.ndindex(*argument.shape):
            value, total = argument[place], 0.0
            for offset, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
                argument[place] = value + offset * step
                total += weight * (function(*arguments) * upstream).sum()
            argument[place] = value
            gradient[place] = total / (12 * step)
        gradients.append(gradient)
    return gradients


def distance(ours: Any, right: Any) -> float:
    """Returns largest difference of two arrays or tensors, relative to the largest right value."""
    ours, right = np.asarray(ours, np.float64), np.asarray(right, np.float64)
    assert ours.shape == right.shape, f"shape {ours.shape} instead of {right.shape}"
    return float(np.abs(ours - right).max() / max(np.abs(right).max(), 1e-30))


def assert_close(ours: Iterable[Any], right: Iterable[Any], limit: float) -> None:
    """Checks the distance of arrays or tensors, one by one in order; in dictionaries by their names."""
    for name, mine, expected in _pairs(ours, right):
        found = distance(mine, expected)
        assert found < limit, f"{name}: {found}"


def assert_same_bits(ours: Iterable[Any], right: Iterable[Any]) -> None:
    """Compares the bits of arrays or tensors, one by one in order; in dictionaries by their names."""
    different = [name for name, mine, expected in _pairs(ours, right) if mine.tobytes() != expected.tobytes()]
    assert not different, f"other bits in {different}"


def _pairs(ours: Iterable[Any], right: Iterable[Any]) -> Iterator[tuple[object, np.ndarray, np.ndarray]]:
    first, second = (each if isinstance(each, Mapping) else dict(enumerate(each)) for each in (ours, right))
    assert first.keys() == second.keys()
    for name, array in first.items():
        yield name, np.asarray(array), np.asarray(second[name])
