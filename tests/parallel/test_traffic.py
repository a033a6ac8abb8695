"""The bytes that the plan says a rank sends in a step are those on its sockets."""

from __future__ import annotations

from collections import Counter

import pytest
from rank_job import on_rank_processes
from tolerances import ROUTED_ROWS
from traffic_cases import CASES, HEAD_IN_BLOCKS, Sent, config_of_case

from trainer.config import Config
from trainer.config.checks.parallel import parallel_degrees
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import world_of
from trainer.plan.division import rank_groups
from trainer.plan.traffic import EVEN_ROWS, rank_traffic

_KINDS = {"all_gather_rows": "all_gather", "all_to_all_into": "all_to_all", "stage": "send",
          "all_reduce_into": "all_reduce", "complete_ranges": "all_gather", "reduce_scatter_range": "reduce_scatter"}


@pytest.fixture(scope="module")
def counted() -> dict[str, list[Sent]]:
    """Returns the measured bytes of each rank, by case."""
    found = {}
    for ranks in (2, 4):
        names = [name for name in CASES if ranks_of(name) == ranks]
        results = on_rank_processes(ranks, "traffic_cases:counted", names)
        found |= {name: [result[name] for result in results] for name in names}
    return found


def ranks_of(name: str) -> int:
    return parallel_degrees(config_of_case(name), world_of(1)).ranks


@pytest.mark.parametrize("name", CASES)
def test_the_plan_counts_what_is_sent(name: str, counted: dict[str, list[Sent]]) -> None:
    config = config_of_case(name)
    with HEAD_IN_BLOCKS:
        every = [planned(config, rank, ranks_of(name)) for rank in range(ranks_of(name))]
    for (expected, _), sent in zip(every, counted[name], strict=True):
        # The numbers of a step that all ranks need are float64; the rows of experts depend on their tokens.
        known = Counter[tuple]()
        for (ranks, kind, dtype), count in sent.items():
            if dtype != "float64" and kind != "all_to_all_into":
                known[ranks, _KINDS.get(kind, kind)] += count
        assert known == expected
    rows = [sum(count for (_, kind, _), count in sent.items() if kind == "all_to_all_into") for sent in counted[name]]
    assert sum(rows) == pytest.approx(sum(of_experts for _, of_experts in every), rel=ROUTED_ROWS)


def planned(config: Config, rank: int, ranks: int) -> tuple[Counter[tuple], int]:
    """Returns the planned bytes of a rank by group and collective, and those of experts."""
    world = world_of(ranks)
    mesh, found, of_experts = Mesh(parallel_degrees(config, world)), Counter[tuple](), 0
    groups = rank_groups(config, world, rank)
    for one in rank_traffic(config, world, "CPU", mesh.coordinate_of(rank)):
        if one.what == EVEN_ROWS:
            of_experts += one.bytes
            continue
        found[() if one.group == "pp" else tuple(groups[one.group]), one.collective] += one.bytes
    return found, of_experts
