"""Training with experts: losses of the router, accumulation, recomputation, balancing, capacity, multi-token
prediction.

Limits of sums in another order: tolerances.py (a loss normalised per micro-batch is off by 1e-1). Where the same
numbers are added in the same order, bits are compared.
"""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor
from numpy_kernels import assert_close, assert_same_bits
from tiny_trainer import (
    NATIVE,
    TOKENS,
    VOCABULARY,
    TinyTrainer,
    by_name,
    config_of,
    garbage_of,
    join,
    loss_and_gradients,
    make_batch,
    make_window,
    same_bits,
    shared_trainer,
    state_of,
)
from tolerances import EXPERTS_FLOAT16, FLOAT16_SUMS, ROUTER_SLOPE, SLOPE, decoder_limits, rounding_limit

from trainer.data import IGNORE_INDEX, Batch
from trainer.models.inputs import RouterStatistics
from trainer.models.spec.names import EXPERT_BIAS, HEAD
from trainer.ops.routing import StepExpertLoad
from trainer.parallel.communicator import Communicator
from trainer.step.accumulate import MicroBatch, accumulate
from trainer.step.evaluate import evaluate
from trainer.step.train_step import StepResult

EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12}
ALL_LOSSES = EXPERTS | {"aux_loss_factor": 0.3, "z_loss_factor": 0.01, "shared_expert_num": 1}
DEEPSEEK = EXPERTS | {
    "use_gating_sigmoid": True, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.01, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "shared_expert_num": 1, "aux_loss_factor": 0.3,
}  # fmt: skip
ROUTER = "model.layers.1.mlp.gate.weight"
LIMITS = decoder_limits(config_of(model={"moe_config": ALL_LOSSES, "mtp_depth": 1}).decoder, rows=4)


@pytest.fixture(scope="module")
def tiny() -> TinyTrainer:
    return TinyTrainer(moe_config=ALL_LOSSES, mtp_depth=1)


PLAIN = {"moe_config": EXPERTS | {"aux_loss_factor": 0.3}}


@pytest.fixture(scope="module")
def deepseek() -> TinyTrainer:
    return TinyTrainer(moe_config=DEEPSEEK)


def eager(name: str) -> TinyTrainer:
    """Returns `tiny` or `deepseek` operator by operator."""
    keys = {"tiny": {"moe_config": ALL_LOSSES, "mtp_depth": 1}, "deepseek": {"moe_config": DEEPSEEK}}
    return shared_trainer(compiled=False, **keys[name])


@pytest.fixture(scope="module")
def window() -> list[Batch]:
    return make_window(12, 3, 5, 7)


def decided(statistics: RouterStatistics) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scores and the chosen experts of the first layer."""
    _, routing, scores_NE = statistics.routings[0]
    scores, experts = (one.asnumpy() if isinstance(one, Tensor) else one for one in (scores_NE, routing.experts_Nk))
    return scores, experts


@pytest.mark.parametrize("name", ["tiny", "deepseek"])
def test_losses_of_the_router_and_of_mtp_do_not_change_with_accumulation(
    name: str, window: list[Batch], request: pytest.FixtureRequest
) -> None:
    """Compares four micro-batches through native layers with one batch operator by operator.

    An auxiliary loss over the tokens of a micro-batch, and not of a sequence, would change."""
    parts = accumulate(window, request.getfixturevalue(name).step().backward)
    whole = accumulate([join(window, 4)], eager(name).step().backward)
    assert parts.loss == pytest.approx(whole.loss, rel=LIMITS.loss)
    assert parts.others == pytest.approx(whole.others, rel=LIMITS.loss)
    assert set(parts.others) == ({"aux_loss", "z_loss", "mtp_loss"} if name == "tiny" else {"aux_loss"})
    assert_close(parts.gradients, whole.gradients, LIMITS.gradients)
    assert (parts.routing.requested == whole.routing.requested).all()
    assert (parts.routing.kept == whole.routing.kept).all()
    assert parts.routing.entropy == pytest.approx(whole.routing.entropy, rel=LIMITS.loss)


@NATIVE
def test_experts_in_half_precision(native: bool, tiny: TinyTrainer, window: list[Batch]) -> None:
    """Close to float32, but not equal, where rounding changes no choice. Native layers compute routed experts in
    float32."""
    half = TinyTrainer(native, moe_config=ALL_LOSSES, mtp_depth=1, compute_dtype="float16")
    found, right = (accumulate(window[:1], trainer.step().backward) for trainer in (half, tiny))
    assert (found.routing.requested == right.routing.requested).all()
    assert found.loss == pytest.approx(right.loss, rel=FLOAT16_SUMS) and found.loss != right.loss
    assert_close(found.gradients, right.gradients, EXPERTS_FLOAT16)


@NATIVE
def test_the_gradient_of_the_auxiliary_loss_reaches_the_router_whatever_the_loss_scale(
    native: bool, window: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removes the auxiliary loss, and compares how far the router's gradient moves with and without a loss scale."""
    plain = shared_trainer(native, **PLAIN)
    step = plain.step()
    found = accumulate(window, step.backward)
    with monkeypatch.context() as patch:
        patch.setattr(plain.model, "aux_factor", 0.0)
        bare = accumulate(window, step.backward)
    moved = by_name(step, found.gradients)[ROUTER] - by_name(step, bare.gradients)[ROUTER]
    assert np.abs(moved).max() > 1e-3
    scaled = accumulate(window, step.backward, loss_scale=1024.0)
    assert_same_bits([each.asnumpy() / 1024 for each in scaled.gradients], found.gradients)


@NATIVE
def test_the_auxiliary_loss_is_the_formula_of_the_paper(
    native: bool, window: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against NumPy, from the router's own scores; the gradient against finite differences of the router's weights."""
    trainer = TinyTrainer(native, moe_config=EXPERTS | {"aux_loss_factor": 1.0}, num_layers=1)
    step, batch = trainer.step(), join(window[:2], 2)
    seen = {}

    def aux_loss() -> float:
        inputs = trainer.build_inputs(batch)
        statistics = RouterStatistics()
        sums = trainer.model(inputs, None, statistics)
        seen["scores"], seen["experts"] = decided(statistics)
        return float(sums.aux_loss.asnumpy())

    found, expected = aux_loss(), 0.0
    for row, valid in enumerate((12, 3)):
        here = slice(row * TOKENS, (row + 1) * TOKENS)
        load = np.bincount(seen["experts"][here].reshape(-1), minlength=4) * 4 / (2 * TOKENS)
        expected += valid * (load * seen["scores"][here].mean(0)).sum()
    assert found == pytest.approx(expected, rel=LIMITS.loss)

    name = "model.layers.0.mlp.gate.weight"
    with_loss = loss_and_gradients(step, batch)[1][name].copy()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.model, "aux_factor", 0.0)
        without = loss_and_gradients(step, batch)[1][name]
    weight, small = trainer.initial[name].copy(), 3e-3
    for index in [(0, 0), (2, 5), (3, 15)]:
        values = []
        for sign in (1, -1):
            moved = weight.copy()
            moved[index] += sign * small
            trainer.set_weight(name, moved)
            values.append(aux_loss())
        slope = (values[0] - values[1]) / (2 * small)
        # The load is a constant of the loss; where no token changed its experts the difference sees that too.
        assert (with_loss - without)[index] == pytest.approx(slope, *ROUTER_SLOPE)


GLOBAL = EXPERTS | {"aux_loss_factor": 1.0, "moe_router_load_balancing_type": "gbs_aux_loss"}


class TwoAlike:
    """A group of two ranks which have the same data."""

    on_host = True
    rank = 0
    size = 2

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        return np.stack([array, array])

    def all_reduce_into(self, array: np.ndarray, out: np.ndarray) -> np.ndarray:
        return np.multiply(array, 2, out=out)


@NATIVE
def test_the_loss_of_a_whole_step_is_the_published_formula(native: bool) -> None:
    """gbs_aux_loss against NumPy: of micro-batch m, E sum_e F_e P_e with F the experts' parts of the assignments of
    micro-batches 1 to m, and P the mean of the scores of micro-batch m; the gradient by the scores' formula."""
    trainer = TinyTrainer(native, moe_config=GLOBAL, num_layers=1)
    batches, seen, step = [make_batch(seed, 12, rows=2) for seed in (1, 2)], [], trainer.step()

    def backward(batch: Batch, number: int, factor: float) -> MicroBatch:
        seen.append(step.backward(batch, number, factor))
        return seen[-1]

    statistics = [RouterStatistics() for _ in batches]  # without a load of the step: what each decides alone
    for batch, each in zip(batches, statistics, strict=True):
        trainer.model(trainer.build_inputs(batch), None, each)
    scores, experts = zip(*map(decided, statistics), strict=True)
    counts = [np.bincount(experts_Nk.reshape(-1), minlength=4) for experts_Nk in experts]
    accumulate(batches, backward)
    for number, found in enumerate(seen):
        share_E = sum(counts[: number + 1]) / sum(map(sum, counts[: number + 1]))
        expected = 12 * 4 * (share_E * scores[number].mean(0)).sum()
        assert float(found.other_sums["aux_loss"][0].asnumpy()) == pytest.approx(expected, rel=LIMITS.loss)
    assert not np.allclose(counts[0] / counts[0].sum(), counts[1] / counts[1].sum())  # or the order shows nothing


@NATIVE
def test_the_gradient_of_that_loss_is_its_slope_with_the_load_of_the_step_held(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = TinyTrainer(native, moe_config=GLOBAL, num_layers=1)
    name, batch, share_E = "model.layers.0.mlp.gate.weight", make_batch(3, 20, rows=2), np.array([0.4, 0.3, 0.2, 0.1])
    monkeypatch.setattr(StepExpertLoad, "layer_load", lambda self, layer: lambda requested_E: share_E)
    step = trainer.step()

    def at(factor: float) -> np.ndarray:
        monkeypatch.setattr(trainer.model, "aux_factor", factor)
        return loss_and_gradients(step, batch)[1][name].copy()

    gradient, weight, small = at(1.0) - at(0.0), trainer.initial[name].copy(), 3e-3

    def aux_loss(moved: np.ndarray) -> float:
        trainer.set_weight(name, moved)
        statistics = RouterStatistics()
        trainer.model(trainer.build_inputs(batch), None, statistics)
        return 20 * 4 * float((share_E * decided(statistics)[0].mean(0, dtype=np.float64)).sum())

    for index in [(0, 0), (2, 5), (3, 15)]:
        step_by = np.zeros_like(weight)
        step_by[index] = small
        slope = (aux_loss(weight + step_by) - aux_loss(weight - step_by)) / (2 * small)
        assert gradient[index] == pytest.approx(slope, *SLOPE)


@NATIVE
def test_the_load_of_a_step_is_that_of_all_ranks_and_counts_a_recomputed_layer_once(
    native: bool, window: list[Batch]
) -> None:
    found, window = [], window[:2]
    for recompute in (False, True):
        sections = {"recompute_config": {"recompute": recompute}}
        trainer = TinyTrainer(native, sections=sections, moe_config=GLOBAL)
        results = [trainer.step(communicator=one)(window) for one in (None, Communicator(TwoAlike()))]
        assert results[0].losses == pytest.approx(results[1].losses, rel=LIMITS.loss)
        step = trainer.step()
        results += [step(window), step(window)]
        assert step.load.requested[0].sum() == 2 * 2 * TOKENS  # of one step: 2 experts for each token of 2 batches
        found.append((results[0].losses, results[3].losses))
    assert found[0] == found[1]


def test_a_micro_batch_without_labels_takes_part_in_the_load_of_the_step(window: list[Batch]) -> None:
    """All ranks sum the load of every micro-batch, so that none waits for another."""
    trainer = shared_trainer(moe_config=GLOBAL)
    empty = window[0]._replace(labels=np.full_like(window[0].labels, IGNORE_INDEX))
    step = trainer.step()
    step([window[1], empty])
    assert step.load.requested[0].sum() == 2 * 2 * TOKENS


CAPACITY = {"moe_config": ALL_LOSSES | {"capacity_factor": 0.7}, "mtp_depth": 1, "hidden_dropout": 0.1}


def two_steps(window: list[Batch], recompute: dict, native: bool) -> tuple[list[StepResult], dict[str, np.ndarray]]:
    """Results of two steps, and everything that they change."""
    trainer = TinyTrainer(native, sections={"recompute_config": recompute}, **CAPACITY)
    step = trainer.step(optimizer={"type": "AdamW"})
    # Operator by operator each micro-batch costs a tenth of a second.
    return [step(window if native else window[:2]) for _ in range(2)], state_of(step.optimizer, trainer)


@pytest.fixture(scope="module")
def kept(window: list[Batch], request: pytest.FixtureRequest) -> tuple[bool, list[StepResult], dict[str, np.ndarray]]:
    return request.param, *two_steps(window, {}, request.param)


COMPUTED_AGAIN = {
    "block and experts": {"recompute": 1, "select_recompute": {"mlp": [1]}},  # a layer of each
    "attention": {"select_recompute": ["attention"]},
}


@pytest.mark.parametrize("kept", [True, False], indirect=True, ids=["native", "cells"])
@pytest.mark.parametrize("part", COMPUTED_AGAIN)
def test_recomputation_changes_no_bit_and_counts_once(window: list[Batch], kept: tuple, part: str) -> None:
    """Checks that the forward pass within the backward pass adds nothing to the counts of assignments."""
    native, right_results, right_state = kept
    results, state = two_steps(window, COMPUTED_AGAIN[part], native)
    assert_same_bits(state, right_state)
    for mine, right in zip(results, right_results, strict=True):
        assert (mine.loss, mine.losses) == (right.loss, right.losses)
        assert (mine.routing.kept == right.routing.kept).all()
        assert (mine.routing.requested.sum(1) == (4 if native else 2) * TOKENS * 2).all()


def test_cells_that_an_ascend_compiles_agree(window: list[Batch]) -> None:
    trainer = TinyTrainer(host_layers=False, moe_config=ALL_LOSSES, mtp_depth=1)
    ours, right = (accumulate(window, one.step().backward) for one in (trainer, eager("tiny")))
    assert ours.loss == pytest.approx(right.loss, rel=LIMITS.loss)
    assert_close(ours.gradients, right.gradients, LIMITS.gradients)


def test_experts_learn(tiny: TinyTrainer, deepseek: TinyTrainer, window: list[Batch]) -> None:
    for trainer in (tiny, deepseek):
        step = trainer.step(optimizer={"type": "AdamW"}, schedule=lambda update: 0.02)
        losses = [step(window).loss for _ in range(9)]
        assert losses[-1] < 0.3 * losses[0]


@NATIVE
def test_an_expert_without_tokens_has_gradients_of_exactly_zero(native: bool, window: list[Batch]) -> None:
    """Computes a full batch first, so that memory that is reused does not happen to be zero."""
    trainer = TinyTrainer(native, moe_config=EXPERTS | {"num_experts_chosen": 1, "aux_loss_factor": 0.0})
    step = trainer.step()
    accumulate(window, step.backward)
    for layer in (0, 1):  # every token to the same expert: the others see nothing
        router = np.zeros((4, 16), np.float32)
        trainer.set_weight(f"model.layers.{layer}.mlp.gate.weight", router)
    found = accumulate(window, step.backward)
    assert found.routing.requested.tolist() == [[4 * TOKENS, 0, 0, 0]] * 2
    for name, gradient in zip(step.optimizer.parameters, found.gradients, strict=True):
        if "experts" in name:
            assert np.abs(gradient.asnumpy()[0]).max() > 0
            assert not gradient.asnumpy()[1:].any()


@NATIVE
def test_capacity_drops_in_training_and_not_in_evaluation(native: bool, window: list[Batch]) -> None:
    plain = shared_trainer(native, **PLAIN)
    tight = TinyTrainer(native, moe_config=EXPERTS | {"capacity_factor": 0.5})
    first, second = plain.step(), tight.step()
    assert accumulate(window, first.backward).routing.drop_rate.max() == 0
    found = accumulate(window, second.backward).routing
    assert (found.kept.max(1) <= 4 * 3).all() and (found.drop_rate > 0.3).all()  # ceil(2 x 12 x 0.5 / 4) = 3 of 12
    losses = [evaluate(one.model, one.build_inputs, window, stop=lambda: False)[0] for one in (plain, tight)]
    assert losses[0] == losses[1]


def test_the_expert_bias_moves_against_the_load_once_a_step(deepseek: TinyTrainer, window: list[Batch]) -> None:
    step, name = deepseek.step(), f"model.layers.1.{EXPERT_BIAS}"
    assert name not in step.optimizer.parameters and name in deepseek.weights()
    result = step(window)
    requested_E = result.routing.requested[0]
    expected = np.float32(0.01) * np.sign(requested_E.mean() - requested_E)
    np.testing.assert_allclose(deepseek.weights()[name], expected, rtol=rounding_limit(2))
    assert np.abs(expected).max() > 0
    empty = [window[0]._replace(labels=np.full_like(window[0].labels, IGNORE_INDEX))]
    before = deepseek.weights()[name].copy()
    assert not step(empty).updated
    np.testing.assert_array_equal(deepseek.weights()[name], before)


def test_the_expert_bias_does_not_depend_on_micro_batches(deepseek: TinyTrainer, window: list[Batch]) -> None:
    """One of them has no loss token, but its tokens choose experts."""
    batches = [window[0], window[1]._replace(labels=np.full_like(window[1].labels, IGNORE_INDEX))]
    requested = []
    for micro_batches in (batches, [join(batches, 2)]):
        requested.append(deepseek.step()(micro_batches).routing.requested)
    np.testing.assert_array_equal(*requested)
    assert np.sum(requested[0]) == 2 * 2 * TOKENS


@pytest.mark.parametrize(
    ("sections", "moved"),
    [
        ({"freeze": {"include": ["*.1.mlp.gate.*"]}}, [2]),
        ({"freeze": {"layers": 2}}, [1]),
        ({"freeze": {"include": "*.1.mlp.gate.weight"}}, [2]),
        ({"freeze": {"include": "*_bias"}}, []),
        ({"model": {"pet_config": {"target_modules": ".*wq"}}}, []),
    ],
    ids=["pattern", "layer", "router alone", "bias alone", "adapters"],
)
def test_the_bias_of_a_frozen_router_stays(sections: dict, moved: list[int], window: list[Batch]) -> None:
    """Frozen weights leave byte for byte as they came, and adapters must find their base as it was."""
    model = {"moe_config": DEEPSEEK, "mtp_depth": 1, **sections.pop("model", {})}
    trainer = TinyTrainer(sections=sections, **model)
    biases = {layer: f"model.layers.{layer}.{EXPERT_BIAS}" for layer in (1, 2)}
    for seed, name in enumerate(biases.values()):
        trainer.initial[name] = np.random.default_rng(seed).normal(0, 1e-3, 4).astype(np.float32)
    assert trainer.step()(window).updated
    after = trainer.weights()
    assert [layer for layer, name in biases.items() if (after[name] != trainer.initial[name]).any()] == moved


def test_the_mtp_loss_is_the_mean_over_their_own_labels(window: list[Batch]) -> None:
    """A head of zeros finds every token as likely: every label of every module costs log(vocabulary)."""
    trainer = TinyTrainer(moe_config=EXPERTS, mtp_depth=2)
    step = trainer.step()
    trainer.set_weight(HEAD, np.zeros_like(trainer.initial[HEAD]))
    found = accumulate(window, step.backward)
    assert found.others["mtp_loss"] == pytest.approx(np.log(VOCABULARY), rel=rounding_limit(VOCABULARY, 4))
    assert found.loss == pytest.approx(np.log(VOCABULARY), rel=rounding_limit(VOCABULARY, 4))
    last = make_batch(9, 0)  # its only label has no token before it that a module could see
    last.labels[0, 0] = 3
    assert accumulate([last], step.backward).others["mtp_loss"] == 0


def test_the_mtp_module_sees_no_other_document(tiny: TinyTrainer) -> None:
    """Ids, labels and validity by the definition, for a row whose document changes at place 7."""
    batch = make_batch(3, TOKENS)
    mtp = tiny.build_inputs(batch).mtp[0]
    ids, labels, valid = (tensor.asnumpy().reshape(-1) for tensor in mtp)
    for place in range(TOKENS):
        inside = place + 1 < TOKENS and batch.segment_ids[0, place] == batch.segment_ids[0, place + 1]
        counts = inside and batch.labels[0, place + 1] != IGNORE_INDEX
        assert valid[place] == counts
        if counts:
            assert (ids[place], labels[place]) == (batch.input_ids[0, place + 1], batch.labels[0, place + 1])
    assert valid.sum() == TOKENS - 2


def test_training_with_experts_leaves_no_garbage(tiny: TinyTrainer, window: list[Batch]) -> None:
    step = tiny.step()
    assert garbage_of(step, window) == 0


def test_the_same_training_twice_has_the_same_bits(tiny: TinyTrainer, window: list[Batch]) -> None:
    states = []
    for _ in range(2):
        step = tiny.step(optimizer={"type": "AdamW"})
        for _ in range(3):
            step(window)
        states.append(state_of(step.optimizer, tiny))
    assert_same_bits(*states)
    assert not same_bits(states[0], state_of(tiny.step(optimizer={"type": "AdamW"}).optimizer, tiny))
