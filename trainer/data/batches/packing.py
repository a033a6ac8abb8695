"""Packs documents into sequences of one length.

The documents follow each other in one long stream of tokens; sequence s is the stream from s*T to s*T + T. Where a
document ends in the middle of a sequence, the next one follows; `Batch.positions` and `Batch.segment_ids` keep them
apart.

Shape legend: B sequences of a micro-batch, T tokens of a sequence, P pieces (parts of documents in those sequences).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from trainer.data.batches.batch import IGNORE_INDEX, Batch, padding_batch
from trainer.data.batches.split import Spans
from trainer.data.tokens.token_file import TokenFile


class SequenceDataset(Protocol):
    """Sequences by number."""

    num_tokens: int  # of all documents, including those that fill no sequence
    num_sequences: int
    max_token_id: int  # or an upper bound
    num_documents: int
    has_boundaries: bool  # whether a sequence may contain several documents; if not, a causal mask is enough
    seq_length: int  # tokens of a sequence
    content: str  # identifies the tokens of the data set: other tokens have another `content`

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Reads the sequences with these numbers, in this order; raises IndexError where one is out of range."""

    def padding(self, size: int) -> Batch:
        """Makes sequences without loss, to fill up a last batch."""


class TokenDataset:
    """Sequences over the documents of a memory-mapped token file; `batch` reads only what it needs.

    Args:
        spans: The documents that belong to this data set.
        seq_length: Tokens of a sequence (T).
        keep_tail: Whether the tokens after the last full sequence make another one, filled up with padding.
        limit: At most so many sequences (``num_samples``); None for all.
    """

    def __init__(
        self, token_file: TokenFile, spans: Spans, seq_length: int, *, keep_tail: bool = False, limit: int | None = None
    ) -> None:
        self.seq_length = seq_length
        self.num_documents = len(spans.lengths)
        self.has_boundaries = self.num_documents > 1
        self.max_token_id = token_file.meta.max_token_id
        self.content = token_file.path.name  # a hash of the text and the tokenizer's settings
        self._token_file = token_file
        # Where each document starts in the stream, and its offset from there to the file.
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(spans.lengths)])
        self._shifts = spans.starts - self._offsets[:-1]
        self.num_tokens = int(self._offsets[-1])
        found = -(-self.num_tokens // seq_length) if keep_tail else self.num_tokens // seq_length
        self.num_sequences = found if limit is None else min(found, limit)

    def padding(self, size: int) -> Batch:
        return padding_batch(size, self.seq_length)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        starts_B = checked_indices(indices, self.num_sequences) * self.seq_length
        ends_B = starts_B + self.seq_length
        sequence_P, number_P, document_P, begin_P, length_P = self._pieces(starts_B, ends_B)

        shape = len(starts_B), self.seq_length
        stream_BT = starts_B[:, None] + np.arange(self.seq_length)
        segment_ids_BT = np.repeat(number_P, length_P).reshape(shape)
        positions_BT = (stream_BT - np.repeat(begin_P, length_P).reshape(shape)).astype(np.int32)
        file_BT = stream_BT + np.repeat(self._shifts[document_P], length_P).reshape(shape)

        # The token after the sequence, if its last document continues: the label of the last column.
        last_P = np.append(sequence_P[1:] != sequence_P[:-1], True)
        continues_B = self._offsets[document_P[last_P] + 1] > ends_B
        has_tail = int(ends_B.max()) > self.num_tokens
        if has_tail:  # indices beyond the stream read any token of the file and are overwritten below
            np.minimum(file_BT, len(self._token_file.tokens) - 1, out=file_BT)
        next_B = np.where(continues_B, file_BT[:, -1] + 1, 0)
        input_ids_BT = self._token_file.tokens[file_BT].astype(np.int32)
        labels_BT = np.empty(shape, np.int32)
        labels_BT[:, :-1] = input_ids_BT[:, 1:]
        labels_BT[:, -1] = self._token_file.tokens[next_B]

        # No label at the last token of a document: the next token is another document's.
        labels_BT.reshape(-1)[np.cumsum(length_P)[~last_P] - 1] = IGNORE_INDEX
        labels_BT[~continues_B, -1] = IGNORE_INDEX
        mask = self._token_file.mask
        if mask is not None:  # labels that are tokens of a prompt have no loss
            labels_BT[:, :-1][mask[file_BT[:, 1:]] == 0] = IGNORE_INDEX
            labels_BT[mask[next_B] == 0, -1] = IGNORE_INDEX
        if has_tail:
            input_ids_BT[stream_BT >= self.num_tokens] = 0
            labels_BT[stream_BT >= self.num_tokens - 1] = IGNORE_INDEX
        return Batch(input_ids_BT, labels_BT, positions_BT, segment_ids_BT)

    def _pieces(self, starts_B: np.ndarray, ends_B: np.ndarray) -> tuple[np.ndarray, ...]:
        """Divides sequences at the boundaries of documents.

        Returns:
            For each piece, in order: its sequence, its number within the sequence (int32), its document, its start in
            the stream, its length. The lengths of a sequence add up to T; the last piece of the stream includes the
            padding.
        """
        first_B = np.searchsorted(self._offsets, starts_B, side="right") - 1
        last_B = np.searchsorted(self._offsets, np.minimum(ends_B, self.num_tokens), side="left") - 1
        count_B = last_B - first_B + 1
        sequence_P = np.repeat(np.arange(len(starts_B)), count_B)
        number_P = np.arange(len(sequence_P)) - np.repeat(np.cumsum(count_B) - count_B, count_B)
        document_P = first_B[sequence_P] + number_P
        begin_P = np.maximum(self._offsets[document_P], starts_B[sequence_P])
        end_P = np.where(document_P == last_B[sequence_P], ends_B[sequence_P], self._offsets[document_P + 1])
        return sequence_P, number_P.astype(np.int32), document_P, begin_P, end_P - begin_P


def checked_indices(indices: Sequence[int] | np.ndarray, num_sequences: int) -> np.ndarray:
    """Sequence numbers as int64 [B]; raises IndexError where one is out of range, or there is none."""
    indices_B = np.asarray(indices, np.int64)
    if not len(indices_B):
        raise IndexError("no sequence was requested")
    if not 0 <= int(indices_B.min()) <= int(indices_B.max()) < num_sequences:
        found = f"{indices_B.min()} to {indices_B.max()}"
        raise IndexError(f"sequences are numbered from 0 to {num_sequences - 1}, got {found}")
    return indices_B
