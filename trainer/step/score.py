"""Scores of documents by a reward model, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.batches.batch import document_batch

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
        length = max(map(len, rows))
        inputs = build_inputs(document_batch(rows, len(rows), length))
        last_A = np.array([row * length + len(tokens) - 1 for row, tokens in enumerate(rows)])
        yield model.scores(inputs, last_A)
