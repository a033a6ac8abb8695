"""Parameter groups: which parameters decay. Pure Python: `plan` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a weight decay."""

    name: str
    weight_decay: float
    parameters: tuple[str, ...]


def parameter_groups(shapes: Mapping[str, tuple[int, ...]], weight_decay: float) -> tuple[ParameterGroup, ...]:
    """Matrices decay; norm weights and biases, which have one axis, do not.

    Args:
        shapes: Shape by parameter name, in the order of the model.
        weight_decay: Of the configuration.
    """
    matrices = tuple(name for name, shape in shapes.items() if len(shape) > 1)
    vectors = tuple(name for name, shape in shapes.items() if len(shape) <= 1)
    return (ParameterGroup("matrices", weight_decay, matrices), ParameterGroup("norms and biases", 0.0, vectors))
