"""AdamW and SGD: one fused pass over each weight, float32 state, decoupled decay for the groups that have one.

An optimizer is `update(gradients, lr, scale)` and a state of arrays; it knows nothing about schedules, clipping or
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, Tensor
from mindspore.ops import operations as P

from trainer.optim.groups import ParameterGroup

if TYPE_CHECKING:
    from trainer.config import OptimizerConfig


class Optimizer:
    """What AdamW and SGD share: the parameters with their decay, named state of each, the number of updates.

    Args:
        parameters: Parameters by name; gradients come in this order.
        groups: Say the weight decay of each.
        state_names: Names of the arrays kept for every parameter.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], state_names: Sequence[str]
    ) -> None:
        self.parameters = dict(parameters)
        self.decay = {name: group.weight_decay for group in groups for name in group.parameters}
        self.updates = 0
        self.state = {
            kind: {name: _zeros_like(parameter, f"{kind}.{name}") for name, parameter in self.parameters.items()}
            for kind in state_names
        }

    def update(self, gradients: Sequence[Tensor], lr: float, scale: float = 1.0) -> None:
        """One update in place.

        Args:
            gradients: One for each parameter, in order.
            lr: Learning rate.
            scale: Factor on every gradient (the clip coefficient); 1.0 costs nothing.
        """
        self.updates += 1
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
            self.update_one(name, parameter, gradient if scale == 1.0 else gradient * scale, lr)

    def update_one(self, name: str, parameter: Parameter, gradient: Tensor, lr: float) -> None:
        raise NotImplementedError  # AdamW and SGD say how

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state, by `kind.parameter`."""
        return {
            f"{kind}.{name}": array.asnumpy().copy()
            for kind, by_name in self.state.items()
            for name, array in by_name.items()
        }

    def load_state(self, arrays: Mapping[str, np.ndarray], updates: int) -> None:
        """Takes over what `state_arrays` gave."""
        for kind, by_name in self.state.items():
            for name, array in by_name.items():
                array.set_data(Tensor(np.array(arrays[f"{kind}.{name}"])))
        self.updates = updates


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), with PyTorch's arithmetic.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p - lr decay p;     p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    MindSpore's fused Adam leaves out both corrections of eps: it computes p - lr' m / (sqrt(v) + eps'). With
    lr' = lr sqrt(1 - b2^t) / (1 - b1^t) and eps' = eps sqrt(1 - b2^t) that is the same value.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig
    ) -> None:
        super().__init__(parameters, groups, ("exp_avg", "exp_avg_sq"))
        self.beta1, self.beta2 = settings.betas
        self.eps = settings.eps
        self.adam, self.descend = P.Adam(), P.ApplyGradientDescent()

    def update_one(self, name: str, parameter: Parameter, gradient: Tensor, lr: float) -> None:
        if self.decay[name] and lr:
            self.descend(parameter, lr * self.decay[name], parameter)
        root2 = (1 - self.beta2**self.updates) ** 0.5
        rate, eps = lr * root2 / (1 - self.beta1**self.updates), self.eps * root2
        first, second = self.state["exp_avg"][name], self.state["exp_avg_sq"][name]
        # Zero beta powers: the bias corrections are in `rate` and `eps` already, computed in float64.
        self.adam(parameter, first, second, 0.0, 0.0, rate, self.beta1, self.beta2, eps, gradient)


class SGD(Optimizer):
    """Gradient descent with momentum, PyTorch's arithmetic: d = g + decay p; b = momentum b + d; p = p - lr b."""

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig
    ) -> None:
        super().__init__(parameters, groups, ("momentum_buffer",))
        self.momentum, self.apply = settings.momentum, P.ApplyMomentum()

    def update_one(self, name: str, parameter: Parameter, gradient: Tensor, lr: float) -> None:
        if self.decay[name]:
            gradient = gradient + parameter * self.decay[name]
        self.apply(parameter, self.state["momentum_buffer"][name], lr, gradient, self.momentum)


def build_optimizer(
    parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig
) -> Optimizer:
    """The optimizer that `optimizer.type` names."""
    return {"AdamW": AdamW, "SGD": SGD}[settings.type](parameters, groups, settings)


def _zeros_like(parameter: Parameter, name: str) -> Parameter:
    return Parameter(Tensor(np.zeros(parameter.shape, np.float32)), name=name, requires_grad=False)
