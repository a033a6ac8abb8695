"""Parameters and optimizer state of which only the device knows: a dry run needs no values, and the host no memory."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mint
from mindspore import dtype as mstype

from trainer.models import classifier, decoder
from trainer.models.spec.model import ParameterSpec
from trainer.optim.base import Optimizer
from trainer.parallel.sharding import ShardSpec
from trainer.run import session
from trainer.semi_auto import shards

_REFERENCES_OF_A_NEW_TENSOR = 4  # as `Parameter` counts them


def leave_weights_empty() -> None:
    """From now on this process allocates new parameters on the device and draws, copies and compares none."""
    for module in (decoder, classifier):
        module.initial_value = _empty_weight
        module.Tensor = _tensor
    session.check_same_weights = lambda *arguments: None
    Optimizer.new_array = _empty_state
    shards.ShardedParameters.start = _start_empty
    # MindSpore copies a parameter's first value to the host and back where anybody else may refer to it.
    made_of = Parameter._get_parameter_new_args
    Parameter._get_parameter_new_args = staticmethod(
        lambda data, references, *more: made_of(data, _REFERENCES_OF_A_NEW_TENSOR, *more)
    )


def _empty_weight(
    parameter: ParameterSpec, settings: Any, seed: int, part: ShardSpec | None = None
) -> Tensor:
    return mint.empty(parameter.shape if part is None else part.shape, dtype=mstype.float32)


def _tensor(value: Any, *more: Any, **named: Any) -> Tensor:
    # A tensor of a tensor would be a copy in the host's memory.
    if isinstance(value, mindspore.Tensor):
        return value
    return mindspore.Tensor(value, *more, **named)


def _empty_state(self: Optimizer, shape: tuple[int, ...], name: str) -> Parameter:
    return Parameter(mint.empty(shape, dtype=mstype.float32), name=name, requires_grad=False)


def _start_empty(self: shards.ShardedParameters, weights: None) -> None:
    own = [(parameter, self.shards[name].shape) for name, parameter in self.local.items()]
    for parameter, shape in [*own, *self.sums.values()]:
        parameter.set_data(mint.empty(shape, dtype=mstype.float32), slice_shape=True)
