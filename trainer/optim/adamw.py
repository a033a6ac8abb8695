"""AdamW: on a CPU in one pass over each block of memory, on an Ascend with its fused operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Parameter, Tensor

from trainer.ops.ascend.optim import FusedAdamW
from trainer.optim.base import Optimizer, one_for_each
from trainer.optim.groups import STATE_NAMES, ParameterGroup
from trainer.optim.host_adamw import HostAdamW, ParameterUpdate
from trainer.parallel.sharding import OptimizerShard

if TYPE_CHECKING:
    from trainer.config import OptimizerConfig


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), with PyTorch's arithmetic.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p - lr decay p;     p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    On a CPU the bias corrections are applied to the scalars instead of the arrays, which gives the same value:
    p - lr' m / (sqrt(v) + eps') with lr' = lr sqrt(1 - b2^t) / (1 - b1^t) and eps' = eps sqrt(1 - b2^t).
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        groups: Sequence[ParameterGroup],
        settings: OptimizerConfig,
        device: str | None = None,
        shards: Mapping[str, OptimizerShard] | None = None,
    ) -> None:
        """As `Optimizer`; `device` None means MindSpore's current target."""
        on_host = (device or mindspore.get_context("device_target")) == "CPU"
        self.host = HostAdamW() if on_host else None
        super().__init__(parameters, groups, STATE_NAMES["AdamW"], shards)
        self.beta1, self.beta2 = settings.betas
        self.eps = settings.eps
        self.fused = None if on_host else FusedAdamW((self.beta1, self.beta2), self.eps)

    def new_array(self, shape: tuple[int, ...], name: str) -> Parameter | np.ndarray:
        if self.host is None:
            return super().new_array(shape, name)
        return np.zeros(shape, np.float32)

    def update(self, gradients: Sequence[Tensor], lr: float, scale: float | Sequence[float] = 1.0) -> None:
        self.updates += 1
        if self.fused is not None:
            first, second = self.state["exp_avg"], self.state["exp_avg_sq"]
            items = (
                (parameter, first[name], second[name], gradient, self.decay[name])
                for name, parameter, gradient in self.scaled(gradients, scale)
            )
            self.fused(items, lr, self.updates)
            self.all_gather()
            return
        # lr' and eps' of this update, in float64.
        root2 = (1 - self.beta2**self.updates) ** 0.5
        rate, eps = lr * root2 / (1 - self.beta1**self.updates), self.eps * root2
        scales = one_for_each(scale, len(gradients))
        updates = []
        for (name, parameter), gradient, factor in zip(self.parameters.items(), gradients, scales, strict=True):
            # On a CPU these are views of MindSpore's memory, and writing to them writes to the parameter.
            weight, gradient = parameter.asnumpy().reshape(-1), gradient.asnumpy().reshape(-1)
            if name in self.own_ranges:
                own = self.own_ranges[name]
                gradient = gradient if gradient.size < weight.size else gradient[own]
                weight = weight[own]
            first, second = (self.state[kind][name].reshape(-1) for kind in ("exp_avg", "exp_avg_sq"))
            keep = 1 - lr * self.decay[name]
            updates.append(ParameterUpdate(weight, first, second, gradient, scale=factor, keep=keep))
        self.host.update(updates, rate=rate, eps=eps, betas=(self.beta1, self.beta2))
        self.all_gather()
