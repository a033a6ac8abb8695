"""One optimizer step: accumulate -> norm -> finite check -> clip -> update.

Loss scaling (unscale, overflow, scale update) will stand between accumulate and norm, the reduction over
data-parallel ranks before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Tensor

from trainer.data.batch import Batch
from trainer.errors import RunError
from trainer.models.dropout import DropoutKey
from trainer.models.inputs import InputBuilder
from trainer.step.accumulate import WindowGradients, accumulate
from trainer.step.clip import clip_coefficient, global_norm

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.models.decoder import Decoder
    from trainer.optim.optimizer import Optimizer


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: Sum of token losses of the window / its valid tokens, in nats.
        tokens: Valid tokens of the window.
        lr: Learning rate of the update.
        global_norm: Norm of the whole gradient before clipping.
        updated: False when the window had no valid token: weights, optimizer and schedule stay as they were.
    """

    loss: float
    tokens: int
    lr: float
    global_norm: float
    updated: bool


class TrainStep:
    """The step of a run; usable without the command line: `TrainStep(...)(micro_batches) -> StepResult`.

    Args:
        model: Its call gives the sum of token losses of a micro-batch.
        optimizer: Over the model's parameters; its count of updates drives the schedule and the dropout streams.
        schedule: Learning rate of update number `n`, from 0.
        build_inputs: Turns a `Batch` into the model's inputs.
        config: `runner_wrapper` (clipping) and `seed` (dropout) are read.
        rank: Data-parallel rank; ranks draw different dropout masks.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        build_inputs: InputBuilder,
        config: Config,
        rank: int = 0,
    ) -> None:
        self.model, self.optimizer, self.schedule, self.build_inputs = model, optimizer, schedule, build_inputs
        self.wrapper, self.seed, self.rank = config.runner_wrapper, config.seed, rank
        self.sum_of_squares = model.kernels.sum_of_squares

        def scaled_loss(inputs, dropout, factor):
            return model(inputs, dropout) * factor

        self.loss_and_gradients = mindspore.value_and_grad(scaled_loss, None, list(optimizer.parameters.values()))

    def __call__(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Runs one window of micro-batches and updates the weights.

        Args:
            micro_batches: One or more batches of int32 arrays [B, T].

        Raises:
            RunError: Loss or gradient is not finite; nothing has been updated.
        """
        lr = self.schedule(self.optimizer.updates)
        window = accumulate(micro_batches, self.backward)
        if window.gradients is None:
            return StepResult(0.0, 0, lr, 0.0, updated=False)
        norm = global_norm(window.gradients, self.sum_of_squares)
        if not (math.isfinite(window.loss) and math.isfinite(norm)):
            raise self.not_finite(window, norm)
        scale = clip_coefficient(norm, self.wrapper.max_grad_norm) if self.wrapper.use_clip_grad else 1.0
        self.optimizer.update(window.gradients, lr, scale)
        return StepResult(window.loss, window.tokens, lr, norm, updated=True)

    def backward(self, batch: Batch, number: int, factor: float) -> tuple[Tensor, Sequence[Tensor]]:
        """Loss times `factor` and its gradients for one micro-batch."""
        dropout = DropoutKey(self.seed, self.rank, self.optimizer.updates, number)
        # The factor as a tensor: MindSpore keeps a kernel for every new Python number that an operator meets.
        return self.loss_and_gradients(self.build_inputs(batch), dropout, Tensor(np.float32(factor)))

    def not_finite(self, window: WindowGradients, norm: float) -> RunError:
        bad = [
            name
            for name, gradient in zip(self.optimizer.parameters, window.gradients or (), strict=True)
            if not math.isfinite(self.sum_of_squares(gradient))
        ]
        where = f"; not finite first in the gradient of {bad[0]}" if bad else ""
        return RunError(
            f"the loss is {window.loss} and the gradient's norm {norm} in optimizer step {self.optimizer.updates + 1}"
            f"{where}; the weights were not updated",
            fix="lower the learning rate, lengthen the warm-up, or turn on runner_wrapper.use_clip_grad",
        )
