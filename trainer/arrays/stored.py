"""Matrices in few bytes as operands of products: threads decompress them in tiles of rows.

Layers get their matrices decompressed before each pass, into memory that the next layer uses again
(`Scratch.take_for_part`): that costs the same for any number of tokens, whereas a tile of tokens that decompressed them
itself would take a fourth of its product's time. The embedding and the head, which may be larger than all layers, are
decompressed some rows at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.memory import downcast_if_needed, host_threads, row_blocks
from trainer.arrays.numpy_operators import BFLOAT16
from trainer.arrays.operators import operators
from trainer.storage.bfloat16 import as_float32
from trainer.storage.quantized import QuantizedArray

if TYPE_CHECKING:
    from trainer.arrays.tiles import Scratch

_BLOCK_ELEMENTS = 1 << 16  # that a thread decompresses at once: they stay in its cache
_ALIGNED = 64  # elements: a matrix begins at a cache line
_THREAD = threading.local()


def stored_operands(
    stored: Mapping[str, tuple[QuantizedArray, type]], by_rows: Collection[str], scratch: Scratch
) -> dict[str, np.ndarray | StoredMatrix]:
    """Returns what the products of a part take: matrices themselves if they have the dtype, else decompressed copies.

    Args:
        stored: By name, the matrices and the dtypes of their products.
        by_rows: Names of matrices without a copy: who takes one decompresses some rows at a time.
        scratch: Has memory for the copies.
    """
    operands: dict[str, np.ndarray | StoredMatrix] = {}
    sizes: dict[str, int] = {}
    for name, (matrix, dtype) in stored.items():
        if matrix.dtype == "bfloat16" and dtype == BFLOAT16:
            operands[name] = matrix.codes.reshape(matrix.shape)
        elif name in by_rows:
            operands[name] = StoredMatrix(matrix, dtype)
        else:
            sizes[name] = -(-matrix.size // _ALIGNED) * _ALIGNED * np.dtype(dtype).itemsize // 4
    memory = scratch.take_for_part(sum(sizes.values()))
    end = 0
    for name, size in sizes.items():
        matrix, dtype = stored[name]
        flat: np.ndarray = memory[end : end + size].view(dtype)[: matrix.size]
        end += size
        decompress(matrix, flat)
        operands[name] = flat.reshape(matrix.shape)
    return operands


def decompress(matrix: QuantizedArray, flat: np.ndarray) -> None:
    """Writes a matrix, or stacked matrices, to a flat array in the dtype of products."""
    host_threads().run(
        row_blocks(slice(0, flat.size), _BLOCK_ELEMENTS), lambda part, thread: _read(matrix, part, flat[part])
    )


def _read(matrix: QuantizedArray, part: slice, out: np.ndarray) -> None:
    """Writes elements of a flattened matrix to `out`, rounded to its dtype; `part` begins at a multiple of `BLOCK`."""
    if matrix.dtype == "bfloat16" and out.dtype == np.float32:
        operators().cast(matrix.codes[part], out)
        return
    wide = out
    if out.dtype != np.float32:
        wide = _scratch(out.size)
    matrix.read(part.start, wide)
    downcast_if_needed(wide, out)


def _scratch(size: int) -> np.ndarray:
    """Returns float32 memory of this thread, valid until the next call."""
    block = getattr(_THREAD, "block", None)
    if block is None or block.size < size:
        block = _THREAD.block = np.empty(size, np.float32)
    return block[:size]


class StoredMatrix:
    """A large matrix in bfloat16 whose rows products take in another dtype.

    Attributes:
        quantized: The matrix, [rows, columns].
        dtype: Dtype of the products: float32 or float16.
    """

    def __init__(self, quantized: QuantizedArray, dtype: type) -> None:
        assert quantized.dtype == "bfloat16", "rows of others do not begin with a block"
        self.quantized = quantized
        self.dtype: np.dtype = np.dtype(dtype)
        self.shape = quantized.shape

    def __len__(self) -> int:
        return self.shape[0]

    def look_up(self, places_N: np.ndarray, out_NE: np.ndarray) -> None:
        """Writes rows of the matrix to a float32 array."""
        rows_NE = np.take(self.quantized.codes.reshape(self.shape), places_N, axis=0, mode="clip")
        out_NE[...] = as_float32(rows_NE)  # oneDNN would compile code for each number of rows

    def read_rows(self, rows: slice) -> np.ndarray:
        """Returns some rows in the dtype of products; the thread's next call may overwrite them."""
        size = (rows.stop - rows.start) * self.shape[1]
        if self.dtype == np.float32:
            return self._read_into(rows, _scratch(size))
        return self._read_into(rows, np.empty(size, self.dtype))

    def decompress_rows(self, rows: slice, out: np.ndarray) -> None:
        """Writes many rows, which threads share, to an array in the dtype of the products."""

        def read(part: slice, thread: int) -> None:
            """Decompresses some of the rows."""
            self._read_into(slice(rows.start + part.start, rows.start + part.stop), out[part].reshape(-1))

        host_threads().run(row_blocks(slice(0, len(out)), max(1, _BLOCK_ELEMENTS // self.shape[1])), read)

    def _read_into(self, rows: slice, flat: np.ndarray) -> np.ndarray:
        width = self.shape[1]
        _read(self.quantized, slice(rows.start * width, rows.stop * width), flat)
        return flat.reshape(-1, width)


def rows_of(matrix: np.ndarray | StoredMatrix, rows: slice) -> np.ndarray:
    """Returns some rows of a matrix in the dtype of products, valid until the thread's next call."""
    if isinstance(matrix, StoredMatrix):
        return matrix.read_rows(rows)
    return matrix[rows]
