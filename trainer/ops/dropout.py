"""Dropout masks from a counter-based generator: (seed, rank, step, micro-batch, site) determines a mask. NumPy only.

A resumed run draws the masks of the uninterrupted run, and recomputation draws the masks of the forward pass again.
Data-parallel ranks draw different masks; whatever must agree across ranks is drawn from the stream of rank 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_NUMBERS = 8  # numbers of 32 bits that Philox makes of one count
_DROPOUT_STREAM = 0xD0  # separates these numbers from all other uses of the seed


@dataclass(frozen=True)
class DropoutKey:
    """The key of the masks of one micro-batch: the run's seed, the data-parallel rank, the step (from 0) and the
    micro-batch of the step (from 0)."""

    seed: int
    rank: int
    step: int
    micro_batch: int


class MaskShard(NamedTuple):
    """The shard of a mask that one of several ranks needs."""

    number: int  # number of the shard, from 0
    indices: tuple[slice | np.ndarray, ...]
    """The indices of each dimension; at most one dimension has an array of indices instead of a slice."""

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of this shard of a mask of the given shape."""
        sizes = []
        for size, indices in zip(shape, self.indices, strict=True):
            if isinstance(indices, slice):
                sizes.append(len(range(size)[indices]))
            else:
                sizes.append(len(indices))
        return tuple(sizes)


class LocalHeads(NamedTuple):
    """The heads of one rank where tensor-parallel ranks have equally many: shard `number` of `heads` query heads, with
    their key/value heads."""

    number: int
    heads: int  # of the whole model
    kv_heads: int
    local_heads: int  # of this rank
    local_kv_heads: int


def dropout_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, shard: MaskShard | None = None
) -> np.ndarray:
    """Returns a float32 mask: 0 with probability `rate`, which is in [0, 1), and 1 / (1 - rate) otherwise.

    Args:
        site: Number of the place in the network that has dropout.
        shape: Shape of the whole mask.
        shard: Selects the part of the mask to return. Default None: the whole mask.
    """
    numbers = np.random.Generator(_stream(key, site)).random(shape, dtype=np.float32)
    if shard is not None:
        numbers = numbers[shard.indices]
    return (numbers >= np.float32(rate)) * np.float32(1 / (1 - rate))


def draw_mask_bits(key: DropoutKey, site: int, first: int, count: int) -> np.ndarray:
    """Returns `count` random uint32 numbers from which `dropout_mask` makes its elements `first`, `first` + 1, ...

    The elements are counted in the flattened mask. An element is kept where its number is at least `keep_threshold`.
    """
    block, skipped = divmod(first, _NUMBERS)
    bits = _stream(key, site, block).random_raw(-(-(skipped + count) // 2))
    return bits.view(np.uint32)[skipped : skipped + count]


def keep_threshold(rate: float) -> np.uint32:
    """Returns the smallest uint32 whose upper 24 bits, as a number in [0, 1), are at least the rate."""
    return np.uint32(math.ceil(np.float32(rate) * np.float32(1 << 24)) << 8)


def scores_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, local: LocalHeads | None = None
) -> np.ndarray:
    """Returns a dropout mask for the probabilities of the reference attention, [B*K, T*G, T].

    With `local`, `shape` is that of one rank's heads. The result is then that rank's shard of the mask that one rank
    with all heads would draw.
    """
    if local is None:
        return dropout_mask(key, site, shape, rate)
    rows = shape[0] // local.local_kv_heads
    length = shape[2]
    group = local.heads // local.kv_heads
    unsharded = dropout_mask(key, site, (rows * local.kv_heads, length * group, length), rate)
    first_key, first_query = divmod(local.number * local.local_heads, group)
    keys = slice(first_key, first_key + local.local_kv_heads)
    queries = slice(first_query, first_query + local.local_heads // local.local_kv_heads)
    shard = unsharded.reshape(rows, local.kv_heads, length, group, length)[:, keys, :, queries]
    return np.ascontiguousarray(shard).reshape(shape)


def mask_seed(key: DropoutKey, site: int, shard: int = 0) -> int:
    """Returns a seed from 0 to 2**63 - 1 for a device that draws the mask; each mask, and shard of it, has its own."""
    return int(_stream(key, site, shard).random_raw()) >> 1


def _stream(key: DropoutKey, site: int, block: int = 0) -> np.random.Philox:
    stream = [key.seed, _DROPOUT_STREAM + (key.rank << 8)]
    return np.random.Philox(key=stream, counter=[block, key.step, key.micro_batch, site])
