"""Arrays in the host's memory, tensors as arrays without a copy, threads that compute on them, and rows of experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from trainer.arrays.arena import Arena
from trainer.arrays.numpy_operators import BFLOAT16
from trainer.arrays.operators import operators
from trainer.device.pool import reservable_bytes
from trainer.device.threads import HostThreads

_SMALL = 1 << 14  # elements of an array that NumPy makes faster, without asking the system
MOST_MOVED = 256  # rows that a thread copies at once
_CAST = 1 << 18  # elements that a thread casts at once


@functools.cache
def host_threads() -> HostThreads:
    """Returns the threads that all native CPU layers of the process share."""
    return HostThreads()


class _SharedMemory:
    """The memory of a contiguous float32 tensor for NumPy; an array that is made of it keeps it alive."""

    __slots__ = ("__array_interface__", "storage")

    def __init__(self, tensor: Tensor) -> None:
        # The storage, not the tensor: `set_data` gives a tensor other memory, and the array still has this one.
        self.storage = tensor.untyped_storage()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False), "shape": tensor.shape, "typestr": "<f4", "version": 3,
        }  # fmt: skip


def shared_array(tensor: Tensor) -> np.ndarray:
    """Returns the array that shares the memory of a tensor on the host; a copy of a tensor that is not contiguous.

    `Tensor.asnumpy` takes three times as long, and a step makes hundreds of arrays while the other threads wait.
    """
    if tensor.dtype is mstype.float32 and tensor.is_contiguous():
        return np.asarray(_SharedMemory(tensor))
    return tensor.asnumpy()


@functools.cache
def _arena() -> Arena:
    """Returns the memory that all large arrays of the process share."""
    return Arena(reservable_bytes())


def empty(*shape: int, dtype: np.dtype | type = np.float32) -> np.ndarray:
    """Returns an uninitialised array, a large one in memory of an earlier array."""
    if math.prod(shape) <= _SMALL:
        return np.empty(shape, dtype)
    return _arena().empty(shape, np.dtype(dtype))


def store(x: np.ndarray, out: np.ndarray) -> None:
    """Writes x to `out`, rounded to its dtype."""
    if downcast_if_needed(x, out) is x:
        out[...] = x


def downcast_if_needed(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Returns x if `out` is float32; otherwise writes x to `out`, rounded to its dtype, and returns `out`."""
    if out.dtype == np.float32:
        return x
    operators().cast(x, out)
    return out


def upcast_if_needed(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Returns x if it is float32; otherwise writes x to `out`, which is float32, and returns `out`."""
    if x.dtype == np.float32:
        return x
    operators().cast(x, out)
    return out


def narrow_like(x: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
    """Returns x if the dtype is float32, otherwise an uninitialised array of its shape in this dtype."""
    if dtype == np.float32:
        return x
    return empty(*x.shape, dtype=dtype)


def part_of(array: np.ndarray | None, index: Any) -> np.ndarray | None:
    """Returns array[index]; None stays None."""
    if array is None:
        return None
    return array[index]


def narrow_weight(weight_OI: np.ndarray, dtype: type = BFLOAT16) -> np.ndarray:
    """Returns a matrix in another dtype.

    Layers cast it for each use: that takes less than a hundredth of the time of a product with some hundred rows, and
    there is no copy that an update would have to change.
    """
    out_OI = empty(*weight_OI.shape, dtype=dtype)

    def narrow(rows: slice, thread: int) -> None:
        operators().cast(weight_OI[rows], out_OI[rows])

    host_threads().run(row_blocks(slice(0, len(weight_OI)), max(1, _CAST // weight_OI.shape[1])), narrow)
    return out_OI


def host_array(tensor: Tensor, rounded_to: mstype.Type = mstype.float32) -> np.ndarray:
    """Returns a tensor as a float32 array, rounded to a dtype first. It may share the tensor's memory: only read it."""
    if rounded_to != mstype.float32:
        tensor = cast(tensor, rounded_to)
    return shared_array(cast(tensor, mstype.float32))


def cast(tensor: Tensor, dtype: mstype.Type) -> Tensor:
    """Returns a tensor in another dtype: the same object if it has this dtype."""
    if tensor.dtype == dtype:
        return tensor
    return tensor.astype(dtype)


def row_blocks(rows: slice, size: int) -> Iterator[slice]:
    """Yields the rows in blocks of at most `size` rows."""
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def expert_rows(counts_E: np.ndarray) -> list[tuple[int, slice]]:
    """Returns each expert that has rows, with the slice of its rows."""
    ends = np.cumsum(counts_E)
    return [(expert, slice(ends[expert] - counts_E[expert], ends[expert])) for expert in np.flatnonzero(counts_E)]


def expert_blocks(counts_E: np.ndarray, size: int) -> Iterator[tuple[int, slice]]:
    """Yields blocks of at most `size` rows of one expert, with the expert."""
    return ((expert, block) for expert, rows in expert_rows(counts_E) for block in row_blocks(rows, size))


def take_tokens(x: np.ndarray, tokens: np.ndarray, out: np.ndarray) -> None:
    """Writes the rows `tokens` of x to `out`, and zeros for tokens equal to the number of rows."""
    np.take(x, tokens, axis=0, out=out, mode="clip")  # other modes copy `out`
    out[tokens == len(x)] = 0


def rows_of_tokens(x_ND: np.ndarray, token_R: np.ndarray) -> np.ndarray:
    """Returns the row of each token, [R, D], and zeros for rows without a token."""
    rows_RD = empty(len(token_R), x_ND.shape[1])

    def copy(rows: slice, thread: int) -> None:
        take_tokens(x_ND, token_R[rows], rows_RD[rows])

    host_threads().run(row_blocks(slice(0, len(token_R)), MOST_MOVED), copy)
    return rows_RD


def gates_of_rows(gates_Nk: np.ndarray, row_Nk: np.ndarray, rows: int) -> np.ndarray:
    """Returns the gate of each of the experts' rows, [R]; 0 for rows without a token."""
    gate_R = np.zeros(rows, np.float32)
    gate_R[row_Nk] = gates_Nk
    return gate_R


def combine_expert_rows(y: np.ndarray, row_Nk: np.ndarray, gates_Nk: np.ndarray | None, out: np.ndarray) -> None:
    """Writes the sum of each token's rows of y to `out`, weighted by the gates if there are any."""

    def add(tokens: slice, thread: int) -> None:
        operators().sum_rows(y, row_Nk[tokens], part_of(gates_Nk, tokens), out[tokens])

    host_threads().run(row_blocks(slice(0, len(out)), MOST_MOVED), add)
