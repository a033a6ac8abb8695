"""Pipelines, alone and together with each other way to divide a model, train what one process trains: forked processes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from pipeline_cases import CASES, MUTATIONS, PREDICTING, SAME, config_of_case, steps_of, trained
from rank_job import on_rank_processes
from tolerances import NEAR_ZERO, RUN_LOSSES, RUN_NORMS, RUN_STAGE_WEIGHTS

from trainer.config import preflight
from trainer.device.threads import set_up_cpu_threads
from trainer.parallel.world import world_of

set_up_cpu_threads()  # before any tensor is made; see tests/parity/conftest.py


@functools.cache
def of_ranks(number: int) -> list[dict[str, Any]]:
    """Returns the training of each rank: one job for all cases of so many ranks."""
    names = [name for name in CASES if ranks_of(name) == number]
    return on_rank_processes(number, "pipeline_cases:all_trained", names, limit_seconds=400)


@functools.cache
def of_one_process(name: str) -> dict[str, Any]:
    return trained(None, name, steps_of(name))


def ranks_of(name: str) -> int:
    return CASES[name].get("ranks", 4)


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_what_one_process_trains(name: str) -> None:
    preflight(config_of_case(name, use_parallel=True), world_of(ranks_of(name)))
    ranks, right = of_ranks(ranks_of(name)), of_one_process(SAME.get(name, name))
    for found in (rank[name] for rank in ranks):
        assert all(0 <= share < 1 for share in found["bubble"]) and found["bubble"] == ranks[0][name]["bubble"]
        assert found.keys() == right.keys() - (set() if name in PREDICTING else {"new tokens"})
        for key in found.keys() - {"weights", "bubble"}:
            limit = RUN_NORMS if "norm" in key else RUN_LOSSES
            np.testing.assert_allclose(found[key], right[key], rtol=limit, atol=NEAR_ZERO, err_msg=key)
        for key, (part, weight) in found["weights"].items():
            _, whole = right["weights"][key]
            np.testing.assert_allclose(weight, whole[part], rtol=RUN_NORMS, atol=RUN_STAGE_WEIGHTS, err_msg=key)
    assert {key for rank in ranks for key in rank[name]["weights"]} == right["weights"].keys()
    for mistake in MUTATIONS.get(name, ()):
        assert all(abs(rank[mistake]["norm"][0] / right["norm"][0] - 1) > 1e-3 for rank in ranks), mistake
