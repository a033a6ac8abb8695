"""Plain kernels: MindSpore's own operators, for every device and for graphs that MindSpore shards.

They are used where no fused operator exists, for `context.mode 1` on a CPU, and beside decoders. MindSpore has a
sharding rule for every operator here. On an Ascend all have a current kernel (aclnn), except P.Gather of the tables in
a graph, and ScatterUpdate, which only a CPU uses. Semi-automatic mode shards the operators of the forward pass and
derives the backward pass from the shards, so almost no gradient is written by hand here.

A result of SplitWithSize must not be concatenated directly, or after a reshape alone: in eager mode on a CPU,
MindSpore 2.10 then computes wrong gradients, without an error (tests/parity/test_kernels.py shows it).

Legend: N tokens (B sequences x T), D hidden, I/O in/out features, F feed-forward, V vocabulary, H query heads, K
key/value heads, G = H / K, d width of a query or key, C = H * d, S cached tokens, Q new tokens of a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import MeanExt, SiLU, SiLUGrad, SplitWithSize

from trainer.models.spec.visibility import attention_bias, visible_keys
from trainer.ops.dropout import DropoutKey, LocalHeads, MaskShard, dropout_mask, scores_mask

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig


_TANH_IS_ONE = 40.0
"""The bound of 2 y, from which tanh(y) is 1 in float32."""
_QUARTERS = 4
"""The number of parts of a sequence whose scores `Attention` computes separately."""


def shard_operators(cell: nn.Cell, axes: Mapping[str, str], **degrees: int) -> None:
    """Sets the strategies of a cell's operators.

    Args:
        axes: For each name of an operator, or of a tuple of operators, the axes of its inputs, separated by commas, and
            after ">" those of the result. Each axis is a letter; an input without axes is a number.
        degrees: For each letter the number of ranks that shard the axis. Axes with other letters are not sharded.
    """

    def strategy(letters: str) -> tuple[int, ...]:
        return tuple(degrees.get(letter, 1) for letter in letters)

    for names, text in axes.items():
        inputs, _, result = text.partition(">")
        options = {}
        if result:
            options["out_strategy"] = (strategy(result),)
        for name in names.split():
            operators = getattr(cell, name)
            if not isinstance(operators, tuple):
                operators = (operators,)
            for operator in operators:
                operator.shard(tuple(map(strategy, inputs.split(","))), **options)


class Sharded(nn.Cell):
    """A cell whose operators MindSpore can shard.

    Attributes:
        axes: The argument of `shard_operators`, with "d" for the batch and "t" for columns or heads.
    """

    axes: ClassVar[Mapping[str, str]] = {}

    def shard_over(self, data: int, tensor: int = 1) -> None:
        """Shards the batch over `data` ranks, and columns or heads over `tensor` ranks."""
        shard_operators(self, self.axes, d=data, t=tensor)


class Linear(nn.Cell):
    """y_NO = x_NI weight_OI^T (+ bias_O)."""

    def __init__(self) -> None:
        super().__init__()
        self.product = P.MatMul(transpose_b=True)
        self.bias_add = P.Add()

    def construct(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        y_NO = self.product(x_NI, weight_OI)
        return y_NO if bias_O is None else self.bias_add(y_NO, bias_O)

    def shard_over(self, data: int, columns: int = 1, rows: int = 1, tokens: int = 0) -> None:
        """Shards N over `data` ranks, and the weight's O over `columns` ranks or its I over `rows` ranks.

        If `tokens` is larger than `data`, N of the result is sharded over `tokens` ranks: the sum over `rows` ranks
        becomes a ReduceScatter.
        """
        result = ">nc" if tokens > data else ""
        axes = {"product": f"dr,cr{result}", "bias_add": "nc,c"}
        shard_operators(self, axes, d=data, c=columns, r=rows, n=max(data, tokens))


class RmsNorm(nn.Cell):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.square = P.Square()
        self.mean = MeanExt()
        self.add = P.Add()
        self.rsqrt = P.Rsqrt()
        self.scale = P.Mul()
        self.weigh = P.Mul()

    def construct(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        """Computes the norm in the dtype of x."""
        rstd_N1 = self.rsqrt(self.add(self.mean(self.square(x_ND), (-1,), True), self.eps))
        return self.weigh(self.scale(x_ND, rstd_N1), weight_D)

    def shard_over(self, *degrees: int) -> None:
        """Shards all axes except the last; `degrees` has the number of ranks for each."""
        x = "dt"[: len(degrees)] + "."
        axes = {"square mean rsqrt": x, "add": f"{x},", "scale": f"{x},{x}", "weigh": f"{x},."}
        shard_operators(self, axes, **dict(zip("dt", degrees, strict=False)))


class HeadNorm(nn.Cell):
    """Normalizes each head separately: (x_NC, weight_d) -> [N, C]."""

    def __init__(self, norm: nn.Cell, head_size: int) -> None:
        super().__init__()
        self.norm = norm
        self.head_size = head_size
        self.reshape = P.Reshape()

    def construct(self, x_NC: Tensor, weight_d: Tensor) -> Tensor:
        tokens, columns = x_NC.shape
        x_NHd = self.reshape(x_NC, (tokens, columns // self.head_size, self.head_size))
        return self.reshape(self.norm(x_NHd, weight_d), (tokens, columns))

    def shard_over(self, data: int, tensor: int) -> None:
        """Shards tokens over `data` ranks and heads over `tensor` ranks."""
        self.norm.shard_over(data, tensor)


class Rotary(Sharded):
    """Rotary embedding of every head: x cos + (-second, first) sin for each pair (Su et al. 2021, equation 34).

    The pairs are columns i and i + half (Llama), or with `interleaved` the neighbours 2i and 2i + 1, as in the paper.
    If only the first `rotated_size` columns of a head are rotated, the others have a cosine of 1 and a sine of 0.
    Tables are [B, T, 1, d] or [1, N, 1, d].
    """

    axes: ClassVar = {
        "with_cos": "d.t.,d...", "add": "d.t.,d.t.", "cut": "d.t.", "cut_table": "d...", "halves": "d.t..",
        "halves_of_table negate": "d....", "with_first with_second": "d.t..,d....", "join": "d.t..,d.t..",
        "clear": "d.t.,", "concat": "d.t.,d.t.",
    }  # fmt: skip

    def __init__(self, head_size: int, rotated_size: int | None = None, interleaved: bool = False) -> None:
        super().__init__()
        self.head_size = head_size
        self.rotated_size = rotated_size or head_size
        self.pairs = (self.rotated_size // 2, 2) if interleaved else (2, self.rotated_size // 2)
        self.axis = 4 if interleaved else 3  # the axis of the two columns of a pair
        self.reshape = P.Reshape()
        self.with_cos = P.Mul()
        self.add = P.Add()
        self.cut = SplitWithSize()
        self.cut_table = SplitWithSize()
        self.clear = P.Mul()
        self.concat = P.Concat(3)
        self.halves = SplitWithSize()
        self.halves_of_table = SplitWithSize()
        self.negate = P.Neg()
        self.with_first = P.Mul()
        self.with_second = P.Mul()
        self.join = P.Concat(self.axis)

    def construct(self, x_NC: Tensor, cos_BT1d: Tensor, sin_BT1d: Tensor) -> Tensor:
        """Rotates each head of x_NC; no gradient flows into the tables."""
        cos_BT1d = ops.stop_gradient(cos_BT1d)
        sin_BT1d = ops.stop_gradient(sin_BT1d)
        rows = cos_BT1d.shape[0]
        length = cos_BT1d.shape[1]
        x_BTHd = self.reshape(x_NC, (rows, length, x_NC.shape[1] // self.head_size, self.head_size))
        out_BTHd = self.add(self.with_cos(x_BTHd, cos_BT1d), self.multiply_by_sines(x_BTHd, sin_BT1d))
        return self.reshape(out_BTHd, x_NC.shape)

    def multiply_by_sines(self, x_BTHd: Tensor, sin_BT1d: Tensor) -> Tensor:
        """Returns (-second, first) of each pair times the sines, with zeros for columns that are not rotated."""
        if self.rotated_size == self.head_size:
            return self.multiply_pairs(x_BTHd, sin_BT1d)
        sizes = (self.rotated_size, self.head_size - self.rotated_size)
        first, rest = self.cut(x_BTHd, sizes, 3)
        return self.concat((self.multiply_pairs(first, self.cut_table(sin_BT1d, sizes, 3)[0]), self.clear(rest, 0.0)))

    def multiply_pairs(self, x_BTHr: Tensor, sin_BT1r: Tensor) -> Tensor:
        """Returns (-second, first) of each pair times the sines; all r columns are rotated."""
        first, second = self.halves(self.reshape(x_BTHr, (*x_BTHr.shape[:3], *self.pairs)), (1, 1), self.axis)
        sines = self.halves_of_table(self.reshape(sin_BT1r, (*sin_BT1r.shape[:3], *self.pairs)), (1, 1), self.axis)
        products = self.with_second(second, self.negate(sines[0])), self.with_first(first, sines[1])
        return self.reshape(self.join(products), x_BTHr.shape)


class SplitHeads(Sharded):
    """x_NC -> the first columns of every head, [N, heads * first], and its other columns."""

    axes: ClassVar = {"cut": "dt.", "same": "d.,"}

    def __init__(self, heads: int, first: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = first
        self.reshape = P.Reshape()
        self.cut = SplitWithSize()
        self.same = P.Mul()

    def construct(self, x_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first columns of every head, [N, heads * first], and its other columns."""
        tokens = x_NC.shape[0]
        width = x_NC.shape[1] // self.heads
        x_NHw = self.reshape(x_NC, (tokens, self.heads, width))
        first, rest = self.cut(x_NHw, (self.first, width - self.first), 2)
        first = self.reshape(first, (tokens, -1))
        rest = self.reshape(rest, (tokens, -1))
        if self.heads == 1:  # a result may be concatenated; with several heads the reshapes make a copy
            return self.same(first, 1.0), self.same(rest, 1.0)
        return first, rest


class JoinHeads(Sharded):
    """(x_NA, y_NB) -> [N, C]: for every head its columns of x, then its columns of y, or all of y with `shared`."""

    axes: ClassVar = {"repeat": "dt.", "concat": "dt.,dt."}

    def __init__(self, heads: int, *, shared: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.shared = shared
        self.reshape = P.Reshape()
        self.repeat = P.Tile()
        self.concat = P.Concat(2)

    def construct(self, x_NA: Tensor, y_NB: Tensor) -> Tensor:
        """Joins the columns of x and y head by head."""
        tokens = x_NA.shape[0]
        x_NHa = self.reshape(x_NA, (tokens, self.heads, x_NA.shape[1] // self.heads))
        if self.shared:
            y_NHb = self.repeat(self.reshape(y_NB, (tokens, 1, y_NB.shape[1])), (1, self.heads, 1))
        else:
            y_NHb = self.reshape(y_NB, (tokens, self.heads, y_NB.shape[1] // self.heads))
        joined = self.concat((x_NHa, y_NHb))
        return self.reshape(joined, (tokens, self.heads * joined.shape[2]))


class SwiGLU(Sharded):
    """silu(gate) * up (Shazeer 2020, equation 5). Only the two inputs are saved for the backward pass."""

    axes: ClassVar = {"silu": "dt", "multiply": "dt,dt"}

    def __init__(self) -> None:
        super().__init__()
        self.silu = SiLU()
        self.multiply = P.Mul()
        self.silu_grad = SiLUGrad()

    def construct(self, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        return self.multiply(self.silu(gate_NF), up_NF)

    def bprop(self, gate_NF: Tensor, up_NF: Tensor, out: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of gate and up, which are computed from the saved inputs."""
        return self.silu_grad(grad_NF * up_NF, gate_NF), grad_NF * self.silu(gate_NF)


class Gated(Sharded):
    """activation(gate) * up; without up activation(gate)."""

    axes: ClassVar = {"activation": "dt", "multiply": "dt,dt"}

    def __init__(self, activation: nn.Cell) -> None:
        super().__init__()
        self.activation = activation
        self.multiply = P.Mul()

    def construct(self, gate_NF: Tensor, up_NF: Tensor | None = None) -> Tensor:
        if up_NF is None:
            return self.activation(gate_NF)
        return self.multiply(self.activation(gate_NF), up_NF)


class SoftCap(nn.Cell):
    """x -> cap * tanh(x / cap) (Gemma Team 2024, Gemma 2, section 2).

    It computes tanh(y) as e / (e + 2) with e = exp(2 y) - 1: MindSpore's Tanh on a CPU is off by 1.5e-5 beyond 1.

    Args:
        axes: The axes of x, as in `shard_operators`: "d" for the batch, "t" for columns or heads.
    """

    def __init__(self, cap: float, axes: str) -> None:
        super().__init__()
        self.cap = cap
        self.axes = axes
        self.shrink = P.Mul()
        self.bound = P.Minimum()
        self.expm1 = P.Expm1()
        self.add_two = P.Add()
        self.divide = P.Div()
        self.grow = P.Mul()

    def construct(self, x: Tensor) -> Tensor:
        """Returns the capped x, in its dtype."""
        e = self.expm1(self.bound(self.shrink(x, 2 / self.cap), _TANH_IS_ONE))
        return self.grow(self.divide(e, self.add_two(e, 2.0)), self.cap)

    def shard_over(self, data: int, tensor: int = 1) -> None:
        """Shards the batch over `data` ranks, and columns or heads over `tensor` ranks."""
        axes = {"shrink bound add_two grow": f"{self.axes},", "expm1": self.axes, "divide": f"{self.axes},{self.axes}"}
        shard_operators(self, axes, d=data, t=tensor)


class Attention(Sharded):
    """softmax(scale q k^T + bias) v for grouped query heads, causal, without repeating keys and values.

    The scores are [B, K, T*G, T]: the G query heads that share a key head are neighbours, token by token. No query sees
    a later key, so each quarter of the tokens computes scores only for the keys up to its end. That saves three eighths
    of the work and of the memory.

    Args:
        heads, kv_heads, head_size: H, K, d.
        dtype: Dtype of q, k, v, the products and the result.
        softmax_dtype: Dtype to which input and output of the softmax are rounded; bias and arithmetic are float32.
        value_size: Width of a head's values and of its result. Default None: d.
        scale: Factor of the scores. Default None: 1 / sqrt(d).
        cap: Caps the scores (`SoftCap`). Default None: they stay.
        draw: Makes the dropout mask [B, K, T*G, T] from `dropout`. Default None: `dropout` is the mask, [B*K, T*G, T].
    """

    axes: ClassVar = {
        "scale": "dt,", "to_heads": "d.t.", "from_heads": "dt..", "score mix": "dt..,dt..", "cut": "dt..",
        "join": "dt..,dt..,dt..,dt..", "cut_bias": "d....", "add_bias": "dt...,d....", "softmax": "dt..",
        "drop": "dt..,dt..",
    }  # fmt: skip

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype: mstype.Type = mstype.float32,
        softmax_dtype: mstype.Type = mstype.float32, value_size: int | None = None, scale: float | None = None,
        cap: nn.Cell | None = None, draw: nn.Cell | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.cap = cap
        self.dtype = dtype
        self.softmax_dtype = softmax_dtype
        self.value_size = value_size or head_size
        self.factor = head_size**-0.5 if scale is None else scale
        self.reshape = P.Reshape()
        self.cast = P.Cast()
        self.to_heads = P.Transpose()
        self.from_heads = P.Transpose()
        self.scale = P.Mul()
        self.score = P.BatchMatMul(transpose_b=True)
        self.add_bias = P.Add()
        self.softmax = P.Softmax()
        self.drop = P.Mul()
        self.mix = P.BatchMatMul()
        self.draw = draw
        self.cut = SplitWithSize()
        self.cut_bias = SplitWithSize()
        self.join = P.Concat(2)
        self.add_sinks = P.Add()
        self.join_sinks = P.Concat(3)
        self.cut_sinks = SplitWithSize()

    def construct(
        self, q_NC: Tensor, k_NK: Tensor, v_NK: Tensor, bias_B1TT: Tensor, more_mask: None, dropout: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attends; the sinks are scores of one more key without a value."""
        rows = bias_B1TT.shape[0]
        length = bias_B1TT.shape[2]
        group = self.heads // self.kv_heads
        bias = ops.stop_gradient(self.reshape(bias_B1TT, (rows, 1, length, 1, length)))
        q = self.split(self.scale(q_NC, self.factor), rows)
        k = self.split(k_NK, rows)
        v = self.split(v_NK, rows)
        q = self.reshape(q, (rows, self.kv_heads, length * group, k.shape[3]))
        mask = None
        if dropout is not None:
            shape = (rows, self.kv_heads, length * group, length)
            mask = self.reshape(dropout, shape) if self.draw is None else self.draw(dropout)
            mask = ops.stop_gradient(mask)
        if length < _QUARTERS:
            out = self.attend(q, k, v, bias, mask, sinks_H)
        else:
            out = self.attend_in_quarters(q, k, v, bias, mask, sinks_H)
        out = self.reshape(out, (rows, self.kv_heads, length, group * self.value_size))
        return self.reshape(self.from_heads(out, (0, 2, 1, 3)), (rows * length, self.heads * self.value_size))

    def split(self, x_NC: Tensor, rows: int) -> Tensor:
        """Reshapes [B*T, K*w] to [B, K, T, w]; w columns belong to the query heads that share a key head."""
        width = x_NC.shape[1] // self.kv_heads
        return self.to_heads(self.reshape(x_NC, (rows, -1, self.kv_heads, width)), (0, 2, 1, 3))

    def attend_in_quarters(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, sinks_H: Tensor | None
    ) -> Tensor:
        """Attends in four parts, each with the keys up to its end; the last one has the remainder of the division."""
        length = k.shape[2]
        group = self.heads // self.kv_heads
        quarter = length // _QUARTERS
        sizes = (quarter, quarter, quarter, length - 3 * quarter)
        rows = (quarter * group, quarter * group, quarter * group, sizes[3] * group)
        q_parts = self.cut(q, rows, 2)
        bias_parts = self.cut_bias(bias, sizes, 2)
        mask_parts = (None,) * _QUARTERS if mask is None else self.cut(mask, rows, 2)
        out = ()
        for part in range(_QUARTERS - 1):
            keys = ((part + 1) * quarter, length - (part + 1) * quarter)
            k_part = self.cut(k, keys, 2)[0]
            v_part = self.cut(v, keys, 2)[0]
            bias_part = self.cut_bias(bias_parts[part], keys, 4)[0]
            mask_part = None if mask is None else self.cut(mask_parts[part], keys, 3)[0]
            out += (self.attend(q_parts[part], k_part, v_part, bias_part, mask_part, sinks_H),)
        return self.join((*out, self.attend(q_parts[3], k, v, bias_parts[3], mask_parts[3], sinks_H)))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, sinks_H: Tensor | None
    ) -> Tensor:
        """Returns [B, K, q*G, width of values] for q tokens and s keys; the bias is [B, 1, q, 1, s]."""
        scores = self.round(self.score(q, k))
        if self.cap is not None:
            scores = self.cap(scores)
        by_token = (q.shape[0], self.kv_heads, bias.shape[2], self.heads // self.kv_heads, bias.shape[4])
        biased = self.add_bias(self.reshape(scores, by_token), bias)
        biased = self.reshape(biased, scores.shape)
        if sinks_H is not None:
            biased = self.join_sinks((biased, self.sink_scores(sinks_H, biased)))
        probabilities = self.round(self.softmax(biased))
        if sinks_H is not None:
            probabilities = self.cut_sinks(probabilities, (scores.shape[3], 1), 3)[0]
        if mask is not None:
            probabilities = self.drop(probabilities, mask)
        return self.mix(self.cast(probabilities, self.dtype), v)

    def sink_scores(self, sinks_H: Tensor, scores: Tensor) -> Tensor:
        """Returns the sinks as the scores of one key, [B, K, q*G, 1]."""
        rows, _, queries, _ = scores.shape
        group = self.heads // self.kv_heads
        zeros = ops.zeros((rows, self.kv_heads, queries // group, group), mstype.float32)
        scores = self.add_sinks(zeros, self.reshape(sinks_H, (1, self.kv_heads, 1, group)))
        return self.reshape(scores, (rows, self.kv_heads, queries, 1))

    def round(self, x: Tensor) -> Tensor:
        """Rounds scores or probabilities to `softmax_dtype`; the result is float32."""
        return self.cast(self.cast(x, self.softmax_dtype), mstype.float32)

    def shard_over(self, data: int, tensor: int = 1) -> None:
        """Shards the batch over `data` ranks and heads over `tensor` ranks."""
        super().shard_over(data, tensor)
        for cell in (self.draw, self.cap):
            if cell is not None:
                cell.shard_over(data, tensor)


class Dropout(nn.Cell):
    """(x, mask) -> x times the mask, whose elements are 0 or 1 / (1 - rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.multiply = P.Mul()

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.multiply(x, mask)


def gather_rows(x_RD: Tensor, index_N: Tensor) -> Tensor:
    """Returns x[index], [N, D]."""
    return ops.gather(x_RD, index_N, 0)


def write_rows(store_RD: Parameter, index_N: Tensor, x_ND: Tensor) -> None:
    """Writes store[index] = x in place, for the KV cache."""
    P.ScatterUpdate()(store_RD, index_N, x_ND)


# ---- position tables, masks and dropout masks, made on the host ------------------------------------------------------


def rotary_tables(
    cos_Nd: np.ndarray, sin_Nd: np.ndarray, dtype: mstype.Type = mstype.float32, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the tables of `Rotary` for any number of heads, [1, N, 1, d], rounded to `dtype`.

    They have this dtype for the fused operator, and float32 for the plain one.
    """
    cos = Tensor(cos_Nd[None, :, None, :], dtype)
    sin = Tensor(sin_Nd[None, :, None, :], dtype)
    if fused or dtype == mstype.float32:
        return cos, sin
    return cos.astype(mstype.float32), sin.astype(mstype.float32)


class AttentionMasks:
    """Makes the bias argument of `Attention` from the document numbers of the tokens."""

    def __init__(self, settings: ModelConfig) -> None:
        self.heads = settings.num_heads
        self.kv_heads = settings.kv_heads

    def __call__(self, segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[Tensor, None]:
        """Returns a float32 bias [B, 1, T, T], 0 where a query sees a key, and None.

        A query sees earlier tokens of its own document and itself; with `window` only the last `window` of them.
        """
        tokens = np.arange(segment_ids_BT.shape[1])
        return Tensor(attention_bias(visible_keys(tokens, tokens, window, segment_ids_BT))[:, None]), None

    def scores_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Returns the shape of the attention's probabilities, [B*K, T*G, T]."""
        return rows * self.kv_heads, length * (self.heads // self.kv_heads), length


def attention_options(settings: ModelConfig, window: int | None) -> dict[str, Any]:
    """Returns no further arguments for `Attention`: its masks contain all that differs from layer to layer."""
    return {}


def draw_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, shard: MaskShard | None = None
) -> Tensor:
    """Draws a mask for `Dropout` on the host."""
    return Tensor(dropout_mask(key, site, shape, rate, shard))


def draw_factors(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, local: LocalHeads | None = None
) -> Tensor:
    """Draws a dropout mask for `Attention` on the host."""
    return Tensor(scores_mask(key, site, shape, rate, local))


# ---- prediction on a device ------------------------------------------------------------------------------------------


def cached_mask(visible_BQS: np.ndarray) -> Tensor:
    """Returns the bias that `cached_attention` adds to the scores, [B, 1, Q, 1, S]."""
    return Tensor(attention_bias(visible_BQS)[:, None, :, None])


def cached_attention(
    q_BQC: Tensor, k_BSK: Tensor, v_BSV: Tensor, bias: Tensor, heads: int, kv_heads: int,
    softmax_dtype: mstype.Type = mstype.float32, scale: float | None = None, cap: nn.Cell | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes attention of Q new tokens over S cached tokens, [B, Q, H * width of a head's values], forward only.

    Args:
        bias: The result of `cached_mask`. Keys and values that it excludes may contain any finite number.
        scale: Factor of the scores. Default None: 1 / sqrt(d).
        cap: Caps the scores (`SoftCap`). Default None: they stay.
        sinks_H: A score of each head that takes part in the softmax and has no value.

    Returns:
        A tensor with the dtype of the queries.
    """
    rows, queries, width = q_BQC.shape
    if scale is None:
        scale = (width // heads) ** -0.5
    q, k, v = (
        ops.transpose(x.reshape(rows, -1, kv_heads, x.shape[-1] // kv_heads), (0, 2, 1, 3))
        for x in (q_BQC * scale, k_BSK, v_BSV)
    )
    q = q.reshape(rows, kv_heads, -1, width // heads)
    by_query = (rows, kv_heads, queries, heads // kv_heads, -1)
    scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))).astype(softmax_dtype).astype(mstype.float32)
    if cap is not None:
        scores = cap(scores)
    biased = scores.reshape(by_query) + bias
    if sinks_H is not None:
        sinks = sinks_H.reshape(1, kv_heads, 1, heads // kv_heads, 1).broadcast_to((*biased.shape[:-1], 1))
        biased = ops.concat((biased, sinks.astype(biased.dtype)), -1)
    probabilities = ops.softmax(biased, -1).astype(softmax_dtype).astype(v.dtype)
    if sinks_H is not None:
        probabilities = probabilities[..., :-1]
    out = ops.matmul(probabilities.reshape(rows, kv_heads, -1, k.shape[2]), v)
    out = ops.transpose(out.reshape(rows, kv_heads, queries, -1), (0, 2, 1, 3))
    return out.reshape(rows, queries, -1)
