"""Ranks that share optimizer state, gradients or weights train as ranks that share nothing, and as one rank does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_job import on_rank_processes
from sharing_cases import CASES, Trained

CLIPPED, EXPERTS, *DIVIDED = CASES
LEVELS = {CLIPPED: ["", "level1", "level2 level3", "level3 level1"], EXPERTS: ["level2", "level3"]}


@pytest.mark.parametrize("case", LEVELS)
def test_losses_norms_and_weights_are_those_of_one_rank(case: str) -> None:
    [[one]] = on_rank_processes(1, "sharing_cases:trained", case, [])
    levels = LEVELS[case]
    first, second = on_rank_processes(2, "sharing_cases:trained", case, levels)
    for level, ours, theirs in zip(levels, first, second, strict=True):
        compare(ours, one)
        same(ours, theirs)
        check_shares(case, ours, one, level.split())
        if case == CLIPPED:
            assert ours.overflows == [True, False, False]
    same_weights(first[1], first[0])  # these two make the same sums in the same order


@pytest.mark.parametrize("case", DIVIDED)
def test_ranks_that_divide_the_model_share_too(case: str) -> None:
    [[one]] = on_rank_processes(1, "sharing_cases:trained", case, [])
    ranks, levels = 2 if case == "sequences" else 4, ("level1", "level3")
    for ours in (every := on_rank_processes(ranks, "sharing_cases:trained", case, levels)):
        for level, found, first in zip(levels, ours, every[0], strict=True):
            compare(found, one)
            same(found, first)
            own = sum(found.state_sizes.values())
            assert own < 0.6 * sum(one.state_sizes.values())
            assert found.gradients == own if level == "level3" else found.gradients > own


def test_mistakes_are_seen() -> None:
    [[one]] = on_rank_processes(1, "sharing_cases:trained", CLIPPED, [])
    found, _ = on_rank_processes(2, "sharing_cases:mistaken", CLIPPED)
    assert len(found) == 3
    for mistake, result in found.items():
        if isinstance(result, str):
            assert "the loss is nan" in result, mistake
            continue
        with pytest.raises(AssertionError):
            compare(result, one)


def compare(ours: Trained, one: Trained) -> None:
    close(ours.losses, one.losses, 1e-5)
    close(ours.norms, one.norms, 1e-4)
    close(ours.evaluated, one.evaluated, 1e-5)
    assert ours.overflows == one.overflows and ours.local_norms.keys() == one.local_norms.keys()
    close(list(ours.local_norms.values()), list(one.local_norms.values()), 1e-3)
    assert ours.weights.keys() == one.weights.keys()
    for name, weight in one.weights.items():
        np.testing.assert_allclose(ours.weights[name], weight, atol=2e-5, err_msg=name)


def same(ours: Trained, theirs: Trained) -> None:
    """All ranks see the same numbers."""
    for field in ("losses", "norms", "evaluated", "local_norms"):
        np.testing.assert_equal(getattr(ours, field), getattr(theirs, field))


def same_weights(ours: Trained, theirs: Trained) -> None:
    assert ours.losses == theirs.losses
    assert all(np.array_equal(weight, theirs.weights[name]) for name, weight in ours.weights.items())


def check_shares(case: str, ours: Trained, one: Trained, levels: list[str]) -> None:
    """A rank has half of the state from level 1 on, and half of the gradients from level 2 on."""
    least = 1024 * CASES[case].get("threshold", 0) // 4
    sizes = one.state_sizes
    halves = {name: size // 2 if levels and size >= least else size for name, size in sizes.items()}
    assert ours.state_sizes == halves
    shared = bool(levels) and levels[-1] != "level1"
    assert ours.gradients == (sum(halves.values()) if shared else one.gradients)


def close(ours: Any, theirs: Any, tolerance: float) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)
