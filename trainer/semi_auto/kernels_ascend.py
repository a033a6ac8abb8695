"""An Ascend's fused operators for a graph that MindSpore shards, with the signatures of `kernels.py`.

Legend: as in trainer/ops/cpu/kernels.py.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import FlashAttentionScore, RotaryPositionEmbedding, Swiglu
from mindspore.ops.auto_generate import RmsNorm as FusedNorm

from trainer.semi_auto.kernels import DrawnMask, JoinHeads, SplitHeads


class RmsNorm(nn.Cell):
    """As `ascend.RmsNorm`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = FusedNorm(eps)

    def construct(self, x_ND, weight_D):
        return self.norm(x_ND, weight_D)[0]

    def shard_over(self, *degrees: int) -> None:
        self.norm.shard(((*degrees, 1), (1,)))


class SeparateRmsNorm(RmsNorm):
    """A norm of [N, D] for a graph that computes norms again in the backward pass, its result as `outside`.

    MindSpore 2.10 joins an addition and the norm of its result to one operator, AddRmsNorm. Where the norm is one that
    is computed again, the addition would wait for the gradients ("Graph cycle exists"). The reshapes keep them apart.
    The cast stands before the second one, after which MindSpore gathers the tokens of other ranks.
    """

    def __init__(self, size: int, eps: float, outside: mstype.Type) -> None:
        super().__init__(size, eps)
        self.outside, self.cast, self.reshape = outside, P.Cast(), P.Reshape()

    def construct(self, x_ND, weight_D):
        tokens, features = x_ND.shape
        y_N1D = self.norm(self.reshape(x_ND, (tokens, 1, features)), weight_D)[0]
        return self.reshape(self.cast(y_N1D, self.outside), (tokens, features))

    def shard_over(self, data: int) -> None:
        super().shard_over(data, 1)


class Rotary(nn.Cell):
    """As `ascend.Rotary`, in layout BSND with tables BS1D."""

    def __init__(self, head_size: int, rotated_size: int | None = None, interleaved: bool = False) -> None:
        super().__init__()
        self.head_size, self.reshape, self.rotate = head_size, P.Reshape(), RotaryPositionEmbedding()

    def construct(self, x_NC, cos_BT1d, sin_BT1d):
        rows, length = cos_BT1d.shape[0], cos_BT1d.shape[1]
        x_BTHd = self.reshape(x_NC, (rows, length, x_NC.shape[1] // self.head_size, self.head_size))
        return self.reshape(self.rotate(x_BTHd, cos_BT1d, sin_BT1d, 0), x_NC.shape)

    def shard_over(self, data: int, tensor: int) -> None:
        table = (data, 1, 1, 1)
        self.rotate.shard(((data, 1, tensor, 1), table, table))


class SwiGLU(nn.Cell):
    """As `ascend.SwiGLU`, on gate and up side by side in an axis of their own, which is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.reshape, self.concat, self.swiglu = P.Reshape(), P.Concat(1), Swiglu()

    def construct(self, gate_NF, up_NF):
        tokens, features = gate_NF.shape
        both = self.reshape(gate_NF, (tokens, 1, features)), self.reshape(up_NF, (tokens, 1, features))
        return self.reshape(self.swiglu(self.concat(both), 1), (tokens, features))

    def shard_over(self, data: int, tensor: int) -> None:
        whole = (data, 1, tensor)
        self.concat.shard((whole, whole))
        self.swiglu.shard((whole,))


class Attention(nn.Cell):
    """As `ascend.Attention`."""

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype=mstype.bfloat16, softmax_dtype=mstype.float32,
        value_size: int | None = None, scale: float | None = None, length: int = 0, rate: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dtype, self.reshape, self.cast, value_size = dtype, P.Reshape(), P.Cast(), value_size or head_size
        scale = head_size**-0.5 if scale is None else scale
        self.flash = FlashAttentionScore(heads, 1.0 - rate, scale, input_layout="BSH")
        self.without = FlashAttentionScore(heads, scale_value=scale, input_layout="BSH")
        self.drawn = DrawnMask(heads, length, rate, bits=True)
        # The operator takes values as wide as the queries.
        self.kv_heads, self.fills_up, missing = kv_heads, value_size < head_size, head_size - value_size
        self.zeros_11w, self.repeat = Tensor(np.zeros((1, 1, missing), np.float32), dtype), P.Tile()
        self.fill_up, self.cut = JoinHeads(kv_heads), SplitHeads(heads, value_size)

    def construct(self, q_NC, k_NK, v_NK, mask_B1TT, late_mask, dropout):
        rows, length = mask_B1TT.shape[0], mask_B1TT.shape[2]
        if self.fills_up:
            zeros_NKw = self.repeat(self.zeros_11w, (v_NK.shape[0], self.kv_heads, 1))
            v_NK = self.fill_up(self.cast(v_NK, self.dtype), self.reshape(zeros_NKw, (v_NK.shape[0], -1)))
        q, k, v = self.split(q_NC, rows, length), self.split(k_NK, rows, length), self.split(v_NK, rows, length)
        if dropout is None:
            out = self.without(q, k, v, None, None, None, mask_B1TT, None)[3]
        else:
            out = self.flash(q, k, v, None, self.drawn(dropout), None, mask_B1TT, None)[3]
        out = self.reshape(out, q_NC.shape)
        return self.cast(self.cut(out)[0] if self.fills_up else out, q_NC.dtype)

    def split(self, x_NC, rows, length):
        return self.cast(self.reshape(x_NC, (rows, length, x_NC.shape[1])), self.dtype)

    def shard_over(self, data: int, tensor: int) -> None:
        columns = (data, 1, tensor)
        self.without.shard((columns, columns, columns, (data, 1, 1, 1)))
        self.flash.shard((columns, columns, columns, (data, tensor, 1, 1), (data, 1, 1, 1)))
        self.drawn.shard_over(data, tensor)
        self.repeat.shard(((data, tensor, 1),))
        for part in (self.fill_up, self.cut):
            part.shard_over(data, tensor)
