"""Splits documents into training documents and held-out documents, both as spans of the token file."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainer.data.rng import Stream, random_order

_MAX_ROUNDS = 64


class DocumentSpans(NamedTuple):
    """Documents as ranges of a token file, in its order."""

    starts: np.ndarray  # int64 [documents], first token of each
    lengths: np.ndarray  # int64 [documents], tokens of each, at least 1


def all_documents(offsets: np.ndarray) -> DocumentSpans:
    """Returns the spans of all documents of a token file.

    Args:
        offsets: int64 [documents + 1], where each document starts, and the end of the last.
    """
    return DocumentSpans(offsets[:-1], np.diff(offsets))


def hold_out(documents: DocumentSpans, fraction: float, seed: int) -> tuple[DocumentSpans, DocumentSpans]:
    """Splits documents into (training, held out), deterministically for a seed.

    Complete documents are drawn at random as long as they fit into the fraction. At least one document is held out
    (the shortest, if none fits) and at least one is kept for training. If there is a single document, its tail is held
    out.

    Args:
        documents: Documents with at least two tokens in total.
        fraction: The fraction of all tokens to hold out, between 0 and 1.
    """
    target_tokens = int(round(fraction * int(documents.lengths.sum())))
    if len(documents.lengths) == 1:
        length = int(documents.lengths[0])
        tail_tokens = min(max(target_tokens, 2), length - 1)  # two tokens: one label
        head_tokens = length - tail_tokens
        return (
            DocumentSpans(documents.starts, np.array([head_tokens], np.int64)),
            DocumentSpans(documents.starts + head_tokens, np.array([tail_tokens], np.int64)),
        )
    is_held_out = np.zeros(len(documents.lengths), bool)
    is_held_out[_draw(documents.lengths, target_tokens, seed)] = True
    return (
        DocumentSpans(documents.starts[~is_held_out], documents.lengths[~is_held_out]),
        DocumentSpans(documents.starts[is_held_out], documents.lengths[is_held_out]),
    )


def _draw(lengths: np.ndarray, target_tokens: int, seed: int) -> np.ndarray:
    """Takes documents in random order, each that still fits into `target_tokens`; returns their indices."""
    waiting = random_order(seed, Stream.HELD_OUT, 0, len(lengths))
    taken: list[np.ndarray] = []
    remaining_tokens = target_tokens
    for _ in range(_MAX_ROUNDS):
        # Take all up to the first document that is too long, then continue with the later documents that fit.
        fits = int(np.searchsorted(np.cumsum(lengths[waiting]), remaining_tokens, side="right"))
        taken.append(waiting[:fits])
        remaining_tokens -= int(lengths[waiting[:fits]].sum())
        waiting = waiting[fits + 1 :]
        waiting = waiting[lengths[waiting] <= remaining_tokens]
        if not len(waiting):
            break
    indices = np.concatenate(taken)
    if not len(indices):
        return np.argmin(lengths, keepdims=True)
    if len(indices) < len(lengths):
        return indices
    return indices[:-1]
