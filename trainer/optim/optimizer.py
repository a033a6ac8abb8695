"""The optimizer that `optimizer.type` names: AdamW, SGD or Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mindspore import Parameter, Tensor
from mindspore.ops import operations as P

from trainer.optim.adamw import AdamW
from trainer.optim.base import Optimizer, scalar
from trainer.optim.groups import ParameterGroup

if TYPE_CHECKING:
    from trainer.config import OptimizerConfig

__all__ = ["SGD", "AdamW", "Optimizer", "build_optimizer"]


class SGD(Optimizer):
    """Gradient descent with momentum, PyTorch's arithmetic: d = g + decay p; b = momentum b + d; p = p - lr b."""

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig
    ) -> None:
        super().__init__(parameters, groups, ("momentum_buffer",))
        self.momentum, self.apply = scalar(settings.momentum), P.ApplyMomentum()

    def rates(self, lr: float) -> Tensor:
        """The learning rate."""
        return scalar(lr)

    def update_one(self, name: str, parameter: Parameter, gradient: Tensor, rates: Tensor) -> None:
        if self.decay[name]:
            gradient = gradient + parameter * self.decay[name]
        self.apply(parameter, self.state["momentum_buffer"][name], rates, gradient, self.momentum)


def build_optimizer(
    parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig
) -> Optimizer:
    """The optimizer that `optimizer.type` names."""
    return {"AdamW": AdamW, "SGD": SGD}[settings.type](parameters, groups, settings)
