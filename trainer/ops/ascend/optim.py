"""The optimizers' updates on an Ascend, in place.

On a CPU, in-place arithmetic leaves a parameter unchanged (MindSpore 2.10), so `trainer.ops.updates` has other updates.

AdamW is one operator of CANN (aclnnApplyAdamWV2). It reads a parameter, its gradient and its moments once, and writes
parameter and moments in place. It computes as PyTorch does, in float32, according to the tests of CANN's repository
ops-nn (optim/apply_adam_w_v2/tests/assets/golden.py):

    t = step + 1
    p = p (1 - lr decay);  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

The step counts from 0: mint.optim.AdamW of MindSpore also passes 0 in the first update. A CPU has no kernel for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from mindspore import Parameter, Tensor, mint
from mindspore import dtype as mstype
from mindspore.ops.auto_generate import AdamW


class FusedAdamW:
    """Updates parameters and their moments in place. The gradients must be scaled already."""

    takes_arrays = False

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self.betas = betas
        self.eps = eps
        self.update = AdamW()

    def __call__(self, items: Iterable[tuple], lr: float, updates: int) -> None:
        """Updates each `AdamWItem` of `trainer.ops.updates`. `updates` is the number of updates, including this one."""
        step = Tensor(updates - 1, mstype.float32)
        for parameter, first, second, gradient, decay, _, lr_ratio in items:
            # Gradients may be in half precision. They are cast one by one, to avoid a second set in float32.
            if gradient.dtype != mstype.float32:
                gradient = gradient.astype(mstype.float32)
            # AMSGrad is off: the second moment stands in for its maximum.
            self.update(parameter, first, second, second, gradient, step, lr * lr_ratio, *self.betas, decay, self.eps)


def momentum_update(
    parameter: Parameter, buffer: Parameter, gradient: Tensor, lr: float, momentum: float, decay: float, nesterov: bool
) -> None:
    """Updates a parameter by gradient descent with momentum; `trainer.ops.updates.momentum` has the formula."""
    if decay:
        gradient = mint.add(gradient, parameter, alpha=decay)
    buffer.mul_(momentum).add_(gradient)
    direction = buffer
    if nesterov:
        direction = mint.add(gradient, buffer, alpha=momentum)
    parameter.sub_(direction, alpha=lr)
