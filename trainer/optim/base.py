"""What all optimizers are: `update(gradients, lr, scale)` and a state of named arrays.

An optimizer knows nothing about schedules or clipping. Of several ranks that share its state, each updates its own
range of every large parameter, flattened; then all hand on what they have updated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.optim.groups import ParameterGroup
from trainer.parallel.optimizer_shard import OptimizerShard


@dataclass(frozen=True)
class Sharing:
    """How ranks share an optimizer's state.

    Attributes:
        shard: What this rank keeps.
        share: Completes parameters in place from the ranges of all ranks: of each parameter its own range is given, or
            stands in it when there are no ranges. See `trainer.parallel.collectives.share_parts`.
    """

    shard: OptimizerShard
    share: Callable[[Sequence[Parameter], Sequence[Tensor] | None], None]


class Optimizer(ABC):
    """The parameters with their decay, named state of each, the number of updates.

    Args:
        parameters: Parameters by name; gradients come in this order.
        groups: Say the weight decay of each; a parameter is in one of them.
        state_names: Names of the arrays kept for every parameter.
        sharing: With the other ranks; None keeps everything here.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        groups: Sequence[ParameterGroup],
        state_names: Sequence[str],
        sharing: Sharing | None = None,
    ) -> None:
        self.parameters, self.sharing = dict(parameters), sharing
        self.parts: dict[str, slice] = {}
        if sharing is not None:
            cut = {name: each.size for name, each in self.parameters.items() if sharing.shard.cuts(each.size)}
            self.parts = {name: sharing.shard.part(size) for name, size in cut.items()}
        self.own: dict[str, Parameter] = {}  # for updates by operators: the ranges of this rank, made when needed
        self.decay = {name: group.weight_decay for group in groups for name in group.parameters}
        self.group_of = {name: group.name for group in groups for name in group.parameters}
        self.updates = 0
        self.state = {
            kind: {name: self.new_array(self.state_shape(name), f"{kind}.{name}") for name in self.parameters}
            for kind in state_names
        }

    def state_shape(self, name: str) -> tuple[int, ...]:
        """Of the state of a parameter on this rank."""
        if name not in self.parts:
            return self.parameters[name].shape
        return (self.parts[name].stop - self.parts[name].start,)

    def new_array(self, shape: tuple[int, ...], name: str) -> Parameter | np.ndarray:
        """Zeros in float32, for the state."""
        return Parameter(Tensor(np.zeros(shape, np.float32)), name=name, requires_grad=False)

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
        """For an update by operators: each name, what is updated of its parameter, and its gradient times its factor.

        Of a parameter that is shared this is a copy of the rank's own range, which `share` takes back.
        """
        scales = one_for_each(scale, len(gradients))
        factors = {scale: scalar(scale) for scale in set(scales)}
        for (name, parameter), gradient, scale in zip(self.parameters.items(), gradients, scales, strict=True):
            if name in self.parts:
                gradient, own = self.range_of(gradient, name), self.range_of(parameter, name)
                if name not in self.own:
                    self.own[name] = Parameter(own, name=f"own.{name}", requires_grad=False)
                parameter = self.own[name]
                ops.assign(parameter, own)
            yield name, parameter, gradient if scale == 1.0 else gradient * factors[scale]

    def range_of(self, tensor: Tensor, name: str) -> Tensor:
        """The range of this rank, of a gradient or of the parameter itself."""
        part = self.parts[name]
        return P.Slice()(tensor.reshape(-1), (part.start,), (part.stop - part.start,))

    def share(self) -> None:
        """After an update: hands the new weights on to the other ranks, and takes theirs."""
        if self.parts:
            parts = [self.own[name] for name in self.parts] if self.own else None
            self.sharing.share([self.parameters[name] for name in self.parts], parts)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state, by `kind.parameter`: of shared parameters the rank's own range, flat.

        What all ranks have whole, the first alone gives.
        """
        first = self.sharing is None or self.sharing.shard.rank == 0
        return {
            f"{kind}.{name}": np.array(array if isinstance(array, np.ndarray) else array.asnumpy())
            for kind, by_name in self.state.items()
            for name, array in by_name.items()
            if first or name in self.parts
        }

    def load_state(self, arrays: Mapping[str, np.ndarray], updates: int) -> None:
        """Takes over what `state_arrays` gave, the ranges of all ranks put together, in any shape."""
        for kind, by_name in self.state.items():
            for name, array in by_name.items():
                values = arrays[f"{kind}.{name}"].reshape(-1)
                values = values[self.parts[name]] if name in self.parts else values.reshape(array.shape)
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
