"""Ranks that divide a model predict what one rank predicts."""

from __future__ import annotations

from prediction_cases import CASES, LAYOUTS, PROMPTS, predicted_alone
from rank_job import on_rank_processes
from tensor_parallel_cases import Layout, config

from trainer.config.checks.parallel import parallel_degrees
from trainer.parallel.mesh import Mesh, model_replica
from trainer.parallel.world import World


def test_every_rank_has_the_tokens_of_one_rank() -> None:
    every, right = on_rank_processes(4, "prediction_cases:predicted"), predicted_alone()
    for case, layouts in CASES.items():
        for layout in layouts:
            mesh = Mesh(parallel_degrees(config(case, Layout(**LAYOUTS[layout]), 4), World(0, 4, 0, 4)))
            for rank, found in enumerate(every):
                copy = model_replica(mesh, rank)
                likeliest, sampled = (half[copy.number :: copy.replicas] for half in halves(right[case, ""]))
                assert found[case, layout] == likeliest + sampled, (case, layout, rank)
    assert len({tuple(map(tuple, texts)) for texts in right.values()}) == len(CASES)
    assert all(likeliest != sampled for likeliest, sampled in map(halves, right.values()))


def halves(texts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    return texts[: len(PROMPTS)], texts[len(PROMPTS) :]
