"""The optimizer that `optimizer.type` names: AdamW, SGD or Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mindspore
from mindspore import Parameter, Tensor
from mindspore.ops import operations as P

from trainer.ops.ascend.optim import momentum_update
from trainer.optim.adamw import AdamW
from trainer.optim.base import Optimizer, scalar
from trainer.optim.groups import STATE_NAMES, ParameterGroup
from trainer.optim.muon import Muon
from trainer.parallel.sharding import OptimizerShard

if TYPE_CHECKING:
    from trainer.config import OptimizerConfig
    from trainer.parallel.tensor import MatrixParts

__all__ = ["SGD", "AdamW", "Muon", "Optimizer", "build_optimizer"]


class SGD(Optimizer):
    """Gradient descent with momentum, PyTorch's arithmetic: d = g + decay p; b = momentum b + d; p = p - lr b.

    With nesterov the last step is p = p - lr (d + momentum b).
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        groups: Sequence[ParameterGroup],
        settings: OptimizerConfig,
        shards: Mapping[str, OptimizerShard] | None = None,
    ) -> None:
        super().__init__(parameters, groups, STATE_NAMES["SGD"], shards)
        self.momentum, self.nesterov = settings.momentum, settings.nesterov
        self.on_device = mindspore.get_context("device_target") != "CPU"
        self.factor, self.apply = scalar(settings.momentum), P.ApplyMomentum()

    def update(self, gradients: Sequence[Tensor], lr: float, scale: float | Sequence[float] = 1.0) -> None:
        self.updates += 1
        rate = scalar(lr)
        for name, parameter, gradient in self.scaled(gradients, scale):
            buffer, decay = self.state["momentum_buffer"][name], self.decay[name]
            if self.on_device:
                momentum_update(parameter, buffer, gradient, lr, self.momentum, decay, self.nesterov)
                continue
            if decay:
                gradient = gradient + parameter * decay
            if not self.nesterov:
                self.apply(parameter, buffer, rate, gradient, self.factor)
                continue
            # ApplyMomentum(use_nesterov=True) of MindSpore 2.10 computes something else on a CPU.
            buffer.copy_(buffer * self.factor + gradient)
            parameter.copy_(parameter - (gradient + buffer * self.factor) * rate)
        self.all_gather()


def build_optimizer(
    parameters: Mapping[str, Parameter],
    groups: Sequence[ParameterGroup],
    settings: OptimizerConfig,
    compiled: bool = True,
    shards: Mapping[str, OptimizerShard] | None = None,
    parts: MatrixParts | None = None,
) -> Optimizer:
    """The optimizer that `optimizer.type` names; `groups` are those of `parameter_groups` for this type, `shards` as in
    `Optimizer`. `compiled` and `parts` are for Muon.
    """
    if settings.type == "Muon":
        return Muon(parameters, groups, settings, compiled, shards, parts)
    return {"AdamW": AdamW, "SGD": SGD}[settings.type](parameters, groups, settings, shards=shards)
