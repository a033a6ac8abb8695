"""The sublayer with experts of native CPU layers against literal float64 formulas and their exact derivatives
(native_layers.py): router, gates, experts, shared experts and the losses of the router.

The choice of the experts is a constant of the formulas; that it is the right one is compared by itself.

Legend: N tokens (B sequences x T), D hidden, E experts, k chosen by a token.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy_kernels
import pytest
from native_layers import HIDDEN, Case, dropping, normal, settings_of, trained_subsets, weights_of
from numpy_kernels import assert_same_bits, distance
from thread_ranks import on_groups
from tolerances import rounding_limit

from trainer.arrays.moe import experts
from trainer.arrays.moe.router import RouterLabels
from trainer.arrays.moe.sublayer import CpuMoe, MoeInputs, MoePass
from trainer.arrays.tiles import Scratch, SublayerCall
from trainer.config.schema.moe import MoEConfig
from trainer.device.threads import HostThreads
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import MoeSpec
from trainer.models.spec.names import EXPERT_BIAS, EXPERT_DOWN_BIAS, MLP_NORM, ROUTER, SHARED_GATE
from trainer.models.spec.saved import moe_saved
from trainer.ops.routing import Routing, RoutingRule
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.sharding import shard_range

pytestmark = pytest.mark.usefixtures("small_blocks")
SEQUENCES, LENGTH, EXPERTS, CHOSEN, WIDTH = 2, 6, 4, 2, 5
TOKENS = SEQUENCES * LENGTH
MOE = {"expert_num": EXPERTS, "num_experts_chosen": CHOSEN, "moe_intermediate_size": WIDTH}
SIGMOID = {"use_gating_sigmoid": True, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.01}
SHARED = {"shared_expert_num": 1, "moe_shared_expert_intermediate_size": 6}
STEP = {"moe_router_load_balancing_type": "gbs_aux_loss"}
CASES: dict[str, tuple[dict, dict]] = {
    "softmax": ({}, {}),
    "sigmoid, groups, bias of the choice": ({**SIGMOID, "n_group": 2, "topk_group": 1}, {}),
    "gates as they are, scaled": ({"norm_topk_prob": False, "routed_scaling_factor": 2.5}, {}),
    "a least sum of scores": ({"moe_norm_min": 0.7}, {}),
    "z loss": ({"z_loss_factor": 0.01}, {}),
    "shared experts": (SHARED, {}),
    "shared experts with a gate": ({**SHARED, "use_shared_expert_gating": True}, {}),
    "biases": ({}, {"mlp_down_has_bias": True}),
    "capacity": ({"capacity_factor": 0.6}, {"mlp_down_has_bias": True}),
    "capacity, the best stay": ({"capacity_factor": 0.6, "moe_token_drop_policy": "probability"}, {}),
    "safe tokens": ({"use_gmm": True, "enable_gmm_safe_tokens": True}, {}),
    "load of the step": (STEP, {}),
    "dropout": ({}, {"hidden_dropout": 0.2}),
    "everything": (
        {**SIGMOID, **SHARED, "use_shared_expert_gating": True, "z_loss_factor": 0.01, "capacity_factor": 0.8,
         "routed_scaling_factor": 1.5},
        {"hidden_dropout": 0.2, "mlp_down_has_bias": True},
    ),
}  # fmt: skip
GRAD_AUX, GRAD_Z = np.float32(0.7), np.float32(0.3)


@dataclass(frozen=True)
class MoeCase:
    """A sublayer with experts, and its formula with the routing that it decided."""

    case: Case
    moe: MoEConfig
    spec: MoeSpec
    inputs: MoeInputs
    bias_E: np.ndarray | None

    @property
    def weights(self) -> dict[str, np.ndarray]:
        bias = {} if self.bias_E is None else {EXPERT_BIAS: self.bias_E}
        return self.case.weights | bias

    def sublayer(self) -> CpuMoe:
        return CpuMoe(self.spec, self.moe, RoutingRule.from_config(self.moe), Scratch())

    def call(self, **options: Any) -> SublayerCall:
        return SublayerCall(self.weights, dropout=self.case.dropout, **options)

    def forward(self, inputs: MoeInputs | None = None, **options: Any) -> tuple[np.ndarray, MoePass]:
        result, passed = self.sublayer().forward(self.call(**options), self.case.x_ND, inputs or self.inputs)
        return result, passed

    def check_result(self, result_ND: np.ndarray, aux_loss: float, z_loss: float) -> None:
        right = self.case.result
        for ours, exact in ((result_ND.reshape(-1), right[:-2]), (aux_loss, right[-2]), (z_loss, right[-1])):
            assert distance(ours, exact) <= rounding_limit(self.case.terms)

    def backward(self, passed: MoePass, trained: Iterable[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        upstream_ND = self.case.upstream_ND[:-2].reshape(TOKENS, HIDDEN)
        return self.sublayer().backward(self.call(trained=trained), passed, upstream_ND, GRAD_AUX, GRAD_Z)


def scores_formula(moe: MoEConfig, logits: np.ndarray) -> np.ndarray:
    if moe.score_function == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.real.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def moe_formula(
    moe: MoEConfig, eps: float, routing: Routing, inputs: MoeInputs, mask: np.ndarray | float, x: np.ndarray,
    **weights: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Returns the residual stream, the auxiliary and the z loss, one after the other."""
    y = numpy_kernels.rms_norm(x, weights[MLP_NORM], eps)
    logits = y @ weights[ROUTER].T
    scores = scores_formula(moe, logits)
    gates = np.take_along_axis(scores, routing.experts_Nk, 1)
    if moe.norm_topk_prob:
        sums = gates.sum(1, keepdims=True)
        gates = gates / np.where(sums.real < moe.moe_norm_min, moe.moe_norm_min, sums)
    gates = gates * moe.routed_scaling_factor
    added = np.zeros_like(y)
    gate, up, down = (weights[f"mlp.experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    for (token, choice), expert in np.ndenumerate(routing.experts_Nk):
        if routing.row_Nk[token, choice] < routing.counts_E.sum():  # otherwise it is dropped
            out = down[expert] @ numpy_kernels.swiglu(gate[expert] @ y[token], up[expert] @ y[token])
            if EXPERT_DOWN_BIAS in weights:
                out = out + weights[EXPERT_DOWN_BIAS][expert]
            added[token] += gates[token, choice] * out
    if moe.shared_expert_num:
        gate, up, down = (weights[f"mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
        shared = numpy_kernels.swiglu(y @ gate.T, y @ up.T) @ down.T
        if SHARED_GATE in weights:
            shared = shared / (1 + np.exp(-y @ weights[SHARED_GATE].T))
        added = added + shared
    out = x + added * mask
    normalised = scores / scores.sum(1, keepdims=True)
    means = normalised.reshape(-1, LENGTH, EXPERTS).mean(1)
    aux_loss = (inputs.labels.tokens_B1 * load_of(routing, inputs) * means).sum()
    largest = logits.real.max(1, keepdims=True)
    totals = largest + np.log(np.exp(logits - largest).sum(1, keepdims=True))
    z_loss = (inputs.labels.valid_N1 * totals**2).sum() if moe.z_loss_factor else 0.0
    return np.concatenate((out.reshape(-1), [aux_loss, z_loss]))


def load_of(routing: Routing, inputs: MoeInputs) -> np.ndarray:
    """Returns the experts' load in each sequence, [B, E], 1 where it is even; a constant of the loss."""
    if inputs.shares is not None:
        return inputs.shares(routing.requested_E)[None] * EXPERTS
    chosen = routing.experts_Nk.reshape(-1, LENGTH * CHOSEN)
    counts = [np.bincount(one, minlength=EXPERTS) for one in chosen]
    return np.stack(counts) * EXPERTS / (LENGTH * CHOSEN)


@functools.cache
def case_of(name: str) -> MoeCase:
    section, model = CASES[name]
    random = np.random.default_rng(list(CASES).index(name))
    settings = settings_of(moe_config=MOE | section, **model)
    [layer] = model_spec(settings).layers
    weights = weights_of(layer, "mlp", random)
    bias_E = weights.pop(EXPERT_BIAS, None)
    dropout, masks = dropping(settings, layer, TOKENS, SEQUENCES)
    valid_N1 = (random.random((TOKENS, 1)) < 0.7).astype(np.float32)
    tokens_B1 = valid_N1.reshape(SEQUENCES, LENGTH).sum(1, keepdims=True)
    shares = None
    if settings.experts.balances_step:
        tokens_B1[:] = tokens_B1.mean()
        share_E = random.random(EXPERTS)
        shares = lambda requested_E: share_E / share_E.sum()  # noqa: E731
    inputs = MoeInputs(RouterLabels(tokens_B1, valid_N1), settings.experts.capacity(TOKENS), shares)
    x_ND = normal(random, TOKENS, HIDDEN)
    upstream = np.concatenate((normal(random, TOKENS * HIDDEN), [GRAD_AUX, GRAD_Z])).astype(np.float32)
    terms = 2 * HIDDEN + 4 + HIDDEN + EXPERTS + 8 + HIDDEN + WIDTH + CHOSEN + TOKENS
    unused = Case(x_ND, upstream, weights, np.zeros_like, terms, dropout=dropout if masks else None)
    made = MoeCase(unused, settings.experts, layer.mlp, inputs, bias_E)
    routing = made.forward()[1].routing
    mask = masks.get("mlp_output", 1.0)
    formula = functools.partial(moe_formula, settings.experts, layer.mlp.norm.eps, routing, inputs, mask)
    return replace(made, case=replace(unused, formula=formula))


@pytest.mark.parametrize("name", CASES)
def test_experts(name: str, implementation: str) -> None:
    made, given = case_of(name), case_of(name).case.x_ND.copy()
    result, passed = made.forward()
    made.check_result(result, passed.routed.aux_loss, passed.routed.z_loss)
    assert (passed.routed.z_loss != 0) == (made.moe.z_loss_factor > 0)
    check_choice(made, passed)
    check_kept(made, [passed])
    again, repeated = made.forward(replace(made.inputs, routing=passed.routing))
    np.testing.assert_array_equal(again, result)
    assert repeated.routing is passed.routing
    once, _ = made.forward(save=False)
    np.testing.assert_array_equal(once, result)
    grad, found = made.backward(passed, made.case.weights)
    made.case.check_gradients({"x": grad} | found)
    np.testing.assert_array_equal(made.case.x_ND, given)


def check_choice(made: MoeCase, passed: MoePass) -> None:
    """Checks that a token's experts have the best scores, in its best groups, with the expert bias."""
    weights = {name: array.astype(np.float64) for name, array in made.weights.items()}
    y = numpy_kernels.rms_norm(made.case.x_ND.astype(np.float64), weights[MLP_NORM], made.spec.norm.eps)
    scores = scores_formula(made.moe, y @ weights[ROUTER].T) + weights.get(EXPERT_BIAS, 0.0)
    if (made.moe.n_group or 1) > 1:
        groups = np.sort(scores.reshape(TOKENS, made.moe.n_group, -1), -1)[..., -2:].sum(-1)
        best = groups == groups.max(1, keepdims=True)
        scores = np.where(np.repeat(best, EXPERTS // made.moe.n_group, 1), scores, -np.inf)
    np.testing.assert_array_equal(passed.routing.experts_Nk, np.argsort(-scores, 1)[:, :CHOSEN])
    capacity = made.inputs.capacity
    if capacity is None:
        assert passed.routing.kept_E.sum() == TOKENS * CHOSEN
    else:
        np.testing.assert_array_equal(passed.routing.kept_E, np.minimum(passed.routing.requested_E, capacity))
        assert passed.routing.kept_E.sum() < TOKENS * CHOSEN


def check_kept(made: MoeCase, passes: Sequence[MoePass], **ranks: Any) -> None:
    """Checks that all ranks keep for the backward pass what the description lists, which counts the mean rows of a
    rank's experts."""
    kept = Counter[str]()
    for passed in passes:
        dispatched = passed.dispatched
        of_experts = getattr(dispatched, "saved", dispatched)
        arrays = {
            "scale": passed.scale_N, "normed": passed.y_ND, "gate": of_experts.gate_RF, "up": of_experts.up_RF,
            "received": getattr(dispatched, "rows_QD", None), "returned": getattr(dispatched, "out_RD", None),
            "gathered": getattr(dispatched, "x_MD", None), "shared_output": passed.shared_out_ND,
        }  # fmt: skip
        if passed.shared is not None:
            arrays |= {f"shared_{name}": passed.shared.saved[name] for name in ("gate", "up")}
        kept.update({name: array.size for name, array in arrays.items() if array is not None})
        assert all(array is None or array.dtype == np.float32 for array in arrays.values())
    tokens = sum(len(passed.y_ND) for passed in passes)
    rows = {"tokens": tokens, "routed": tokens, "experts": sum(passed.routing.counts_E.sum() for passed in passes)}
    listed = {one.name: rows[one.rows] * one.width for one in moe_saved(made.spec, **ranks)}
    router = listed.pop("router")
    assert kept == listed
    losses = [(one.routed.scores_NE, one.routed.softmax_NE, one.routed.normalised_NE) for one in passes]
    distinct = {id(array): array.size for arrays in losses for array in arrays if array is not None}
    # Of a sigmoid, normalised scores are other numbers, and a softmax is kept for the z loss.
    is_sigmoid = made.moe.score_function == "sigmoid"
    arrays_of_router = 1 + is_sigmoid + (is_sigmoid and made.moe.z_loss_factor > 0)
    assert sum(distinct.values()) == arrays_of_router * tokens * EXPERTS < router


@pytest.mark.parametrize("name", ["softmax", "everything"])
def test_only_trained_weights_have_gradients(name: str) -> None:
    made = case_of(name)
    weights = made.case.weights
    whole_grad, whole = made.backward(made.forward()[1], weights)
    for names in trained_subsets(weights):
        grad, found = made.backward(made.forward()[1], names)
        assert list(found) == names
        assert_same_bits(found | {"x": grad}, {one: whole[one] for one in names} | {"x": whole_grad})


@pytest.mark.parametrize("name", ["capacity", "shared experts with a gate"])
def test_an_evaluation_drops_nothing_and_has_no_losses(name: str) -> None:
    made = case_of(name)
    result, passed = made.forward(MoeInputs(), save=False)
    assert passed.routed is None and passed.routing.kept_E.sum() == TOKENS * CHOSEN
    unbounded, _ = made.forward(replace(made.inputs, capacity=None))
    np.testing.assert_array_equal(result, unbounded)


def test_the_bits_are_the_same_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for threads in (1, 2, 3):
        pool = HostThreads(threads)
        monkeypatch.setattr(experts, "host_threads", lambda pool=pool: pool)
        made = case_of("everything")
        result, passed = made.forward()
        grad, found = made.backward(passed, made.case.weights)
        states.append([result, grad, *(found[name] for name in made.case.weights)])
    for state in states[1:]:
        assert_same_bits(state, states[0])


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("name", ["softmax", "sigmoid, groups, bias of the choice", "biases", "shared experts"])
def test_two_ranks_with_a_sequence_and_half_of_the_experts_each(name: str, dispatcher: str) -> None:
    made = case_of(name)
    moe = made.moe.model_copy(update={"moe_token_dispatcher_type": dispatcher})
    upstream_ND = made.case.upstream_ND[:-2].reshape(TOKENS, HIDDEN)

    def work(group: CpuGroup) -> tuple[np.ndarray, list[float], np.ndarray, dict[str, np.ndarray], MoePass]:
        own = shard_range(EXPERTS, group.rank, group.size)
        rows, labels = slice(group.rank * LENGTH, (group.rank + 1) * LENGTH), made.inputs.labels
        weights = {key: array[own] if ".experts." in key else array for key, array in made.weights.items()}
        inputs = MoeInputs(RouterLabels(labels.tokens_B1[group.rank : group.rank + 1], labels.valid_N1[rows]))
        sublayer = CpuMoe(made.spec, moe, RoutingRule.from_config(moe), Scratch(), experts=group)
        call = SublayerCall(weights, trained=made.case.weights)
        result, passed = sublayer.forward(call, made.case.x_ND[rows], inputs)
        losses = [passed.routed.aux_loss, passed.routed.z_loss]
        grad, found = sublayer.backward(call, passed, upstream_ND[rows], GRAD_AUX, GRAD_Z)
        arrays = {key: one.copy() for key, one in found.items()}
        return result.copy(), losses, grad.copy(), arrays, passed

    results, losses, grads, found, passes = zip(*on_groups(2, work), strict=True)
    check_kept(made, passes, gathers=dispatcher == "allgather", ranks=2)
    made.check_result(np.concatenate(results), *np.sum(losses, 0))
    gradients = {
        key: np.concatenate([one[key] for one in found]) if ".experts." in key else sum(one[key] for one in found)
        for key in made.case.weights
    }
    made.case.check_gradients({"x": np.concatenate(grads)} | gradients)
