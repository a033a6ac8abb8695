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
    """Computes the L2 norm of all parameters with these names together; all ranks must call this.

    Args:
        saved: This rank's shard of a checkpoint: every number is in the shard of one rank.
        names: The same on all ranks, wherever their parameters are.
    """
    squares = math.fsum(_squares(saved.weights[name]) for name in names if name in saved.weights)
    return math.sqrt(communicator.all_reduce_exact([squares])[0])


def norms_of_state(
    saved: CheckpointShard, kinds: Sequence[str], names: Sequence[str], communicator: Communicator
) -> dict[str, dict[str, float]]:
    """Computes the L2 norm of each array of the optimizer, by kind and parameter; all ranks must call this."""
    squares: dict[tuple[str, str], float] = {}
    for key, array in saved.optimizer.items():
        squares[key.partition(".")[0], parameter_of(key)] = _squares(array)
    keys = [(kind, name) for kind in kinds for name in names]
    local_sums = [squares.get(each, 0.0) for each in keys]
    sums = communicator.all_reduce_exact(local_sums + [float(each in squares) for each in keys])
    norms: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for (kind, name), total, holders in zip(keys, sums, sums[len(keys) :], strict=False):
        if holders:  # Muon has none of AdamW's arrays for its matrices
            norms[kind][name] = math.sqrt(total)
    return norms


def _squares(array: np.ndarray | ShardedArray) -> float:
    if isinstance(array, ShardedArray):
        array = array.array
    flat = array.reshape(-1)
    blocks = (flat[begin : begin + _BLOCK].astype(np.float32, copy=False) for begin in range(0, flat.size, _BLOCK))
    return math.fsum(float(np.vdot(block, block)) for block in blocks)
