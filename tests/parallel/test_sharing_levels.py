"""Ranks that share optimizer state, gradients or weights train as ranks that share nothing, and as one rank does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from rank_job import on_rank_processes
from sharing_cases import CASES, RESUMED_AT, STEPS, Trained, trained
from tolerances import RUN_LOCAL_NORMS, RUN_LOSSES, RUN_NORMS, RUN_WEIGHTS

from trainer.device.threads import set_up_cpu_threads
from trainer.parallel.connections import Connections
from trainer.parallel.host_group import CpuGroup

set_up_cpu_threads()  # before any tensor is made; see tests/parity/conftest.py

CLIPPED, EXPERTS, MATRICES, STAGES, SEQUENCES, OPERATORS = CASES
LONG = RESUMED_AT + 2
JOBS: dict[int, dict[str, tuple[list[str], list[int]]]] = {
    # ranks -> case -> levels and the steps of each
    2: {
        CLIPPED: (["", "level1", "level2 level3", "level3 level1"], [STEPS + 1, STEPS + 1, LONG, LONG]),
        EXPERTS: (["level2", "level3"], [STEPS] * 2),
        SEQUENCES: (["level1", "level3"], [STEPS] * 2),
        OPERATORS: (["level2"], [STEPS]),
    },
    4: {MATRICES: (["level1", "level3"], [STEPS] * 2)},
    8: {STAGES: (["level1", "level3"], [STEPS] * 2)},
}


@functools.cache
def of_ranks(ranks: int) -> list[dict[str, Any]]:
    """Returns the training of each rank: one job for all cases."""
    return on_rank_processes(ranks, "sharing_cases:all_trained", JOBS[ranks], CLIPPED if ranks == 2 else "")


@functools.cache
def of_one_rank(case: str) -> Trained:
    [one] = trained(CpuGroup(Connections(0, {}), [0]), case, [""], [LONG if case == CLIPPED else STEPS])
    return one


@pytest.mark.parametrize("case", [CLIPPED, EXPERTS, OPERATORS])
def test_losses_norms_and_weights_are_those_of_one_rank(case: str) -> None:
    one, levels = of_one_rank(case), JOBS[2][case][0]
    first, second = (rank[case] for rank in of_ranks(2))
    for level, ours, theirs in zip(levels, first, second, strict=True):
        compare(ours, one)
        same(ours, theirs)
        check_shares(case, ours, one, level.split())
        if case == CLIPPED:
            assert ours.overflows == [number == 0 for number in range(len(ours.losses))]
    if case == CLIPPED:
        same_weights(first[1], first[0])  # these two make the same sums in the same order


@pytest.mark.parametrize(("ranks", "case"), [(4, MATRICES), (8, STAGES), (2, SEQUENCES)])
def test_ranks_that_divide_the_model_share_too(ranks: int, case: str) -> None:
    one, every, levels = of_one_rank(case), [rank[case] for rank in of_ranks(ranks)], JOBS[ranks][case][0]
    for ours in every:
        for level, found, first in zip(levels, ours, every[0], strict=True):
            compare(found, one)
            same(found, first)
            own = sum(found.state_sizes.values())
            assert own < 0.6 * sum(one.state_sizes.values())
            assert found.gradients == own if level == "level3" else found.gradients > own


def test_mistakes_are_seen() -> None:
    one, first = of_one_rank(CLIPPED), of_ranks(2)[0]
    mistakes = first.keys() - JOBS[2].keys()
    assert len(mistakes) == 3
    for mistake in mistakes:
        if isinstance(result := first[mistake], str):
            assert "the loss is nan" in result, mistake
            continue
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            compare(result, one)


def compare(ours: Trained, one: Trained) -> None:
    """Compares all steps, and the state after them unless the one rank has done more steps."""
    steps = len(ours.losses)
    close(ours.losses, one.losses[:steps], RUN_LOSSES)
    close(ours.norms, one.norms[:steps], RUN_NORMS)
    assert ours.overflows == one.overflows[:steps] and ours.local_norms.keys() == one.local_norms.keys()
    if steps < len(one.losses):
        return
    close(ours.evaluated, one.evaluated, RUN_LOSSES)
    close(list(ours.local_norms.values()), list(one.local_norms.values()), RUN_LOCAL_NORMS)
    assert ours.weights.keys() == one.weights.keys()
    for name, weight in one.weights.items():
        np.testing.assert_allclose(ours.weights[name], weight, atol=RUN_WEIGHTS, err_msg=name)


def same(ours: Trained, theirs: Trained) -> None:
    """Checks that all ranks see the same numbers."""
    for field in ("losses", "norms", "evaluated", "local_norms"):
        np.testing.assert_equal(getattr(ours, field), getattr(theirs, field))


def same_weights(ours: Trained, theirs: Trained) -> None:
    assert ours.losses == theirs.losses
    assert all(np.array_equal(weight, theirs.weights[name]) for name, weight in ours.weights.items())


def check_shares(case: str, ours: Trained, one: Trained, levels: list[str]) -> None:
    """Checks that a rank has half of the state from level 1 on, and half of the gradients from level 2 on."""
    least = 1024 * CASES[case].get("threshold", 0) // 4
    sizes = one.state_sizes
    halves = {name: size // 2 if levels and size >= least else size for name, size in sizes.items()}
    assert ours.state_sizes == halves
    shared = bool(levels) and levels[-1] != "level1"
    assert ours.gradients == (sum(halves.values()) if shared else one.gradients)


def close(ours: Any, theirs: Any, tolerance: float) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)
