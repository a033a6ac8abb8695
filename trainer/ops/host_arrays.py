"""Tensors in the host's memory as arrays, without a copy, and the threads that compute on them.

Results stand in memory of MindSpore's pool, which is used again and again: fresh memory from the operating system costs
a product another tenth of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from mindspore import Tensor, mint
from mindspore import dtype as mstype

from trainer.host_threads import HostThreads


@functools.cache
def host_threads() -> HostThreads:
    """One pool for all kernels of the process."""
    return HostThreads()


def empty(*shape: int) -> tuple[Tensor, np.ndarray]:
    """A float32 tensor in the host's memory, and the array that writes to it."""
    tensor = mint.empty(shape, dtype=mstype.float32, device="CPU")
    return tensor, tensor.asnumpy()


def on_host(tensor: Tensor, rounded_to=mstype.float32) -> np.ndarray:
    """The numbers of a tensor in float32, only to be read."""
    return cast(cast(tensor, rounded_to), mstype.float32).asnumpy()


def cast(tensor: Tensor, dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def parts(rows: slice, most: int) -> Iterator[slice]:
    """Rows in portions that stay in a core's cache and keep all threads at work until the end."""
    for start in range(rows.start, rows.stop, most):
        yield slice(start, min(start + most, rows.stop))
