"""How the frozen matrices under adapters are in memory, and how many bytes they take. Without NumPy, for the plan."""

from __future__ import annotations

from typing import Literal, TypeAlias

BaseDtype: TypeAlias = Literal["bfloat16", "int8", "nf4"]
"""How a frozen matrix is in memory, if not in float32; `trainer.storage.quantized` explains it."""
BLOCK = 64
"""Numbers that share a scale."""
SCALE_BLOCK = 256
"""Scales of NF4 that share a scale of their own."""


def bytes_of(size: int, dtype: BaseDtype | None) -> int:
    """Returns the bytes of a matrix of `size` numbers in memory; None is float32."""
    blocks = -(-size // BLOCK)
    if dtype is None:
        return 4 * size
    if dtype == "bfloat16":
        return 2 * size
    if dtype == "int8":
        return size + 4 * blocks
    return -(-size // 2) + blocks + 4 * -(-blocks // SCALE_BLOCK)
