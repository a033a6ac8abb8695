"""One micro-batch of training rows, as plain numpy arrays.

Shape legend: B rows of a micro-batch, T tokens of a row (``model_config.seq_length``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

IGNORE_INDEX = -100


class Batch(NamedTuple):
    """B rows of T tokens; every array is int32, C-contiguous and of shape [B, T].

    Attributes:
        input_ids: The tokens.
        labels: The next token of each; ``IGNORE_INDEX`` where there is no loss: at the last token of a document, in a
            masked prompt and in padding.
        positions: The position of a token in its document. A document that continues from the row before starts
            at 0 again: a row sees only itself.
        segment_ids: Which document of the row a token belongs to, from 0.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray


def padding_rows(rows: int, seq_length: int) -> Batch:
    """Makes `rows` rows that carry no loss, to fill a last batch to its size: the shapes of a run never change."""
    zeros_BT = np.zeros((rows, seq_length), np.int32)
    positions_BT = np.broadcast_to(np.arange(seq_length, dtype=np.int32), zeros_BT.shape)
    return Batch(zeros_BT, np.full_like(zeros_BT, IGNORE_INDEX), np.ascontiguousarray(positions_BT), zeros_BT.copy())


def concatenate(first: Batch, second: Batch) -> Batch:
    """Puts the rows of `second` under those of `first`."""
    return type(first)(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))
