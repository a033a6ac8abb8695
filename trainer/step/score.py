"""Scores of documents by a reward model, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.batches.batch import IGNORE_INDEX, Batch

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder


def score_documents(
    model: Decoder, build_inputs: Callable[[Any], Any], documents: Sequence[np.ndarray], batch_size: int
) -> Iterator[np.ndarray]:
    """Yields the scores of `batch_size` documents at a time, float64, each that of the document's last token.

    Args:
        documents: The tokens of each, at least one.
    """
    for start in range(0, len(documents), batch_size):
        rows = documents[start : start + batch_size]
        inputs = build_inputs(_batch_of(rows))
        length = max(map(len, rows))
        last_A = np.array([row * length + len(tokens) - 1 for row, tokens in enumerate(rows)])
        yield model.scores(inputs, last_A)


def _batch_of(documents: Sequence[np.ndarray]) -> Batch:
    """Makes a row of each document, with padding up to the longest one."""
    length = max(map(len, documents))
    shape = len(documents), length
    ids_BT = np.zeros(shape, np.int32)
    segments_BT = np.ones(shape, np.int32)
    for row, tokens in enumerate(documents):
        ids_BT[row, : len(tokens)] = tokens
        segments_BT[row, : len(tokens)] = 0
    positions_BT = np.ascontiguousarray(np.broadcast_to(np.arange(length, dtype=np.int32), shape))
    return Batch(ids_BT, np.full(shape, IGNORE_INDEX, np.int32), positions_BT, segments_BT)
