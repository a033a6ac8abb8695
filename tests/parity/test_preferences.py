"""Losses of preferences against TRL's formulas: values, rewards and gradients; steps in parts equal one step."""

from __future__ import annotations

import numpy as np
import numpy_kernels
import pytest
from native_layers import HIDDEN, Case, normal
from numpy_kernels import assert_close
from preference_cases import (
    BETA,
    PAIRED,
    REWARD_MARGIN,
    TYPES,
    answers_of,
    log_sigmoid,
    loss_of,
    pair_batch,
    trl_kto,
    trl_losses,
    trl_rewards,
)
from tiny_trainer import TOKENS, VOCABULARY, config_of
from tolerances import RUN_LOSSES, RUN_NEAR_ZERO, RUN_NORMS, rounding_limit

from trainer.arrays.tiles import Scratch, SublayerCall
from trainer.arrays.vocabulary.head import FusedLinearCrossEntropy
from trainer.arrays.vocabulary.preferences import CHOSEN, REJECTED, REWARDS, find_pairs
from trainer.arrays.vocabulary.score import ScoreHead
from trainer.config.schema.runner import LossConfig
from trainer.data.batches.batch import (
    IGNORE_INDEX,
    PairBatch,
    add_values,
    concatenate,
    count_pairs,
    padding_batch,
    select_documents,
)
from trainer.models.spec.model import NormSpec
from trainer.run.session import open_training
from trainer.step.evaluate import evaluate
from trainer.step.train_step import StepResult, TrainStep

ROWS = ((3, 4), (2, 3, 4, 3), (6, 4))  # tokens of the documents of each sequence


def valid_of(batch: PairBatch) -> np.ndarray:
    """Returns 1 for each token with a loss, else 0: float32 [N, 1]."""
    return (batch.labels.reshape(-1, 1) != IGNORE_INDEX).astype(np.float32)


def head_case(kind: str) -> tuple[Case, PairBatch]:
    """Returns the head on a batch of pairs, as a formula."""
    batch = pair_batch(3, ROWS)
    random = np.random.default_rng(4)
    labels_N = batch.labels.reshape(-1)
    places_N = np.where(labels_N == IGNORE_INDEX, 0, labels_N)

    def formula(x: np.ndarray, norm: np.ndarray, weight: np.ndarray) -> np.ndarray:
        logits_NV = numpy_kernels.rms_norm(x, norm, 1e-3) @ weight.T
        log_probs_NV = logits_NV - np.log(np.exp(logits_NV).sum(-1, keepdims=True))
        return np.asarray(trl_losses(kind, batch, log_probs_NV[np.arange(len(places_N)), places_N]))

    weights = {"norm": 1 + normal(random, HIDDEN, scale=0.3), "weight": normal(random, VOCABULARY, HIDDEN)}
    x_ND = normal(random, len(ROWS) * TOKENS, HIDDEN)
    terms = 2 * HIDDEN + VOCABULARY + 8 + len(x_ND)
    return Case(x_ND, np.ones(()), weights, formula, terms), batch


@pytest.mark.parametrize("kind", TYPES)
def test_loss_and_gradients_of_the_head(kind: str) -> None:
    case, batch = head_case(kind)
    section = LossConfig(**loss_of(kind))
    valid_N1 = valid_of(batch)
    labels_N = np.where(valid_N1[:, 0] > 0, batch.labels.reshape(-1), 0)

    def run(*trained: str, save: bool = True):
        head = FusedLinearCrossEntropy(HIDDEN, NormSpec(1e-3), Scratch())
        pairs = find_pairs(batch, section)
        call = SublayerCall(case.weights, save=save, trained=trained)
        loss = head.forward(call, case.x_ND, labels_N, valid_N1, pairs)
        if not save:
            return loss, pairs, {}
        grad, found = head.backward(call, case.x_ND, labels_N, valid_N1, pairs, np.float32(1))
        return loss, pairs, {"x": grad} | found

    loss, pairs, found = run("norm", "weight")
    case.check_result(loss)
    case.check_gradients(found)
    assert pairs.count == 4
    if kind == "kto":
        total, count = pairs.sums["kl"]
        assert total / count > 1
    alone, evaluated, _ = run(save=False)
    assert alone == loss and evaluated.sums == pairs.sums
    # Where the matrix is frozen the logits are computed once: the same gradients.
    frozen_loss, _, frozen = run("norm")
    assert frozen_loss == loss
    right = {name: case.gradients[name] for name in ("x", "norm")}
    assert_close(frozen, right, rounding_limit(2 * (case.terms + len(case.x_ND))))


def reward_case() -> tuple[Case, PairBatch]:
    """Returns the head of a reward model on a batch of pairs, as TRL 1.16 has it (trl/trainer/reward_trainer.py)."""
    batch = pair_batch(3, ROWS)
    batch = batch._replace(values=batch.values * np.float32(REWARD_MARGIN), reference=np.zeros((len(ROWS), 0)))
    random = np.random.default_rng(8)
    places = []  # of the last token of each answer, whatever carries loss
    margins = []
    for row, lengths in enumerate(ROWS):
        ends = row * TOKENS + np.cumsum(lengths) - 1
        places += ends.tolist()
        margins += batch.values.reshape(-1)[ends].tolist()[::2]
    assert {*np.round(margins, 3)} == {0.0, REWARD_MARGIN}

    def formula(x: np.ndarray, norm: np.ndarray, weight: np.ndarray) -> np.ndarray:
        scores = (numpy_kernels.rms_norm(x, norm, 1e-3) @ weight.T)[places, 0]
        return np.asarray(-log_sigmoid(scores[::2] - scores[1::2] - np.array(margins)).sum())

    weights = {"norm": 1 + normal(random, HIDDEN, scale=0.3), "weight": normal(random, 1, HIDDEN)}
    return Case(normal(random, len(ROWS) * TOKENS, HIDDEN), np.ones(()), weights, formula, 3 * HIDDEN + 8), batch


def test_loss_and_gradients_of_a_reward_model() -> None:
    case, batch = reward_case()
    labels_N, valid_N1 = batch.labels.reshape(-1), valid_of(batch)
    head = ScoreHead(HIDDEN, NormSpec(1e-3), Scratch())
    pairs = find_pairs(batch, LossConfig(**loss_of("reward")))
    call = SublayerCall(case.weights, save=True, trained=("norm", "weight"))
    case.check_result(head.forward(call, case.x_ND, labels_N, valid_N1, pairs))
    grad, found = head.backward(call, case.x_ND, labels_N, valid_N1, pairs, np.float32(1))
    case.check_gradients({"x": grad} | found)
    last_A = pairs.last_tokens(valid_N1)
    scores = head.scores(SublayerCall(case.weights, save=False), case.x_ND, last_A)
    margins = scores[::2] - scores[1::2]
    right = [scores[::2].sum(), scores[1::2].sum(), margins.sum(), (margins > 0).sum()]
    np.testing.assert_allclose([pairs.sums[name][0] for name in REWARDS], right, rtol=RUN_NEAR_ZERO)
    assert 0 < pairs.sums["rewards/accuracies"][0] < pairs.count == 4
    evaluated = find_pairs(batch, LossConfig(**loss_of("reward")))
    alone = head.forward(SublayerCall(case.weights, save=False), case.x_ND, labels_N, valid_N1, evaluated)
    case.check_result(alone)
    # A batch of padding has no pairs, and no gradient.
    empty = add_values(padding_batch(len(ROWS), TOKENS), PairBatch)
    nothing = find_pairs(empty, LossConfig(**loss_of("reward")))
    call = SublayerCall(case.weights, save=True, trained=("norm", "weight"))
    assert head.forward(call, case.x_ND, labels_N, np.zeros_like(valid_N1), nothing) == 0
    grad, found = head.backward(call, case.x_ND, labels_N, valid_N1, nothing, np.float32(1))
    assert not any(array.any() for array in (grad, *found.values()))


@pytest.mark.parametrize("kind", PAIRED)
def test_rewards(kind: str) -> None:
    batch = pair_batch(5, ROWS)
    losses_N = np.random.default_rng(6).uniform(0.5, 4, batch.labels.size)
    valid_N1 = valid_of(batch)
    pairs = find_pairs(batch, LossConfig(**loss_of(kind)))
    loss, weights_N1 = pairs.weigh(losses_N, valid_N1)
    answers = answers_of(batch, -losses_N)
    rewards = [trl_rewards(kind, *pair) for pair in zip(answers[::2], answers[1::2], strict=True)]
    first, second = np.array(rewards).T
    right = [first.sum(), second.sum(), (first - second).sum(), (first > second).sum()]
    assert {count for _, count in pairs.sums.values()} == {4}
    np.testing.assert_allclose([pairs.sums[name][0] for name in REWARDS], right, rtol=RUN_NEAR_ZERO)
    np.testing.assert_allclose(loss, trl_losses(kind, batch, -losses_N), rtol=RUN_NEAR_ZERO)
    assert not weights_N1[valid_N1 == 0].any() and weights_N1[valid_N1 > 0].all()
    assert 0 < pairs.sums["rewards/accuracies"][0] < 4


@pytest.mark.parametrize("shift", [0, 30], ids=["kl", "kl below 0"])
def test_rewards_of_labelled_answers(shift: float) -> None:
    batch = pair_batch(5, ROWS)
    batch = batch._replace(reference=batch.reference + shift)
    losses_N = np.random.default_rng(6).uniform(0.5, 4, batch.labels.size)
    valid_N1 = valid_of(batch)
    pairs = find_pairs(batch, LossConfig(**loss_of("kto")))
    loss, weights_N1 = pairs.weigh(losses_N, valid_N1)
    right = trl_kto(answers_of(batch, -losses_N))
    assert (right.kl == 0) == (shift > 0)
    np.testing.assert_allclose(loss, right.losses.sum(), rtol=RUN_NEAR_ZERO)
    assert [pairs.sums[name][1] for name in (CHOSEN, REJECTED)] == [len(right.chosen), len(right.rejected)] == [3, 1]
    for name, rewards in ((CHOSEN, right.chosen), (REJECTED, right.rejected), ("kl", np.full(4, right.kl))):
        np.testing.assert_allclose(pairs.sums[name][0], rewards.sum(), rtol=RUN_NEAR_ZERO)
    z = BETA["kto"] * right.kl
    hits = (right.chosen > z).sum() + (right.rejected < z).sum()
    assert pairs.sums["rewards/accuracies"] == (hits, 4)
    is_answer_N1 = (batch.segment_ids % 2 == 0).reshape(-1, 1) & (valid_N1 > 0)
    assert weights_N1[is_answer_N1].all() and not weights_N1[~is_answer_N1].any()


def test_padding_is_no_pair() -> None:
    batch = pair_batch(1, ROWS)
    empty = add_values(padding_batch(2, TOKENS), PairBatch)._replace(reference=np.zeros((2, 4)))
    padded = concatenate(batch, empty)
    assert count_pairs(batch) == count_pairs(padded) == 4
    assert count_pairs(padding_batch(2, TOKENS)) == 0
    for kind in ("dpo", "kto"):
        pairs = find_pairs(empty, LossConfig(type=kind))
        loss, weights_N1 = pairs.weigh(np.ones(2 * TOKENS), np.zeros((2 * TOKENS, 1), np.float32))
        assert loss == 0 and not weights_N1.any() and set(pairs.sums.values()) == {(0.0, 0)}


def test_an_unknown_reference_is_no_reference_of_zero() -> None:
    with pytest.raises(ValueError, match="log-probabilities before the training"):
        find_pairs(add_values(padding_batch(1, TOKENS), PairBatch), LossConfig())
    assert find_pairs(padding_batch(1, TOKENS), LossConfig(type="simpo")).count == 0


def open_step(kind: str) -> TrainStep:
    config = config_of(loss=loss_of(kind), optimizer={"eps": 1e-5}, seed=5)
    return open_training(config, lambda update: 0.01)


def numbers_of(results: list[StepResult]) -> list[list[float]]:
    return [[one.loss, one.global_norm, *one.losses.values()] for one in results]


@pytest.mark.parametrize("kind", [*TYPES, "reward"])
def test_micro_batches_equal_one_batch(kind: str) -> None:
    """Micro-batches have unequal numbers of pairs and of tokens: means of means would differ."""
    rows = [pair_batch(number, [lengths]) for number, lengths in enumerate(((2, 3, 4, 3), (6, 4), (3, 2)))]
    wide = [one._replace(reference=np.resize(one.reference, (1, 4))) for one in rows]
    whole = concatenate(concatenate(wide[0], wide[1]), wide[2])
    together, apart = open_step(kind), open_step(kind)
    one = numbers_of([together([whole]) for _ in range(3)])
    parts = numbers_of([apart(wide) for _ in range(3)])
    np.testing.assert_allclose(parts, one, rtol=RUN_NORMS, atol=RUN_NEAR_ZERO)
    means = np.mean([open_step(kind)([each]).loss for each in wide])
    assert abs(means - one[0][0]) > RUN_LOSSES
    evaluated = [
        evaluate(apart.model, apart.build_inputs, batches, lambda: False, loss=LossConfig(**loss_of(kind)))
        for batches in (wide, [whole])
    ]
    first, second = [[each.loss, each.accuracy, each.margin] for each in evaluated]
    np.testing.assert_allclose(first, second, rtol=RUN_NORMS)
    assert abs(first[0] - apart([whole]).loss) < RUN_NORMS * abs(first[0])


def test_a_step_without_undesirable_answers_has_no_reward_of_them() -> None:
    batch = pair_batch(1, [(3, 4)])
    for value, name in ((1, CHOSEN), (0, REJECTED)):
        found = open_step("kto")([batch._replace(values=np.full_like(batch.values, value))]).losses
        assert found.keys() == {name, "rewards/accuracies", "kl"}


def long_batch() -> PairBatch:
    """Returns two rows of 256 tokens: pairs of 100 and 60, and of 70 and 90 tokens, then a row of padding."""
    batch = pair_batch(2, [(3, 4), (2, 3)])
    lengths = np.array([[100, 60], [70, 90]])
    places_BT = np.broadcast_to(np.arange(256), (2, 256))
    ends_BD = lengths.cumsum(1)
    segments_BT = (places_BT[:, :, None] >= ends_BD[:, None]).sum(2).astype(np.int32)
    starts_BD = np.concatenate([np.zeros((2, 1), int), ends_BD], axis=1)
    positions_BT = (places_BT - np.take_along_axis(starts_BD, segments_BT, 1)).astype(np.int32)
    ids_BT = np.random.default_rng(1).integers(0, VOCABULARY, (2, 256), dtype=np.int32)
    labels_BT = np.where((positions_BT > 40) & (segments_BT < 2), np.roll(ids_BT, -1, 1), IGNORE_INDEX)
    values_BT = np.where(segments_BT < 2, np.array([[1.0], [0.0]]), 0).astype(np.float32)
    long = PairBatch(ids_BT, labels_BT.astype(np.int32), positions_BT, segments_BT, values_BT, batch.reference[:, :2])
    empty = add_values(padding_batch(1, 256), PairBatch)._replace(reference=np.zeros((1, 2)))
    return concatenate(long, empty)


@pytest.mark.parametrize("place", [0, 1])
def test_one_document_of_each_pair(place: int) -> None:
    batch = long_batch()
    selected = select_documents(batch, place)
    assert selected.labels.shape == (3, 128)  # the longer one has 100 or 90 tokens
    for row, length in enumerate(((100, 70), (60, 90))[place]):
        is_document_T = batch.segment_ids[row] == place
        for one, whole in zip(selected[:-1], batch[:-1], strict=True):
            np.testing.assert_array_equal(one[row, :length], whole[row, is_document_T])
        assert (selected.segment_ids[row, length:] == 3).all()
    for rest in (selected.labels[2], selected.labels[0, 100:]):
        assert (rest == IGNORE_INDEX).all()
    assert selected.labels.dtype == np.int32 and selected.labels.flags.c_contiguous
    assert count_pairs(selected) == count_pairs(batch) == 2


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_of_labelled_answers_computes_each_document_once(parts: int) -> None:
    """Both passes together have no more tokens than the batch, and loss and divergence are those of a whole batch."""
    batch = long_batch()
    config = config_of(loss=loss_of("kto"), optimizer={"eps": 1e-5}, seed=5, model={"seq_length": 256})
    step = open_training(config, lambda update: 0.01)
    evaluated = evaluate(step.model, step.build_inputs, [batch], lambda: False, loss=LossConfig(**loss_of("kto")))
    computed = []
    build = step.build_inputs
    step.build_inputs = lambda one: computed.append(one.labels.size) or build(one)
    batches = [batch] if parts == 1 else [PairBatch(*(array[row : row + 1] for array in batch)) for row in range(3)]
    result = step(batches)
    assert abs(result.loss - evaluated.loss) <= RUN_NORMS * evaluated.loss
    assert 0 < sum(computed) <= batch.labels.size
    assert result.tokens == np.count_nonzero((batch.labels != IGNORE_INDEX) & (batch.segment_ids == 0))
