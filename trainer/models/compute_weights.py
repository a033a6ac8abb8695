"""Weights of matrix products in the dtype of the products, cast once a step and not at every use.

Parameters and optimizer state are float32. Where products compute in half precision, a matrix has a copy in that
dtype, from which its gradient comes too: as the product made it, in half precision. Where products compute in float32
there are no copies, and nothing here costs anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from trainer.models.shapes import EMBEDDING, EXPERT_DOWN_BIAS, ROUTER, SHARED_GATE

_IN_FLOAT32 = (EMBEDDING, ROUTER, SHARED_GATE, EXPERT_DOWN_BIAS)
"""Rows of the embedding are looked up in float32, also where it is the matrix of the head."""
_STACKED = "mlp.experts."


class ComputeWeights:
    """The copies of a model's weights.

    Args:
        parameters: All parameters of the model by name.
        dtype: Dtype of the matrix products.
        experts: Whether the products of experts take copies.
        shared: Names of matrices that several products take. They have no copy: its gradient would be the sum over the
            products in half precision.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        dtype: mstype.Type,
        experts: bool = False,
        shared: Collection[str] = (),
    ) -> None:
        self.masters, self.dtype = parameters, dtype
        self.copies: dict[str, Parameter] = {}
        for name, master in parameters.items() if dtype != mstype.float32 else ():
            # Adapters are multiplied by their factor first, which is float32.
            is_product = master.ndim > 1 and ".lora_" not in name and not name.endswith(_IN_FLOAT32)
            if is_product and name not in shared and (experts or _STACKED not in name):
                self.copies[name] = Parameter(master.astype(dtype), f"compute.{name}", master.requires_grad)

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Casts again the weights that an update has changed, or all of them after a load."""
        for name in self.copies if names is None else names:
            if name in self.copies:
                self.copies[name].copy_(self.masters[name].astype(self.dtype))

    def get(self, name: str) -> Parameter | None:
        """What a product takes, and what its gradient comes from: the copy, or the parameter where there is none."""
        return self.copies.get(name, self.masters.get(name))

    def leaves(self, names: Iterable[str]) -> list[Parameter]:
        """What to differentiate for the gradients of these parameters."""
        return [self.get(name) for name in names]


def in_float32(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of `ComputeWeights.leaves` in the dtype of the parameters."""
    return [each if each.dtype == mstype.float32 else each.astype(mstype.float32) for each in gradients]
