"""The positions of the tokens of a batch: which keys each query sees, and the rotary embedding.

Legend: N tokens of this rank, B sequences of T tokens; Q queries of a block, S its keys, M the last of these keys,
which are masked for some queries; h half of the rotated numbers of a head, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.arrays.memory import row_blocks
from trainer.arrays.operators import operators
from trainer.data.batches.context import ContextShard
from trainer.models.spec.visibility import attention_bias, visible_keys

if TYPE_CHECKING:
    from trainer.models.spec.model import AttentionSpec

_QUERIES = 128  # of a block: half of what is computed on the diagonal is masked
_KEYS = 64  # a block's keys begin at a multiple of this: softmax is compiled for each number of keys
_CACHE_LINE = 16  # elements


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
    """Rotates pairs of a head's elements (Su et al. 2021, equation 34): elements i and i + h, or neighbours."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.size = spec.rotary_size
        self.rotates_neighbours = spec.rotary_interleaved
        # Which angles of the tables belong to the pairs; both elements of a pair have the same angle.
        if self.rotates_neighbours:
            self.angles = slice(0, self.size, 2)
        else:
            self.angles = slice(self.size // 2)

    def table(self, cos_Nd: np.ndarray, sin_Nd: np.ndarray) -> np.ndarray:
        """Returns the rotations of tokens for `apply`, cos + i sin, complex [N, 1, h]."""
        return (cos_Nd + 1j * sin_Nd)[:, None, self.angles].astype(np.complex64)

    def apply(self, x_nhd: np.ndarray, rotation_n1h: np.ndarray) -> None:
        """Rotates the first elements of each head of [n, heads, d] in place."""
        if not self.size:
            return
        numbers = x_nhd[..., : self.size]
        if self.rotates_neighbours:
            operators().rotate(numbers, rotation_n1h)
        else:
            operators().rotate_halves(numbers, rotation_n1h)
