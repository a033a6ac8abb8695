"""The history of a run's evaluations: its best losses, and for how long the loss has not improved.

It is part of a checkpoint's state, so that a resumed run keeps the same checkpoints and ends at the same step as one
that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trainer.config.schema.callbacks import EarlyStop


class Evaluated(NamedTuple):
    """An evaluation: optimizer steps done before it, and its loss in nats per token."""

    step: int
    loss: float


@dataclass(frozen=True)
class EvalHistory:
    """The evaluations of a run so far.

    Attributes:
        step: Optimizer steps done before the last evaluation.
        best: The evaluations with the lowest losses, the best first; as many as CheckpointMonitor.keep_best.
        reference: For EarlyStop, the last evaluation that improved by more than min_delta.
        without_improvement: Evaluations since then.
    """

    step: int = 0
    best: tuple[Evaluated, ...] = ()
    reference: Evaluated | None = None
    without_improvement: int = 0

    def with_evaluation(self, evaluated: Evaluated, keep_best: int) -> EvalHistory:
        """Returns the history with one more evaluation.

        A loss that is not finite is never among the best; of two equal losses the earlier one is better.
        """
        finite = [each for each in (*self.best, evaluated) if math.isfinite(each.loss)]
        best = sorted(finite, key=lambda each: each.loss)[:keep_best]
        return replace(self, step=evaluated.step, best=tuple(best))

    def with_early_stop(self, evaluated: Evaluated, min_delta: float) -> EvalHistory:
        """Returns the history with an evaluation counted for EarlyStop."""
        improved = self.reference is None or evaluated.loss < self.reference.loss - min_delta
        if improved and math.isfinite(evaluated.loss):
            return replace(self, reference=evaluated, without_improvement=0)
        return replace(self, without_improvement=self.without_improvement + 1)

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
            least = f" by more than {early_stop.min_delta:g}"
        reference = f"{self.reference.loss:.4f}, the loss at step {self.reference.step}"
        return f"the loss of {evaluations} did not fall below {reference}{least}"


def to_state(history: EvalHistory) -> dict[str, Any]:
    """Returns the history as JSON values, for a checkpoint's state."""
    return asdict(history) | {
        "best": [each._asdict() for each in history.best],
        "reference": history.reference and history.reference._asdict(),
    }


def from_state(state: Mapping[str, Any] | None, step: int) -> EvalHistory:
    """Reads the history from the state of a checkpoint of `step`; empty for older checkpoints, which have none."""
    if state is None:
        return EvalHistory(step=step)
    best = tuple(Evaluated(**each) for each in state["best"])
    reference = state["reference"] and Evaluated(**state["reference"])
    return EvalHistory(state["step"], best, reference, state["without_improvement"])
