"""What the evaluations of a run have shown: its best losses, and for how long the loss has not fallen.

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

    def with_evaluation(self, found: Evaluated, keep_best: int) -> EvalHistory:
        """With one more evaluation. A loss that is not finite is never among the best; of two equal ones the earlier is
        better."""
        finite = [each for each in (*self.best, found) if math.isfinite(each.loss)]
        best = sorted(finite, key=lambda each: each.loss)[:keep_best]
        return replace(self, step=found.step, best=tuple(best))

    def with_early_stop(self, found: Evaluated, min_delta: float) -> EvalHistory:
        """The same, with the evaluation counted for EarlyStop."""
        improved = self.reference is None or found.loss < self.reference.loss - min_delta
        if improved and math.isfinite(found.loss):
            return replace(self, reference=found, without_improvement=0)
        return replace(self, without_improvement=self.without_improvement + 1)

    def stop_reason(self, early_stop: EarlyStop | None) -> str:
        """Why the run ends here, in a sentence; empty where it goes on."""
        if early_stop is None or self.without_improvement < early_stop.patience:
            return ""
        count = self.without_improvement
        if count == 1:
            evaluations = "the last evaluation"
        else:
            evaluations = f"the last {count} evaluations"
        if self.reference is None:
            return f"the loss of {evaluations} was not finite"
        least = ""
        if early_stop.min_delta:
            least = f" by more than {early_stop.min_delta:g}"
        reference = f"{self.reference.loss:.4f}, the loss at step {self.reference.step}"
        return f"the loss of {evaluations} did not fall below {reference}{least}"


def to_state(history: EvalHistory) -> dict[str, Any]:
    """As JSON, for a checkpoint's state."""
    return asdict(history) | {
        "best": [each._asdict() for each in history.best],
        "reference": history.reference and history.reference._asdict(),
    }


def from_state(state: Mapping[str, Any] | None, step: int) -> EvalHistory:
    """The history in the state of a checkpoint of `step`; an empty one for a checkpoint from before there was one."""
    if state is None:
        return EvalHistory(step=step)
    reference = None
    if state["reference"]:
        reference = Evaluated(**state["reference"])
    return EvalHistory(
        state["step"], tuple(Evaluated(**each) for each in state["best"]), reference, state["without_improvement"]
    )
