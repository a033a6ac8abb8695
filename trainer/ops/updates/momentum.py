"""Gradient descent with momentum, PyTorch's arithmetic: d = g + decay p; b = momentum b + d; p = p - lr b.

With nesterov the last equation is p = p - lr (d + momentum b).
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype
from mindspore.ops import operations as P


def load_momentum(momentum: float, nesterov: bool) -> Callable[[Parameter, Parameter, Tensor, float, float], None]:
    """Returns the in-place update for MindSpore's current device: (parameter, buffer, gradient, lr, decay) -> None."""
    if mindspore.get_context("device_target") != "CPU":
        from trainer.ops.ascend.optim import momentum_update

        return lambda parameter, buffer, gradient, lr, decay: momentum_update(
            parameter, buffer, gradient, lr, momentum, decay, nesterov
        )
    factor = Tensor(momentum, mstype.float32)
    apply = P.ApplyMomentum()

    def update(parameter: Parameter, buffer: Parameter, gradient: Tensor, lr: float, decay: float) -> None:
        """Updates a weight and its momentum buffer in place."""
        rate = Tensor(lr, mstype.float32)
        if decay:
            gradient = gradient + parameter * decay
        if nesterov:  # ApplyMomentum(use_nesterov=True) of MindSpore 2.10 computes something else on a CPU
            buffer.copy_(buffer * factor + gradient)
            parameter.copy_(parameter - (gradient + buffer * factor) * rate)
        else:
            apply(parameter, buffer, rate, gradient, factor)

    return update
