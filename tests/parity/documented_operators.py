"""Fused operators of an Ascend as MindSpore documents them: numpy models with the operators' own arguments, and what
stands in for the operators on a CPU, made of these.

The models say which half of a head turns, which operand gets the silu, what a mask's True means, which rows are an
expert's, which index goes where. test_operator_contracts.py holds them to the documentation; the tests of the Ascend
kernels compare what these make of the operators with the plain kernels.

Legend: N tokens, B rows of S, D hidden, H numbers of all heads, E experts, R rows sorted by expert, k experts of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor


def rms_norm(x: np.ndarray, gamma: np.ndarray, epsilon: float) -> np.ndarray:
    """Normalises over the last axis; epsilon is added to the mean square, and gamma multiplies afterwards."""
    return x * reciprocal_root(x, epsilon) * gamma


def reciprocal_root(x: np.ndarray, epsilon: float) -> np.ndarray:
    return 1 / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def rms_norm_grad(
    dy: np.ndarray, x: np.ndarray, rstd: np.ndarray, gamma: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the gradients of x and gamma of y = x rstd gamma with rstd = 1 / sqrt(mean(x^2) + eps)."""
    direct = dy * gamma * rstd
    return direct - x * rstd**2 * (direct * x).mean(-1, keepdims=True), (dy * x * rstd).sum(0)


def rotary_position_embedding(x_BSND: np.ndarray, cos_1S1D: np.ndarray, sin_1S1D: np.ndarray, mode: int) -> np.ndarray:
    """Rotates in mode 0, rotate_half: number i of a head is paired with i + D/2; the tables have D numbers, not D/2."""
    assert mode == 0 and cos_1S1D.shape == sin_1S1D.shape == (1, x_BSND.shape[1], 1, x_BSND.shape[3])
    first, second = np.split(x_BSND, 2, -1)
    return x_BSND * cos_1S1D + np.concatenate([-second, first], -1) * sin_1S1D


def swiglu(x: np.ndarray, dim: int) -> np.ndarray:
    """Applies silu to the first half along `dim`, and multiplies it by the second."""
    a, b = np.split(x, 2, dim)
    return a / (1 + np.exp(-a)) * b


def swiglu_grad(dy: np.ndarray, x: np.ndarray, dim: int) -> np.ndarray:
    a, b = np.split(x, 2, dim)
    gate = 1 / (1 + np.exp(-a))
    return np.concatenate([dy * b * gate * (1 + a * (1 - gate)), dy * a * gate], dim)


def flash_attention_score(
    q_BSH: np.ndarray, k_BSH: np.ndarray, v_BSH: np.ndarray, head_num: int, attn_mask: np.ndarray, scale: float,
    kept: np.ndarray | float = 1.0,
) -> np.ndarray:  # fmt: skip
    """Computes attention in layout BSH: a token's heads side by side. True in the mask discards. The scale multiplies
    q k^T, not q and k. Neighbouring query heads share a key/value head. `kept` multiplies the probabilities."""
    size = q_BSH.shape[2] // head_num
    q, k, v = (x.reshape(*x.shape[:2], -1, size) for x in (q_BSH, k_BSH, v_BSH))
    k, v = (np.repeat(x, head_num // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("bqhd,bshd->bhqs", q, k) * scale
    scores[np.broadcast_to(attn_mask, scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True) * kept
    return np.einsum("bhqs,bshd->bqhd", weights, v).reshape(q_BSH.shape)


def grouped_matmul(x: np.ndarray, weight: np.ndarray, counts: np.ndarray, group_type: int = 0) -> np.ndarray:
    """Multiplies with split_item 3 and group_list_type 1: groups have `counts` rows of x, int64, one after the other,
    and y of group e is x of group e times weight e, [E, I, O]. With group_type 2 they have columns of x and rows of the
    second matrix.

    What stands in rows after the last group, and in the matrix of a group without rows, the documentation does not say.
    """
    assert counts.dtype == np.int64 and counts.sum() <= x.shape[1 if group_type else 0]
    shape = (len(counts), x.shape[0], weight.shape[1]) if group_type else (x.shape[0], weight.shape[2])
    out = np.full(shape, np.nan, x.dtype)
    for expert, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        rows = slice(end - count, end)
        if group_type and count:
            out[expert] = x[:, rows] @ weight[rows]
        elif count:
            out[rows] = x[rows] @ weight[expert]
    return out


def moe_token_permute(tokens_ND: np.ndarray, indices_Nk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in the order of their indices; int32 `sorted_indices`: the row that each of the N k assignments went to."""
    order = np.argsort(indices_Nk.reshape(-1), kind="stable")
    return tokens_ND[order // (indices_Nk.size // len(tokens_ND))], np.argsort(order).astype(np.int32)


def moe_token_unpermute(rows_RD: np.ndarray, sorted_indices: np.ndarray, probs_Nk: np.ndarray) -> np.ndarray:
    """Sums a token's k rows, weighted by its probs; row `sorted_indices[a]` belongs to assignment a."""
    assert sorted_indices.dtype == np.int32 and sorted_indices.ndim == 1
    return (rows_RD[sorted_indices].reshape(*probs_Nk.shape, -1) * probs_Nk[..., None]).sum(1)


def argsort(values: np.ndarray, dim: int, descending: bool, stable: bool) -> np.ndarray:
    """Sorts stably: equal elements keep their order."""
    assert stable and dim == -1 and values.dtype == np.float32
    return np.argsort(-values if descending else values, -1, kind="stable")


def on_tensors(model: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a model as a function of tensors."""

    def call(*arguments: Any) -> Any:
        result = model(*(each.asnumpy() if isinstance(each, Tensor) else each for each in arguments))
        return tuple(map(Tensor, result)) if isinstance(result, tuple) else Tensor(result)

    return call


NORMS_AND_ACTIVATIONS: dict[str, Callable[..., Callable[..., Any]]] = {
    "FusedNorm": lambda epsilon: on_tensors(
        lambda x, gamma: (rms_norm(x, gamma, epsilon), reciprocal_root(x, epsilon))
    ),
    "RmsNormGrad": lambda: on_tensors(rms_norm_grad),
    "RotaryPositionEmbedding": lambda: on_tensors(rotary_position_embedding),
    "Swiglu": lambda: on_tensors(swiglu),
    "SwigluGrad": lambda: on_tensors(swiglu_grad),
}
"""By their names in trainer.ops.ascend.kernels, what makes each operator."""
SORTING: dict[str, Callable[..., Any]] = {
    "argsort": on_tensors(argsort),
    "cumsum": on_tensors(lambda x, dim: np.cumsum(x, dim, dtype=x.dtype)),
    "arange": lambda end, dtype: mindspore.ops.arange(end, dtype=dtype),
    "index_select": lambda x, dim, index: mindspore.ops.gather(x, index, dim),
}
"""Functions of `mint` without a CPU kernel."""
grouped_product = on_tensors(grouped_matmul)


class FlashAttentionScore:
    """Layouts BSH and TND; a compressed mask is [2048, 2048]; no float32."""

    CAUSAL, CAUSAL_OF_DOCUMENTS, BAND = 2, 3, 4

    def __init__(
        self, head_num: int, keep_prob: float, scale_value: float, pre_tokens: int = 2147483647,
        next_tokens: int = 2147483647, *, input_layout: str, sparse_mode: int = 0,
    ) -> None:  # fmt: skip
        self.keep, self.layout = keep_prob, input_layout
        self.mode, self.before, self.after = sparse_mode, pre_tokens, next_tokens
        self.attend = partial(flash_attention_score, head_num=head_num, scale=scale_value)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, real_shift: None, drop_mask: Tensor | None,
        padding_mask: None, attn_mask: Tensor, prefix: None, *ends: Tensor,
    ) -> tuple[None, None, None, Tensor]:  # fmt: skip
        assert attn_mask.dtype == mindspore.bool_
        assert {query.dtype, key.dtype, value.dtype} in ({mindspore.float16}, {mindspore.bfloat16})
        assert (self.keep == 1.0) == (drop_mask is None)
        q, k, v = (x.astype(mindspore.float32).asnumpy() for x in (query, key, value))
        if self.layout == "TND":
            assert self.mode == self.CAUSAL_OF_DOCUMENTS and self.after == 0 and drop_mask is None
            out = self.of_documents(q, k, v, *(each.asnumpy() for each in ends))
        else:
            assert self.layout == "BSH" and not ends
            out = self.of_rows(q, k, v, attn_mask.asnumpy(), drop_mask)
        return None, None, None, Tensor(out.reshape(query.shape)).astype(query.dtype)

    def of_documents(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, ends: np.ndarray, of_keys: np.ndarray):
        assert ends.dtype == np.int64 and len(ends) <= 1024 and (np.diff(ends) >= 0).all() and ends[-1] == len(q)
        np.testing.assert_array_equal(of_keys, ends)
        return np.concatenate([
            self.attend(*(x[None, first:last].reshape(1, last - first, -1) for x in (q, k, v)),
                        attn_mask=~np.tri(last - first, dtype=bool))[0]
            for first, last in zip((0, *ends[:-1]), ends, strict=True) if last > first
        ])  # fmt: skip

    def of_rows(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, drop_mask: Tensor | None):
        rows, length, width = q.shape
        if self.mode == 0:
            assert mask.shape == (rows, 1, length, length)
            hidden = mask
        else:
            np.testing.assert_array_equal(mask, ~np.tri(2048, dtype=bool))
            hidden = ~np.tri(length, dtype=bool)
            if self.mode == self.BAND:
                distance_TT = np.arange(length)[:, None] - np.arange(length)
                hidden = (distance_TT > self.before) | (-distance_TT > self.after)
            else:
                assert self.mode == self.CAUSAL
        kept: np.ndarray | float = 1.0
        if drop_mask is not None:
            heads = self.attend.keywords["head_num"]
            assert drop_mask.dtype == mindspore.uint8 and drop_mask.shape == (rows, heads, length, length // 8)
            kept = np.unpackbits(drop_mask.asnumpy(), axis=-1, bitorder="little") / self.keep
        return self.attend(q, k, v, attn_mask=hidden, kept=kept)
