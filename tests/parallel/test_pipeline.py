"""Pipelines of 2 and 4 stages train what one process trains: four ranks as forked processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pipeline_cases import CASES, MUTATIONS, trained
from rank_job import on_rank_processes

from trainer.device.threads import set_up_cpu_threads

set_up_cpu_threads()  # before any tensor is made; see tests/parity/conftest.py

RANKS, STEPS = 4, 2


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return on_rank_processes(RANKS, "pipeline_cases:all_trained", list(CASES), STEPS)


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_what_one_process_trains(ranks: list[dict[str, dict[str, Any]]], name: str) -> None:
    right = trained(None, name, STEPS)
    for found in (rank[name] for rank in ranks):
        assert all(0 <= share < 1 for share in found["bubble"]) and found["bubble"] == ranks[0][name]["bubble"]
        assert found.keys() == right.keys()
        for key in found.keys() - {"weights", "bubble"}:
            limit = 1e-4 if "norm" in key else 1e-5
            np.testing.assert_allclose(found[key], right[key], rtol=limit, atol=1e-7, err_msg=key)
        for key, weight in found["weights"].items():
            np.testing.assert_allclose(weight, right["weights"][key], rtol=1e-4, atol=1e-5, err_msg=key)
    assert {key for rank in ranks for key in rank[name]["weights"]} == right["weights"].keys()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_seen(ranks: list[dict[str, dict[str, Any]]], name: str) -> None:
    case, _ = MUTATIONS[name]
    norms = [rank[name]["norm"][0] for rank in ranks]
    assert all(abs(norm / ranks[0][case]["norm"][0] - 1) > 1e-3 for norm in norms)
