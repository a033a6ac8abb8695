"""What the tests of preferences share: losses as TRL 1.16 computes them, and batches of pairs.

KTO is that of trl/trainer/kto_trainer.py, `_compute_loss`, with all records in one batch: its KL term is a mean over a
batch of all ranks.

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

REWARD_MARGIN = 0.8  # of the records with a label
PAIRED = ("dpo", "ipo", "simpo", "orpo")
TYPES = (*PAIRED, "kto")
BETA = {"dpo": 0.3, "ipo": 0.4, "simpo": 2.0, "orpo": 0.5, "kto": 0.3}
GAMMA = 0.7
WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.6}


def loss_of(kind: str) -> dict[str, Any]:
    """Returns the section `loss` of a configuration."""
    if kind == "reward":
        return {"type": kind}
    section: dict[str, Any] = {"type": kind, "beta": BETA[kind]}
    if kind == "simpo":
        section["gamma"] = GAMMA
    if kind == "kto":
        section |= WEIGHTS
    return section


class Answer(NamedTuple):
    """Log-probabilities of the tokens of an answer, their sum before the training, and the label of the answer."""

    log_probs: np.ndarray
    reference: float
    label: bool = False


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


class KtoResult(NamedTuple):
    """What TRL computes of a batch: losses in the order of its records, the KL term, and rewards by label."""

    losses: np.ndarray
    kl: float
    chosen: np.ndarray
    rejected: np.ndarray


def trl_kto(answers: Sequence[Answer]) -> KtoResult:
    """Returns TRL's results for records, each an answer and one to another prompt; the KL term has no derivative."""
    beta = BETA["kto"]
    kl = np.mean([float(np.real(each.log_probs.sum())) - each.reference for each in answers[1::2]])
    kl = max(kl, 0.0)
    losses = []
    rewards: dict[bool, list[Any]] = {True: [], False: []}
    for answer in answers[::2]:
        ratio = answer.log_probs.sum() - answer.reference
        if answer.label:
            losses.append(WEIGHTS["desirable_weight"] * (1 - sigmoid(beta * (ratio - kl))))
        else:
            losses.append(WEIGHTS["undesirable_weight"] * (1 - sigmoid(beta * (kl - ratio))))
        rewards[answer.label].append(beta * ratio)
    return KtoResult(np.array(losses), float(kl), np.array(rewards[True]), np.array(rewards[False]))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


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
    reference[:, 1::2] -= 9  # so that kto's KL term, which these answers have, is above 0
    values_BT = (segments_BT // 2 + np.arange(seed, seed + len(rows))[:, None]) % 2  # the records take turns
    return PairBatch(ids_BT, labels_BT, positions_BT, segments_BT, values_BT.astype(np.float32), reference)


def answers_of(batch: PairBatch, log_probs_N: np.ndarray) -> list[Answer]:
    """Returns the answers of a batch from the log-probabilities of all labels; two consecutive ones are a pair."""
    log_probs_BT = log_probs_N.reshape(batch.labels.shape)
    found = []
    for row, segments_T in enumerate(batch.segment_ids):
        for number in range(int(segments_T.max()) + 1):
            is_label_T = (segments_T == number) & (batch.labels[row] != IGNORE_INDEX)
            if is_label_T.any():
                label = bool(batch.values[row][is_label_T][0])
                found.append(Answer(log_probs_BT[row][is_label_T], batch.reference[row, number], label))
    return found


def trl_losses(kind: str, batch: PairBatch, log_probs_N: np.ndarray) -> Any:
    """Returns the sum of the losses of all pairs or records."""
    answers = answers_of(batch, log_probs_N)
    if kind == "kto":
        return trl_kto(answers).losses.sum()
    return sum(trl_loss(kind, *pair) for pair in zip(answers[::2], answers[1::2], strict=True))
