"""Tensors in the host's memory as arrays, without a copy, the threads that compute on them, and rows of experts.

Results stand in memory of MindSpore's pool, which is used again and again: fresh memory from the operating system costs
a product another tenth of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from mindspore import Tensor, mint
from mindspore import dtype as mstype

from trainer.device.threads import HostThreads

MOST_MOVED = 128  # rows that a thread copies at once


@functools.cache
def host_threads() -> HostThreads:
    """One pool for all kernels of the process."""
    return HostThreads()


class Scratch:
    """Memory of each thread, used again and again."""

    def __init__(self, threads: int) -> None:
        self.memory = [np.empty(0, np.float32)] * threads

    def take(self, thread: int, rows: slice, *widths: int) -> Iterator[np.ndarray]:
        """Arrays of so many rows, one for each width, all of them in the memory of the thread."""
        size, start = rows.stop - rows.start, 0
        if self.memory[thread].size < size * sum(widths):
            self.memory[thread] = np.empty(size * sum(widths), np.float32)
        for width in widths:
            yield self.memory[thread][start : start + size * width].reshape(size, width)
            start += size * width


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


def expert_rows(counts_E: np.ndarray) -> list[tuple[int, slice]]:
    """Experts that have rows, and these."""
    ends = np.cumsum(counts_E)
    return [(expert, slice(ends[expert] - counts_E[expert], ends[expert])) for expert in np.flatnonzero(counts_E)]


def expert_parts(counts_E: np.ndarray, most: int) -> Iterator[tuple[int, slice]]:
    """Experts, and at most so many of their rows."""
    return ((expert, part) for expert, rows in expert_rows(counts_E) for part in parts(rows, most))


def take_tokens(x: np.ndarray, tokens: np.ndarray, out: np.ndarray) -> None:
    """out = x[tokens], and zeros where there is no such token."""
    np.take(x, tokens, axis=0, out=out, mode="clip")  # other modes copy `out`
    out[tokens == len(x)] = 0


def add_rows(y: np.ndarray, row_Nk: np.ndarray, gates_Nk: np.ndarray | None, out: np.ndarray) -> None:
    """out = the sum of each token's rows of y, weighted by the gates where there are some."""
    threads = host_threads()
    scratch = np.empty((threads.threads, MOST_MOVED, y.shape[1]), np.float32)

    def add(tokens: slice, thread: int) -> None:
        total, row = out[tokens], scratch[thread, : tokens.stop - tokens.start]
        for choice in range(row_Nk.shape[1]):
            into = row if choice else total
            np.take(y, row_Nk[tokens, choice], axis=0, out=into, mode="clip")
            if gates_Nk is not None:
                into *= gates_Nk[tokens, choice : choice + 1]
            if choice:
                total += row

    threads.run(parts(slice(0, len(out)), MOST_MOVED), add)
