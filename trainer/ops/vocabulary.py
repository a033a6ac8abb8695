"""Embedding and cross entropy where each rank has a part of the vocabulary; no rank ever has all logits.

Legend: N tokens, D hidden, V this rank's part of the vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P


class VocabularyPart(NamedTuple):
    """A rank's part of the vocabulary.

    Attributes:
        first: Its first token.
        gather: [n, ...] of each rank -> [R n, ...].
    """

    rank: int
    ranks: int
    first: int
    gather: Callable[[Tensor], Tensor]


def own_tokens(tokens_N: Tensor, part_first: int, size: int) -> tuple[Tensor, Tensor]:
    """Places of tokens in a part of the vocabulary, 0 where they are in another one; and 1 there or else 0, float32."""
    place_N = tokens_N - part_first
    inside_N = ops.logical_and(place_N >= 0, place_N < size)
    return place_N * inside_N.astype(place_N.dtype), inside_N.astype(mstype.float32)


class VocabularyRows(nn.Cell):
    """(weight_VE, ids_N) -> the rows of the tokens in this part, zeros for the others: [N, E]."""

    def __init__(self, part: VocabularyPart, gather_rows: Callable) -> None:
        super().__init__()
        self.first, self.gather_rows, self.matmul = part.first, gather_rows, P.MatMul()

    def construct(self, weight_VE, ids_N):
        place_N, inside_N = own_tokens(ids_N, self.first, weight_VE.shape[0])
        ones_1E = ops.ones((1, weight_VE.shape[1]), weight_VE.dtype)
        return self.gather_rows(weight_VE, place_N) * self.matmul(inside_N.reshape(-1, 1), ones_1E)


class VocabularyCrossEntropy(nn.Cell):
    """As `CrossEntropy`, each rank with its part of the weight; the loss is the same on all ranks.

    The ranks exchange three numbers of each token, in one gather: the largest logit of their part, the sum of
    exp(logit - largest), and the logit of the label or 0. The gradient of x is that of this rank's part alone.
    """

    def __init__(self, part: VocabularyPart, dtype=mstype.float32) -> None:
        super().__init__()
        self.half, self.dtype = dtype != mstype.float32, dtype
        self.core = _VocabularyCore(part, self.half)

    def construct(self, x_ND, weight_VD, labels_N, valid_N1):
        if self.half:
            x_ND, weight_VD = x_ND.astype(self.dtype), weight_VD.astype(self.dtype)
        return self.core(x_ND, weight_VD, labels_N, valid_N1)[0]


class _VocabularyCore(nn.Cell):
    """Returns (loss, softmax over this part, the part's share of all probability [N, 1]); the last two are kept for the
    backward pass.

    Sums and logarithms are written as in `CrossEntropy`, whose bits do not depend on threads: w is a softmax over the
    ranks' largest logits, so exp(largest_r - largest) = w_r / max(w).
    """

    def __init__(self, part: VocabularyPart, half: bool) -> None:
        super().__init__()
        self.half, self.cast = half, P.Cast()
        self.rank, self.ranks, self.first, self.gather_ranks = part.rank, part.ranks, part.first, part.gather
        self.x_wt, self.matmul, self.matmul_at = P.MatMul(transpose_b=True), P.MatMul(), P.MatMul(transpose_a=True)
        self.softmax, self.row_max, self.gather = P.Softmax(), P.ArgMaxWithValue(axis=1), P.GatherD()
        self.over_ranks, self.largest, self.split = P.Softmax(0), P.ArgMaxWithValue(axis=0), P.Split(1, 3)
        self.rows = P.Split(0, part.ranks)
        self.transpose, self.log1p, self.concat = P.Transpose(), P.Log1p(), P.Concat(0)
        self.scatter_add = P.TensorScatterElements(axis=1, reduction="add")
        self.ones_1R = Tensor(np.ones((1, part.ranks), np.float32))

    def construct(self, x_ND, weight_VD, labels_N, valid_N1):
        logits_NV = self.x_wt(x_ND, weight_VD)
        if self.half:
            logits_NV = self.cast(logits_NV, mstype.float32)
        p_NV = self.softmax(logits_NV)
        index_N, max_N = self.row_max(logits_NV)
        p_N1 = self.gather(p_NV, 1, index_N.reshape(-1, 1).astype(mstype.int32))
        place_N, inside_N = own_tokens(labels_N, self.first, weight_VD.shape[0])
        label_N1 = self.gather(logits_NV, 1, place_N.reshape(-1, 1)) * inside_N.reshape(-1, 1)
        own_13N = self.concat((max_N.reshape(1, -1), (1 / p_N1).reshape(1, -1), label_N1.reshape(1, -1)))
        every_R3N = self.gather_ranks(own_13N).reshape(self.ranks, 3, -1)
        max_RN, sum_RN, label_RN = [each.reshape(self.ranks, -1) for each in self.split(every_R3N)]
        w_RN = self.over_ranks(max_RN)
        mass_RN = sum_RN * w_RN
        mass_1N, largest_w_N = self.matmul(self.ones_1R, mass_RN), self.largest(w_RN)[1]
        rest_1N = (mass_1N - largest_w_N.reshape(1, -1)) / largest_w_N.reshape(1, -1)
        # The difference of the logits first: it keeps its digits however large both are.
        apart_1N = self.largest(max_RN)[1].reshape(1, -1) - self.matmul(self.ones_1R, label_RN)
        loss_1N = apart_1N + self.log1p(rest_1N)
        share_N1 = (self.rows(mass_RN)[self.rank] / mass_1N).reshape(-1, 1)
        return self.matmul(loss_1N, valid_N1).reshape(()), p_NV, share_N1

    def bprop(self, x_ND, weight_VD, labels_N, valid_N1, out, grads):
        p_NV, share_N1, factor_N1 = out[1], out[2], valid_N1 * grads[0]
        # d loss / d logits = probabilities - one_hot(label)
        place_N, inside_N = own_tokens(labels_N, self.first, weight_VD.shape[0])
        spread_NV = self.matmul(share_N1 * factor_N1, ops.ones((1, weight_VD.shape[0]), mstype.float32))
        of_label_N1 = -(inside_N.reshape(-1, 1) * factor_N1)
        grad_NV = self.scatter_add(p_NV * spread_NV, place_N.reshape(-1, 1), of_label_N1)
        if self.half:
            grad_NV = self.cast(grad_NV, x_ND.dtype)
        grad_weight_VD = self.transpose(self.matmul_at(x_ND, grad_NV), (1, 0))
        return self.matmul(grad_NV, weight_VD), grad_weight_VD, ops.zeros_like(labels_N), ops.zeros_like(valid_N1)
