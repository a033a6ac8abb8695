"""Random tokens that look like a data set, for benchmarks: nothing is read and nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.data.batches.batch import Batch, padding_rows
from trainer.data.batches.packing import checked_indices
from trainer.data.rng import Stream, random_bits


class SyntheticDataset:
    """Rows of random tokens: row i is the same for the same seed, and (all but certainly) another than every other row.

    Args:
        num_rows: How many rows.
        seq_length: Tokens of a row (T).
        vocab_size: Tokens are drawn evenly from 0 to vocab_size - 1.
        seed: The run's.
        first_row: Number of the first row, so that two data sets of one seed need not share rows.
    """

    has_boundaries = False

    def __init__(self, num_rows: int, seq_length: int, vocab_size: int, seed: int, first_row: int = 0) -> None:
        self.num_rows = num_rows
        self.seq_length = seq_length
        self.num_tokens = num_rows * seq_length
        self.num_documents = num_rows
        self.max_token_id = vocab_size - 1
        self.content = f"random tokens from 0 to {vocab_size - 1}"
        self._vocab_size = vocab_size
        self._seed = seed
        self._first_row = first_row

    def padding(self, rows: int) -> Batch:
        """Makes rows without loss; see `RowDataset.padding`."""
        return padding_rows(rows, self.seq_length)

    def rows(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Makes rows; see `RowDataset.rows`."""
        indices_B = checked_indices(indices, self.num_rows) + self._first_row
        tokens_BS = np.stack([self._tokens(row) for row in indices_B.tolist()])  # S = T + 1: the last is only a label
        shape = len(indices_B), self.seq_length
        positions_BT = np.ascontiguousarray(np.broadcast_to(np.arange(self.seq_length, dtype=np.int32), shape))
        return Batch(
            np.ascontiguousarray(tokens_BS[:, :-1]),
            np.ascontiguousarray(tokens_BS[:, 1:]),
            positions_BT,
            np.zeros(shape, np.int32),
        )

    def _tokens(self, row: int) -> np.ndarray:
        """Draws the T + 1 tokens of a row from a stretch of random numbers that is its own."""
        bits = random_bits(self._seed, Stream.SYNTHETIC, row, self.seq_length + 1) >> np.uint64(32)
        return (bits * np.uint64(self._vocab_size) >> np.uint64(32)).astype(np.int32)
