"""Weights of matrix products in the dtype of the products, cast once a step and not at every use.

Parameters and optimizer state are float32. Where products compute in half precision, a matrix has a copy in that
dtype, from which its gradient comes too: as the product made it, in half precision. Where products compute in float32
there are no copies, and nothing here costs anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from trainer.models.shapes import EMBEDDING, EXPERT_DOWN_BIAS, ROUTER, SHARED_GATE

_IN_FLOAT32 = (ROUTER, SHARED_GATE, EXPERT_DOWN_BIAS)
_STACKED = "mlp.experts."


class ComputeWeights:
    """The copies of a model's weights.

    Args:
        parameters: All parameters of the model by name.
        dtype: Dtype of the matrix products.
        tied: Whether the embedding is the matrix of the head too. Rows are looked up in float32 all the same.
        experts: Whether the products of experts take copies.
    """

    def __init__(self, parameters: Mapping[str, Parameter], dtype: mstype.Type, *, tied: bool, experts: bool) -> None:
        self.masters, self.dtype = parameters, dtype
        self.copies: dict[str, Parameter] = {}
        for name, master in parameters.items() if dtype != mstype.float32 else ():
            # Adapters are multiplied by their factor first, which is float32.
            casts = master.ndim > 1 and ".lora_" not in name and not name.endswith(_IN_FLOAT32)
            if casts and (tied if name == EMBEDDING else experts or _STACKED not in name):
                self.copies[name] = Parameter(master.astype(dtype), f"compute.{name}", master.requires_grad)

    def refresh(self) -> None:
        """Casts the weights again, after an update or a load."""
        for name, copy in self.copies.items():
            ops.assign(copy, self.masters[name].astype(self.dtype))

    def get(self, name: str) -> Parameter | None:
        """What a product takes: the copy, or the parameter where there is none."""
        return self.copies.get(name, self.masters.get(name))

    def leaves(self, names: Iterable[str]) -> list[Parameter]:
        """What to differentiate for the gradients of these parameters: one or, for a tied embedding, two each."""
        return [leaf for name in names for leaf in self._of(name)]

    def gradients(self, names: Iterable[str], found: Sequence[Tensor], in_float32: bool = True) -> list[Tensor]:
        """The gradients of these parameters from those of their `leaves`.

        `in_float32` False: those of copies stay in half precision.
        """
        gradients, rest = [], iter(found)
        for name in names:
            parts = [next(rest) for _ in self._of(name)]
            if in_float32:
                parts = [part if part.dtype == mstype.float32 else part.astype(mstype.float32) for part in parts]
            gradients.append(parts[0] if len(parts) == 1 else parts[0] + parts[1])
        return gradients

    def _of(self, name: str) -> list[Parameter]:
        if name not in self.copies:
            return [self.masters[name]]
        return [self.masters[name], self.copies[name]] if name == EMBEDDING else [self.copies[name]]
