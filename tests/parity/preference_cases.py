"""What the tests of preferences share: losses as TRL 1.16 computes them, and batches of pairs.

The formulas are those of trl/trainer/dpo_trainer.py (loss types sigmoid and ipo), trl/experimental/cpo (simpo) and
trl/experimental/orpo, one pair at a time. ORPO's likelihood is that of the answer, a mean over its tokens, as in its
paper; TRL takes the mean over all tokens of a batch, prompts included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tiny_trainer import TOKENS, VOCABULARY

from trainer.data.batches.batch import IGNORE_INDEX, PairBatch

TYPES = ("dpo", "ipo", "simpo", "orpo")
BETA = {"dpo": 0.3, "ipo": 0.4, "simpo": 2.0, "orpo": 0.5}
GAMMA = 0.7


def loss_of(kind: str) -> dict[str, Any]:
    """Returns the section `loss` of a configuration."""
    section: dict[str, Any] = {"type": kind, "beta": BETA[kind]}
    if kind == "simpo":
        section["gamma"] = GAMMA
    return section


class Answer(NamedTuple):
    """Log-probabilities of the tokens of an answer, and their sum before the training."""

    log_probs: np.ndarray
    reference: float


def log_sigmoid(x: Any) -> Any:
    return -np.log(1 + np.exp(-x))


def trl_loss(kind: str, chosen: Answer, rejected: Answer) -> Any:
    """Returns the loss of a pair; analytic in the log-probabilities."""
    beta = BETA[kind]
    sums = [each.log_probs.sum() for each in (chosen, rejected)]
    means = [each.log_probs.sum() / len(each.log_probs) for each in (chosen, rejected)]
    scores = [total - each.reference for total, each in zip(sums, (chosen, rejected), strict=True)]
    if kind == "dpo":
        return -log_sigmoid(beta * (scores[0] - scores[1]))
    if kind == "ipo":
        lengths = len(chosen.log_probs), len(rejected.log_probs)
        return (scores[0] / lengths[0] - scores[1] / lengths[1] - 1 / (2 * beta)) ** 2
    if kind == "simpo":
        return -log_sigmoid(beta * (means[0] - means[1] - GAMMA / beta))
    log_odds = (means[0] - means[1]) - (np.log(1 - np.exp(means[0])) - np.log(1 - np.exp(means[1])))
    return -means[0] - beta * log_sigmoid(log_odds)


def trl_rewards(kind: str, chosen: Answer, rejected: Answer) -> tuple[float, float]:
    """Returns the rewards of a pair."""
    if kind in ("dpo", "ipo"):
        first, second = (float(each.log_probs.sum() - each.reference) for each in (chosen, rejected))
    else:
        first, second = (float(each.log_probs.mean()) for each in (chosen, rejected))
    return BETA[kind] * first, BETA[kind] * second


def pair_batch(seed: int, rows: Sequence[Sequence[int]]) -> PairBatch:
    """Returns rows of documents of these lengths, an even number in each row, then padding.

    All but the first token of a document carry loss.
    """
    random = np.random.default_rng(seed)
    shape = len(rows), TOKENS
    ids_BT = random.integers(0, VOCABULARY, shape, dtype=np.int32)
    labels_BT = np.full(shape, IGNORE_INDEX, np.int32)
    positions_BT = np.zeros(shape, np.int32)
    segments_BT = np.zeros(shape, np.int32)
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate([*lengths, TOKENS - sum(lengths)]):
            end = start + length
            positions_BT[row, start:end] = np.arange(length)
            segments_BT[row, start:end] = number
            if number < len(lengths):
                labels_BT[row, start : end - 1] = ids_BT[row, start + 1 : end]
            start = end
    reference = -random.uniform(5, 9, (len(rows), max(map(len, rows))))
    return PairBatch(ids_BT, labels_BT, positions_BT, segments_BT, reference)


def answers_of(batch: PairBatch, log_probs_N: np.ndarray) -> list[Answer]:
    """Returns the answers of a batch from the log-probabilities of all labels; two consecutive ones are a pair."""
    log_probs_BT = log_probs_N.reshape(batch.labels.shape)
    found = []
    for row, segments_T in enumerate(batch.segment_ids):
        for number in range(int(segments_T.max()) + 1):
            is_label_T = (segments_T == number) & (batch.labels[row] != IGNORE_INDEX)
            if is_label_T.any():
                found.append(Answer(log_probs_BT[row][is_label_T], batch.reference[row, number]))
    return found


def trl_losses(kind: str, batch: PairBatch, log_probs_N: np.ndarray) -> Any:
    """Returns the sum of the losses of all pairs."""
    answers = answers_of(batch, log_probs_N)
    return sum(trl_loss(kind, *pair) for pair in zip(answers[::2], answers[1::2], strict=True))
