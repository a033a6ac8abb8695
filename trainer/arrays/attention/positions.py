"""The positions of the tokens of a batch: which keys each query sees, and the rotary embedding.

Legend: N tokens of this rank, B sequences of T tokens; Q queries of a block, S its keys, M the last of these keys,
which are masked for some queries; h half of the rotated numbers of a head, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.arrays.memory import row_blocks
from trainer.arrays.operators import operators
from trainer.data.batches.context import ContextShard
from trainer.models.spec.visibility import attention_bias, visible_keys

if TYPE_CHECKING:
    from mindspore import Tensor

    from trainer.arrays.tiles import Scratch
    from trainer.models.spec.model import AttentionSpec

_QUERIES = 128  # of a block: half of what is computed on the diagonal is masked
_KEYS = 64  # a block's keys begin at a multiple of this: softmax is compiled for each number of keys
_CACHE_LINE = 16  # elements


_ROW_KINDS = ("weight", "bias", "lora_B.weight", "lora_magnitude_vector")
"""The parameters of a matrix with a row or number for each output."""


class QueryBlock(NamedTuple):
    """Consecutive queries of one sequence, and the keys that some of them see.

    Attributes:
        queries: Rows of this rank's tokens.
        keys: Rows of the keys and values, which cover full sequences.
        position: Position of the first query in its sequence.
        masked: Index of the first key of `bias_QM` among the keys of the block.
        bias_QM: The term that attention adds to the scores: 0 where the query sees the key.
    """

    queries: slice
    keys: slice
    position: int
    masked: int
    bias_QM: np.ndarray


class SequenceBlocks(NamedTuple):
    """The query blocks of one sequence, and the rows of all its keys."""

    number: int
    keys: slice
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True)
class TokenPositions:
    """The positions of the tokens of a batch.

    Attributes:
        rotation_N1h: Rotary embedding: cos + i sin of the angle of each pair, complex, [N, 1, h].
        blocks: The query blocks of each sequence.
        window_blocks: The query blocks for layers with a sliding window; None if there are none.
        window_rotation_N1h: `rotation_N1h` of these layers; None: that of all layers.
    """

    rotation_N1h: np.ndarray
    blocks: tuple[SequenceBlocks, ...]
    window_blocks: tuple[SequenceBlocks, ...] | None = None
    window_rotation_N1h: np.ndarray | None = None

    def select_rotation(self, window: int | None) -> np.ndarray:
        """Returns the rotations of layers with this sliding window; None: without one."""
        if window is None or self.window_rotation_N1h is None:
            return self.rotation_N1h
        return self.window_rotation_N1h

    def select_blocks(self, window: int | None) -> tuple[SequenceBlocks, ...]:
        """Returns the query blocks of layers with this sliding window; None: without one."""
        if window is None:
            return self.blocks
        assert self.window_blocks is not None
        return self.window_blocks


_ALL_TOKENS = ContextShard(0, 1)


def query_blocks(
    segment_ids_BT: np.ndarray, window: int | None = None, shard: ContextShard = _ALL_TOKENS
) -> tuple[SequenceBlocks, ...]:
    """Returns the query blocks of each sequence, with causal masks within documents.

    Args:
        segment_ids_BT: The document of each token.
        window: Sliding window; None: none.
        shard: With context parallelism, which tokens of each sequence are queries of this rank; all tokens are keys.
    """
    length = segment_ids_BT.shape[1]
    sequences = []
    for number, segments_T in enumerate(segment_ids_BT):
        keys = slice(number * length, (number + 1) * length)
        blocks = tuple(_blocks_of(segments_T, number * (length // shard.ranks), keys.start, window, shard))
        sequences.append(SequenceBlocks(number, keys, blocks))
    return tuple(sequences)


def _blocks_of(
    segments_T: np.ndarray, first_row: int, first_key: int, window: int | None, shard: ContextShard
) -> Iterator[QueryBlock]:
    for run in shard.ranges(len(segments_T)):
        for queries in row_blocks(slice(run.start, run.stop), _QUERIES):
            keys, masked, bias_QM = _keys_of_block(segments_T, queries, window)
            size = queries.stop - queries.start
            rows = slice(first_row, first_row + size)
            first_row += size
            yield QueryBlock(
                rows, slice(first_key + keys.start, first_key + keys.stop), queries.start, masked, bias_QM
            )


def _keys_of_block(segments_T: np.ndarray, queries: slice, window: int | None) -> tuple[slice, int, np.ndarray]:
    """Returns the keys of a block in its sequence, then `masked` and `bias_QM` of `QueryBlock`."""
    keys_S = np.arange(queries.stop)
    sees_QS = visible_keys(keys_S[queries], keys_S, window, segments_T)
    first = int(sees_QS.any(0).argmax()) // _KEYS * _KEYS
    sees_QS = sees_QS[:, first:]
    masked = int(np.append(sees_QS.all(0), False).argmin())  # of the first key that some query does not see
    masked -= masked % _CACHE_LINE  # an addition that begins there takes a third of the time
    return slice(first, queries.stop), masked, attention_bias(sees_QS[:, masked:])


class CpuRotary:
    """Rotates pairs of a head's elements (Su et al. 2021, equation 34): elements i and i + h, or neighbours.

    Neighbours are rotated as one complex number, which takes a tenth of the time. So models that rotate i and i + h
    compute queries and keys in another order (`pair_weights`), with pairs as neighbours. The order of a head's numbers
    does not change a score, which is a sum over them.

    Args:
        pairs: Reorder the weights. A prediction, which does not copy weights, rotates i and i + h instead.

    Attributes:
        orders: By the name of each weight that makes or norms queries or keys: rows of a head, and their order.
    """

    def __init__(self, spec: AttentionSpec, pairs: bool = True) -> None:
        self.size = spec.rotary_size
        self.rotates_pairs = pairs or spec.rotary_interleaved
        half = self.size // 2
        # Which angles of the tables belong to the pairs; both elements of a pair have the same angle.
        if spec.rotary_interleaved:
            self.angles = slice(0, self.size, 2)
        else:
            self.angles = slice(half)
        self.orders: dict[str, tuple[int, np.ndarray]] = {}
        if spec.rotary_interleaved or not pairs or not self.size:
            return
        pair_order = np.arange(self.size).reshape(2, -1).T.reshape(-1)
        if spec.latent is None:
            order = np.concatenate((pair_order, np.arange(self.size, spec.head_size)))
            names = [f"self_attn.{one}_proj.{kind}" for one in "qk" for kind in _ROW_KINDS]
            names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
            self.orders = dict.fromkeys(names, (spec.head_size, order))
            return
        rotated = np.concatenate((pair_order, np.arange(self.size, spec.latent.rope_size)))
        query_order = np.concatenate((np.arange(spec.latent.nope_size), spec.latent.nope_size + rotated))
        down_size = spec.latent.key_value_rank + spec.latent.rope_size
        down_order = np.concatenate((np.arange(spec.latent.key_value_rank), spec.latent.key_value_rank + rotated))
        for kind in _ROW_KINDS:
            self.orders[f"self_attn.q_proj.{kind}"] = spec.head_size, query_order
            self.orders[f"self_attn.q_b_proj.{kind}"] = spec.head_size, query_order
            self.orders[f"self_attn.kv_a_proj_with_mqa.{kind}"] = down_size, down_order

    def table(self, cos_Nd: np.ndarray, sin_Nd: np.ndarray) -> np.ndarray:
        """Returns the rotations of tokens for `apply`, cos + i sin, complex [N, 1, h]."""
        return (cos_Nd + 1j * sin_Nd)[:, None, self.angles].astype(np.complex64)

    def apply(self, x_nhd: np.ndarray, rotation_n1h: np.ndarray) -> None:
        """Rotates the first elements of each head of [n, heads, d] in place."""
        if not self.size:
            return
        numbers = x_nhd[..., : self.size]
        if self.rotates_pairs:
            operators().rotate(numbers, rotation_n1h)
        else:
            operators().rotate_halves(numbers, rotation_n1h)

    def pair_weights(self, weights: Mapping[str, np.ndarray], scratch: Scratch) -> Mapping[str, np.ndarray]:
        """Returns the weights with those of queries and keys reordered: the elements of a pair become neighbours."""
        changed = {
            name: _reorder_rows(weights[name], size, order, scratch)
            for name, (size, order) in self.orders.items()
            if name in weights
        }
        if changed:
            return {**weights, **changed}
        return weights

    def unpair_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Puts the gradients of reordered weights into the order of the model, in place, and returns all gradients."""
        for name, (size, order) in self.orders.items():
            if name in gradients:
                by_head = _by_head(gradients[name].asnumpy(), size)
                by_head[:, order] = by_head.copy()
        return gradients


def _reorder_rows(array: np.ndarray, size: int, order: np.ndarray, scratch: Scratch) -> np.ndarray:
    """Returns a copy with the rows of each head in another order.

    It is in memory that the next layer uses again. With copies in NumPy's memory a LoRA step of Qwen3-0.6B with 512
    tokens was measured to take 120 MB more, 5 MB for each layer.
    """
    by_head = _by_head(array, size)
    out = scratch.take_for_part(*by_head.shape, dtype=array.dtype.type)
    np.take(by_head, order, axis=1, out=out, mode="clip")  # other modes copy `out`
    return out.reshape(array.shape)


def _by_head(array: np.ndarray, size: int) -> np.ndarray:
    return array.reshape(-1, size, *array.shape[1:])
