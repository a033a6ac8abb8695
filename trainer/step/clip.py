"""Clipping: by the global norm, by the norm of each parameter group, or element by element.

Norms come from sums of squares that a kernel has computed, and the update applies the factors; only clipping by value
computes on gradients here.
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

    MindSpore Transformers divides by max(norm, max_norm) + 1e-6, which shrinks every gradient a little; here not
    clipping is a no-op.
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
    """Clips the gradients of a window as `runner_wrapper` says.

    Args:
        gradients: One for each of `names`, times `scale`; all finite. They are not changed in place.
        squares: Sum of squares of each gradient, in float32 or better.
        group_of: Group of each parameter, for `clip_by_group`.
        scale: Loss scale that the gradients still contain. Norms and values are compared without it.

    Returns:
        The gradients, and for each a factor that the update applies. The factor also removes the loss scale: it is
        exactly 1 / scale where nothing is clipped.
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
    """Limits every element to the range from -limit to limit."""
    from mindspore import Tensor, ops

    # Bounds as tensors: MindSpore keeps a kernel for every new Python number, and a loss scale changes often.
    low, high = (Tensor(bound, gradient.dtype) for bound in (-limit, limit))
    return ops.minimum(ops.maximum(gradient, low), high)
