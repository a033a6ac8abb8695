"""Reads data sets of sequences of one length from a token file.

`TokenDataset` cuts running text: the documents follow each other in one long stream of tokens, and sequence s is the
stream from s*T to s*T + T. `PackedDataset` does not cut samples: a sequence has one or several of them, and padding.
In both, `Batch.positions` and `Batch.segment_ids` separate the documents of a sequence.

Shape legend: B sequences of a micro-batch, T tokens of a sequence, P pieces (parts of documents in those sequences), N
tokens in all pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from trainer.data.batches.batch import (
    IGNORE_INDEX,
    AnyBatch,
    Batch,
    PairBatch,
    WeightedBatch,
    add_values,
    padding_batch,
)
from trainer.data.batches.best_fit import best_fit, pack_one_each
from trainer.data.batches.split import DocumentSpans
from trainer.data.tokens.token_file import TokenFile

_COUNTED_SEQUENCES = 256

RecordForm: TypeAlias = Literal["chat", "alpaca", "text"]
"""How records became text: by a chat template, as "### Instruction:" without one, or as they are."""


@dataclass(frozen=True)
class RecordWeights:
    """The weights of the records of a data set."""

    least: float
    most: float
    mean: float
    zeros: int  # records whose weight is 0
    records: int


@dataclass(frozen=True)
class PackingReport:
    """The result of packing the documents of a data set."""

    packing: str  # whole, cut or none
    samples: int  # records in the sequences, each a document, or two that are compared
    sequences: int
    padding: float  # fraction of all positions
    truncated: int = 0  # samples of the section, held-out ones included, that lost their beginning
    dropped: int = 0  # samples of the section that were left out
    bad_records: int = 0  # records of the section that were left out, with data_loader.bad_records: skip
    weights: RecordWeights | None = None  # of the samples, if `columns` names the weight


class SequenceDataset(Protocol):
    """A data set of sequences, which are read by number."""

    num_tokens: int  # in all documents, including documents that fill no sequence
    num_sequences: int
    max_token_id: int  # or an upper bound
    num_documents: int
    seq_length: int  # tokens of a sequence
    content: str  # identifies the tokens of the data set and their packing
    packing: PackingReport | None = None  # None if nothing is packed
    record_form: str = ""  # of text: see `RecordForm`

    def batch(self, indices: Sequence[int] | np.ndarray) -> AnyBatch:
        """Reads the sequences with these numbers, in this order; raises IndexError if one is out of range."""

    def padding(self, size: int) -> AnyBatch:
        """Makes sequences without loss, to fill up a last batch."""
        return padding_batch(size, self.seq_length)

    def count_documents(self) -> DocumentCounts:
        """Counts the tokens of all documents, which takes time; the command `data` shows them."""


def count_dataset_loss_tokens(dataset: SequenceDataset) -> int:
    """Counts the labels with loss in all sequences, by reading them."""
    count = 0
    for first in range(0, dataset.num_sequences, _COUNTED_SEQUENCES):
        labels = dataset.batch(range(first, min(first + _COUNTED_SEQUENCES, dataset.num_sequences))).labels
        count += int((labels != IGNORE_INDEX).sum())
    return count


class DocumentCounts(NamedTuple):
    """The lengths of documents, and the number of tokens that carry loss."""

    lengths: np.ndarray  # int64 [documents], tokens before the document is truncated
    loss_tokens: int


class _TokenFileDataset(SequenceDataset):
    """Reads pieces of documents, with the value of each if batches are of a `kind` that has values."""

    _token_file: TokenFile
    _kind: type[AnyBatch]

    def padding(self, size: int) -> AnyBatch:
        return add_values(padding_batch(size, self.seq_length), self._kind)

    def _read(self, pieces: _SequenceSegments) -> AnyBatch:
        """Reads pieces into sequences; a value of a document is that of all its tokens."""
        batch = _read_tokens(self._token_file, pieces, self.seq_length)
        values = self._token_file.values
        if self._kind is Batch or values is None:
            return add_values(batch, self._kind)
        documents_P = np.searchsorted(self._token_file.offsets, pieces.starts_P, side="right") - 1
        row_P = np.repeat(np.arange(len(batch.labels)), pieces.counts_B)
        values_BD = np.zeros((len(batch.labels), int(batch.segment_ids.max()) + 1), np.float32)
        values_BD[row_P, index_within_groups(pieces.counts_B)] = values[documents_P]
        return add_values(batch, self._kind, np.take_along_axis(values_BD, batch.segment_ids, 1))

    def _summarize_weights(self, starts: np.ndarray) -> RecordWeights | None:
        """Returns the weights of the documents that start there; None if records have no weights."""
        if self._kind is not WeightedBatch or not len(starts):
            return None
        weights = np.zeros(len(starts))
        if self._token_file.values is not None:
            documents = np.searchsorted(self._token_file.offsets, starts, side="right") - 1
            weights = self._token_file.values[documents].astype(np.float64)
        zeros = len(weights) - int(np.count_nonzero(weights))
        return RecordWeights(float(weights.min()), float(weights.max()), float(weights.mean()), zeros, len(weights))


class TokenDataset(_TokenFileDataset):
    """Running text of a memory-mapped token file, cut into sequences; `batch` reads only what it needs.

    Args:
        spans: The documents that belong to this data set.
        seq_length: Tokens of a sequence (T).
        keep_tail: Whether the tokens after the last full sequence make another one, filled up with padding.
        limit: The most sequences (``num_samples``); None for all.
        kind: Batches of this kind are read; `WeightedBatch`: the documents have weights.
    """

    def __init__(
        self, token_file: TokenFile, spans: DocumentSpans, seq_length: int, *, keep_tail: bool = False,
        limit: int | None = None, kind: type[AnyBatch] = Batch,
    ) -> None:  # fmt: skip
        self._kind = kind
        self.seq_length = seq_length
        self.num_documents = len(spans.lengths)
        self.max_token_id = token_file.meta.max_token_id
        self.content = token_file.path.name  # a hash of the text and the tokenizer's settings
        self._token_file = token_file
        self._spans = spans
        # Where each document starts in the stream, and its offset from there to the file.
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(spans.lengths)])
        self._shifts = spans.starts - self._offsets[:-1]
        self.num_tokens = int(self._offsets[-1])
        available = self.num_tokens // seq_length
        if keep_tail:
            available = -(-self.num_tokens // seq_length)
        self.num_sequences = available
        if limit is not None:
            self.num_sequences = min(available, limit)
        padding = 0.0
        if available:
            padding = max(1 - self.num_tokens / (available * seq_length), 0.0)
        self.packing = PackingReport(
            "cut", self.num_documents, self.num_sequences, padding, bad_records=token_file.meta.num_skipped,
            weights=self._summarize_weights(spans.starts),
        )  # fmt: skip

    def count_documents(self) -> DocumentCounts:
        return _count(self._token_file, self._spans)

    def batch(self, indices: Sequence[int] | np.ndarray) -> AnyBatch:
        starts_B = checked_indices(indices, self.num_sequences) * self.seq_length
        ends_B = np.minimum(starts_B + self.seq_length, self.num_tokens)
        first_B = np.searchsorted(self._offsets, starts_B, side="right") - 1
        last_B = np.searchsorted(self._offsets, ends_B, side="left") - 1
        counts_B = last_B - first_B + 1
        document_P = np.repeat(first_B, counts_B) + index_within_groups(counts_B)
        begin_P = np.maximum(self._offsets[document_P], np.repeat(starts_B, counts_B))
        end_P = np.minimum(self._offsets[document_P + 1], np.repeat(ends_B, counts_B))
        pieces = _SequenceSegments(
            counts_B=counts_B,
            starts_P=begin_P + self._shifts[document_P],
            lengths_P=end_P - begin_P,
            continues_P=end_P < self._offsets[document_P + 1],
        )
        return self._read(pieces)


class PackedDataset(_TokenFileDataset):
    """Samples of a memory-mapped token file, packed without cutting them; `batch` reads only what it needs.

    Args:
        spans: The samples that belong to this data set, none longer than `seq_length`; see `truncate_or_drop`.
        seq_length: Tokens of a sequence (T).
        packing: ``whole`` packs as many samples into a sequence as fit, ``none`` a single one.
        limit: The most sequences (``num_samples``); None for all.
        fitted: The result of `truncate_or_drop`, for the report.
        kind: Batches of this kind are read. `PairBatch`: each span is a pair, two documents of the token file, which
            stay together; `WeightedBatch`: the documents have weights.
    """

    def __init__(
        self, token_file: TokenFile, spans: DocumentSpans, seq_length: int, *,
        packing: Literal["whole", "none"] = "whole", limit: int | None = None, fitted: FittedSpans | None = None,
        kind: type[AnyBatch] = Batch,
    ) -> None:  # fmt: skip
        if packing == "whole":
            packed = best_fit(spans.lengths, seq_length)
        else:
            packed = pack_one_each(len(spans.lengths))
        self._starts = packed.starts
        if limit is not None:
            self._starts = packed.starts[: limit + 1]
        self._samples = packed.samples[: self._starts[-1]]
        self._token_file = token_file
        self._spans = spans
        self._kind = kind
        self._has_pairs = kind is PairBatch
        self.seq_length = seq_length
        self.num_documents = len(self._samples) * (1 + self._has_pairs)
        self.num_sequences = len(self._starts) - 1
        self.num_tokens = int(spans.lengths[self._samples].sum())
        self.max_token_id = token_file.meta.max_token_id
        fitted = fitted or FittedSpans(spans)
        overlong = ""
        if fitted.truncated or fitted.dropped:
            overlong = f", {fitted.overlong} overlong"
        self.content = f"{token_file.path.name}, packing {packing}{overlong}"
        padding = 0.0
        if self.num_sequences:
            padding = 1 - self.num_tokens / (self.num_sequences * seq_length)
        self.packing = PackingReport(
            packing, len(self._samples), self.num_sequences, padding, fitted.truncated, fitted.dropped,
            token_file.meta.num_skipped, self._summarize_weights(spans.starts[self._samples]),
        )  # fmt: skip

    def count_documents(self) -> DocumentCounts:
        samples = np.sort(self._samples)
        spans = DocumentSpans(self._spans.starts[samples], self._spans.lengths[samples])
        if self._has_pairs:
            spans = _documents_of_pairs(spans, self._token_file.offsets)
        return _count(self._token_file, spans)

    def batch(self, indices: Sequence[int] | np.ndarray) -> AnyBatch:
        indices_B = checked_indices(indices, self.num_sequences)
        counts_B = self._starts[indices_B + 1] - self._starts[indices_B]
        sample_P = self._samples[np.repeat(self._starts[indices_B], counts_B) + index_within_groups(counts_B)]
        spans = DocumentSpans(self._spans.starts[sample_P], self._spans.lengths[sample_P])
        if self._has_pairs:
            spans = _documents_of_pairs(spans, self._token_file.offsets)
            counts_B = counts_B * 2
        pieces = _SequenceSegments(
            counts_B=counts_B,
            starts_P=spans.starts,
            lengths_P=spans.lengths,
            continues_P=np.zeros(len(spans.starts), bool),
        )
        return self._read(pieces)


def pairs_of_documents(documents: DocumentSpans) -> DocumentSpans:
    """Returns the spans of pairs: of each two consecutive documents of a token file."""
    return DocumentSpans(documents.starts[::2], documents.lengths[::2] + documents.lengths[1::2])


def _documents_of_pairs(pairs: DocumentSpans, offsets: np.ndarray) -> DocumentSpans:
    """Returns the spans of the documents of pairs, the chosen answer of each before the rejected one."""
    middle = offsets[np.searchsorted(offsets, pairs.starts, side="right")]
    ends = pairs.starts + pairs.lengths
    starts = np.column_stack([pairs.starts, middle]).reshape(-1)
    return DocumentSpans(starts, np.column_stack([middle, ends]).reshape(-1) - starts)


def _count(token_file: TokenFile, spans: DocumentSpans) -> DocumentCounts:
    """Counts the tokens of documents, which are in the order of the file."""
    document = np.searchsorted(token_file.offsets, spans.starts, side="right") - 1
    lengths = token_file.offsets[document + 1] - token_file.offsets[document]
    if token_file.mask is None:
        return DocumentCounts(lengths, int((spans.lengths - 1).sum()))
    token_file.check(spans.starts, spans.lengths, ("mask.bin",))
    # The first token of a document is not a label. The sums alternate: a document, the tokens up to the next one.
    has_label = spans.lengths > 1
    starts = (spans.starts + 1)[has_label]
    ends = (spans.starts + spans.lengths)[has_label]
    edges = np.column_stack([starts, ends]).reshape(-1)
    edges = edges[: len(edges) - (len(edges) > 0 and edges[-1] == len(token_file.mask))]
    sums = edges
    if len(edges):
        sums = np.add.reduceat(token_file.mask, edges, dtype=np.int64)
    return DocumentCounts(lengths, int(sums[::2].sum()))


class FittedSpans(NamedTuple):
    """Samples that fit into a sequence."""

    spans: DocumentSpans
    truncated: int = 0
    dropped: int = 0
    overlong: str = ""  # what was done with longer samples: truncate or drop


def truncate_or_drop(spans: DocumentSpans, seq_length: int, overlong: Literal["truncate", "drop"]) -> FittedSpans:
    """Drops samples that are longer than `seq_length`, or cuts off the beginning of their prompt."""
    excess = spans.lengths - seq_length
    is_long = excess > 0
    count = int(is_long.sum())
    if not count:
        return FittedSpans(spans)
    if overlong == "drop":
        kept = DocumentSpans(spans.starts[~is_long], spans.lengths[~is_long])
        return FittedSpans(kept, dropped=count, overlong=overlong)
    cut = np.maximum(excess, 0)
    return FittedSpans(DocumentSpans(spans.starts + cut, spans.lengths - cut), truncated=count, overlong=overlong)


class _SequenceSegments(NamedTuple):
    """The parts of documents in each sequence of a batch, in order."""

    counts_B: np.ndarray  # pieces of each sequence
    starts_P: np.ndarray  # first token of each piece in the token file
    lengths_P: np.ndarray  # tokens of each piece
    continues_P: np.ndarray  # whether the document continues after the piece, so that its last token has a label


def index_within_groups(counts: np.ndarray) -> np.ndarray:
    """Counts from 0 within each group: ``[2, 3]`` gives ``[0, 1, 0, 1, 2]``."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


def _read_tokens(token_file: TokenFile, pieces: _SequenceSegments, seq_length: int) -> Batch:
    """Reads pieces into sequences. The rest of a sequence is padding: a separate segment without loss."""
    counts_B, starts_P, lengths_P, continues_P = pieces
    token_file.check(starts_P, lengths_P + continues_P)
    within_N = index_within_groups(lengths_P)
    file_N = np.repeat(starts_P, lengths_P) + within_N
    ids_N = token_file.tokens[file_N].astype(np.int32)
    labels_N = np.full(len(ids_N), IGNORE_INDEX, np.int32)
    labels_N[:-1] = ids_N[1:]
    last_P = np.cumsum(lengths_P) - 1
    next_P = np.where(continues_P, file_N[last_P] + 1, 0)
    labels_N[last_P] = np.where(continues_P, token_file.tokens[next_P].astype(np.int32), IGNORE_INDEX)
    mask = token_file.mask
    if mask is not None:  # labels that are tokens of a prompt have no loss
        has_loss_N = np.empty(len(ids_N), bool)
        has_loss_N[:-1] = mask[file_N[1:]]
        has_loss_N[last_P] = mask[next_P]
        labels_N[~has_loss_N] = IGNORE_INDEX
    number_P = index_within_groups(counts_B).astype(np.int32)
    arrays_N = (ids_N, labels_N, within_N.astype(np.int32), np.repeat(number_P, lengths_P))
    shape = len(counts_B), seq_length
    if len(ids_N) == shape[0] * shape[1]:
        return Batch(*(array.reshape(shape) for array in arrays_N))
    used_B = np.add.reduceat(lengths_P, np.cumsum(counts_B) - counts_B)
    position_BT = np.arange(seq_length, dtype=np.int32) - used_B[:, None].astype(np.int32)
    batch = Batch(
        np.zeros(shape, np.int32), np.full(shape, IGNORE_INDEX, np.int32), position_BT,
        np.repeat(counts_B.astype(np.int32)[:, None], seq_length, axis=1),
    )  # fmt: skip
    is_token_BT = position_BT < 0
    for padded, array in zip(batch, arrays_N, strict=True):
        padded[is_token_BT] = array
    return batch


def checked_indices(indices: Sequence[int] | np.ndarray, num_sequences: int) -> np.ndarray:
    """Converts sequence numbers to int64 [B]; raises IndexError if one is out of range, or there are none."""
    indices_B = np.asarray(indices, np.int64)
    if not len(indices_B):
        raise IndexError("no sequence was requested")
    if not 0 <= int(indices_B.min()) <= int(indices_B.max()) < num_sequences:
        requested = f"{indices_B.min()} to {indices_B.max()}"
        raise IndexError(f"sequences are numbered from 0 to {num_sequences - 1}, got {requested}")
    return indices_B
