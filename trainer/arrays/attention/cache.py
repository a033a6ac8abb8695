"""Attention of a prediction over cached keys and values.

Legend: B sequences, Q new tokens of each, N = B * Q, S cached positions, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from trainer.arrays.memory import host_threads, part_of
from trainer.arrays.operators import operators
from trainer.models.spec.visibility import attention_bias

_SHARED_WORK = 1 << 22  # multiplications from which threads share the attention of a layer


class KVCache:
    """The KV cache of a prediction: two float32 arrays of each layer, [B, K, capacity, d], contiguous for each head.

    They hold keys and values; with MLA, where K is 1, latent vectors and rotated keys.

    Args:
        widths: Columns of a token in both arrays.
        heads: K.
        rows: B.
        capacity: Maximum number of tokens of a sequence.
    """

    def __init__(self, layers: int, widths: tuple[int, int], heads: int, rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.sequences_B1 = np.arange(rows)[:, None]
        self.positions_BQ = np.zeros((rows, 0), np.int64)
        self.cached = 0
        self.layers = [
            tuple(np.zeros((rows, heads, capacity, width // heads), np.float32) for width in widths)
            for _ in range(layers)
        ]

    def set_positions(self, positions_BQ: np.ndarray, cached: int) -> None:
        """Sets where the next calls of `update` write, and how many positions they return."""
        self.positions_BQ = positions_BQ
        self.cached = cached

    def select(self, rows: slice) -> KVCache:
        """Returns the cache of some of the sequences, which shares its memory and positions with this one."""
        selected = copy.copy(self)
        selected.positions_BQ = self.positions_BQ[rows]
        selected.sequences_B1 = np.arange(len(selected.positions_BQ))[:, None]
        selected.layers = [tuple(store[rows] for store in stores) for stores in self.layers]
        return selected

    def update(self, layer: int, new: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Writes both arrays of a layer for new tokens, [N, K * d]; returns those of cached tokens, [B, K, S, d]."""
        heads = self.layers[layer][0].shape[1]
        for store, rows in zip(self.layers[layer], new, strict=True):
            store[self.sequences_B1, :, self.positions_BQ] = rows.reshape(*self.positions_BQ.shape, heads, -1)
        first, second = self.layers[layer]
        return first[:, :, : self.cached], second[:, :, : self.cached]


def cached_bias(visible_BQS: np.ndarray, groups: int) -> np.ndarray | None:
    """Returns the term that attention adds to its scores, [B, 1, Q * groups, S]; None if all positions are visible."""
    if visible_BQS.all():
        return None
    return np.repeat(attention_bias(visible_BQS), groups, axis=1)[:, None]


def attend_cached(
    q_NC: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None, cap: float | None = None,
    sinks_H: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Returns softmax(q k^T + mask) v of each head, [N, C]; q is scaled already.

    Threads share the sequences and heads of a large product.

    Args:
        keys, values: [B, K, S, d].
        mask: As `cached_mask` returns it.
        cap: The cap of the scores.
        sinks_H: A score of each head that takes part in the softmax and has no value.
    """
    rows, kv_heads, cached, size = keys.shape
    queries = len(q_NC) // rows
    q = q_NC.reshape(rows, queries, kv_heads, -1, size)
    q = np.ascontiguousarray(q.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, -1, size))
    sinks = None
    if sinks_H is not None:  # of the rows of q
        sinks = np.tile(sinks_H.reshape(kv_heads, -1), queries)
    out = np.empty((*q.shape[:3], values.shape[-1]), np.float32)
    threads = host_threads()
    run = operators()
    if (run.shares(q) and cap is None) or threads.free() == 1 or q.size * cached < _SHARED_WORK:
        run.attend(q, keys, values, mask, cap, sinks, out, threads.free())
    else:

        def attend_one(place: tuple[int, ...], thread: int) -> None:
            """Writes the attention of the query heads that share a key head, for one sequence."""
            one = tuple(slice(index, index + 1) for index in place)
            operators().attend(
                q[one], keys[one], values[one], part_of(mask, one[0]), cap, part_of(sinks, one[1]), out[one]
            )

        threads.run(np.ndindex(rows, kv_heads), attend_one)
    out = out.reshape(rows, kv_heads, queries, -1).transpose(0, 2, 1, 3)
    return out.reshape(rows * queries, -1)
