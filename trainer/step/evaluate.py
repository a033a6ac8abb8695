"""Evaluation: mean loss per loss token over a data set, without dropout and without gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.arrays.preferences import ACCURACIES, MARGINS
from trainer.data.batches.batch import Batch
from trainer.errors import RunError
from trainer.models.inputs import ModelInputs
from trainer.ops.measures import metric_functions, read_together
from trainer.parallel.communicator import Communicator
from trainer.step.accumulate import count_loss_tokens

if TYPE_CHECKING:
    from trainer.models.inputs import LossSums


class EvaluationResult(NamedTuple):
    """Mean loss in nats per loss token, number of loss tokens, seconds; for a classifier also its accuracy (0 to 1).

    A loss of preferences is a mean over pairs. The accuracy is then the fraction of the pairs whose chosen answer has
    the higher reward, and the margin the mean difference of the rewards.
    """

    loss: float
    tokens: int
    seconds: float
    accuracy: float | None = None
    margin: float | None = None


def evaluate(
    model: Callable[[ModelInputs], LossSums],
    build_inputs: Callable[[Any], Any],
    batches: Iterable[Batch],
    stop: Callable[[], bool],
    communicator: Communicator | None = None,
    computes_together: bool = False,
    prefers: bool = False,
) -> EvaluationResult | None:
    """Computes the mean loss over the loss tokens of all ranks; None if `stop` ended it early on any rank.

    Args:
        batches: This rank's batches.
        stop: Called before each batch; returns True after a stop signal.
        computes_together: All ranks have the same batches; the result is the mean over the ranks.
        prefers: The loss is that of pairs of answers, a mean over the pairs.

    Raises:
        RunError: The data has no loss token.
    """
    if communicator is None:
        communicator = Communicator()
    began = time.perf_counter()
    measures = metric_functions()
    losses = []
    hits = []
    margins = []
    tokens = 0
    items = 0
    stopped = False
    for batch in batches:
        if stop():
            stopped = True
            break
        count = count_loss_tokens(batch)
        if count or not communicator.skips_empty:
            inputs = build_inputs(batch)
            sums = model(inputs)
            if not communicator.reports_losses:
                continue
            losses.append(measures.keep_scalar(sums.tokens))
            if sums.correct is not None:
                hits.append(measures.keep_scalar(sums.correct))
            if communicator.reports_tokens:
                tokens += count
            if isinstance(inputs, ModelInputs) and inputs.pairs is not None:
                items += inputs.pairs.count
                hits.append(inputs.pairs.sums[ACCURACIES])
                margins.append(inputs.pairs.sums[MARGINS])
    sums_of_batches = [measures.sum_scalars(each) if each else 0.0 for each in (losses, hits)]
    local_loss, local_hits = read_together(sums_of_batches)
    counts = [float(local_loss), tokens, stopped, float(local_hits), bool(hits)]
    if prefers:
        counts += [items, sum(margins)]
    ranks = 1
    if computes_together:
        ranks = communicator.size
    sums_of_ranks = [value / ranks for value in communicator.all_reduce_exact(counts)]
    loss_sum, total, stops, all_hits, has_hits = sums_of_ranks[:5]
    all_items = total
    if prefers:
        all_items = sums_of_ranks[5]
    if stops:
        return None
    if total == 0:
        raise RunError(
            "every label is masked, so there is no loss",
            key="eval_dataset",
            fix="add data, raise held_out, or check train_on",
        )
    accuracy = None
    if has_hits:
        accuracy = all_hits / all_items
    margin = None
    if prefers:
        margin = sums_of_ranks[6] / all_items
    return EvaluationResult(loss_sum / all_items, int(total), time.perf_counter() - began, accuracy, margin)


def perplexity(loss: float) -> float:
    """Returns exp(loss), or inf where that exceeds a float."""
    if loss < 700:
        return math.exp(loss)
    return math.inf
