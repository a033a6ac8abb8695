"""The router of an MoE layer on arrays: product, scores, choice, gates and losses, forward and backward.

The formulas of the losses are in `trainer.models.moe.RouterLosses`. All arrays are float32.

Legend: N = B * T tokens of B sequences, D hidden, E experts, k chosen for a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from trainer.arrays.operators import operators
from trainer.ops.routing import Routing, SharedTokens

if TYPE_CHECKING:
    from trainer.config.schema.moe import MoEConfig

Decide: TypeAlias = Callable[[np.ndarray], Routing]
"""scores_NE -> the routing, of arrays."""
Shares: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""Assignments to each expert, [E] -> the experts' shares of the step's assignments (`StepExpertLoad`)."""
_TINY = np.float32(1e-20)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) = inf: 0
        return 1 / (1 + np.exp(-x))


def chosen_gates(
    scores_NE: np.ndarray, experts_Nk: np.ndarray, moe: MoEConfig
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the gates before `routed_scaling_factor`, [N, k], and the sums [N, 1], None if not normalised."""
    chosen_Nk = np.take_along_axis(scores_NE, experts_Nk, 1)
    if not moe.norm_topk_prob:
        return chosen_Nk, None
    sums_N1 = chosen_Nk.sum(1, keepdims=True) + _TINY
    return chosen_Nk / np.maximum(sums_N1, np.float32(moe.moe_norm_min)), sums_N1


class RouterLabels(NamedTuple):
    """The loss tokens of a micro-batch, for the losses of a router.

    Attributes:
        tokens_B1: Loss tokens of each sequence; with gbs_aux_loss their mean over the sequences.
        valid_N1: 1 for a loss token, else 0.
        shared: How ranks share the tokens of the micro-batch; None: this rank has all of them.
    """

    tokens_B1: np.ndarray
    valid_N1: np.ndarray
    shared: SharedTokens | None = None


@dataclass
class RoutedTokens:
    """The results of a router for a micro-batch, and the arrays for its backward pass."""

    gates_Nk: np.ndarray
    aux_loss: float
    z_loss: float
    routing: Routing
    scores_NE: np.ndarray
    unscaled_gates_Nk: np.ndarray
    chosen_sums_N1: np.ndarray | None
    softmax_NE: np.ndarray | None
    total_N1: np.ndarray | None
    normalised_NE: np.ndarray
    score_sums_N1: np.ndarray | None
    by_normalised_BE: np.ndarray
    tokens_B: np.ndarray


class CpuRouter:
    """(y_ND, router_ED) -> `RoutedTokens`: router, choice of experts, gates and losses, as in `trainer.models.moe`."""

    def __init__(self, moe: MoEConfig) -> None:
        self.moe = moe
        self.is_sigmoid = moe.score_function == "sigmoid"
        self.with_z = moe.z_loss_factor > 0

    def forward(
        self, y_ND: np.ndarray, router_ED: np.ndarray, labels: RouterLabels, decide: Decide,
        shares: Shares | None = None, bias_E: np.ndarray | None = None,
    ) -> RoutedTokens:  # fmt: skip
        """Returns scores, routing, gates and losses; `shares` is for gbs_aux_loss, `bias_E` is added to the logits."""
        moe = self.moe
        logits_NE = _logits(y_ND, router_ED, bias_E)
        softmax_NE = None
        total_N1 = None
        z_loss = 0.0
        if self.with_z or not self.is_sigmoid:
            softmax_NE = _softmax(logits_NE)
        if self.with_z and softmax_NE is not None:
            # The logarithm of the sum of exp(logits): the softmax of the largest logit is exp(largest) over that sum.
            total_N1 = logits_NE.max(1, keepdims=True) - np.log(softmax_NE.max(1, keepdims=True))
            z_loss = float((labels.valid_N1 * total_N1 * total_N1).sum())
        if softmax_NE is None or self.is_sigmoid:
            scores_NE = sigmoid(logits_NE)
        else:
            scores_NE = softmax_NE
        routing = decide(scores_NE)
        unscaled_Nk, chosen_sums_N1 = chosen_gates(scores_NE, routing.experts_Nk, moe)
        score_sums_N1 = None
        normalised_NE = scores_NE
        if self.is_sigmoid:
            score_sums_N1 = scores_NE.sum(1, keepdims=True) + _TINY
            normalised_NE = scores_NE / score_sums_N1
        length, tokens_B = _sequences(labels)
        by_normalised_BE = labels.tokens_B1 * self._load(routing, labels, shares, length, tokens_B) / length
        ends = np.cumsum(tokens_B)[:-1]
        sums_BE = np.stack([part.sum(0, dtype=np.float64) for part in np.split(normalised_NE, ends)])
        return RoutedTokens(
            gates_Nk=unscaled_Nk * np.float32(moe.routed_scaling_factor),
            aux_loss=float((by_normalised_BE * sums_BE).sum()),
            z_loss=z_loss,
            routing=routing,
            scores_NE=scores_NE,
            unscaled_gates_Nk=unscaled_Nk,
            chosen_sums_N1=chosen_sums_N1,
            softmax_NE=softmax_NE,
            total_N1=total_N1,
            normalised_NE=normalised_NE,
            score_sums_N1=score_sums_N1,
            by_normalised_BE=by_normalised_BE.astype(np.float32),
            tokens_B=tokens_B,
        )

    def choose(
        self, y_ND: np.ndarray, router_ED: np.ndarray, decide: Decide, bias_E: np.ndarray | None = None
    ) -> tuple[np.ndarray, Routing]:
        """Returns gates and routing for tokens without labels."""
        logits_NE = _logits(y_ND, router_ED, bias_E)
        if self.is_sigmoid:
            scores_NE = sigmoid(logits_NE)
        else:
            scores_NE = _softmax(logits_NE)
        routing = decide(scores_NE)
        gates_Nk = chosen_gates(scores_NE, routing.experts_Nk, self.moe)[0]
        return gates_Nk * np.float32(self.moe.routed_scaling_factor), routing

    def _load(
        self, routing: Routing, labels: RouterLabels, shares: Shares | None, length: int, tokens_B: np.ndarray
    ) -> np.ndarray:
        """Returns the load of each expert in each sequence, [B, E]: 1 for an even load."""
        experts = self.moe.expert_num
        if shares is not None:
            return np.tile(shares(routing.requested_E) * experts, (len(tokens_B), 1))
        assigned = np.split(routing.experts_Nk, np.cumsum(tokens_B)[:-1])
        load_BE = np.stack([np.bincount(experts_nk.ravel(), minlength=experts) for experts_nk in assigned])
        if labels.shared is not None:
            load_BE = labels.shared.sum(load_BE)
        return load_BE * (experts / (length * self.moe.num_experts_chosen))

    def backward(
        self, router_ED: np.ndarray, labels: RouterLabels, routed: RoutedTokens, grad_gates_Nk: np.ndarray,
        grad_aux_loss: np.ndarray, grad_z_loss: np.ndarray, grad_y_ND: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Adds the gradient of y to `grad_y_ND`; returns that of the logits, [N, E]."""
        grad_NE = np.repeat(routed.by_normalised_BE * grad_aux_loss, routed.tokens_B, 0)
        if routed.score_sums_N1 is not None:
            grad_NE = _through_quotient(grad_NE, routed.normalised_NE, routed.score_sums_N1)
        grad_Nk = grad_gates_Nk * np.float32(self.moe.routed_scaling_factor)
        if routed.chosen_sums_N1 is not None:
            least = np.float32(self.moe.moe_norm_min)
            divisors_N1 = np.maximum(routed.chosen_sums_N1, least)
            through_Nk = _through_quotient(grad_Nk, routed.unscaled_gates_Nk, divisors_N1)
            grad_Nk = np.where(routed.chosen_sums_N1 < least, grad_Nk / divisors_N1, through_Nk)
        experts_Nk = routed.routing.experts_Nk
        np.put_along_axis(grad_NE, experts_Nk, np.take_along_axis(grad_NE, experts_Nk, 1) + grad_Nk, 1)
        if self.is_sigmoid:
            grad_NE *= routed.scores_NE * (1 - routed.scores_NE)
        else:
            grad_NE = _through_quotient(grad_NE, routed.scores_NE, 1) * routed.scores_NE
        if self.with_z:
            grad_NE += 2 * grad_z_loss * labels.valid_N1 * routed.total_N1 * routed.softmax_NE
        operators().matmul(grad_NE, router_ED, grad_y_ND, True)
        return grad_NE


def _logits(y_ND: np.ndarray, router_ED: np.ndarray, bias_E: np.ndarray | None) -> np.ndarray:
    logits_NE = y_ND @ router_ED.T
    if bias_E is not None:
        logits_NE += bias_E
    return logits_NE


def _softmax(logits_NE: np.ndarray) -> np.ndarray:
    softmax_NE = np.empty_like(logits_NE)
    operators().softmax(logits_NE, softmax_NE)
    return softmax_NE


def _sequences(labels: RouterLabels) -> tuple[int, np.ndarray]:
    """Returns T, and how many tokens of each sequence this rank has, [B]."""
    rows = len(labels.tokens_B1)
    if labels.shared is None:
        length = len(labels.valid_N1) // rows
        return length, np.full(rows, length)
    length = labels.shared.length
    return length, np.bincount(labels.shared.local_n // length, minlength=rows)


def _through_quotient(grad: np.ndarray, quotient: np.ndarray, divisor_N1: np.ndarray | int) -> np.ndarray:
    """Returns the gradient of x from the gradient of the quotient x / sum(x)."""
    return (grad - np.einsum("ne,ne->n", grad, quotient)[:, None]) / divisor_N1
