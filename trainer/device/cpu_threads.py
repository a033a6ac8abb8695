"""How MindSpore's CPU runtime uses its threads: as many as there are cores compute, and no other one spins.

As installed, MindSpore 2.10 on a machine with few cores runs operators in the calling thread, which hands the work to
a pool and then polls for its end, and its queues poll while they are empty. Each poller takes time from the threads
that compute: on two cores a step takes up to twice as long.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import mindspore
import numpy as np

_RUNTIME_SETTINGS = "MS_DEV_RUNTIME_CONF"
_MOST_DISPATCH_THREADS = 5  # MindSpore's own default where there are cores enough


@functools.cache
def set_up_cpu_threads() -> None:
    """Configures the runtime, once a process and before the first compiled graph runs.

    - `launch_blocking`: operators start from the calling thread, without the asynchronous queues of PyNative mode.
    - Two dispatch threads or more: compiled graphs run in the pool while the caller sleeps.
    - No runtime pipeline: its launch queue polls at full speed.
    """
    mindspore.runtime.launch_blocking()
    cores = len(os.sched_getaffinity(0))
    if cores < 2 or _RUNTIME_SETTINGS in os.environ:
        return  # nothing to share, or the user knows better
    os.environ[_RUNTIME_SETTINGS] = "pipeline:False"
    try:
        # MindSpore reads the setting when the first graph runs, and then announces it and its thread numbers.
        with _silent():
            mindspore.runtime.dispatch_threads_num(min(cores, _MOST_DISPATCH_THREADS))
            _twice(mindspore.Tensor(np.ones(1, np.float32))).asnumpy()
    finally:
        del os.environ[_RUNTIME_SETTINGS]  # while it stands, every compilation is announced


@mindspore.jit
def _twice(x: mindspore.Tensor) -> mindspore.Tensor:
    return x + x


@contextmanager
def _silent() -> Iterator[None]:
    """Sends what C++ code writes to stdout and stderr nowhere. An exception inside still reaches the caller."""
    saved = {stream: os.dup(stream) for stream in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in saved:
            os.dup2(nowhere, stream)
        yield
    finally:
        for stream, original in saved.items():
            os.dup2(original, stream)
            os.close(original)
        os.close(nowhere)
