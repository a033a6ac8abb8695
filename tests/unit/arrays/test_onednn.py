"""Matrix products and row-wise functions of arrays against float64 formulas, through oneDNN and in NumPy.

Limits: tolerances.py, of the largest sum of the sizes of what is added up.
"""

from __future__ import annotations

import _ctypes
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy_kernels import distance
from tolerances import SUBNORMAL, rounding_limit

from trainer.arrays import onednn, operators
from trainer.arrays.compiled.build import find_library
from trainer.arrays.compiled.operators import CompiledOperators
from trainer.arrays.numpy_operators import NUMPY_OPERATORS, NumpyOperators
from trainer.ops import host_library

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy tells of numbers that are not finite

LIBRARY = host_library.library()
SIZES = (1, 3, 17)
RANDOM = np.random.default_rng(7)
COMPILED = find_library().library
RUNS: list[NumpyOperators] = [NUMPY_OPERATORS]
if LIBRARY:
    RUNS.append(onednn.OneDnnOperators(LIBRARY))
if LIBRARY and COMPILED:
    RUNS.append(CompiledOperators(LIBRARY, COMPILED))
EACH = pytest.mark.parametrize("run", RUNS, ids=lambda run: type(run).__name__)


def contiguous(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def transposed(*shape: int) -> np.ndarray:
    return contiguous(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)


def columns(*shape: int) -> np.ndarray:
    """Returns some of the columns of a wider matrix."""
    return contiguous(*shape[:-1], shape[-1] + 5)[..., 2:-3]


def columns_transposed(*shape: int) -> np.ndarray:
    return columns(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)


def heads(*shape: int) -> np.ndarray:
    """Returns the heads of a matrix of rows: [..., heads, rows, d] of [..., rows, heads, d]."""
    if len(shape) < 3:
        return columns(*shape)
    return contiguous(*shape[:-3], shape[-2], shape[-3], shape[-1]).swapaxes(-2, -3)


LAYOUTS = contiguous, transposed, columns, columns_transposed, heads


def test_the_library_of_mindspore_is_found() -> None:
    assert LIBRARY is not None
    assert isinstance(operators.operators(), onednn.OneDnnOperators)


def test_it_says_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(spec: SimpleNamespace | None) -> str:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
        found, text = host_library.find_onednn.__wrapped__()
        assert found is None
        return text

    installed, place = importlib.util.find_spec("mindspore"), tmp_path / "lib" / "libdnnl.so.3"
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    place.parent.mkdir()
    assert text(None) == "MindSpore is not installed"
    assert text(spec) == "MindSpore's libdnnl.so.3 cannot be loaded"
    place.write_text("no library")
    assert text(spec) == "MindSpore's libdnnl.so.3 cannot be loaded"
    place.unlink()
    place.symlink_to(_ctypes.__file__)
    assert text(spec) == "MindSpore's libdnnl.so.3 has another interface"
    monkeypatch.setattr(host_library, "_VERSION", (3, 9))
    assert re.fullmatch(r"MindSpore brings oneDNN 3\.10\.\d+ instead of 3\.9", text(installed))


@EACH
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_products(run: NumpyOperators, batch: tuple[int, ...]) -> None:
    results = contiguous, columns, heads
    for (rows, inner, width), accumulate in itertools.product(itertools.product(SIZES, repeat=3), (False, True)):
        for number, (make_a, make_b) in enumerate(itertools.product(LAYOUTS, repeat=2)):
            a, b = make_a(*batch, rows, inner), make_b(*batch, inner, width)
            out = results[number % 3](*batch, rows, width)
            there = out.astype(np.float64) if accumulate else np.zeros(out.shape)
            right = there + a.astype(np.float64) @ b.astype(np.float64)
            added_up = np.abs(there) + np.abs(a).astype(np.float64) @ np.abs(b)
            around = beside(out)
            run.matmul(a, b, out, accumulate)
            case = f"{make_a.__name__} {a.shape} {make_b.__name__} {b.shape} {accumulate}"
            assert np.abs(out - right).max() <= rounding_limit(inner + 1) * added_up.max(), case
            np.testing.assert_array_equal(beside(out), around, err_msg=case)


def beside(view: np.ndarray) -> np.ndarray:
    """Returns the rest of the array of which this is a view."""
    kept = view.copy()
    view[...] = 0
    found = view.copy() if view.base is None else view.base.copy()
    view[...] = kept
    return found


@pytest.mark.parametrize(("layout_a", "layout_b", "by_numpy"), [
    (contiguous, contiguous, True), (contiguous, transposed, False), (transposed, contiguous, True),
    (columns, columns, False), (transposed, columns, True), (columns_transposed, columns, False),
])  # fmt: skip
@pytest.mark.parametrize("accumulate", [False, True])
def test_without_avx512_numpy_multiplies_rows_that_compete_for_cache_lines(
    layout_a: Callable, layout_b: Callable, by_numpy: bool, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    matmul = NUMPY_OPERATORS.matmul
    monkeypatch.setattr(onednn, "has_avx512", lambda: False)
    monkeypatch.setattr(NUMPY_OPERATORS, "matmul", lambda *given: asked.append(given) or matmul(*given))
    a, b, out = layout_a(512, 512), layout_b(512, 512), contiguous(512, 512)
    right = a.astype(np.float64) @ b + accumulate * out.astype(np.float64)
    added_up = np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(out)
    onednn.OneDnnOperators(LIBRARY).matmul(a, b, out, accumulate)
    assert bool(asked) is by_numpy
    assert np.abs(out - right).max() <= rounding_limit(513) * added_up.max()


@EACH
def test_products_of_nothing_are_zero(run: NumpyOperators) -> None:
    out = np.ones((3, 4), np.float32)
    run.matmul(np.ones((3, 0), np.float32), np.ones((0, 4), np.float32), out, accumulate=True)
    assert (out == 1).all()
    run.matmul(np.ones((3, 0), np.float32), np.ones((0, 4), np.float32), out)
    assert (out == 0).all()
    no_matrices = np.ones((0, 3, 2), np.float32).astype(np.float16), np.ones((0, 2, 4), np.float32).astype(np.float16)
    run.matmul(*no_matrices, np.ones((0, 3, 4), np.float32))


def row_wise() -> Iterator[tuple[tuple[int, ...], Callable[..., np.ndarray]]]:
    for rows, width in itertools.product(SIZES, SIZES):
        for shape in ((rows, width), (2, rows, width)):
            for make in (contiguous, columns):
                yield shape, make


@EACH
def test_softmax_and_its_gradient(run: NumpyOperators) -> None:
    for shape, make in row_wise():
        x, grad, out = (make(*shape) for _ in range(3))
        x *= 8
        x[..., -1] += np.finfo(np.float32).min * (shape[-1] > 1)  # a masked key
        right = softmax(x.astype(np.float64))
        run.softmax(x, out)
        assert distance(out, right) <= rounding_limit(shape[-1] + 4), shape
        right_grad = right * (grad - (right * grad).sum(-1, keepdims=True))
        limit, largest = rounding_limit(2 * shape[-1] + 8, scale=3), np.abs(right * grad).max()
        given = grad.copy()
        for into in (make(*shape), grad):  # the last one in place
            run.softmax_gradient(out, given if into is not grad else grad, into)
            assert np.abs(into - right_grad).max() <= limit * largest, shape
        run.softmax(x, x)
        np.testing.assert_array_equal(x, out)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@EACH
def test_silu_and_its_gradient(run: NumpyOperators) -> None:
    for shape in (*itertools.product(SIZES, repeat=2), (2, 17, 17), (300, 301)):
        x, grad, out = (contiguous(*shape) for _ in range(3))
        x *= 4
        exact = x.astype(np.float64)
        sigmoid = 1 / (1 + np.exp(-exact))
        run.silu(x, out)
        assert distance(out, exact * sigmoid) <= rounding_limit(4), shape
        right = grad * (sigmoid + exact * sigmoid * (1 - sigmoid))
        # 1 - sigmoid cancels where x is large; what it is multiplied with is at most 1.1 times the gradient.
        largest = np.abs(grad).max()
        in_place = x.copy()
        run.silu(x, x)
        np.testing.assert_array_equal(x, out)
        for values, into in ((in_place, out), (in_place, in_place)):
            run.silu_gradient(values, grad, into)
            assert np.abs(into - right).max() <= rounding_limit(8, scale=2) * largest, shape
        x[...] = exact
        run.silu_gradient(x, grad, grad)
        np.testing.assert_array_equal(grad, out)


@EACH
def test_large_numbers(run: NumpyOperators) -> None:
    x = np.array([[-1e4, -200.0, -90.0, 90.0, 200.0, 1e4]] * 99, np.float32)
    out, grad = np.empty_like(x), np.empty_like(x)
    run.silu(x, out)
    np.testing.assert_allclose(out, np.where(x > 0, x, 0), atol=SUBNORMAL)
    run.silu_gradient(x, np.ones_like(x), grad)
    np.testing.assert_allclose(grad, x > 0, atol=SUBNORMAL)
    run.softmax(x, out)
    np.testing.assert_array_equal(out, [[0, 0, 0, 0, 0, 1]] * 99)


@EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(run: NumpyOperators, bad: float) -> None:
    """An overflow is found by its results: the step that it is in is skipped."""
    for place in range(17):
        x = contiguous(3, 17)
        x[1, place] = bad
        found = np.empty_like(x)
        run.softmax(x, found)
        assert not np.isfinite(found[1]).all() and np.isfinite(found[[0, 2]]).all()
        numbers, found = np.tile(x, (10, 1)), np.empty((30, 17), np.float32)
        run.silu(numbers, found)
        assert (np.isfinite(found) == np.isfinite(numbers)).all()
        product = np.empty((3, 3), np.float32)
        run.matmul(x, contiguous(17, 3), product)
        assert not np.isfinite(product[1]).any()
