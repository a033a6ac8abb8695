"""AdamW, with the update kernel of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, Tensor

from trainer.arrays.memory import shared_array
from trainer.ops.updates.adamw import AdamWItem, load_adamw
from trainer.optim.base import Optimizer, expand_scale
from trainer.optim.groups import STATE_NAMES, ParameterGroup
from trainer.parallel.sharding import OptimizerShard

if TYPE_CHECKING:
    from trainer.config.schema.optimizer import OptimizerConfig


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), with PyTorch's arithmetic.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p - lr decay p;     p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], settings: OptimizerConfig,
        device: str | None = None, shards: Mapping[str, OptimizerShard] | None = None,
    ) -> None:  # fmt: skip
        """Loads the update kernel of `device` (None: MindSpore's current target) and creates the state."""
        first, second = settings.betas
        self.apply = load_adamw((first, second), settings.eps, device)
        super().__init__(parameters, groups, STATE_NAMES["AdamW"], shards)

    def new_array(self, shape: tuple[int, ...], name: str) -> Parameter | np.ndarray:
        """Returns zeros: a NumPy array if the kernel updates arrays.

        `np.zeros` would leave the memory to the first step, which the system then hands out in small pages, twice for
        each: once when it is read, once when it is written.
        """
        if self.apply.takes_arrays:
            return np.full(shape, 0, np.float32)
        return super().new_array(shape, name)

    def update(self, gradients: Sequence[Tensor], lr: float, scale: float | Sequence[float] = 1.0) -> None:
        """Updates all weights of this rank, then gathers sharded ones."""
        self.updates += 1
        if self.apply.takes_arrays:
            items = self._arrays(gradients, scale)
        else:
            items = self._tensors(gradients, scale)
        self.apply(items, lr, self.updates)
        self.all_gather()

    def _tensors(self, gradients: Sequence[Tensor], scale: float | Sequence[float]) -> Iterator[AdamWItem]:
        first = self.state["exp_avg"]
        second = self.state["exp_avg_sq"]
        for name, parameter, gradient in self.scaled_gradients(gradients, scale):
            yield AdamWItem(
                parameter, first[name], second[name], gradient, self.decay[name], lr_ratio=self.lr_ratio[name]
            )

    def _arrays(self, gradients: Sequence[Tensor], scale: float | Sequence[float]) -> Iterator[AdamWItem]:
        """Yields NumPy views of MindSpore's memory (on a CPU): writing to one writes to the parameter."""
        scales = expand_scale(scale, len(gradients))
        for (name, parameter), gradient, factor in zip(self.parameters.items(), gradients, scales, strict=True):
            weight = shared_array(parameter).reshape(-1)
            gradient = shared_array(gradient).reshape(-1)
            if name in self.local_ranges:
                local_range = self.local_ranges[name]
                if gradient.size == weight.size:
                    gradient = gradient[local_range]
                weight = weight[local_range]
            first, second = (self.state[kind][name].reshape(-1) for kind in ("exp_avg", "exp_avg_sq"))
            yield AdamWItem(weight, first, second, gradient, self.decay[name], factor, self.lr_ratio[name])
