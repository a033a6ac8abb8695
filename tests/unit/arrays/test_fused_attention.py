"""Attention of a block by the compiled library against float64 formulas (`trainer.arrays.compiled.attention`).

Limits: tolerances.py, of the sizes of what is added up or multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from operator_sets import EACH_COMPILED
from tolerances import rounding_limit

from trainer.arrays.compiled.attention import AttentionSizes
from trainer.arrays.compiled.operators import CompiledOperators
from trainer.models.spec.visibility import attention_bias

NUMBERS = "out", "q", "k", "v"


class Block(NamedTuple):
    """Queries, keys and values of a block, the gradient of its results, and its bias; `heads` key/value heads."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    grad: np.ndarray
    bias: np.ndarray
    heads: int

    @property
    def sizes(self) -> AttentionSizes:
        """Returns what the compiled functions take."""
        keys, width = self.k.shape
        return AttentionSizes(
            queries=len(self.q), keys=keys, heads=self.heads, groups=self.q.shape[1] // width,
            size=width // self.heads, value_size=self.v.shape[1] // self.heads, visible=keys - self.bias.shape[1],
        )  # fmt: skip

    @property
    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.q, self.k, self.v

    def scratch(self, gradient: bool) -> np.ndarray:
        """Returns memory without numbers that are fit for use, and a guard behind it."""
        return np.full(self.sizes.scratch(gradient) + GUARD, np.nan, np.float32)


GUARD = 100


def make_block(
    queries: int, keys: int, heads: int, groups: int, size: int, value_size: int, window: int | None = None
) -> Block:
    """Returns random numbers; the queries are the last tokens, and each sees those before it, or its window."""
    random = np.random.default_rng(3)
    shapes = (queries, heads * groups * size), (keys, heads * size), (keys, heads * value_size)
    q, k, v, grad = (random.standard_normal(shape) for shape in (*shapes, (queries, heads * groups * value_size)))
    key = np.arange(keys)
    query = key[keys - queries :, None]
    sees = (key <= query) & (window is None or key > query - window)
    first = int(np.append(sees.all(0), False).argmin())
    arrays = [array.astype(np.float32) for array in (q / np.sqrt(size), k, v, grad)]
    return Block(*arrays, attention_bias(sees[:, first:]), heads)


def fused(run: CompiledOperators, block: Block) -> dict[str, np.ndarray]:
    """Returns the results of the heads, and the gradients of queries, keys and values."""
    attention = run.fused_attention(block.q)
    assert attention is not None
    out, *grads = (np.zeros_like(array) for array in (block.grad, *block.inputs))
    scratch, other = block.scratch(False), block.scratch(True)
    attention.forward(block.sizes, block.inputs, block.bias, out, scratch)
    attention.backward(block.sizes, block.inputs, block.bias, block.grad, grads, other)
    assert np.isnan(scratch[-GUARD:]).all() and np.isnan(other[-GUARD:]).all()
    return dict(zip(NUMBERS, (out, *grads), strict=True))


def exact(block: Block) -> dict[str, np.ndarray]:
    """Returns the same in float64, head by head."""
    q, k, v, grad, bias = (array.astype(np.float64) for array in block[:5])
    bias = np.pad(bias, ((0, 0), (len(k) - bias.shape[1], 0)))
    result = dict(zip(NUMBERS, (np.zeros_like(array) for array in (grad, q, k, v)), strict=True))
    groups = q.shape[1] // k.shape[1]
    size, value_size = (array.shape[1] // block.heads for array in (k, v))
    for head in range(block.heads * groups):
        one, values = (slice(head * width, (head + 1) * width) for width in (size, value_size))
        key, value = (slice(head // groups * width, (head // groups + 1) * width) for width in (size, value_size))
        scores = q[:, one] @ k[:, key].T + bias
        probabilities = np.exp(scores - scores.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        result["out"][:, values] = probabilities @ v[:, value]
        slope = grad[:, values] @ v[:, value].T
        slope = probabilities * (slope - (probabilities * slope).sum(1, keepdims=True))
        result["q"][:, one] = slope @ k[:, key]
        result["k"][:, key] += slope.T @ q[:, one]
        result["v"][:, value] += probabilities.T @ grad[:, values]
    return result


@EACH_COMPILED
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1, 8, 8), (128, 333, 2, 2, 64, 64), (50, 128, 3, 1, 48, 32), (100, 100, 1, 4, 7, 40),
     (128, 192, 2, 1, 32, 32, 64), (65, 140, 1, 2, 128, 128, 3)],
)  # fmt: skip
def test_results_and_gradients(run: CompiledOperators, sizes: tuple[int, ...]) -> None:
    block = make_block(*sizes)
    computed, expected = fused(run, block), exact(block)
    # Gradients of scores are as large as products of `grad` and `v`; sums over keys or queries multiply them by q or k.
    slope = np.abs(block.grad).max() * np.abs(block.v).max() * np.sqrt(sizes[5])
    scale = float(slope * max(np.abs(block.q).max(), np.abs(block.k).max()))
    for name in NUMBERS:
        limit = scale * rounding_limit(sum(sizes[:2]) + sizes[4] + 8)
        np.testing.assert_allclose(computed[name], expected[name], rtol=0, atol=limit, err_msg=name)


@EACH_COMPILED
def test_heads_in_wider_arrays_leave_the_others_alone(run: CompiledOperators) -> None:
    """A thread computes some heads of an array, beside threads that compute the others."""
    block = make_block(70, 90, 3, 2, 24, 40)
    whole = fused(run, block)
    attention = run.fused_attention(block.q)
    assert attention is not None
    grads = [np.full_like(array, 7) for array in (block.q, block.k, block.v)]
    widths = 48, 24, 40, 80
    middle_q, middle_k, middle_v, middle_out = (slice(width, 2 * width) for width in widths)
    columns = middle_q, middle_k, middle_v
    for array, column in zip(grads, columns, strict=True):
        array[:, column] = 0
    sizes = block.sizes._replace(heads=1)
    inputs = [array[:, column] for array, column in zip(block.inputs, columns, strict=True)]
    middle = [array[:, column] for array, column in zip(grads, columns, strict=True)]
    attention.backward(sizes, inputs, block.bias, block.grad[:, middle_out], middle, block.scratch(True))
    for name, array, column in zip("qkv", grads, columns, strict=True):
        np.testing.assert_array_equal(array[:, column], whole[name][:, column], err_msg=name)
        assert np.count_nonzero(array == 7) >= array.size * 2 // 3


@EACH_COMPILED
def test_the_largest_scores_of_heads_are_those_that_queries_see(run: CompiledOperators) -> None:
    block = make_block(70, 90, 2, 2, 16, 16)
    attention = run.fused_attention(block.q)
    assert attention is not None
    largest = np.array([[0, 100], [0, 0]], np.float32)
    attention.forward(block.sizes, block.inputs, block.bias, np.empty_like(block.grad), block.scratch(False), largest)
    q, k = (array.reshape(len(array), -1, 16).transpose(1, 0, 2) for array in (block.q, block.k))
    scores = q @ k.repeat(2, 0).transpose(0, 2, 1)
    scores[..., 90 - block.bias.shape[1] :] += block.bias
    expected = scores.max((1, 2)).reshape(2, 2)
    expected[0, 1] = 100
    np.testing.assert_allclose(largest, expected, rtol=rounding_limit(16))


@EACH_COMPILED
def test_results_may_replace_the_queries(run: CompiledOperators) -> None:
    block = make_block(128, 200, 2, 2, 32, 32)
    expected = fused(run, block)["out"]
    attention = run.fused_attention(block.q)
    assert attention is not None
    attention.forward(block.sizes, block.inputs, block.bias, block.q, block.scratch(False))
    np.testing.assert_array_equal(block.q, expected)


@EACH_COMPILED
def test_keys_that_no_query_sees_change_no_bits(run: CompiledOperators) -> None:
    """Blocks of ranks, documents and windows have different keys at their ends."""
    block = make_block(40, 150, 2, 1, 32, 32, window=30)
    longer = block._replace(
        k=np.concatenate((block.k[:20], block.k)), v=np.concatenate((block.v[:20], block.v)),
        bias=np.pad(block.bias, ((0, 0), (20, 0)), constant_values=np.finfo(np.float32).min),
    )  # fmt: skip
    first, second = fused(run, block), fused(run, longer)
    for name in NUMBERS:
        np.testing.assert_array_equal(first[name], second[name][-len(first[name]) :], err_msg=name)
    assert not second["k"][:20].any()


@EACH_COMPILED
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_come_through(run: CompiledOperators, number: float) -> None:
    block = make_block(70, 70, 1, 1, 16, 16)
    block.q[66, 3] = number
    results = fused(run, block)
    assert np.isnan(results["out"][66]).all()
    assert np.isfinite(results["out"][:66]).all()
    assert np.isnan(results["q"][66]).any()
    assert np.isnan(results["v"]).any()
