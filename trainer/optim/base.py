"""The interface of an optimizer: `update(gradients, lr, scale)` and a state of named arrays.

An optimizer knows nothing about schedules or clipping. If several ranks shard its state, each rank updates its range
of every large parameter, flattened. Then all ranks gather the updated ranges, unless the weights are sharded too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.optim.groups import ParameterGroup
from trainer.parallel.sharding import OptimizerShard, ShardSpec
from trainer.storage.tensor_file import ArrayOrLazyArray, read_shard


class Optimizer(ABC):
    """Base class of the optimizers: parameters by name, their weight decay and state arrays, and a count of updates.

    Gradients come in the order of the parameters.

    Args:
        state_names: The state arrays of each parameter, for example ``exp_avg``.
        shards: How ranks shard the state of each large parameter; by default this rank has the full state.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], state_names: Sequence[str],
        shards: Mapping[str, OptimizerShard] | None = None,
    ) -> None:  # fmt: skip
        self.parameters = dict(parameters)
        self.shards = dict(shards or {})
        # A slice is a view, which copy_ refuses on a CPU; ops.assign is a legacy kernel on an Ascend.
        if mindspore.get_context("device_target") == "CPU":
            self.assign = ops.assign
        else:
            self.assign = Parameter.copy_
        # This rank's range of each parameter whose state is sharded.
        self.local_ranges = {name: shard.local_range(self.parameters[name].size) for name, shard in self.shards.items()}
        # For updates by operators: copies of these ranges, made when needed.
        self.local_copies: dict[str, Parameter] = {}
        self.decay = {name: group.weight_decay for group in groups for name in group.parameters}
        self.lr_ratio = {name: group.lr_ratio for group in groups for name in group.parameters}
        self.group_of = {name: group.name for group in groups for name in group.parameters}
        self.updates = 0
        self.state: dict[str, dict[str, Any]] = {  # Parameter or, if the kernel takes them, np.ndarray
            kind: {name: self.new_array(self.state_shape(name), f"{kind}.{name}") for name in self.parameters}
            for kind in state_names
        }

    def state_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a parameter's state arrays on this rank."""
        if name not in self.local_ranges:
            return self.parameters[name].shape
        return (self.local_ranges[name].stop - self.local_ranges[name].start,)

    def new_array(self, shape: tuple[int, ...], name: str) -> Parameter | np.ndarray:
        """Creates a state array of zeros in float32."""
        return Parameter(Tensor(np.zeros(shape, np.float32)), name=name, requires_grad=False)

    @abstractmethod
    def update(self, gradients: Sequence[Tensor], lr: float, scale: float | Sequence[float] = 1.0) -> None:
        """Updates the parameters in place.

        Args:
            gradients: One for each parameter, in order; they are not changed.
            lr: The learning rate of parameter groups without a ratio.
            scale: The factor on all gradients (from clipping and loss scaling), or one for each; 1.0 costs nothing.
        """

    def scaled_gradients(
        self, gradients: Sequence[Tensor], scale: float | Sequence[float]
    ) -> Iterator[tuple[str, Parameter, Tensor]]:
        """Yields each name, the parameter to update and its scaled gradient, for updates by MindSpore operators.

        For a sharded parameter, the parameter is a copy of the rank's range, which `all_gather` writes back.
        """
        scales = expand_scale(scale, len(gradients))
        factors = {scale: scalar(scale) for scale in set(scales)}
        for (name, parameter), gradient, scale in zip(self.parameters.items(), gradients, scales, strict=True):
            if name in self.local_ranges:
                gradient = self.local_slice(gradient, name)
                local_values = self.local_slice(parameter, name)
                if name not in self.local_copies:
                    self.local_copies[name] = Parameter(local_values, name=f"own.{name}", requires_grad=False)
                parameter = self.local_copies[name]
                self.assign(parameter, local_values)
            if scale != 1.0:
                gradient = gradient * factors[scale]
            yield name, parameter, gradient

    def local_slice(self, tensor: Tensor, name: str) -> Tensor:
        """Returns this rank's range of a gradient or parameter, flattened; a gradient may be this range already."""
        local_range = self.local_ranges[name]
        size = local_range.stop - local_range.start
        if tensor.size == size:
            return tensor.reshape(-1)
        return P.Slice()(tensor.reshape(-1), (local_range.start,), (size,))

    def all_gather(self) -> None:
        """Completes the sharded parameters after an update, with the ranges that the other ranks have updated."""
        for shard in dict.fromkeys(self.shards.values()):
            assert shard.all_gather is not None, "an optimizer whose state is sharded has this collective"
            names = [name for name, each in self.shards.items() if each == shard]
            ranges = None
            if self.local_copies:
                ranges = [self.local_copies[name] for name in names]
            shard.all_gather([self.parameters[name] for name in names], ranges)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies the state, by `kind.parameter`; of a sharded parameter it is this rank's range, flattened."""
        return {key: np.array(array) for key, array in self.state_views().items()}

    def state_views(self) -> dict[str, np.ndarray]:
        """Returns the state like `state_arrays`, but without a copy on a CPU: updates change the arrays."""
        views = {}
        for kind, by_name in self.state.items():
            for name, array in by_name.items():
                if not isinstance(array, np.ndarray):
                    array = array.asnumpy()
                views[f"{kind}.{name}"] = array
        return views

    def load_state(
        self, arrays: Mapping[str, ArrayOrLazyArray], updates: int, part_of: Callable[[str], ShardSpec] | None = None
    ) -> None:
        """Restores the state and the count of updates.

        Args:
            arrays: The state by `kind.parameter`, as `state_arrays` returns it, in any shape.
            part_of: The shard of a parameter's array to read, if `arrays` are unsharded.
        """
        for kind, by_name in self.state.items():
            for name, array in by_name.items():
                part = None
                if part_of is not None:
                    part = part_of(name)
                values = read_shard(arrays[f"{kind}.{name}"], part).reshape(array.shape)
                if isinstance(array, np.ndarray):
                    array[...] = values
                else:
                    array.set_data(Tensor(np.array(values)))
        self.updates = updates


def expand_scale(scale: float | Sequence[float], count: int) -> list[float]:
    """Returns one factor for each of `count` gradients."""
    if isinstance(scale, (int, float)):
        return [float(scale)] * count
    return list(scale)


def scalar(number: float) -> Tensor:
    """Converts a number to a float32 tensor for an operator of an update.

    A Python number would be a constant of the operator. MindSpore 2.10 compiles the operator for each new value and
    keeps them all, which costs Adam 1.6 ms and 140 kB a call, and a gigabyte in several hundred steps.
    """
    return Tensor(number, mstype.float32)
