"""A file of the newer schema trains with each of its degrees, methods and strategies as one rank does."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from layout_cases import Trained
from pynative_cases import CASES, STEPS
from rank_job import on_rank_processes
from tolerances import RUN_LOSSES, RUN_NEAR_ZERO, RUN_NORMS, RUN_WEIGHTS


@functools.cache
def trained_by(ranks: int) -> dict[str, list[Trained]]:
    """Returns the training of each rank by case: one job for all cases of so many ranks."""
    cases = [""]
    if ranks > 1:
        cases = [keys for keys, number in CASES if number == ranks]
    results = on_rank_processes(ranks, "pynative_cases:all_trained", cases)
    return dict(zip(cases, zip(*results, strict=True), strict=True))


@pytest.mark.parametrize(("keys", "ranks"), CASES)
def test_each_degree_trains_what_one_rank_does(keys: str, ranks: int) -> None:
    [expected] = trained_by(1)[""]
    assert len(expected.losses) == STEPS and expected.losses[-1] < expected.losses[0]
    for of_rank in trained_by(ranks)[keys]:
        np.testing.assert_allclose(of_rank.losses, expected.losses, rtol=RUN_LOSSES)
        np.testing.assert_allclose(of_rank.norms, expected.norms, rtol=RUN_NORMS)
        np.testing.assert_allclose(of_rank.logits, expected.logits, rtol=RUN_NORMS, atol=RUN_NEAR_ZERO)
        assert of_rank.weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            np.testing.assert_allclose(of_rank.weights[name], weight, atol=RUN_WEIGHTS, err_msg=name)
