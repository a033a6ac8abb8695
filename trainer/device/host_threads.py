"""Threads for NumPy's work on tensors in the host's memory. NumPy lets other threads run while it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import threadpoolctl

Item = TypeVar("Item")

_MOST_THREADS = 8  # memory is busy then


class HostThreads:
    """As many threads as this process has cores; each takes the next item when it has done one.

    NumPy's products then run in one thread each: threads of the BLAS library of their own would poll for work between
    two products, and take the time from those that compute.

    Args:
        threads: Another number of them.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS) if threads is None else threads
        self.pool = ThreadPoolExecutor(self.threads - 1, "host") if self.threads > 1 else None
        threadpoolctl.threadpool_limits(1, user_api="blas")

    def run(self, items: Iterable[Item], function: Callable[[Item, int], None]) -> None:
        """Calls function(item, number of the thread) for every item; items may run at the same time."""
        # A step of a list's iterator cannot be interrupted, so that no item is taken twice.
        left = iter(list(items))

        def take(thread: int) -> None:
            for item in left:
                function(item, thread)

        others = [self.pool.submit(take, thread) for thread in range(1, self.threads)] if self.pool else []
        take(0)
        for other in others:
            other.result()
