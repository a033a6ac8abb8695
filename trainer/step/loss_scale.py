"""Loss scaling: the factor on the loss that keeps small float16 gradients from becoming zero. Pure Python.

The factor multiplies the loss before the backward pass and divides the gradients afterwards, so it changes no result;
it only moves intermediate gradients into the range of float16 (Micikevicius et al. 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.schema.runner import RunnerWrapper

_COUNTS = ("quiet_steps", "overflows_in_a_row", "overflows")
_SMALLEST = 1.0
"""A dynamic scale does not fall below this value, as in MindSpore's DynamicLossScaleUpdateCell; if it begins below, it
does not fall at all."""


@dataclass
class LossScale:
    """A fixed or dynamic loss scale.

    Attributes:
        value: The factor of the next step.
        factor: Divides a dynamic scale on overflow and multiplies it after `window` steps without overflow; None for a
            fixed scale.
        quiet_steps: Steps without overflow since the scale last changed.
        overflows: Steps with overflow in the whole run.
    """

    value: float = 1.0
    factor: float | None = None
    window: int = 1000
    quiet_steps: int = 0
    overflows_in_a_row: int = 0
    overflows: int = 0

    @property
    def active(self) -> bool:
        """Returns whether losses are scaled: then an overflow only skips a step, otherwise it is an error."""
        return self.factor is not None or self.value != 1.0

    def update(self, *, overflow: bool) -> None:
        """Counts a step and adjusts a dynamic scale."""
        if overflow:
            self.overflows += 1
            self.overflows_in_a_row += 1
            self.quiet_steps = 0
            if self.factor is not None:
                self.value = max(self.value / self.factor, min(self.value, _SMALLEST))
            return
        self.overflows_in_a_row = 0
        self.quiet_steps += 1
        if self.factor is not None and self.quiet_steps >= self.window:
            self.value *= self.factor
            self.quiet_steps = 0

    def state(self) -> dict[str, float]:
        """Returns the state for a checkpoint."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {"dynamic": self.factor is not None, "value": self.value, **counts}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restores what `state` returned; the value only where both scales are dynamic."""
        if self.factor is not None and state["dynamic"]:
            self.value = float(state["value"])
        for name in _COUNTS:
            setattr(self, name, int(state[name]))


def build_loss_scale(wrapper: RunnerWrapper) -> LossScale:
    """Builds the loss scale that `runner_wrapper.scale_sense` describes."""
    sense = wrapper.scale_sense
    if isinstance(sense, (int, float)):
        return LossScale(float(sense))
    if sense.type == "FixedLossScaleUpdateCell":
        return LossScale(float(sense.loss_scale_value))
    return LossScale(float(sense.loss_scale_value), float(sense.scale_factor), sense.scale_window)
