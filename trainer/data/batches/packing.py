"""Packs documents into rows of one length.

The documents stand one after the other in one long stream of tokens; row r is the stream from r*T to r*T + T. A
document that ends in the middle of a row is followed by the next one; `Batch.positions` and `Batch.segment_ids` keep
them apart.

Shape legend: B rows of a micro-batch, T tokens of a row, P pieces (the parts of documents that lie in those rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from trainer.data.batches.batch import IGNORE_INDEX, Batch, padding_rows
from trainer.data.batches.split import Spans
from trainer.data.tokens.token_file import TokenFile


class RowDataset(Protocol):
    """Rows by number, whatever they are made of.

    Attributes:
        num_tokens: Tokens of all documents, whether or not they find place in a row.
        num_rows: How many rows there are.
        max_token_id: No token is larger.
        num_documents: How many documents the tokens come from.
        has_boundaries: Whether a row may hold more than one document; without, a causal mask is all that is needed.
        seq_length: Tokens of a row.
        content: A name for the tokens that the rows are made of; other tokens have another.
    """

    num_tokens: int
    num_rows: int
    max_token_id: int
    num_documents: int
    has_boundaries: bool
    seq_length: int
    content: str

    def rows(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Makes the rows of these numbers, in this order.

        Raises:
            IndexError: A number is not that of a row.
        """

    def padding(self, rows: int) -> Batch:
        """Makes rows that carry no loss, to fill up a last batch."""


def count_rows(num_tokens: int, seq_length: int, *, keep_tail: bool, limit: int | None) -> int:
    """How many rows `num_tokens` make; `keep_tail` counts a last row that is not full, `limit` is ``num_samples``."""
    rows = -(-num_tokens // seq_length) if keep_tail else num_tokens // seq_length
    return rows if limit is None else min(rows, limit)


class TokenDataset:
    """Rows over the documents of a memory-mapped token file.

    Args:
        token_file: The tokens; only what `rows` asks for is read.
        spans: Its documents that belong to this data set.
        seq_length: Tokens of a row (T).
        keep_tail: Whether the tokens after the last full row make a row of their own, filled up with padding.
        limit: At most so many rows; None for all.
    """

    def __init__(
        self, token_file: TokenFile, spans: Spans, seq_length: int, *, keep_tail: bool = False, limit: int | None = None
    ) -> None:
        self.seq_length = seq_length
        self.num_documents = len(spans.lengths)
        self.has_boundaries = self.num_documents > 1
        self.max_token_id = token_file.meta.max_token_id
        self.content = token_file.path.name  # a hash of the text and of what turned it into tokens
        self._token_file = token_file
        # Where each document starts in the stream, and how far that is from where it lies in the file.
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(spans.lengths)])
        self._shifts = spans.starts - self._offsets[:-1]
        self.num_tokens = int(self._offsets[-1])
        self.num_rows = count_rows(self.num_tokens, seq_length, keep_tail=keep_tail, limit=limit)

    def padding(self, rows: int) -> Batch:
        """Makes rows without loss; see `RowDataset.padding`."""
        return padding_rows(rows, self.seq_length)

    def rows(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Makes rows; see `RowDataset.rows`."""
        starts_B = checked_indices(indices, self.num_rows) * self.seq_length
        ends_B = starts_B + self.seq_length
        row_P, rank_P, document_P, begin_P, length_P = self._pieces(starts_B, ends_B)

        shape = len(starts_B), self.seq_length
        stream_BT = starts_B[:, None] + np.arange(self.seq_length)
        segment_ids_BT = np.repeat(rank_P, length_P).reshape(shape)
        positions_BT = (stream_BT - np.repeat(begin_P, length_P).reshape(shape)).astype(np.int32)
        file_BT = stream_BT + np.repeat(self._shifts[document_P], length_P).reshape(shape)

        # The token after the row, where its last document goes on; the label of the last column.
        last_P = np.append(row_P[1:] != row_P[:-1], True)
        goes_on_B = self._offsets[document_P[last_P] + 1] > ends_B
        has_tail = int(ends_B.max()) > self.num_tokens
        if has_tail:  # indices beyond the stream read some token of the file and are overwritten below
            np.minimum(file_BT, len(self._token_file.tokens) - 1, out=file_BT)
        next_B = np.where(goes_on_B, file_BT[:, -1] + 1, 0)
        input_ids_BT = self._token_file.tokens[file_BT].astype(np.int32)
        labels_BT = np.empty(shape, np.int32)
        labels_BT[:, :-1] = input_ids_BT[:, 1:]
        labels_BT[:, -1] = self._token_file.tokens[next_B]

        # No label at the last token of a document: the next token is another document's.
        labels_BT.reshape(-1)[np.cumsum(length_P)[~last_P] - 1] = IGNORE_INDEX
        labels_BT[~goes_on_B, -1] = IGNORE_INDEX
        if self._token_file.mask is not None:
            self._apply_loss_mask(labels_BT, file_BT, next_B)
        if has_tail:
            input_ids_BT[stream_BT >= self.num_tokens] = 0
            labels_BT[stream_BT >= self.num_tokens - 1] = IGNORE_INDEX
        return Batch(input_ids_BT, labels_BT, positions_BT, segment_ids_BT)

    def _pieces(self, starts_B: np.ndarray, ends_B: np.ndarray) -> tuple[np.ndarray, ...]:
        """Cuts rows at the boundaries of documents.

        Returns:
            For each piece, in order: its row, its rank in the row (int32), its document, where it begins in the stream,
            its length. Lengths of a row add up to T; the piece before the end of the stream takes in the padding.
        """
        first_B = np.searchsorted(self._offsets, starts_B, side="right") - 1
        last_B = np.searchsorted(self._offsets, np.minimum(ends_B, self.num_tokens), side="left") - 1
        count_B = last_B - first_B + 1
        row_P = np.repeat(np.arange(len(starts_B)), count_B)
        rank_P = np.arange(len(row_P)) - np.repeat(np.cumsum(count_B) - count_B, count_B)
        document_P = first_B[row_P] + rank_P
        begin_P = np.maximum(self._offsets[document_P], starts_B[row_P])
        end_P = np.where(document_P == last_B[row_P], ends_B[row_P], self._offsets[document_P + 1])
        return row_P, rank_P.astype(np.int32), document_P, begin_P, end_P - begin_P

    def _apply_loss_mask(self, labels_BT: np.ndarray, file_BT: np.ndarray, next_B: np.ndarray) -> None:
        """Takes the loss off labels that are tokens of a prompt."""
        learnt_BT = np.empty(labels_BT.shape, bool)
        learnt_BT[:, :-1] = self._token_file.mask[file_BT[:, 1:]]
        learnt_BT[:, -1] = self._token_file.mask[next_B]
        labels_BT[~learnt_BT] = IGNORE_INDEX


def checked_indices(indices: Sequence[int] | np.ndarray, num_rows: int) -> np.ndarray:
    """Returns row numbers as int64 [B].

    Raises:
        IndexError: A number is not that of a row, or there is none.
    """
    indices_B = np.asarray(indices, np.int64)
    if not len(indices_B):
        raise IndexError("no row is asked for")
    if not 0 <= int(indices_B.min()) <= int(indices_B.max()) < num_rows:
        raise IndexError(f"rows are numbered from 0 to {num_rows - 1}, got {indices_B.min()} to {indices_B.max()}")
    return indices_B
