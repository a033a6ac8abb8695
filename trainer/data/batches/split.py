"""Splits documents into training and held-out ones, both as spans of the token file."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainer.data.rng import Stream, random_order

_MAX_ROUNDS = 64


class DocumentSpans(NamedTuple):
    """Documents as ranges of a token file, in its order."""

    starts: np.ndarray  # int64 [documents], first token of each
    lengths: np.ndarray  # int64 [documents], how many tokens, each at least 1


def all_documents(offsets: np.ndarray) -> DocumentSpans:
    """All documents of a token file (`offsets`: int64 [documents + 1])."""
    return DocumentSpans(offsets[:-1], np.diff(offsets))


def hold_out(documents: DocumentSpans, fraction: float, seed: int) -> tuple[DocumentSpans, DocumentSpans]:
    """Splits documents into (training, held out), the same way for the same seed.

    Whole documents are drawn at random as long as they fit into the fraction; at least one is held out (then the
    shortest) and at least one is left. Of a single document the tail is held out. `documents` have at least two tokens
    in all, and 0 < `fraction` < 1 is that of all tokens.
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
    """Goes through the documents in random order and takes each that still fits; returns the indices taken."""
    waiting = random_order(seed, Stream.HELD_OUT, 0, len(lengths))
    taken: list[np.ndarray] = []
    left_tokens = target_tokens
    for _ in range(_MAX_ROUNDS):
        # Take all up to the first that is too long, then continue with the later ones that are short enough.
        fits = int(np.searchsorted(np.cumsum(lengths[waiting]), left_tokens, side="right"))
        taken.append(waiting[:fits])
        left_tokens -= int(lengths[waiting[:fits]].sum())
        waiting = waiting[fits + 1 :]
        waiting = waiting[lengths[waiting] <= left_tokens]
        if not len(waiting):
            break
    indices = np.concatenate(taken)
    if not len(indices):
        return np.argmin(lengths, keepdims=True)
    if len(indices) < len(lengths):
        return indices
    return indices[:-1]
