"""Norms of weights and optimizer state, for records of the training state (`monitor_config`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainer.optim.groups import parameter_of
from trainer.parallel.sharding import ShardedArray

if TYPE_CHECKING:
    from trainer.parallel.communicator import Communicator
    from trainer.step.train_step import CheckpointShard

_BLOCK = 1 << 16  # numbers that are summed in float32, before the sums are added in float64


def norm_of_weights(saved: CheckpointShard, names: Sequence[str], communicator: Communicator) -> float:
    """L2 norm of all parameters with these names together; all ranks call it.

    Args:
        saved: What each rank writes of a checkpoint: every number is in that of one rank.
        names: The same on all ranks, wherever their parameters are.
    """
    own = math.fsum(_squares(saved.weights[name]) for name in names if name in saved.weights)
    return math.sqrt(communicator.all_reduce_exact([own])[0])


def norms_of_state(
    saved: CheckpointShard, kinds: Sequence[str], names: Sequence[str], communicator: Communicator
) -> dict[str, dict[str, float]]:
    """L2 norm of each array of the optimizer, by kind and parameter; all ranks call it."""
    own: dict[tuple[str, str], float] = {}
    for key, array in saved.optimizer.items():
        own[key.partition(".")[0], parameter_of(key)] = _squares(array)
    every = [(kind, name) for kind in kinds for name in names]
    local_sums = [own.get(each, 0.0) for each in every]
    sums = communicator.all_reduce_exact(local_sums + [float(each in own) for each in every])
    found: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for (kind, name), total, holders in zip(every, sums, sums[len(every) :], strict=False):
        if holders:  # Muon has none of AdamW's arrays for its matrices
            found[kind][name] = math.sqrt(total)
    return found


def _squares(array: np.ndarray | ShardedArray) -> float:
    flat = (array.array if isinstance(array, ShardedArray) else array).reshape(-1)
    blocks = (flat[begin : begin + _BLOCK].astype(np.float32, copy=False) for begin in range(0, flat.size, _BLOCK))
    return math.fsum(float(np.vdot(block, block)) for block in blocks)
