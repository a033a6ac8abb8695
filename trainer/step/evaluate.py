"""Evaluation: mean loss of a valid token over a data set, without dropout and without gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from trainer.data.batch import Batch
from trainer.errors import RunError
from trainer.step.accumulate import valid_tokens

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder
    from trainer.models.inputs import InputBuilder


def evaluate(
    model: Decoder, build_inputs: InputBuilder, batches: Iterable[Batch], stop: Callable[[], bool]
) -> tuple[float, int, float]:
    """Mean loss over all valid labels.

    Args:
        model: The decoder.
        build_inputs: Makes its inputs.
        batches: What to read.
        stop: Asked before every batch; True ends the evaluation early (a signal came).

    Returns:
        Loss in nats per valid token, valid tokens, seconds.

    Raises:
        RunError: There was no valid token.
    """
    began = time.perf_counter()
    loss_sum, tokens = 0.0, 0
    for batch in batches:
        if stop():
            break
        count = valid_tokens(batch)
        if count:
            loss_sum += float(model(build_inputs(batch)).tokens.asnumpy())
            tokens += count
    if tokens == 0 and not stop():
        raise RunError(
            "the evaluation data holds no token with a loss",
            key="eval_dataset",
            fix="give more data, a larger held_out, or documents whose answers are not masked",
        )
    return (loss_sum / tokens if tokens else math.nan), tokens, time.perf_counter() - began


def perplexity(loss: float) -> float:
    """exp(loss); inf where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf
