"""Defines a micro-batch of training sequences, as plain numpy arrays.

Shape legend: B sequences of a micro-batch, T tokens of a sequence (``model_config.seq_length``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

IGNORE_INDEX = -100


class Batch(NamedTuple):
    """B sequences of T tokens; every array is int32, C-contiguous and of shape [B, T].

    Attributes:
        input_ids: The tokens.
        labels: The next tokens. Labels without loss are ``IGNORE_INDEX``: at the last token of a document, in a masked
            prompt and in padding.
        positions: Position of each token in its document. A document that continues from the previous sequence starts
            at 0 again, because a sequence attends only to itself.
        segment_ids: Number of the token's document within the sequence, from 0; padding at its end has the next number.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray


class PairBatch(NamedTuple):
    """A `Batch` of pairs with the log-probabilities of their documents before the training.

    Documents 2 k and 2 k + 1 of a sequence are the chosen and the rejected answer of a pair.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    reference: np.ndarray
    """float64 [B, D], the sum over the loss tokens of each document; 0 where a sequence has fewer."""


def count_pairs(batch: Batch | PairBatch) -> int:
    """Counts the pairs of a batch; padding is none."""
    rows_N, places_N = np.nonzero(batch.labels != IGNORE_INDEX)
    pairs_N = batch.segment_ids[rows_N, places_N].astype(np.int64) // 2
    return len(np.unique(rows_N * batch.labels.shape[1] + pairs_N))


def padding_batch(size: int, seq_length: int) -> Batch:
    """Makes `size` sequences without loss, to fill up a last batch: the shapes of a run never change."""
    zeros_BT = np.zeros((size, seq_length), np.int32)
    positions_BT = np.broadcast_to(np.arange(seq_length, dtype=np.int32), zeros_BT.shape)
    return Batch(zeros_BT, np.full_like(zeros_BT, IGNORE_INDEX), np.ascontiguousarray(positions_BT), zeros_BT.copy())


def concatenate(first: Batch, second: Batch) -> Batch:
    """Appends the sequences of `second` to the sequences of `first`."""
    return type(first)(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def document_positions(tokens_BT: np.ndarray, eod: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions and segments of sequences whose documents end with the token `eod`: int64 [B, T] each."""
    is_eod_BT = tokens_BT == eod
    places_T = np.arange(tokens_BT.shape[1])
    begins_BT = np.zeros(tokens_BT.shape, np.int64)
    segments_BT = np.zeros(tokens_BT.shape, np.int64)
    begins_BT[:, 1:] = np.maximum.accumulate(np.where(is_eod_BT, places_T + 1, 0), axis=1)[:, :-1]
    segments_BT[:, 1:] = np.cumsum(is_eod_BT, axis=1)[:, :-1]
    return places_T - begins_BT, segments_BT
