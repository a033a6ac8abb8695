"""An Ascend's fused operators for a graph that MindSpore shards, and the dropout masks that it draws there.

Legend: as in trainer/ops/plain.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from mindspore import Layout, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import FlashAttentionScore, RotaryPositionEmbedding, Swiglu
from mindspore.ops.auto_generate import RmsNorm as FusedNorm

from trainer.ops.ascend import attention as ascend_attention
from trainer.ops.plain import JoinHeads, Sharded, SplitHeads, shard_operators

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_APART = 1 << 40
"""Between the seeds of two ranks of a tensor-parallel group; those of a micro-batch's masks follow each other."""


class RmsNorm(nn.Cell):
    """As `ascend.RmsNorm`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = FusedNorm(eps)

    def construct(self, x_ND, weight_D):
        return self.norm(x_ND, weight_D)[0]

    def shard_over(self, *degrees: int) -> None:
        """Shards all axes but the last."""
        shard_operators(self, {"norm": "dt"[: len(degrees)] + ".,."}, **dict(zip("dt", degrees, strict=False)))


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


class Rotary(Sharded):
    """As `ascend.Rotary`, in layout BSND with tables BS1D."""

    axes: ClassVar = {"rotate": "d.t.,d...,d..."}

    def __init__(self, head_size: int, rotated_size: int | None = None, interleaved: bool = False) -> None:
        super().__init__()
        self.head_size, self.reshape, self.rotate = head_size, P.Reshape(), RotaryPositionEmbedding()

    def construct(self, x_NC, cos_BT1d, sin_BT1d):
        rows, length = cos_BT1d.shape[0], cos_BT1d.shape[1]
        x_BTHd = self.reshape(x_NC, (rows, length, x_NC.shape[1] // self.head_size, self.head_size))
        return self.reshape(self.rotate(x_BTHd, cos_BT1d, sin_BT1d, 0), x_NC.shape)


class SwiGLU(Sharded):
    """As `ascend.SwiGLU`, on gate and up side by side in an axis of their own, which is not sharded."""

    axes: ClassVar = {"concat": "d.t,d.t", "swiglu": "d.t"}

    def __init__(self) -> None:
        super().__init__()
        self.reshape, self.concat, self.swiglu = P.Reshape(), P.Concat(1), Swiglu()

    def construct(self, gate_NF, up_NF):
        tokens, features = gate_NF.shape
        both = self.reshape(gate_NF, (tokens, 1, features)), self.reshape(up_NF, (tokens, 1, features))
        return self.reshape(self.swiglu(self.concat(both), 1), (tokens, features))


class _OfRank(nn.Cell):
    """A function that each rank computes for its own part, with a seed that differs where the parts do.

    The seeds_B1 of a micro-batch, int64, are the same for all rows of a data-parallel rank and differ between such
    ranks; those of the ranks that share its numbers follow from their number in the tensor-parallel group.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.place_S, self.is_shared = Tensor(np.zeros(1, np.int64)), False
        self.morph = P.Morph(self.compute, self.infer_shape, self.infer_dtype).add_prim_attr("self_define_shard", True)

    def seed(self, seeds_B1, place_S):
        own = seeds_B1[0, 0]
        return own + place_S[0] * _APART if self.is_shared else own

    def shard_as(self, data: int, tensor: int, inputs: Sequence[Sequence[str]], output: Sequence[str]) -> None:
        """Inputs before the seeds, and the output: the axes "data", "tensor", both ("data", "tensor"), or "None"."""
        layout = Layout((data, tensor), ("data", "tensor"))
        self.place_S, self.is_shared = Tensor(np.arange(tensor, dtype=np.int64)), "tensor" in str(output)
        given = *(layout(*axes) for axes in inputs), layout("data", "None"), layout("tensor")
        self.morph.shard(in_strategy=given, out_strategy=(layout(*output),))


class Dropout(_OfRank):
    """(x_NC, seeds_B1) -> x_NC, 0 where a mask drops and times 1 / (1 - rate) elsewhere."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.drop = rate, ascend_attention.Dropout(rate)

    def construct(self, x_NC, seeds_B1):
        return self.morph(x_NC, seeds_B1, self.place_S)

    def compute(self, x_NC, seeds_B1, place_S):
        return self.drop(x_NC, ascend_attention.draw_bits(self.seed(seeds_B1, place_S), x_NC.shape, self.rate))

    def infer_shape(self, x_NC, seeds_B1, place_S):
        return x_NC

    def infer_dtype(self, x_NC, seeds_B1, place_S):
        return x_NC

    def shard_over(self, data: int, tensor: int, rows: str = "data", columns: str = "None") -> None:
        """Rows over "data", or with sequence parallelism over "all" ranks; columns over "tensor" or "None"."""
        axes = ("data", "tensor") if rows == "all" else rows, columns
        self.shard_as(data, tensor, [axes], axes)


class DrawnMask(_OfRank):
    """seeds_B1 -> the dropout mask of the attention's probabilities.

    For the fused operator bits, uint8 [B, H, T, T / 8]; else factors, 0 or 1 / (1 - rate), float32 [B, K, T*G, T].
    """

    def __init__(self, settings: ModelConfig, *, bits: bool) -> None:
        super().__init__()
        length, heads, kv_heads = settings.seq_length, settings.num_heads, settings.kv_heads
        self.shape = (heads, length, length) if bits else (kv_heads, length * (heads // kv_heads), length)
        self.bits, self.rate, self.ranks = bits, settings.attention_dropout, 1
        self.drop = ascend_attention.Dropout(self.rate)

    def construct(self, seeds_B1):
        return self.morph(seeds_B1, self.place_S)

    def compute(self, seeds_B1, place_S):
        shape = (seeds_B1.shape[0], self.shape[0] // self.ranks, *self.shape[1:])
        mask = ascend_attention.draw_bits(self.seed(seeds_B1, place_S), shape, self.rate)
        if self.bits:
            return mask.reshape((*shape[:3], self.shape[2] // 8))
        return self.drop(ops.ones(shape, mstype.float32), mask)

    def infer_shape(self, seeds, place):
        if self.bits:
            return [seeds[0], *self.shape[:2], self.shape[2] // 8]
        return [seeds[0], *self.shape]

    def infer_dtype(self, seeds, place):
        return mstype.uint8 if self.bits else mstype.float32

    def shard_over(self, data: int, tensor: int) -> None:
        self.ranks = tensor
        self.shard_as(data, tensor, [], ("data", "tensor", "None", "None"))


def plain_attention_options(settings: ModelConfig, window: int | None) -> dict[str, Any]:
    """What `plain.Attention` must know beside its sizes: how it draws dropout masks; its bias tells the window."""
    return {"draw": DrawnMask(settings, bits=False)}


def attention_options(settings: ModelConfig, window: int | None) -> dict[str, Any]:
    """The same for `Attention`."""
    return {"draw": DrawnMask(settings, bits=True), "rate": settings.attention_dropout}


class Attention(Sharded):
    """As `ascend.Attention`."""

    axes: ClassVar = {
        "without": "d.t,d.t,d.t,d...", "flash": "d.t,d.t,d.t,dt..,d...", "repeat": "dt.",
    }  # fmt: skip

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype=mstype.bfloat16, softmax_dtype=mstype.float32,
        value_size: int | None = None, scale: float | None = None, *, draw: DrawnMask, rate: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dtype, self.reshape, self.cast, value_size = dtype, P.Reshape(), P.Cast(), value_size or head_size
        scale = head_size**-0.5 if scale is None else scale
        self.flash = FlashAttentionScore(heads, 1.0 - rate, scale, input_layout="BSH")
        self.without = FlashAttentionScore(heads, scale_value=scale, input_layout="BSH")
        self.draw = draw
        # The operator takes values as wide as the queries.
        self.kv_heads, self.fills_up, missing = kv_heads, value_size < head_size, head_size - value_size
        self.zeros_11w, self.repeat = Tensor(np.zeros((1, 1, missing), np.float32), dtype), P.Tile()
        self.fill_up, self.cut = JoinHeads(kv_heads), SplitHeads(heads, value_size)

    def construct(self, q_NC, k_NK, v_NK, mask_B1TT, more_mask, dropout):
        rows, length = mask_B1TT.shape[0], mask_B1TT.shape[2]
        if self.fills_up:
            zeros_NKw = self.repeat(self.zeros_11w, (v_NK.shape[0], self.kv_heads, 1))
            v_NK = self.fill_up(self.cast(v_NK, self.dtype), self.reshape(zeros_NKw, (v_NK.shape[0], -1)))
        q, k, v = self.split(q_NC, rows, length), self.split(k_NK, rows, length), self.split(v_NK, rows, length)
        if dropout is None:
            out = self.without(q, k, v, None, None, None, mask_B1TT, None)[3]
        else:
            out = self.flash(q, k, v, None, self.draw(dropout), None, mask_B1TT, None)[3]
        out = self.reshape(out, q_NC.shape)
        return self.cast(self.cut(out)[0] if self.fills_up else out, q_NC.dtype)

    def split(self, x_NC, rows, length):
        return self.cast(self.reshape(x_NC, (rows, length, x_NC.shape[1])), self.dtype)

    def shard_over(self, data: int, tensor: int) -> None:
        super().shard_over(data, tensor)
        for part in (self.draw, self.fill_up, self.cut):
            part.shard_over(data, tensor)
