"""Averages of weights on a CPU, with NumPy, one cache-sized block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from trainer.device.threads import HostThreads

_BLOCK = 1 << 17  # elements; see `trainer.ops.updates.adamw`

Pairs: TypeAlias = "Iterable[tuple[np.ndarray, np.ndarray]]"
"""Averages and weights, which are contiguous float32 arrays of the same size."""


class HostAveraging:
    """Changes averages and weights in place, with one thread for each core of this process.

    All operations are elementwise, so results have the same bits for any number of threads.
    """

    def __init__(self) -> None:
        self.threads = HostThreads()
        self.scratch = [np.empty(_BLOCK, np.float32) for _ in range(self.threads.threads)]

    def blend(self, pairs: Pairs, rate: float) -> None:
        """Computes average = average + rate x (weight - average)."""

        def blend_block(average: np.ndarray, weight: np.ndarray, difference: np.ndarray) -> None:
            """Blends one block of an average."""
            np.subtract(weight, average, out=difference)
            np.multiply(difference, np.float32(rate), out=difference)
            np.add(average, difference, out=average)

        self._run(pairs, blend_block)

    def exchange(self, pairs: Pairs) -> None:
        """Exchanges averages and weights."""

        def exchange_block(average: np.ndarray, weight: np.ndarray, copy: np.ndarray) -> None:
            """Exchanges one block."""
            copy[...] = weight
            weight[...] = average
            average[...] = copy

        self._run(pairs, exchange_block)

    def _run(self, pairs: Pairs, change: Callable[[np.ndarray, np.ndarray, np.ndarray], None]) -> None:
        """Calls `change` with each block of an average and its weight, and an array of that size to work in."""

        def run(block: tuple[np.ndarray, np.ndarray], thread: int) -> None:
            """Changes one block in a thread."""
            average, weight = block
            change(average, weight, self.scratch[thread][: average.size])

        flat = [(average.reshape(-1), weight.reshape(-1)) for average, weight in pairs]
        blocks = (
            (average[start : start + _BLOCK], weight[start : start + _BLOCK])
            for average, weight in flat
            for start in range(0, average.size, _BLOCK)
        )
        self.threads.run(blocks, run)
