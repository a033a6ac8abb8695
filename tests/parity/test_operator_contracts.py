"""What each fused operator promises, and that the plain kernels keep the same promise, forward and backward.

A contract is written down once, as a numpy model in float64 with the operator's own arguments: layouts, which half of a
head turns, which operand gets the silu, what a mask's True means, what `group_list` holds, which index goes where, the
scale. Three things hold it in place: the sentences of the installed MindSpore's documentation, the numbers of that
documentation's examples, and, where MindSpore can compute the same on a CPU from other operators, these. Gradients of a
model are its central differences.

Legend: N tokens, B rows of T, D hidden, F feed-forward, H query heads, K key/value heads, d head size, E experts, R
rows sorted by expert, k experts of a token.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import gen_ops_def
from numpy_kernels import central_differences, distance, standard_normal
from tolerances import FEW_OPERATIONS, OPERATOR

from trainer.ops import plain as plain_kernels
from trainer.ops import plain_moe as moe_reference

RANDOM = np.random.default_rng(11)
normal = partial(standard_normal, RANDOM)
B, T, H, K, SIZE, EPS = 2, 4, 4, 2, 16, 1e-5
N = B * T


def documentation(name: str) -> str:
    """Returns the documentation of a function of `mindspore.ops`, on one line."""
    function = getattr(ops, name, None) or getattr(gen_ops_def, name)
    return re.sub(r"\s+", " ", inspect.getdoc(function))


# ---- the contracts ---------------------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, gamma: np.ndarray, epsilon: float) -> np.ndarray:
    """Normalises over the last axis; epsilon is added to the mean square, and gamma multiplies afterwards."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gamma


def rotary_position_embedding(x_BSND: np.ndarray, cos_1S1D: np.ndarray, sin_1S1D: np.ndarray) -> np.ndarray:
    """Rotates in mode 0, rotate_half: number i of a head is paired with i + D/2; the tables have D numbers, not D/2."""
    half = x_BSND.shape[-1] // 2
    first, second = x_BSND[..., :half], x_BSND[..., half:]
    return x_BSND * cos_1S1D + np.concatenate([-second, first], -1) * sin_1S1D


def swiglu(x: np.ndarray, dim: int) -> np.ndarray:
    """Applies silu to the first half along `dim`, and multiplies it by the second."""
    a, b = np.split(x, 2, dim)
    return a / (1 + np.exp(-a)) * b


def flash_attention_score(
    q_BSH: np.ndarray, k_BSH: np.ndarray, v_BSH: np.ndarray, head_num: int, attn_mask_B1SS: np.ndarray, scale: float
) -> np.ndarray:
    """Computes attention in layout BSH: a token's heads side by side. True in the mask discards. The scale
    multiplies q k^T, not q and k. Neighbouring query heads share a key/value head."""
    rows, length, _ = q_BSH.shape
    size = q_BSH.shape[2] // head_num
    out = np.empty(q_BSH.shape)
    shared = head_num // (k_BSH.shape[2] // size)
    for row, head in np.ndindex(rows, head_num):
        own, other = (slice(each * size, (each + 1) * size) for each in (head, head // shared))
        scores = q_BSH[row, :, own] @ k_BSH[row, :, other].T * scale
        scores[attn_mask_B1SS[row, 0]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row, :, own] = weights / weights.sum(-1, keepdims=True) @ v_BSH[row, :, other]
    return out


def grouped_matmul(x_RI: np.ndarray, weight_EIO: np.ndarray, group_list: np.ndarray) -> np.ndarray:
    """Multiplies with split_item 3, group_type 0, group_list_type 1: `group_list` has the rows of each group, int64."""
    assert group_list.dtype == np.int64 and group_list.sum() == len(x_RI)
    parts = np.split(x_RI, np.cumsum(group_list)[:-1])
    return np.concatenate([part @ weight for part, weight in zip(parts, weight_EIO, strict=True)])


def moe_token_permute(tokens_ND: np.ndarray, indices_Nk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in the order of their indices; int32 `sorted_indices`: the row that each of the N k assignments went to."""
    order = np.argsort(indices_Nk.reshape(-1), kind="stable")
    return tokens_ND[order // (indices_Nk.size // len(tokens_ND))], np.argsort(order).astype(np.int32)


def moe_token_unpermute(rows_RD: np.ndarray, sorted_indices: np.ndarray, probs_Nk: np.ndarray) -> np.ndarray:
    """Sums a token's k rows, weighted by its probs; row `sorted_indices[a]` belongs to assignment a."""
    assert sorted_indices.dtype == np.int32
    return (rows_RD[sorted_indices].reshape(*probs_Nk.shape, -1) * probs_Nk[..., None]).sum(1)


# ---- held by the documentation's words -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "sentences"),
    [
        ("rms_norm", [r"y=\frac{x_i}{\sqrt{\frac{1}{n}\sum_{i=1}^{n}{ x_i^2}+\varepsilon}}\gamma_i"]),
        (
            "rotary_position_embedding",
            ["0: rotate_half(GPT-NeoX style)", "has the same type as `x`", "`x` is BSND: 1S1D, BS1D", "D is Even"],
        ),
        ("swiglu", ["{SwiGLU}(a, b)= Swish(a) \\otimes b", "`a` is the first half", "`b` is the second half"]),
        (
            "flash_attention_score",
            ["0/False indicates retention and 1/True indicates discard", ":math:`(B, 1, S1, S2)`",
             "used as the scalar of Muls", "N2 must be a factor of N1", "a multiple of 16, with the max value of 512"],
        ),
        (
            "grouped_matmul_v4",
            ["0: Group on the m-axis", "3 represents a single Tensor", "1 represents the positions as the grouping",
             "can be less equal than length of x", "and `split_item` is 3, the reverse derivative is supported"],
        ),
        ("moe_token_permute", ["The dtype is int32 or int64", "sorted indices", "indices Tensor of dtype int32"]),
        ("moe_token_unpermute", ["merged with their respective probabilities", "It only supports the int32 data type"]),
    ],
)  # fmt: skip
def test_the_documentation_says_so(operator: str, sentences: list[str]) -> None:
    text = documentation(operator)
    for sentence in sentences:
        assert sentence in text


# ---- held by the documentation's examples ----------------------------------------------------------------------------


def test_documented_examples_of_norm_and_swiglu() -> None:
    assert "[[0.46290997 0.92581993 1.3887299]" in documentation("rms_norm")
    found = rms_norm(np.array([[1, 2, 3], [1, 2, 3]]), np.ones(3), 1e-6)
    np.testing.assert_allclose(found, [[0.46290997, 0.92581993, 1.3887299]] * 2, rtol=FEW_OPERATIONS)
    assert "[[-0.11970687 0.2690224 9.7194]]" in documentation("swiglu")
    found = swiglu(np.array([[-0.12, 0.123, 31.122], [2.1223, 4.1212121217, 0.3123]]), 0)
    np.testing.assert_allclose(found, [[-0.11970687, 0.2690224, 9.7194]], rtol=FEW_OPERATIONS)


def test_documented_example_of_the_grouped_product() -> None:
    text = documentation("grouped_matmul_v4")
    assert "group_list = ms.Tensor([1, 2, 1, 2], ms.int64)" in text and "group_list_type=1" in text
    x_RI = np.repeat([0, 1, 2, 2, 1, 1], 4).reshape(6, 4).astype(np.float64)
    weight_EIO = np.arange(32).reshape(4, 4, 2).astype(np.float64)
    expected = [[0, 0], [44, 48], [88, 96], [152, 160], [108, 112], [108, 112]]
    assert all(f"{a} {b}" in text for a, b in expected[1:])
    np.testing.assert_array_equal(grouped_matmul(x_RI, weight_EIO, np.array([1, 2, 1, 2])), expected)


def test_documented_example_of_sorting() -> None:
    assert "value=[5, 0, 3, 1, 2, 4]" in documentation("moe_token_permute")
    tokens_ND = np.repeat([1, 7, 2, 1, 2, 3], 3).reshape(6, 3)
    rows_RD, sorted_indices = moe_token_permute(tokens_ND, np.array([5, 0, 3, 1, 2, 4]))
    np.testing.assert_array_equal(rows_RD[:, 0], [7, 1, 2, 2, 3, 1])
    np.testing.assert_array_equal(sorted_indices, [5, 0, 3, 1, 2, 4])
    back = moe_token_unpermute(rows_RD, sorted_indices, np.ones((6, 1)))
    np.testing.assert_array_equal(back, tokens_ND)


# ---- held by MindSpore's own other operators -------------------------------------------------------------------------


def test_swiglu_is_the_formula_of_its_documentation_in_mindspore() -> None:
    x = normal(N, 10)
    a, b = ops.split(Tensor(x), 5, 1)
    assert distance((ops.silu(a) * b).asnumpy(), swiglu(x, -1)) < OPERATOR
    assert distance((a * ops.sigmoid(a) * b).asnumpy(), swiglu(x, -1)) < OPERATOR


def test_attention_is_mindspores_own_composition_of_it() -> None:
    """`nn.MultiheadAttention` falls back to products and a softmax: here with unit projections, and its own scale."""
    q, k, v = (normal(B, T, H * SIZE) for _ in range(3))
    layer = nn.MultiheadAttention(H * SIZE, H, has_bias=False, batch_first=True)
    unit = np.eye(H * SIZE, dtype=np.float32)
    layer.in_proj_weight.set_data(Tensor(np.concatenate([unit] * 3)))
    layer.out_proj.weight.set_data(Tensor(unit))
    mask = ~np.tri(T, dtype=bool)
    found = layer(Tensor(q), Tensor(k), Tensor(v), attn_mask=Tensor(mask), need_weights=False)[0]
    expected = flash_attention_score(q, k, v, H, np.broadcast_to(mask, (B, 1, T, T)), SIZE**-0.5)
    assert distance(found.asnumpy(), expected) < OPERATOR


# ---- the plain kernels keep the contracts ----------------------------------------------------------------------------


def same_forward_and_backward(
    kernel: Callable[..., Tensor], contract: Callable[..., np.ndarray], arrays: list[np.ndarray]
) -> None:
    """Compares results and gradients; `contract` takes and returns the kernel's layouts."""
    out = kernel(*map(Tensor, arrays))
    assert distance(out.asnumpy(), contract(*arrays)) < OPERATOR
    upstream = normal(*out.shape)
    places = tuple(range(len(arrays)))
    found = mindspore.grad(lambda *args: (kernel(*args) * Tensor(upstream)).sum(), places)(*map(Tensor, arrays))
    expected = central_differences(contract, arrays, upstream)
    for mine, right in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
        assert distance(mine.asnumpy(), right) < OPERATOR


def test_rms_norm_keeps_it() -> None:
    kernel = plain_kernels.RmsNorm(SIZE, EPS)
    same_forward_and_backward(kernel, lambda x, gamma: rms_norm(x, gamma, EPS), [normal(N, SIZE), normal(SIZE)])


def test_rotary_keeps_it() -> None:
    angles_Nh = RANDOM.uniform(0, 7, (N, SIZE // 2))
    cos_Nd, sin_Nd = (np.tile(table(angles_Nh), 2).astype(np.float32) for table in (np.cos, np.sin))
    tables, kernel = plain_kernels.rotary_tables(cos_Nd, sin_Nd), plain_kernels.Rotary(SIZE)

    def contract(x_NC: np.ndarray) -> np.ndarray:
        x_1NHd = x_NC.reshape(1, N, H, SIZE)  # BSND, all tokens as one row
        return rotary_position_embedding(x_1NHd, cos_Nd[None, :, None], sin_Nd[None, :, None]).reshape(x_NC.shape)

    same_forward_and_backward(lambda x: kernel(x, *tables), contract, [normal(N, H * SIZE)])


def test_swiglu_keeps_it() -> None:
    kernel = plain_kernels.SwiGLU()
    same_forward_and_backward(
        kernel, lambda gate, up: swiglu(np.concatenate([gate, up], -1), -1), [normal(N, 7), normal(N, 7)]
    )


@pytest.mark.parametrize("kv_heads", [H, K])
def test_attention_keeps_it(kv_heads: int) -> None:
    segments = np.array([[0, 0, 0, 1], [0, 1, 1, 1]])
    allowed = np.tri(T, dtype=bool) & (segments[:, :, None] == segments[:, None, :])
    masks = Tensor(plain_kernels.attention_bias(allowed)[:, None]), None
    kernel = plain_kernels.Attention(H, kv_heads, 4)

    def contract(*x_NC: np.ndarray) -> np.ndarray:
        rows = (x.reshape(B, T, -1) for x in x_NC)
        return flash_attention_score(*rows, H, ~allowed[:, None], 4**-0.5).reshape(N, H * 4)

    arrays = [normal(N, H * 4), normal(N, kv_heads * 4), normal(N, kv_heads * 4)]
    same_forward_and_backward(lambda q, k, v: kernel(q, k, v, *masks, None), contract, arrays)


COUNTS = np.array([3, 0, 4, 1])


def test_grouped_product_keeps_it() -> None:
    """Its weight is [E, O, I], as a Linear's; the operator's is [E, I, O]."""
    kernel = moe_reference.GroupedMatmul()
    same_forward_and_backward(
        lambda x, weight: kernel(x, weight, Tensor(COUNTS)),
        lambda x, weight: grouped_matmul(x, weight.transpose(0, 2, 1), COUNTS),
        [normal(8, 5), normal(4, 3, 5)],
    )


def test_sorting_keeps_it() -> None:
    """The operator gets the row of each assignment as its index: all differ, so no order among equals matters."""
    row_Nk = RANDOM.permutation(8).reshape(4, 2).astype(np.int32)
    token_R = np.argsort(row_Nk.reshape(-1)).astype(np.int32) // 2
    sorting = Tensor(token_R), Tensor(row_Nk)
    permute, unpermute = moe_reference.Permute(), moe_reference.Unpermute()
    same_forward_and_backward(
        lambda x: permute(x, *sorting), lambda x: moe_token_permute(x, row_Nk)[0], [normal(4, 5)]
    )
    assert (moe_token_permute(normal(4, 5), row_Nk)[1] == row_Nk.reshape(-1)).all(), "which is what unpermute is given"
    same_forward_and_backward(
        lambda rows, gates: unpermute(rows, gates, *sorting),
        lambda rows, gates: moe_token_unpermute(rows, row_Nk.reshape(-1), gates),
        [normal(8, 5), normal(4, 2)],
    )
