"""Functions that layers call, compiled and in NumPy, against float64 formulas.

Limits: tolerances.py, of the sizes of what is added up or multiplied.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from operator_sets import EACH, RUNS
from tolerances import U_BFLOAT16, rounding_limit

from trainer.arrays.compiled import build
from trainer.arrays.compiled.build import find_library
from trainer.arrays.numpy_operators import BFLOAT16, AdamWNumbers, NumpyOperators
from trainer.storage.bfloat16 import as_bfloat16, as_float32
from trainer.storage.compiler import find_compiler

RANDOM = np.random.default_rng(11)
SHAPES = (1, 1), (3, 17), (5, 64), (2, 257)
EPS = np.float32(1e-6)


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def columns(array: np.ndarray) -> np.ndarray:
    """Returns the array as columns of a wider one."""
    wide = np.zeros((*array.shape[:-1], array.shape[-1] + 5), np.float32)
    wide[..., 2:-3] = array
    return wide[..., 2:-3]


@EACH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [np.copy, columns])
@pytest.mark.parametrize("centers", [False, True])
def test_norms_and_their_gradients(run: NumpyOperators, shape: tuple[int, int], make, centers: bool) -> None:
    x, grad = make(numbers(*shape)), make(numbers(*shape))
    weight = numbers(shape[1])
    exact, exact_grad, size = x.astype(np.float64), grad.astype(np.float64), shape[1]
    exact -= centers * exact.mean(1, keepdims=True)
    scale = 1 / np.sqrt((exact**2).mean(1) + EPS)
    limit = rounding_limit(size + 8)
    found = run.rms_scales(x, EPS, centers)
    np.testing.assert_allclose(found, scale, rtol=limit)
    out = make(x)
    run.rms_norm(x, weight, found, out, centers)
    np.testing.assert_allclose(out, exact * scale[:, None] * weight, rtol=limit, atol=limit)
    weight_grad = run.rms_norm_gradient(x, weight, found, grad, np.empty(shape, np.float32), centers)
    magnitude = np.abs(exact) + centers * np.abs(x).mean(1, keepdims=True)  # what the mean is taken from
    terms = exact_grad * magnitude * scale[:, None]
    right = (exact_grad * exact * scale[:, None]).sum(0)
    np.testing.assert_allclose(weight_grad, right, atol=rounding_limit(len(x) + size) * np.abs(terms).sum())
    projected = (exact_grad * exact * weight).sum(1, keepdims=True) * scale[:, None] ** 3 / size
    sizes = np.abs(exact_grad * magnitude * weight).sum(1, keepdims=True) * scale[:, None] ** 3 / size * magnitude
    right = exact_grad * weight * scale[:, None] - exact * projected
    right -= centers * right.mean(1, keepdims=True)
    bound = rounding_limit(size + 8) * (sizes + np.abs(exact_grad * weight * scale[:, None]))
    bound += centers * bound.mean(1, keepdims=True)
    assert (np.abs(grad - right) <= bound).all()


def _activation(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "gelu_pytorch_tanh":
        return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
    if kind == "relu2":
        return np.maximum(x, 0) ** 2
    return x / (1 + np.exp(-x))


@EACH
@pytest.mark.parametrize("shape", SHAPES)
def test_a_factor_of_each_row_multiplies_gradients_and_has_one(run: NumpyOperators, shape: tuple[int, int]) -> None:
    gate, up, grad = numbers(*shape), numbers(*shape), numbers(*shape)
    weight = numbers(shape[0])
    plain = [gate.copy(), up.copy(), np.empty(shape, np.float32)]
    run.gated_gradient(plain[0], plain[1], grad, plain[2], np.empty(shape, np.float32))
    result = np.empty(shape, np.float32)
    weight_grad = run.weighted_gated_gradient(gate, up, grad, result, np.empty(shape, np.float32), weight)
    for found, right in zip((gate, up, result), plain, strict=True):
        np.testing.assert_array_equal(found, right * weight[:, None])
    terms = plain[2].astype(np.float64) * grad
    bound = rounding_limit(shape[1] + 1) * np.abs(terms).sum(1)
    assert (np.abs(weight_grad - terms.sum(1)) <= bound).all()


@EACH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [np.copy, columns])
def test_a_matrix_is_added_to_each_block(run: NumpyOperators, shape: tuple[int, int], make) -> None:
    x = make(numbers(3, *shape))
    added = numbers(*shape)
    right = x + added
    run.add_to_blocks(x, added)
    np.testing.assert_array_equal(x, right)


@EACH
@pytest.mark.parametrize("kind", ["silu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_activations_and_their_gradients(run: NumpyOperators, shape: tuple[int, int], kind: str) -> None:
    gate, up, grad = numbers(*shape) * 3, numbers(*shape), numbers(*shape)
    exact = gate.astype(np.float64)
    step = 1e-5  # the error of the difference is of its square
    slope = (_activation(exact + step, kind) - _activation(exact - step, kind)) / (2 * step)
    right = _activation(exact, kind) * up
    limit = rounding_limit(16, scale=4)
    out = np.empty_like(gate)
    run.gated(gate, up, out, kind)
    np.testing.assert_allclose(out, right, atol=limit)
    result, kept = np.empty_like(gate), grad.copy()
    gates, ups = gate.copy(), up.copy()
    run.gated_gradient(gates, ups, grad, result, np.empty_like(gate), kind)
    np.testing.assert_array_equal(grad, kept)
    np.testing.assert_allclose(result, right, atol=limit)
    scale = max(1, np.abs(up * grad).max())
    np.testing.assert_allclose(gates, slope * up * grad, atol=limit * scale)
    np.testing.assert_allclose(ups, _activation(exact, kind) * grad, atol=limit * scale)
    again, more = gate.copy(), up.copy()
    run.gated_gradient(again, more, grad, None, np.empty_like(gate), kind)
    np.testing.assert_array_equal((again, more), (gates, ups))
    in_place = gate.copy()
    run.gated(in_place, up, in_place, kind)
    np.testing.assert_array_equal(in_place, out)
    ones = np.ones_like(gate)
    run.gated(gate, ones, out, kind)
    run.gated(gate, None, in_place, kind)
    np.testing.assert_array_equal(in_place, out)
    again, more, other = gate.copy(), gate.copy(), np.empty_like(gate)
    run.gated_gradient(again, ones, grad, result, np.empty_like(gate), kind)
    run.gated_gradient(more, None, grad, other, np.empty_like(gate), kind)
    np.testing.assert_array_equal((more, other), (again, result))


@EACH
def test_rotation_multiplies_complex_numbers(run: NumpyOperators) -> None:
    whole = numbers(5, 3, 16)
    x = whole[..., 4:14]
    rotation = np.exp(1j * RANDOM.standard_normal((5, 1, 5))).astype(np.complex64)
    right = (x[..., ::2] + 1j * x[..., 1::2]) * rotation.astype(np.complex128)
    kept = whole.copy()
    run.rotate(x, rotation)
    np.testing.assert_allclose(x[..., ::2] + 1j * x[..., 1::2], right, atol=rounding_limit(4, scale=4))
    np.testing.assert_array_equal(whole[..., :4], kept[..., :4])
    np.testing.assert_array_equal(whole[..., 14:], kept[..., 14:])


@EACH
def test_rotation_of_halves(run: NumpyOperators) -> None:
    whole = numbers(5, 3, 40)
    x = whole[..., :38]
    angles = RANDOM.standard_normal((5, 1, 19))
    rotation = np.exp(1j * angles).astype(np.complex64)
    first, second = x[..., :19].astype(np.float64), x[..., 19:].astype(np.float64)
    right = np.concatenate((first * np.cos(angles) - second * np.sin(angles),
                            second * np.cos(angles) + first * np.sin(angles)), -1)  # fmt: skip
    kept = whole.copy()
    run.rotate_halves(x, rotation)
    np.testing.assert_allclose(x, right, atol=rounding_limit(4, scale=4))
    np.testing.assert_array_equal(whole[..., 38:], kept[..., 38:])


@EACH
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention_of_few_queries(
    run: NumpyOperators, rows: int, masked: bool, has_sinks: bool, cap: float | None
) -> None:
    sequences, heads, cached, size, value_size = 2, 3, 37, 20, 83
    q = numbers(sequences, heads, rows, size)
    keys = numbers(sequences, heads, cached + 4, size)[:, :, :cached]
    values = numbers(sequences, heads, cached + 4, value_size)[:, :, :cached]
    mask, sinks = None, None
    scores = q.astype(np.float64) @ keys.swapaxes(-1, -2)
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    if masked:
        mask = np.where(RANDOM.random((sequences, 1, rows, cached)) < 0.5, 0, np.float32(-1e9)).astype(np.float32)
        mask[..., 0] = 0
        scores += mask
    total = np.exp(scores).sum(-1, keepdims=True)
    if has_sinks:
        sinks = numbers(heads, rows)
        total += np.exp(sinks.astype(np.float64))[..., None]
    right = np.exp(scores) / total @ values.astype(np.float64)
    out = np.empty((sequences, heads, rows, value_size), np.float32)
    run.attend(q, keys, values, mask, cap, sinks, out)
    shared = np.empty_like(out)
    run.attend(q, keys, values, mask, cap, sinks, shared, 3)
    np.testing.assert_array_equal(shared, out)
    # An error of a score is one of its exponential; the sums of a row's weights and values have their own.
    largest = np.abs(q).max() * np.abs(keys).max() * size
    limit = rounding_limit(size, scale=largest) + rounding_limit(2 * cached)
    np.testing.assert_allclose(out, right, atol=limit * np.abs(values).max())


@EACH
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize(("inner", "size"), [(1, 1), (67, 30), (256, 515)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_of_few_rows(run: NumpyOperators, rows: int, inner: int, size: int, accumulate: bool) -> None:
    """Each row gets the same bits alone and among others, with one thread and with four."""
    x, weight, before = columns(numbers(rows, inner)), numbers(size, inner), numbers(rows, size)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    results = []
    for threads in (1, 4, 2):
        out = columns(before)
        run.few_rows_product(x, weight, out, accumulate, threads)
        results.append(out)
    sizes = np.abs(x).astype(np.float64) @ np.abs(weight).T
    right = exact
    if accumulate:
        right = exact + before
        sizes += np.abs(before)
    assert (np.abs(results[0] - right) <= rounding_limit(inner + 1) * sizes).all()
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])
    if run.shares(x):
        alone = columns(before[-1:])
        run.few_rows_product(x[-1:], weight, alone, accumulate, 4)
        np.testing.assert_array_equal(alone[0], results[0][-1])


@pytest.mark.skipif("this processor" not in RUNS, reason="no compiler")
def test_threads_that_call_at_the_same_time() -> None:
    """One caller has the team of threads, the others compute alone; each gets its own result."""
    run = RUNS["this processor"]
    weights = [numbers(700, 128) for _ in range(6)]
    x = numbers(5, 128)
    right = [np.empty((5, 700), np.float32) for _ in weights]
    for weight, out in zip(weights, right, strict=True):
        run.few_rows_product(x, weight, out, False, 1)

    def repeat(place: int) -> bool:
        out = np.empty((5, 700), np.float32)
        for _ in range(300):
            run.few_rows_product(x, weights[place], out, False, 3)
            if not np.array_equal(out, right[place]):
                return False
        return True

    with ThreadPoolExecutor(len(weights)) as pool:
        assert all(pool.map(repeat, range(len(weights))))


@pytest.mark.skipif("this processor" not in RUNS, reason="no compiler")
def test_threads_of_an_earlier_call_do_not_write_behind_the_scores_of_fewer() -> None:
    run = RUNS["this processor"]
    many, few, cached = 8, 2, 64
    q, keys = numbers(1, 64, 16, 32), numbers(1, 64, cached, 32)
    run.attend(q, keys, keys, None, None, None, np.empty_like(q), many)
    scores, out = np.full((many, cached + 1), np.float32(7)), np.empty_like(q)
    steps = [step // 4 for step in keys.strides[:-1]]
    sizes = np.array([*q.shape[:3], *keys.shape[2:], 32, *steps, *steps, 0, 0, few], np.int64)
    inputs = [array.ctypes.data for array in (q, keys, keys)]
    for _ in range(100):
        run.compiled.attend(*inputs, None, None, scores.ctypes.data, out.ctypes.data, sizes.ctypes.data)
    assert (scores[few:] == 7).all()


@pytest.mark.skipif("this processor" not in RUNS, reason="no compiler")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    run = RUNS["this processor"]
    x, weight = numbers(3, 256), numbers(600, 256)
    right, out = np.empty((3, 600), np.float32), np.zeros((3, 600), np.float32)
    run.few_rows_product(x, weight, right, False, 3)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        run.few_rows_product(x, weight, out, False, 3)
        os._exit(int(not np.array_equal(out, right)))
    assert os.waitpid(child, 0)[1] == 0
    run.few_rows_product(x, weight, out, False, 3)
    np.testing.assert_array_equal(out, right)


@EACH
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_adamw(run: NumpyOperators, scale: float) -> None:
    """The formula in float64; `tests/unit/ops/test_host_adamw.py` has that of the optimizer, with all its blocks."""
    numbers_of = AdamWNumbers(scale, 1e-3, 1e-8, 0.1, 0.95, 0.05, 0.999)
    weight, first, gradient = (numbers(301) for _ in range(3))
    second = np.abs(numbers(301))
    wide = gradient.astype(np.float64) * scale
    right_first = first + (wide - first) * 0.1
    right_second = second * 0.95 + wide**2 * 0.05
    right = weight * 0.999 - right_first / (np.sqrt(right_second) + 1e-8) * 1e-3
    run.adamw(weight, first, second, gradient, numbers_of, np.empty((2, 301), np.float32))
    np.testing.assert_allclose(first, right_first, atol=rounding_limit(4) * 4)
    np.testing.assert_allclose(second, right_second, rtol=rounding_limit(6))
    np.testing.assert_allclose(weight, right, atol=rounding_limit(8) * 4)


@EACH
def test_casts_round_to_nearest_even(run: NumpyOperators) -> None:
    """All numbers halfway between two of bfloat16, their neighbours, and what is not finite."""
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000)[:, None] + np.arange(-1, 2, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        x = halves.astype(np.uint32).view(np.float32)
        x = x[np.abs(x).min(1) > np.finfo(np.float32).tiny]  # oneDNN's instructions take denormal numbers for 0
    out = np.empty(x.shape, BFLOAT16)
    run.cast(x, out)
    right = as_bfloat16(x)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(out[~is_nan], right[~is_nan])
    assert np.isnan(as_float32(out)[is_nan]).all()
    back = np.empty(x.shape, np.float32)
    run.cast(out, back)
    np.testing.assert_array_equal(back.view(np.uint32) >> 16, out)


@EACH
def test_a_number_does_not_depend_on_its_place(run: NumpyOperators) -> None:
    """Results of rows keep their bits in tiles of any size: threads and recomputation change nothing."""
    gate, up, out = numbers(7, 19), numbers(7, 19), np.empty((7, 19), np.float32)
    run.gated(gate, up, out)
    for row in range(7):
        one = np.empty((1, 19), np.float32)
        run.gated(gate[row : row + 1], up[row : row + 1], one)
        np.testing.assert_array_equal(one[0], out[row])


@EACH
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [5, 64, 70])
def test_sums_of_rows(run: NumpyOperators, width: int, weighted: bool) -> None:
    x, out = numbers(9, width), np.full((4, width), np.nan, np.float32)
    rows = np.array([[0, 8, 3], [8, 8, 1], [2, 0, 7], [5, 6, 4]])
    factors = np.asfortranarray(numbers(4, 3)) if weighted else None
    run.sum_rows(x, rows, factors, out)
    right = np.einsum("nkd,nk->nd", x[rows].astype(np.float64), np.ones((4, 3)) if factors is None else factors)
    np.testing.assert_allclose(out, right, atol=rounding_limit(3) * 10)


@EACH
def test_heads_are_cast_where_they_lie(run: NumpyOperators) -> None:
    """Views of heads in arrays of tokens, dense rows that are apart, in both directions."""
    x = numbers(5, 3 * 20).reshape(5, 3, 20).transpose(1, 0, 2)
    stored = np.zeros((5, 3, 24), np.uint16)
    heads = stored[..., :20].transpose(1, 0, 2)
    run.cast(x, heads)
    np.testing.assert_array_equal(heads, as_bfloat16(x))
    assert not stored[..., 20:].any()
    back = np.zeros((3, 5, 20), np.float32)
    run.cast(heads, back)
    np.testing.assert_array_equal(back, as_float32(heads))


@EACH
def test_softmax_and_its_gradient_in_bfloat16(run: NumpyOperators) -> None:
    """They are those in float32, rounded."""
    x, grad = numbers(2, 3, 37), numbers(2, 3, 37)
    wide, narrow = np.empty_like(x), np.empty(x.shape, BFLOAT16)
    run.softmax(x, wide)
    run.softmax(x, narrow)
    np.testing.assert_allclose(as_float32(narrow), wide, rtol=2 * U_BFLOAT16)
    run.softmax_gradient(wide, grad, narrow)
    run.softmax_gradient(wide, grad.copy(), grad)
    np.testing.assert_allclose(as_float32(narrow), grad, rtol=2 * U_BFLOAT16, atol=rounding_limit(37))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))  # takes a third of the time
    return tmp_path / "a cache" / "run_trainer"


@pytest.mark.skipif(not find_compiler(), reason="no compiler")
def test_the_library_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later processes load it from the user's cache, and no other file stays there."""
    assert find_library.__wrapped__().library is not None
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    monkeypatch.setattr(build, "compile_library", lambda *_: pytest.fail("compiled again"))
    assert find_library.__wrapped__().library is not None


@pytest.mark.skipif(not find_compiler(), reason="no compiler")
def test_a_cache_that_cannot_be_written_is_not_needed(cache: Path) -> None:
    cache.parent.write_text("a file where the folder would be")
    assert find_library.__wrapped__().library is not None


@pytest.mark.skipif(not find_compiler(), reason="no compiler")
def test_a_damaged_library_is_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In another cache: the linker knows a library that it has loaded by its path."""
    assert find_library.__wrapped__().library is not None
    [library] = cache.iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    damaged = tmp_path / "another" / "run_trainer" / library.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(library.read_bytes()[:100])
    assert find_library.__wrapped__().library is not None
    assert not damaged.exists()
    assert find_library.__wrapped__().library is not None
    assert damaged.stat().st_size == library.stat().st_size


def test_a_compiler_that_fails_leaves_numpy(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken-cc"
    calls = tmp_path / "calls"
    compiler.write_text(
        f"#!/bin/sh\necho called >> {calls}\necho 'rowwise.c: error: no such instruction' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = find_library.__wrapped__()
    assert found.library is None and "no such instruction" in found.text
    assert calls.read_text() == "called\n"
    assert not list(cache.glob("*"))
    monkeypatch.setenv("CC", "")
    assert find_library.__wrapped__() == (None, "there is no C compiler")
