"""Attention of a block of queries with the keys that it sees, forward and backward.

The scores of a block, [heads, queries, keys], are the most that ever exists. The backward pass computes them again.

Legend: N tokens, S keys of a block, Q its queries; H query heads, K key/value heads, G = H / K, d head size, v width of
a value; C = H * d, V = H * v.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.memory import row_blocks, to_bfloat16_if_needed
from trainer.arrays.onednn import operators

if TYPE_CHECKING:
    from trainer.arrays.attention.positions import QueryBlock, SequenceBlocks
    from trainer.arrays.dropout import LayerDropout
    from trainer.arrays.tiles import Tile
    from trainer.models.spec.model import AttentionSpec

_SCORES = 1 << 19  # of the heads that a thread takes at once, for the longest block: fewer calls, and yet in its cache


class BlockAttention:
    """softmax(q k^T) v, causal and within documents and windows as the blocks say; q is scaled already.

    Args:
        heads, kv_heads: Those that this rank computes.
    """

    def __init__(self, spec: AttentionSpec, heads: int, kv_heads: int) -> None:
        self.kv_heads = kv_heads
        self.groups = heads // kv_heads
        self.head_size = spec.head_size
        self.value_size = spec.value_size
        self.rate = spec.dropout
        self.width = heads * spec.value_size

    def forward(
        self, sequence: SequenceBlocks, block: QueryBlock, q_NC: np.ndarray, k_NK: np.ndarray, v_NK: np.ndarray,
        out_NV: np.ndarray, tile: Tile, dropout: LayerDropout | None, keep_masks: bool = False,
    ) -> None:  # fmt: skip
        """Writes the results of the block's queries to their rows of `out_NV`."""
        run = operators()
        some_heads = list(self._head_parts([block], self.kv_heads))
        scores_buffer, narrow_buffer = self._score_buffers(block, some_heads[0], q_NC.dtype, tile, 1)
        for heads in some_heads:
            mask = self._mask(sequence, block, heads, dropout, keep_masks)
            k = self._keys(k_NK, block.keys, heads, self.head_size)
            v = self._keys(v_NK, block.keys, heads, self.value_size)
            for group in range(self.groups):
                q = self._queries(q_NC, block, heads, group, self.head_size)
                scores = _view(scores_buffer[0], len(q), q.shape[1], k.shape[1])
                _masked_scores(q, k, block, scores)
                if narrow_buffer:
                    probabilities = _view(narrow_buffer[0], *scores.shape)
                else:
                    probabilities = scores
                if mask is None:
                    run.softmax(scores, probabilities)
                else:
                    run.softmax(scores, scores)
                    scores *= mask[:, group]
                    to_bfloat16_if_needed(scores, probabilities)
                run.matmul(probabilities, v, self._queries(out_NV, block, heads, group, self.value_size))

    def backward(
        self, sequence: SequenceBlocks, heads: slice, q_NC: np.ndarray, k_NK: np.ndarray, v_NK: np.ndarray,
        grad_NV: np.ndarray, grad_q_NC: np.ndarray, grad_k_NK: np.ndarray, grad_v_NK: np.ndarray, tile: Tile,
        dropout: LayerDropout | None,
    ) -> None:  # fmt: skip
        """Writes the gradients of a sequence's queries, keys and values of some key/value heads, which one thread adds
        up block by block."""
        for array, size in ((grad_k_NK, self.head_size), (grad_v_NK, self.value_size)):
            self._keys(array, sequence.keys, heads, size)[...] = 0
        if not sequence.blocks:
            return
        longest = max(sequence.blocks, key=_scores_of)
        wide_buffers, narrow_buffers = self._score_buffers(longest, heads, q_NC.dtype, tile, 2)
        for block in sequence.blocks:
            mask = self._mask(sequence, block, heads, dropout)
            k, grad_k = (self._keys(array, block.keys, heads, self.head_size) for array in (k_NK, grad_k_NK))
            v, grad_v = (self._keys(array, block.keys, heads, self.value_size) for array in (v_NK, grad_v_NK))
            for group in range(self.groups):
                q = self._queries(q_NC, block, heads, group, self.head_size)
                grad = self._queries(grad_NV, block, heads, group, self.value_size)
                grad_q = self._queries(grad_q_NC, block, heads, group, self.head_size)
                shape = len(q), q.shape[1], k.shape[1]
                buffers = [_view(buffer, *shape) for buffer in (*wide_buffers, *narrow_buffers)]
                if mask is None:
                    group_mask = None
                else:
                    group_mask = mask[:, group]
                _block_gradients(block, q, k, v, grad, grad_q, grad_k, grad_v, buffers, group_mask)

    def tasks(
        self, blocks: Sequence[SequenceBlocks], least: int
    ) -> Iterator[tuple[SequenceBlocks, slice]]:
        """Yields what threads take in the backward pass: key/value heads of a sequence; at least so many tasks, where
        there are heads enough."""
        most = max(1, self.kv_heads * len(blocks) // least)
        for sequence in blocks:
            for heads in self._head_parts(sequence.blocks, most):
                yield sequence, heads

    def _head_parts(self, blocks: Iterable[QueryBlock], most: int) -> Iterator[slice]:
        """Yields key/value heads, so many at once (and at most `most`) that the scores of any of the blocks stay in the
        cache."""
        scores = max((_scores_of(block) for block in blocks), default=1)
        return row_blocks(slice(0, self.kv_heads), min(max(1, _SCORES // (2 * scores)), most))

    def _score_buffers(
        self, block: QueryBlock, heads: slice, dtype: type, tile: Tile, number: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns flat scratch for the scores of some heads: so many float32 arrays, and where products take another
        dtype as many of that."""
        size = (heads.stop - heads.start) * _scores_of(block)
        wide = [tile.take_array(size) for _ in range(number)]
        if dtype != np.float32:
            narrow = [tile.take_array(size, dtype=dtype) for _ in range(number)]
        else:
            narrow = []
        return wide, narrow

    def _mask(
        self, sequence: SequenceBlocks, block: QueryBlock, heads: slice, dropout: LayerDropout | None,
        keep: bool = False,
    ) -> np.ndarray | None:  # fmt: skip
        """Returns the factors of the probabilities, [heads, G, Q, S]."""
        if dropout is None or not self.rate:
            return None
        queries = slice(block.position, block.position + block.queries.stop - block.queries.start)
        keys = slice(block.keys.start - sequence.keys.start, block.keys.stop - sequence.keys.start)
        length = sequence.keys.stop - sequence.keys.start
        return dropout.probabilities(sequence.number, queries, heads, self.kv_heads, self.groups, keys, length, keep)

    def _queries(self, array_NC: np.ndarray, block: QueryBlock, heads: slice, group: int, size: int) -> np.ndarray:
        """Returns a view of the block's queries, [heads, Q, size]: one query head of each key/value head."""
        rows = block.queries.stop - block.queries.start
        by_head = array_NC[block.queries].reshape(rows, self.kv_heads, self.groups, size)
        return by_head[:, heads, group].transpose(1, 0, 2)

    def _keys(self, array_NK: np.ndarray, keys: slice, heads: slice, size: int) -> np.ndarray:
        """Returns a view of keys or values, [heads, S, size]."""
        by_head = array_NK[keys].reshape(keys.stop - keys.start, self.kv_heads, size)
        return by_head[:, heads].transpose(1, 0, 2)


def _block_gradients(
    block: QueryBlock, q: np.ndarray, k: np.ndarray, v: np.ndarray, grad: np.ndarray, grad_q: np.ndarray,
    grad_k: np.ndarray, grad_v: np.ndarray, buffers: Sequence[np.ndarray], mask: np.ndarray | None,
) -> None:  # fmt: skip
    """Writes the gradients of the queries of a block; adds those of its keys and values to what is there."""
    probabilities, grad_scores, *narrow = buffers
    # What products take of both.
    factor, grad_factor = narrow or (probabilities, grad_scores)
    run = operators()
    _masked_scores(q, k, block, probabilities)
    run.softmax(probabilities, probabilities)
    run.matmul(grad, v.swapaxes(1, 2), grad_scores)
    kept = probabilities
    if mask is not None:
        grad_scores *= mask
        kept = probabilities * mask
        if factor is probabilities:
            factor = kept
    to_bfloat16_if_needed(kept, factor)
    run.matmul(factor.swapaxes(1, 2), grad, grad_v, True)
    run.softmax_gradient(probabilities, grad_scores, grad_factor)
    run.matmul(grad_factor, k, grad_q)
    run.matmul(grad_factor.swapaxes(1, 2), q, grad_k, True)


def _masked_scores(q: np.ndarray, k: np.ndarray, block: QueryBlock, out: np.ndarray) -> None:
    """Writes the scores of queries with all keys of the block; those that a query does not see are far below all
    others."""
    operators().matmul(q, k.swapaxes(1, 2), out)
    if block.bias_QM.size:
        out[..., block.masked :] += block.bias_QM


def _scores_of(block: QueryBlock) -> int:
    """Counts the scores of one head."""
    return (block.queries.stop - block.queries.start) * (block.keys.stop - block.keys.start)


def _view(buffer: np.ndarray, *shape: int) -> np.ndarray:
    heads, queries, keys = shape
    return buffer[: heads * queries * keys].reshape(shape)
