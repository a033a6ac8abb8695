"""Parameter groups: which parameters decay, and which optimizer updates each. Pure Python: `plan` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.models.spec.names import EMBEDDING, HEAD


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same weight decay and optimizer."""

    name: str
    weight_decay: float
    parameters: tuple[str, ...]
    optimizer: str = "AdamW"


STATE_NAMES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",), "Muon": ("momentum_buffer",)}
"""The state arrays, of a parameter's size, that each optimizer keeps."""


def parameter_of(key: str) -> str:
    """Returns the parameter's name in the name of a state array, `kind.parameter`."""
    return key.split(".", 1)[1]


_NOT_FOR_MUON = (EMBEDDING, HEAD)
"""Each of their rows is the vector of one token, for which an orthogonalised update makes no sense."""


def parameter_groups(
    shapes: Mapping[str, tuple[int, ...]], weight_decay: float, optimizer: str = "AdamW"
) -> tuple[ParameterGroup, ...]:
    """Divides parameters into groups: matrices have weight decay; norm weights and biases have none.

    A bias has one axis, or two if the biases of experts are stacked. Muon leaves embeddings, head, norms and biases to
    AdamW.

    Args:
        shapes: The trainable parameters, by name.
        optimizer: The value of ``optimizer.type``.
    """
    decays = {name: len(shape) > 1 and not name.endswith(".bias") for name, shape in shapes.items()}
    matrices = tuple(name for name in shapes if decays[name])
    vectors = tuple(name for name in shapes if not decays[name])
    if optimizer != "Muon":
        return (
            ParameterGroup("matrices", weight_decay, matrices, optimizer),
            ParameterGroup("norms and biases", 0.0, vectors, optimizer),
        )
    # Three axes: the stacked matrices of a layer's experts.
    by_muon = tuple(name for name in matrices if len(shapes[name]) in (2, 3) and name not in _NOT_FOR_MUON)
    others = tuple(name for name in matrices if name not in by_muon)
    return (
        ParameterGroup("matrices, by Muon", weight_decay, by_muon, "Muon"),
        ParameterGroup("embedding and head, by AdamW", weight_decay, others),
        ParameterGroup("norms and biases, by AdamW", 0.0, vectors),
    )
