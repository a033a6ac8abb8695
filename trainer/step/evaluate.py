"""Evaluation: mean loss per valid token over a data set, without dropout and without gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from trainer.data.batches.batch import Batch
from trainer.errors import RunError
from trainer.ops.measures import metric_functions, read_together
from trainer.parallel.communicator import Communicator
from trainer.step.accumulate import count_loss_tokens

if TYPE_CHECKING:
    from trainer.models.inputs import InputBuilder, LossSums, ModelInputs


class EvaluationResult(NamedTuple):
    """Mean loss in nats per valid token, valid tokens, seconds; for a classifier also its accuracy (0 to 1)."""

    loss: float
    tokens: int
    seconds: float
    accuracy: float | None = None


def evaluate(
    model: Callable[[ModelInputs], LossSums],
    build_inputs: InputBuilder,
    batches: Iterable[Batch],
    stop: Callable[[], bool],
    communicator: Communicator | None = None,
    computes_together: bool = False,
) -> EvaluationResult | None:
    """Mean loss over all valid labels of all ranks; None when `stop` ended it early on any rank.

    `batches` are this rank's; `stop` is called before each and is True after a signal. With `computes_together` all
    ranks have the same ones, and the mean of what they find is the result.

    Raises:
        RunError: The data has no valid token.
    """
    if communicator is None:
        communicator = Communicator()
    began = time.perf_counter()
    measures = metric_functions()
    losses = []
    hits = []
    tokens = 0
    stopped = False
    for batch in batches:
        if stop():
            stopped = True
            break
        count = count_loss_tokens(batch)
        if count or not communicator.skips_empty:
            sums = model(build_inputs(batch))
            if not communicator.reports_losses:
                continue
            losses.append(measures.keep_scalar(sums.tokens))
            if sums.correct is not None:
                hits.append(measures.keep_scalar(sums.correct))
            tokens += count if communicator.reports_tokens else 0
    loss_sum, own_hits = read_together([measures.sum_scalars(each) if each else 0.0 for each in (losses, hits)])
    counts = [float(loss_sum), tokens, stopped, float(own_hits), bool(hits)]
    ranks = 1
    if computes_together:
        ranks = communicator.size
    loss_sum, total, stops, all_hits, counted = (found / ranks for found in communicator.all_reduce_exact(counts))
    if stops:
        return None
    if total == 0:
        raise RunError(
            "every label is masked, so there is no loss",
            key="eval_dataset",
            fix="add data, raise held_out, or check train_on",
        )
    accuracy = None
    if counted:
        accuracy = all_hits / total
    return EvaluationResult(loss_sum / total, int(total), time.perf_counter() - began, accuracy)


def perplexity(loss: float) -> float:
    """exp(loss); inf where that exceeds a float."""
    if loss < 700:
        return math.exp(loss)
    return math.inf
