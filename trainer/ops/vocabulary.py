"""Cross entropy of plain operators, and the embedding of tensor-parallel ranks that shard the vocabulary.

`ascend/loss.py` has the cross entropy of an Ascend, with and without such ranks.

Legend: N tokens, E width of the embedding, V this rank's vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import SumExt

from trainer.ops.plain import Sharded


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


class CrossEntropy(Sharded):
    """Sum over loss tokens of logsumexp(logits) - logits[label], with logits = x weight^T.

    The vocabulary is sharded like columns, so no rank has all logits of a token. The logarithm of s, the sum of
    exp(logit - largest), is computed as log1p(s - 1): the bits of MindSpore's Log on a CPU depend on how it divides the
    elements among threads, which it decides by timing itself.

    The one-hot matrix of the labels is a comparison with the numbers of all tokens: OneHot is a legacy kernel on an
    Ascend.

    Args:
        vocabulary: V.
        dtype: Dtype of the products with the weight. Softmax and loss are always float32.
        cap: Caps the logits (`SoftCap`). Default None: they stay.
    """

    axes: ClassVar = {
        "logits": "d.,t.", "largest exp total picked": "dt", "centre": "dt,d.", "less_one": "d.,", "log": "d.",
        "expand": "d", "is_label": "d.,.t", "pick": "dt,dt", "difference weigh": "d.,d.", "sum": "d.",
    }  # fmt: skip

    def __init__(self, vocabulary: int, dtype: mstype.Type = mstype.float32, cap: nn.Cell | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.cap = cap
        self.cast = P.Cast()
        self.logits = P.MatMul(transpose_b=True)
        self.largest = P.ReduceMax(keep_dims=True)
        self.centre = P.Sub()
        self.exp = P.Exp()
        self.total = SumExt()
        self.less_one = P.Sub()
        self.log = P.Log1p()
        self.expand = P.ExpandDims()
        self.is_label = P.Equal()
        self.pick = P.Mul()
        self.picked = SumExt()
        self.difference = P.Sub()
        self.weigh = P.Mul()
        self.sum = SumExt()
        self.tokens_1V = Tensor(np.arange(vocabulary, dtype=np.int32)[None])

    def construct(self, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, valid_N1: Tensor) -> Tensor:
        """Returns the sum of the losses, weighted by valid_N1, in float32."""
        logits_NV = self.logits(self.cast(x_ND, self.dtype), self.cast(weight_VD, self.dtype))
        logits_NV = self.cast(logits_NV, mstype.float32)
        if self.cap is not None:
            logits_NV = self.cap(logits_NV)
        # A constant shift: no gradient goes through it.
        centred_NV = self.centre(logits_NV, ops.stop_gradient(self.largest(logits_NV, 1)))
        log_sum_N1 = self.log(self.less_one(self.total(self.exp(centred_NV), (1,), True), 1.0))
        label_NV = self.cast(self.is_label(self.expand(labels_N, 1), self.tokens_1V), mstype.float32)
        label_logit_N1 = self.picked(self.pick(centred_NV, label_NV), (1,), True)
        return self.sum(self.weigh(self.difference(log_sum_N1, label_logit_N1), valid_N1))

    def shard_over(self, data: int, tensor: int = 1) -> None:
        """Shards tokens over `data` ranks and the vocabulary over `tensor` ranks."""
        super().shard_over(data, tensor)
        if self.cap is not None:
            self.cap.shard_over(data, tensor)
