"""The embedding of tensor-parallel ranks that shard the vocabulary. `ascend/loss.py` has their cross entropy.

Legend: N tokens, E width of the embedding, V this rank's vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P


class VocabShard(NamedTuple):
    """The shard of the vocabulary that one rank has.

    Attributes:
        rank, ranks: The number of this rank in the tensor-parallel group, and the size of the group.
        first: The first token of this shard.
        gather: Gathers a tensor of each rank: [n, ...] -> [R n, ...].
    """

    rank: int
    ranks: int
    first: int
    gather: Callable[[Tensor], Tensor]


def local_token_ids(tokens_N: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the row of each token in the shard of `size` tokens from `first` on, and a float32 mask.

    The mask is 1 for tokens of the shard and 0 for others, whose row is 0.
    """
    row_N = tokens_N - first
    inside_N = ops.logical_and(row_N >= 0, row_N < size)
    return row_N * inside_N.astype(row_N.dtype), inside_N.astype(mstype.float32)


class VocabShardRows(nn.Cell):
    """(weight_VE, ids_N) -> the embeddings of the tokens of this shard, and zeros for other tokens: [N, E]."""

    def __init__(self, shard: VocabShard, gather_rows: Callable) -> None:
        super().__init__()
        self.first = shard.first
        self.gather_rows = gather_rows
        self.matmul = P.MatMul()

    def construct(self, weight_VE: Tensor, ids_N: Tensor) -> Tensor:
        row_N, inside_N = local_token_ids(ids_N, self.first, weight_VE.shape[0])
        ones_1E = ops.ones((1, weight_VE.shape[1]), weight_VE.dtype)
        return self.gather_rows(weight_VE, row_N) * self.matmul(inside_N.reshape(-1, 1), ones_1E)
