"""Clipping by global norm. Pure arithmetic on numbers that the kernels deliver."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any


def global_norm(gradients: Iterable[Any], sum_of_squares: Callable[[Any], float]) -> float:
    """sqrt of the sum of all squared elements; `sum_of_squares` adds those of one gradient, in float32 or better."""
    return math.sqrt(math.fsum(sum_of_squares(gradient) for gradient in gradients))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of this norm down to `max_norm`; exactly 1.0 at or below it.

    The peer divides by max(norm, max_norm) + 1e-6, which shrinks every gradient a little; here not clipping is a no-op.
    """
    return max_norm / norm if norm > max_norm else 1.0
