"""The optimizer that `optimizer.type` names: AdamW, SGD or Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mindspore import Parameter, Tensor, ops
from mindspore.ops import operations as P

from trainer.optim.adamw import AdamW
from trainer.optim.base import Optimizer, Sharing, scalar
from trainer.optim.groups import ParameterGroup
from trainer.optim.muon import Muon

if TYPE_CHECKING:
    from trainer.config import OptimizerConfig

__all__ = ["SGD", "AdamW", "Muon", "Optimizer", "Sharing", "build_optimizer"]


class SGD(Optimizer):
    """Gradient descent with momentum, PyTorch's arithmetic: d = g + decay p; b = momentum b + d; p = p - lr b.

    With nesterov the last is p = p - lr (d + momentum b).
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        groups: Sequence[ParameterGroup],
        settings: OptimizerConfig,
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__(parameters, groups, ("momentum_buffer",), sharing)
        self.momentum, self.apply = scalar(settings.momentum), P.ApplyMomentum()
        self.nesterov = settings.nesterov

    def update(self, gradients: Sequence[Tensor], lr: float, scale: float | Sequence[float] = 1.0) -> None:
        self.updates += 1
        rate = scalar(lr)
        for name, parameter, gradient in self.scaled(gradients, scale):
            if self.decay[name]:
                gradient = gradient + parameter * self.decay[name]
            buffer = self.state["momentum_buffer"][name]
            if not self.nesterov:
                self.apply(parameter, buffer, rate, gradient, self.momentum)
                continue
            # ApplyMomentum(use_nesterov=True) of MindSpore 2.10 computes something else on a CPU.
            ops.assign(buffer, buffer * self.momentum + gradient)
            ops.assign(parameter, parameter - (gradient + buffer * self.momentum) * rate)
        self.share()


def build_optimizer(
    parameters: Mapping[str, Parameter],
    groups: Sequence[ParameterGroup],
    settings: OptimizerConfig,
    compiled: bool = True,
    sharing: Sharing | None = None,
) -> Optimizer:
    """The optimizer that `optimizer.type` names.

    Args:
        parameters: To train, by name.
        groups: As `trainer.optim.groups.parameter_groups` makes them for this type.
        settings: The section `optimizer`.
        compiled: Whether what an optimizer could compile is.
        sharing: Of its state with other ranks; not for Muon, which needs whole matrices.
    """
    if settings.type == "Muon":
        assert sharing is None, "the configuration's rules have refused it"
        return Muon(parameters, groups, settings, compiled)
    return {"AdamW": AdamW, "SGD": SGD}[settings.type](parameters, groups, settings, sharing=sharing)
