"""Cross entropy over chunks of the vocabulary, so that no tensor contains all logits.

Legend: N tokens, D hidden, V vocabulary (with tensor parallelism this rank's shard), P tokens of a chunk of it.
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

_CHUNK_LOGITS = 1 << 24
"""The number of logits of a chunk: 64 MiB in float32, and a product that is large enough for a device."""


class ChunkedCrossEntropy(nn.Cell):
    """Computes the sum over loss tokens of logsumexp(logits) - logits[label], chunk by chunk.

    `trainer.ops.vocabulary.CrossEntropy` computes the same.

    The forward pass saves only logsumexp, [N, 1]; the backward pass multiplies by each chunk of the weight again. Each
    chunk of the weight's gradient is computed once, so chunks are never summed.

    The loop runs operator by operator, and `compiles` compiles the computation for one chunk: MindSpore 2.10 cannot
    compile a loop under a `bprop` ("func_graph->get_return() is null").

    Args:
        compiles: Returns a function that runs a cell as one compiled graph.
        trained: Whether the backward pass computes the gradient of the weight.
        dtype: Dtype of the products with the weight. Softmax and loss are always float32.
        shard: The shard of the vocabulary whose rows the weight has. For each token the ranks exchange two numbers in
            one gather: logsumexp over their shard, and the logit of the label or 0. The loss is the same on all ranks;
            the gradient of x has only the contribution of this rank's shard.
        cap: Logits x become cap * tanh(x / cap). Default None: they stay.
    """

    def __init__(
        self,
        compiles: Callable[[nn.Cell], Callable],
        trained: bool,
        dtype: mstype.Type = mstype.float32,
        shard: VocabShard | None = None,
        cap: float | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.dtype = dtype
        self.core = _LossAndLogSum(compiles, trained, shard, cap)

    def construct(self, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, valid_N1: Tensor) -> Tensor:
        return self.core(x_ND.astype(self.dtype), weight_VD.astype(self.dtype), labels_N, valid_N1)[0]


class _LossAndLogSum(nn.Cell):
    """(x_ND, weight_VD, labels_N, valid_N1) -> (loss, logsumexp_N1); the backward pass needs the second result."""

    def __init__(
        self, compiles: Callable[[nn.Cell], Callable], trained: bool, shard: VocabShard | None, cap: float | None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.shard = shard
        self.first_token = 0 if shard is None else shard.first
        self.sums = compiles(_ChunkSums(cap))
        self.gradients = compiles(_ChunkGradients(trained, cap))
        self.log_sum_exp = LogSumExp()
        self.matmul_at = P.MatMul(transpose_a=True)
        self.trained = trained

    def construct(self, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, valid_N1: Tensor) -> tuple[Tensor, Tensor]:
        """Computes logsumexp chunk by chunk and joins the chunks, then the shards of the ranks."""
        sums = []
        label_logit_N1 = _zeros(valid_N1)
        for first, weight_PD in _chunks(x_ND, weight_VD, self.first_token):
            sum_N1, label_logit_N1 = self.sums(x_ND, weight_PD, labels_N, first, label_logit_N1)
            sums.append(sum_N1)
        log_sum_N1 = sums[0] if len(sums) == 1 else self.log_sum_exp(ops.concat(sums, 1), (1,), True)
        if self.shard is not None:
            log_sum_N1, label_logit_N1 = self.sum_over_ranks(self.shard, log_sum_N1, label_logit_N1)
        return self.matmul_at(valid_N1, log_sum_N1 - label_logit_N1).reshape(()), log_sum_N1

    def sum_over_ranks(
        self, shard: VocabShard, log_sum_N1: Tensor, label_logit_N1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns logsumexp over the whole vocabulary and the label's logit, from those of each rank's shard."""
        local_2N = ops.concat((log_sum_N1.reshape(1, -1), label_logit_N1.reshape(1, -1)))
        gathered_R2N = shard.gather(local_2N).reshape(shard.ranks, 2, -1)
        log_sum_N = self.log_sum_exp(gathered_R2N[:, 0], (0,), False)
        return log_sum_N.reshape(-1, 1), gathered_R2N[:, 1].sum(0).reshape(-1, 1)

    def bprop(
        self,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        valid_N1: Tensor,
        out: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of x and the weight, chunk by chunk, and zeros for the others."""
        factor_N1 = valid_N1 * grads[0]
        grad_x_ND = ops.zeros(x_ND.shape, mstype.float32)
        weight_gradients = []
        for first, weight_PD in _chunks(x_ND, weight_VD, self.first_token):
            grad_x_ND, *grad_PD = self.gradients(x_ND, weight_PD, labels_N, first, factor_N1, out[1], grad_x_ND)
            weight_gradients += grad_PD
        grad_weight_VD = ops.concat(weight_gradients) if self.trained else _zeros(weight_VD)
        return grad_x_ND.astype(x_ND.dtype), grad_weight_VD, _zeros(labels_N), _zeros(valid_N1)


def _zeros(x: Tensor) -> Tensor:
    """Returns zeros of the same shape and dtype; ops.zeros_like is a legacy kernel."""
    return ops.zeros(x.shape, x.dtype)


def _chunks(x_ND: Tensor, weight_VD: Tensor, first_token: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the first token of each chunk, as a tensor, and the rows of the weight for the chunk.

    `first_token` is the token of the weight's first row. All chunks except the last have the same size.
    """
    columns = -(-max(_CHUNK_LOGITS // x_ND.shape[0], 1) // 128) * 128
    for first in range(0, weight_VD.shape[0], columns):
        yield Tensor(first_token + first, mstype.int32), weight_VD[first : first + columns]


class _Chunk(nn.Cell):
    """The computations on a chunk that both passes need."""

    def __init__(self, cap: float | None) -> None:
        super().__init__(auto_prefix=False)
        self.cap = cap
        self.tanh = P.Tanh()
        self.x_wt = P.MatMul(transpose_b=True)
        self.matmul = P.MatMul()
        self.matmul_at = P.MatMul(transpose_a=True)
        self.cast = P.Cast()
        self.gather = P.GatherD()
        self.log_sum_exp = LogSumExp()
        self.scatter_add = ScatterAddExt()

    def logits(self, x_ND: Tensor, weight_PD: Tensor) -> Tensor:
        """Returns the float32 logits of the chunk, [N, P]."""
        logits_NP = self.cast(self.x_wt(x_ND, weight_PD), mstype.float32)
        if self.cap is not None:
            logits_NP = self.tanh(logits_NP / self.cap) * self.cap
        return logits_NP

    def column(self, labels_N: Tensor, first: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Returns the column of each label in the chunk, and 1 if the label is in the chunk, else 0 and any column."""
        column_N1 = labels_N.reshape(-1, 1) - first
        inside_N1 = ops.logical_and(column_N1 >= 0, column_N1 < columns)
        column_N1 = self.cast(ops.clamp(column_N1, 0, columns - 1), mstype.int64)
        return column_N1, self.cast(inside_N1, mstype.float32)


class _ChunkSums(_Chunk):
    """(x_ND, weight_PD, labels_N, first, label_logit_N1) -> logsumexp over the chunk [N, 1], and label_logit_N1, to
    which the logits of the chunk's labels are added."""

    def construct(
        self, x_ND: Tensor, weight_PD: Tensor, labels_N: Tensor, first: Tensor, label_logit_N1: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits_NP = self.logits(x_ND, weight_PD)
        column_N1, inside_N1 = self.column(labels_N, first, weight_PD.shape[0])
        label_logit_N1 = label_logit_N1 + self.gather(logits_NP, 1, column_N1) * inside_N1
        return self.log_sum_exp(logits_NP, (1,), True), label_logit_N1


class _ChunkGradients(_Chunk):
    """(x_ND, weight_PD, labels_N, first, the factor of each token's loss [N, 1], logsumexp_N1, grad_x_ND) -> grad_x_ND,
    to which the chunk's contribution is added, and the gradient of the weight if it is trained.

    The factor contains the loss scale. It multiplies the gradient of the logits before that is rounded, since the
    rounding could turn small values to zero.
    """

    def __init__(self, trained: bool, cap: float | None) -> None:
        super().__init__(cap)
        self.trained = trained

    def construct(
        self,
        x_ND: Tensor,
        weight_PD: Tensor,
        labels_N: Tensor,
        first: Tensor,
        factor_N1: Tensor,
        log_sum_N1: Tensor,
        grad_x_ND: Tensor,
    ) -> tuple[Tensor, ...]:
        # d loss / d logits = probabilities - one_hot(label)
        logits_NP = self.logits(x_ND, weight_PD)
        probabilities_NP = ops.exp(logits_NP - log_sum_N1)
        column_N1, inside_N1 = self.column(labels_N, first, weight_PD.shape[0])
        centred_NP = self.scatter_add(probabilities_NP, 1, column_N1, -inside_N1)
        if self.cap is not None:
            shares_NP = logits_NP / self.cap
            centred_NP = centred_NP * (1 - shares_NP * shares_NP)  # the derivative of tanh
        grad_NP = self.cast(centred_NP * factor_N1, x_ND.dtype)
        grad_x_ND = grad_x_ND + self.cast(self.matmul(grad_NP, weight_PD), mstype.float32)
        # A tuple without None: an Ascend cannot run a compiled function whose result is not a tensor.
        return (grad_x_ND, self.matmul_at(grad_NP, x_ND)) if self.trained else (grad_x_ND,)
