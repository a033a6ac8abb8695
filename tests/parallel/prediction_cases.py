"""What ranks of test_divided_prediction.py predict, and what one process predicts to compare."""

from __future__ import annotations

from typing import Any

from pipeline_cases import world_of_group
from tensor_parallel_cases import ALONE, Layout, config, spread

from trainer.models.generate import Generator, Sampling
from trainer.parallel.host_group import CpuGroup
from trainer.run.generation import local_replica
from trainer.run.session import open_session

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 4},
    "tensor with rows, twice": {"tensor": 2, "rows": True},
    "experts": {"experts": 4},
    "experts of two ranks, twice": {"experts": 2},
    "tensor and experts": {"tensor": 2, "experts": 4},
    "tensor, experts and context": {"tensor": 2, "context": 2, "experts": 2},
}
CASES = {
    "dense": ("tensor", "tensor with rows, twice"),
    "one key head, adapters": ("tensor",),
    "latent attention, adapters": ("tensor",),
    "Mixtral, shared gate, frozen": ("tensor with rows, twice", "experts", "tensor and experts"),
    "DeepSeek": ("experts of two ranks, twice", "tensor, experts and context"),
}
PROMPTS = [[1, 2, 3], [4], [5, 20, 7, 8], [9, 3]]
"""Each copy of the model continues its share of them."""
Predicted = dict[tuple[str, str], list[list[int]]]
"""(case, layout) -> the new tokens of each prompt that a rank continues."""


def predicted(world: CpuGroup) -> Predicted:
    return {(case, layout): _predicted(case, world, layout) for case, layouts in CASES.items() for layout in layouts}


def predicted_alone() -> Predicted:
    return {(case, ""): _predicted(case, None) for case in CASES}


def _predicted(case: str, world: CpuGroup | None, name: str = "") -> list[list[int]]:
    """Returns the likeliest tokens, then sampled ones."""
    ranks = 1 if world is None else world.size
    one = config(case, Layout(**LAYOUTS[name]) if name else ALONE, ranks, layers=2)  # DeepSeek's second has experts
    session = open_session(one, None, world_of_group(world), "CPU", world)
    spread(session.model, one.decoder, session.model.shard)
    copy = local_replica(session.communicator)
    generator = Generator(session.model, session.build_inputs, [], agree=copy.broadcast_tokens)
    found = []
    for sampling in (Sampling(), Sampling(do_sample=True, top_p=0.9, seed=3)):
        for row in range(copy.number, len(PROMPTS), copy.replicas):
            found.append([tokens[0] for tokens in generator.stream(PROMPTS[row : row + 1], [5], sampling, row)])
    return found
