"""The optimizers' updates on an Ascend, in place.

On a CPU arithmetic in place leaves a parameter as it was (MindSpore 2.10), so `trainer.ops.updates` has its own there.

AdamW is one operator of CANN (aclnnApplyAdamWV2), which reads a parameter, its gradient and its moments once and writes
three of them in place. Its arithmetic, as CANN's repository ops-nn gives it for its own tests
(optim/apply_adam_w_v2/tests/assets/golden.py), is PyTorch's, in float32:

    t = step + 1
    p = p (1 - lr decay);  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

It counts from 0: MindSpore's own mint.optim.AdamW gives it 0 in the first update too. It has no kernel on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

from mindspore import Parameter, Tensor, mint
from mindspore import dtype as mstype
from mindspore.ops.auto_generate import AdamW


class FusedAdamW:
    """Updates parameters and their moments in place; gradients are scaled already."""

    takes_arrays = False

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self.betas = betas
        self.eps = eps
        self.update = AdamW()

    def __call__(self, items: Iterable[tuple], lr: float, updates: int) -> None:
        """Updates parameters, each an `AdamWItem` of `trainer.ops.updates`; `updates` counts this one too."""
        step = Tensor(updates - 1, mstype.float32)
        for parameter, first, second, gradient, decay, _ in items:
            # Gradients may be kept in half precision; one at a time, so that there is no second set in float32.
            if gradient.dtype != mstype.float32:
                gradient = gradient.astype(mstype.float32)
            # The second moment again: the largest one of AMSGrad, which is off.
            self.update(parameter, first, second, second, gradient, step, lr, *self.betas, decay, self.eps)


def momentum_update(
    parameter: Parameter, buffer: Parameter, gradient: Tensor, lr: float, momentum: float, decay: float, nesterov: bool
) -> None:
    """PyTorch's gradient descent with momentum, see `trainer.ops.updates.momentum`."""
    if decay:
        gradient = mint.add(gradient, parameter, alpha=decay)
    buffer.mul_(momentum).add_(gradient)
    direction = buffer
    if nesterov:
        direction = mint.add(gradient, buffer, alpha=momentum)
    parameter.sub_(direction, alpha=lr)
