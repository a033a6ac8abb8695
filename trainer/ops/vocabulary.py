"""The embedding of ranks that shard the vocabulary, as a cell. On an Ascend `ascend/loss.py` has the cross entropy.

Legend: N tokens, E width of the embedding, V this rank's vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P


class VocabShard(NamedTuple):
    """A rank's part of the vocabulary.

    Attributes:
        first: Its first token.
        gather: [n, ...] of each rank -> [R n, ...].
    """

    rank: int
    ranks: int
    first: int
    gather: Callable[[Tensor], Tensor]


def local_token_ids(tokens_N: Tensor, part_first: int, size: int) -> tuple[Tensor, Tensor]:
    """Places of tokens in a part of the vocabulary, 0 where they are in another one; and 1 there or else 0, float32."""
    place_N = tokens_N - part_first
    inside_N = ops.logical_and(place_N >= 0, place_N < size)
    return place_N * inside_N.astype(place_N.dtype), inside_N.astype(mstype.float32)


class VocabShardRows(nn.Cell):
    """(weight_VE, ids_N) -> the rows of the tokens in this part, zeros for the others: [N, E]."""

    def __init__(self, part: VocabShard, gather_rows: Callable) -> None:
        super().__init__()
        self.first = part.first
        self.gather_rows = gather_rows
        self.matmul = P.MatMul()

    def construct(self, weight_VE, ids_N):
        place_N, inside_N = local_token_ids(ids_N, self.first, weight_VE.shape[0])
        ones_1E = ops.ones((1, weight_VE.shape[1]), weight_VE.dtype)
        return self.gather_rows(weight_VE, place_N) * self.matmul(inside_N.reshape(-1, 1), ones_1E)
