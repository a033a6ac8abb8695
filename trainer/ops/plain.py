"""Plain kernels: MindSpore's own operators, for every device and for graphs that MindSpore shards.

They compute what has no fused operator, `context.mode 1` on a CPU and the classifier. Every operator has a sharding
rule in MindSpore, and a current kernel (aclnn) on an Ascend except P.OneHot of the loss and P.Gather of the tables in a
graph. Semi-automatic mode shards the operators of the forward pass and derives the backward pass from the shards, so no
gradient is written by hand here.

What SplitWithSize gives must not go into a concatenation as it is, or through a reshape alone: operator by operator on
a CPU, MindSpore 2.10 then computes wrong gradients, without an error (tests/parity/test_kernels.py shows it).

Legend: N tokens (B rows x T), D hidden, I/O in/out features, F feed-forward, V vocabulary, H query heads, K key/value
heads, G = H / K, d width of a query or key, C = H * d, S cached tokens, Q new ones of a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import MeanExt, SiLU, SiLUGrad, SplitWithSize, SumExt

from trainer.models.spec.visibility import attention_bias, visible_keys
from trainer.ops.dropout import DropoutKey, LocalHeads, MaskShard, dropout_mask, scores_mask

if TYPE_CHECKING:
    from trainer.config import ModelConfig


_QUARTERS = 4
"""Parts of a sequence whose scores `Attention` computes by themselves."""


def shard_operators(cell: nn.Cell, axes: Mapping[str, str], **degrees: int) -> None:
    """Gives operators of a cell their strategies.

    Args:
        axes: Names of operators, or of tuples of them -> the axes of their inputs, separated by commas, and after ">"
            those of the result. Each axis is a letter; an input without axes is a number.
        degrees: Letter of an axis -> over how many ranks it is sharded; any other letter: it is whole.
    """

    def strategy(letters: str) -> tuple[int, ...]:
        return tuple(degrees.get(letter, 1) for letter in letters)

    for names, written in axes.items():
        inputs, _, result = written.partition(">")
        more = {"out_strategy": (strategy(result),)} if result else {}
        for name in names.split():
            named = getattr(cell, name)
            for operator in named if isinstance(named, tuple) else (named,):
                operator.shard(tuple(map(strategy, inputs.split(","))), **more)


class Sharded(nn.Cell):
    """A cell whose operators MindSpore can shard.

    Attributes:
        axes: As `shard_operators` takes them, with "d" for the batch and "t" for columns or heads.
    """

    axes: ClassVar[Mapping[str, str]] = {}

    def shard_over(self, data: int, tensor: int = 1) -> None:
        """Shards the batch over `data` and columns or heads over `tensor` ranks."""
        shard_operators(self, self.axes, d=data, t=tensor)


class Linear(nn.Cell):
    """y_NO = x_NI weight_OI^T (+ bias_O)."""

    def __init__(self) -> None:
        super().__init__()
        self.product = P.MatMul(transpose_b=True)
        self.bias_add = P.Add()

    def construct(self, x_NI, weight_OI, bias_O=None):
        y_NO = self.product(x_NI, weight_OI)
        return y_NO if bias_O is None else self.bias_add(y_NO, bias_O)

    def shard_over(self, data: int, columns: int = 1, rows: int = 1, tokens: int = 0) -> None:
        """Shards N over `data` ranks, and the weight's O over `columns` ranks or its I over `rows` ranks.

        N of the result is sharded over `tokens` ranks where that is more: the sum over `rows` ranks is a ReduceScatter.
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

    def construct(self, x_ND, weight_D):
        rstd_N1 = self.rsqrt(self.add(self.mean(self.square(x_ND), (-1,), True), self.eps))
        return self.weigh(self.scale(x_ND, rstd_N1), weight_D)

    def shard_over(self, *degrees: int) -> None:
        """Shards all axes but the last."""
        x = "dt"[: len(degrees)] + "."
        axes = {"square mean rsqrt": x, "add": f"{x},", "scale": f"{x},{x}", "weigh": f"{x},."}
        shard_operators(self, axes, **dict(zip("dt", degrees, strict=False)))


class HeadNorm(nn.Cell):
    """A norm of every head by itself: (x_NC, weight_d) -> [N, C]."""

    def __init__(self, norm: nn.Cell, head_size: int) -> None:
        super().__init__()
        self.norm = norm
        self.head_size = head_size
        self.reshape = P.Reshape()

    def construct(self, x_NC, weight_d):
        tokens, columns = x_NC.shape
        x_NHd = self.reshape(x_NC, (tokens, columns // self.head_size, self.head_size))
        return self.reshape(self.norm(x_NHd, weight_d), (tokens, columns))

    def shard_over(self, data: int, tensor: int) -> None:
        self.norm.shard_over(data, tensor)


class Rotary(Sharded):
    """x cos + turned(x) sin for every head (Su et al. 2021, equation 34): turned is (-second, first) of each pair.

    The pairs are numbers i and i + half (Llama), or with `interleaved` the neighbours 2i and 2i + 1, as in the paper.
    Where only the first `rotated_size` columns of a head turn, the others have a cosine of 1 and a sine of 0. Tables
    are [B, T, 1, d], or [1, N, 1, d].
    """

    axes: ClassVar = {
        "with_cos": "d.t.,d...", "add": "d.t.,d.t.", "cut": "d.t.", "cut_table": "d...", "halves": "d.t..",
        "halves_of_table negate": "d....", "with_first with_second": "d.t..,d....", "join": "d.t..,d.t..",
        "clear": "d.t.,", "concat": "d.t.,d.t.",
    }  # fmt: skip

    def __init__(self, head_size: int, rotated_size: int | None = None, interleaved: bool = False) -> None:
        super().__init__()
        self.head_size = head_size
        self.turned_size = rotated_size or head_size
        self.pairs = (self.turned_size // 2, 2) if interleaved else (2, self.turned_size // 2)
        self.axis = 4 if interleaved else 3  # of the two numbers of a pair
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

    def construct(self, x_NC, cos_BT1d, sin_BT1d):
        cos_BT1d = ops.stop_gradient(cos_BT1d)
        sin_BT1d = ops.stop_gradient(sin_BT1d)
        rows = cos_BT1d.shape[0]
        length = cos_BT1d.shape[1]
        x_BTHd = self.reshape(x_NC, (rows, length, x_NC.shape[1] // self.head_size, self.head_size))
        out_BTHd = self.add(self.with_cos(x_BTHd, cos_BT1d), self.turned(x_BTHd, sin_BT1d))
        return self.reshape(out_BTHd, x_NC.shape)

    def turned(self, x_BTHd, sin_BT1d):
        """(-second, first) of the pairs times the sines, and zeros for the columns that do not turn."""
        if self.turned_size == self.head_size:
            return self.turned_pairs(x_BTHd, sin_BT1d)
        sizes = (self.turned_size, self.head_size - self.turned_size)
        first, rest = self.cut(x_BTHd, sizes, 3)
        return self.concat((self.turned_pairs(first, self.cut_table(sin_BT1d, sizes, 3)[0]), self.clear(rest, 0.0)))

    def turned_pairs(self, x_BTHr, sin_BT1r):
        first, second = self.halves(self.reshape(x_BTHr, (*x_BTHr.shape[:3], *self.pairs)), (1, 1), self.axis)
        of_table = self.halves_of_table(self.reshape(sin_BT1r, (*sin_BT1r.shape[:3], *self.pairs)), (1, 1), self.axis)
        turned = self.with_second(second, self.negate(of_table[0])), self.with_first(first, of_table[1])
        return self.reshape(self.join(turned), x_BTHr.shape)


class SplitHeads(Sharded):
    """x_NC -> the first columns of every head [N, heads * first], and the others."""

    axes: ClassVar = {"cut": "dt.", "same": "d.,"}

    def __init__(self, heads: int, first: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = first
        self.reshape = P.Reshape()
        self.cut = SplitWithSize()
        self.same = P.Mul()

    def construct(self, x_NC):
        tokens = x_NC.shape[0]
        width = x_NC.shape[1] // self.heads
        x_NHw = self.reshape(x_NC, (tokens, self.heads, width))
        first, rest = self.cut(x_NHw, (self.first, width - self.first), 2)
        first = self.reshape(first, (tokens, -1))
        rest = self.reshape(rest, (tokens, -1))
        if self.heads == 1:  # they may be concatenated with others; of several heads the reshapes copy
            return self.same(first, 1.0), self.same(rest, 1.0)
        return first, rest


class JoinHeads(Sharded):
    """(x_NA, y_NB) -> for every head its columns of x, then its columns of y, or with `shared` all of y: [N, C]."""

    axes: ClassVar = {"repeat": "dt.", "concat": "dt.,dt."}

    def __init__(self, heads: int, *, shared: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.shared = shared
        self.reshape = P.Reshape()
        self.repeat = P.Tile()
        self.concat = P.Concat(2)

    def construct(self, x_NA, y_NB):
        tokens = x_NA.shape[0]
        x_NHa = self.reshape(x_NA, (tokens, self.heads, x_NA.shape[1] // self.heads))
        if self.shared:
            y_NHb = self.repeat(self.reshape(y_NB, (tokens, 1, y_NB.shape[1])), (1, self.heads, 1))
        else:
            y_NHb = self.reshape(y_NB, (tokens, self.heads, y_NB.shape[1] // self.heads))
        joined = self.concat((x_NHa, y_NHb))
        return self.reshape(joined, (tokens, self.heads * joined.shape[2]))


class SwiGLU(Sharded):
    """silu(gate) * up (Shazeer 2020, equation 5). Saves its two inputs only."""

    axes: ClassVar = {"silu": "dt", "multiply": "dt,dt"}

    def __init__(self) -> None:
        super().__init__()
        self.silu = SiLU()
        self.multiply = P.Mul()
        self.silu_grad = SiLUGrad()

    def construct(self, gate_NF, up_NF):
        return self.multiply(self.silu(gate_NF), up_NF)

    def bprop(self, gate_NF, up_NF, out, grad_NF):
        return self.silu_grad(grad_NF * up_NF, gate_NF), grad_NF * self.silu(gate_NF)


class Attention(Sharded):
    """softmax(scale q k^T + bias) v for grouped query heads, causal, without repeating keys and values.

    The rows of the scores [B, K, T*G, T] of a key head are those of the G query heads that share it, token by token.
    No query sees a later key, so the scores of a quarter of the tokens have the keys up to its end alone. That saves
    three eighths of the work and of the memory.

    Args:
        heads, kv_heads, head_size: H, K, d.
        dtype: Dtype of q, k, v, the products and the result.
        softmax_dtype: Input and output of the softmax are rounded to it; bias and arithmetic are float32.
        value_size: Width of a head's values and of its result. Default None: d.
        scale: Default None: 1 / sqrt(d).
        draw: Makes the dropout mask [B, K, T*G, T] of what `dropout` is. Default None: it is the mask, [B*K, T*G, T].
    """

    axes: ClassVar = {
        "scale": "dt,", "to_heads": "d.t.", "from_heads": "dt..", "score mix": "dt..,dt..", "cut": "dt..",
        "join": "dt..,dt..,dt..,dt..", "cut_bias": "d....", "add_bias": "dt...,d....", "softmax": "dt..",
        "drop": "dt..,dt..",
    }  # fmt: skip

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype=mstype.float32, softmax_dtype=mstype.float32,
        value_size: int | None = None, scale: float | None = None, draw: nn.Cell | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
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

    def construct(self, q_NC, k_NK, v_NK, bias_B1TT, more_mask, dropout):
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
            of_scores = (rows, self.kv_heads, length * group, length)
            mask = self.reshape(dropout, of_scores) if self.draw is None else self.draw(dropout)
            mask = ops.stop_gradient(mask)
        out = self.attend(q, k, v, bias, mask) if length < _QUARTERS else self.in_quarters(q, k, v, bias, mask)
        out = self.reshape(out, (rows, self.kv_heads, length, group * self.value_size))
        return self.reshape(self.from_heads(out, (0, 2, 1, 3)), (rows * length, self.heads * self.value_size))

    def split(self, x_NC, rows):
        """[B*T, K*w] -> [B, K, T, w], w being the columns of all query heads that share a key head."""
        width = x_NC.shape[1] // self.kv_heads
        return self.to_heads(self.reshape(x_NC, (rows, -1, self.kv_heads, width)), (0, 2, 1, 3))

    def in_quarters(self, q, k, v, bias, mask):
        """Each quarter of the tokens with the keys up to its end; the last one has what is left of a division."""
        length = k.shape[2]
        group = self.heads // self.kv_heads
        quarter = length // _QUARTERS
        sizes = (quarter, quarter, quarter, length - 3 * quarter)
        of_rows = (quarter * group, quarter * group, quarter * group, sizes[3] * group)
        q_parts = self.cut(q, of_rows, 2)
        bias_parts = self.cut_bias(bias, sizes, 2)
        mask_parts = (None,) * _QUARTERS if mask is None else self.cut(mask, of_rows, 2)
        out = ()
        for part in range(_QUARTERS - 1):
            keys = ((part + 1) * quarter, length - (part + 1) * quarter)
            k_part = self.cut(k, keys, 2)[0]
            v_part = self.cut(v, keys, 2)[0]
            bias_part = self.cut_bias(bias_parts[part], keys, 4)[0]
            mask_part = None if mask is None else self.cut(mask_parts[part], keys, 3)[0]
            out += (self.attend(q_parts[part], k_part, v_part, bias_part, mask_part),)
        return self.join((*out, self.attend(q_parts[3], k, v, bias_parts[3], mask_parts[3])))

    def attend(self, q, k, v, bias, mask):
        """[B, K, q*G, width of values] of q tokens and s keys, whose bias is [B, 1, q, 1, s]."""
        scores = self.rounded(self.score(q, k))
        by_token = (q.shape[0], self.kv_heads, bias.shape[2], self.heads // self.kv_heads, bias.shape[4])
        biased = self.add_bias(self.reshape(scores, by_token), bias)
        probabilities = self.rounded(self.softmax(self.reshape(biased, scores.shape)))
        if mask is not None:
            probabilities = self.drop(probabilities, mask)
        return self.mix(self.cast(probabilities, self.dtype), v)

    def rounded(self, x):
        return self.cast(self.cast(x, self.softmax_dtype), mstype.float32)

    def shard_over(self, data: int, tensor: int) -> None:
        super().shard_over(data, tensor)
        if self.draw is not None:
            self.draw.shard_over(data, tensor)


class CrossEntropy(Sharded):
    """Sum over valid tokens of logsumexp(logits) - logits[label], with logits = x weight^T.

    The vocabulary is sharded like columns, so that no rank has all logits of a token. log(s) of the sum s of
    exp(logit - largest) is log1p(s - 1), because the bits of MindSpore's Log on a CPU depend on how it divides the
    elements among threads, which it decides by timing itself.

    Args:
        dtype: Dtype of the products with the weight. Softmax and loss are always float32.
    """

    axes: ClassVar = {
        "logits": "d.,t.", "largest exp total picked": "dt", "centre": "dt,d.", "less_one": "d.,", "log": "d.",
        "one_hot": "dt,,", "pick": "dt,dt", "difference weigh": "d.,d.", "sum": "d.",
    }  # fmt: skip

    def __init__(self, dtype=mstype.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.cast = P.Cast()
        self.logits = P.MatMul(transpose_b=True)
        self.largest = P.ReduceMax(keep_dims=True)
        self.centre = P.Sub()
        self.exp = P.Exp()
        self.total = SumExt()
        self.less_one = P.Sub()
        self.log = P.Log1p()
        self.one_hot = P.OneHot()
        self.pick = P.Mul()
        self.picked = SumExt()
        self.difference = P.Sub()
        self.weigh = P.Mul()
        self.sum = SumExt()
        self.on = Tensor(1.0, mstype.float32)
        self.off = Tensor(0.0, mstype.float32)

    def construct(self, x_ND, weight_VD, labels_N, valid_N1):
        logits_NV = self.logits(self.cast(x_ND, self.dtype), self.cast(weight_VD, self.dtype))
        logits_NV = self.cast(logits_NV, mstype.float32)
        # A constant shift: no gradient goes through it.
        centred_NV = self.centre(logits_NV, ops.stop_gradient(self.largest(logits_NV, 1)))
        log_sum_N1 = self.log(self.less_one(self.total(self.exp(centred_NV), (1,), True), 1.0))
        label_NV = self.one_hot(labels_N, weight_VD.shape[0], self.on, self.off)
        label_logit_N1 = self.picked(self.pick(centred_NV, label_NV), (1,), True)
        return self.sum(self.weigh(self.difference(log_sum_N1, label_logit_N1), valid_N1))


class Dropout(nn.Cell):
    """(x, mask) -> x times the mask. The mask has the rate in it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.multiply = P.Mul()

    def construct(self, x, mask):
        return self.multiply(x, mask)


class OneHot(nn.Cell):
    """index -> float32 [..., size], 1 at the index."""

    def __init__(self, size: int) -> None:
        super().__init__(auto_prefix=False)
        self.numbers = Tensor(np.arange(size, dtype=np.int32))

    def construct(self, index):
        return (index.expand_dims(-1) == self.numbers).astype(mstype.float32)


def gather_rows(x_RD: Tensor, index_N: Tensor) -> Tensor:
    """x[index], [N, D]."""
    return ops.gather(x_RD, index_N, 0)


def write_rows(store_RD: Parameter, index_N: Tensor, x_ND: Tensor) -> None:
    """Writes store[index] = x in place, for the cache of a prediction."""
    P.ScatterUpdate()(store_RD, index_N, x_ND)


# ---- position tables, masks and dropout masks, made on the host ------------------------------------------------------


def rotary_tables(
    cos_Nd: np.ndarray, sin_Nd: np.ndarray, dtype=mstype.float32, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the tables that `Rotary` takes for any number of heads, [1, N, 1, d], rounded to `dtype`; only the fused
    operator takes them in it, otherwise they are float32."""
    tables = (Tensor(table[None, :, None, :], dtype) for table in (cos_Nd, sin_Nd))
    return tuple(table if fused or dtype == mstype.float32 else table.astype(mstype.float32) for table in tables)


class AttentionMasks:
    """Makes the bias that `Attention` takes from the documents that the tokens belong to."""

    def __init__(self, settings: ModelConfig) -> None:
        self.heads = settings.num_heads
        self.kv_heads = settings.kv_heads

    def __call__(self, segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[Tensor, None]:
        """Causal and within a document: float32 [B, 1, T, T], 0 where a query sees a key; and None.

        With `window` each token sees so many tokens, itself included.
        """
        tokens = np.arange(segment_ids_BT.shape[1])
        return Tensor(attention_bias(visible_keys(tokens, tokens, window, segment_ids_BT))[:, None]), None

    def scores_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Shape of the attention's probabilities, [B*K, T*G, T]."""
        return rows * self.kv_heads, length * (self.heads // self.kv_heads), length


def attention_options(settings: ModelConfig, window: int | None) -> dict[str, Any]:
    """What `Attention` must know beside its sizes: nothing, its masks tell it."""
    return {}


def draw_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, part: MaskShard | None = None
) -> Tensor:
    """A mask as `Dropout` takes it, drawn on the host."""
    return Tensor(dropout_mask(key, site, shape, rate, part))


def draw_factors(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, own: LocalHeads | None = None
) -> Tensor:
    """A mask as `Attention` takes it."""
    return Tensor(scores_mask(key, site, shape, rate, own))


# ---- the same for a graph that MindSpore shards ----------------------------------------------------------------------


class RotaryTables(Sharded):
    """(cos_Pd, sin_Pd of all positions, positions_BT) -> cos and sin [B, T, 1, d], in `dtype`, then float32 where no
    fused operator takes them."""

    axes: ClassVar = {"gather": "..,d."}

    def __init__(self, fused: bool, dtype: mstype.Type) -> None:
        super().__init__(auto_prefix=False)
        self.fused = fused
        self.dtype = dtype
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        self.cast = P.Cast()

    def construct(self, cos_Pd, sin_Pd, positions_BT):
        return self.table(cos_Pd, positions_BT), self.table(sin_Pd, positions_BT)

    def table(self, table_Pd, positions_BT):
        rows, length = positions_BT.shape
        table_Pd = self.cast(table_Pd, self.dtype)
        table_BTd = self.gather(table_Pd if self.fused else self.cast(table_Pd, mstype.float32), positions_BT, 0)
        return self.reshape(table_BTd, (rows, length, 1, table_Pd.shape[1]))


class AttentionMask(Sharded):
    """segment_ids_BT -> [B, 1, T, T]: for the fused operator True where a position must not be seen, else a float32
    bias of 0 or the least number. A token sees no more than `window` tokens, itself included; None: all before it."""

    axes: ClassVar = {"differs": "d...,d...", "either": "d...,....", "bias": "d...,"}

    def __init__(self, fused: bool, length: int, window: int | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.fused = fused
        self.length = length
        tokens = np.arange(length)
        self.hidden_11TT = Tensor(~visible_keys(tokens, tokens, window)[None, None])
        # fmt: skip
        self.reshape = P.Reshape()
        self.differs = P.NotEqual()
        self.either = P.LogicalOr()
        self.cast = P.Cast()
        self.bias = P.Mul()
        self.least = float(np.finfo(np.float32).min)

    def construct(self, segment_ids_BT):
        rows, length = segment_ids_BT.shape
        other_B1TT = self.differs(
            self.reshape(segment_ids_BT, (rows, 1, length, 1)), self.reshape(segment_ids_BT, (rows, 1, 1, length))
        )
        hidden_B1TT = self.either(other_B1TT, self.hidden_11TT)
        return hidden_B1TT if self.fused else self.bias(self.cast(hidden_B1TT, mstype.float32), self.least)


# ---- prediction, on a device -----------------------------------------------------------------------------------------


def cached_mask(visible_BQS: np.ndarray) -> Tensor:
    """Returns the bias that `cached_attention` adds to the scores, [B, 1, Q, 1, S]."""
    return Tensor(attention_bias(visible_BQS)[:, None, :, None])


def cached_attention(
    q_BQC: Tensor, k_BSK: Tensor, v_BSV: Tensor, bias: Tensor, heads: int, kv_heads: int, softmax_dtype=mstype.float32,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention of Q new tokens over S cached ones (prediction: forward only), [B, Q, H * width of a head's values].

    The result has the dtype of the queries. Keys and values that `bias`, made by `cached_mask`, excludes may hold
    anything finite. `scale` is None for 1 / sqrt(d).
    """
    rows, queries, width = q_BQC.shape
    scale = (width // heads) ** -0.5 if scale is None else scale
    q, k, v = (
        ops.transpose(x.reshape(rows, -1, kv_heads, x.shape[-1] // kv_heads), (0, 2, 1, 3))
        for x in (q_BQC * scale, k_BSK, v_BSV)
    )
    q = q.reshape(rows, kv_heads, -1, width // heads)
    of_scores = (rows, kv_heads, queries, heads // kv_heads, -1)
    scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))).astype(softmax_dtype).astype(mstype.float32)
    probabilities = ops.softmax(scores.reshape(of_scores) + bias, -1).astype(softmax_dtype).astype(v.dtype)
    out = ops.matmul(probabilities.reshape(rows, kv_heads, -1, k.shape[2]), v)
    out = ops.transpose(out.reshape(rows, kv_heads, queries, -1), (0, 2, 1, 3))
    return out.reshape(rows, queries, -1)
