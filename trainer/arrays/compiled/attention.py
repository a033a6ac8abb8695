"""The functions of `attention.c`: attention of a block of queries in training, forward and backward, in float32.

Legend: Q queries of a block, S keys, M the last of these keys, which are masked for some queries; C columns of query
heads, K of keys, W of values, V of results; H key/value heads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainer.arrays.addresses import address

_ADDRESS = ctypes.c_void_p
_STRIP = 64  # of attention.c
_PANEL = 32  # of panels.h, at most


class AttentionSizes(NamedTuple):
    """The first fields of `BlockSizes` in attention.c, those of a block of queries.

    Attributes:
        heads: The key/value heads.
        groups: Query heads for each of them.
        size, value_size: Of a query or key, and of a value.
        visible: How many keys, from the first one on, all queries see.
    """

    queries: int
    keys: int
    heads: int
    groups: int
    size: int
    value_size: int
    visible: int

    def scratch(self, gradient: bool) -> int:
        """Returns how many elements of scratch memory `forward` takes, or with `gradient` `backward`."""
        strips = -(-self.queries // _STRIP)
        rows = self.keys + strips * (self.keys - self.visible)  # of a strip: scores and bias
        widths = [-(-size // _PANEL) * _PANEL for size in (self.size, self.value_size)]
        if not gradient:
            return _STRIP * (rows + max(widths)) + self.keys * widths[1] + _STRIP
        return _STRIP * (rows + self.keys + 2 * sum(widths)) + self.keys * (2 * widths[0] + widths[1]) + _STRIP


class CompiledAttention:
    """softmax(q k^T + bias) v and its gradients, without copies of scores in memory.

    All arrays are float32. `bias_QM` is contiguous, and so is the last axis of the others. A query sees a key at least.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for function, addresses in ((library.attention, 8), (library.attention_gradient, 10)):
            function.argtypes = (_ADDRESS,) * addresses
            function.restype = None

    def forward(
        self, sizes: AttentionSizes, inputs: Sequence[np.ndarray], bias_QM: np.ndarray, out_QV: np.ndarray,
        scratch: np.ndarray, max_logits: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Writes the results of the heads to `out_QV`, which may be the queries if values are as wide.

        Args:
            inputs: Queries [Q, C], keys [S, K] and values [S, W].
            max_logits: [query heads] takes the largest score of each head, if it is larger.
        """
        numbers = _with_rows(sizes, (*inputs, out_QV))
        largest = None
        if max_logits is not None:
            largest = address(max_logits)
        arrays = map(address, (*inputs, bias_QM, out_QV))
        self.library.attention(*arrays, largest, address(scratch), address(numbers))

    def backward(
        self, sizes: AttentionSizes, inputs: Sequence[np.ndarray], bias_QM: np.ndarray, grad_QV: np.ndarray,
        grads: Sequence[np.ndarray], scratch: np.ndarray,
    ) -> None:  # fmt: skip
        """Writes the gradient of the queries, and adds those of keys and values.

        Args:
            grad_QV: The gradient of the results.
            grads: The gradients of the inputs.
        """
        numbers = _with_rows(sizes, (*inputs, grad_QV, *grads))
        self.library.attention_gradient(*map(address, (*inputs, bias_QM, grad_QV, *grads, scratch, numbers)))


def _with_rows(sizes: AttentionSizes, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the sizes with the distances of the arrays' rows, in elements: `BlockSizes` in attention.c."""
    return np.array([*sizes, *(array.strides[0] // array.itemsize for array in arrays)], np.int64)
