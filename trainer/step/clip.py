"""Clipping: by the global norm, by the norm of each parameter group, or element by element.

Norms come from sums of squares that the device has computed, and the update applies the factors; only clipping by
value computes on gradients here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.optim.groups import matching_parameters

if TYPE_CHECKING:
    from mindspore import Tensor

    from trainer.config.schema.runner import RunnerWrapper


class GradientNorms(NamedTuple):
    """Norms of the gradients of a step, times the loss scale that these contain."""

    total: float
    """Norm of all gradients together (the total norm of PyTorch)."""
    groups: Mapping[str, float] = {}
    """Norm of each parameter group, where groups are clipped separately."""
    per_gradient: Mapping[str, float] | None = None
    """Norm of each gradient, if requested."""
    first_nonfinite: str = ""
    """Name of the first gradient that is not finite."""


class NormGroups(NamedTuple):
    """Which norms a step needs.

    Attributes:
        names: Names of the gradients.
        groups: Indices of the gradients of each group.
        per_gradient: The names of the gradients whose own norms are needed.
    """

    names: Sequence[str]
    groups: Mapping[str, Sequence[int]]
    per_gradient: Set[str]

    def norms(self, sums: np.ndarray) -> GradientNorms:
        """Computes the norms from the sums of `square_sums` in `trainer.arrays.measures`."""
        total, *roots = np.sqrt(np.delete(sums, 1)).tolist()
        index_from_end = int(sums[1])
        per_gradient = None
        if self.per_gradient:
            each = zip(self.names, roots[len(self.groups) :], strict=True)
            per_gradient = {name: norm for name, norm in each if name in self.per_gradient}
        first_nonfinite = ""
        if index_from_end:
            first_nonfinite = self.names[-index_from_end]
        return GradientNorms(total, dict(zip(self.groups, roots, strict=False)), per_gradient, first_nonfinite)


def norm_groups(names: Sequence[str], wrapper: RunnerWrapper, group_of: Mapping[str, str]) -> NormGroups:
    """Returns which norms `runner_wrapper` needs of the gradients of these parameters.

    Args:
        group_of: Group of each parameter, for `clip_by_group`.
    """
    groups: dict[str, list[int]] = {}
    if wrapper.use_clip_grad and wrapper.clip_by_group:
        for place, name in enumerate(names):
            groups.setdefault(group_of[name], []).append(place)
    per_gradient: Set[str] = frozenset()
    if isinstance(wrapper.local_norm, list):
        per_gradient = matching_parameters(names, wrapper.local_norm)
    elif wrapper.local_norm:
        per_gradient = frozenset(names)
    return NormGroups(names, groups, per_gradient)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Returns the factor that brings a gradient of this norm down to `max_norm`; exactly 1.0 at or below it.

    MindSpore Transformers divides by max(norm, max_norm) + 1e-6, which shrinks every gradient a little; here not
    clipping is a no-op.
    """
    if norm > max_norm:
        return max_norm / norm
    return 1.0


def clip(
    gradients: Sequence[Tensor], norms: GradientNorms, names: Sequence[str], wrapper: RunnerWrapper,
    group_of: Mapping[str, str], scale: float = 1.0,
) -> tuple[Sequence[Tensor], list[float]]:  # fmt: skip
    """Clips the gradients of a step as configured in `runner_wrapper`.

    Args:
        gradients: One for each of `names`, times `scale`; all finite. They are not changed in place.
        norms: The norms that `norm_groups` requests.
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
    norm_of_each = [norms.total] * len(names)
    if wrapper.clip_by_group:
        norm_of_each = [norms.groups[group_of[name]] for name in names]
    factors = {norm: clip_coefficient(norm / scale, wrapper.max_grad_norm) / scale for norm in set(norm_of_each)}
    return gradients, [factors[norm] for norm in norm_of_each]


def clip_by_value(gradient: Tensor, limit: float) -> Tensor:
    """Limits every element to the range from -limit to limit."""
    from mindspore import Tensor, ops

    # Bounds as tensors: MindSpore keeps a kernel for every new Python number, and a loss scale changes often.
    low, high = (Tensor(bound, gradient.dtype) for bound in (-limit, limit))
    return ops.minimum(ops.maximum(gradient, low), high)
