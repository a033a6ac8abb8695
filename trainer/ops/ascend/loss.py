"""Cross entropy over pieces of the vocabulary, so that no tensor has all logits.

Legend: N tokens, D hidden, V vocabulary, P its part in a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import LogSumExp, ScatterAddExt

if TYPE_CHECKING:
    from trainer.ops.vocabulary import VocabShard

_LOGITS = 1 << 24
"""Logits of a piece: 64 MiB in float32, and a product that is large enough for a device."""


class PiecewiseCrossEntropy(nn.Cell):
    """As `reference.CrossEntropy`, the sum over valid tokens of logsumexp(logits) - logits[label], run piece by piece.

    The forward pass keeps logsumexp alone, [N, 1]; the backward pass multiplies by each piece of the weight again. A
    piece of the weight's gradient is complete at once, so it is never summed up.

    The loop runs operator by operator, and `compiles` compiles what it does with a piece: MindSpore 2.10 cannot compile
    a loop under a `bprop` ("func_graph->get_return() is null").

    Args:
        trained: Whether the gradient of the weight is wanted.
        dtype: Dtype of the products with the weight. Softmax and loss are always float32.
        part: Of the vocabulary, whose rows the weight has. The ranks exchange two numbers of each token, logsumexp over
            their part and the logit of the label or 0, in one gather. The loss is the same on all ranks, the gradient
            of x that of this rank's part alone.
    """

    def __init__(
        self,
        compiles: Callable[[nn.Cell], Callable],
        trained: bool,
        dtype=mstype.float32,
        part: VocabShard | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.dtype = dtype
        self.core = _Core(compiles, trained, part)

    def construct(self, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, valid_N1: Tensor) -> Tensor:
        return self.core(x_ND.astype(self.dtype), weight_VD.astype(self.dtype), labels_N, valid_N1)[0]


class _Core(nn.Cell):
    """Returns (loss, logsumexp_N1): the second output is kept for the backward pass."""

    def __init__(self, compiles: Callable[[nn.Cell], Callable], trained: bool, part: VocabShard | None) -> None:
        super().__init__(auto_prefix=False)
        self.part = part
        self.first = 0 if part is None else part.first
        self.sums = compiles(_Sums())
        self.gradients = compiles(_Gradients(trained))
        self.log_sum_exp = LogSumExp()
        self.matmul_at = P.MatMul(transpose_a=True)
        self.trained = trained

    def construct(self, x_ND, weight_VD, labels_N, valid_N1):
        sums = []
        label_logit_N1 = _zeros(valid_N1)
        for first, weight_PD in _pieces(x_ND, weight_VD, self.first):
            sum_N1, label_logit_N1 = self.sums(x_ND, weight_PD, labels_N, first, label_logit_N1)
            sums.append(sum_N1)
        log_sum_N1 = sums[0] if len(sums) == 1 else self.log_sum_exp(ops.concat(sums, 1), (1,), True)
        if self.part is not None:
            log_sum_N1, label_logit_N1 = self.over_ranks(log_sum_N1, label_logit_N1)
        return self.matmul_at(valid_N1, log_sum_N1 - label_logit_N1).reshape(()), log_sum_N1

    def over_ranks(self, log_sum_N1, label_logit_N1):
        """The same of the whole vocabulary."""
        own_2N = ops.concat((log_sum_N1.reshape(1, -1), label_logit_N1.reshape(1, -1)))
        every_R2N = self.part.gather(own_2N).reshape(self.part.ranks, 2, -1)
        log_sum_N = self.log_sum_exp(every_R2N[:, 0], (0,), False)
        return log_sum_N.reshape(-1, 1), every_R2N[:, 1].sum(0).reshape(-1, 1)

    def bprop(self, x_ND, weight_VD, labels_N, valid_N1, out, grads):
        factor_N1 = valid_N1 * grads[0]
        grad_x_ND = ops.zeros(x_ND.shape, mstype.float32)
        found = []
        for first, weight_PD in _pieces(x_ND, weight_VD, self.first):
            grad_x_ND, *grad_PD = self.gradients(x_ND, weight_PD, labels_N, first, factor_N1, out[1], grad_x_ND)
            found += grad_PD
        grad_weight_VD = ops.concat(found) if self.trained else _zeros(weight_VD)
        return grad_x_ND.astype(x_ND.dtype), grad_weight_VD, _zeros(labels_N), _zeros(valid_N1)


def _zeros(x: Tensor) -> Tensor:
    """ops.zeros_like is a legacy kernel."""
    return ops.zeros(x.shape, x.dtype)


def _pieces(x_ND: Tensor, weight_VD: Tensor, token: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first token of each piece, as a tensor, and its part of the weight, whose first row is that of `token`; all
    but the last are of one size."""
    columns = -(-max(_LOGITS // x_ND.shape[0], 1) // 128) * 128
    for first in range(0, weight_VD.shape[0], columns):
        yield Tensor(token + first, mstype.int32), weight_VD[first : first + columns]


class _Piece(nn.Cell):
    """What both passes do with a piece."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.x_wt = P.MatMul(transpose_b=True)
        self.matmul = P.MatMul()
        self.matmul_at = P.MatMul(transpose_a=True)
        self.cast = P.Cast()
        self.gather = P.GatherD()
        self.log_sum_exp = LogSumExp()
        self.scatter_add = ScatterAddExt()

    def logits(self, x_ND, weight_PD):
        return self.cast(self.x_wt(x_ND, weight_PD), mstype.float32)

    def column(self, labels_N, first, columns):
        """The column of each label in the piece, and 1 where the label is in the piece, else 0 (and some column)."""
        column_N1 = labels_N.reshape(-1, 1) - first
        inside_N1 = ops.logical_and(column_N1 >= 0, column_N1 < columns)
        column_N1 = self.cast(ops.clamp(column_N1, 0, columns - 1), mstype.int64)
        return column_N1, self.cast(inside_N1, mstype.float32)


class _Sums(_Piece):
    """(x_ND, weight_PD, labels_N, first, label_logit_N1) -> logsumexp over the piece, and label_logit_N1 with the
    logits of the labels in it."""

    def construct(self, x_ND, weight_PD, labels_N, first, label_logit_N1):
        logits_NP = self.logits(x_ND, weight_PD)
        column_N1, inside_N1 = self.column(labels_N, first, weight_PD.shape[0])
        label_logit_N1 = label_logit_N1 + self.gather(logits_NP, 1, column_N1) * inside_N1
        return self.log_sum_exp(logits_NP, (1,), True), label_logit_N1


class _Gradients(_Piece):
    """(x_ND, weight_PD, labels_N, first, the factor of each token's loss [N, 1], logsumexp_N1, grad_x_ND) -> grad_x_ND
    with what the piece adds to it, and where its weight is trained the weight's gradient.

    The factor is multiplied into the gradient of the logits before this is rounded: a loss scale that came later could
    not keep it above zero.
    """

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.trained = trained

    def construct(self, x_ND, weight_PD, labels_N, first, factor_N1, log_sum_N1, grad_x_ND):
        # d loss / d logits = probabilities - one_hot(label)
        probabilities_NP = ops.exp(self.logits(x_ND, weight_PD) - log_sum_N1)
        column_N1, inside_N1 = self.column(labels_N, first, weight_PD.shape[0])
        centred_NP = self.scatter_add(probabilities_NP, 1, column_N1, -inside_N1)
        grad_NP = self.cast(centred_NP * factor_N1, x_ND.dtype)
        grad_x_ND = grad_x_ND + self.cast(self.matmul(grad_NP, weight_PD), mstype.float32)
        # Not None: an Ascend cannot run a compiled function with a result that is no tensor.
        return (grad_x_ND, self.matmul_at(grad_NP, x_ND)) if self.trained else (grad_x_ND,)
