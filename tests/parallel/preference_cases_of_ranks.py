"""What two ranks train with a loss of preferences: each has other pairs, and unequally many."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from preference_cases import loss_of, pair_batch  # noqa: E402
from tiny_trainer import config_of  # noqa: E402

from trainer.data.batches.batch import PairBatch, concatenate  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.parallel.world import SINGLE_PROCESS, World  # noqa: E402
from trainer.run.session import open_training  # noqa: E402

STEPS = 3


def batches() -> list[PairBatch]:
    """Returns the batch of each rank."""
    references = pair_batch(3, [(1,) * 4]).reference
    return [pair_batch(1, [(2, 3, 4, 3)]), pair_batch(2, [(6, 4)])._replace(reference=references)]


def trained(group: ProcessGroup | None, kind: str, level: str = "") -> list[list[float]]:
    """Returns loss, tokens, norm and rewards of each step; without a group of one rank with the pairs of both."""
    sections = {"loss": loss_of(kind), "optimizer": {"eps": 1e-5}, "seed": 5}
    world = SINGLE_PROCESS
    if group is not None:
        world = World(group.rank, group.size, group.rank, group.size)
        shared = {"parallel_optimizer_threshold": 0, "optimizer_level": level or "level1"}
        sections |= {"parallel": {"enable_parallel_optimizer": bool(level), "parallel_optimizer_config": shared}}
    step = open_training(config_of(**sections), lambda update: 0.01, None, world, "CPU", group)
    if group is None:
        batch = concatenate(*batches())
    else:
        batch = batches()[group.rank]
    found = [step([batch]) for _ in range(STEPS)]
    return [[one.loss, one.tokens, one.global_norm, *one.losses.values()] for one in found]


def all_trained(group: ProcessGroup, cases: list[tuple[str, str]]) -> list[list[list[float]]]:
    return [trained(group, kind, level) for kind, level in cases]


def all_alone(group: ProcessGroup, cases: list[tuple[str, str]]) -> list[list[list[float]]]:
    return [trained(None, kind) for kind, _ in cases]
