"""Losses of answers that are compared, from the log-probabilities of their tokens.

With the score s of each answer, the sum of the log-probabilities of its tokens, or their mean:

    type    score                    loss of a pair                                            paper
    dpo     sum, minus reference     -log sigmoid(beta (s_c - s_r))                            Rafailov 2023, eq. 7
    ipo     mean, minus reference    (s_c - s_r - 1 / (2 beta))^2                              Azar 2023, eq. 17
    simpo   mean                     -log sigmoid(beta (s_c - s_r) - gamma)                    Meng 2024, eq. 6
    orpo    mean                     -s_c - beta log sigmoid(log odds(s_c) - log odds(s_r))    Hong 2024, eq. 6

    kto     sum, minus reference     w (1 - sigmoid(beta (s - z))) of a desirable answer,      Ethayarajh 2024, eq. 8
                                     w (1 - sigmoid(beta (z - s))) of an undesirable one

A reward model has a head for the score instead (`score.py` beside it), with the margin m of a pair, if it has one:

    reward  output of the head       -log sigmoid(s_c - s_r - m)                               Touvron 2023, eq. 2

kto has answers with labels instead of pairs. Its z estimates the divergence from the reference: the mean of s over the
same prompts with answers that do not belong to them, at least 0. It is a constant for the gradients. Its records are
pairs here, too, of an answer and one to another prompt. TRL computes z of a micro-batch over all ranks; here it is that
of the global batch, so that the loss does not depend on the division into micro-batches.

The paper of IPO has sums. As in TRL they are means, so that beta means the same for answers of any length. The reward
of an answer is beta times its score, of ipo beta times the sum.

Legend: N tokens of a micro-batch, B its sequences, D the most documents of a sequence, A = B * D, P = A / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trainer.config.schema.runner import LossConfig
from trainer.data.batches.batch import IGNORE_INDEX, Batch, PairBatch

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
"""Names of the sums over pairs, as in TRL."""
CHOSEN, REJECTED, MARGINS, ACCURACIES = REWARDS
DIVERGENCE = "kl"
_LARGEST_MEAN = -1e-7  # of log-probabilities: the odds of a certain answer are infinite


class PairLosses(NamedTuple):
    """The losses of pairs, and their derivatives by the scores of both answers."""

    losses_P: np.ndarray
    chosen_slopes_P: np.ndarray
    rejected_slopes_P: np.ndarray


def strength(loss: LossConfig) -> float:
    """Returns beta with its default, which is that of TRL, of simpo that of its paper."""
    if loss.beta is not None:
        return loss.beta
    if loss.type == "simpo":
        return 2.0
    return 0.1


def pair_losses(loss: LossConfig, chosen_P: np.ndarray, rejected_P: np.ndarray) -> PairLosses:
    """Computes the losses of pairs from the scores of their answers, float64."""
    beta = strength(loss)
    margins_P = chosen_P - rejected_P
    if loss.type == "ipo":
        excess_P = margins_P - 1 / (2 * beta)
        return PairLosses(excess_P**2, 2 * excess_P, -2 * excess_P)
    if loss.type == "orpo":
        chosen_P = np.minimum(chosen_P, _LARGEST_MEAN)
        rejected_P = np.minimum(rejected_P, _LARGEST_MEAN)
        odds_P = (chosen_P - _log_complement(chosen_P)) - (rejected_P - _log_complement(rejected_P))
        slopes_P = -beta * _sigmoid(-odds_P)
        return PairLosses(
            -chosen_P + beta * np.logaddexp(0, -odds_P),
            -1 - slopes_P / np.expm1(chosen_P),
            slopes_P / np.expm1(rejected_P),
        )
    logits_P = beta * margins_P
    if loss.type == "simpo":
        logits_P = logits_P - loss.gamma
    slopes_P = -beta * _sigmoid(-logits_P)
    return PairLosses(np.logaddexp(0, -logits_P), slopes_P, -slopes_P)


class LabelledScores(NamedTuple):
    """What kto compares, for each answer of some records: scores are log-probabilities minus the reference's."""

    answers_P: np.ndarray
    others_P: np.ndarray
    """The scores of the answers that do not belong to the prompts."""
    desirable_P: np.ndarray
    """bool."""


class LabelledLosses(NamedTuple):
    """The losses of labelled answers, their derivatives by the scores, and sums with their counts, by name."""

    losses_P: np.ndarray
    slopes_P: np.ndarray
    sums: Mapping[str, tuple[float, float]]


def divergence(total: float, count: float) -> float:
    """Returns kto's z from the sum of the scores of answers to other prompts."""
    return max(total / max(count, 1), 0.0)


def labelled_losses(loss: LossConfig, scores: LabelledScores, z: float) -> LabelledLosses:
    """Computes the losses of labelled answers, float64.

    An accuracy is 1 for a desirable answer whose score is above z, and for an undesirable one whose score is below.
    """
    beta = strength(loss)
    desirable_P = scores.desirable_P
    signs_P = np.where(desirable_P, 1.0, -1.0)
    weights_P = np.where(desirable_P, loss.desirable_weight, loss.undesirable_weight)
    distances_P = signs_P * (scores.answers_P - z)
    wrong_P = _sigmoid(-beta * distances_P)
    rewards_P = beta * scores.answers_P
    count = len(signs_P)
    desirable = int(desirable_P.sum())
    sums = {
        CHOSEN: (float(rewards_P[desirable_P].sum()), desirable),
        REJECTED: (float(rewards_P[~desirable_P].sum()), count - desirable),
        ACCURACIES: (float((distances_P > 0).sum()), count),
        DIVERGENCE: (z * count, count),
    }
    slopes_P = -weights_P * beta * signs_P * wrong_P * _sigmoid(beta * distances_P)
    return LabelledLosses(weights_P * wrong_P, slopes_P, sums)


def add_margin(means: Mapping[str, float]) -> dict[str, float]:
    """Adds the difference of the mean rewards, which kto has no pairs for, if there are answers of both kinds."""
    if MARGINS in means or CHOSEN not in means or REJECTED not in means:
        return dict(means)
    return {**means, MARGINS: means[CHOSEN] - means[REJECTED]}


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _log_complement(x: np.ndarray) -> np.ndarray:
    """Returns log(1 - exp(x)) for x below 0."""
    return np.log(-np.expm1(x))


@dataclass
class Pairs:
    """The pairs of a micro-batch, and what a forward pass finds out about them.

    Attributes:
        documents_N: The document of each token: 2 k is the chosen answer of pair k, 2 k + 1 the rejected one.
        reference_A: Log-probability of each document before the training; zeros where the loss needs none.
        values_A: The label of each document; of a reward model the margin of each pair, at its chosen answer.
        divergence: kto's z, if it is that of more than these records; None: it is computed from them.
        log_probs_A: The sum over the tokens of each document, after the forward pass.
        labelled: What kto compares, after the forward pass.
        answers: Whether each document is an answer of a pair, after `last_tokens`.
        sums: Sums over the pairs or records and what to divide them by, by the names of `REWARDS`, after the forward
            pass.
    """

    loss: LossConfig
    count: int
    documents_N: np.ndarray
    reference_A: np.ndarray
    values_A: np.ndarray
    divergence: float | None = None
    log_probs_A: np.ndarray = field(default_factory=lambda: np.zeros(0))
    labelled: LabelledScores | None = None
    answers: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def weigh(self, losses_N: np.ndarray, valid_N1: np.ndarray) -> tuple[np.float32, np.ndarray]:
        """Computes the sum of the losses of the pairs, and its derivative by the loss of each token, float32 [N, 1].

        Args:
            losses_N: The negative log-probability of each label.
            valid_N1: 1 for a loss token, else 0.
        """
        valid_N = valid_N1[:, 0].astype(np.float64)
        size = len(self.reference_A)
        tokens_A = np.bincount(self.documents_N, valid_N, size)
        self.log_probs_A = -np.bincount(self.documents_N, losses_N * valid_N, size)
        lengths_A = np.ones(size)
        if self.loss.type not in ("dpo", "kto"):
            lengths_A = np.maximum(tokens_A, 1)
        scores_A = (self.log_probs_A - self.reference_A) / lengths_A
        is_pair_P = tokens_A.reshape(-1, 2).any(1)  # of kto one of both may be missing, see `select_documents`
        slopes_A = np.zeros(size)
        if self.loss.type == "kto":
            losses_P = self._judge(scores_A, is_pair_P, slopes_A)
        else:
            losses_P = self._compare(scores_A, lengths_A, is_pair_P, slopes_A)
        weights_N = -(slopes_A / lengths_A)[self.documents_N] * valid_N
        return np.float32(losses_P.sum()), weights_N.astype(np.float32)[:, None]

    def last_tokens(self, valid_N1: np.ndarray) -> np.ndarray:
        """Returns the places of the last tokens of the answers of all pairs, chosen and rejected ones in turn.

        Args:
            valid_N1: 1 for a loss token, else 0; an answer has some.
        """
        size = len(self.reference_A)
        has_loss_A = np.bincount(self.documents_N, valid_N1[:, 0], size) > 0
        ends = np.flatnonzero(np.append(np.diff(self.documents_N) != 0, True))
        last_A = np.zeros(size, np.int64)
        last_A[self.documents_N[ends]] = ends
        self.answers = np.repeat(has_loss_A[::2], 2)
        return last_A[self.answers]

    def compare_scores(self, scores: np.ndarray) -> tuple[np.float32, np.ndarray]:
        """Computes the sum of the losses of a reward model, and its derivatives by the scores, float32 [A].

        Args:
            scores: Those of the answers of `last_tokens`.
        """
        margins_P = scores[::2] - scores[1::2]
        logits_P = margins_P - self.values_A[self.answers][::2]
        values = scores[::2], scores[1::2], margins_P, margins_P > 0
        self.sums = {name: (float(value.sum()), len(value)) for name, value in zip(REWARDS, values, strict=True)}
        slopes = np.zeros(len(scores), np.float32)
        slopes[::2] = -_sigmoid(-logits_P)
        slopes[1::2] = -slopes[::2]
        return np.float32(np.logaddexp(0, -logits_P).sum()), slopes

    def _judge(self, scores_A: np.ndarray, is_record_P: np.ndarray, slopes_A: np.ndarray) -> np.ndarray:
        """Returns the losses of labelled answers, and writes their derivatives by the scores."""
        desirable_P = self.values_A[::2][is_record_P] > 0
        self.labelled = LabelledScores(scores_A[::2][is_record_P], scores_A[1::2][is_record_P], desirable_P)
        z = self.divergence
        if z is None:
            z = divergence(self.labelled.others_P.sum(), len(desirable_P))
        result = labelled_losses(self.loss, self.labelled, z)
        self.sums = result.sums
        slopes_A[::2][is_record_P] = result.slopes_P
        return result.losses_P

    def _compare(
        self, scores_A: np.ndarray, lengths_A: np.ndarray, is_pair_P: np.ndarray, slopes_A: np.ndarray
    ) -> np.ndarray:
        """Returns the losses of pairs, and writes their derivatives by the scores."""
        result = pair_losses(self.loss, scores_A[::2][is_pair_P], scores_A[1::2][is_pair_P])
        # TRL's rewards of ipo are sums, although its loss has means.
        scale_A = np.full(len(scores_A), strength(self.loss))
        if self.loss.type == "ipo":
            scale_A *= lengths_A
        rewards_A = scores_A * scale_A
        rewards = rewards_A[::2][is_pair_P], rewards_A[1::2][is_pair_P]
        values = *rewards, rewards[0] - rewards[1], (rewards[0] > rewards[1]).astype(np.float64)
        self.sums = {name: (float(value.sum()), len(value)) for name, value in zip(REWARDS, values, strict=True)}
        slopes_A[::2][is_pair_P] = result.chosen_slopes_P
        slopes_A[1::2][is_pair_P] = result.rejected_slopes_P
        return result.losses_P


def find_pairs(batch: Batch | PairBatch, loss: LossConfig) -> Pairs:
    """Finds the pairs of a batch; documents 2 k and 2 k + 1 of a sequence are one."""
    rows = len(batch.segment_ids)
    documents = int(batch.segment_ids.max()) // 2 * 2 + 2
    reference_BA = np.zeros((rows, documents))
    if loss.needs_reference:
        if not isinstance(batch, PairBatch) or not batch.reference.shape[1]:
            raise ValueError(f"{loss.type} needs the log-probabilities before the training")
        known = min(documents, batch.reference.shape[1])  # beyond the documents of these rows it is 0
        reference_BA[:, :known] = batch.reference[:, :known]
    documents_BT = batch.segment_ids + documents * np.arange(rows)[:, None]
    first_BT = documents_BT[batch.labels != IGNORE_INDEX]
    values_A = np.zeros(rows * documents)
    if isinstance(batch, PairBatch):
        values_A[documents_BT] = batch.values
    return Pairs(loss, len(np.unique(first_BT // 2)), documents_BT.reshape(-1), reference_BA.reshape(-1), values_A)
