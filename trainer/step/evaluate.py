"""Evaluation: mean loss per loss token over a data set, without dropout and without gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.arrays.vocabulary.preferences import (
    ACCURACIES,
    MARGINS,
    REWARDS,
    LabelledScores,
    Pairs,
    add_margin,
    divergence,
    labelled_losses,
)
from trainer.data.batches.batch import Batch
from trainer.errors import RunError
from trainer.models.inputs import ModelInputs
from trainer.ops.measures import metric_functions, read_together
from trainer.parallel.communicator import Communicator
from trainer.step.accumulate import count_loss_tokens

if TYPE_CHECKING:
    from trainer.config.schema.runner import LossConfig
    from trainer.models.inputs import LossSums

_NO_SCORES = LabelledScores(np.zeros(0), np.zeros(0), np.zeros(0, bool))


class EvaluationResult(NamedTuple):
    """Mean loss in nats per loss token, number of loss tokens, seconds; of images also the accuracy (0 to 1).

    A loss of preferences is a mean over pairs. The accuracy is then the fraction of the pairs whose chosen answer has
    the higher reward, and the margin the mean difference of the rewards. For answers with labels see
    `trainer.arrays.vocabulary.preferences.labelled_losses`: their margin is the difference of two means, None without
    one of them.

    With a teacher, kl is the mean divergence from it in nats, see `trainer.arrays.vocabulary.distillation`.
    """

    loss: float
    tokens: int
    seconds: float
    accuracy: float | None = None
    margin: float | None = None
    kl: float | None = None


def evaluate(
    model: Callable[[ModelInputs], LossSums], build_inputs: Callable[[Any], Any], batches: Iterable[Batch],
    stop: Callable[[], bool], communicator: Communicator | None = None, computes_together: bool = False,
    loss: LossConfig | None = None,
) -> EvaluationResult | None:  # fmt: skip
    """Computes the mean loss over the loss tokens of all ranks; None if `stop` ended it early on any rank.

    Args:
        batches: This rank's batches.
        stop: Called before each batch; returns True after a stop signal.
        computes_together: All ranks have the same batches; the result is the mean over the ranks.
        loss: The loss of answers that are compared, a mean over the pairs or records; None: of tokens or images.

    Raises:
        RunError: The data has no loss token.
    """
    if communicator is None:
        communicator = Communicator()
    began = time.perf_counter()
    measures = metric_functions()
    losses = []
    hits = []
    answers = AnswerTotals()
    divergences = []
    tokens = 0
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
                answers.add(inputs.pairs)
            if isinstance(inputs, ModelInputs) and inputs.distillation is not None:
                divergences.append(inputs.distillation.divergence)
    sums_of_batches = [measures.sum_scalars(each) if each else 0.0 for each in (losses, hits)]
    local_loss, local_hits = read_together(sums_of_batches)
    counts = [float(local_loss), tokens, stopped, float(local_hits), bool(hits), sum(divergences), bool(divergences)]
    ranks = 1
    if computes_together:
        ranks = communicator.size
    sums_of_ranks = [value / ranks for value in communicator.all_reduce_exact(counts)]
    loss_sum, total, stops, all_hits, has_hits, divergence_sum, has_teacher = sums_of_ranks
    if stops:
        return None
    if total == 0:
        fix = "add data, raise held_out, or check train_on"
        raise RunError("every label is masked, so there is no loss", key="eval_dataset", fix=fix)
    accuracy = None
    margin = None
    mean = loss_sum / total
    if has_hits:
        accuracy = all_hits / total
    if loss is not None:
        mean, accuracy, margin = answers.reduce(loss, float(local_loss), communicator)
    kl = None
    if has_teacher:
        kl = divergence_sum / total
    return EvaluationResult(mean, int(total), time.perf_counter() - began, accuracy, margin, kl)


class AnswerTotals:
    """Adds up what the batches of an evaluation say about answers that are compared."""

    def __init__(self) -> None:
        self.items = 0
        self.sums: dict[str, tuple[float, float]] = {}
        self.labelled: list[LabelledScores] = []

    def add(self, pairs: Pairs) -> None:
        """Adds the pairs or records of a batch."""
        self.items += pairs.count
        if pairs.labelled is not None:
            self.labelled.append(pairs.labelled)
            return
        for name, (value, count) in pairs.sums.items():
            total, items = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + value, items + count)

    def reduce(
        self, loss: LossConfig, loss_sum: float, communicator: Communicator
    ) -> tuple[float, float, float | None]:
        """Returns mean loss, accuracy and margin over all ranks.

        The loss of answers with labels depends on a mean over all of them, and so is computed at the end.
        """
        sums = self.sums
        if loss.answers == "labels":
            scores = LabelledScores(*(np.concatenate(each) for each in zip(*[_NO_SCORES, *self.labelled], strict=True)))
            totals = communicator.all_reduce_exact([float(scores.others_P.sum()), len(scores.others_P)])
            result = labelled_losses(loss, scores, divergence(*totals))
            loss_sum = float(result.losses_P.sum())
            sums = result.sums
        numbers = [loss_sum, self.items]
        for name in REWARDS:
            numbers += sums.get(name, (0.0, 0.0))
        reduced = communicator.all_reduce_exact(numbers)
        places = zip(REWARDS, reduced[2::2], reduced[3::2], strict=True)
        means = add_margin({name: total / count for name, total, count in places if count})
        return reduced[0] / reduced[1], means[ACCURACIES], means.get(MARGINS)


def perplexity(loss: float) -> float:
    """Returns exp(loss), or inf where that exceeds a float."""
    if loss < 700:
        return math.exp(loss)
    return math.inf
