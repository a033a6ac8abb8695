"""Dropout masks from counters, not from a state: (seed, rank, step, micro-batch, site) names a mask.

So a resumed run draws the masks that the uninterrupted one would have drawn, recomputation replays them, and
data-parallel ranks differ while everything that must agree across ranks uses rank 0's stream. numpy only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_NUMBERS = 8  # of 32 bits that Philox makes of one count
_DROPOUT_STREAM = 0xD0  # keeps these numbers apart from every other use of the seed


@dataclass(frozen=True)
class DropoutKey:
    """What names the masks of one micro-batch: the run's seed, the data-parallel rank, the optimizer step (from 0) and
    the micro-batch of its window (from 0)."""

    seed: int
    rank: int
    step: int
    micro_batch: int


class MaskShard(NamedTuple):
    """The part of a mask that one of several ranks needs."""

    number: int  # of the part, from 0
    places: tuple[slice | np.ndarray, ...]
    """Of each dimension; an array of indices for one dimension at most."""

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of a mask of this shape."""
        pairs = zip(shape, self.places, strict=True)
        return tuple(len(range(size)[each] if isinstance(each, slice) else each) for size, each in pairs)


class LocalHeads(NamedTuple):
    """The heads of one of several ranks that have equally many: part `number` of `heads` query heads, with the keys and
    values that belong to them."""

    number: int
    heads: int  # of the whole model
    kv_heads: int
    own_heads: int  # of the rank
    own_kv_heads: int


def dropout_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, part: MaskShard | None = None
) -> np.ndarray:
    """Float32 mask: 0 with probability `rate`, in [0, 1), else 1 / (1 - rate).

    `site` numbers the places in the network that have dropout. With `part`, that part of the mask of this shape.
    """
    drawn = np.random.Generator(_stream(key, site)).random(shape, dtype=np.float32)
    kept = (drawn if part is None else drawn[part.places]) >= np.float32(rate)
    return kept * np.float32(1 / (1 - rate))


def drawn_bits(key: DropoutKey, site: int, first: int, count: int) -> np.ndarray:
    """The random bits behind the numbers from `first` on, so many, of the flat `dropout_mask` of this site, of whatever
    shape: uint32. A number is kept where its bits are at least `keep_threshold`."""
    block, skipped = divmod(first, _NUMBERS)
    drawn = _stream(key, site, block).random_raw(-(-(skipped + count) // 2))
    return drawn.view(np.uint32)[skipped : skipped + count]


def keep_threshold(rate: float) -> np.uint32:
    """The least of 32 random bits whose number in [0, 1), made of the upper 24, is not below the rate."""
    return np.uint32(math.ceil(np.float32(rate) * np.float32(1 << 24)) << 8)


def scores_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, own: LocalHeads | None = None
) -> np.ndarray:
    """As `dropout_mask`, for probabilities of the reference attention [B*K, T*G, T]; with `own` those of a rank, of the
    mask that one rank with all heads would draw."""
    if own is None:
        return dropout_mask(key, site, shape, rate)
    rows = shape[0] // own.own_kv_heads
    length = shape[2]
    group = own.heads // own.kv_heads
    whole = dropout_mask(key, site, (rows * own.kv_heads, length * group, length), rate)
    first_key, first_query = divmod(own.number * own.own_heads, group)
    keys = slice(first_key, first_key + own.own_kv_heads)
    queries = slice(first_query, first_query + own.own_heads // own.own_kv_heads)
    part = whole.reshape(rows, own.kv_heads, length, group, length)[:, keys, :, queries]
    return np.ascontiguousarray(part).reshape(shape)


def mask_seed(key: DropoutKey, site: int, part: int = 0) -> int:
    """A seed from 0 to 2**63 - 1 for a device that draws the mask itself, another one for each mask and part of it."""
    return int(_stream(key, site, part).random_raw()) >> 1


def _stream(key: DropoutKey, site: int, block: int = 0) -> np.random.Philox:
    stream = [key.seed, _DROPOUT_STREAM + (key.rank << 8)]
    return np.random.Philox(key=stream, counter=[block, key.step, key.micro_batch, site])
