"""Parameter groups: which parameters decay, and which rule updates each. Pure Python: `plan` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.models.spec.names import EMBEDDING, HEAD


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a weight decay and an update rule."""

    name: str
    weight_decay: float
    parameters: tuple[str, ...]
    optimizer: str = "AdamW"


STATE_NAMES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",), "Muon": ("momentum_buffer",)}
"""The arrays of a parameter's size that each update rule keeps."""


def parameter_of(key: str) -> str:
    """The parameter of an array of the optimizer, by `kind.parameter`."""
    return key.split(".", 1)[1]


_NOT_FOR_MUON = (EMBEDDING, HEAD)
"""Their rows are vectors of single tokens, to which an orthogonalised update does not apply."""


def parameter_groups(
    shapes: Mapping[str, tuple[int, ...]], weight_decay: float, optimizer: str = "AdamW"
) -> tuple[ParameterGroup, ...]:
    """Matrices decay; norm weights and biases do not. A bias has one axis, or two where those of experts are stacked.

    Muon (`optimizer` is `optimizer.type`) leaves embeddings, head, norms and biases to AdamW.
    """
    decays = {name: len(shape) > 1 and not name.endswith(".bias") for name, shape in shapes.items()}
    matrices, vectors = (tuple(name for name in shapes if decays[name] == wanted) for wanted in (True, False))
    if optimizer != "Muon":
        return (
            ParameterGroup("matrices", weight_decay, matrices, optimizer),
            ParameterGroup("norms and biases", 0.0, vectors, optimizer),
        )
    # Three axes: the stacked matrices of a layer's experts.
    own = tuple(n for n in matrices if len(shapes[n]) in (2, 3) and n not in _NOT_FOR_MUON)
    others = tuple(name for name in matrices if name not in own)
    return (
        ParameterGroup("matrices, by Muon", weight_decay, own, "Muon"),
        ParameterGroup("embedding and head, by AdamW", weight_decay, others),
        ParameterGroup("norms and biases, by AdamW", 0.0, vectors),
    )
