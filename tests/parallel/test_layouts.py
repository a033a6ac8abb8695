"""Each way to divide a model trains each kind of model as one rank does: losses, norms, and the weights at the end."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from layout_cases import LAYOUTS, MODELS, STEPS, Trained, has_layout
from rank_job import on_rank_processes
from tolerances import RUN_LOSSES, RUN_NORMS, RUN_WEIGHTS

CASES = [(model, layout) for layout in LAYOUTS for model in MODELS if has_layout(model, layout)]


@functools.cache
def of_ranks(ranks: int) -> dict[tuple[str, str], list[Trained]]:
    """Returns the training of each rank by case: one job for all cases of so many ranks."""
    cases = [case for case in CASES if LAYOUTS[case[1]].ranks == ranks]
    found = on_rank_processes(ranks, "layout_cases:all_trained", cases, limit_seconds=400)
    return dict(zip(cases, zip(*found, strict=True), strict=True))


@functools.cache
def of_one_rank() -> dict[tuple[str, str], Trained]:
    [found] = on_rank_processes(1, "layout_cases:all_alone", CASES)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_ranks_train_what_one_rank_does(model: str, layout: str) -> None:
    right = of_one_rank()[model, layout]
    assert len(right.norms) == STEPS
    for ours in of_ranks(LAYOUTS[layout].ranks)[model, layout]:
        np.testing.assert_allclose(ours.losses, right.losses, rtol=RUN_LOSSES)
        np.testing.assert_allclose(ours.norms, right.norms, rtol=RUN_NORMS)
        assert ours.weights.keys() == right.weights.keys()
        for name, weight in right.weights.items():
            np.testing.assert_allclose(ours.weights[name], weight, atol=RUN_WEIGHTS, err_msg=name)
