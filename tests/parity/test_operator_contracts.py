"""What each fused operator promises: the models of documented_operators.py are held by the sentences of the installed
MindSpore's documentation, by the numbers of its examples, and, where MindSpore can compute the same on a CPU from other
operators, by these.

That the plain kernels keep the same promises, the tests of the Ascend kernels show: they compare the two.
"""

from __future__ import annotations

import inspect
import re
from functools import partial

import numpy as np
import pytest
from documented_operators import (
    flash_attention_score,
    grouped_matmul,
    moe_token_permute,
    moe_token_unpermute,
    rms_norm,
    swiglu,
)
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import gen_ops_def
from numpy_kernels import distance, standard_normal
from tolerances import FEW_OPERATIONS, OPERATOR

RANDOM = np.random.default_rng(11)
normal = partial(standard_normal, RANDOM)
B, T, H, SIZE = 2, 4, 4, 16
N = B * T


def documentation(name: str) -> str:
    """Returns the documentation of a function of `mindspore.ops`, on one line."""
    function = getattr(ops, name, None) or getattr(gen_ops_def, name)
    return re.sub(r"\s+", " ", inspect.getdoc(function))


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
    expected = flash_attention_score(q, k, v, H, mask, SIZE**-0.5)
    assert distance(found.asnumpy(), expected) < OPERATOR
