"""Makes random tokens for benchmarks; it reads and stores nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.data.batches.batch import Batch
from trainer.data.batches.packing import DocumentCounts, SequenceDataset, checked_indices
from trainer.data.rng import Stream, random_bits


class SyntheticDataset(SequenceDataset):
    """Sequences of tokens drawn uniformly from 0 to vocab_size - 1; sequence i is a function of (seed, i).

    Args:
        first: The number of the first sequence, so that two data sets of one seed can differ.
    """

    def __init__(self, num_sequences: int, seq_length: int, vocab_size: int, seed: int, first: int = 0) -> None:
        self.num_sequences = self.num_documents = num_sequences
        self.seq_length = seq_length
        self.num_tokens = num_sequences * seq_length
        self.max_token_id = vocab_size - 1
        self.content = f"random tokens from 0 to {vocab_size - 1}"
        self._vocab_size = vocab_size
        self._seed = seed
        self._first = first

    def count_documents(self) -> DocumentCounts:
        return DocumentCounts(np.full(self.num_documents, self.seq_length), self.num_tokens)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        indices_B = checked_indices(indices, self.num_sequences) + self._first
        tokens_BS = np.stack([self._tokens(number) for number in indices_B.tolist()])  # S = T + 1: the last is a label
        shape = len(indices_B), self.seq_length
        positions_BT = np.ascontiguousarray(np.broadcast_to(np.arange(self.seq_length, dtype=np.int32), shape))
        return Batch(
            np.ascontiguousarray(tokens_BS[:, :-1]),
            np.ascontiguousarray(tokens_BS[:, 1:]),
            positions_BT,
            np.zeros(shape, np.int32),
        )

    def _tokens(self, number: int) -> np.ndarray:
        """Draws the T + 1 tokens of a sequence."""
        bits = random_bits(self._seed, Stream.SYNTHETIC, number, self.seq_length + 1) >> np.uint64(32)
        return (bits * np.uint64(self._vocab_size) >> np.uint64(32)).astype(np.int32)
