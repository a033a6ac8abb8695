"""Dropout masks from counters, not from a state: (seed, rank, step, micro-batch, site) names a mask.

So a resumed run draws the masks that the uninterrupted one would have drawn, recomputation replays them, and
data-parallel ranks differ while everything that must agree across ranks uses rank 0's stream. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_DROPOUT_STREAM = 0xD0  # keeps these numbers apart from every other use of the seed


@dataclass(frozen=True)
class DropoutKey:
    """What names the masks of one micro-batch: the run's seed, the data-parallel rank, the optimizer step (from 0) and
    the micro-batch of its window (from 0)."""

    seed: int
    rank: int
    step: int
    micro_batch: int


def dropout_mask(key: DropoutKey, site: int, shape: tuple[int, ...], rate: float) -> np.ndarray:
    """Float32 mask: 0 with probability `rate`, in [0, 1), else 1 / (1 - rate).

    `site` numbers the places in the network that have dropout.
    """
    kept = np.random.Generator(_stream(key, site)).random(shape, dtype=np.float32) >= np.float32(rate)
    return kept * np.float32(1 / (1 - rate))


def mask_seed(key: DropoutKey, site: int) -> int:
    """A seed from 0 to 2**63 - 1 for a device that draws the mask itself, another one for each mask."""
    return int(_stream(key, site).random_raw()) >> 1


def _stream(key: DropoutKey, site: int) -> np.random.Philox:
    stream = [key.seed, _DROPOUT_STREAM + (key.rank << 8)]
    return np.random.Philox(key=stream, counter=[0, key.step, key.micro_batch, site])
