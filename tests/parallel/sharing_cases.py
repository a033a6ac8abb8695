"""What a rank of test_sharing_levels.py trains: a tiny model whose optimizer state, gradients or weights the ranks share.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from tiny_trainer import TOKENS, config_of, make_batch  # noqa: E402

from trainer.config import Config  # noqa: E402
from trainer.parallel.collectives import Group  # noqa: E402
from trainer.parallel.world import SINGLE_PROCESS, World  # noqa: E402
from trainer.run import session  # noqa: E402
from trainer.step.train_step import TrainStep  # noqa: E402

MICRO_BATCHES = 2


class Trained(NamedTuple):
    """What a training has computed; weights and norms by name."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    local_norms: Mapping[str, float]
    weights: dict[str, np.ndarray]
    state: dict[str, np.ndarray]


def config(level: str, sections: Mapping[str, Any]) -> Config:
    sharing = {"optimizer_level": level, "parallel_optimizer_threshold": 0}
    parallel = {"enable_parallel_optimizer": bool(level), "parallel_optimizer_config": sharing if level else {}}
    return config_of(**({"parallel": parallel, "context": {"mode": 1}} | sections))


def open_step(config: Config, world: Group | None) -> TrainStep:
    """As a run opens it, with the ranks of `world` in the place of MindSpore's."""
    session.start = lambda _: world
    session.set_up_device = lambda *_: mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    job = SINGLE_PROCESS if world is None else World(world.rank, world.size, world.rank, world.size)
    return session.open_training(config, lambda update: 0.004, world=job, device="CPU")


def window(step: int, rank: int) -> list[Any]:
    """Micro-batches of a data-parallel rank; one of them has no label."""
    counts = [2 * TOKENS - 5, 0 if (rank, step) == (1, 1) else 7]
    return [make_batch(100 * step + 10 * rank + micro, counts[micro], rows=2) for micro in range(MICRO_BATCHES)]


def trained(world: Group, levels: list[str], sections: dict[str, Any], steps: int, ranks: int = 1) -> list[Trained]:
    """A training for each level, "" for none; a rank that is alone has the sequences of `ranks`."""
    return [_trained(world if world.size > 1 else None, config(level, sections), steps, ranks) for level in levels]


def _trained(world: Group | None, config: Config, steps: int, ranks: int) -> Trained:
    step = open_step(config, world)
    own = range(ranks) if world is None else [step.communicator.data_rank]
    results = [step([batch for rank in own for batch in window(number, rank)]) for number in range(steps)]
    saved = step.to_save()
    fields = ([getattr(result, field) for result in results] for field in ("loss", "global_norm", "loss_scale"))
    weights = {name: parameter.asnumpy().copy() for name, parameter in step.model.parameters_by_name.items()}
    return Trained(*fields, results[-1].local_norms or {}, weights, dict(saved.optimizer))
