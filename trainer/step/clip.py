"""Clipping: by the global norm, by the norm of each parameter group, or element by element.

What is measured and multiplied are numbers that the kernels deliver; only clipping by value computes on gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspore import Tensor

    from trainer.config import RunnerWrapper


def global_norm(gradients: Iterable[Any], sum_of_squares: Callable[[Any], float]) -> float:
    """sqrt of the sum of all squared elements; `sum_of_squares` adds those of one gradient, in float32 or better."""
    return math.sqrt(math.fsum(sum_of_squares(gradient) for gradient in gradients))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of this norm down to `max_norm`; exactly 1.0 at or below it.

    The peer divides by max(norm, max_norm) + 1e-6, which shrinks every gradient a little; here not clipping is a no-op.
    """
    return max_norm / norm if norm > max_norm else 1.0


def clip(
    gradients: Sequence[Tensor],
    squares: Sequence[float],
    names: Sequence[str],
    wrapper: RunnerWrapper,
    group_of: Mapping[str, str],
    scale: float = 1.0,
) -> tuple[Sequence[Tensor], list[float]]:
    """What `runner_wrapper` does to the gradients of a window before the update.

    Args:
        gradients: One for each parameter, times `scale`; all finite. They are left as they are.
        squares: Sum of the squares of each of them, in float32 or better.
        names: Of the parameters.
        wrapper: Says whether and how to clip.
        group_of: Group of each parameter, see `trainer.optim.groups`; for `clip_by_group`.
        scale: Loss scale that is still in the gradients. Norms and values are compared without it.

    Returns:
        Gradients and a factor on each for the update, which takes the scale out too: exactly 1 / scale where nothing
        is clipped.
    """
    if not wrapper.use_clip_grad:
        return gradients, [1.0 / scale] * len(names)
    if wrapper.clip_type == "value":
        limit = wrapper.clip_value * scale
        return [clip_by_value(gradient, limit) for gradient in gradients], [1.0 / scale] * len(names)
    groups = [group_of[name] if wrapper.clip_by_group else "" for name in names]
    coefficients = {}
    for group in dict.fromkeys(groups):
        own = (square for square, its in zip(squares, groups, strict=True) if its == group)
        coefficients[group] = clip_coefficient(global_norm(own, float) / scale, wrapper.max_grad_norm)
    return gradients, [coefficients[group] / scale for group in groups]


def clip_by_value(gradient: Tensor, limit: float) -> Tensor:
    """Every element brought to between -limit and limit."""
    from mindspore import Tensor, ops

    # Bounds as tensors: MindSpore keeps a kernel for every new Python number, and loss scales come and go.
    low, high = (Tensor(bound, gradient.dtype) for bound in (-limit, limit))
    return ops.minimum(ops.maximum(gradient, low), high)
