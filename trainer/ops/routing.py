"""Which expert computes which token: the choice, the capacity, and the order in which the tokens stand. NumPy only.

Legend: N tokens of a micro-batch, E experts, k experts chosen by each token, R rows that the experts compute, L layers
with experts, G groups of experts. An assignment is one token at one of its k experts; they count in token order, then
in the order of choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from trainer.config.schema.moe import MoEConfig

DropPolicy = Literal["position", "probability"]
GroupScore = Literal["best", "two_best"]


class Routing(NamedTuple):
    """Where the tokens of a micro-batch go. Arrays here, tensors of the same dtypes in a model.

    Rows are sorted by expert, those of an expert in token order. Rows of dropped assignments stand after all that an
    expert computes, in no expert's group.

    Attributes:
        experts_Nk: Chosen experts, the best first, int32.
        row_Nk: The row of each assignment, int32.
        token_R: The token of each row, N for a row of zeros, int32. R is N k, and E more with safe tokens.
        counts_E: Rows that each expert computes, one after the other from row 0, int64.
        requested_E: Assignments to each expert before dropping, int64.
        kept_E: Assignments that each expert computes, int64: counts_E without safe tokens.
    """

    experts_Nk: Any
    row_Nk: Any
    token_R: Any
    counts_E: Any
    requested_E: Any
    kept_E: Any


@dataclass(frozen=True)
class RoutingRule:
    """How tokens choose experts.

    Attributes:
        experts: E.
        chosen: k.
        groups, chosen_groups: Experts stand in so many groups of neighbours, and a token goes to experts of its best
            `chosen_groups` only (DeepSeek-AI 2024, DeepSeek-V2, section 2.2.2). 1 or 0 groups: no such bound.
        group_score: What a group is worth: its best expert (DeepSeek-V2), or its two best together (DeepSeek-V3).
        safe_tokens: Give each expert without tokens a row of zeros.
    """

    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1
    group_score: GroupScore = "best"
    safe_tokens: bool = False

    @classmethod
    def of(cls, moe: MoEConfig) -> RoutingRule:
        """The rule that `moe_config` asks for."""
        groups = moe.n_group or 1
        safe_tokens = bool(moe.use_gmm) and moe.enable_gmm_safe_tokens
        chosen_groups = moe.topk_group or groups
        return cls(moe.expert_num, moe.num_experts_chosen, groups, chosen_groups, moe.group_score, safe_tokens)

    @property
    def is_grouped(self) -> bool:
        """Whether the groups rule any expert out."""
        return 1 <= self.chosen_groups < self.groups


class SharedTokens(NamedTuple):
    """The tokens of a micro-batch that several ranks share, n each.

    Attributes:
        rows_Sn: For each rank which of the micro-batch's tokens it has, those of a sequence together.
        rank: This one.
        length: Tokens of a sequence.
        gather: An array of each rank, of one shape -> [S, ...].
    """

    rows_Sn: np.ndarray
    rank: int
    length: int
    gather: Callable[[np.ndarray], np.ndarray]

    @property
    def own_n(self) -> np.ndarray:
        return self.rows_Sn[self.rank]

    def whole(self, own_nX: np.ndarray) -> np.ndarray:
        """What the ranks have for each token, in the order of the micro-batch's tokens."""
        every_SnX = self.gather(own_nX)
        whole_NX = np.empty((self.rows_Sn.size, *own_nX.shape[1:]), own_nX.dtype)
        whole_NX[self.rows_Sn] = every_SnX
        return whole_NX

    def sum(self, own: np.ndarray) -> np.ndarray:
        return self.gather(own).sum(0)


def route(
    rule: RoutingRule,
    scores_NE: np.ndarray,
    bias_E: np.ndarray | None = None,
    capacity: int | None = None,
    drop_policy: DropPolicy = "position",
    shared: SharedTokens | None = None,
) -> Routing:
    """Experts, rows and counts of a micro-batch, or of the tokens of it that a rank has.

    Args:
        scores_NE: The router's scores, float32.
        bias_E: Added to the scores for the choice only (Wang et al. 2024, loss-free balancing).
        capacity: Most tokens that an expert computes; None: no bound.
        drop_policy: Over capacity an expert keeps its first tokens (position) or those with the best scores, the
            first ones among equals (probability).
        shared: The capacity is one for the tokens of all these ranks; None: this rank has all tokens.
    """
    experts_Nk = choose_experts(rule, scores_NE, bias_E)
    flat = experts_Nk.ravel()
    requested_E = np.bincount(flat, minlength=rule.experts)
    groups = flat
    if capacity is not None and (shared is not None or requested_E.max(initial=0) > capacity):
        probability_Nk = None
        if drop_policy == "probability":
            probability_Nk = np.take_along_axis(scores_NE, experts_Nk, 1)
        over = _over_capacity(experts_Nk, rule.experts, capacity, probability_Nk, shared)
        groups = np.where(over, rule.experts, flat)
    kept_E = np.bincount(groups, minlength=rule.experts)[: rule.experts]
    counts_E = kept_E
    if rule.safe_tokens:
        counts_E = np.maximum(kept_E, 1)
    row_Nk, token_R = _rows(groups, kept_E, counts_E, scores_NE.shape[0], rule)
    return Routing(experts_Nk, row_Nk, token_R, counts_E, requested_E, kept_E)


def choose_experts(rule: RoutingRule, scores_NE: np.ndarray, bias_E: np.ndarray | None = None) -> np.ndarray:
    """The k best experts of each token, [N, k] int32, the best first; of equal ones that with the lower number."""
    if bias_E is None:
        choice_NE = np.array(scores_NE)
    else:
        choice_NE = scores_NE + bias_E
    if rule.is_grouped:
        allowed_NG = np.zeros((len(choice_NE), rule.groups), bool)
        in_groups = choice_NE.reshape(-1, rule.groups, rule.experts // rule.groups)
        scores_NG = in_groups.max(-1)
        if rule.group_score == "two_best" and in_groups.shape[-1] > 1:
            scores_NG = scores_NG + np.partition(in_groups, -2, axis=-1)[..., -2]
        np.put_along_axis(allowed_NG, _best(scores_NG, rule.chosen_groups), True, 1)
        in_groups[~allowed_NG] = -np.inf
    return _best(choice_NE, rule.chosen)


def _best(scores: np.ndarray, number: int) -> np.ndarray:
    """Indices of the best scores in each row, int32. Overwrites the scores."""
    indices = np.empty((len(scores), number), np.int32)
    rows = np.arange(len(scores))
    for choice in range(number):
        indices[:, choice] = scores.argmax(1)
        scores[rows, indices[:, choice]] = -np.inf
    return indices


def _over_capacity(
    experts_Nk: np.ndarray,
    number: int,
    capacity: int,
    probability_Nk: np.ndarray | None,
    shared: SharedTokens | None,
) -> np.ndarray:
    """Whether each assignment finds its expert full, one of so many."""
    if shared is not None:
        if probability_Nk is None:
            whole_Nk = None
        else:
            whole_Nk = shared.whole(probability_Nk)
        over = _over_capacity(shared.whole(experts_Nk), number, capacity, whole_Nk, None)
        return over.reshape(-1, experts_Nk.shape[1])[shared.own_n].ravel()
    experts = experts_Nk.ravel()
    requested_E = np.bincount(experts, minlength=number)
    if requested_E.max(initial=0) <= capacity:
        return np.zeros(len(experts), bool)
    if probability_Nk is None:
        order = _sorted_by_expert(experts, len(requested_E))
    else:
        order = np.lexsort((-probability_Nk.ravel(), experts))  # stable: the first token among equals
    place_in_expert = np.arange(len(experts)) - np.repeat(np.cumsum(requested_E) - requested_E, requested_E)
    over = np.empty(len(experts), bool)
    over[order] = place_in_expert >= capacity
    return over


def _sorted_by_expert(experts: np.ndarray, number: int) -> np.ndarray:
    """Stable order. NumPy sorts small integers in linear time."""
    return np.argsort(experts.astype(np.min_scalar_type(number)), kind="stable")


def _rows(
    groups: np.ndarray, kept_E: np.ndarray, counts_E: np.ndarray, tokens: int, rule: RoutingRule
) -> tuple[np.ndarray, np.ndarray]:
    """row_Nk and token_R of assignments to `groups`: an expert, or E where an assignment is dropped."""
    order = _sorted_by_expert(groups, rule.experts)
    # How many safe tokens stand before an expert's rows, and before those of dropped assignments.
    shift = np.concatenate(([0], np.cumsum(counts_E - kept_E)))
    row = np.empty(len(groups), np.int32)
    row[order] = np.arange(len(groups))
    row += shift[groups].astype(np.int32)
    token_R = np.full(len(groups) + rule.experts * rule.safe_tokens, tokens, np.int32)
    token_R[row] = np.arange(len(groups)) // rule.chosen
    return row.reshape(-1, rule.chosen), token_R


def routing_of_some(experts_Nk: np.ndarray, rank: int, number: int) -> Routing:
    """The routing of all ranks' tokens to the `number` experts of one of them.

    Args:
        experts_Nk: Of all experts, or one more than the last where an assignment is dropped.
    """
    own_Nk = experts_Nk - np.int32(rank * number)
    own_Nk[(own_Nk < 0) | (own_Nk >= number)] = number
    counts_e = np.bincount(own_Nk.ravel(), minlength=number)[:number]
    row_Nk, token_R = _rows(own_Nk.ravel(), counts_e, counts_e, len(own_Nk), RoutingRule(number, own_Nk.shape[1]))
    return Routing(own_Nk, row_Nk, token_R, counts_e, counts_e, counts_e)


def rows_of_experts(counts_Se: np.ndarray) -> Routing:
    """Where rows go that come from S ranks, from each one sorted by expert: the routing of Q rows to e experts, one
    each, all of them computed. Of each expert the rows of the first rank come first.

    Args:
        counts_Se: How many rows of each rank there are for each expert.
    """
    expert_Q = np.repeat(np.tile(np.arange(counts_Se.shape[1], dtype=np.int32), len(counts_Se)), counts_Se.ravel())
    token_Q = _sorted_by_expert(expert_Q, counts_Se.shape[1]).astype(np.int32)
    row_Q = np.empty_like(token_Q)
    counts_e = counts_Se.sum(0)
    row_Q[token_Q] = np.arange(len(token_Q), dtype=np.int32)
    return Routing(expert_Q[:, None], row_Q[:, None], token_Q, counts_e, counts_e, counts_e)


@dataclass(frozen=True)
class RoutingCounts:
    """What the routers of all layers decided for the micro-batches of a step.

    They are arrays, or tensors on a device that counts there; rates are those of arrays.

    Attributes:
        layers: Numbers of the layers; multi-token prediction modules follow the last layer.
        kept: Assignments that each expert computed, [L, E].
        requested: Assignments before dropping, [L, E].
        entropy_sum: Entropy of a token's scores in nats, a mean over tokens, times the layer's assignments, [L].
    """

    layers: tuple[int, ...]
    kept: Any
    requested: Any
    entropy_sum: Any

    def __add__(self, other: RoutingCounts) -> RoutingCounts:
        """Both together."""
        return RoutingCounts(
            self.layers,
            self.kept + other.kept,
            self.requested + other.requested,
            self.entropy_sum + other.entropy_sum,
        )

    @property
    def entropy(self) -> np.ndarray:
        """Entropy of a token's scores, a mean over tokens, [L], nats."""
        return self.entropy_sum / np.maximum(self.requested.sum(1), 1)

    @property
    def drop_rate(self) -> np.ndarray:
        """Part of the assignments that no expert computed, [L]; 0 where there were none."""
        requested_L = self.requested.sum(1)
        return (requested_L - self.kept.sum(1)) / np.maximum(requested_L, 1)

    @property
    def load_imbalance(self) -> np.ndarray:
        """Assignments to the busiest expert over those to the average one, [L]; 1 where there were none."""
        total_L = self.requested.sum(1)
        busiest_L = self.requested.max(1) * self.requested.shape[1]
        return np.where(total_L > 0, busiest_L / np.maximum(total_L, 1), 1.0)


class RouterRates(NamedTuple):
    """Rates of a step as the host reads them, each [L]; see `RoutingCounts`."""

    layers: tuple[int, ...]
    drop_rate: np.ndarray
    load_imbalance: np.ndarray
    entropy: np.ndarray


class StepExpertLoad:
    """How many of a step's assignments each expert has had: in the micro-batches up to this one, on all ranks.

    The load of gbs_aux_loss (Qiu et al. 2025, "Demons in the Detail", section 3), which Megatron-LM calls
    global_aux_loss. The load of the whole step is known at its last micro-batch only; each takes what is known by then.

    Args:
        sums: Sums arrays, or tensors, over the ranks; every rank calls it equally often.
    """

    def __init__(self, sums: Callable[[Sequence[Any]], list[Any]]) -> None:
        self.sums = sums
        self.requested = dict[int, Any]()

    def start(self) -> None:
        """Begins a step."""
        self.requested = {}

    def of_layer(self, layer: int) -> Callable[[Any], Any]:
        """A function of a micro-batch: assignments of the layer to each expert, [E] -> the shares of the step, [E],
        which sum to 1: an array in float64 from an array, a float32 tensor from a tensor. A second call, of a
        recomputation, counts nothing and returns the same."""
        known: list[Any] = []

        def shares(requested_E: Any) -> Any:
            if not known:
                [total_E] = self.sums([requested_E * 1.0])
                self.requested[layer] = total_E = total_E + self.requested.get(layer, 0.0)
                known.append(total_E / total_E.sum())
            return known[0]

        return shares
