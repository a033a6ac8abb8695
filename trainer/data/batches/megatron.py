"""Reads samples of indexed token files in the order of Megatron-LM's ``GPTDataset`` and ``BlendedDataset``.

The documents of a split follow each other as one stream, in random order and as many times over as the samples need.
Sample k has the T + 1 tokens of the stream from k*T on: the input and, one token later, the labels. Then the samples
are shuffled. If the last pass over the documents contributes few samples (below 80% of a pass), its documents and
samples are shuffled separately and come last. Both orders come from one ``RandomState(seed)``, documents first; numpy
guarantees that its numbers never change.

At each place, a blend takes a sample of the data set that is furthest behind its share: the one with the largest
weight * place - samples taken, and the first among equals.

Shape legend: B sequences of a micro-batch, T tokens of a sequence, P pieces of documents in them, N tokens of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.batches.batch import IGNORE_INDEX, Batch, document_positions, find_unknown_token
from trainer.data.batches.blend import SourceShare
from trainer.data.batches.packing import (
    DocumentCounts,
    SequenceDataset,
    checked_indices,
    count_dataset_loss_tokens,
    index_within_groups,
)
from trainer.data.source.indexed import IndexedTokens
from trainer.errors import RunError

_SEPARATE_BELOW = 0.80


@dataclass(frozen=True)
class EodMasking:
    """The tokens that end a document or fill up a sample, and their effects."""

    eod: int
    pad: int
    no_loss_after_eod: bool
    reset_positions: bool
    separate_documents: bool  # the documents of a sequence do not attend to each other


class SampleOrder:
    """The samples of one indexed token file.

    Args:
        documents: The range (begin, end) of the documents of the split, which have at least two tokens.
        num_samples: The least number of samples; None for one pass over the documents.
        extra: 1 for samples of T + 1 tokens, 0 for T.
        keep_partial: Whether the tokens after the last full sample make a shorter one.
    """

    def __init__(
        self, indexed: IndexedTokens, documents: tuple[int, int], seq_length: int, num_samples: int | None, seed: int,
        *, extra: int = 1, keep_partial: bool = False,
    ) -> None:  # fmt: skip
        self.indexed = indexed
        self.seq_length = seq_length
        self.extra = extra
        self.lengths = indexed.lengths[documents[0] : documents[1]]
        pass_tokens = int(self.lengths.sum(dtype=np.int64))
        passes = 1
        if num_samples is not None:
            passes = max(-(-(num_samples * seq_length + extra) // pass_tokens), 1)
        self.samples_of_a_pass = (pass_tokens - extra) // seq_length
        before_last = ((passes - 1) * pass_tokens - extra) // seq_length  # samples without the last pass
        from_last = 0
        if num_samples is not None:
            from_last = num_samples - before_last
        separate = passes > 1 and from_last < int(_SEPARATE_BELOW * self.samples_of_a_pass)

        state = np.random.RandomState(seed)
        groups = [passes]
        if separate:
            groups = [passes - 1, 1]
        self.documents = np.concatenate([_shuffled_documents(documents, count, state) for count in groups])
        self._offsets = np.concatenate([[0], np.cumsum(indexed.lengths[self.documents], dtype=np.int64)])
        stream = int(self._offsets[-1]) - extra
        self.num_samples = stream // seq_length
        if keep_partial:
            self.num_samples = -(-stream // seq_length)
        edges = [0, self.num_samples]
        if separate:
            edges = [0, before_last, self.num_samples]
        parts = [np.arange(first, last) for first, last in zip(edges[:-1], edges[1:], strict=True)]
        for part in parts:
            state.shuffle(part)
        self.samples = np.concatenate(parts)

    def read(self, samples_B: np.ndarray, pad: int) -> np.ndarray:
        """Reads the tokens of samples: int64 [B, T + extra], filled up with `pad`."""
        size = self.seq_length + self.extra
        starts_B = self.samples[samples_B] * self.seq_length
        ends_B = np.minimum(starts_B + size, self._offsets[-1])
        first_B = np.searchsorted(self._offsets, starts_B, side="right") - 1
        counts_B = np.searchsorted(self._offsets, ends_B, side="left") - first_B
        place_P = np.repeat(first_B, counts_B) + index_within_groups(counts_B)
        begin_P = np.maximum(self._offsets[place_P], np.repeat(starts_B, counts_B))
        lengths_P = np.minimum(self._offsets[place_P + 1], np.repeat(ends_B, counts_B)) - begin_P
        first_P = self.indexed.starts[self.documents[place_P]] + begin_P - self._offsets[place_P]
        tokens_N = self.indexed.tokens[np.repeat(first_P, lengths_P) + index_within_groups(lengths_P)]
        tokens_BS = np.full((len(samples_B), size), pad, np.int64)
        tokens_BS[np.arange(size) < (ends_B - starts_B)[:, None]] = tokens_N
        return tokens_BS


def _shuffled_documents(documents: tuple[int, int], passes: int, state: np.random.RandomState) -> np.ndarray:
    order = np.tile(np.arange(*documents, dtype=np.int32), passes)
    state.shuffle(order)
    return order


def blending_order(weights: Sequence[float], size: int, counts: Sequence[int] | None = None) -> np.ndarray:
    """Returns the data set of each place of a blend, the one furthest behind its weight: int16 [size].

    Args:
        weights: They sum to 1.
        counts: The most samples of each data set; None: any number.
    """
    if len(weights) == 1:
        return np.zeros(size, np.int16)
    limits = counts or [size] * len(weights)
    order = np.empty(size, np.int16)
    taken = [0] * len(weights)
    waiting = [number for number, count in enumerate(limits) if count]
    for place in range(size):
        behind = -float("inf")
        chosen = -1
        for number in waiting:
            missing = weights[number] * max(place, 1) - taken[number]
            if missing > behind:
                behind = missing
                chosen = number
        order[place] = chosen
        taken[chosen] += 1
        if taken[chosen] == limits[chosen]:
            waiting.remove(chosen)
    return order


class MegatronDataset(SequenceDataset):
    """The samples of one or several indexed token files.

    Args:
        parts: The samples of each file.
        source_of_sequence: int16 [sequences], the file of each sequence; None if there is one file.
        weights: The weights of a blend; None without them.
        num_sequences: The number of sequences; the files may have more samples.
        masking: The effects of the special tokens.
        vocab_size: The model's vocabulary; a token beyond it ends the run.
        settings: All settings that decide the order, to identify the data.
    """

    def __init__(
        self, parts: Sequence[SampleOrder], source_of_sequence: np.ndarray | None, weights: Sequence[float] | None,
        num_sequences: int, masking: EodMasking, vocab_size: int, settings: str,
    ) -> None:  # fmt: skip
        self._parts = tuple(parts)
        self._masking = masking
        self._vocab_size = vocab_size
        if source_of_sequence is None:
            source_of_sequence = np.zeros(num_sequences, np.int16)
        self._sources = source_of_sequence[:num_sequences]
        self._sample_of_sequence = np.empty(num_sequences, np.int64)
        counts = []
        for number in range(len(parts)):
            is_from_file = self._sources == number
            counts.append(int(is_from_file.sum()))
            self._sample_of_sequence[is_from_file] = np.arange(counts[-1])
        share_weights: Sequence[float | None] = [None] * len(parts)
        if weights is not None:
            share_weights = weights
        self.shares = tuple(
            SourceShare(
                name=part.indexed.prefix,
                weight=share_weights[number],
                sequences=part.samples_of_a_pass,
                epoch_sequences=counts[number],
                epoch_passes=counts[number] * part.seq_length / int(part.lengths.sum(dtype=np.int64)),
                packing=None,
            )
            for number, part in enumerate(parts)
        )
        self.num_sequences = num_sequences
        self.seq_length = parts[0].seq_length
        self.num_tokens = num_sequences * self.seq_length
        self.num_documents = sum(len(part.lengths) for part in parts)
        token_ranges = [part.indexed.token_range() for part in parts]
        self.min_token_id = min(smallest for smallest, _ in token_ranges)
        self.max_token_id = max(largest for _, largest in token_ranges)
        # The name that the class had when the first data sets were hashed.
        described = repr(masking).replace("EodMasking", "Masking", 1)
        digest = hashlib.sha256(f"{settings} {described}".encode())
        for part in parts:
            for piece in part.indexed.sample_bytes():
                digest.update(piece)
        self.content = f"{len(parts)} indexed token files ({digest.hexdigest()[:16]})"

    def count_documents(self) -> DocumentCounts:
        lengths = np.concatenate([part.lengths for part in self._parts]).astype(np.int64)
        if not self._masking.no_loss_after_eod and self._masking.pad < 0:
            return DocumentCounts(lengths, self.num_tokens)
        return DocumentCounts(lengths, count_dataset_loss_tokens(self))

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        indices_B = checked_indices(indices, self.num_sequences)
        masking = self._masking
        seq_length = self.seq_length
        text_BS = np.empty((len(indices_B), seq_length + 1), np.int64)
        text_BS[:, -1] = masking.pad  # in samples of T tokens the last token has no label
        sources_B = self._sources[indices_B]
        for number in np.unique(sources_B).tolist():
            is_from_file_B = sources_B == number
            part = self._parts[number]
            samples = self._sample_of_sequence[indices_B[is_from_file_B]]
            text_BS[is_from_file_B, : seq_length + part.extra] = part.read(samples, masking.pad)
        tokens_BT = text_BS[:, :-1]
        labels_BT = text_BS[:, 1:]
        has_loss_BT = labels_BT != masking.pad
        if masking.no_loss_after_eod:
            has_loss_BT &= tokens_BT != masking.eod
        positions_BT, segments_BT = document_positions(tokens_BT, masking.eod)
        if not masking.reset_positions:
            positions_BT = np.broadcast_to(np.arange(seq_length), tokens_BT.shape)
        if not masking.separate_documents:
            segments_BT = np.zeros_like(segments_BT)
        input_BT = np.where(tokens_BT == masking.pad, 0, tokens_BT)
        # Large files are not fully checked before the run.
        if unknown := find_unknown_token(input_BT, labels_BT, has_loss_BT, self._vocab_size):
            sequence, token_id = unknown
            rule = f"sequence {indices_B[sequence]} contains token id {token_id}, "
            rule += f"but the model's vocabulary has {self._vocab_size}"
            name = self.shares[sources_B[sequence]].name
            raise RunError(rule, where=name, fix="make the data again with the model's tokenizer")
        label_BT = np.where(has_loss_BT, labels_BT, IGNORE_INDEX)
        return Batch(*(
            np.ascontiguousarray(array, np.int32) for array in (input_BT, label_BT, positions_BT, segments_BT)
        ))
