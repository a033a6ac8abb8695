"""Attention of a block of queries with the keys that it sees, forward and backward.

Only the scores of one block, [heads, queries, keys], exist at a time. The backward pass computes them again.

Legend: N tokens, S keys of a block, Q its queries; H query heads, K key/value heads, G = H / K, d head size, v width of
a value; C = H * d, V = H * v.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.compiled.attention import AttentionSizes, CompiledAttention
from trainer.arrays.memory import downcast_if_needed, part_of, row_blocks
from trainer.arrays.numpy_operators import soft_cap
from trainer.arrays.operators import operators

if TYPE_CHECKING:
    from trainer.arrays.attention.positions import QueryBlock, SequenceBlocks
    from trainer.arrays.dropout import LayerDropout
    from trainer.arrays.tiles import Tile
    from trainer.models.spec.model import AttentionSpec

_SCORES = 1 << 19  # that a thread computes at once, for several heads of the longest block: they fit in its cache


class BlockAttention:
    """Computes softmax(q k^T) v, with the masks of the blocks; q is scaled already, and scores may have a cap.

    The sinks of the heads are scores of one more key, whose value is 0.

    Args:
        heads, kv_heads: The query heads and key/value heads of this rank.
    """

    def __init__(self, spec: AttentionSpec, heads: int, kv_heads: int) -> None:
        self.kv_heads = kv_heads
        self.groups = heads // kv_heads
        self.head_size = spec.head_size
        self.value_size = spec.value_size
        self.rate = spec.dropout
        self.cap = spec.score_cap
        self.extra_keys = int(spec.sinks)
        self.width = heads * spec.value_size

    def forward(
        self, sequence: SequenceBlocks, block: QueryBlock, q_NC: np.ndarray, k_NK: np.ndarray, v_NK: np.ndarray,
        out_NV: np.ndarray, tile: Tile, dropout: LayerDropout | None, keep_masks: bool = False,
        max_logits: np.ndarray | None = None, sinks_KG: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Writes the results of the block's queries to their rows of `out_NV`.

        `max_logits` [K, G] takes the largest score of each head that a query sees, if it is larger.
        """
        run = operators()
        fused = self._fused(q_NC, dropout)
        if fused is not None:
            heads = slice(0, self.kv_heads)
            sizes = self._sizes(block, heads)
            q_place, k_place, v_place, out_place = self._places(block, heads)
            inputs = q_NC[q_place], k_NK[k_place], v_NK[v_place]
            scratch = tile.take_array(sizes.scratch(gradient=False))
            fused.forward(sizes, inputs, block.bias_QM, out_NV[out_place], scratch, max_logits)
            return
        head_blocks = list(self._head_blocks([block], self.kv_heads))
        scores_buffer, narrow_buffer = self._score_buffers(block, head_blocks[0], q_NC.dtype, tile, 1)
        for heads in head_blocks:
            mask = self._mask(sequence, block, heads, dropout, keep_masks)
            k = self._keys(k_NK, block.keys, heads, self.head_size)
            v = self._keys(v_NK, block.keys, heads, self.value_size)
            for group in range(self.groups):
                q = self._queries(q_NC, block, heads, group, self.head_size)
                keys = k.shape[1]
                scores = _view(scores_buffer[0], len(q), q.shape[1], keys + self.extra_keys)
                _masked_scores(q, k, block, scores[..., :keys], self.cap)
                if max_logits is not None:
                    np.maximum(max_logits[heads, group], scores[..., :keys].max((1, 2)), out=max_logits[heads, group])
                if sinks_KG is not None:
                    scores[..., keys] = sinks_KG[heads, group, None]
                if narrow_buffer:
                    probabilities = _view(narrow_buffer[0], *scores.shape)
                else:
                    probabilities = scores
                if mask is None:
                    run.softmax(scores, probabilities)
                else:
                    run.softmax(scores, scores)
                    scores[..., :keys] *= mask[:, group]
                    downcast_if_needed(scores, probabilities)
                out = self._queries(out_NV, block, heads, group, self.value_size)
                run.matmul(probabilities[..., :keys], v, out)

    def backward(
        self, sequence: SequenceBlocks, heads: slice, q_NC: np.ndarray, k_NK: np.ndarray, v_NK: np.ndarray,
        grad_NV: np.ndarray, grad_q_NC: np.ndarray, grad_k_NK: np.ndarray, grad_v_NK: np.ndarray, tile: Tile,
        dropout: LayerDropout | None, sinks_KG: np.ndarray | None = None, grad_sinks_KG: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Writes the gradients of queries, keys and values of some key/value heads of a sequence.

        One thread adds them up block by block. Those of the sinks are added to `grad_sinks_KG`.
        """
        for array, size in ((grad_k_NK, self.head_size), (grad_v_NK, self.value_size)):
            self._keys(array, sequence.keys, heads, size)[...] = 0
        if not sequence.blocks:
            return
        fused = self._fused(q_NC, dropout)
        if fused is not None:
            all_sizes = [self._sizes(block, heads) for block in sequence.blocks]
            scratch = tile.take_array(max(sizes.scratch(gradient=True) for sizes in all_sizes))
            for block, sizes in zip(sequence.blocks, all_sizes, strict=True):
                q_place, k_place, v_place, out_place = self._places(block, heads)
                inputs = q_NC[q_place], k_NK[k_place], v_NK[v_place]
                grads = grad_q_NC[q_place], grad_k_NK[k_place], grad_v_NK[v_place]
                fused.backward(sizes, inputs, block.bias_QM, grad_NV[out_place], grads, scratch)
            return
        longest = max(sequence.blocks, key=self._scores)
        wide_buffers, narrow_buffers = self._score_buffers(longest, heads, q_NC.dtype, tile, 2)
        slope_buffer = None
        if self.cap is not None:
            slope_buffer = tile.take_array(len(wide_buffers[0]))
        for block in sequence.blocks:
            mask = self._mask(sequence, block, heads, dropout)
            k, grad_k = (self._keys(array, block.keys, heads, self.head_size) for array in (k_NK, grad_k_NK))
            v, grad_v = (self._keys(array, block.keys, heads, self.value_size) for array in (v_NK, grad_v_NK))
            for group in range(self.groups):
                q = self._queries(q_NC, block, heads, group, self.head_size)
                grad = self._queries(grad_NV, block, heads, group, self.value_size)
                grad_q = self._queries(grad_q_NC, block, heads, group, self.head_size)
                shape = len(q), q.shape[1], k.shape[1] + self.extra_keys
                buffers = [_view(buffer, *shape) for buffer in (*wide_buffers, *narrow_buffers)]
                slope = None
                if slope_buffer is not None:
                    slope = _view(slope_buffer, *shape)[..., : k.shape[1]]
                grad_sink = _block_gradients(
                    block, q, k, v, grad, grad_q, grad_k, grad_v, buffers, part_of(mask, (slice(None), group)),
                    self.cap, slope, part_of(sinks_KG, (heads, group)),
                )  # fmt: skip
                if grad_sinks_KG is not None:
                    grad_sinks_KG[heads, group] += grad_sink

    def _fused(self, q_NC: np.ndarray, dropout: LayerDropout | None) -> CompiledAttention | None:
        """Returns the functions that compute a block at once; None: there are none for this attention."""
        if self.cap is not None or self.extra_keys or (dropout is not None and self.rate):
            return None
        return operators().fused_attention(q_NC)

    def _sizes(self, block: QueryBlock, heads: slice) -> AttentionSizes:
        queries, masked = block.bias_QM.shape
        keys = block.keys.stop - block.keys.start
        return AttentionSizes(
            queries, keys, heads.stop - heads.start, self.groups, self.head_size, self.value_size, keys - masked
        )

    def _places(self, block: QueryBlock, heads: slice) -> list[tuple[slice, slice]]:
        """Returns where some heads of a block are in the arrays of queries, keys, values and results."""
        sizes = (self.groups * self.head_size, self.head_size, self.value_size, self.groups * self.value_size)
        rows = block.queries, block.keys, block.keys, block.queries
        columns = [slice(heads.start * size, heads.stop * size) for size in sizes]
        return list(zip(rows, columns, strict=True))

    def tasks(
        self, blocks: Sequence[SequenceBlocks], min_tasks: int
    ) -> Iterator[tuple[SequenceBlocks, slice]]:
        """Yields the tasks of the backward pass for threads: some key/value heads of a sequence.

        There are at least `min_tasks` tasks, if there are enough heads.
        """
        max_heads = max(1, self.kv_heads * len(blocks) // min_tasks)
        for sequence in blocks:
            for heads in self._head_blocks(sequence.blocks, max_heads):
                yield sequence, heads

    def _head_blocks(self, blocks: Iterable[QueryBlock], max_heads: int) -> Iterator[slice]:
        """Yields blocks of at most `max_heads` key/value heads, whose scores of any query block fit in the cache."""
        scores = max(map(self._scores, blocks), default=1)
        return row_blocks(slice(0, self.kv_heads), min(max(1, _SCORES // (2 * scores)), max_heads))

    def _scores(self, block: QueryBlock) -> int:
        """Counts the scores of one head, with those of sinks."""
        keys = block.keys.stop - block.keys.start
        return (block.queries.stop - block.queries.start) * (keys + self.extra_keys)

    def _score_buffers(
        self, block: QueryBlock, heads: slice, dtype: type, tile: Tile, number: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns flat scratch arrays for the scores of some heads: `number` in float32, and `number` in `dtype`.

        The second list is empty if `dtype` is float32.
        """
        size = (heads.stop - heads.start) * self._scores(block)
        wide = [tile.take_array(size) for _ in range(number)]
        if dtype == np.float32:
            return wide, []
        return wide, [tile.take_array(size, dtype=dtype) for _ in range(number)]

    def _mask(
        self, sequence: SequenceBlocks, block: QueryBlock, heads: slice, dropout: LayerDropout | None,
        keep: bool = False,
    ) -> np.ndarray | None:  # fmt: skip
        """Returns the dropout factors of the probabilities, [heads, G, Q, S]; None without dropout."""
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
    cap: float | None, slope: np.ndarray | None, sink_h: np.ndarray | None,
) -> np.ndarray | None:  # fmt: skip
    """Writes the gradients of the queries of a block; adds those of its keys and values to `grad_k` and `grad_v`.

    Args:
        cap: The cap of the scores.
        slope: With a cap, takes its slope.
        sink_h: The sinks of the heads.

    Returns:
        The gradients of the sinks; None without sinks.
    """
    probabilities, grad_scores, *narrow = buffers
    # Probabilities and gradients of scores in the dtype of the products.
    factor, grad_factor = narrow or (probabilities, grad_scores)
    run = operators()
    keys = k.shape[1]
    _masked_scores(q, k, block, probabilities[..., :keys], cap, slope)
    if sink_h is not None:
        probabilities[..., keys] = sink_h[:, None]
        grad_scores[..., keys] = 0
    run.softmax(probabilities, probabilities)
    run.matmul(grad, v.swapaxes(1, 2), grad_scores[..., :keys])
    kept = probabilities[..., :keys]
    factor = factor[..., :keys]
    if mask is not None:
        grad_scores[..., :keys] *= mask
        kept = kept * mask
        if factor.dtype == kept.dtype:
            factor = kept
    downcast_if_needed(kept, factor)
    run.matmul(factor.swapaxes(1, 2), grad, grad_v, True)
    grad_sink_h = None
    if slope is None and sink_h is None:
        run.softmax_gradient(probabilities, grad_scores, grad_factor)
    else:
        run.softmax_gradient(probabilities, grad_scores, grad_scores)
        if sink_h is not None:
            grad_sink_h = grad_scores[..., keys].sum(1)
        if slope is not None:
            grad_scores[..., :keys] *= slope
        downcast_if_needed(grad_scores, grad_factor)
    grad_factor = grad_factor[..., :keys]
    run.matmul(grad_factor, k, grad_q)
    run.matmul(grad_factor.swapaxes(1, 2), q, grad_k, True)
    return grad_sink_h


def _masked_scores(
    q: np.ndarray, k: np.ndarray, block: QueryBlock, out: np.ndarray, cap: float | None = None,
    slope: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Writes the scores of queries with all keys of the block; those of masked keys are far below all others.

    With `cap`, `slope` receives the derivative of the capped scores with respect to the scores.
    """
    operators().matmul(q, k.swapaxes(1, 2), out)
    if cap is not None:
        soft_cap(out, cap, slope)
    if block.bias_QM.size:
        operators().add_to_blocks(out[..., block.masked :], block.bias_QM)


def _view(buffer: np.ndarray, *shape: int) -> np.ndarray:
    heads, queries, keys = shape
    return buffer[: heads * queries * keys].reshape(shape)
