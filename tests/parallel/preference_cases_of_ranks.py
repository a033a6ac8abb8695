"""What two ranks train with a loss of preferences or a teacher: each has other pairs or labels, and unequally many."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from pipeline_cases import world_of_group  # noqa: E402
from preference_cases import loss_of, pair_batch  # noqa: E402
from tiny_trainer import config_of, make_batch  # noqa: E402

from trainer.data.batches.batch import AnyBatch, concatenate  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.run.session import open_training  # noqa: E402

STEPS = 3


def batches(kind: str) -> list[AnyBatch]:
    """Returns the batch of each rank."""
    if kind == "distillation":
        return [make_batch(1, 9), make_batch(2, 4)]
    references = pair_batch(3, [(1,) * 4]).reference
    return [pair_batch(1, [(2, 3, 4, 3)]), pair_batch(2, [(6, 4)])._replace(reference=references)]


def trained(group: ProcessGroup | None, kind: str, level: str = "", teacher: str = "") -> list[list[float]]:
    """Returns loss, tokens, norm and rewards of each step; without a group of one rank with the pairs of both."""
    sections = {"optimizer": {"eps": 1e-5}, "seed": 5}
    if teacher:
        sections["loss"] = {"type": kind, "teacher": teacher}
    else:
        sections["loss"] = loss_of(kind)
    if group is not None:
        shared = {"parallel_optimizer_threshold": 0, "optimizer_level": level or "level1"}
        sections |= {"parallel": {"enable_parallel_optimizer": bool(level), "parallel_optimizer_config": shared}}
    step = open_training(config_of(**sections), lambda update: 0.01, None, world_of_group(group), "CPU", group)
    if group is None:
        batch = concatenate(*batches(kind))
    else:
        batch = batches(kind)[group.rank]
    found = [step([batch]) for _ in range(STEPS)]
    return [[one.loss, one.tokens, one.global_norm, *one.losses.values()] for one in found]


def all_trained(group: ProcessGroup, cases: list[tuple[str, str, str]]) -> list[list[list[float]]]:
    return [trained(group, *case) for case in cases]


def all_alone(group: ProcessGroup, cases: list[tuple[str, str, str]]) -> list[list[list[float]]]:
    return [trained(None, kind, teacher=teacher) for kind, _, teacher in cases]
