"""Reference kernels: right on every device and fast on a CPU.

On a CPU MindSpore's reductions over the last axis and all broadcasting element-wise operators are 10 to 20 times
slower than a MatMul or an operator on equal shapes. So row sums are products with a column of ones, a factor per row
or per column is spread by an outer product, and masks and rotary tables have the full shape of the tensors that they
are added to or multiplied by. Gradients are written by hand where automatic ones would use the slow forms or save more
than is needed.

Legend: N tokens (B rows x T), D hidden, I/O in/out features, F feed-forward, V vocabulary, H query heads, K key/value
heads, G = H / K, d width of a query or key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import SiLU, SiLUGrad

from trainer.ops.dropout import DropoutKey, MaskPart, OwnHeads, dropout_mask, scores_mask

if TYPE_CHECKING:
    from trainer.config import ModelConfig


def _ones(*shape: int) -> Tensor:
    return Tensor(np.ones(shape, np.float32))


class Linear(nn.Cell):
    """y_NO = x_NI weight_OI^T, with the weight's gradient in the faster of its two forms."""

    _MUCH_WIDER = 4  # O / I from which (x^T g)^T beats g^T x: at 16 it takes half the time, at 1 it is 10 % slower

    def __init__(self) -> None:
        super().__init__()
        self.matmul, self.matmul_at, self.matmul_bt = P.MatMul(), P.MatMul(transpose_a=True), P.MatMul(transpose_b=True)
        self.transpose = P.Transpose()

    def construct(self, x_NI, weight_OI):
        return self.matmul_bt(x_NI, weight_OI)

    def bprop(self, x_NI, weight_OI, out, grad_NO):
        if weight_OI.shape[0] >= self._MUCH_WIDER * weight_OI.shape[1]:
            return self.matmul(grad_NO, weight_OI), self.transpose(self.matmul_at(x_NI, grad_NO), (1, 0))
        return self.matmul(grad_NO, weight_OI), self.matmul_at(grad_NO, x_NI)


class LinearBias(nn.Cell):
    """y_NO = x_NI weight_OI^T + bias_O."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias_add = Linear(), P.BiasAdd()

    def construct(self, x_NI, weight_OI, bias_O):
        return self.bias_add(self.linear(x_NI, weight_OI), bias_O)


class AddBias(nn.Cell):
    """y_NO + bias_O."""

    def __init__(self) -> None:
        super().__init__()
        self.bias_add = P.BiasAdd()

    def construct(self, y_NO, bias_O):
        return self.bias_add(y_NO, bias_O)


class RmsNorm(nn.Cell):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.core = _RmsNormCore(size, eps)

    def construct(self, x_ND, weight_D):
        return self.core(x_ND, weight_D)[0]


class HeadNorm(nn.Cell):
    """A norm of every head by itself: (x_NC, weight_d) -> [N, C]."""

    def __init__(self, norm: nn.Cell, head_size: int) -> None:
        super().__init__()
        self.norm, self.head_size = norm, head_size

    def construct(self, x_NC, weight_d):
        return self.norm(x_NC.reshape(-1, self.head_size), weight_d).reshape(x_NC.shape)


class _RmsNormCore(nn.Cell):
    """Returns (y, 1 / sqrt(...)): the second output is kept for the backward pass."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.mean_D1, self.ones_1D = _ones(size, 1) / size, _ones(1, size)
        self.matmul, self.matmul_at, self.rsqrt = P.MatMul(), P.MatMul(transpose_a=True), P.Rsqrt()

    def construct(self, x_ND, weight_D):
        rstd_N1 = self.rsqrt(self.matmul(x_ND * x_ND, self.mean_D1) + self.eps)
        return x_ND * self.matmul(rstd_N1, weight_D.reshape(1, -1)), rstd_N1

    def bprop(self, x_ND, weight_D, out, grads):
        rstd_N1, grad_ND = out[1], grads[0]
        product_ND = grad_ND * x_ND
        # d y / d x: the direct part, less its projection on x: mean(grad * weight * x) rstd^3
        projected_N1 = self.matmul(product_ND, weight_D.reshape(-1, 1)) * (rstd_N1 * rstd_N1 * rstd_N1 / self.size)
        direct_ND = grad_ND * self.matmul(rstd_N1, weight_D.reshape(1, -1))
        grad_x_ND = direct_ND - x_ND * self.matmul(projected_N1, self.ones_1D)
        return grad_x_ND, self.matmul_at(rstd_N1, product_ND).reshape(weight_D.shape)


class Rotary(nn.Cell):
    """x cos + turned(x) sin for every head (Su et al. 2021, equation 34): turned is (-second, first) of each pair.

    The pairs are numbers i and i + half (Llama), or with `interleaved` the neighbours 2i and 2i + 1, as in the paper.
    Turning is a product with a signed permutation: one small MatMul instead of a split, a negation and a
    concatenation. Where only the first `rotated_size` columns of a head turn, it is zero for the others, whose cosine
    is 1 and sine 0: they pass unchanged.
    """

    def __init__(self, head_size: int, rotated_size: int | None = None, interleaved: bool = False) -> None:
        super().__init__()
        half = (rotated_size or head_size) // 2
        first = np.arange(half) * (2 if interleaved else 1)
        second = first + (1 if interleaved else half)
        rotate = np.zeros((head_size, head_size), np.float32)
        rotate[second, first] = -1
        rotate[first, second] = 1
        self.head_size, self.rotate_dd = head_size, Tensor(rotate)
        self.matmul, self.matmul_bt = P.MatMul(), P.MatMul(transpose_b=True)

    def construct(self, x_NC, cos_NC, sin_NC):
        turned_NC = self.matmul(x_NC.reshape(-1, self.head_size), self.rotate_dd).reshape(x_NC.shape)
        return x_NC * cos_NC + turned_NC * sin_NC

    def bprop(self, x_NC, cos_NC, sin_NC, out, grad_NC):
        turned_NC = self.matmul_bt((grad_NC * sin_NC).reshape(-1, self.head_size), self.rotate_dd).reshape(x_NC.shape)
        no_grad = ops.zeros(cos_NC.shape, cos_NC.dtype)
        return grad_NC * cos_NC + turned_NC, no_grad, no_grad


class SwiGLU(nn.Cell):
    """silu(gate) * up (Shazeer 2020, equation 5). Saves its two inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.silu, self.silu_grad = SiLU(), SiLUGrad()

    def construct(self, gate_NF, up_NF):
        return self.silu(gate_NF) * up_NF

    def bprop(self, gate_NF, up_NF, out, grad_NF):
        return self.silu_grad(grad_NF * up_NF, gate_NF), grad_NF * self.silu(gate_NF)


def division() -> tuple[Callable, Callable]:
    """Both halves of an array's second axis; a part of an array, by its beginning and its size along each axis."""
    return P.Split(1, 2), P.Slice()


class Attention(nn.Cell):
    """softmax(scale q k^T + mask) v for grouped query heads, causal, without repeating keys and values.

    No query sees a later key. So the first half of the queries is multiplied by the first half of the keys only, which
    saves a quarter of the work; the second half is multiplied by all keys.

    Args:
        heads, kv_heads, head_size: H, K, d.
        dtype: Dtype of q, k, v, the products and the result.
        softmax_dtype: Input and output of the softmax are rounded to it; mask and arithmetic are float32.
        value_size: Width of a head's values and of its result. Default None: d.
        scale: Default None: 1 / sqrt(d).
        division: Makes what divides queries, keys, values and dropout; default: `division`.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype=mstype.float32, softmax_dtype=mstype.float32,
        value_size: int | None = None, scale: float | None = None,
        division: Callable[[], tuple[Callable, Callable]] = division,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kv_heads, self.head_size, self.value_size = kv_heads, head_size, value_size or head_size
        self.columns, self.scale = heads * self.value_size, head_size**-0.5 if scale is None else scale
        # One instance for every call site: see trainer/ops/__init__.py.
        self.early, self.late = (AttentionCore(self.value_size, dtype, softmax_dtype) for _ in range(2))
        self.transpose, self.concat = P.Transpose(), P.Concat(1)
        self.split, self.slice = division()

    def construct(self, q_NC, k_NK, v_NK, mask, late_mask, dropout):
        # mask and late_mask: as attention_mask makes them
        rows = mask.shape[0] // self.kv_heads
        queries = self.split_heads(q_NC * self.scale, rows, self.head_size)
        keys, values = self.split_heads(k_NK, rows, self.head_size), self.split_heads(v_NK, rows, self.value_size)
        if late_mask is None:
            out = self.early(queries, keys, values, mask, dropout)[0]
        else:
            out = self.in_halves(queries, keys, values, mask, late_mask, dropout)
        out = self.transpose(out.reshape(rows, self.kv_heads, -1, self.columns // self.kv_heads), (0, 2, 1, 3))
        return out.reshape(q_NC.shape[0], self.columns)

    def in_halves(self, queries, keys, values, mask, late_mask, dropout):
        early_queries, late_queries = self.split(queries)
        early_dropout, late_dropout = None, None
        if dropout is not None:
            sizes, late_sizes = mask.shape, late_mask.shape
            early_dropout = self.slice(dropout, (0, 0, 0), sizes)
            late_dropout = self.slice(dropout, (0, sizes[1], 0), late_sizes)
        early_keys, early_values = self.split(keys)[0], self.split(values)[0]
        early = self.early(early_queries, early_keys, early_values, mask, early_dropout)[0]
        late = self.late(late_queries, keys, values, late_mask, late_dropout)[0]
        return self.concat((early, late))

    def split_heads(self, x_NC, rows, size):
        """[B*T, K*G*size] -> [B*K, T*G, size]: the G query heads that share a key stand one below the other."""
        x = self.transpose(x_NC.reshape(rows, -1, self.kv_heads, x_NC.shape[1] // self.kv_heads), (0, 2, 1, 3))
        return x.reshape(rows * self.kv_heads, -1, size)


class AttentionCore(nn.Cell):
    """(q, k, v, mask, dropout) -> (out, probabilities), batched; the probabilities are kept for the backward pass.

    The backward pass needs rowsum(dP * P), which equals rowsum(dO * O) (Dao et al. 2022, appendix B.2): its
    subtraction is folded into the product dO v^T as one more column, so no broadcast and no reduction over T x T
    happens. With dropout on the probabilities the identity still holds, because the dropped probabilities are what
    multiplies v.

    `wide`, `rounded` and `narrow` stand between products and softmax; where all is float32 they do nothing.
    """

    def __init__(self, value_size: int, dtype: mstype.Type, softmax_dtype: mstype.Type) -> None:
        super().__init__()
        self.dtype, self.half = dtype, dtype != mstype.float32
        self.softmax_dtype, self.half_softmax = softmax_dtype, softmax_dtype != mstype.float32
        self.cast = P.Cast()
        self.product, self.product_at = P.BatchMatMul(), P.BatchMatMul(transpose_a=True)
        self.product_bt = P.BatchMatMul(transpose_b=True)
        self.matmul, self.softmax, self.concat = P.MatMul(), P.Softmax(), P.Concat(-1)
        self.value_size, self.minus_ones_d1 = value_size, -_ones(value_size, 1).astype(dtype)

    def construct(self, q, k, v, mask, dropout):
        scores = self.rounded(self.wide(self.product_bt(q, k)))
        probabilities = self.rounded(self.softmax(scores + mask))
        kept = probabilities if dropout is None else probabilities * dropout
        return self.product(self.narrow(kept), v), probabilities

    def bprop(self, q, k, v, mask, dropout, out, grads):
        minus_delta = self.minus_delta(out[0], grads[0])
        grad_q, grad_k, grad_v = self.gradients(q, k, v, out[1], dropout, grads[0], minus_delta)
        grad_dropout = None if dropout is None else ops.zeros(dropout.shape, dropout.dtype)
        return grad_q, grad_k, grad_v, ops.zeros(mask.shape, mask.dtype), grad_dropout

    def minus_delta(self, out, grad):
        """-rowsum(dO * O), with a last dimension of 1."""
        minus_delta = self.matmul((out * grad).reshape(-1, self.value_size), self.minus_ones_d1)
        return minus_delta.reshape(grad.shape[0], -1, 1)

    def gradients(self, q, k, v, probabilities, dropout, grad, minus_delta):
        """Of q, k and v."""
        ones = ops.ones((v.shape[0], v.shape[1], 1), v.dtype)
        if dropout is None:
            kept = probabilities
            # [dO, -delta] [v, 1]^T = dO v^T - delta
            centred = self.wide(self.product_bt(self.concat((grad, minus_delta)), self.concat((v, ones))))
        else:
            kept = probabilities * dropout
            centred = self.wide(self.product_bt(grad, v)) * dropout
            centred = centred + self.wide(self.product_bt(minus_delta, ones))
        grad_scores = self.narrow(probabilities * centred)
        return self.product(grad_scores, k), self.product_at(grad_scores, q), self.product_at(self.narrow(kept), grad)

    def wide(self, x):
        """From a product to the softmax."""
        return self.cast(x, mstype.float32) if self.half else x

    def rounded(self, x):
        return self.cast(self.cast(x, self.softmax_dtype), mstype.float32) if self.half_softmax else x

    def narrow(self, x):
        """From the softmax to a product."""
        return self.cast(x, self.dtype) if self.half else x


class Dropout(nn.Cell):
    """(x, mask) -> x times the mask. The mask has the rate in it."""

    def __init__(self, rate: float) -> None:
        super().__init__()

    def construct(self, x, mask):
        return x * mask


class CrossEntropy(nn.Cell):
    """Sum over valid tokens of logsumexp(logits) - logits[label], with logits = x weight^T.

    logsumexp is max(logits) - log(p), p being the largest probability: at least 1/V, so its logarithm never overflows.
    -log(p) is computed as log1p((1 - p) / p), because the bits of MindSpore's Log on a CPU depend on how it divides the
    elements among threads, which it decides by timing itself: the same loss could differ from run to run.
    Rows are weighted on the small side of each product, never on the [N, V] logits.

    Args:
        dtype: Dtype of the products with the weight. Softmax and loss are always float32. In half precision the factor
            of the loss is multiplied into d loss / d logits before these are rounded: a loss scale that came later
            could not keep them above zero.
    """

    def __init__(self, dtype=mstype.float32) -> None:
        super().__init__()
        self.half, self.dtype = dtype != mstype.float32, dtype
        self.core = _CrossEntropyCore(self.half)

    def construct(self, x_ND, weight_VD, labels_N, valid_N1):
        if self.half:
            x_ND, weight_VD = x_ND.astype(self.dtype), weight_VD.astype(self.dtype)
        return self.core(x_ND, weight_VD, labels_N, valid_N1)[0]


class _CrossEntropyCore(nn.Cell):
    """Returns (loss, probabilities): the second output keeps the probabilities for the backward pass."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.half, self.cast = half, P.Cast()
        self.x_wt, self.matmul, self.matmul_at = P.MatMul(transpose_b=True), P.MatMul(), P.MatMul(transpose_a=True)
        self.softmax, self.row_max, self.gather = P.Softmax(), P.ArgMaxWithValue(axis=1), P.GatherD()
        self.transpose, self.log1p = P.Transpose(), P.Log1p()
        self.scatter_add = P.TensorScatterElements(axis=1, reduction="add")

    def construct(self, x_ND, weight_VD, labels_N, valid_N1):
        logits_NV = self.x_wt(x_ND, weight_VD)
        if self.half:
            logits_NV = self.cast(logits_NV, mstype.float32)
        probabilities_NV = self.softmax(logits_NV)
        index_N, max_N = self.row_max(logits_NV)
        p_N1 = self.gather(probabilities_NV, 1, index_N.reshape(-1, 1).astype(mstype.int32))
        label_logit_N1 = self.gather(logits_NV, 1, labels_N.reshape(-1, 1))
        # The difference of the logits first: it keeps its digits however large both are.
        loss_N1 = (max_N.reshape(-1, 1) - label_logit_N1) + self.log1p((1 - p_N1) / p_N1)
        return self.matmul_at(valid_N1, loss_N1).reshape(()), probabilities_NV

    def bprop(self, x_ND, weight_VD, labels_N, valid_N1, out, grads):
        probabilities_NV, grad = out[1], grads[0]
        # d loss / d logits = probabilities - one_hot(label)
        centred_NV = self.scatter_add(probabilities_NV, labels_N.reshape(-1, 1), -ops.ones_like(valid_N1))
        if self.half:
            factor_NV = self.matmul(valid_N1 * grad, ops.ones((1, weight_VD.shape[0]), mstype.float32))
            grad_NV = self.cast(centred_NV * factor_NV, x_ND.dtype)
            grad_weight_VD = self.transpose(self.matmul_at(x_ND, grad_NV), (1, 0))
            return self.matmul(grad_NV, weight_VD), grad_weight_VD, ops.zeros_like(labels_N), ops.zeros_like(valid_N1)
        weight_ND = self.matmul(valid_N1 * grad, ops.ones((1, x_ND.shape[1]), x_ND.dtype))
        grad_x_ND = self.matmul(centred_NV, weight_VD) * weight_ND
        grad_weight_VD = self.transpose(self.matmul_at(x_ND * weight_ND, centred_NV), (1, 0))
        return grad_x_ND, grad_weight_VD, ops.zeros_like(labels_N), ops.zeros_like(valid_N1)


class OneHot(nn.Cell):
    """index -> float32 [..., size], 1 at the index."""

    def __init__(self, size: int) -> None:
        super().__init__(auto_prefix=False)
        self.size, self.one_hot = size, P.OneHot()
        self.on, self.off = Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)

    def construct(self, index):
        return self.one_hot(index, self.size, self.on, self.off)


def gather_rows(x_RD: Tensor, index_N: Tensor) -> Tensor:
    """x[index], [N, D]."""
    return ops.gather(x_RD, index_N, 0)


def split_columns(x_RD: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The first columns, and the others."""
    return ops.split(x_RD, (first, x_RD.shape[1] - first), 1)


class SplitHeads(nn.Cell):
    """x_NC -> the first columns of every head [N, heads * first], and the others."""

    def __init__(self, heads: int, first: int, split: Callable = split_columns) -> None:
        super().__init__()
        self.heads, self.first, self.split = heads, first, split

    def construct(self, x_NC):
        if self.heads == 1:
            return self.split(x_NC, self.first)  # a reshape to the same shape would be a copy on an Ascend
        rows, columns = x_NC.shape
        first, rest = self.split(x_NC.reshape(rows * self.heads, columns // self.heads), self.first)
        return first.reshape(rows, -1), rest.reshape(rows, -1)


class JoinHeads(nn.Cell):
    """(x_NA, y_NB) -> for every head its columns of x, then its columns of y, or with `shared` all of y: [N, C]."""

    def __init__(self, heads: int, *, shared: bool = False) -> None:
        super().__init__()
        self.heads, self.shared, self.repeat, self.concat = heads, shared, P.Tile(), P.Concat(1)

    def construct(self, x_NA, y_NB):
        rows = x_NA.shape[0]
        if self.shared:
            y_NB = self.repeat(y_NB, (1, self.heads))
        return self.concat((x_NA.reshape(rows * self.heads, -1), y_NB.reshape(rows * self.heads, -1))).reshape(rows, -1)


def write_rows(store_RD: Parameter, index_N: Tensor, x_ND: Tensor) -> None:
    """store[index] = x, in place."""
    P.ScatterUpdate()(store_RD, index_N, x_ND)


def rotary_tables(cos_Nd: np.ndarray, sin_Nd: np.ndarray, heads: int, dtype=mstype.float32) -> tuple[Tensor, Tensor]:
    """The tables that `Rotary` takes: the columns of all heads side by side, [N, heads * d], rounded to `dtype`."""
    tables = cos_Nd, sin_Nd
    if dtype == mstype.bfloat16:
        tables = [Tensor(table).astype(dtype).astype(mstype.float32).asnumpy() for table in tables]
    elif dtype != mstype.float32:
        tables = [table.astype(np.float16).astype(np.float32) for table in tables]
    return tuple(Tensor.from_numpy(np.tile(table, (1, heads))) for table in tables)


class AttentionMasks:
    """Makes the masks that `Attention` takes from the documents that the tokens belong to."""

    def __init__(self, settings: ModelConfig) -> None:
        self.heads, self.kv_heads = settings.num_heads, settings.kv_heads

    def __call__(self, segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Causal and within a document; with `window` each token sees so many tokens, itself included."""
        length = segment_ids_BT.shape[1]
        allowed_BTT = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & np.tri(length, dtype=bool)
        if window is not None:
            allowed_BTT &= ~np.tri(length, k=-window, dtype=bool)
        return attention_mask(allowed_BTT, self.heads, self.kv_heads)

    def scores_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Shape of the attention's probabilities, [B*K, T*G, T]."""
        return rows * self.kv_heads, length * (self.heads // self.kv_heads), length


def attention_options(settings: ModelConfig, window: int | None) -> dict[str, Any]:
    """What `Attention` must know beside its sizes: nothing, its masks tell it."""
    return {}


def attention_mask(allowed_BTT: np.ndarray, heads: int, kv_heads: int) -> tuple[Tensor, Tensor | None]:
    """The causal masks that `Attention` takes, as `cached_mask` makes them, from the keys that each query sees.

    One is for the first half of the queries and keys, [B*K, T/2*G, T/2], and one for the second half of the queries,
    [B*K, T/2*G, T]. For an odd T there is one for all, and None.
    """
    half, odd = divmod(allowed_BTT.shape[1], 2)
    if odd:
        return cached_mask(allowed_BTT, heads, kv_heads), None
    early, late = allowed_BTT[:, :half, :half], allowed_BTT[:, half:]
    return cached_mask(early, heads, kv_heads), cached_mask(late, heads, kv_heads)


def cached_mask(allowed_BQS: np.ndarray, heads: int, kv_heads: int) -> Tensor:
    """A mask that is added to the scores, [B*K, Q*G, S] float32, 0 where allowed; for `cached_attention`."""
    rows, _, keys = allowed_BQS.shape
    bias_BQS = np.where(allowed_BQS, np.float32(0), np.finfo(np.float32).min)
    bias = np.repeat(bias_BQS, heads // kv_heads, axis=1)
    return Tensor.from_numpy(np.repeat(bias, kv_heads, axis=0).reshape(rows * kv_heads, -1, keys))


def draw_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, part: MaskPart | None = None
) -> Tensor:
    """A mask as `Dropout` takes it, drawn on the host."""
    return Tensor(dropout_mask(key, site, shape, rate, part))


def draw_factors(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, own: OwnHeads | None = None
) -> Tensor:
    """A mask as `Attention` takes it."""
    return Tensor(scores_mask(key, site, shape, rate, own))


def logits(x_ND: Tensor, weight_VD: Tensor, dtype=mstype.float32) -> Tensor:
    """x weight^T with a product in `dtype`, [N, V] float32 (forward only)."""
    if dtype == mstype.float32:
        return ops.matmul(x_ND, weight_VD.T)
    return ops.matmul(x_ND.astype(dtype), weight_VD.astype(dtype).T).astype(mstype.float32)


def cached_attention(
    q_BQC: Tensor, k_BSK: Tensor, v_BSV: Tensor, mask: Tensor, heads: int, kv_heads: int, softmax_dtype=mstype.float32,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention of Q new tokens over S cached ones (prediction: forward only), [B, Q, H * width of a head's values].

    The result has the dtype of the queries. Keys and values that `mask`, made by `cached_mask`, excludes may hold
    anything finite. `scale` is None for 1 / sqrt(d).
    """
    rows, queries, width = q_BQC.shape
    sizes = width // heads, k_BSK.shape[-1] // kv_heads, v_BSV.shape[-1] // kv_heads
    scale = sizes[0] ** -0.5 if scale is None else scale
    q, k, v = (
        ops.transpose(x.reshape(rows, -1, kv_heads, x.shape[-1] // kv_heads), (0, 2, 1, 3))
        .reshape(rows * kv_heads, -1, size)
        for x, size in zip((q_BQC * scale, k_BSK, v_BSV), sizes, strict=True)
    )  # fmt: skip
    scores = ops.bmm(q, ops.transpose(k, (0, 2, 1))).astype(softmax_dtype).astype(mstype.float32)
    out = ops.bmm(ops.softmax(scores + mask, -1).astype(softmax_dtype).astype(v.dtype), v)
    out = ops.transpose(out.reshape(rows, kv_heads, queries, heads // kv_heads * sizes[2]), (0, 2, 1, 3))
    return out.reshape(rows, queries, heads * sizes[2])
