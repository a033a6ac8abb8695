"""Operators that are compiled for this processor: functions of rows (`rowwise.c`), attention in training
(`attention.c`), products (`products.c`), and what a prediction computes for few tokens (`prediction.c`). oneDNN
computes the other products.

Where an array is not contiguous as a function needs it, oneDNN or NumPy computes it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.addresses import DATA, address
from trainer.arrays.compiled.attention import CompiledAttention
from trainer.arrays.numpy_operators import BFLOAT16, AdamWNumbers
from trainer.arrays.onednn import LEAST_SIZE, OneDnnOperators, conflicts, layout

if TYPE_CHECKING:
    from trainer.config.schema.model import Activation

_ADDRESS = ctypes.c_void_p
_SIZE = ctypes.c_long
_NUMBER = ctypes.c_float
_SIGNATURES = {
    "softmax": (_ADDRESS, _ADDRESS, _SIZE, _SIZE),
    "softmax_gradient": (_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _SIZE),
    "rms_scales": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _NUMBER, ctypes.c_int),
    "rms_norm": (_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE, ctypes.c_int),
    "rms_norm_gradient": (*(_ADDRESS,) * 5, *(_SIZE,) * 4, ctypes.c_int),
    "gated": (_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, ctypes.c_int),
    "gated_gradient": (_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, ctypes.c_int),
    "weighted_gated_gradient": (*(_ADDRESS,) * 6, _SIZE, _SIZE),
    "add_to_blocks": (_ADDRESS, _ADDRESS, *(_SIZE,) * 5),
    "sum_rows": (*(_ADDRESS,) * 4, *(_SIZE,) * 3),
    "rotate": (_ADDRESS, _ADDRESS, *(_SIZE,) * 6, ctypes.c_int),
    "product": (_ADDRESS,) * 5,
    "attend": (_ADDRESS,) * 8,
    "few_rows_product": (_ADDRESS,) * 4,
    "adamw": (*(_ADDRESS,) * 4, _SIZE, _ADDRESS),
    "to_bfloat16": (_ADDRESS, _ADDRESS, *(_SIZE,) * 7),
    "to_float32": (_ADDRESS, _ADDRESS, *(_SIZE,) * 7),
}

_KINDS = ("silu", "gelu_pytorch_tanh", "relu2")  # of activations, by their numbers in rowwise.c
_INNER = 256  # of products.c
_PANEL = 32  # of panels.h, at most
_TILE_ROWS = 8  # of panels.h, at most
_MOST_ROWS = 512  # of a product: with more, those of a leave the second cache between two blocks of b
_PRODUCT_SCRATCH = _INNER * (4 * _PANEL + _MOST_ROWS + _TILE_ROWS) + 16
_FEW_ROWS = 16  # of a product or of a head's queries: with more, oneDNN is faster


class CompiledOperators(OneDnnOperators):
    """Functions in the library of `trainer.arrays.compiled.build`."""

    def __init__(self, onednn: ctypes.CDLL, compiled: ctypes.CDLL) -> None:
        super().__init__(onednn)
        self.compiled = compiled
        for name, arguments in _SIGNATURES.items():
            function = getattr(compiled, name)
            function.argtypes = arguments
            function.restype = None
        self.product_scratch = np.empty(_PRODUCT_SCRATCH, np.float32)
        self.attention = CompiledAttention(compiled)

    def _product(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
        """Multiplies in `products.c` where oneDNN without AVX-512 packs a transposed b, or competes for cache lines.

        oneDNN reads other matrices in place, and takes up to 7 % less time for them.
        """
        is_large = a.ndim == 2 and a.dtype == np.float32 and min(*a.shape, b.shape[1]) >= LEAST_SIZE
        if self.has_avx512 or not is_large:
            super()._product(a, b, out, accumulate)
            return
        order_a, step_a = layout(a)
        order_b, step_b = layout(b)
        if (order_a, order_b) != (b"N", b"T") and not conflicts(a, order_a, step_a, b, order_b, step_b):
            super()._product(a, b, out, accumulate)
            return
        steps = [stride // 4 for stride in (*a.strides, *b.strides, out.strides[0])]
        for first in range(0, len(a), _MOST_ROWS):
            rows = a[first : first + _MOST_ROWS]
            results = out[first : first + _MOST_ROWS]
            sizes = np.array([len(rows), *b.shape[::-1], *steps, accumulate], np.int64)
            self.compiled.product(*map(address, (rows, b, results, self.product_scratch, sizes)))

    def softmax(self, x: np.ndarray, out: np.ndarray) -> None:
        if _are_contiguous(x, out):
            self.compiled.softmax(address(x), address(out), x.size // x.shape[-1], x.shape[-1])
        elif out.dtype == BFLOAT16 and not self.has_avx512:
            buffer = self._float32_buffer(2, out)
            self.softmax(x, buffer)
            self.cast(buffer, out)
        else:
            super().softmax(x, out)

    def softmax_gradient(self, y: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        if _are_contiguous(y, grad, out):
            size = y.shape[-1]
            self.compiled.softmax_gradient(address(y), address(grad), address(out), y.size // size, size)
        elif out.dtype == BFLOAT16 and not self.has_avx512:
            buffer = self._float32_buffer(2, out)
            self.softmax_gradient(y, grad, buffer)
            self.cast(buffer, out)
        else:
            super().softmax_gradient(y, grad, out)

    def rms_scales(self, x: np.ndarray, eps: np.float32, centers: bool = False) -> np.ndarray:
        scale = np.empty(len(x), np.float32)
        self.compiled.rms_scales(address(x), address(scale), *x.shape, _row_step(x), eps, centers)
        return scale

    def rms_norm(
        self, x: np.ndarray, weight: np.ndarray, scale: np.ndarray, out: np.ndarray, centers: bool = False
    ) -> None:
        scale = np.ascontiguousarray(scale)
        self.compiled.rms_norm(
            address(x), address(weight), address(scale), address(out), *x.shape, _row_step(x), _row_step(out), centers
        )

    def rms_norm_gradient(
        self, x: np.ndarray, weight: np.ndarray, scale: np.ndarray, grad: np.ndarray, work: np.ndarray,
        centers: bool = False,
    ) -> np.ndarray:  # fmt: skip
        scale = np.ascontiguousarray(scale)
        weight_grad = np.zeros(x.shape[1], np.float32)
        self.compiled.rms_norm_gradient(
            address(x), address(weight), address(scale), address(grad), address(weight_grad), *x.shape, _row_step(x),
            _row_step(grad), centers,
        )  # fmt: skip
        return weight_grad

    def gated(
        self, gate: np.ndarray, up: np.ndarray | None, out: np.ndarray, activation: Activation = "silu"
    ) -> None:
        if _are_contiguous(gate, out) and (up is None or _are_contiguous(up)):
            self.compiled.gated(address(gate), _optional(up), address(out), gate.size, _KINDS.index(activation))
        else:
            super().gated(gate, up, out, activation)

    def gated_gradient(
        self, gate: np.ndarray, up: np.ndarray | None, grad: np.ndarray, result: np.ndarray | None, work: np.ndarray,
        activation: Activation = "silu",
    ) -> None:  # fmt: skip
        kind = _KINDS.index(activation)
        self.compiled.gated_gradient(address(gate), _optional(up), address(grad), _optional(result), gate.size, kind)

    def weighted_gated_gradient(
        self, gate: np.ndarray, up: np.ndarray, grad: np.ndarray, result: np.ndarray, work: np.ndarray,
        weight: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Computes row by row: three more passes over an expert's rows leave the cache. `work` is not used."""
        weight_grad = np.empty(len(gate), np.float32)
        self.compiled.weighted_gated_gradient(
            address(gate), address(up), address(grad), address(result), address(weight), address(weight_grad),
            *gate.shape,
        )  # fmt: skip
        return weight_grad

    def add_to_blocks(self, x: np.ndarray, added: np.ndarray) -> None:
        """Takes a fifth of NumPy's time, which calls a function for each row."""
        steps = [step // x.itemsize for step in x.strides[:2]]
        self.compiled.add_to_blocks(address(x), address(added), *x.shape, *steps)

    def sum_rows(self, x: np.ndarray, rows: np.ndarray, factors: np.ndarray | None, out: np.ndarray) -> None:
        """Takes half of NumPy's time, which writes and reads the sums for each choice."""
        rows = np.ascontiguousarray(rows, np.int32)
        if factors is not None:
            factors = np.ascontiguousarray(factors, np.float32)
        self.compiled.sum_rows(address(x), address(rows), _optional(factors), address(out), *rows.shape, x.shape[1])

    def rotate(self, x: np.ndarray, rotation: np.ndarray) -> None:
        self._rotate(x, rotation, halves=False)

    def rotate_halves(self, x: np.ndarray, rotation: np.ndarray) -> None:
        self._rotate(x, rotation, halves=True)

    def _rotate(self, x: np.ndarray, rotation: np.ndarray, *, halves: bool) -> None:
        rows, heads, size = x.shape
        steps = [step // x.itemsize for step in (*x.strides[:2], rotation.strides[0])]
        self.compiled.rotate(address(x), address(rotation), rows, heads, size // 2, *steps, halves)

    def shares(self, x: np.ndarray) -> bool:
        """Says so for what `prediction.c` computes."""
        return x.shape[-2] <= _FEW_ROWS and x.dtype == np.float32

    def few_rows_product(
        self, x: np.ndarray, weight: np.ndarray, out: np.ndarray, accumulate: bool = False, threads: int = 1
    ) -> None:
        """Multiplies in `prediction.c`; other rows, dtypes and layouts as in oneDNN or NumPy."""
        row, size = x.strides
        weight_row, weight_size = weight.strides
        out_row, out_size = out.strides
        # This is called seven times a layer and token: `_has_dense_rows` and `address` take as long as a small product.
        is_wide = self.shares(x) and weight.dtype == out.dtype == np.float32
        if not is_wide or not size == weight_size == out_size == 4:
            super().few_rows_product(x, weight, out, accumulate, threads)
            return
        sizes = np.array(
            [*x.shape, len(weight), row // 4, weight_row // 4, out_row // 4, accumulate, threads], np.int64
        )
        self.compiled.few_rows_product(id(x) + DATA, id(weight) + DATA, id(out) + DATA, id(sizes) + DATA)

    def attend(
        self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None, cap: float | None,
        sinks: np.ndarray | None, out: np.ndarray, threads: int = 1,
    ) -> None:  # fmt: skip
        if not self.shares(q) or cap is not None:
            super().attend(q, keys, values, mask, cap, sinks, out, threads)
            return
        mask_steps = (0, 0)
        if mask is not None:
            mask_steps = mask.strides[0], mask.strides[-2]
        scores = np.empty((threads, keys.shape[-2] + 1), np.float32)
        steps = [step // q.itemsize for step in (*keys.strides[:-1], *values.strides[:-1], *mask_steps)]
        sizes = np.array([*q.shape[:3], *keys.shape[2:], values.shape[-1], *steps, threads], np.int64)
        self.compiled.attend(
            address(q), address(keys), address(values), _optional(mask), _optional(sinks), address(scores),
            address(out), address(sizes),
        )  # fmt: skip

    def fused_attention(self, q: np.ndarray) -> CompiledAttention | None:
        """Returns the functions of attention.c for queries in float32."""
        if q.dtype == np.float32:
            return self.attention
        return None

    def adamw(
        self, weight: np.ndarray, first: np.ndarray, second: np.ndarray, gradient: np.ndarray, numbers: AdamWNumbers,
        work: np.ndarray,
    ) -> None:  # fmt: skip
        if not weight.size == first.size == second.size == gradient.size:
            raise ValueError(f"a gradient of {gradient.size} numbers for a weight of {weight.size}")
        values = np.array(numbers, np.float32)
        self.compiled.adamw(
            address(weight), address(first), address(second), address(gradient), weight.size, address(values)
        )

    def cast(self, x: np.ndarray, out: np.ndarray) -> None:
        are_contiguous = x.flags.c_contiguous and out.flags.c_contiguous
        fits = are_contiguous or (x.ndim <= 3 and _has_dense_rows(x, out))
        if self.has_avx512 or np.float16 in (x.dtype, out.dtype) or not fits:
            super().cast(x, out)
            return
        if are_contiguous:
            x = x.reshape(1, 1, -1)
            out = out.reshape(1, 1, -1)
        while x.ndim < 3:
            x = x[None]
            out = out[None]
        function = self.compiled.to_float32
        if out.dtype == BFLOAT16:
            function = self.compiled.to_bfloat16
        steps = [stride // array.itemsize for array in (x, out) for stride in array.strides[:2]]
        function(address(x), address(out), *x.shape, *steps)


def _are_contiguous(*arrays: np.ndarray) -> bool:
    """Returns whether all arrays are float32 and contiguous."""
    return all(array.dtype == np.float32 and array.flags.c_contiguous for array in arrays)


def _optional(array: np.ndarray | None) -> int | None:
    """Returns the address of an array, or None for NULL."""
    if array is None:
        return None
    return address(array)


def _has_dense_rows(*arrays: np.ndarray) -> bool:
    return all(array.strides[-1] == array.itemsize for array in arrays)


def _row_step(x: np.ndarray) -> int:
    """Returns the distance of the rows of an array, in elements."""
    return x.strides[0] // x.itemsize
