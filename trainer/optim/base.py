"""What all optimizers are: `update(gradients, lr, scale)` and a state of named arrays.

An optimizer knows nothing about schedules, clipping or ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from trainer.optim.groups import ParameterGroup


class Optimizer(ABC):
    """The parameters with their decay, named state of each, the number of updates.

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
            kind: {name: self.new_array(parameter, f"{kind}.{name}") for name, parameter in self.parameters.items()}
            for kind in state_names
        }

    def new_array(self, parameter: Parameter, name: str) -> Parameter | np.ndarray:
        """Zeros of a parameter's shape in float32, for its state."""
        return Parameter(Tensor(np.zeros(parameter.shape, np.float32)), name=name, requires_grad=False)

    @abstractmethod
    def update(self, gradients: Sequence[Tensor], lr: float, scale: float | Sequence[float] = 1.0) -> None:
        """One update in place.

        Args:
            gradients: One for each parameter, in order; left as they are.
            lr: Learning rate.
            scale: Factor on every gradient (of clipping and loss scaling), or one for each; 1.0 costs nothing.
        """

    def scaled(
        self, gradients: Sequence[Tensor], scale: float | Sequence[float]
    ) -> Iterator[tuple[str, Parameter, Tensor]]:
        """For an update by operators: each name, its parameter, and its gradient times its factor."""
        scales = one_for_each(scale, len(gradients))
        factors = {scale: scalar(scale) for scale in set(scales)}
        for (name, parameter), gradient, scale in zip(self.parameters.items(), gradients, scales, strict=True):
            yield name, parameter, gradient if scale == 1.0 else gradient * factors[scale]

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state, by `kind.parameter`."""
        return {
            f"{kind}.{name}": np.array(array if isinstance(array, np.ndarray) else array.asnumpy())
            for kind, by_name in self.state.items()
            for name, array in by_name.items()
        }

    def load_state(self, arrays: Mapping[str, np.ndarray], updates: int) -> None:
        """Takes over what `state_arrays` gave."""
        for kind, by_name in self.state.items():
            for name, array in by_name.items():
                values = arrays[f"{kind}.{name}"]
                if isinstance(array, np.ndarray):
                    array[...] = values
                else:
                    array.set_data(Tensor(np.array(values)))
        self.updates = updates


def one_for_each(scale: float | Sequence[float], count: int) -> list[float]:
    """A factor for each of `count` gradients."""
    return [float(scale)] * count if isinstance(scale, (int, float)) else list(scale)


def scalar(number: float) -> Tensor:
    """A number for an operator of an update.

    A Python number would be a constant of the operator: MindSpore 2.10 compiles the operator anew for each new value
    and keeps them all, which costs Adam 1.6 ms and 140 kB a call, a gigabyte in some hundred steps.
    """
    return Tensor(number, mstype.float32)
