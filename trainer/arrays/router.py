"""The router of a training on the host: product, scores, choice, gates and losses, and their gradient, as one kernel.

Arrays of [N, E] are small. As operators they cost a call each, forwards and backwards, which took a tenth of a step.

Legend: N = B * T tokens of B sequences, D hidden, E experts, k chosen for a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from trainer.arrays.memory import cast, empty, on_host
from trainer.ops.routing import Routing, SharedTokens

if TYPE_CHECKING:
    from trainer.config.schema.moe import MoEConfig

Decide = Callable[[np.ndarray], Routing]
"""scores_NE -> the routing, of arrays."""
Shares = Callable[[np.ndarray], np.ndarray]
"""Assignments to each expert, [E] -> the experts' parts of those of the step: `trainer.ops.routing.WindowLoad`."""
_TINY = np.float32(1e-20)


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf: 0
        return 1 / (1 + np.exp(-x))


def chosen_gates(
    scores_NE: np.ndarray, experts_Nk: np.ndarray, moe: MoEConfig
) -> tuple[np.ndarray, np.ndarray | None]:
    """Gates before `routed_scaling_factor`, [N, k], and what each token's were divided by, [N, 1], or None."""
    chosen_Nk = np.take_along_axis(scores_NE, experts_Nk, 1)
    if not moe.norm_topk_prob:
        return chosen_Nk, None
    sums_N1 = chosen_Nk.sum(1, keepdims=True) + _TINY
    return chosen_Nk / sums_N1, sums_N1


class Routed(NamedTuple):
    """Output of a router for a micro-batch: tensors, except for the arrays `routing` and `scores_NE`."""

    gates_Nk: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    routing: Routing
    scores_NE: np.ndarray


class CpuRouter:
    """(y_ND, router_ED, tokens_B1, valid_N1, decide) -> `Routed`.

    The same as Router without its norm, Gates and RouterLosses of `trainer.models.moe`, where the formulas are, with
    the choice between them. `shared`: these are some of the tokens of a micro-batch; the losses are their part of its.
    """

    def __init__(self, moe: MoEConfig) -> None:
        self.moe = moe

    def __call__(
        self,
        y_ND: Tensor,
        router_ED: Tensor,
        tokens_B1: Tensor,
        valid_N1: Tensor,
        decide: Decide,
        shares: Shares | None = None,
        shared: SharedTokens | None = None,
    ) -> Routed:
        call = _RouterCall(self.moe, tokens_B1.asnumpy(), valid_N1.asnumpy(), decide, shares, shared)
        gates_Nk, aux_loss, z_loss = call(y_ND, router_ED)
        return Routed(gates_Nk, aux_loss, z_loss, call.routing, call.scores_NE)


class _RouterCall(nn.Cell):
    """One call. It keeps arrays of [N, E] for its backward pass."""

    def __init__(
        self,
        moe: MoEConfig,
        tokens_B1: np.ndarray,
        valid_N1: np.ndarray,
        decide: Decide,
        shares: Shares | None,
        shared: SharedTokens | None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.moe, self.tokens_B1, self.valid_N1, self.decide, self.shares = moe, tokens_B1, valid_N1, decide, shares
        self.is_sigmoid, self.with_z = moe.score_function == "sigmoid", moe.z_loss_factor > 0
        self.routing: Routing | None = None
        self.shared, rows = shared, len(tokens_B1)
        self.length, self.tokens_B = len(valid_N1) // rows, np.full(rows, len(valid_N1) // rows)
        if shared is not None:
            self.length, self.tokens_B = shared.length, np.bincount(shared.own_n // shared.length, minlength=rows)

    def construct(self, y_ND, router_ED):
        moe = self.moe
        logits_NE = on_host(y_ND) @ on_host(router_ED).T
        if self.is_sigmoid:
            self.scores_NE = sigmoid(logits_NE)
        if self.with_z or not self.is_sigmoid:
            largest_N1 = logits_NE.max(1, keepdims=True)
            self.softmax_NE = np.exp(logits_NE - largest_N1)
            sums_N1 = self.softmax_NE.sum(1, keepdims=True)
            self.softmax_NE /= sums_N1
            self.total_N1 = largest_N1 + np.log(sums_N1)
        if not self.is_sigmoid:
            self.scores_NE = self.softmax_NE
        self.routing = self.decide(self.scores_NE)
        self.gates_Nk, self.chosen_sums_N1 = chosen_gates(self.scores_NE, self.routing.experts_Nk, moe)
        z = (self.valid_N1 * self.total_N1 * self.total_N1).sum() if self.with_z else 0.0
        gates_Nk = self.gates_Nk * np.float32(moe.routed_scaling_factor)
        return Tensor(gates_Nk), Tensor(self.aux_loss(), mstype.float32), Tensor(z, mstype.float32)

    def aux_loss(self) -> float:
        """Keeps its gradient by the normalised scores, which is the same for all tokens of a sequence."""
        rows, experts = len(self.tokens_B1), self.moe.expert_num
        ends = np.cumsum(self.tokens_B)[:-1]
        if self.shares is None:
            assigned = np.split(self.routing.experts_Nk, ends)
            load_BE = np.stack([np.bincount(experts_nk.ravel(), minlength=experts) for experts_nk in assigned])
            load_BE = load_BE if self.shared is None else self.shared.sum(load_BE)
            load_BE = load_BE * (experts / (self.length * self.moe.num_experts_chosen))
        else:
            load_BE = np.tile(self.shares(self.routing.requested_E) * experts, (rows, 1))
        self.score_sums_N1 = self.scores_NE.sum(1, keepdims=True) + _TINY if self.is_sigmoid else None
        self.normalised_NE = self.scores_NE if self.score_sums_N1 is None else self.scores_NE / self.score_sums_N1
        by_normalised_BE = self.tokens_B1 * load_BE / self.length
        self.by_normalised_BE = by_normalised_BE.astype(np.float32)
        sums_BE = np.stack([part.sum(0, dtype=np.float64) for part in np.split(self.normalised_NE, ends)])
        return float((by_normalised_BE * sums_BE).sum())

    def bprop(self, y_ND, router_ED, out, grads):
        grad_gates, grad_aux_loss, grad_z_loss = (on_host(grad) for grad in grads)
        grad_NE = np.repeat(self.by_normalised_BE * grad_aux_loss, self.tokens_B, 0)
        if self.score_sums_N1 is not None:
            grad_NE = _through_quotient(grad_NE, self.normalised_NE, self.score_sums_N1)
        grad_Nk = grad_gates * np.float32(self.moe.routed_scaling_factor)
        if self.chosen_sums_N1 is not None:
            grad_Nk = _through_quotient(grad_Nk, self.gates_Nk, self.chosen_sums_N1)
        experts_Nk = self.routing.experts_Nk
        np.put_along_axis(grad_NE, experts_Nk, np.take_along_axis(grad_NE, experts_Nk, 1) + grad_Nk, 1)
        if self.is_sigmoid:
            grad_NE *= self.scores_NE * (1 - self.scores_NE)
        else:
            grad_NE = _through_quotient(grad_NE, self.scores_NE, np.float32(1)) * self.scores_NE
        if self.with_z:
            grad_NE += 2 * grad_z_loss * self.valid_N1 * self.total_N1 * self.softmax_NE
        result, grad_y = empty(*y_ND.shape)
        np.matmul(grad_NE, on_host(router_ED), out=grad_y)
        return cast(result, y_ND.dtype), cast(Tensor(grad_NE.T @ on_host(y_ND)), router_ED.dtype)


def _through_quotient(grad: np.ndarray, quotient: np.ndarray, divisor_N1: np.ndarray) -> np.ndarray:
    """The gradient of x from that of x / sum(x)."""
    return (grad - (grad * quotient).sum(1, keepdims=True)) / divisor_N1
