"""Clipping: by the global norm, by the norm of each parameter group, or element by element.

Norms come from sums of squares that the device has computed, and the update applies the factors; only clipping by
value computes on gradients here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mindspore import Tensor

    from trainer.config.schema.runner import RunnerWrapper


class GradientNorms(NamedTuple):
    """Norms of the gradients of a step, times the loss scale that these contain."""

    total: float
    """Of all gradients together."""
    groups: Mapping[str, float] = {}
    """Of each parameter group, where these are clipped by themselves."""
    each: Mapping[str, float] | None = None
    """Of the single gradients, if they were asked for."""
    first_nonfinite: str = ""
    """The first gradient that is not finite."""


class NormGroups(NamedTuple):
    """Which norms a step needs: the indices of the gradients of each group, and whether those of the single ones."""

    names: Sequence[str]
    groups: Mapping[str, Sequence[int]]
    each: bool

    def norms(self, sums: np.ndarray) -> GradientNorms:
        """From what `square_sums` of `trainer.arrays.measures` describes."""
        (whole, *roots), index_from_end = np.sqrt(np.delete(sums, 1)).tolist(), int(sums[1])
        each = None
        if self.each:
            each = dict(zip(self.names, roots[len(self.groups) :], strict=True))
        of_groups = dict(zip(self.groups, roots, strict=False))
        return GradientNorms(whole, of_groups, each, self.names[-index_from_end] if index_from_end else "")


def norm_groups(names: Sequence[str], wrapper: RunnerWrapper, group_of: Mapping[str, str]) -> NormGroups:
    """The norms that `runner_wrapper` asks for, of the gradients of parameters with these names."""
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names) if wrapper.use_clip_grad and wrapper.clip_by_group else ():
        groups.setdefault(group_of[name], []).append(place)
    return NormGroups(names, groups, wrapper.local_norm)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of this norm down to `max_norm`; exactly 1.0 at or below it.

    MindSpore Transformers divides by max(norm, max_norm) + 1e-6, which shrinks every gradient a little; here not
    clipping is a no-op.
    """
    if norm > max_norm:
        return max_norm / norm
    return 1.0


def clip(
    gradients: Sequence[Tensor],
    norms: GradientNorms,
    names: Sequence[str],
    wrapper: RunnerWrapper,
    group_of: Mapping[str, str],
    scale: float = 1.0,
) -> tuple[Sequence[Tensor], list[float]]:
    """Clips the gradients of a window as `runner_wrapper` says.

    Args:
        gradients: One for each of `names`, times `scale`; all finite. They are not changed in place.
        norms: Those of the gradients that `norm_groups` asks for.
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
    own = [norms.groups[group_of[name]] if wrapper.clip_by_group else norms.total for name in names]
    factor_of = {norm: clip_coefficient(norm / scale, wrapper.max_grad_norm) / scale for norm in set(own)}
    return gradients, [factor_of[norm] for norm in own]


def clip_by_value(gradient: Tensor, limit: float) -> Tensor:
    """Limits every element to the range from -limit to limit."""
    from mindspore import Tensor, ops

    # Bounds as tensors: MindSpore keeps a kernel for every new Python number, and a loss scale changes often.
    low, high = (Tensor(bound, gradient.dtype) for bound in (-limit, limit))
    return ops.minimum(ops.maximum(gradient, low), high)
