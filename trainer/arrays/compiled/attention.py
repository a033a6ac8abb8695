"""The functions of `attention.c`: attention of a block of queries in training, forward and backward, in float32.

Legend: Q queries of a block, S keys, M the last of these keys, which are masked for some queries; C columns of query
heads, K of keys, W of values, V of results; H key/value heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from trainer.arrays.addresses import address

_ADDRESS = ctypes.c_void_p
_STRIP = 64  # of attention.c
_PANEL = 32  # of attention.c, at most


class _BlockSizes(NamedTuple):
    """The first fields of `BlockSizes` in attention.c."""

    queries: int
    keys: int
    heads: int
    groups: int
    size: int
    value_size: int
    visible: int


class CompiledAttention:
    """softmax(q k^T + bias) v and its gradients, without copies of scores in memory.

    The last axis of all arrays is contiguous. `heads` are the key/value heads H in the arrays, and `take` returns
    scratch memory for a number of elements.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for function, addresses in ((library.attention, 8), (library.attention_gradient, 10)):
            function.argtypes = (_ADDRESS,) * addresses
            function.restype = None

    def forward(
        self, q_QC: np.ndarray, k_SK: np.ndarray, v_SW: np.ndarray, bias_QM: np.ndarray, out_QV: np.ndarray,
        heads: int, take: Callable[[int], np.ndarray], max_logits: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Writes the results of the heads to `out_QV`, which may be `q_QC`.

        `max_logits` [query heads] takes the largest score of each head, if it is larger.
        """
        sizes = _block_sizes(q_QC, k_SK, v_SW, bias_QM, heads)
        scratch = take(_scratch_size(sizes, gradient=False))
        numbers = _with_rows(sizes, (q_QC, k_SK, v_SW, out_QV))
        largest = None
        if max_logits is not None:
            largest = address(max_logits)
        inputs = map(address, (q_QC, k_SK, v_SW, bias_QM, out_QV))
        self.library.attention(*inputs, largest, address(scratch), address(numbers))

    def backward(
        self, inputs: Sequence[np.ndarray], bias_QM: np.ndarray, grad_QV: np.ndarray, grads: Sequence[np.ndarray],
        heads: int, take: Callable[[int], np.ndarray],
    ) -> None:  # fmt: skip
        """Writes the gradient of the queries, and adds those of keys and values.

        Args:
            inputs: Queries, keys and values, as for `forward`.
            grad_QV: The gradient of the results.
            grads: The gradients of the inputs.
        """
        q_QC, k_SK, v_SW = inputs
        sizes = _block_sizes(q_QC, k_SK, v_SW, bias_QM, heads)
        scratch = take(_scratch_size(sizes, gradient=True))
        numbers = _with_rows(sizes, (*inputs, grad_QV, *grads))
        self.library.attention_gradient(*map(address, (*inputs, bias_QM, grad_QV, *grads, scratch, numbers)))


def _block_sizes(
    q_QC: np.ndarray, k_SK: np.ndarray, v_SW: np.ndarray, bias_QM: np.ndarray, heads: int
) -> _BlockSizes:
    keys, width = k_SK.shape
    return _BlockSizes(
        queries=len(q_QC), keys=keys, heads=heads, groups=q_QC.shape[1] // width, size=width // heads,
        value_size=v_SW.shape[1] // heads, visible=keys - bias_QM.shape[1],
    )  # fmt: skip


def _with_rows(sizes: _BlockSizes, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the sizes with the distances of the arrays' rows, in elements: `BlockSizes` in attention.c."""
    return np.array([*sizes, *(array.strides[0] // array.itemsize for array in arrays)], np.int64)


def _scratch_size(sizes: _BlockSizes, gradient: bool) -> int:
    """Returns how many elements of scratch memory a function of attention.c takes at most."""
    strips = -(-sizes.queries // _STRIP)
    rows = sizes.keys + strips * (sizes.keys - sizes.visible)  # of a strip: scores and bias
    widths = [-(-size // _PANEL) * _PANEL for size in (sizes.size, sizes.value_size)]
    if not gradient:
        return _STRIP * (rows + max(widths)) + sizes.keys * widths[1] + _STRIP
    return _STRIP * (rows + sizes.keys + 2 * sum(widths)) + sizes.keys * (2 * widths[0] + widths[1]) + _STRIP
