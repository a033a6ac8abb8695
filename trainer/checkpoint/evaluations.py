"""The history of a run's evaluations: its best losses, and for how long the loss has not improved.

It is part of a checkpoint's state, so that a resumed run keeps the same checkpoints and ends at the same step as one
that never stopped.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainer.storage.json_files import Count, StrictModel

if TYPE_CHECKING:
    from trainer.config.schema.callbacks import EarlyStop


class Evaluated(StrictModel):
    """An evaluation: optimizer steps done before it, and its loss in nats per token."""

    step: Count
    loss: float


class EvalHistory(StrictModel):
    """The evaluations of a run so far.

    Attributes:
        step: Optimizer steps done before the last evaluation.
        best: The evaluations with the lowest losses, the best first; as many as CheckpointMonitor.keep_best.
        reference: For EarlyStop, the last evaluation that improved by more than min_delta.
        without_improvement: Evaluations since then.
    """

    step: Count
    best: list[Evaluated]
    reference: Evaluated | None
    without_improvement: Count

    @classmethod
    def empty(cls, step: int = 0) -> EvalHistory:
        """Returns the history of a run that begins at a step."""
        return cls(step=step, best=[], reference=None, without_improvement=0)

    def with_evaluation(self, step: int, loss: float, keep_best: int) -> EvalHistory:
        """Returns the history with one more evaluation.

        A loss that is not finite is never among the best; of two equal losses the earlier one is better.
        """
        best = self.best
        if math.isfinite(loss):
            best = [*best, Evaluated(step=step, loss=loss)]
        return self.model_copy(update={"step": step, "best": sorted(best, key=lambda each: each.loss)[:keep_best]})

    def with_early_stop(self, step: int, loss: float, min_delta: float) -> EvalHistory:
        """Returns the history with an evaluation counted for EarlyStop."""
        improved = self.reference is None or loss < self.reference.loss - min_delta
        if improved and math.isfinite(loss):
            return self.model_copy(update={"reference": Evaluated(step=step, loss=loss), "without_improvement": 0})
        return self.model_copy(update={"without_improvement": self.without_improvement + 1})

    def stop_reason(self, early_stop: EarlyStop | None) -> str:
        """Returns why EarlyStop ends the run, as a sentence; empty if it continues."""
        if early_stop is None or self.without_improvement < early_stop.patience:
            return ""
        evaluations = f"the last {self.without_improvement} evaluations"
        if self.without_improvement == 1:
            evaluations = "the last evaluation"
        if self.reference is None:
            return f"the loss of {evaluations} was not finite"
        least = ""
        if early_stop.min_delta:
            least = f", by more than {early_stop.min_delta:g}"
        reference = f"{self.reference.loss:.4f}, the loss at step {self.reference.step}"
        return f"the loss of {evaluations} did not fall below {reference}{least}"
