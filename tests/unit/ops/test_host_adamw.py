"""AdamW on arrays in host memory: the same bits for any number of threads, and the formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_kernels import assert_same_bits
from tolerances import ADAMW_NEAR_ZERO, FEW_OPERATIONS

from trainer.ops.updates.adamw import AdamWItem, HostAdamW

SIZES = (1, 7, (1 << 17) - 1, 1 << 17, 3 * (1 << 17) + 5)
RATE, EPS, BETAS = 1e-3, 1e-8, (0.9, 0.95)
LATE = 100_000  # updates, after which bias is no more


def updates(scale: float, decay: float) -> list[AdamWItem]:
    draw = np.random.default_rng(0)
    arrays = [[draw.standard_normal(size).astype(np.float32) for _ in range(4)] for size in SIZES]
    return [AdamWItem(w, m, np.abs(v), g, decay, scale) for w, m, v, g in arrays]


@pytest.mark.parametrize(("scale", "decay"), [(1.0, 0.0), (0.37, 0.1), (2.0, 0.0), (1.0, 10.0)])
def test_it_is_the_formula_for_any_number_of_threads(scale: float, decay: float) -> None:
    expected = updates(scale, decay)
    for item in expected:
        gradient = item.gradient.astype(np.float64) * scale
        item.first[:] = BETAS[0] * item.first.astype(np.float64) + (1 - BETAS[0]) * gradient
        item.second[:] = BETAS[1] * item.second.astype(np.float64) + (1 - BETAS[1]) * gradient**2
        step = RATE * item.first.astype(np.float64) / (np.sqrt(item.second.astype(np.float64)) + EPS)
        item.weight[:] = (1 - RATE * decay) * item.weight.astype(np.float64) - step
    alone = None
    for threads in (1, 2, 5):
        found = updates(scale, decay)
        before = [item.gradient.copy() for item in found]
        HostAdamW(BETAS, EPS, threads)(found, RATE, LATE)
        for item, right, gradient in zip(found, expected, before, strict=True):
            for name in ("weight", "first", "second"):
                # Where m is near zero, its error is that of the larger numbers that it is the sum of.
                ours, expected_array = getattr(item, name), getattr(right, name)
                np.testing.assert_allclose(ours, expected_array, rtol=FEW_OPERATIONS, atol=ADAMW_NEAR_ZERO)
            np.testing.assert_array_equal(item.gradient, gradient)
        bits = [np.concatenate([item.weight, item.first, item.second]) for item in found]
        alone = bits if alone is None else alone
        assert_same_bits(bits, alone)


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    broken = [AdamWItem(*(np.zeros(1 << 18, np.float32) for _ in range(3)), np.zeros(3, np.float32), 0.0)]
    with pytest.raises(ValueError, match="broadcast|numbers for a weight of"):
        HostAdamW(BETAS, EPS, 2)(broken, RATE, LATE)


def test_zero_state_and_zero_gradient_leave_the_weights() -> None:
    item = AdamWItem(np.ones(5, np.float32), *(np.zeros(5, np.float32) for _ in range(3)), decay=0.0)
    HostAdamW(BETAS, EPS, 1)([item], RATE, LATE)
    np.testing.assert_array_equal(item.weight, 1.0)
