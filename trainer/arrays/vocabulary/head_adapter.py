"""The adapter of the output projection, whose logits never exist for all tokens: logits += scale y A^T B^T.

Legend: n tokens, E width of the head, V vocabulary, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.memory import downcast_if_needed, empty, host_threads, row_blocks
from trainer.arrays.operators import operators

if TYPE_CHECKING:
    from trainer.arrays.tiles import SublayerCall
    from trainer.models.spec.model import AdapterSpec

LORA_A = "lora_A"
LORA_B = "lora_B"
_COLUMNS = 4096  # of the vocabulary, that a thread takes at once


class HeadAdapter:
    """The adapter in one pass; its weights have the dtype of the projection.

    `add_gradients` adds up the gradients of blocks of tokens in the tensors of the call.
    """

    def __init__(self, adapter: AdapterSpec, call: SublayerCall) -> None:
        self.a_RE = call.weights[LORA_A]
        self.b_VR = call.weights[LORA_B]
        self.scale = np.float32(adapter.scale)
        self.gradients: dict[str, np.ndarray] = {}
        self.call = call

    def low_rank(self, y_nE: np.ndarray) -> np.ndarray:
        """Returns scale y A^T, [n, R], in the dtype of the weights, as y."""
        return self._multiply(y_nE, self.a_RE.T, self.scale)

    def _multiply(self, factor: np.ndarray, other: np.ndarray, scale: np.float32) -> np.ndarray:
        product_nR = np.empty((len(factor), other.shape[1]), np.float32)
        operators().matmul(factor, other, product_nR)
        product_nR *= scale
        return downcast_if_needed(product_nR, np.empty(product_nR.shape, self.a_RE.dtype))

    def add_logits(self, low_nR: np.ndarray, columns: slice, logits_nV: np.ndarray) -> None:
        """Adds the adapter's part of the logits of some tokens of the vocabulary."""
        operators().matmul(low_nR, self.b_VR[columns].T, logits_nV, True)

    def allocate_gradients(self) -> None:
        """Makes the gradients of the trained matrices among those of the call: zeros."""
        for name in (LORA_A, LORA_B):
            if self.call.gradients.needs(name):
                self.gradients[name] = empty(*self.call.weights[name].shape)
                self.gradients[name][...] = 0
                self.call.gradients.arrays[name] = self.gradients[name]

    def add_gradients(self, grad_nV: np.ndarray, y_nE: np.ndarray, out_nE: np.ndarray, divisor: np.float32) -> None:
        """Adds the gradient of y to `out_nE`, and the contribution of some tokens to those of A and B.

        Args:
            grad_nV: Gradient of the logits times `divisor`.
            y_nE: Rows without a loss are zero.
        """
        # Divided only after the products: in float16 the quotients would lose their digits.
        grad_nR = self._multiply(grad_nV, self.b_VR, self.scale)
        divided_product(grad_nR, self.a_RE, out_nE, divisor, True)
        if LORA_A in self.gradients:
            divided_product(grad_nR.T, y_nE, self.gradients[LORA_A], divisor, True)
        if LORA_B not in self.gradients:
            return
        low_nR = self.low_rank(y_nE)

        def add_rows(columns: slice, thread: int) -> None:
            """Adds the gradient of some rows of B."""
            divided_product(grad_nV[:, columns].T, low_nR, self.gradients[LORA_B][columns], divisor, True)

        host_threads().run(row_blocks(slice(0, len(self.b_VR)), _COLUMNS), add_rows)


def divided_product(
    a: np.ndarray, b: np.ndarray, out: np.ndarray, divisor: np.float32, accumulate: bool
) -> None:
    """Writes the product a b, divided by `divisor`, to `out`, or with `accumulate` adds it."""
    if divisor == 1:
        operators().matmul(a, b, out, accumulate)
        return
    product = np.empty(out.shape, np.float32)
    operators().matmul(a, b, product)
    product /= divisor
    if accumulate:
        out += product
    else:
        out[...] = product
