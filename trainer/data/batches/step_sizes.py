"""The micro-batches of each optimizer step: equally many, or growing during a ramp-up of the global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class StepSizes:
    """How many micro-batches each step takes on a rank; the last step of an epoch takes those that are left.

    With a ramp-up [start, increment, samples] the first steps have `start` sequences over all ranks. The global batch
    grows by `increment` sequences at a time, in equal intervals over the first `samples` sequences, up to that of
    `micro_batches`. Rule and rounding are those of Megatron-LM (``num_microbatches_calculator.py``) and MindSpore
    Transformers (``mindformers/pynative/trainer/dynamic_batch.py``).

    Attributes:
        batches_per_epoch: Micro-batches of an epoch on a rank; 0 if unknown.
        micro_batches: Micro-batches of a step after the ramp-up.
        rows: Sequences of a micro-batch over all ranks.
        done_before: Micro-batches that the run has read before its data began anew.
    """

    batches_per_epoch: int
    micro_batches: int
    rows: int = 1
    rampup: Sequence[int] | None = None
    done_before: int = 0

    def next_step(self, batches: int) -> int:
        """Returns the micro-batches of the step that begins after `batches` micro-batches of all epochs."""
        if self.rampup is None:
            return self.micro_batches
        start, increment, _ = self.rampup
        return (start + self._level(batches) * increment) // self.rows

    def steps_until(self, batches: int) -> int:
        """Returns the steps that take the first `batches` micro-batches of all epochs."""
        return self._count(batches, None)[1]

    def batches_of(self, steps: int) -> int:
        """Returns the micro-batches, of all epochs, that the first `steps` steps take."""
        return self._count(None, steps)[0]

    def first_full_step(self) -> int:
        """Returns the number of steps before the first one with the full global batch."""
        batches = 0
        while (change := self._next_change(batches)) is not None:
            batches = change
        return self.steps_until(batches)

    @property
    def _levels(self) -> int:
        assert self.rampup is not None
        start, increment, _ = self.rampup
        return (self.micro_batches * self.rows - start) // increment

    def _level(self, batches: int) -> int:
        """Returns by how many increments the global batch has grown."""
        assert self.rampup is not None
        samples = self.rampup[2]
        consumed = (self.done_before + batches) * self.rows
        levels = self._levels
        if consumed > samples or not levels or not samples:
            return levels
        return min(levels, int(consumed / (samples / levels)))

    def _next_change(self, batches: int) -> int | None:
        """Returns after how many micro-batches the global batch grows next; None if it has grown fully."""
        if self.rampup is None or self._level(batches) == self._levels:
            return None
        level = self._level(batches)
        change = math.ceil((level + 1) * self.rampup[2] / self._levels / self.rows) - self.done_before
        while self._level(change) == level:  # rounding
            change += 1
        while self._level(change - 1) > level:
            change -= 1
        return change

    def _count(self, batches: int | None, steps: int | None) -> tuple[int, int]:
        """Returns the micro-batches and the steps of a run from its beginning up to one of the limits."""
        done = 0
        counted = 0
        while (batches is None or done < batches) and (steps is None or counted < steps):
            size = self.next_step(done)
            in_epoch = done % self.batches_per_epoch
            ends = [end for end in (batches, self._next_change(done)) if end is not None]
            steps_of_epoch = -(-self.batches_per_epoch // size)
            # Whole epochs of equal steps, then the rest of an epoch.
            epochs = [(end - done) // self.batches_per_epoch for end in ends]
            if steps is not None:
                epochs.append((steps - counted) // steps_of_epoch)
            if not in_epoch and min(epochs):
                done += min(epochs) * self.batches_per_epoch
                counted += min(epochs) * steps_of_epoch
                continue
            left = self.batches_per_epoch - in_epoch
            taken = -(-min(left, *(end - done for end in ends), left) // size)
            if steps is not None:
                taken = min(taken, steps - counted)
            done += min(taken * size, left)
            counted += taken
        return done, counted


def step_sizes(layout: Mapping[str, Any], batches_per_epoch: int, data_from_step: int = 0) -> StepSizes:
    """Returns the sizes of the steps of a run with a data layout, see `trainer.data.datasets.data_layout`.

    Args:
        data_from_step: The step after which the data began anew.
    """
    rampup = layout.get("rampup_batch_size")
    rows = layout["batch_size"] * layout["ranks"]
    sizes = StepSizes(batches_per_epoch, layout["gradient_accumulation_steps"], rows, rampup)
    if rampup is None or not data_from_step:
        return sizes
    return replace(sizes, done_before=sizes.batches_of(data_from_step))
