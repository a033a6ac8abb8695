"""Averages of the trained weights: exponential moving averages, and the average that replaces weights (PMA).

They are state arrays of the optimizer, so they are sharded over ranks, saved and restored as its other arrays are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from trainer.ops.updates.averages import HostAveraging
from trainer.optim.groups import EMA, PMA, average_names

if TYPE_CHECKING:
    from trainer.config.schema.optimizer import OptimizerConfig
    from trainer.optim.base import Optimizer


class WeightAverages:
    """The averages that `settings` asks for, in float32, beginning with the weights that the optimizer has now.

    After each update that is applied, with w the new weight:

        ema = ema_decay ema + (1 - ema_decay) w

    and with PmaAdamW, as in MindSpore Transformers (mindformers/core/optim/pma_adamw.py, commit 167a50de), after every
    `interleave_step` updates:

        fused_algo ema: pma = (1 - ema_alpha) pma + ema_alpha w;   sma: pma = the mean of these w

    After `fused_num` of these, w = pma and pma = 0. With ema the weights are thus multiplied by
    1 - (1 - ema_alpha)^fused_num each time, apart from the average.
    """

    def __init__(self, optimizer: Optimizer, settings: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.host = HostAveraging()
        names = average_names(settings)
        if PMA in names:
            optimizer.state[PMA] = {name: np.zeros_like(weight) for name, weight in self._weights().items()}
        if EMA in names:
            optimizer.state[EMA] = {name: np.array(weight) for name, weight in self._weights().items()}

    def update(self) -> None:
        """Averages the weights after an update; replaces them where it is time. All ranks call this."""
        if self.settings.type == "PmaAdamW":
            self._fuse()
        if self.settings.ema_decay is not None:
            self.host.blend(self._pairs(EMA), 1 - self.settings.ema_decay)

    @contextlib.contextmanager
    def in_use(self, refresh: Callable[[], None]) -> Iterator[None]:
        """Lets the model have its moving averages in the place of its weights while the block lasts. All ranks call it.

        Args:
            refresh: Called after each change of the weights.
        """
        self._exchange()
        refresh()
        try:
            yield
        finally:
            self._exchange()
            refresh()

    def _fuse(self) -> None:
        """Takes the weights into the average of PmaAdamW every `interleave_step` updates."""
        number, rest = divmod(self.optimizer.updates, self.settings.interleave_step)
        if rest:
            return
        number = (number - 1) % self.settings.fused_num + 1
        rate = self.settings.ema_alpha
        if self.settings.fused_algo == "sma":
            rate = 1 / number
        self.host.blend(self._pairs(PMA), rate)
        if number == self.settings.fused_num:
            self.host.exchange(self._pairs(PMA))
            self._gather()
            for average in self.optimizer.state[PMA].values():
                average.fill(0)

    def _exchange(self) -> None:
        self.host.exchange(self._pairs(EMA))
        self._gather()

    def _weights(self) -> dict[str, np.ndarray]:
        """Returns views of this rank's ranges of the trained weights: writing to one writes to the parameter."""
        weights = {name: parameter.asnumpy() for name, parameter in self.optimizer.parameters.items()}
        for name, local_range in self.optimizer.local_ranges.items():
            weights[name] = weights[name].reshape(-1)[local_range]
        return weights

    def _pairs(self, kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
        averages = self.optimizer.state[kind]
        return [(averages[name], weight) for name, weight in self._weights().items()]

    def _gather(self) -> None:
        """Completes the sharded weights, of which this rank has changed its ranges."""
        for shard in dict.fromkeys(self.optimizer.shards.values()):
            names = [name for name, each in self.optimizer.shards.items() if each == shard]
            assert shard.all_gather is not None, "an optimizer whose state is sharded has this collective"
            shard.all_gather([self.optimizer.parameters[name] for name in names], None)
