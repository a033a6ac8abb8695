"""A layer with experts whose ranks hold some of them each, against one rank with all experts and all tokens."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from expert_parallel_cases import CASES, RANKS, computed, settings_of
from rank_job import on_rank_processes
from tolerances import SEVERAL_OPERATORS

from trainer.models.spec.shapes import moe_shapes

WAYS = ("", "cells, ")
UNKNOWN = {"cells, all tokens on all ranks"}  # a dispatcher that a device does not have


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[list[np.ndarray]]]]:
    return on_rank_processes(RANKS, "expert_parallel_cases:on_rank", list(CASES))


@functools.cache
def alone(name: str, rank: int) -> list[np.ndarray]:
    """Returns the results of one rank with all experts for the tokens of `rank`."""
    return computed(name, rank)


@pytest.mark.parametrize(("way", "name"), [(way, name) for way in WAYS for name in CASES if way + name not in UNKNOWN])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_rank_does(found: list, way: str, name: str, size: int) -> None:
    names = list(moe_shapes(settings_of(name)))
    for first in range(0, RANKS, size):
        ranks = range(first, first + size)
        outs, right_xs, *every_weight = zip(*(alone(name, rank) for rank in ranks), strict=True)
        right_out, right_x = np.concatenate(outs), np.concatenate(right_xs)
        right_weights = [sum(each) for each in every_weight]
        parts = [found[rank][way + name][0 if size == 2 else 1] for rank in ranks]
        close(np.concatenate([part[0] for part in parts]), right_out)
        close(np.concatenate([part[1] for part in parts]), right_x)
        for place, weight in enumerate(names):
            ours = [part[2 + place] for part in parts]
            close(np.concatenate(ours) if weight.startswith("mlp.experts.") else sum(ours), right_weights[place])


def close(ours: np.ndarray, right: np.ndarray) -> None:
    largest = max(1e-3, np.abs(right).max())
    np.testing.assert_allclose(ours, right, rtol=SEVERAL_OPERATORS, atol=SEVERAL_OPERATORS * largest)
