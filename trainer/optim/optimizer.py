"""AdamW and SGD: one fused pass over each weight, float32 state, decoupled decay for the groups that have one.

An optimizer is `update(gradients, lr, scale)` and a state of arrays; it knows nothing about schedules, clipping or
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.optim.groups import ParameterGroup

if TYPE_CHECKING:
    from trainer.config import OptimizerConfig


class Optimizer:
    """What AdamW and SGD share: the parameters with their decay, named state of each, the number of updates.

    Args:
        parameters: Parameters by name; gradients come in this order.
        groups: Say the weight decay of each; a parameter is in one of them.
        state_names: Names of the arrays kept for every parameter.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], state_names: Sequence[str]
    ) -> None:
        self.parameters = dict(parameters)
        self.decay = {name: group.weight_decay for group in groups for name in group.parameters}
        self.group_of = {name: group.name for group in groups for name in group.parameters}
        self.updates = 0
        self.state = {
            kind: {name: _zeros_like(parameter, f"{kind}.{name}") for name, parameter in self.parameters.items()}
            for kind in state_names
        }

    def update(self, gradients: Sequence[Tensor], lr: float, scale: float | Sequence[float] = 1.0) -> None:
        """One update in place.

        Args:
            gradients: One for each parameter, in order; left as they are.
            lr: Learning rate.
            scale: Factor on every gradient (of clipping and loss scaling), or one for each; 1.0 costs nothing.
        """
        self.updates += 1
        rates = self.rates(lr)
        scales = [float(scale)] * len(gradients) if isinstance(scale, (int, float)) else scale
        factors = {scale: _scalar(scale) for scale in set(scales)}
        for (name, parameter), gradient, scale in zip(self.parameters.items(), gradients, scales, strict=True):
            self.update_one(name, parameter, gradient if scale == 1.0 else gradient * factors[scale], rates)

    def rates(self, lr: float) -> Any:
        """What an update shares between parameters, for `update_one`."""
        raise NotImplementedError  # AdamW and SGD say what

    def update_one(self, name: str, parameter: Parameter, gradient: Tensor, rates: Any) -> None:
        """Updates one parameter in place."""
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
        self.betas = _scalar(self.beta1), _scalar(self.beta2)
        # Zero beta powers: the bias corrections are in the rates already, computed in float64.
        self.powers = _scalar(0.0), _scalar(0.0)
        self.adam, self.descend = P.Adam(), P.ApplyGradientDescent()

    def rates(self, lr: float) -> tuple[Tensor, Tensor, dict[float, Tensor]]:
        """lr', eps', and lr * decay for each weight decay that there is."""
        root2 = (1 - self.beta2**self.updates) ** 0.5
        rate, eps = lr * root2 / (1 - self.beta1**self.updates), self.eps * root2
        decays = {decay: _scalar(lr * decay) for decay in set(self.decay.values()) if lr * decay}
        return _scalar(rate), _scalar(eps), decays

    def update_one(self, name: str, parameter: Parameter, gradient: Tensor, rates: Any) -> None:
        rate, eps, decays = rates
        if self.decay[name] in decays:
            self.descend(parameter, decays[self.decay[name]], parameter)
        first, second = self.state["exp_avg"][name], self.state["exp_avg_sq"][name]
        self.adam(parameter, first, second, *self.powers, rate, *self.betas, eps, gradient)


class SGD(Optimizer):
    """Gradient descent with momentum, PyTorch's arithmetic: d = g + decay p; b = momentum b + d; p = p - lr b."""

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig
    ) -> None:
        super().__init__(parameters, groups, ("momentum_buffer",))
        self.momentum, self.apply = _scalar(settings.momentum), P.ApplyMomentum()

    def rates(self, lr: float) -> Tensor:
        """The learning rate."""
        return _scalar(lr)

    def update_one(self, name: str, parameter: Parameter, gradient: Tensor, rates: Any) -> None:
        if self.decay[name]:
            gradient = gradient + parameter * self.decay[name]
        self.apply(parameter, self.state["momentum_buffer"][name], rates, gradient, self.momentum)


def build_optimizer(
    parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig
) -> Optimizer:
    """The optimizer that `optimizer.type` names."""
    return {"AdamW": AdamW, "SGD": SGD}[settings.type](parameters, groups, settings)


def _scalar(number: float) -> Tensor:
    """A number for an operator of an update.

    A Python number would be a constant of the operator: MindSpore 2.10 compiles the operator anew for each new value
    and keeps them all, which costs Adam 1.6 ms and 140 kB a call, a gigabyte in some hundred steps.
    """
    return Tensor(number, mstype.float32)


def _zeros_like(parameter: Parameter, name: str) -> Parameter:
    return Parameter(Tensor(np.zeros(parameter.shape, np.float32)), name=name, requires_grad=False)
