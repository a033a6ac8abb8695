"""The update of AdamW: on an Ascend by its fused operator, on a CPU one cache-sized block at a time.

On a CPU the update is bound by memory bandwidth: it reads four arrays and writes three. MindSpore's operators make one
pass for the clip factor, one for the decay and one for Adam. Each call costs 0.15 ms, half of the time for a tensor of
100,000 numbers. Here a block is read once. Its arithmetic releases Python's lock, so threads run in parallel; each
takes the next block when it has finished one. All operations are elementwise, so results have the same bits for any
block size and number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import mindspore
import numpy as np

from trainer.arrays.numpy_operators import AdamWNumbers
from trainer.arrays.operators import operators
from trainer.device.threads import HostThreads

if TYPE_CHECKING:
    from mindspore import Parameter, Tensor

    from trainer.ops.ascend.optim import FusedAdamW

_BLOCK = 1 << 17  # elements; NumPy's call overhead slows down shorter blocks, and longer ones exceed the cache


class AdamWItem(NamedTuple):
    """A parameter to update, in float32. On a CPU all are flat arrays. Weight and moments are changed in place."""

    weight: np.ndarray | Parameter
    first: np.ndarray | Parameter
    second: np.ndarray | Parameter
    gradient: np.ndarray | Tensor
    decay: float
    scale: float = 1.0  # factor on the gradient
    lr_ratio: float = 1.0  # factor on the learning rate


def load_adamw(betas: tuple[float, float], eps: float, device: str | None = None) -> HostAdamW | FusedAdamW:
    """Returns the update for a device. Default None: MindSpore's current device."""
    if (device or mindspore.get_context("device_target")) == "CPU":
        return HostAdamW(betas, eps)
    from trainer.ops.ascend.optim import FusedAdamW

    return FusedAdamW(betas, eps)


class HostAdamW:
    """Updates parameters with `threads` threads. Default None: one for each core of this process.

    The bias corrections are applied to scalars instead of arrays, which gives the same value:
    p - lr' m / (sqrt(v) + eps') with lr' = lr sqrt(1 - b2^t) / (1 - b1^t) and eps' = eps sqrt(1 - b2^t).
    """

    takes_arrays = True

    def __init__(self, betas: tuple[float, float], eps: float, threads: int | None = None) -> None:
        self.betas = betas
        self.eps = eps
        self.threads = HostThreads(threads)
        self.work = [np.empty((2, _BLOCK), np.float32) for _ in range(self.threads.threads)]

    def __call__(self, items: Iterable[AdamWItem], lr: float, updates: int) -> None:
        """Updates the parameters. `updates` is the number of updates, including this one."""
        beta1, beta2 = self.betas
        root2 = (1 - beta2**updates) ** 0.5
        rate = lr * root2 / (1 - beta1**updates)
        eps = self.eps * root2

        def run(block: tuple[AdamWItem, int], thread: int) -> None:
            """Updates one block of a parameter."""
            item, start = block
            keep = 1 - lr * item.lr_ratio * item.decay
            numbers = AdamWNumbers(item.scale, rate * item.lr_ratio, eps, 1 - beta1, beta2, 1 - beta2, keep)
            part = slice(start, start + _BLOCK)
            operators().adamw(
                item.weight[part], item.first[part], item.second[part], item.gradient[part], numbers, self.work[thread]
            )

        self.threads.run(((item, start) for item in items for start in range(0, item.weight.size, _BLOCK)), run)
