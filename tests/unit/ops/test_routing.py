"""Routing against literal loops: which experts are chosen, which assignments are dropped, and the row of each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trainer.config.schema.moe import MoEConfig
from trainer.ops.routing import Routing, RoutingCounts, RoutingRule, choose_experts, route

RANDOM = np.random.default_rng(11)
POLICIES = pytest.mark.parametrize("policy", ["position", "probability"])


def random_scores(tokens: int, experts: int, *, ties: bool = False) -> np.ndarray:
    """Scores between 0 and 1; with ties they have only three values."""
    scores = RANDOM.integers(1, 4, (tokens, experts)) / 4 if ties else RANDOM.random((tokens, experts))
    return scores.astype(np.float32)


def chosen_literally(rule: RoutingRule, scores: np.ndarray, bias: np.ndarray) -> list[list[int]]:
    """Tries every set of groups and every order of experts, and returns the first of the best."""
    chosen, group_size = [], rule.experts // max(rule.groups, 1)
    for choice in scores + bias:
        allowed = range(rule.experts)
        if rule.groups > 1:
            members = [sorted(choice[group * group_size :][:group_size], reverse=True) for group in range(rule.groups)]
            worth = [sum(best[: 2 if rule.group_score == "two_best" else 1]) for best in members]
            groups = max(
                itertools.combinations(range(rule.groups), rule.chosen_groups),
                key=lambda some: sorted((worth[group] for group in some), reverse=True),  # noqa: B023
            )
            allowed = [expert for expert in allowed if expert // group_size in groups]
        chosen.append(sorted(allowed, key=lambda expert: (-choice[expert], expert))[: rule.chosen])
    return chosen


def kept_literally(
    chosen: list[list[int]], scores: np.ndarray, capacity: int, policy: str
) -> set[tuple[int, int]]:
    """Returns (token, expert) of every assignment within the capacity."""
    kept = set()
    for expert in range(scores.shape[1]):
        tokens = [token for token, experts in enumerate(chosen) if expert in experts]
        if policy == "probability":
            tokens.sort(key=lambda token: (-scores[token, expert], token))  # noqa: B023
        kept |= {(token, expert) for token in tokens[:capacity]}
    return kept


RULES = [
    RoutingRule(5, 1),
    RoutingRule(8, 2),
    RoutingRule(6, 6),
    RoutingRule(8, 3, groups=4, chosen_groups=2, group_score="best"),
    RoutingRule(8, 3, groups=4, chosen_groups=2, group_score="two_best"),
    RoutingRule(8, 2, groups=4, chosen_groups=1, group_score="two_best"),
    RoutingRule(12, 4, groups=3, chosen_groups=2, group_score="two_best"),
    RoutingRule(6, 2, groups=6, chosen_groups=3, group_score="two_best"),  # groups of one expert
    RoutingRule(6, 2, groups=2, chosen_groups=2),  # any group
    RoutingRule(6, 2, groups=0, chosen_groups=0),
]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_best_experts_are_chosen(rule: RoutingRule, ties: bool) -> None:
    scores = random_scores(50, rule.experts, ties=ties)
    before = scores.copy()
    bias = RANDOM.integers(-8, 9, rule.experts).astype(np.float32) / 8  # makes scores negative too
    for added in (None, bias):
        experts_Nk = choose_experts(rule, scores, added)
        assert experts_Nk.dtype == np.int32
        assert experts_Nk.tolist() == chosen_literally(rule, scores, 0 if added is None else added)
    np.testing.assert_array_equal(scores, before)


def test_ties_choose_the_lower_expert() -> None:
    assert choose_experts(RoutingRule(4, 2), np.full((1, 4), 0.25, np.float32)).tolist() == [[0, 1]]
    grouped = RoutingRule(8, 2, groups=4, chosen_groups=1, group_score="two_best")
    assert choose_experts(grouped, np.full((1, 8), 0.5, np.float32)).tolist() == [[0, 1]]


def test_nan_scores_still_give_different_experts() -> None:
    """A diverged run must end with its own message."""
    experts = choose_experts(RoutingRule(4, 3), np.array([[np.nan] * 4, [0.1, np.nan, 0.2, np.nan]], np.float32))
    assert experts.tolist() == [[0, 1, 2], [1, 3, 2]]


def check_rows(rule: RoutingRule, routing: Routing, kept: set[tuple[int, int]], tokens: int) -> None:
    """Checks that each expert's rows follow each other, its tokens in order and zeros without tokens, and that
    dropped ones come last."""
    rows: list[int] = []
    for expert in range(rule.experts):
        of_expert = sorted(token for token, other in kept if other == expert)
        rows += of_expert or [tokens] * rule.safe_tokens
        assert routing.counts_E[expert] == (len(of_expert) or int(rule.safe_tokens))
        assert routing.kept_E[expert] == len(of_expert)
    assert routing.token_R[: len(rows)].tolist() == rows
    assert len(routing.token_R) == tokens * rule.chosen + rule.experts * rule.safe_tokens

    first_E = np.cumsum(routing.counts_E) - routing.counts_E
    assert len(set(routing.row_Nk.ravel().tolist())) == tokens * rule.chosen
    for (token, choice), expert in np.ndenumerate(routing.experts_Nk):
        row = routing.row_Nk[token, choice]
        assert routing.token_R[row] == token
        assert (first_E[expert] <= row < first_E[expert] + routing.counts_E[expert]) == ((token, expert) in kept)
        assert (row >= routing.counts_E.sum()) == ((token, expert) not in kept)
    requested = np.bincount(routing.experts_Nk.ravel(), minlength=rule.experts)
    assert routing.requested_E.tolist() == requested.tolist()
    assert [array.dtype for array in routing] == [np.int32] * 3 + [np.int64] * 3


@POLICIES
@pytest.mark.parametrize("safe_tokens", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("capacity", [None, 1, 3, 7, 20, 21, 1000])
def test_rows_and_counts(capacity: int | None, ties: bool, safe_tokens: bool, policy: str) -> None:
    rule, tokens = RoutingRule(8, 2, safe_tokens=safe_tokens), 20
    scores = random_scores(tokens, rule.experts, ties=ties)
    scores[:, [2, 7]] = 0  # nobody's choice
    routing = route(rule, scores, None, capacity, policy)
    chosen = chosen_literally(rule, scores, np.zeros(rule.experts))
    assert routing.experts_Nk.tolist() == chosen
    kept = kept_literally(chosen, scores, tokens if capacity is None else capacity, policy)
    check_rows(rule, routing, kept, tokens)
    if capacity is None or capacity >= tokens:
        assert len(kept) == tokens * rule.chosen


@POLICIES
def test_an_expert_that_all_tokens_choose(policy: str) -> None:
    rule, scores = RoutingRule(4, 1), np.tile(np.array([0, 0, 1, 0], np.float32), (9, 1))
    everything = route(rule, scores, None, None, policy)
    assert everything.counts_E.tolist() == [0, 0, 9, 0]
    assert everything.row_Nk.ravel().tolist() == list(range(9))
    some = route(rule, scores, None, 4, policy)
    assert (some.kept_E.tolist(), some.requested_E.tolist()) == ([0, 0, 4, 0], [0, 0, 9, 0])
    assert some.row_Nk.ravel().tolist() == list(range(9)), "of equal probability the first tokens stay"


def test_an_expert_bias_chooses_experts_but_not_the_dropped_assignments() -> None:
    scores = np.array([[0.4, 0.3, 0.2], [0.5, 0.4, 0.3], [0.6, 0.1, 0.05]], np.float32)
    routing = route(RoutingRule(3, 1), scores, np.array([0, 1, 0], np.float32), 1, "probability")
    assert routing.experts_Nk.ravel().tolist() == [1, 1, 1]
    assert routing.row_Nk.ravel().tolist() == [1, 0, 2]  # the second token has the best score of expert 1


@POLICIES
@pytest.mark.parametrize(
    ("factor", "tokens", "capacity"),
    [(1.1, 20, 6), (1.25, 20, 7), (1.0, 20, 5), (0.01, 20, 1), (1.3, 7, 3), (8.0, 20, 20), (4.0, 20, 20)],
)
def test_drop_rate_counts_integers_and_capacity_is_rounded_up(
    factor: float, tokens: int, capacity: int, policy: str
) -> None:
    """Checks that the rate counts assignments beyond the capacity, which is an integer, and no fractions of them."""
    experts, chosen = 8, 2
    moe = MoEConfig(expert_num=experts, num_experts_chosen=chosen, capacity_factor=factor)
    assert moe.capacity(tokens) == capacity
    scores = random_scores(tokens, experts) * np.arange(1, experts + 1, dtype=np.float32)  # uneven
    routing = route(RoutingRule(experts, chosen), scores, None, moe.capacity(tokens), policy)
    assert routing.requested_E.sum() == tokens * chosen
    assert routing.kept_E.tolist() == np.minimum(routing.requested_E, capacity).tolist()

    counts = RoutingCounts((0,), routing.kept_E[None], routing.requested_E[None], np.zeros(1))
    dropped = sum(max(int(requested) - capacity, 0) for requested in routing.requested_E)
    assert counts.drop_rate.tolist() == [dropped / (tokens * chosen)]


def test_rates_of_layers() -> None:
    counts = RoutingCounts(
        layers=(1, 3),
        kept=np.array([[4, 4, 0, 2], [0, 0, 0, 0]]),
        requested=np.array([[4, 9, 0, 3], [0, 0, 0, 0]]),
        entropy_sum=np.zeros(2),
    )
    assert counts.drop_rate.tolist() == [6 / 16, 0]
    assert counts.load_imbalance.tolist() == [9 / 4, 1]


def test_counts_of_micro_batches_add_up() -> None:
    first = RoutingCounts((2,), np.array([[3, 0]]), np.array([[4, 0]]), np.array([0.5 * 4]))
    second = RoutingCounts((2,), np.array([[3, 5]]), np.array([[3, 9]]), np.array([0.1 * 12]))
    both = first + second
    assert (both.layers, both.kept.tolist(), both.requested.tolist()) == ((2,), [[6, 5]], [[7, 9]])
    assert both.drop_rate.tolist() == [5 / 16]
    np.testing.assert_allclose(both.entropy, [(0.5 * 4 + 0.1 * 12) / 16])
