"""bfloat16 in NumPy, which lacks it: the upper halves of float32 numbers, as uint16."""

from __future__ import annotations

import numpy as np


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(array), bits >> 16 | 0x40, rounded).astype(np.uint16)


def as_float32(array: np.ndarray) -> np.ndarray:
    """The same numbers in float32."""
    return (array.astype(np.uint32) << 16).view(np.float32)
