"""Attention of a prediction over cached keys and values.

Legend: B sequences, Q new tokens of each, N = B * Q, S cached positions, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from trainer.arrays.memory import host_threads
from trainer.models.spec.visibility import attention_bias

_SHARED_WORK = 1 << 22  # multiplications from which threads share the attention of a layer


class KVCache:
    """What each layer keeps of every token, two float32 arrays [B, K, capacity, d]: keys and values; or with latent
    attention, where K is 1, the latent vectors and the rotated keys. What a head reads is contiguous.

    Args:
        widths: Of a layer, the columns of both for a token.
        heads: K.
    """

    def __init__(self, layers: int, widths: tuple[int, int], heads: int, rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.sequences_B1 = np.arange(rows)[:, None]
        self.positions_BQ: np.ndarray | None = None
        self.cached = 0
        self.layers = [
            tuple(np.zeros((rows, heads, capacity, width // heads), np.float32) for width in widths)
            for _ in range(layers)
        ]

    def place(self, positions_BQ: np.ndarray, cached: int) -> None:
        """Sets where the next calls of `update` write, and how many positions they return."""
        self.positions_BQ = positions_BQ
        self.cached = cached

    def select(self, rows: slice) -> KVCache:
        """Returns the cache of some of the sequences, where it is placed."""
        found = copy.copy(self)
        found.positions_BQ = self.positions_BQ[rows]
        found.sequences_B1 = np.arange(len(found.positions_BQ))[:, None]
        found.layers = [tuple(store[rows] for store in stores) for stores in self.layers]
        return found

    def update(self, layer: int, new: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Writes what a layer keeps of new tokens, [N, K * d] each; returns the cached arrays, [B, K, S, d]."""
        heads = self.layers[layer][0].shape[1]
        for store, rows in zip(self.layers[layer], new, strict=True):
            store[self.sequences_B1, :, self.positions_BQ] = rows.reshape(*self.positions_BQ.shape, heads, -1)
        first, second = self.layers[layer]
        return first[:, :, : self.cached], second[:, :, : self.cached]


def cached_mask(visible_BQS: np.ndarray, groups: int) -> np.ndarray | None:
    """Returns what is added to the scores, [B, 1, Q * groups, S]; None where all positions are visible."""
    if visible_BQS.all():
        return None
    return np.repeat(attention_bias(visible_BQS), groups, axis=1)[:, None]


def attend_cached(
    q_NC: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None
) -> np.ndarray:
    """Returns softmax(q k^T + mask) v of each head, [N, C]; q is scaled already.

    Threads share a large one by sequences and heads.

    Args:
        keys, values: [B, K, S, d].
        mask: As `cached_mask` returns it.
    """
    rows, kv_heads, cached, size = keys.shape
    queries = len(q_NC) // rows
    q = q_NC.reshape(rows, queries, kv_heads, -1, size)
    q = q.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, -1, size)
    threads = host_threads()
    if threads.threads == 1 or q.size * cached < _SHARED_WORK:
        out = _attend(q, keys, values, mask)
    else:
        out = np.empty((*q.shape[:3], values.shape[-1]), np.float32)

        def attend_one(place: tuple[int, int], thread: int) -> None:
            if mask is None:
                of_sequence = None
            else:
                of_sequence = mask[place[0], 0]
            out[place] = _attend(q[place], keys[place], values[place], of_sequence)

        threads.run(np.ndindex(rows, kv_heads), attend_one)
    out = out.reshape(rows, kv_heads, queries, -1).transpose(0, 2, 1, 3)
    return out.reshape(rows * queries, -1)


def _attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    scores = q @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores += mask
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores @ values
