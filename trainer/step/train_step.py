"""One optimizer step, in this order:

    forward and backward of each micro-batch -> sum over micro-batches and ranks -> unscale -> finite check
    -> loss-scale update -> norm -> clip -> update
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Tensor

from trainer.data.batch import Batch
from trainer.errors import RunError
from trainer.models.decoder import LossSums
from trainer.models.dropout import DropoutKey
from trainer.models.inputs import InputBuilder
from trainer.models.moe import Tally
from trainer.ops.routing import RoutingCounts
from trainer.parallel.peers import Alone, Peers
from trainer.step.accumulate import MicroBatch, WindowGradients, accumulate, valid_tokens
from trainer.step.clip import clip, global_norm
from trainer.step.loss_scale import build_loss_scale

if TYPE_CHECKING:
    from trainer.config import RunnerWrapper
    from trainer.models.decoder import Decoder
    from trainer.optim.optimizer import Optimizer

MOST_OVERFLOWS_IN_A_ROW = 10
"""So many steps with overflow, one after the other, end a run: no scale will help it."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: Sum of token losses of the window / its valid tokens, in nats; not multiplied by the loss scale.
        tokens: Valid tokens of the window.
        lr: Learning rate of the update.
        global_norm: Norm of the whole gradient, unscaled and before clipping; inf or nan on overflow.
        updated: Whether weights, optimizer and schedule moved on.
        skipped: Why not, in words, with details behind a colon; empty when they did.
        loss_scale: Factor on the loss in this step's backward passes.
        overflow: Whether the scaled gradient was not finite.
        empty_micro_batches: Micro-batches without a valid token.
        local_norms: Norm of each parameter's gradient by name, unscaled and before clipping; empty unless
            `runner_wrapper.local_norm` asks for them.
        losses: Further losses by name, before their factors: aux_loss (mean over the layers with experts; 1 is an even
            load), z_loss (likewise), mtp_loss (mean over the labels of the modules for further tokens).
        routing: What the routers of the window did; None for a dense model.
        reduce_seconds: Time that the sum of gradients over the ranks took, waiting for the last rank included.
    """

    loss: float
    tokens: int
    lr: float
    global_norm: float
    updated: bool
    skipped: str = ""
    loss_scale: float = 1.0
    overflow: bool = False
    empty_micro_batches: int = 0
    local_norms: Mapping[str, float] | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    routing: RoutingCounts | None = None
    reduce_seconds: float = 0.0


class TrainStep:
    """The step of a run; usable without the command line, in a notebook for example.

        step = TrainStep(model, optimizer, lambda update: 1e-3, InputBuilder(settings, kernels), RunnerWrapper())
        result = step([batch_1, batch_2])       # one update from two micro-batches

    Args:
        model: Its call gives the sums of the losses of a micro-batch, see `trainer.models.decoder.LossSums`.
        optimizer: Over the parameters to train, with respect to which alone gradients are computed; its count of
            updates drives the schedule and the dropout streams.
        schedule: Learning rate of update number `n`, from 0.
        build_inputs: Turns a `Batch` into the model's inputs.
        wrapper: The section `runner_wrapper`: clipping, loss scale, skipping.
        seed: Of dropout.
        peers: The other data-parallel ranks; None: there are none. Ranks draw different dropout masks.
        stop_at_bad_loss: A loss that is not finite raises, even where loss scaling would skip the step.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        build_inputs: InputBuilder,
        wrapper: RunnerWrapper,
        *,
        seed: int = 1,
        peers: Peers | None = None,
        stop_at_bad_loss: bool = False,
    ) -> None:
        self.model, self.optimizer, self.schedule, self.build_inputs = model, optimizer, schedule, build_inputs
        self.wrapper, self.seed, self.stop_at_bad_loss = wrapper, seed, stop_at_bad_loss
        self.peers = Alone() if peers is None else peers
        self.sum_of_squares = model.kernels.sum_of_squares
        self.loss_scale = build_loss_scale(wrapper)
        self.spikes, self.spikes_in_a_row = 0, 0

        def scaled_loss(inputs, dropout, tally, factor):
            sums = model(inputs, dropout, tally)
            return sums.total * factor, *sums[1:]

        parameters = list(optimizer.parameters.values())
        self.gradients_of = mindspore.value_and_grad(scaled_loss, None, parameters, has_aux=True)

    def __call__(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Runs one window of micro-batches and updates the weights.

        Args:
            micro_batches: One or more batches of int32 arrays [B, T]; a last, partial window is simply shorter.

        Raises:
            RunError: Loss or gradient is not finite and no loss scale is to blame, ten steps in a row overflowed, or
                too many norms in a row were spikes. Nothing has been updated.
        """
        lr, scale = self.schedule(self.optimizer.updates), self.loss_scale.value
        window = accumulate(micro_batches, self.backward, scale, self.peers)

        def result(norm: float, skipped: str = "", **more) -> StepResult:
            return StepResult(
                window.loss, window.tokens, lr, norm, updated=not skipped, skipped=skipped, loss_scale=scale,
                empty_micro_batches=window.empty, losses=window.others, routing=window.routing,
                reduce_seconds=window.reduce_seconds, **more,
            )  # fmt: skip

        if window.gradients is None:
            return result(0.0, "no token with a loss")
        squares = [self.sum_of_squares(gradient) for gradient in window.gradients]
        # Dividing the norm by the scale, and the gradients in the update, spares a pass over all of them.
        norm = global_norm(squares, float) / scale
        if not (math.isfinite(norm) and math.isfinite(window.loss)):
            return self.overflow(window, norm, squares, result)
        self.loss_scale.update(overflow=False)
        if self.is_spike(norm):
            return result(norm, f"spike: norm {norm:.3g}")
        names = list(self.optimizer.parameters)
        gradients, factors = clip(window.gradients, squares, names, self.wrapper, self.optimizer.group_of, scale)
        self.optimizer.update(gradients, lr, factors)
        self.model.balance_choices(window.routing)
        return result(norm, local_norms=self.local_norms(squares, scale))

    def backward(self, batch: Batch, number: int, factor: float) -> MicroBatch:
        """Losses of one micro-batch as sums over tokens, and the gradients of what is minimised times `factor`."""
        dropout = DropoutKey(self.seed, self.peers.rank, self.optimizer.updates, number)
        inputs = self.build_inputs(batch)
        tally = Tally(inputs.shares)
        # The factor as a tensor: MindSpore keeps a kernel for every new Python number that an operator meets.
        outputs, gradients = self.gradients_of(inputs, dropout, tally, Tensor(np.float32(factor)))
        sums = LossSums(*outputs)
        settings, tokens = self.model.settings, valid_tokens(batch)
        others = {}
        if settings.mtp_depth:
            # A module has fewer labels than the main model: none for the last tokens of a row or document.
            labels = sum(float(further.valid_N1.asnumpy().sum()) for further in inputs.further)
            others["mtp_loss"] = (sums.mtp, labels)
        if settings.moe_layers:
            others["aux_loss"] = (sums.balance, tokens * len(settings.moe_layers))
        if settings.moe_layers and settings.experts.z_loss_factor:
            others["z_loss"] = (sums.z, tokens * len(settings.moe_layers))
        other_sums = {name: (float(value.asnumpy()), weight) for name, (value, weight) in others.items()}
        return MicroBatch(float(sums.tokens.asnumpy()), other_sums, tally.counts(), gradients)

    def overflow(
        self, window: WindowGradients, norm: float, squares: Sequence[float], result: Callable
    ) -> StepResult:
        """Skips the update and lowers the scale; raises where that would hide a broken training."""
        bad_loss = self.stop_at_bad_loss and not math.isfinite(window.loss)
        if bad_loss or not self.loss_scale.active:
            raise self.not_finite(window, norm, squares)
        scale = self.loss_scale.value
        self.loss_scale.update(overflow=True)
        if self.loss_scale.overflows_in_a_row >= MOST_OVERFLOWS_IN_A_ROW:
            raise RunError(
                f"{MOST_OVERFLOWS_IN_A_ROW} steps in a row overflowed, the last with loss scale {scale:g}"
                f"{self.first_bad(squares)}; the weights were not updated in them",
                key="runner_wrapper.scale_sense",
                fix="lower the learning rate, compute norms and softmax in float32 (amp_level auto), or start from a "
                "smaller scale",
            )
        return result(math.nan, "overflow", overflow=True)

    def is_spike(self, norm: float) -> bool:
        """Whether this window is to be skipped for its norm.

        Raises:
            RunError: It is one spike too many in a row.
        """
        wrapper = self.wrapper
        if not wrapper.use_skip_data_by_global_norm or norm <= wrapper.global_norm_spike_threshold:
            self.spikes_in_a_row = 0
            return False
        self.spikes += 1
        self.spikes_in_a_row += 1
        if self.spikes_in_a_row >= wrapper.global_norm_spike_count_threshold:
            raise RunError(
                f"the gradient's norm was above {wrapper.global_norm_spike_threshold:g} in {self.spikes_in_a_row} steps"
                f" in a row, {norm:.3g} in the last; their data was skipped",
                key="runner_wrapper.global_norm_spike_threshold",
                fix="raise the threshold, or lower the learning rate",
            )
        return True

    def local_norms(self, squares: Sequence[float], scale: float) -> Mapping[str, float] | None:
        if not self.wrapper.local_norm:
            return None
        return {
            name: math.sqrt(square) / scale for name, square in zip(self.optimizer.parameters, squares, strict=True)
        }

    def not_finite(self, window: WindowGradients, norm: float, squares: Sequence[float]) -> RunError:
        ways = ["lower the learning rate", "lengthen the warm-up"]
        ways += [] if self.wrapper.use_clip_grad else ["turn on runner_wrapper.use_clip_grad"]
        return RunError(
            f"the loss is {window.loss} and the gradient's norm {norm} in optimizer step {self.optimizer.updates + 1}"
            f"{self.first_bad(squares)}; the weights were not updated",
            fix=f"{', '.join(ways[:-1])} or {ways[-1]}",
        )

    def first_bad(self, squares: Sequence[float]) -> str:
        """Names the first parameter whose gradient is not finite."""
        names = zip(self.optimizer.parameters, squares, strict=True)
        bad = next((name for name, square in names if not math.isfinite(square)), None)
        return f"; not finite first in the gradient of {bad}" if bad else ""

    def state(self) -> dict:
        """What a checkpoint keeps of the step, beside the optimizer."""
        return {
            "loss_scale": self.loss_scale.state(),
            "spikes": self.spikes,
            "spikes_in_a_row": self.spikes_in_a_row,
        }

    def load_state(self, state: Mapping) -> None:
        """Takes over what `state` gave."""
        self.loss_scale.load_state(state["loss_scale"])
        self.spikes, self.spikes_in_a_row = int(state["spikes"]), int(state["spikes_in_a_row"])
