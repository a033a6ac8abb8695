"""Builds the optimizer that `optimizer.type` names: AdamW, PmaAdamW (AdamW whose weights are averaged), SGD or Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mindspore import Parameter, Tensor

from trainer.ops.updates.momentum import load_momentum
from trainer.optim.adamw import AdamW
from trainer.optim.base import Optimizer
from trainer.optim.groups import STATE_NAMES, ParameterGroup
from trainer.optim.muon import Muon
from trainer.parallel.sharding import OptimizerShard

if TYPE_CHECKING:
    from trainer.config.schema.optimizer import OptimizerConfig
    from trainer.parallel.tensor import TensorShardedMatrices

__all__ = ["SGD", "AdamW", "Muon", "Optimizer", "build_optimizer"]


class SGD(Optimizer):
    """Gradient descent with momentum, see `trainer.ops.updates.momentum`."""

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig,
        shards: Mapping[str, OptimizerShard] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(parameters, groups, STATE_NAMES["SGD"], shards)
        self.apply = load_momentum(settings.momentum, settings.nesterov)

    def update(self, gradients: Sequence[Tensor], lr: float, scale: float | Sequence[float] = 1.0) -> None:
        self.updates += 1
        for name, parameter, gradient in self.scaled_gradients(gradients, scale):
            rate = lr * self.lr_ratio[name]
            self.apply(parameter, self.state["momentum_buffer"][name], gradient, rate, self.decay[name])
        self.all_gather()


def build_optimizer(
    parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig,
    compiled: bool = True, shards: Mapping[str, OptimizerShard] | None = None,
    parts: TensorShardedMatrices | None = None,
) -> Optimizer:  # fmt: skip
    """Returns the optimizer that `settings.type` names; PmaAdamW is AdamW; `trainer.optim.averages` averages it.

    Args:
        groups: The result of `parameter_groups` for this optimizer.
        compiled: Whether Muon compiles its orthogonalisation.
        shards: How ranks shard the state of each large parameter.
        parts: How tensor-parallel ranks shard matrices, for Muon; None if they do not.
    """
    if settings.type == "Muon":
        return Muon(parameters, groups, settings, compiled, shards, parts)
    if settings.type == "SGD":
        return SGD(parameters, groups, settings, shards)
    return AdamW(parameters, groups, settings, shards=shards)
