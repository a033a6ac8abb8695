"""Evaluation: mean loss of a valid token over a data set, without dropout and without gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from trainer.data.batch import Batch
from trainer.errors import RunError
from trainer.parallel.peers import Alone, Peers
from trainer.step.accumulate import valid_tokens

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder
    from trainer.models.inputs import InputBuilder


class Evaluation(NamedTuple):
    """Mean loss in nats per valid token, valid tokens, seconds."""

    loss: float
    tokens: int
    seconds: float


def evaluate(
    model: Decoder,
    build_inputs: InputBuilder,
    batches: Iterable[Batch],
    stop: Callable[[], bool],
    peers: Peers | None = None,
) -> Evaluation | None:
    """Mean loss over all valid labels of all ranks.

    Args:
        model: The decoder.
        build_inputs: Makes its inputs.
        batches: What this rank reads.
        stop: Asked before every batch; True ends the evaluation early (a signal came).
        peers: The other ranks; None: there are none.

    Returns:
        The result; None when it ended early on some rank.

    Raises:
        RunError: There was no valid token.
    """
    peers = Alone() if peers is None else peers
    began = time.perf_counter()
    loss_sum, tokens, stopped = 0.0, 0, False
    for batch in batches:
        if stop():
            stopped = True
            break
        count = valid_tokens(batch)
        if count:
            loss_sum += float(model(build_inputs(batch)).tokens.asnumpy())
            tokens += count
    loss_sum, total, stops = peers.all_sum([loss_sum, tokens, stopped])
    if stops:
        return None
    if total == 0:
        raise RunError(
            "the evaluation data holds no token with a loss",
            key="eval_dataset",
            fix="give more data, a larger held_out, or documents whose answers are not masked",
        )
    return Evaluation(loss_sum / total, int(total), time.perf_counter() - began)


def perplexity(loss: float) -> float:
    """exp(loss); inf where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf
