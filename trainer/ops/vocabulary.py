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


class _TokenLosses(Sharded):
    """(logits_NV, is_label_NV) -> the loss of each token, and log(sum(exp(logits))), without a gradient: [N, 1] both.

    The logarithm of the sum is log1p(sum - 1): the bits of MindSpore's Log on a CPU depend on how it divides the
    elements among threads, which it decides by timing itself.

    The gradient of the logits, (softmax(logits) - is_label) times that of the loss, is written by hand. MindSpore's
    repeats the gradient of each sum for all tokens of the vocabulary, which a graph may do long before it is used.
    """

    axes: ClassVar = {
        "exp total picked": "dt", "less_one": "d.,", "log": "d.", "pick": "dt,dt", "difference": "d.,d.",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.cast = P.Cast()
        self.exp = P.Exp()
        self.total = SumExt()
        self.less_one = P.Sub()
        self.log = P.Log1p()
        self.pick = P.Mul()
        self.picked = SumExt()
        self.difference = P.Sub()

    def construct(self, logits_NV: Tensor, is_label_NV: Tensor) -> tuple[Tensor, Tensor]:
        log_sum_N1 = self.log(self.less_one(self.total(self.exp(logits_NV), (1,), True), 1.0))
        picked_NV = self.pick(logits_NV, self.cast(is_label_NV, mstype.float32))
        return self.difference(log_sum_N1, self.picked(picked_NV, (1,), True)), log_sum_N1

    def bprop(
        self, logits_NV: Tensor, is_label_NV: Tensor, out: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradient of the logits, and zeros for the labels."""
        losses_N1, log_sum_N1 = out
        # Without this dependency a graph has the softmax before it needs it, beside what the loss is computed from.
        softmax_NV = ops.exp(ops.depend(logits_NV, losses_N1) - log_sum_N1)
        return (softmax_NV - self.cast(is_label_NV, mstype.float32)) * grads[0], ops.zeros_like(is_label_NV)


class CrossEntropy(Sharded):
    """Sum over loss tokens of logsumexp(logits) - logits[label], with logits = x weight^T.

    The vocabulary is sharded like columns, so no rank has all logits of a token. The one-hot matrix of the labels is a
    comparison with the numbers of all tokens: OneHot is a legacy kernel on an Ascend.

    Args:
        vocabulary: V.
        dtype: Dtype of the products with the weight. Softmax and loss are always float32.
        cap: Caps the logits (`SoftCap`). Default None: they stay.
    """

    axes: ClassVar = {
        "logits": "d.,t.", "largest": "dt", "centre": "dt,d.", "expand": "d", "is_label": "d.,.t", "weigh": "d.,d.",
        "sum": "d.",
    }  # fmt: skip

    def __init__(self, vocabulary: int, dtype: mstype.Type = mstype.float32, cap: nn.Cell | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.cap = cap
        self.cast = P.Cast()
        self.logits = P.MatMul(transpose_b=True)
        self.largest = P.ReduceMax(keep_dims=True)
        self.centre = P.Sub()
        self.expand = P.ExpandDims()
        self.is_label = P.Equal()
        self.losses = _TokenLosses()
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
        is_label_NV = self.is_label(self.expand(labels_N, 1), self.tokens_1V)
        losses_N1, _ = self.losses(centred_NV, is_label_NV)
        return self.sum(self.weigh(losses_N1, valid_N1))

    def shard_over(self, data: int, tensor: int = 1) -> None:
        """Shards tokens over `data` ranks and the vocabulary over `tensor` ranks."""
        super().shard_over(data, tensor)
        self.losses.shard_over(data, tensor)
        if self.cap is not None:
            self.cap.shard_over(data, tensor)
