"""Products of float32 matrices by the compiled library against float64 (`trainer/arrays/compiled/products.c`)."""

from __future__ import annotations

import numpy as np
import pytest
from operator_sets import EACH_COMPILED
from tolerances import rounding_limit

from trainer.arrays.compiled.operators import CompiledOperators

SIZES = (32, 32, 32), (33, 300, 35), (260, 257, 70), (64, 512, 512), (43, 32, 129), (1100, 40, 50)
MOST_ROWS = 512  # of a call


@pytest.fixture
def calls(run: CompiledOperators, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list of the calls of products.c, which processors with AVX-512 leave to oneDNN otherwise."""
    found: list[int] = []
    function = run.compiled.product

    class Library:
        """The library of `run`, which notes calls."""

        @staticmethod
        def product(*arguments: int) -> None:
            found.append(1)
            function(*arguments)

    monkeypatch.setattr(run, "compiled", Library)
    monkeypatch.setattr(run, "has_avx512", False)
    return found


def matrix(rows: int, columns: int, transposed: bool, stored: int = 0) -> np.ndarray:
    """Returns random numbers in columns of a wider array, whose rows are `stored` elements apart."""
    random = np.random.default_rng(rows + columns)
    shape = (rows, columns)
    if transposed:
        shape = (columns, rows)
    wide = random.standard_normal((shape[0], max(stored, shape[1] + 3))).astype(np.float32)
    array = wide[:, : shape[1]]
    if transposed:
        return array.T
    return array


@EACH_COMPILED
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("layouts", [(False, True), (False, False), (True, False)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_of_large_matrices(
    run: CompiledOperators, calls: list[int], sizes: tuple[int, int, int], layouts: tuple[bool, bool], accumulate: bool
) -> None:
    rows, inner, columns = sizes
    a = matrix(rows, inner, layouts[0], 1024)
    b = matrix(inner, columns, layouts[1], 1024)  # with rows 4 KiB apart oneDNN would be slow
    out = np.full((rows, columns + 9), 5, np.float32)
    run.matmul(a, b, out[:, 4:-5], accumulate)
    assert calls == [1] * -(-rows // MOST_ROWS)
    expected = a.astype(np.float64) @ b + 5 * accumulate
    limit = rounding_limit(inner + 1) * (np.abs(a).max() * np.abs(b).max() * np.sqrt(inner) + 5)
    np.testing.assert_allclose(out[:, 4:-5], expected, rtol=0, atol=limit)
    assert (out[:, :4] == 5).all() and (out[:, -5:] == 5).all()


@EACH_COMPILED
def test_a_number_does_not_depend_on_the_rows_beside_it(run: CompiledOperators, calls: list[int]) -> None:
    """Tiles of rows have different sizes, and threads take different columns."""
    a, b = matrix(100, 600, False), matrix(600, 90, True)
    out, part = np.empty((100, 90), np.float32), np.empty((37, 40), np.float32)
    run.matmul(a, b, out)
    run.matmul(a[50:87], b[:, 20:60], part)
    assert calls == [1, 1]
    np.testing.assert_array_equal(part, out[50:87, 20:60])


@EACH_COMPILED
def test_numbers_that_are_not_finite_come_through(run: CompiledOperators, calls: list[int]) -> None:
    a, b = matrix(40, 32, False), matrix(32, 50, True)
    a[3, 5] = np.nan
    a[4, 6] = np.inf
    out = np.empty((40, 50), np.float32)
    run.matmul(a, b, out)
    assert calls == [1]
    assert np.isnan(out[3]).all() and np.isinf(out[4]).all()
    assert np.isfinite(np.delete(out, (3, 4), 0)).all()
