"""Kernels for a graph that MindSpore shards: plain operators, each of which has a strategy.

MindSpore's semi-automatic mode shards the operators of the forward pass and derives the backward pass from the shards.
So no gradient is written by hand here, every operator is one that MindSpore can shard, and sizes stand in nothing but
reshapes, which it adapts.

`shard_over(data, tensor)` sets the strategies: over how many data-parallel ranks the batch (N, B) is sharded, and over
how many tensor-parallel ranks the columns.

Legend and signatures: as in trainer/ops/cpu/kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Layout, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import SiLU

from trainer.ops.ascend import attention as ascend_attention

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_APART = 1 << 40
"""Between the seeds of two ranks of a tensor-parallel group; those of a micro-batch's masks follow each other."""


class Linear(nn.Cell):
    """As `reference.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.product = P.MatMul(transpose_b=True)

    def construct(self, x_NI, weight_OI):
        return self.product(x_NI, weight_OI)

    def shard_over(self, data: int, columns: int = 1, rows: int = 1, tokens: int = 0) -> None:
        """N over `data` ranks; the weight's O over `columns` ranks or its I over `rows` ranks.

        N of the result is sharded over `tokens` ranks where that is more: the sum over `rows` ranks is a ReduceScatter.
        """
        scattered = {"out_strategy": ((tokens, columns),)} if tokens > data else {}
        self.product.shard(((data, rows), (columns, rows)), **scattered)


class LinearBias(nn.Cell):
    """As `reference.LinearBias`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias_add = Linear(), P.BiasAdd()

    def construct(self, x_NI, weight_OI, bias_O):
        return self.bias_add(self.linear(x_NI, weight_OI), bias_O)

    def shard_over(self, data: int, columns: int = 1, rows: int = 1, tokens: int = 0) -> None:
        """As `Linear.shard_over`."""
        self.linear.shard_over(data, columns, rows, tokens)
        self.bias_add.shard(((max(data, tokens), columns), (columns,)))


class RmsNorm(nn.Cell):
    """As `reference.RmsNorm`; no row is sharded."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.square, self.mean = eps, P.Square(), P.ReduceMean(keep_dims=True)
        self.add, self.rsqrt, self.scale, self.weigh = P.Add(), P.Rsqrt(), P.Mul(), P.Mul()

    def construct(self, x_ND, weight_D):
        rstd_N1 = self.rsqrt(self.add(self.mean(self.square(x_ND), -1), self.eps))
        return self.weigh(self.scale(x_ND, rstd_N1), weight_D)

    def shard_over(self, *degrees: int) -> None:
        """Shards all axes but the last."""
        whole = (*degrees, 1)
        for part in (self.square, self.mean, self.rsqrt):
            part.shard((whole,))
        self.add.shard((whole, ()))
        self.scale.shard((whole, whole))
        self.weigh.shard((whole, (1,)))


class HeadNorm(nn.Cell):
    """As `reference.HeadNorm`, on [N, heads, d]."""

    def __init__(self, norm: nn.Cell, head_size: int) -> None:
        super().__init__()
        self.norm, self.head_size, self.reshape = norm, head_size, P.Reshape()

    def construct(self, x_NC, weight_d):
        tokens, columns = x_NC.shape
        x_NHd = self.reshape(x_NC, (tokens, columns // self.head_size, self.head_size))
        return self.reshape(self.norm(x_NHd, weight_d), (tokens, columns))

    def shard_over(self, data: int, tensor: int) -> None:
        self.norm.shard_over(data, tensor)


class Rotary(nn.Cell):
    """As `reference.Rotary`, with tables [B, T, 1, d]: heads are sharded, never split."""

    def __init__(self, head_size: int, rotated_size: int | None = None, interleaved: bool = False) -> None:
        super().__init__()
        self.head_size, self.half, self.interleaved = head_size, (rotated_size or head_size) // 2, interleaved
        self.reshape, self.slice, self.negate, self.concat = P.Reshape(), P.StridedSlice(), P.Neg(), P.Concat(3)
        self.slice_pairs, self.join_pairs = P.StridedSlice(), P.Concat(4)
        self.with_cos, self.with_sin, self.add = P.Mul(), P.Mul(), P.Add()

    def construct(self, x_NC, cos_BT1d, sin_BT1d):
        rows, length = cos_BT1d.shape[0], cos_BT1d.shape[1]
        x_BTHd = self.reshape(x_NC, (rows, length, x_NC.shape[1] // self.head_size, self.head_size))
        rotated_BTHd = self.rotated(x_BTHd)
        out_BTHd = self.add(self.with_cos(x_BTHd, cos_BT1d), self.with_sin(rotated_BTHd, sin_BT1d))
        return self.reshape(out_BTHd, x_NC.shape)

    def rotated(self, x_BTHd):
        """(-second, first) of the rotated pairs; the other columns are multiplied by a sine of 0."""
        half, size = self.half, self.head_size
        if self.interleaved:
            parts = (self.neighbours(x_BTHd if 2 * half == size else self.columns(x_BTHd, 0, 2 * half)),)
        else:
            parts = self.negate(self.columns(x_BTHd, half, 2 * half)), self.columns(x_BTHd, 0, half)
        if 2 * half < size:
            parts = (*parts, self.columns(x_BTHd, 2 * half, size))
        return parts[0] if len(parts) == 1 else self.concat(parts)

    def neighbours(self, x_BTHr):
        """(-second, first) of each two neighbours."""
        rows, length, heads, width = x_BTHr.shape
        ends, ones = (rows, length, heads, width // 2), (1, 1, 1, 1, 1)
        pairs = self.reshape(x_BTHr, (*ends, 2))
        first = self.slice_pairs(pairs, (0, 0, 0, 0, 0), (*ends, 1), ones)
        second = self.slice_pairs(pairs, (0, 0, 0, 0, 1), (*ends, 2), ones)
        return self.reshape(self.join_pairs((self.negate(second), first)), (rows, length, heads, width))

    def columns(self, x_BTHd, first, end):
        rows, length, heads = x_BTHd.shape[0], x_BTHd.shape[1], x_BTHd.shape[2]
        return self.slice(x_BTHd, (0, 0, 0, first), (rows, length, heads, end), (1, 1, 1, 1))

    def shard_over(self, data: int, tensor: int) -> None:
        whole, table = (data, 1, tensor, 1), (data, 1, 1, 1)
        pairs = (*whole, 1)
        parts = (1 if self.interleaved else 2) + (2 * self.half < self.head_size)
        self.slice.shard((whole,))
        self.negate.shard((pairs if self.interleaved else whole,))
        self.slice_pairs.shard((pairs,))
        self.join_pairs.shard((pairs, pairs))
        self.concat.shard((whole,) * parts)
        for part in (self.with_cos, self.with_sin):
            part.shard((whole, table))
        self.add.shard((whole, whole))


class SplitHeads(nn.Cell):
    """As `reference.SplitHeads`."""

    def __init__(self, heads: int, first: int) -> None:
        super().__init__()
        self.heads, self.first, self.reshape, self.slice = heads, first, P.Reshape(), P.StridedSlice()

    def construct(self, x_NC):
        tokens, width = x_NC.shape[0], x_NC.shape[1] // self.heads
        x_NHw = self.reshape(x_NC, (tokens, self.heads, width))
        first = self.slice(x_NHw, (0, 0, 0), (tokens, self.heads, self.first), (1, 1, 1))
        rest = self.slice(x_NHw, (0, 0, self.first), (tokens, self.heads, width), (1, 1, 1))
        columns = self.heads * self.first
        return self.reshape(first, (tokens, columns)), self.reshape(rest, (tokens, x_NC.shape[1] - columns))

    def shard_over(self, data: int, tensor: int) -> None:
        self.slice.shard(((data, tensor, 1),))


class JoinHeads(nn.Cell):
    """As `reference.JoinHeads`."""

    def __init__(self, heads: int, *, shared: bool = False) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        self.reshape, self.repeat, self.concat = P.Reshape(), P.Tile(), P.Concat(2)

    def construct(self, x_NA, y_NB):
        tokens = x_NA.shape[0]
        x_NHa = self.reshape(x_NA, (tokens, self.heads, x_NA.shape[1] // self.heads))
        if self.shared:
            y_NHb = self.repeat(self.reshape(y_NB, (tokens, 1, y_NB.shape[1])), (1, self.heads, 1))
        else:
            y_NHb = self.reshape(y_NB, (tokens, self.heads, y_NB.shape[1] // self.heads))
        joined = self.concat((x_NHa, y_NHb))
        return self.reshape(joined, (tokens, self.heads * joined.shape[2]))

    def shard_over(self, data: int, tensor: int) -> None:
        whole = (data, tensor, 1)
        self.repeat.shard((whole,))
        self.concat.shard((whole, whole))


class SwiGLU(nn.Cell):
    """As `reference.SwiGLU`."""

    def __init__(self) -> None:
        super().__init__()
        self.silu, self.multiply = SiLU(), P.Mul()

    def construct(self, gate_NF, up_NF):
        return self.multiply(self.silu(gate_NF), up_NF)

    def shard_over(self, data: int, tensor: int) -> None:
        self.silu.shard(((data, tensor),))
        self.multiply.shard(((data, tensor), (data, tensor)))


class Attention(nn.Cell):
    """softmax(scale q k^T + mask) v with the mask of `AttentionMask`; keys and values are repeated for the query
    heads that share them.

    Args:
        heads, kv_heads, head_size: H, K, d.
        dtype: Of q, k, v, the products and the result.
        softmax_dtype: What goes into the softmax and what comes out is rounded to it; mask and arithmetic are float32.
        value_size, scale: As of `reference.Attention`.
        length, rate: T, and the part of the probabilities that is dropped where `dropout` is a tensor of seeds.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype=mstype.float32, softmax_dtype=mstype.float32,
        value_size: int | None = None, scale: float | None = None, length: int = 0, rate: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.head_size, self.dtype = heads, kv_heads, head_size, dtype
        self.softmax_dtype = softmax_dtype
        self.reshape, self.cast = P.Reshape(), P.Cast()
        self.to_heads, self.from_heads = P.Transpose(), P.Transpose()
        self.tile = P.Tile()
        self.score, self.scale, self.mask = P.BatchMatMul(transpose_b=True), P.Mul(), P.Add()
        self.softmax, self.mix, self.drop = P.Softmax(), P.BatchMatMul(), P.Mul()
        self.drawn = DrawnMask(heads, length, rate, bits=False)
        self.value_size, self.factor = value_size or head_size, head_size**-0.5 if scale is None else scale

    def construct(self, q_NC, k_NK, v_NK, bias_B1TT, late_mask, dropout):
        rows, length = bias_B1TT.shape[0], bias_B1TT.shape[2]
        q = self.split(q_NC, rows, length, self.heads)
        k = self.repeat(self.split(k_NK, rows, length, self.kv_heads), rows, length)
        v = self.repeat(self.split(v_NK, rows, length, self.kv_heads), rows, length)
        scores = self.rounded(self.scale(self.score(q, k), self.factor))
        probabilities = self.rounded(self.softmax(self.mask(scores, bias_B1TT)))
        if dropout is not None:
            probabilities = self.drop(probabilities, self.drawn(dropout))
        out = self.from_heads(self.mix(self.cast(probabilities, self.dtype), v), (0, 2, 1, 3))
        return self.reshape(out, (rows * length, self.heads * self.value_size))

    def split(self, x_NC, rows, length, heads):
        return self.to_heads(self.reshape(x_NC, (rows, length, heads, x_NC.shape[1] // heads)), (0, 2, 1, 3))

    def repeat(self, x_BKTd, rows, length):
        """[B, K, T, d] -> [B, H, T, d]: each key head is repeated for its query heads."""
        group = self.heads // self.kv_heads
        if group == 1:
            return x_BKTd
        flat = self.tile(self.reshape(x_BKTd, (rows, self.kv_heads, 1, length * self.head_size)), (1, 1, group, 1))
        return self.reshape(flat, (rows, self.heads, length, self.head_size))

    def rounded(self, x):
        return self.cast(self.cast(x, self.softmax_dtype), mstype.float32)

    def shard_over(self, data: int, tensor: int) -> None:
        heads = (data, tensor, 1, 1)
        self.to_heads.shard(((data, 1, tensor, 1),))
        for part in (self.from_heads, self.softmax, self.tile):
            part.shard((heads,))
        for part in (self.score, self.mix, self.drop):
            part.shard((heads, heads))
        self.drawn.shard_over(data, tensor)
        self.scale.shard((heads, ()))
        self.mask.shard((heads, (data, 1, 1, 1)))


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
    """seeds_B1 -> the dropout mask of the attention's probabilities, of H heads.

    For the fused operator bits, uint8 [B, H, T, T / 8]; else factors, 0 or 1 / (1 - rate), float32 [B, H, T, T].
    """

    def __init__(self, heads: int, length: int, rate: float, *, bits: bool) -> None:
        super().__init__()
        self.heads, self.length, self.rate, self.bits, self.own = heads, length, rate, bits, heads
        self.drop = ascend_attention.Dropout(rate)

    def construct(self, seeds_B1):
        return self.morph(seeds_B1, self.place_S)

    def compute(self, seeds_B1, place_S):
        shape = (seeds_B1.shape[0], self.own, self.length, self.length)
        mask = ascend_attention.draw_bits(self.seed(seeds_B1, place_S), shape, self.rate)
        if self.bits:
            return mask.reshape((*shape[:3], self.length // 8))
        return self.drop(ops.ones(shape, mstype.float32), mask)

    def infer_shape(self, seeds, place):
        return [seeds[0], self.heads, self.length, self.length // 8 if self.bits else self.length]

    def infer_dtype(self, seeds, place):
        return mstype.uint8 if self.bits else mstype.float32

    def shard_over(self, data: int, tensor: int) -> None:
        self.own = self.heads // tensor
        self.shard_as(data, tensor, [], ("data", "tensor", "None", "None"))


def attention_options(settings: ModelConfig, window: int | None) -> dict[str, int | float]:
    """What `Attention` must know beside its sizes: its dropout masks; the other masks tell the window."""
    return {"length": settings.seq_length, "rate": settings.attention_dropout}


class CrossEntropy(nn.Cell):
    """As `reference.CrossEntropy`; the vocabulary is sharded like columns, so no rank has all logits of a token."""

    def __init__(self, dtype=mstype.float32) -> None:
        super().__init__()
        self.dtype, self.cast, self.logits = dtype, P.Cast(), P.MatMul(transpose_b=True)
        self.largest, self.centre, self.exp = P.ReduceMax(keep_dims=True), P.Sub(), P.Exp()
        self.total, self.log = P.ReduceSum(keep_dims=True), P.Log()
        self.one_hot, self.pick, self.picked = P.OneHot(), P.Mul(), P.ReduceSum(keep_dims=True)
        self.difference, self.weigh, self.sum = P.Sub(), P.Mul(), P.ReduceSum()
        self.on, self.off = Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)

    def construct(self, x_ND, weight_VD, labels_N, valid_N1):
        logits_NV = self.logits(self.cast(x_ND, self.dtype), self.cast(weight_VD, self.dtype))
        logits_NV = self.cast(logits_NV, mstype.float32)
        # A constant shift: no gradient goes through it.
        centred_NV = self.centre(logits_NV, ops.stop_gradient(self.largest(logits_NV, 1)))
        log_sum_N1 = self.log(self.total(self.exp(centred_NV), 1))
        label_NV = self.one_hot(labels_N, weight_VD.shape[0], self.on, self.off)
        label_logit_N1 = self.picked(self.pick(centred_NV, label_NV), 1)
        return self.sum(self.weigh(self.difference(log_sum_N1, label_logit_N1), valid_N1))

    def shard_over(self, data: int, tensor: int) -> None:
        logits, row = (data, tensor), (data, 1)
        self.logits.shard(((data, 1), (tensor, 1)))
        for part in (self.largest, self.exp, self.total, self.picked):
            part.shard((logits,))
        self.centre.shard((logits, row))
        self.one_hot.shard((logits, (), ()))
        self.pick.shard((logits, logits))
        for part in (self.difference, self.weigh):
            part.shard((row, row))
        self.log.shard((row,))
        self.sum.shard((row,))


class RotaryTables(nn.Cell):
    """(cos_Pd, sin_Pd of all positions, positions_BT) -> cos and sin [B, T, 1, d], in `dtype`, then float32 where no
    fused operator takes them."""

    def __init__(self, fused: bool, dtype: mstype.Type) -> None:
        super().__init__(auto_prefix=False)
        self.fused, self.dtype = fused, dtype
        self.gather, self.reshape, self.cast = P.Gather(), P.Reshape(), P.Cast()

    def construct(self, cos_Pd, sin_Pd, positions_BT):
        return self.table(cos_Pd, positions_BT), self.table(sin_Pd, positions_BT)

    def table(self, table_Pd, positions_BT):
        rows, length = positions_BT.shape
        table_Pd = self.cast(table_Pd, self.dtype)
        table_BTd = self.gather(table_Pd if self.fused else self.cast(table_Pd, mstype.float32), positions_BT, 0)
        return self.reshape(table_BTd, (rows, length, 1, table_Pd.shape[1]))

    def shard_over(self, data: int) -> None:
        self.gather.shard(((1, 1), (data, 1)))


class AttentionMask(nn.Cell):
    """segment_ids_BT -> [B, 1, T, T]: for the fused operator True where a position must not be seen, else a float32
    bias of 0 or the least number. A token sees no more than `window` tokens, itself included; None: all before it."""

    def __init__(self, fused: bool, length: int, window: int | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.fused, self.length = fused, length
        hidden_TT = ~np.tri(length, dtype=bool)
        if window is not None:
            hidden_TT |= np.tri(length, k=-window, dtype=bool)
        self.hidden_11TT = Tensor(hidden_TT[None, None])
        self.reshape, self.differs, self.either, self.cast, self.bias = (
            P.Reshape(), P.NotEqual(), P.LogicalOr(), P.Cast(), P.Mul()
        )  # fmt: skip
        self.least = float(np.finfo(np.float32).min)

    def construct(self, segment_ids_BT):
        rows, length = segment_ids_BT.shape
        other_B1TT = self.differs(
            self.reshape(segment_ids_BT, (rows, 1, length, 1)), self.reshape(segment_ids_BT, (rows, 1, 1, length))
        )
        hidden_B1TT = self.either(other_B1TT, self.hidden_11TT)
        return hidden_B1TT if self.fused else self.bias(self.cast(hidden_B1TT, mstype.float32), self.least)

    def shard_over(self, data: int) -> None:
        batch = (data, 1, 1, 1)
        self.differs.shard((batch, batch))
        self.either.shard((batch, (1, 1, 1, 1)))
        self.bias.shard((batch, ()))
