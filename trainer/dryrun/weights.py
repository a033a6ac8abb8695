"""Parameters and optimizer state without values: a dry run allocates them only on the simulated device."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mint
from mindspore import dtype as mstype

from trainer.models import decoder
from trainer.optim.base import Optimizer
from trainer.run import session
from trainer.semi_auto import shards

_REFERENCES_OF_A_NEW_TENSOR = 4  # in the count of `Parameter`


def leave_weights_empty() -> None:
    """Makes this process allocate parameters on the device only, without initial values, copies and comparisons."""
    weights: Any = decoder
    weights.initial_value = lambda parameter, settings, seed, part=None: _empty((part or parameter).shape)
    weights.Tensor = _tensor
    session.check_same_weights = lambda *arguments: None
    optimizer: Any = Optimizer
    optimizer.new_array = lambda self, shape, name: Parameter(_empty(shape), name=name, requires_grad=False)
    sharded_parameters: Any = shards.ShardedParameters
    sharded_parameters.start = _start_empty
    # MindSpore copies the first value of a parameter to the host and back if other references to it may exist.
    original = Parameter._get_parameter_new_args
    Parameter._get_parameter_new_args = staticmethod(
        lambda data, references, *more: original(data, _REFERENCES_OF_A_NEW_TENSOR, *more)
    )


def _empty(shape: tuple[int, ...]) -> Tensor:
    return mint.empty(shape, dtype=mstype.float32)


def _tensor(value: Any, *more: Any, **named: Any) -> Tensor:
    # `Tensor` of a tensor would copy it to the host.
    if isinstance(value, mindspore.Tensor):
        return value
    return mindspore.Tensor(value, *more, **named)


def _start_empty(self: shards.ShardedParameters, weights: None) -> None:
    parameters = [(parameter, self.shards[name].shape) for name, parameter in self.local.items()]
    for parameter, shape in [*parameters, *self.sums.values()]:
        parameter.set_data(_empty(shape), slice_shape=True)
