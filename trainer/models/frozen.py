"""Frozen matrices of a base model in few bytes, which stand in the place of MindSpore's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.storage.base_dtypes import BaseDtype
from trainer.storage.quantized import QuantizedArray, quantize


class FrozenMatrix:
    """A matrix without gradient, which only native CPU layers read.

    Args:
        draw: Returns the float32 numbers that the matrix has until `set`; called when they are first needed.
    """

    requires_grad = False

    def __init__(self, name: str, shape: tuple[int, ...], dtype: BaseDtype, draw: Callable[[], np.ndarray]) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.draw = draw
        self._numbers: QuantizedArray | None = None

    @property
    def size(self) -> int:
        """Returns how many numbers the matrix has."""
        return math.prod(self.shape)

    @property
    def numbers(self) -> QuantizedArray:
        """Returns the matrix in few bytes."""
        if self._numbers is None:
            self._numbers = quantize(self.draw(), self.dtype)
        return self._numbers

    def set(self, numbers: QuantizedArray | np.ndarray) -> None:
        """Takes other numbers, which are quantized if they are float32."""
        if isinstance(numbers, np.ndarray):
            numbers = quantize(numbers, self.dtype)
        self._numbers = numbers

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numbers, dtype)
