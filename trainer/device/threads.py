"""The threads on a CPU: those of MindSpore's runtime, and those of NumPy's work on tensors in the host's memory.

As installed, MindSpore 2.10 on a machine with few cores runs operators in the calling thread, which hands the work to a
pool and then polls for its end, and its queues poll while they are empty. Each polling thread takes time from the
threads that compute: on two cores a step takes up to twice as long. A rank with one core that waits for others would
spend a third of it on polling.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import mindspore
import numpy as np
import threadpoolctl

from trainer.parallel.world import is_scheduler

_RUNTIME_SETTINGS = "MS_DEV_RUNTIME_CONF"
_FEWEST_DISPATCH_THREADS = 2
_MOST_DISPATCH_THREADS = 5  # MindSpore's own default where there are cores enough
_MOST_HOST_THREADS = 8  # more do not help: memory is the limit

Item = TypeVar("Item")


@functools.cache
def set_up_cpu_threads() -> None:
    """Configures the runtime, once a process and before the first compiled graph runs.

    - `launch_blocking`: operators start from the calling thread, without the asynchronous queues of PyNative mode.
    - Two dispatch threads or more: compiled graphs run in the pool while the caller sleeps.
    - No runtime pipeline: its launch queue polls at full speed.
    """
    mindspore.runtime.launch_blocking()
    if _RUNTIME_SETTINGS in os.environ or is_scheduler():
        return  # the user knows better, or msrun's scheduler computes nothing
    threads = min(max(_FEWEST_DISPATCH_THREADS, len(os.sched_getaffinity(0))), _MOST_DISPATCH_THREADS)
    os.environ[_RUNTIME_SETTINGS] = "pipeline:False"
    try:
        # MindSpore reads the setting when the first graph runs, and then announces it and its thread numbers.
        with silent():
            mindspore.runtime.dispatch_threads_num(threads)
            _twice(mindspore.Tensor(np.ones(1, np.float32))).asnumpy()
    finally:
        del os.environ[_RUNTIME_SETTINGS]  # while it stands, every compilation is announced


@mindspore.jit
def _twice(x: mindspore.Tensor) -> mindspore.Tensor:
    return x + x


@contextmanager
def silent() -> Iterator[None]:
    """Discards what C++ code writes to stdout and stderr. An exception inside still reaches the caller."""
    saved = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        with open(os.devnull, "wb") as nowhere:
            for stream in saved:
                os.dup2(nowhere.fileno(), stream)
        yield
    finally:
        for stream, original in saved.items():
            os.dup2(original, stream)
            os.close(original)


class HostThreads:
    """A pool of one thread per core of this process; each thread takes the next item when it has finished one.

    NumPy lets other threads run while it computes. Its products then run in one thread each: the BLAS library's own
    threads would poll for work between two products, and take time from those that compute.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            threads = min(len(os.sched_getaffinity(0)), _MOST_HOST_THREADS)
        self.threads = threads
        self.pool: ThreadPoolExecutor | None = None
        if threads > 1:
            self.pool = ThreadPoolExecutor(threads - 1, "host")
        self.at_work = threading.local()  # whether a thread is inside `run`
        threadpoolctl.threadpool_limits(1, user_api="blas")

    def free(self) -> int:
        """Returns how many threads the caller may use: 1 inside `run`, where the others are busy."""
        if getattr(self.at_work, "number", None) is None:
            return self.threads
        return 1

    def run(
        self, items: Iterable[Item], function: Callable[[Item, int], None], size: Callable[[Item], int] | None = None
    ) -> None:
        """Calls function(item, number of the thread) for every item; items may run at the same time.

        If `function` itself calls this method, its thread takes all items: the other threads are busy. With `size` the
        largest items begin first: at the end no thread waits long for another one.
        """
        number = getattr(self.at_work, "number", None)
        if number is not None:
            for item in items:
                function(item, number)
            return
        # A step of a list's iterator cannot be interrupted, so that no item is taken twice.
        items = list(items)
        if size is not None:
            items.sort(key=size, reverse=True)
        left = iter(items)

        def take(thread: int) -> None:
            """Runs the function on the remaining items, one after the other."""
            self.at_work.number = thread
            try:
                with np.errstate(all="ignore"):  # what is not finite is found in the results, without warnings
                    for item in left:
                        function(item, thread)
            finally:
                self.at_work.number = None

        others = []
        if self.pool is not None:
            used = min(self.threads, len(items))
            others = [self.pool.submit(take, thread) for thread in range(1, used)]
        take(0)
        for other in others:
            other.result()
