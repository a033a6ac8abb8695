"""Ascend kernels: MindSpore's fused operators with the signatures of `plain.py`.

These operators have no CPU kernel. Without an Ascend, only MindSpore's front end can be tested, forward and backward:
tests/parity/test_ascend_kernels.py exports each as a graph and looks for the fused operator and its gradient.

Legend: as in trainer/ops/plain.py.
"""

from __future__ import annotations

from typing import ClassVar

from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import RmsNorm as FusedNorm
from mindspore.ops.auto_generate import (
    RmsNormGrad,
    RotaryPositionEmbedding,
    Swiglu,
    SwigluGrad,
)

from trainer.ops import plain
from trainer.ops.plain import Sharded, shard_operators

# A gradient written by hand saves fewer activations than an automatic one: only the inputs before their casts. In a
# graph that MindSpore shards, a `bprop` computes with local shards, so it must not depend on their shapes.


class RmsNorm(nn.Cell):
    """RmsNorm: y = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        inside: Dtype of the computation. Default None: that of the inputs.
        outside: Dtype of the result. Default None: `inside`.
        is_sharded: Whether MindSpore shards the graph. MindSpore then derives the gradient, because it sums a weight's
            gradient over the ranks only if it has derived it; the dtype of the computation is that of the inputs.
        is_recomputed: Whether a sharded graph recomputes the norm. MindSpore 2.10 fuses an addition and the norm of its
            result into one operator, AddRmsNorm. Then the addition would wait for the gradients ("Graph cycle exists").
            Two reshapes prevent the fusion. The cast to `outside` is before the second one, after which MindSpore
            gathers the tokens of other ranks.
    """

    def __init__(
        self, size: int, eps: float, inside: mstype.Type | None = None, outside: mstype.Type | None = None, *,
        is_sharded: bool = False, is_recomputed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm = FusedNorm(eps) if is_sharded else _NormAndFactor(eps, inside, outside or inside)
        self.is_recomputed = is_recomputed
        self.outside = outside
        self.cast = P.Cast()
        self.reshape = P.Reshape()

    def construct(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        """Returns y, [N, D]; unless `is_recomputed`, x may have more axes."""
        if not self.is_recomputed:
            return self.norm(x_ND, weight_D)[0]
        tokens, features = x_ND.shape
        y_N1D = self.norm(self.reshape(x_ND, (tokens, 1, features)), weight_D)[0]
        return self.reshape(self.cast(y_N1D, self.outside), (tokens, features))

    def shard_over(self, *degrees: int) -> None:
        """Shards all axes except the last; `degrees` has the number of ranks for each."""
        if self.is_recomputed:
            degrees = (*degrees, 1)
        shard_operators(self, {"norm": "dt"[: len(degrees)] + ".,."}, **dict(zip("dt", degrees, strict=False)))


class _NormAndFactor(nn.Cell):
    """(x_ND, weight_D) -> (y, 1 / sqrt(...)); the backward pass needs the second result."""

    def __init__(self, eps: float, inside: mstype.Type | None, outside: mstype.Type | None) -> None:
        super().__init__()
        self.inside = inside
        self.outside = outside
        self.norm = FusedNorm(eps)
        self.grad = RmsNormGrad()

    def construct(self, x_ND: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        """Computes in `inside` and rounds y to `outside`; the factor stays as the operator returns it."""
        y_ND, rstd_N1 = self.norm(self.cast(x_ND), self.cast(weight_D))
        return y_ND if self.outside is None else y_ND.astype(self.outside), rstd_N1

    def bprop(self, x_ND: Tensor, weight_D: Tensor, out: Tensor, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        grad_x_ND, grad_D = self.grad(self.cast(grads[0]), self.cast(x_ND), out[1], self.cast(weight_D))
        return grad_x_ND.astype(x_ND.dtype), grad_D.astype(weight_D.dtype)

    def cast(self, x: Tensor) -> Tensor:
        """Casts to the dtype of the computation."""
        return x if self.inside is None else x.astype(self.inside)


class Rotary(Sharded):
    """RotaryPositionEmbedding, mode 0: the first half of a head is paired with the second. All inputs have one dtype.

    The cell uses the operator because MindSpore 2.10 deprecates the function `ops.rotary_position_embedding`.
    """

    axes: ClassVar = {"rotate": "d.t.,d...,d..."}

    def __init__(self, head_size: int, rotated_size: int | None = None, interleaved: bool = False) -> None:
        super().__init__()
        assert rotated_size in (None, head_size) and not interleaved, "select.py chooses the plain kernel for these"
        self.head_size = head_size
        self.rotate = RotaryPositionEmbedding()
        self.reshape = P.Reshape()

    def construct(self, x_NC: Tensor, cos_BT1d: Tensor, sin_BT1d: Tensor) -> Tensor:
        """Rotates each head of x_NC by its angles in the tables; no gradient flows into the tables."""
        rows = cos_BT1d.shape[0]
        length = cos_BT1d.shape[1]
        x_BTHd = self.reshape(x_NC, (rows, length, x_NC.shape[1] // self.head_size, self.head_size))
        # The derived gradient of x needs the tables alone, and x only for theirs.
        out_BTHd = self.rotate(x_BTHd, ops.stop_gradient(cos_BT1d), ops.stop_gradient(sin_BT1d), 0)
        return self.reshape(out_BTHd, x_NC.shape)


class ShardedSwiGLU(Sharded):
    """swiglu: silu(gate) * up. The operator takes both in one tensor; the axis that joins them is not sharded.

    MindSpore derives the gradient. In one graph of the whole step that needs the least memory.
    """

    axes: ClassVar = {"concat": "d.t,d.t", "swiglu": "d.t"}

    def __init__(self) -> None:
        super().__init__()
        self.reshape = P.Reshape()
        self.concat = P.Concat(1)
        self.swiglu = Swiglu()

    def construct(self, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        tokens, features = gate_NF.shape
        both = self.reshape(gate_NF, (tokens, 1, features)), self.reshape(up_NF, (tokens, 1, features))
        return self.reshape(self.swiglu(self.concat(both), 1), (tokens, features))


class SwiGLU(ShardedSwiGLU):
    """The operator for a compiled block: it saves gate and up, and joins them again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.grad = SwigluGrad()

    def bprop(self, gate_NF: Tensor, up_NF: Tensor, out: Tensor, grad_NF: Tensor) -> tuple[Tensor, ...]:
        grad = self.grad(grad_NF, ops.concat((gate_NF, up_NF), -1), -1)
        return mint.chunk(grad, 2, 1)


class SoftCap(plain.SoftCap):
    """x -> cap * tanh(x / cap) with the device's own Tanh."""

    def __init__(self, cap: float, axes: str) -> None:
        super().__init__(cap, axes)
        self.tanh = P.Tanh()

    def construct(self, x: Tensor) -> Tensor:
        """Returns the capped x, in its dtype."""
        return self.grow(self.tanh(self.shrink(x, 1 / self.cap)), self.cap)

    def shard_over(self, data: int, tensor: int = 1) -> None:
        """Shards the batch over `data` ranks, and columns or heads over `tensor` ranks."""
        shard_operators(self, {"shrink grow": f"{self.axes},", "tanh": self.axes}, d=data, t=tensor)


# Always used on an Ascend: P.Gather and ScatterUpdate of the plain kernels are legacy (ACLOP), compiled for each shape.


def gather_rows(x_RD: Tensor, index_N: Tensor) -> Tensor:
    """Returns x[index], [N, D]. The gradient is EmbeddingDenseBackward."""
    return mint.nn.functional.embedding(index_N, x_RD)


def write_rows(store_RD: Parameter, index_N: Tensor, x_ND: Tensor) -> None:
    """Writes store[index] = x in place, for the KV cache."""
    store_RD.index_copy_(0, index_N.astype(mstype.int64), x_ND)
