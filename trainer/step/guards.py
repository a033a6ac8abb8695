"""Decides whether a gradient may update the weights: overflow under a loss scale, and spikes of the norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.errors import RunError
from trainer.step.loss_scale import build_loss_scale

if TYPE_CHECKING:
    from trainer.config.schema.runner import RunnerWrapper

MOST_OVERFLOWS_IN_A_ROW = 10
"""This many consecutive steps with overflow end a run: no loss scale will help."""


class UpdateGuard:
    """The loss scale, and the run's counts of steps without an update.

    Args:
        wrapper: The section `runner_wrapper`: loss scale, skipping.
        stop_at_bad_loss: Raise on a loss that is not finite, even where loss scaling would skip the step.
    """

    def __init__(self, wrapper: RunnerWrapper, stop_at_bad_loss: bool = False) -> None:
        self.wrapper = wrapper
        self.stop_at_bad_loss = stop_at_bad_loss
        self.loss_scale = build_loss_scale(wrapper)
        self.spikes = 0
        self.spikes_in_a_row = 0

    @property
    def scale(self) -> float:
        """Returns the factor on the loss in the next step."""
        return self.loss_scale.value

    def check_step(self, loss: float, norm: float, *, step: int, first_nonfinite: str = "") -> str:
        """Counts the step and returns the reason to skip its update, with details after a colon; empty: it updates.

        Args:
            loss: Loss of the step.
            norm: Norm of the unscaled gradient.
            step: Number of the optimizer step, from 1.
            first_nonfinite: Text about the first gradient that is not finite, for the end of a message.

        Raises:
            RunError: Loss or gradient is not finite and no loss scale is to blame, ten steps in a row overflowed, or
                too many norms in a row were spikes.
        """
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self._count_overflow(loss, norm, step, first_nonfinite)
            return "overflow"
        self.loss_scale.update(overflow=False)
        if self._is_spike(norm):
            return f"spike: norm {norm:.3g}"
        return ""

    def _count_overflow(self, loss: float, norm: float, step: int, first_nonfinite: str) -> None:
        """Lowers the scale; raises where that would hide a broken run."""
        bad_loss = self.stop_at_bad_loss and not math.isfinite(loss)
        if bad_loss or not self.loss_scale.active:
            raise self._nonfinite_error(loss, norm, step, first_nonfinite)
        scale = self.loss_scale.value
        self.loss_scale.update(overflow=True)
        if self.loss_scale.overflows_in_a_row >= MOST_OVERFLOWS_IN_A_ROW:
            steps = f"{MOST_OVERFLOWS_IN_A_ROW} consecutive steps (loss scale {scale:g}){first_nonfinite}"
            rule = f"the gradients overflowed in {steps}; the weights were not updated"
            ways = "lower the learning rate, compute norms and softmax in float32 (amp_level auto)"
            raise RunError(rule, key="runner_wrapper.scale_sense", fix=f"{ways}, or start from a smaller scale")

    def _nonfinite_error(self, loss: float, norm: float, step: int, first_nonfinite: str) -> RunError:
        ways = ["lower the learning rate", "lengthen the warm-up"]
        if not self.wrapper.use_clip_grad:
            ways.append("turn on runner_wrapper.use_clip_grad")
        rule = f"optimizer step {step}: the loss is {loss} and the gradient norm {norm}{first_nonfinite}"
        return RunError(f"{rule}; the weights were not updated", fix=f"{', '.join(ways[:-1])} or {ways[-1]}")

    def _is_spike(self, norm: float) -> bool:
        wrapper = self.wrapper
        if not wrapper.use_skip_data_by_global_norm or norm <= wrapper.global_norm_spike_threshold:
            self.spikes_in_a_row = 0
            return False
        self.spikes += 1
        self.spikes_in_a_row += 1
        if self.spikes_in_a_row >= wrapper.global_norm_spike_count_threshold:
            steps = f"{self.spikes_in_a_row} consecutive steps ({norm:.3g} in the last)"
            rule = f"the gradient norm exceeded {wrapper.global_norm_spike_threshold:g} in {steps}"
            fix = "raise the threshold, or lower the learning rate"
            key = "runner_wrapper.global_norm_spike_threshold"
            raise RunError(f"{rule}; the weights were not updated", key=key, fix=fix)
        return True

    def state(self) -> dict:
        """Returns the state of the step for a checkpoint, without the optimizer."""
        spikes = {"spikes": self.spikes, "spikes_in_a_row": self.spikes_in_a_row}
        return {"loss_scale": self.loss_scale.state(), **spikes}

    def load_state(self, state: Mapping) -> None:
        """Restores what `state` returned."""
        self.loss_scale.load_state(state["loss_scale"])
        self.spikes = int(state["spikes"])
        self.spikes_in_a_row = int(state["spikes_in_a_row"])
