"""The norm before a sublayer, and how tensor-parallel ranks enter and leave it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from trainer.arrays.memory import as_narrow, empty, host_threads, parts
from trainer.arrays.onednn import BFLOAT16

ROWS = 256  # that a thread takes at once: products of fewer are slower


class RowExchange(Protocol):
    """Between the residual stream and what tensor-parallel ranks compute together, see `trainer.parallel.tensor`."""

    def gather(self, own_nD: np.ndarray) -> np.ndarray:
        """The rows of all ranks, [N, D], from those that this rank has of the residual stream."""

    def collect(self, part_ND: np.ndarray) -> np.ndarray:
        """The sum over the ranks: the rows [n, D] that this rank has of the residual stream. `part_ND` is used up."""


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, size: int, eps: float) -> None:
        self.size, self.eps = np.float32(size), np.float32(eps)

    def scales(self, x_nD: np.ndarray) -> np.ndarray:
        """1 / sqrt(...) of each row, [n]."""
        return 1 / np.sqrt(np.einsum("nd,nd->n", x_nD, x_nD) / self.size + self.eps)

    def __call__(self, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, out_nD: np.ndarray) -> None:
        np.multiply(x_nD, scale_n[:, None], out=out_nD)
        out_nD *= weight_D

    def gradient(
        self, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, grad_nD: np.ndarray, work_nD: np.ndarray
    ) -> np.ndarray:
        """Replaces `grad_nD` by the gradient of x, overwrites `work_nD`, and returns the weight's gradient, [D]."""
        np.multiply(grad_nD, x_nD, out=work_nD)
        of_weight_D = scale_n @ work_nD
        # The direct part, less its projection on x: mean(grad * weight * x) scale^3.
        projected_n = (work_nD @ weight_D) * (scale_n * scale_n * scale_n / self.size)
        grad_nD *= weight_D
        grad_nD *= scale_n[:, None]
        np.multiply(x_nD, projected_n[:, None], out=work_nD)
        grad_nD -= work_nD
        return of_weight_D


class Entrance:
    """The norm before a sublayer where ranks share it: there all rows are normed first, and exchanged.

    Its functions are those of the rows that this rank has of the residual stream.
    """

    def __init__(self, norm: RmsNorm, exchange: RowExchange) -> None:
        self.norm, self.exchange = norm, exchange

    def enter(self, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray) -> np.ndarray:
        """What the sublayer takes, [N, D]; fills the factors of the rows."""
        y_nD = empty(*x_nD.shape)[1]

        def compute(part: slice, thread: int) -> None:
            scale_n[part] = self.norm.scales(x_nD[part])
            self.norm(x_nD[part], weight_D, scale_n[part], y_nD[part])

        host_threads().run(parts(slice(0, len(x_nD)), ROWS), compute)
        return self.exchange.gather(y_nD)

    def leave(self, x_nD: np.ndarray, part_ND: np.ndarray, bias_D: np.ndarray | None, out_nD: np.ndarray) -> None:
        """The residual stream with the sum of what the ranks add."""
        np.add(x_nD, self.exchange.collect(part_ND), out=out_nD)
        if bias_D is not None:
            out_nD += bias_D

    def gradient(
        self, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, part_ND: np.ndarray, grad_nD: np.ndarray,
        out_nD: np.ndarray,
    ) -> dict[int, np.ndarray]:  # fmt: skip
        """The gradient of x, and by its first row that of the norm's weight from each part. `part_ND` is this rank's
        share of the gradient of what it has entered with, `grad_nD` that of the residual stream after the sublayer."""
        sums_nD, work_nD, found = self.exchange.collect(part_ND), empty(*x_nD.shape)[1], {}

        def compute(part: slice, thread: int) -> None:
            out = out_nD[part]
            out[...] = sums_nD[part]
            found[part.start] = self.norm.gradient(x_nD[part], weight_D, scale_n[part], out, work_nD[part])
            out += grad_nD[part]

        host_threads().run(parts(slice(0, len(x_nD)), ROWS), compute)
        return found


def normed(
    norm: RmsNorm, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, work_nD: np.ndarray, out_nD: np.ndarray
) -> None:
    """The normed rows in the dtype of `out`; `work`, which is float32, is overwritten."""
    wide_nD = work_nD if out_nD.dtype == BFLOAT16 else out_nD
    norm(x_nD, weight_D, scale_n, wide_nD)
    as_narrow(wide_nD, out_nD)
