"""bfloat16 in NumPy, which lacks it: the upper halves of float32 numbers, as uint16."""

from __future__ import annotations

import numpy as np


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    """Rounds float32 numbers to bfloat16 (nearest, ties to even), as uint16 of the same shape; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(array), bits >> 16 | 0x40, rounded).astype(np.uint16)


def as_float32(array: np.ndarray) -> np.ndarray:
    """Converts bfloat16 numbers, given as uint16, to float32 without loss."""
    return (array.astype(np.uint32) << 16).view(np.float32)
