"""Embedding and head of a decoder on arrays, forward and backward.

The logits of all tokens, [N, V], are never there: the head takes some rows through product, softmax and gradients, and
then the next ones in the same memory. In a training it computes the gradients of the loss in the forward pass (Hsu et
al. 2024, Liger Kernel, section 3.2), so that no logit is computed twice.

With a matrix in bfloat16 the products are those of numbers in bfloat16, as in `trainer.arrays`: the normed
rows and the gradients of the logits are rounded, logits, softmax and loss are float32.

Legend: N tokens, D hidden, V vocabulary; n rows of a part.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from mindspore import Tensor

from trainer.arrays.memory import as_narrow, empty, host_threads, parts
from trainer.arrays.norms import RmsNorm
from trainer.arrays.onednn import operators

_LOGITS = 1 << 24  # numbers that are there at once, where the vocabulary allows it
_FEWEST_ROWS = 64
_COLUMNS = 1024  # of the vocabulary, that a thread takes at once
_ROWS = 32  # of a softmax that a thread takes at once
_FEW_TIMES = 8  # that a token of a batch comes


class HeadResult(NamedTuple):
    """Sum of the losses, and its gradients of x, of the norm's weight and of the matrix, where they were asked for."""

    loss: np.float32
    grad_ND: Tensor | None
    norm_D: Tensor | None
    weight_VD: Tensor | None


def embedding_rows(weight_VD: np.ndarray, ids_N: np.ndarray) -> Tensor:
    """The rows of the tokens, [N, D]."""
    result, out_ND = empty(len(ids_N), weight_VD.shape[1])
    np.take(weight_VD, ids_N, axis=0, out=out_ND, mode="clip")  # other modes copy `out`
    return result


def embedding_gradient(shape: tuple[int, int], ids_N: np.ndarray, grad_ND: np.ndarray) -> Tensor:
    """The gradient of the matrix, [V, D]: the sums over each token's rows, in their order."""
    result, out_VD = empty(*shape)
    out_VD[...] = 0
    order_N = np.argsort(ids_N, kind="stable")
    ids, first, counts = np.unique(ids_N[order_N], return_index=True, return_counts=True)
    out_VD[ids] = grad_ND[order_N[first]]
    # Most tokens come a few times: the second time of each of them, then the third. np.add.reduceat takes 20 times as
    # long.
    for time in range(1, min(_FEW_TIMES, counts.max(initial=0))):
        again = np.flatnonzero(counts > time)
        out_VD[ids[again]] += grad_ND[order_N[first[again] + time]]
    for place in np.flatnonzero(counts > _FEW_TIMES):
        left_n = order_N[first[place] + _FEW_TIMES : first[place] + counts[place]]
        out_VD[ids[place]] += grad_ND[left_n].sum(0)
    return result


class HostHead:
    """Final norm, output projection and cross entropy: sum over valid tokens of logsumexp(logits) - logits[label].

    Args:
        size, eps: Of the norm.
    """

    def __init__(self, size: int, eps: float) -> None:
        self.norm = RmsNorm(size, eps)

    @np.errstate(all="ignore")
    def __call__(
        self, x_ND: np.ndarray, norm_D: np.ndarray, weight_VD: np.ndarray, labels_N: np.ndarray, valid_N1: np.ndarray,
        wanted: Collection[str] = (),
    ) -> HeadResult:  # fmt: skip
        """`wanted`: which gradients, "norm" and "weight"; that of x comes with any, and alone for "x"."""
        vocabulary, hidden = weight_VD.shape
        rows = min(len(x_ND), max(_FEWEST_ROWS, _LOGITS // vocabulary))
        # Not by np.empty: memory from the system, which it would be each time, costs a third of the product.
        logits, y_nD, work_nD = (empty(rows, width)[1] for width in (vocabulary, hidden, hidden))
        dtype = weight_VD.dtype
        # What products take of the gradients of the logits and of the normed rows.
        factors = logits, y_nD
        if dtype != np.float32:
            factors = np.empty((rows, 0), dtype), empty(rows, hidden, dtype=dtype)[1]
            if wanted:
                factors = empty(*logits.shape, dtype=dtype)[1], factors[1]
        grad_ND, weight = empty(*x_ND.shape) if wanted else (None, None), (None, None)
        if "weight" in wanted:
            weight = empty(*weight_VD.shape)
        of_norm_D, loss = np.zeros(hidden, np.float32), 0.0
        for part in parts(slice(0, len(x_ND)), rows):
            size = part.stop - part.start
            grad_nV, factor_nD = (array[:size] for array in factors)
            x_nD, valid_n1, normed_nD = x_ND[part], valid_N1[part], y_nD[:size]
            scale_n = self.norm.scales(x_nD)
            self.norm(x_nD, norm_D, scale_n, normed_nD)
            as_narrow(normed_nD, factor_nD)
            loss += self._losses(logits[:size], factor_nD, weight_VD, labels_N[part], valid_n1, grad_nV)
            if wanted:
                out_nD = grad_ND[1][part]
                normed_nD *= valid_n1
                as_narrow(normed_nD, factor_nD)
                self._gradients(grad_nV, factor_nD, weight_VD, valid_n1, out_nD, weight[1], first=not part.start)
                of_norm_D += self.norm.gradient(x_nD, norm_D, scale_n, out_nD, work_nD[:size])
        of_norm = Tensor(of_norm_D) if "norm" in wanted else None
        return HeadResult(np.float32(loss), grad_ND[0], of_norm, weight[0])

    def _losses(
        self, logits_nV: np.ndarray, y_nD: np.ndarray, weight_VD: np.ndarray, labels_n: np.ndarray,
        valid_n1: np.ndarray, grad_nV: np.ndarray,
    ) -> float:  # fmt: skip
        """The sum of the losses; `grad_nV`, which may be `logits_nV`, receives d loss / d logits of each row, but for
        the factor valid_n1; if it is empty, nobody wants them."""
        losses = np.empty(len(y_nD))

        def multiply(columns: slice, thread: int) -> None:
            operators().matmul(y_nD, weight_VD[columns].T, logits_nV[:, columns])

        def normalise(rows: slice, thread: int) -> None:
            logits, labels = logits_nV[rows], labels_n[rows]
            places = np.arange(len(labels))
            # The difference of the logits first: it keeps its digits however large both are.
            above = logits.max(1) - logits[places, labels]
            operators().softmax(logits, logits)
            losses[rows] = above - np.log(logits.max(1), dtype=np.float64)
            logits[places, labels] -= 1
            if grad_nV.size:
                as_narrow(logits, grad_nV[rows])

        host_threads().run(parts(slice(0, len(weight_VD)), _COLUMNS), multiply)
        host_threads().run(parts(slice(0, len(y_nD)), _ROWS), normalise)
        return float(losses @ valid_n1[:, 0].astype(np.float64))

    def _gradients(
        self, grad_nV: np.ndarray, y_nD: np.ndarray, weight_VD: np.ndarray, valid_n1: np.ndarray, out_nD: np.ndarray,
        out_VD: np.ndarray | None, first: bool,
    ) -> None:  # fmt: skip
        """Those of y, and those of the matrix, which are added up over the parts of the tokens; `y_nD` are the normed
        rows times valid_n1."""

        def of_rows(rows: slice, thread: int) -> None:
            operators().matmul(grad_nV[rows], weight_VD, out_nD[rows])

        def of_weight(columns: slice, thread: int) -> None:
            operators().matmul(grad_nV[:, columns].T, y_nD, out_VD[columns], not first)

        host_threads().run(parts(slice(0, len(y_nD)), _FEWEST_ROWS), of_rows)
        out_nD *= valid_n1
        if out_VD is not None:
            host_threads().run(parts(slice(0, len(weight_VD)), _COLUMNS), of_weight)
