"""Operators whose functions of rows are compiled for this processor (`rowwise.c`); oneDNN computes the products.

Where an array is not contiguous as a function needs it, oneDNN or NumPy computes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from trainer.arrays.numpy_operators import BFLOAT16, Activation, AdamWNumbers
from trainer.arrays.onednn import OneDnnOperators, address

_ADDRESS = ctypes.c_void_p
_SIZE = ctypes.c_long
_NUMBER = ctypes.c_float
_SIGNATURES = {
    "softmax": (_ADDRESS, _ADDRESS, _SIZE, _SIZE),
    "softmax_gradient": (_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _SIZE),
    "rms_scales": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _NUMBER),
    "rms_norm": (_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE),
    "rms_norm_gradient": (_ADDRESS,) * 5 + (_SIZE,) * 4,
    "gated": (_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, ctypes.c_int),
    "gated_gradient": (_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, ctypes.c_int),
    "rotate": (_ADDRESS, _ADDRESS, *(_SIZE,) * 6),
    "rotate_halves": (_ADDRESS, _ADDRESS, *(_SIZE,) * 6),
    "attend": (_ADDRESS,) * 8,
    "adamw": (*(_ADDRESS,) * 4, _SIZE, _ADDRESS),
    "to_bfloat16": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE),
    "to_float32": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE),
}

_FEW_QUERIES = 16  # of a head: more are products, which oneDNN computes faster


class CompiledOperators(OneDnnOperators):
    """Functions of rows in the library of `trainer.arrays.compiled.build`."""

    def __init__(self, onednn: ctypes.CDLL, rowwise: ctypes.CDLL) -> None:
        super().__init__(onednn)
        self.rowwise = rowwise
        for name, arguments in _SIGNATURES.items():
            function = getattr(rowwise, name)
            function.argtypes = arguments
            function.restype = None

    def softmax(self, x: np.ndarray, out: np.ndarray) -> None:
        if _are_contiguous(x, out):
            self.rowwise.softmax(address(x), address(out), x.size // x.shape[-1], x.shape[-1])
        else:
            super().softmax(x, out)

    def softmax_gradient(self, y: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        if _are_contiguous(y, grad, out):
            size = y.shape[-1]
            self.rowwise.softmax_gradient(address(y), address(grad), address(out), y.size // size, size)
        else:
            super().softmax_gradient(y, grad, out)

    def rms_scales(self, x: np.ndarray, eps: np.float32) -> np.ndarray:
        scale = np.empty(len(x), np.float32)
        self.rowwise.rms_scales(address(x), address(scale), *x.shape, _row_step(x), eps)
        return scale

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
        scale = np.ascontiguousarray(scale)
        self.rowwise.rms_norm(
            address(x), address(weight), address(scale), address(out), *x.shape, _row_step(x), _row_step(out)
        )

    def rms_norm_gradient(
        self, x: np.ndarray, weight: np.ndarray, scale: np.ndarray, grad: np.ndarray, work: np.ndarray
    ) -> np.ndarray:
        scale = np.ascontiguousarray(scale)
        weight_grad = np.zeros(x.shape[1], np.float32)
        self.rowwise.rms_norm_gradient(
            address(x), address(weight), address(scale), address(grad), address(weight_grad), *x.shape, _row_step(x),
            _row_step(grad),
        )  # fmt: skip
        return weight_grad

    def gated(self, gate: np.ndarray, up: np.ndarray, out: np.ndarray, activation: Activation = "silu") -> None:
        if _are_contiguous(gate, up, out):
            self.rowwise.gated(address(gate), address(up), address(out), gate.size, activation == "gelu")
        else:
            super().gated(gate, up, out, activation)

    def gated_gradient(
        self, gate: np.ndarray, up: np.ndarray, grad: np.ndarray, result: np.ndarray | None, work: np.ndarray,
        activation: Activation = "silu",
    ) -> None:  # fmt: skip
        at_result = None
        if result is not None:
            at_result = address(result)
        self.rowwise.gated_gradient(
            address(gate), address(up), address(grad), at_result, gate.size, activation == "gelu"
        )

    def rotate(self, x: np.ndarray, rotation: np.ndarray) -> None:
        self._rotate(self.rowwise.rotate, x, rotation)

    def rotate_halves(self, x: np.ndarray, rotation: np.ndarray) -> None:
        self._rotate(self.rowwise.rotate_halves, x, rotation)

    @staticmethod
    def _rotate(function: Callable[..., None], x: np.ndarray, rotation: np.ndarray) -> None:
        rows, heads, size = x.shape
        function(
            address(x), address(rotation), rows, heads, size // 2, x.strides[0] // x.itemsize,
            x.strides[1] // x.itemsize, rotation.strides[0] // x.itemsize,
        )  # fmt: skip

    def attend(
        self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None, cap: float | None,
        sinks: np.ndarray | None, out: np.ndarray,
    ) -> None:  # fmt: skip
        if q.shape[-2] > _FEW_QUERIES or cap is not None:
            super().attend(q, keys, values, mask, cap, sinks, out)
            return
        at_mask = None
        mask_steps = (0, 0)
        if mask is not None:
            at_mask = address(mask)
            mask_steps = mask.strides[0], mask.strides[-2]
        at_sinks = None
        if sinks is not None:
            at_sinks = address(sinks)
        scores = np.empty(keys.shape[-2] + 1, np.float32)
        steps = [step // q.itemsize for step in (*keys.strides[:-1], *values.strides[:-1], *mask_steps)]
        sizes = np.array([*q.shape[:3], *keys.shape[2:], values.shape[-1], *steps], np.int64)
        self.rowwise.attend(
            address(q), address(keys), address(values), at_mask, at_sinks, address(scores), address(out),
            address(sizes),
        )  # fmt: skip

    def adamw(
        self, weight: np.ndarray, first: np.ndarray, second: np.ndarray, gradient: np.ndarray, numbers: AdamWNumbers,
        work: np.ndarray,
    ) -> None:  # fmt: skip
        if not weight.size == first.size == second.size == gradient.size:
            raise ValueError(f"a gradient of {gradient.size} numbers for a weight of {weight.size}")
        values = np.array(numbers, np.float32)
        self.rowwise.adamw(
            address(weight), address(first), address(second), address(gradient), weight.size, address(values)
        )

    def cast(self, x: np.ndarray, out: np.ndarray) -> None:
        if self.has_avx512 or np.float16 in (x.dtype, out.dtype) or x.ndim > 2 or not _has_dense_rows(x, out):
            super().cast(x, out)
        elif out.dtype == BFLOAT16:
            self._cast(self.rowwise.to_bfloat16, x, out)
        else:
            self._cast(self.rowwise.to_float32, x, out)

    def _cast(self, function: Callable[..., None], x: np.ndarray, out: np.ndarray) -> None:
        rows = x.size // max(1, x.shape[-1])
        function(address(x), address(out), rows, x.shape[-1], _row_step(x), _row_step(out))


def _are_contiguous(*arrays: np.ndarray) -> bool:
    """Returns whether all arrays are float32 and contiguous."""
    return all(array.dtype == np.float32 and array.flags.c_contiguous for array in arrays)


def _has_dense_rows(*arrays: np.ndarray) -> bool:
    return all(array.strides[-1] == array.itemsize for array in arrays)


def _row_step(x: np.ndarray) -> int:
    """Returns the distance of the rows of an array, in numbers."""
    if x.ndim == 1:
        return x.shape[0]
    return x.strides[0] // x.itemsize
