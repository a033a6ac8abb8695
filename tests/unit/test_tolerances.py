"""The limits of parity tests: wide enough for rounding in any order, narrow enough for a relative error of 1e-5."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from numpy_kernels import distance
from tolerances import U, decoder_limits, rounding_limit

from trainer.config import parse_config

MUTATION = 1 + 1e-5


def one_by_one(values: np.ndarray) -> np.float32:
    return np.cumsum(values, dtype=np.float32)[-1]


def in_lanes(width: int) -> Callable[[np.ndarray], np.float32]:
    """Sums as a processor with registers of `width` numbers does."""
    return lambda values: one_by_one(np.cumsum(values.reshape(-1, width), 0, dtype=np.float32)[-1])


@pytest.mark.parametrize("terms", [16, 64, 512, 1024])
def test_sums_in_any_order_stay_within_the_limit(terms: int) -> None:
    draw = np.random.default_rng(terms)
    for _ in range(50):
        values = draw.normal(size=terms).astype(np.float32)
        exact = values.astype(np.float64).sum()
        size = np.abs(values).sum()
        for add in (one_by_one, in_lanes(4), in_lanes(8), in_lanes(16), np.sum):
            assert abs(add(values) - exact) < rounding_limit(terms) * size


@pytest.mark.parametrize("terms", [(1,), (20, 3), (1000,), (10**9,)])
@pytest.mark.parametrize("scale", [1.0, 3.0, 1e6])
def test_no_limit_lets_a_mutation_of_1e_5_pass(terms: tuple[int, ...], scale: float) -> None:
    assert 4 * U <= rounding_limit(*terms, scale=scale) < 1e-5
    values = np.random.default_rng(1).normal(size=(8, 8))
    assert not distance(values * MUTATION, values) < rounding_limit(*terms, scale=scale)


def test_a_decoders_gradients_have_a_wider_limit_than_its_loss() -> None:
    section = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    section["seq_length"] = 4
    limits = decoder_limits(parse_config("tiny", json.dumps({"model": {"model_config": section}})).decoder)
    assert 4 * U < limits.loss < limits.gradients < 1e-5
