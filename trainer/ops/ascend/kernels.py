"""Ascend kernels: MindSpore's fused operators behind the signatures of `plain.py`.

These operators have no CPU kernel. What can be checked without an Ascend is that MindSpore's front end accepts them,
forward and backward: tests/parity/test_ascend_kernels.py exports each as a graph and looks for the fused operator and
its gradient.

Legend: as in trainer/ops/plain.py.
"""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate import (
    RmsNormGrad,
    RotaryPositionEmbedding,
    RotaryPositionEmbeddingGrad,
    SwigluGrad,
)

# Gradients by hand keep less than automatic ones: inputs as they came, without what a cast made of them.


class RmsNorm(nn.Cell):
    """RmsNorm: y = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        inside: Dtype that it computes in. Default None: that of its inputs.
        outside: Dtype of the result. Default None: `inside`.
    """

    def __init__(self, size: int, eps: float, inside: mstype.Type = None, outside: mstype.Type = None) -> None:
        super().__init__()
        self.core = _RmsNormCore(eps, inside, outside or inside)

    def construct(self, x_ND, weight_D):
        return self.core(x_ND, weight_D)[0]


class _RmsNormCore(nn.Cell):
    """Returns (y, 1 / sqrt(...)): the second output is kept for the backward pass."""

    def __init__(self, eps: float, inside: mstype.Type, outside: mstype.Type) -> None:
        super().__init__()
        self.eps, self.inside, self.outside, self.grad = eps, inside, outside, RmsNormGrad()

    def construct(self, x_ND, weight_D):
        y_ND, rstd_N1 = ops.rms_norm(self.cast(x_ND), self.cast(weight_D), self.eps)
        return y_ND if self.outside is None else y_ND.astype(self.outside), rstd_N1

    def bprop(self, x_ND, weight_D, out, grads):
        grad_x_ND, grad_D = self.grad(self.cast(grads[0]), self.cast(x_ND), out[1], self.cast(weight_D))
        return grad_x_ND.astype(x_ND.dtype), grad_D.astype(weight_D.dtype)

    def cast(self, x):
        return x if self.inside is None else x.astype(self.inside)


class Rotary(nn.Cell):
    """RotaryPositionEmbedding, mode 0: the first half of a head is paired with the second. One dtype for all.

    The operator itself: MindSpore 2.10 deprecates the function `ops.rotary_position_embedding` around it.
    """

    def __init__(self, head_size: int, rotated_size: int | None = None, interleaved: bool = False) -> None:
        super().__init__()
        assert rotated_size in (None, head_size) and not interleaved, "select.py chooses the reference for these"
        self.head_size, self.rotate, self.grad = head_size, RotaryPositionEmbedding(), RotaryPositionEmbeddingGrad()

    def construct(self, x_NC, cos_N1d, sin_N1d):
        x_1NHd = x_NC.reshape(1, x_NC.shape[0], -1, self.head_size)
        return self.rotate(x_1NHd, cos_N1d, sin_N1d, 0).reshape(x_NC.shape)

    def bprop(self, x_NC, cos_N1d, sin_N1d, out, grad_NC):
        grad_1NHd = grad_NC.reshape(1, grad_NC.shape[0], -1, self.head_size)
        grad_x = self.grad(grad_1NHd, cos_N1d, sin_N1d, None, 0)[0]  # None: no gradients of the tables
        no_grad = ops.zeros(cos_N1d.shape, cos_N1d.dtype)
        return grad_x.reshape(grad_NC.shape), no_grad, no_grad


class SwiGLU(nn.Cell):
    """swiglu: silu of the first half of the last axis times the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.grad = SwigluGrad()

    def construct(self, gate_NF, up_NF):
        return ops.swiglu(ops.concat((gate_NF, up_NF), -1), -1)

    def bprop(self, gate_NF, up_NF, out, grad_NF):
        grad = self.grad(grad_NF, ops.concat((gate_NF, up_NF), -1), -1)
        return mint.split(grad, (gate_NF.shape[1], up_NF.shape[1]), 1)


def rotary_tables(cos_Nd: np.ndarray, sin_Nd: np.ndarray, heads: int, dtype=mstype.float32) -> tuple[Tensor, Tensor]:
    """The tables that the operator takes, [1, N, 1, d]: it repeats them for the heads itself."""
    return tuple(Tensor(table[None, :, None, :], dtype) for table in (cos_Nd, sin_Nd))


# What nobody chooses: on an Ascend the plain operator is a legacy one (ACLOP), which is compiled for each shape.


def gather_rows(x_RD: Tensor, index_N: Tensor) -> Tensor:
    """As in plain.py. The gradient is EmbeddingDenseBackward."""
    return mint.nn.functional.embedding(index_N, x_RD)


def write_rows(store_RD: Parameter, index_N: Tensor, x_ND: Tensor) -> None:
    """store[index] = x, in place; for the cache of a prediction."""
    store_RD.index_copy_(0, index_N.astype(mstype.int64), x_ND)
