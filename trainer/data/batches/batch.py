"""Defines a micro-batch of training sequences, as plain numpy arrays.

Shape legend: B sequences of a micro-batch, T tokens of a sequence (``model_config.seq_length``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

IGNORE_INDEX = -100
_WIDTH = 64  # a selection of documents has a multiple of so many tokens: few shapes


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
    """A `Batch` of answers that are compared.

    Documents 2 k and 2 k + 1 of a sequence are a pair: the chosen and the rejected answer to a prompt, or an answer
    with a label and one to another prompt.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    values: np.ndarray
    """float32 [B, T], at each token the label of its document, 1 for a desirable answer, or the margin of a pair, at
    its chosen answer; else 0."""
    reference: np.ndarray
    """float64 [B, D], the sum of the log-probabilities of the loss tokens of each document before the training; 0 where
    a sequence has fewer. [B, 0] where they are not known."""


class WeightedBatch(NamedTuple):
    """A `Batch` whose records have weights."""

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    values: np.ndarray
    """float32 [B, T], the factor on the loss of each token: that of its document; 0 in padding."""


AnyBatch: TypeAlias = Batch | PairBatch | WeightedBatch
Batches = TypeVar("Batches", bound=AnyBatch)


def sum_weights(batch: AnyBatch) -> float:
    """Sums the weights of the loss tokens of a batch."""
    assert isinstance(batch, WeightedBatch)
    return float(batch.values[batch.labels != IGNORE_INDEX].sum(dtype=np.float64))


def count_pairs(batch: AnyBatch) -> int:
    """Counts the pairs of a batch; padding is none."""
    rows_N, places_N = np.nonzero(batch.labels != IGNORE_INDEX)
    pairs_N = batch.segment_ids[rows_N, places_N].astype(np.int64) // 2
    return len(np.unique(rows_N * batch.labels.shape[1] + pairs_N))


def padding_batch(size: int, seq_length: int) -> Batch:
    """Makes `size` sequences without loss, to fill up a last batch: the shapes of a run never change."""
    zeros_BT = np.zeros((size, seq_length), np.int32)
    positions_BT = np.broadcast_to(np.arange(seq_length, dtype=np.int32), zeros_BT.shape)
    return Batch(zeros_BT, np.full_like(zeros_BT, IGNORE_INDEX), np.ascontiguousarray(positions_BT), zeros_BT.copy())


def document_batch(documents: Sequence[Sequence[int] | np.ndarray], rows: int, length: int) -> Batch:
    """Makes `rows` sequences without loss, the first ones of a document each; padding is another document.

    Args:
        documents: The tokens of each, at most `length`.
    """
    batch = padding_batch(rows, length)
    batch.segment_ids[...] = 1
    for row, tokens in enumerate(documents):
        batch.input_ids[row, : len(tokens)] = tokens
        batch.segment_ids[row, : len(tokens)] = 0
    return batch


def add_values(batch: Batch, kind: type[Batches], values_BT: np.ndarray | None = None) -> Batches:
    """Makes a batch of a kind from tokens and the values of their documents; without values they are 0.

    The log-probabilities of pairs before the training are not known. A `Batch` has no values.
    """
    more = []
    if kind is not Batch:
        if values_BT is None:
            values_BT = np.zeros(batch.labels.shape, np.float32)
        more.append(values_BT)
    if kind is PairBatch:
        more.append(np.zeros((len(batch.labels), 0)))
    return kind(*batch, *more)


def concatenate(first: Batches, second: Batches) -> Batches:
    """Appends the sequences of `second` to the sequences of `first`."""
    return type(first)(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def select_documents(batch: Batches, place: int) -> Batches:
    """Returns a batch with one document of each pair, the first (0) or the second one (1), in shorter sequences.

    Documents keep their numbers. Padding has the next number.
    """
    assert isinstance(batch, PairBatch)
    rows, length = batch.labels.shape
    documents = int(batch.segment_ids.max()) + 1
    rows_N, places_N = np.nonzero(batch.labels != IGNORE_INDEX)
    selected_BD = np.zeros((rows, documents), bool)
    selected_BD[rows_N, batch.segment_ids[rows_N, places_N]] = True
    selected_BD[:, 1 - place :: 2] = False
    selected_BT = np.take_along_axis(selected_BD, batch.segment_ids, 1)
    longest = int(selected_BT.sum(1).max())
    width = min(length, max(1, -(-longest // _WIDTH)) * _WIDTH)
    order_BT = np.argsort(~selected_BT, axis=1, kind="stable")[:, :width]
    arrays = {name: np.take_along_axis(getattr(batch, name), order_BT, 1) for name in PairBatch._fields[:-1]}
    selection = PairBatch(**arrays, reference=batch.reference)
    is_padding_BT = ~np.take_along_axis(selected_BT, order_BT, 1)
    selection.labels[is_padding_BT] = IGNORE_INDEX
    selection.segment_ids[is_padding_BT] = documents
    selection.values[is_padding_BT] = 0
    return cast("Batches", selection)


def find_unknown_token(
    tokens_BT: np.ndarray, labels_BT: np.ndarray, has_loss_BT: np.ndarray, vocab_size: int
) -> tuple[int, int] | None:
    """Finds a token, or a label with loss, that is not in the vocabulary: its sequence and its id; None without any."""
    for array_BT in (tokens_BT, np.where(has_loss_BT, labels_BT, 0)):
        is_unknown_BT = (array_BT < 0) | (array_BT >= vocab_size)
        if is_unknown_BT.any():
            sequence, place = np.argwhere(is_unknown_BT)[0]
            return int(sequence), int(array_BT[sequence, place])
    return None


def document_positions(tokens_BT: np.ndarray, eod: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions and segments of sequences whose documents end with the token `eod`: int64 [B, T] each."""
    is_eod_BT = tokens_BT == eod
    places_T = np.arange(tokens_BT.shape[1])
    begins_BT = np.zeros(tokens_BT.shape, np.int64)
    segments_BT = np.zeros(tokens_BT.shape, np.int64)
    begins_BT[:, 1:] = np.maximum.accumulate(np.where(is_eod_BT, places_T + 1, 0), axis=1)[:, :-1]
    segments_BT[:, 1:] = np.cumsum(is_eod_BT, axis=1)[:, :-1]
    return places_T - begins_BT, segments_BT
