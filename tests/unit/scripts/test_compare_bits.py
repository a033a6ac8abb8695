"""What scripts/compare_bits.py says of two checkouts' numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tolerances import DIFFERENCE_FROM_ONE

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
from compare_bits import Numbers, judge, relative_difference  # noqa: E402

OLD = Numbers([2.0, 1.0], {"model a": np.array([1.0, -4.0], np.float32), "model b": np.ones(3, np.float32)}, ["text"])


def changed(factor: float) -> Numbers:
    return OLD._replace(tensors=OLD.tensors | {"model a": OLD.tensors["model a"] * np.float32(factor)})


def test_equal_numbers_have_the_same_bits() -> None:
    assert judge(OLD, OLD) == (0.0, "same bits")


def test_the_tensor_that_differs_most_is_named() -> None:
    size, text = judge(OLD, changed(1.001))
    assert size == pytest.approx(1e-3, rel=DIFFERENCE_FROM_ONE)
    assert text == "loss 0.0e+00, tensors 1.0e-03 (model a; 1 of 2 differ)"


def test_a_loss_that_differs_is_seen_where_the_tensors_are_equal() -> None:
    size, text = judge(OLD, OLD._replace(losses=[2.0, 1.5]))
    assert size == 0.25 and text.startswith("loss 2.5e-01, tensors 0.0e+00")


@pytest.mark.parametrize(("new", "text"), [
    (OLD._replace(text=["another"]), "same bits, another prediction"),
    (OLD._replace(tensors={"model a": OLD.tensors["model a"]}),
     "same bits, 1 tensors are in one alone, such as model b"),
    (Numbers([], {}, [], "ValueError: no\nsuch thing"), "new failed: ValueError: no such thing"),
])  # fmt: skip
def test_what_is_more_than_rounding_never_passes(new: Numbers, text: str) -> None:
    assert judge(OLD, new) == (float("inf"), text)


def test_the_smallest_differences_count() -> None:
    one, zero, nan = np.ones(2, np.float32), np.zeros(2, np.float32), np.full(2, np.nan, np.float32)
    assert relative_difference(one, np.nextafter(one, 2)) > 0 and relative_difference(zero, -zero) > 0
    assert relative_difference(nan, nan) == 0 and relative_difference(one, nan) == float("inf")
    assert relative_difference(one, one.astype(np.float64)) == relative_difference(one, one[:1]) == float("inf")
