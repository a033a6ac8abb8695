"""Draws random numbers as a function of seed, purpose and index, independent of earlier draws."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """The purpose of random numbers; the streams of one seed are independent."""

    HELD_OUT = 1
    ORDER = 2
    SYNTHETIC = 3
    SOURCE_ORDER = 4  # the order of one of several sources


def random_bits(seed: int, stream: Stream, index: int, count: int) -> np.ndarray:
    """Draws `count` 64-bit numbers: uint64 [count].

    They are raw bits of Philox (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"), because numpy
    guarantees only these to stay the same in every version. The lowest 64 bits of `seed` are used; `index` is the
    number of a block of the stream, for example the epoch.
    """
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, stream], np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, index, 0, 0], np.uint64)).random_raw(count)


def random_order(seed: int, stream: Stream, index: int, count: int) -> np.ndarray:
    """Draws a permutation of 0 to `count` - 1: int64 [count]."""
    return np.argsort(random_bits(seed, stream, index, count), kind="stable")
