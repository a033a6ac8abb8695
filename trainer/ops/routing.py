"""Routing of tokens to experts: the choice of experts, the expert capacity and the order of the rows. NumPy only.

`route` routes the tokens of a rank. With expert parallelism a rank then computes other rows, with its e experts alone:
`local_routing` is for ranks that gather all tokens, `route_received_rows` for ranks that send rows to each other.

Legend: N tokens of a micro-batch (n of one rank), S ranks, E experts (e of one rank), k experts chosen by each token, R
rows that the experts compute, L MoE layers, G groups of experts. An assignment is one token at one of its k experts.
Assignments are in the order of tokens, and those of a token in the order of choice.
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
    """The experts and rows of the tokens of a micro-batch: arrays here, tensors of the same dtypes in a model.

    Rows are sorted by expert, and the rows of an expert are in token order. Rows of dropped assignments are last, after
    the rows of all experts.

    Attributes:
        experts_Nk: Chosen experts, the best first, int32.
        row_Nk: The row of each assignment, int32.
        token_R: The token of each row, N for a row of zeros, int32. R is N k, or N k + E with safe tokens.
        counts_E: The number of rows of each expert, int64. The rows of expert 0 begin at row 0.
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
        groups: The number of groups of neighbouring experts; 0 or 1: no groups.
        chosen_groups: A token chooses among the experts of its best `chosen_groups` groups only (DeepSeek-AI 2024,
            DeepSeek-V2, section 2.2.2).
        group_score: The score of a group: that of its best expert (DeepSeek-V2), or the sum of its two best
            (DeepSeek-V3).
        safe_tokens: Whether each expert without tokens gets a row of zeros.
    """

    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1
    group_score: GroupScore = "best"
    safe_tokens: bool = False

    @classmethod
    def from_config(cls, moe: MoEConfig) -> RoutingRule:
        """Returns the rule of the section `moe_config`."""
        groups = moe.n_group or 1
        safe_tokens = bool(moe.use_gmm) and moe.enable_gmm_safe_tokens
        chosen_groups = moe.topk_group or groups
        return cls(moe.expert_num, moe.num_experts_chosen, groups, chosen_groups, moe.group_score, safe_tokens)

    @property
    def is_grouped(self) -> bool:
        """Whether a token chooses among the experts of some groups only."""
        return 1 <= self.chosen_groups < self.groups


class SharedTokens(NamedTuple):
    """The tokens of a micro-batch that several ranks shard, n each.

    Attributes:
        rows_Sn: The indices of each rank's tokens in the micro-batch; tokens of one sequence are neighbours.
        rank: The number of this rank among them.
        length: The number of tokens of a sequence.
        gather: Gathers an array of each rank, all of one shape: [...] -> [S, ...].
    """

    rows_Sn: np.ndarray
    rank: int
    length: int
    gather: Callable[[np.ndarray], np.ndarray]

    @property
    def local_n(self) -> np.ndarray:
        """Returns the indices of this rank's tokens in the micro-batch, [n]."""
        return self.rows_Sn[self.rank]

    def unshard(self, local_nX: np.ndarray) -> np.ndarray:
        """Gathers the values of all tokens in the order of the micro-batch: local_nX of each rank -> [N, X]."""
        gathered_SnX = self.gather(local_nX)
        unsharded_NX = np.empty((self.rows_Sn.size, *local_nX.shape[1:]), local_nX.dtype)
        unsharded_NX[self.rows_Sn] = gathered_SnX
        return unsharded_NX

    def sum(self, local: np.ndarray) -> np.ndarray:
        """Sums an array over the ranks."""
        return self.gather(local).sum(0)


def route(
    rule: RoutingRule,
    scores_NE: np.ndarray,
    bias_E: np.ndarray | None = None,
    capacity: int | None = None,
    drop_policy: DropPolicy = "position",
    shared: SharedTokens | None = None,
) -> Routing:
    """Computes the routing of a micro-batch, or of a rank's share of its tokens.

    Args:
        scores_NE: The router's scores, float32.
        bias_E: Is added to the scores for the choice only (Wang et al. 2024, loss-free balancing).
        capacity: The maximum number of tokens of an expert. Default None: no maximum.
        drop_policy: An expert over capacity keeps its first tokens ("position") or those with the best scores
            ("probability"; among equal ones the first).
        shared: Several ranks shard the micro-batch, and `capacity` counts the tokens of all of them. Default None: this
            rank has all tokens.
    """
    experts_Nk = choose_experts(rule, scores_NE, bias_E)
    flat = experts_Nk.ravel()
    requested_E = np.bincount(flat, minlength=rule.experts)
    kept = flat  # the expert of each assignment, or E where it is dropped
    if capacity is not None and (shared is not None or requested_E.max(initial=0) > capacity):
        probability_Nk = None
        if drop_policy == "probability":
            probability_Nk = np.take_along_axis(scores_NE, experts_Nk, 1)
        is_over = _is_over_capacity(experts_Nk, rule.experts, capacity, probability_Nk, shared)
        kept = np.where(is_over, rule.experts, flat)
    kept_E = np.bincount(kept, minlength=rule.experts)[: rule.experts]
    counts_E = kept_E
    if rule.safe_tokens:
        counts_E = np.maximum(kept_E, 1)
    row_Nk, token_R = _rows(kept, kept_E, counts_E, scores_NE.shape[0], rule)
    return Routing(experts_Nk, row_Nk, token_R, counts_E, requested_E, kept_E)


def choose_experts(rule: RoutingRule, scores_NE: np.ndarray, bias_E: np.ndarray | None = None) -> np.ndarray:
    """Returns the k best experts of each token, [N, k] int32, the best first; equal ones in the order of numbers."""
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
    """Returns the indices of the `number` best scores of each row, int32. Overwrites the scores."""
    indices = np.empty((len(scores), number), np.int32)
    rows = np.arange(len(scores))
    for choice in range(number):
        indices[:, choice] = scores.argmax(1)
        scores[rows, indices[:, choice]] = -np.inf
    return indices


def _is_over_capacity(
    experts_Nk: np.ndarray,
    experts: int,
    capacity: int,
    probability_Nk: np.ndarray | None,
    shared: SharedTokens | None,
) -> np.ndarray:
    """Returns for each assignment whether its expert, one of `experts`, is already full, [N k] bool."""
    if shared is not None:
        unsharded_Nk = None
        if probability_Nk is not None:
            unsharded_Nk = shared.unshard(probability_Nk)
        is_over = _is_over_capacity(shared.unshard(experts_Nk), experts, capacity, unsharded_Nk, None)
        return is_over.reshape(-1, experts_Nk.shape[1])[shared.local_n].ravel()
    flat = experts_Nk.ravel()
    requested_E = np.bincount(flat, minlength=experts)
    if requested_E.max(initial=0) <= capacity:
        return np.zeros(len(flat), bool)
    if probability_Nk is None:
        order = _order_by_expert(flat, len(requested_E))
    else:
        order = np.lexsort((-probability_Nk.ravel(), flat))  # stable: the first token among equals
    position_in_expert = np.arange(len(flat)) - np.repeat(np.cumsum(requested_E) - requested_E, requested_E)
    is_over = np.empty(len(flat), bool)
    is_over[order] = position_in_expert >= capacity
    return is_over


def _order_by_expert(assigned: np.ndarray, experts: int) -> np.ndarray:
    """Returns the stable order by expert. NumPy sorts small integers in linear time."""
    return np.argsort(assigned.astype(np.min_scalar_type(experts)), kind="stable")


def _rows(
    kept: np.ndarray, kept_E: np.ndarray, counts_E: np.ndarray, tokens: int, rule: RoutingRule
) -> tuple[np.ndarray, np.ndarray]:
    """Returns row_Nk and token_R; `kept` is the expert of each assignment, or E where it is dropped, [N k]."""
    order = _order_by_expert(kept, rule.experts)
    # The number of safe tokens before the rows of each expert, and before the rows of dropped assignments.
    shift = np.concatenate(([0], np.cumsum(counts_E - kept_E)))
    row = np.empty(len(kept), np.int32)
    row[order] = np.arange(len(kept))
    row += shift[kept].astype(np.int32)
    token_R = np.full(len(kept) + rule.experts * rule.safe_tokens, tokens, np.int32)
    token_R[row] = np.arange(len(kept)) // rule.chosen
    return row.reshape(-1, rule.chosen), token_R


def local_routing(experts_Nk: np.ndarray, rank: int, local_experts: int) -> Routing:
    """Returns the routing of all ranks' tokens to the experts of one rank: other assignments are as if dropped.

    Args:
        experts_Nk: The expert of each assignment among all experts; the number of all experts for a dropped one.
        rank: The rank among those that share the experts: its experts begin at rank * local_experts.
        local_experts: e.
    """
    local_Nk = experts_Nk - np.int32(rank * local_experts)
    local_Nk[(local_Nk < 0) | (local_Nk >= local_experts)] = local_experts
    flat = local_Nk.ravel()
    counts_e = np.bincount(flat, minlength=local_experts)[:local_experts]
    row_Nk, token_R = _rows(flat, counts_e, counts_e, len(local_Nk), RoutingRule(local_experts, local_Nk.shape[1]))
    return Routing(local_Nk, row_Nk, token_R, counts_e, counts_e, counts_e)


def route_received_rows(counts_Se: np.ndarray) -> Routing:
    """Returns the routing of Q received rows that come from S ranks to e experts.

    Each rank sends its rows sorted by expert. Each row has one expert, and none is dropped. The rows of an expert are
    in the order of the ranks.

    Args:
        counts_Se: The number of rows from each rank for each expert.
    """
    expert_Q = np.repeat(np.tile(np.arange(counts_Se.shape[1], dtype=np.int32), len(counts_Se)), counts_Se.ravel())
    token_Q = _order_by_expert(expert_Q, counts_Se.shape[1]).astype(np.int32)
    row_Q = np.empty_like(token_Q)
    counts_e = counts_Se.sum(0)
    row_Q[token_Q] = np.arange(len(token_Q), dtype=np.int32)
    return Routing(expert_Q[:, None], row_Q[:, None], token_Q, counts_e, counts_e, counts_e)


@dataclass(frozen=True)
class RoutingCounts:
    """What the routers of all layers decided for the micro-batches of a step.

    The values are arrays on a CPU and tensors on other devices. The properties need arrays.

    Attributes:
        layers: Numbers of the MoE layers; MTP modules follow the last layer.
        kept: Assignments that each expert computed, [L, E].
        requested: Assignments before dropping, [L, E].
        entropy_sum: Entropy of a token's scores in nats, a mean over tokens, times the layer's assignments, [L].
    """

    layers: tuple[int, ...]
    kept: Any
    requested: Any
    entropy_sum: Any

    def __add__(self, other: RoutingCounts) -> RoutingCounts:
        """Adds the counts of other micro-batches."""
        return RoutingCounts(
            self.layers,
            self.kept + other.kept,
            self.requested + other.requested,
            self.entropy_sum + other.entropy_sum,
        )

    @property
    def entropy(self) -> np.ndarray:
        """Returns the entropy of a token's scores, a mean over tokens, [L], in nats."""
        return self.entropy_sum / np.maximum(self.requested.sum(1), 1)

    @property
    def drop_rate(self) -> np.ndarray:
        """Returns the share of dropped assignments, [L]; 0 for a layer without assignments."""
        requested_L = self.requested.sum(1)
        return (requested_L - self.kept.sum(1)) / np.maximum(requested_L, 1)

    @property
    def load_imbalance(self) -> np.ndarray:
        """Returns the load of the busiest expert divided by the mean load, [L]; 1 for a layer without assignments."""
        total_L = self.requested.sum(1)
        busiest_L = self.requested.max(1) * self.requested.shape[1]
        return np.where(total_L > 0, busiest_L / np.maximum(total_L, 1), 1.0)


class RouterRates(NamedTuple):
    """The rates of `RoutingCounts` for a step, as arrays on the host, [L] each."""

    layers: tuple[int, ...]
    drop_rate: np.ndarray
    load_imbalance: np.ndarray
    entropy: np.ndarray


class StepExpertLoad:
    """Accumulates the load of each expert over the micro-batches of a step and over all ranks.

    gbs_aux_loss uses this load (Qiu et al. 2025, "Demons in the Detail", section 3); Megatron-LM calls the loss
    global_aux_loss. The load of the whole step is known only at its last micro-batch, so each micro-batch uses the load
    up to and including itself.

    Args:
        sums: Sums arrays, or tensors, over the ranks. All ranks must call it equally often.
    """

    def __init__(self, sums: Callable[[Sequence[Any]], list[Any]]) -> None:
        self.sums = sums
        self.requested = dict[int, Any]()

    def start(self) -> None:
        """Resets the counts, at the beginning of a step."""
        self.requested = {}

    def layer_load(self, layer: int) -> Callable[[Any], Any]:
        """Returns a function for one micro-batch that adds the layer's assignments and returns the load of the step.

        The function takes the number of assignments to each expert, [E], and returns each expert's share of all, [E]:
        a float64 array from an array, a float32 tensor from a tensor. A second call, by recomputation, adds nothing and
        returns the same shares.
        """
        known: list[Any] = []

        def shares(requested_E: Any) -> Any:
            """Returns the shares of the assignments; only the first call adds its counts."""
            if not known:
                [total_E] = self.sums([requested_E * 1.0])
                self.requested[layer] = total_E = total_E + self.requested.get(layer, 0.0)
                known.append(total_E / total_E.sum())
            return known[0]

        return shares
