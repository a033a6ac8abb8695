"""Random numbers that are a function of what they are for, never of what was drawn before."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What random numbers are for: streams of one seed have nothing to do with each other."""

    HELD_OUT = 1
    ORDER = 2
    SYNTHETIC = 3


def random_bits(seed: int, stream: Stream, index: int, count: int) -> np.ndarray:
    """Draws `count` 64-bit numbers: uint64 [count].

    Raw bits of Philox (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"), because only these are
    promised to stay the same in every version of numpy.

    Args:
        seed: The run's; its lowest 64 bits count.
        stream: What the numbers are for.
        index: Which part of the stream, for example the epoch.
        count: How many.
    """
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, stream], np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, index, 0, 0], np.uint64)).random_raw(count)


def random_order(seed: int, stream: Stream, index: int, count: int) -> np.ndarray:
    """Draws a permutation of 0 to `count` - 1: int64 [count]."""
    return np.argsort(random_bits(seed, stream, index, count), kind="stable")
