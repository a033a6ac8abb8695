"""The optimizer step: accumulation, norm, clipping, schedule, bad losses; bugs that trainers are known for.

Limits: the same sums in another order (tolerances.py). A window normalised per micro-batch is off by 1e-1.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Tensor
from numpy_kernels import assert_close, assert_same_bits, distance
from tiny_trainer import (
    RARE_TOKEN,
    TinyTrainer,
    config_of,
    garbage_of,
    join,
    loss_and_gradients,
    make_batch,
    shared_trainer,
    state_of,
)
from tolerances import decoder_limits, rounding_limit

from trainer.data import Batch
from trainer.data.batches.batch import WeightedBatch
from trainer.errors import RunError
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD
from trainer.optim.schedules import build_schedule
from trainer.parallel.communicator import Communicator
from trainer.parallel.gradients import GradientReducer
from trainer.step.accumulate import StepGradients, accumulate
from trainer.step.evaluate import evaluate, perplexity

LIMITS = decoder_limits(config_of().decoder, rows=4)
VALID_COUNTS = (12, 3, 0, 7)  # of the four micro-batches of a window
SGD = {"type": "SGD"}
ADAMW = {"type": "AdamW", "weight_decay": 0.1}


def clip(max_norm: float) -> dict:
    return {"use_clip_grad": True, "max_grad_norm": max_norm}


def norm_of(gradients: Sequence[Tensor | np.ndarray]) -> float:
    """Returns the norm in float64."""
    arrays = [value.asnumpy() if isinstance(value, Tensor) else value for value in gradients]
    return math.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in arrays))


def assert_same_window(ours: StepGradients, right: StepGradients) -> None:
    assert ours.tokens == right.tokens
    assert ours.loss == pytest.approx(right.loss, rel=LIMITS.loss)
    assert norm_of(ours.gradients) == pytest.approx(norm_of(right.gradients), rel=LIMITS.gradients)
    assert_close(ours.gradients, right.gradients, LIMITS.gradients)


@pytest.mark.parametrize("length", [4, 3, 2, 1])
def test_a_window_of_unequal_micro_batches_is_one_large_batch(
    tiny: TinyTrainer, window: list[Batch], length: int
) -> None:
    """Checks that the loss is divided by the loss tokens of the step, and not micro-batch by micro-batch.

    The counts of loss tokens are 12, 3, 0 and 7; windows have four micro-batches or fewer."""
    step = tiny.step()
    parts = accumulate(window[:length], step.backward)
    assert parts.tokens == sum(VALID_COUNTS[:length])
    assert_same_window(parts, accumulate([join(window[:length], 4)], step.backward))


def test_a_mutation_of_one_gradient_or_of_the_loss_by_1e_5_is_found(tiny: TinyTrainer, window: list[Batch]) -> None:
    """One result after the other is made larger by a hundred-thousandth: the comparison above has to fail."""
    step, mutation = tiny.step(), 1 + 1e-5
    parts, whole = accumulate(window, step.backward), accumulate([join(window, 4)], step.backward)
    assert_same_window(parts, whole)
    mutants = [replace(parts, loss=parts.loss * mutation)]
    for place, gradient in enumerate(parts.gradients):
        scaled = Tensor(gradient.asnumpy() * np.float32(mutation))
        mutants.append(replace(parts, gradients=[*parts.gradients[:place], scaled, *parts.gradients[place + 1 :]]))
    for mutant in mutants:
        with pytest.raises(AssertionError):
            assert_same_window(mutant, whole)


class KeepsTensors(Communicator):
    """Keeps sums as tensors, as a device with several ranks does."""

    def all_reduce(self, values: Sequence[object]) -> list[Tensor]:
        return [each if isinstance(each, Tensor) else Tensor(np.asarray(each, np.float32)) for each in values]


def test_a_count_of_tokens_that_stays_on_the_device_gives_the_same_bits(tiny: TinyTrainer, window: list[Batch]) -> None:
    step = tiny.step()
    ours, right = (accumulate(window, step.backward, 1024.0, each) for each in (KeepsTensors(), None))
    assert (ours.tokens, ours.empty) == (right.tokens, right.empty) == (22, 1)
    assert ours.loss == pytest.approx(right.loss, rel=LIMITS.loss)
    assert_same_bits(ours.gradients, right.gradients)
    nothing = accumulate([window[2]] * 2, step.backward, 1024.0, KeepsTensors())
    assert (nothing.tokens, nothing.empty, nothing.gradients) == (0, 2, None)


def test_the_micro_batches_above_tell_the_two_ways_of_dividing_apart(tiny: TinyTrainer, window: list[Batch]) -> None:
    step = tiny.step()
    whole = accumulate(window, step.backward)
    parts = [accumulate([batch], step.backward) for batch in window if batch is not window[2]]
    means = [sum(g.asnumpy() for g in each) / len(parts) for each in zip(*(p.gradients for p in parts), strict=True)]
    assert max(distance(a, b.asnumpy()) for a, b in zip(means, whole.gradients, strict=True)) > 0.1


def test_the_whole_step_is_that_of_one_large_batch(tiny: TinyTrainer, window: list[Batch]) -> None:
    step = tiny.step(optimizer=SGD, runner_wrapper=clip(0.5))
    parts, weights = step(window), tiny.weights()
    step = tiny.step(optimizer=SGD, runner_wrapper=clip(0.5))
    whole = step([join(window, 4)])
    assert (parts.tokens, parts.lr, parts.updated) == (whole.tokens, whole.lr, whole.updated) == (22, 0.1, True)
    assert parts.loss == pytest.approx(whole.loss, rel=LIMITS.loss)
    assert parts.global_norm == pytest.approx(whole.global_norm, rel=LIMITS.gradients)
    assert_close(weights, tiny.weights(), LIMITS.gradients)


def test_a_micro_batch_without_a_valid_token_is_skipped_and_keeps_its_number(
    tiny: TinyTrainer, window: list[Batch]
) -> None:
    """Its number names dropout masks: those of the other micro-batches do not depend on it."""
    step, numbers = tiny.step(), []

    def backward(batch: Batch, number: int, factor: float):
        numbers.append(number)
        return step.backward(batch, number, factor)

    with_empty = accumulate(window, backward)
    assert numbers == [0, 1, 3]
    without = accumulate([window[0], window[1], window[3]], step.backward)
    assert with_empty.loss == without.loss
    assert_same_bits(with_empty.gradients, without.gradients)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD | {"weight_decay": 0.1}], ids=["AdamW", "SGD"])
def test_a_window_without_a_valid_token_changes_nothing(
    tiny: TinyTrainer, window: list[Batch], optimizer: dict
) -> None:
    step = tiny.step(schedule=lambda update: 0.1 / (1 + update), optimizer=optimizer)
    step(window)
    before = state_of(step.optimizer, tiny)
    result = step([window[2], window[2]])
    assert (result.updated, result.tokens, result.loss, result.global_norm, result.lr) == (False, 0, 0.0, 0.0, 0.05)
    assert_same_bits(state_of(step.optimizer, tiny), before)
    assert step(window).lr == 0.05  # its place in the schedule was not used up


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_clipping_below_the_threshold_changes_no_bit(tiny: TinyTrainer, window: list[Batch], optimizer: dict) -> None:
    plain = tiny.step(optimizer=optimizer)
    norm = plain([window[0]]).global_norm
    unclipped = state_of(plain.optimizer, tiny)
    for max_norm in (norm, norm * 1.0001, 1e9):  # at the threshold, just above, far above
        clipped = tiny.step(optimizer=optimizer, runner_wrapper=clip(max_norm))
        assert clipped([window[0]]).global_norm == norm
        assert_same_bits(state_of(clipped.optimizer, tiny), unclipped)


@pytest.mark.parametrize("factor", [0.999, 0.5, 1e-3])
def test_the_applied_gradient_has_the_largest_norm_allowed(
    tiny: TinyTrainer, window: list[Batch], factor: float
) -> None:
    """SGD without momentum and decay keeps the gradient that it applied in its buffer."""
    plain = tiny.step(optimizer=SGD)
    norm = plain(window).global_norm
    clipped = tiny.step(optimizer=SGD, runner_wrapper=clip(norm * factor))
    assert clipped(window).global_norm == norm  # what is reported is the norm before clipping
    applied, unclipped = clipped.optimizer.state_arrays(), plain.optimizer.state_arrays()
    assert norm_of(list(applied.values())) == pytest.approx(norm * factor, rel=rounding_limit(4))
    for name, value in unclipped.items():  # all by the same factor: the direction stays
        np.testing.assert_allclose(applied[name], value * factor, rtol=rounding_limit(4), atol=0)


def test_the_norm_is_that_of_the_whole_gradient(tiny: TinyTrainer, window: list[Batch]) -> None:
    """Compares the reported norm with the one norm of all parameters together, from the updates of plain SGD."""
    step = tiny.step(optimizer=SGD)
    norm = step(window).global_norm
    applied = step.optimizer.state_arrays()
    assert len(applied) == len(tiny.initial)
    limit = rounding_limit(16 * 24, scale=0.5)  # the largest matrix; a root halves the relative error
    assert norm == pytest.approx(norm_of(list(applied.values())), rel=limit)


@pytest.mark.parametrize("optimizer", [ADAMW | {"weight_decay": 0.0}, SGD], ids=["AdamW", "SGD"])
def test_a_gradient_of_zero_is_no_nan(tiny: TinyTrainer, window: list[Batch], optimizer: dict) -> None:
    """Sets final norm and head to zero: gradients and their norm are 0, and the loss is log(V)."""
    step = tiny.step(optimizer=optimizer, runner_wrapper=clip(1.0))
    for name in (FINAL_NORM, HEAD):
        tiny.set_weight(name, np.zeros_like(tiny.initial[name]))
    before = tiny.weights()
    result = step(window)
    assert (result.global_norm, result.updated) == (0.0, True)
    vocabulary = len(tiny.initial[HEAD])
    assert result.loss == pytest.approx(math.log(vocabulary), rel=rounding_limit(vocabulary, 4))
    assert_same_bits(tiny.weights(), before)


def test_learning_rates_do_not_depend_on_accumulation(tiny: TinyTrainer, window: list[Batch]) -> None:
    """Checks that the schedule advances once a step, and not once a micro-batch."""
    section = {"type": "CosineWithWarmUpLR", "learning_rate": 0.01, "warmup_steps": 2}
    schedule = build_schedule(config_of(lr_schedule=section).lr_schedule, 5)
    rates = {}
    for micro_batches in (1, 4):
        step = tiny.step(schedule, optimizer=ADAMW)
        rates[micro_batches] = [step(window[:micro_batches]).lr for _ in range(5)]
        assert step.optimizer.updates == 5
    assert rates[1] == rates[4] == [schedule(update) for update in range(5)]
    assert len(set(rates[1])) == 5


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_loss_that_is_not_finite_stops_before_the_update(
    tiny: TinyTrainer, window: list[Batch], value: float
) -> None:
    """The bad token is in the last micro-batch only: the healthy ones before it must not be applied either."""
    step = tiny.step(optimizer=ADAMW, runner_wrapper=clip(1.0))
    step([window[0]])
    embedding = tiny.initial[EMBEDDING].copy()
    embedding[RARE_TOKEN] = value
    tiny.set_weight(EMBEDDING, embedding)
    before = state_of(step.optimizer, tiny)
    assert math.isfinite(accumulate(window, step.backward).loss)
    last = window[3]._replace(input_ids=np.full_like(window[3].input_ids, RARE_TOKEN))
    with pytest.raises(RunError, match=r"optimizer step 2: the loss is nan .*weights were not updated") as error:
        step([*window[:3], last])
    assert error.value.fix == "lower the learning rate or lengthen the warm-up"  # it clips already
    assert_same_bits(state_of(step.optimizer, tiny), before)


def test_a_norm_that_is_not_finite_stops_before_the_update_and_names_the_weight(
    tiny: TinyTrainer, window: list[Batch]
) -> None:
    """A final norm of 1e25 leaves the loss finite; the squares of the head's gradients are beyond float32."""
    step = tiny.step(optimizer=ADAMW)
    tiny.set_weight(FINAL_NORM, np.full_like(tiny.initial[FINAL_NORM], 1e25))
    before = state_of(step.optimizer, tiny)
    message = rf"optimizer step 1: .* norm inf; first non-finite gradient: {EMBEDDING};"
    with pytest.raises(RunError, match=message) as error:
        step(window)
    assert "or turn on runner_wrapper.use_clip_grad" in error.value.fix
    assert math.isfinite(accumulate(window, step.backward).loss)
    assert_same_bits(state_of(step.optimizer, tiny), before)


def test_training_lowers_the_loss(tiny: TinyTrainer, window: list[Batch]) -> None:
    """Checks that the layers see the updated weights: a stale copy would keep the loss where it was."""
    step = tiny.step(optimizer=ADAMW, schedule=lambda update: 0.01)
    losses = [step(window).loss for _ in range(15)]
    assert losses[-1] < 0.2 * losses[0]
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False))


def test_a_step_leaves_no_garbage(tiny: TinyTrainer, window: list[Batch]) -> None:
    """Reference cycles would hold the activations of every micro-batch until Python's collector comes by."""
    step = tiny.step()
    assert garbage_of(step, window) == 0


def test_gradients_of_earlier_micro_batches_are_let_go(tiny: TinyTrainer, window: list[Batch]) -> None:
    """When a backward pass starts, no gradient of an earlier one is alive: their sum has other memory."""
    step, sets, alive = tiny.step(), [], []

    def backward(batch: Batch, number: int, factor: float):
        alive.append(sum(any(reference() is not None for reference in references) for references in sets))
        part = step.backward(batch, number, factor)
        sets.append([weakref.ref(gradient) for gradient in part.gradients])
        return part

    result = accumulate([window[0]] * 6, backward)
    assert len(result.gradients) == len(tiny.initial)
    assert alive == [0] * 6


def test_gradients_are_added_up_in_place(tiny: TinyTrainer, window: list[Batch]) -> None:
    """A sum in memory of its own: a third set of gradients, or one between the activations of the next micro-batch."""
    step = tiny.step()
    reducer = GradientReducer()
    places = []
    total = None
    for number in range(3):
        _, total = reducer.add(total, partial(step.backward, window[0], number, 1.0))
        places.append([gradient.asnumpy().__array_interface__["data"][0] for gradient in total])
    assert places[0] == places[1] == places[2] and len(places[0]) == len(tiny.initial)


def test_ranks_sum_their_gradients_beside_one_set_of_them(tiny: TinyTrainer, window: list[Batch]) -> None:
    """The gradients of the last micro-batch are let go before the sums over the ranks are made."""
    step, last, alive = tiny.step(), [], []

    def backward(batch: Batch, number: int, factor: float):
        part = step.backward(batch, number, factor)
        last[:] = [weakref.ref(gradient) for gradient in part.gradients]
        return part

    def all_reduce_into(array: np.ndarray, out: np.ndarray) -> None:
        alive.append(sum(reference() is not None for reference in last))

    group = SimpleNamespace(on_host=True, rank=0, size=2, all_reduce_into=all_reduce_into)
    groups = [{"dp_cp": group}] * len(tiny.initial)
    accumulate(window[:2], backward, reducer=GradientReducer([None] * len(groups), [False] * len(groups), groups))
    assert alive and not any(alive)


def test_evaluation_is_the_mean_over_all_valid_tokens(tiny: TinyTrainer, window: list[Batch]) -> None:
    step = tiny.step()
    right = accumulate(window, step.backward)
    loss, tokens, seconds, *others = evaluate(tiny.model, tiny.build_inputs, window, stop=lambda: False)
    assert others == [None] * 3  # of images, of pairs of answers, of a teacher
    assert tokens == right.tokens == 22
    assert loss == pytest.approx(right.loss, rel=LIMITS.loss)
    assert seconds > 0
    assert perplexity(loss) == pytest.approx(math.exp(loss)) and perplexity(1e4) == math.inf


def test_evaluation_can_be_stopped_and_refuses_data_without_loss(tiny: TinyTrainer, window: list[Batch]) -> None:
    asked = []
    assert evaluate(tiny.model, tiny.build_inputs, window, stop=lambda: asked.append(1) or len(asked) == 3) is None
    assert len(asked) == 3
    assert evaluate(tiny.model, tiny.build_inputs, window, stop=lambda: False).tokens == sum(VALID_COUNTS)
    with pytest.raises(RunError, match="every label is masked") as error:
        evaluate(tiny.model, tiny.build_inputs, [window[2]], stop=lambda: False)
    assert error.value.key == "eval_dataset" and error.value.fix


def test_what_is_saved_says_that_later_steps_change_it(tiny: TinyTrainer, window: list[Batch]) -> None:
    """The copies of a save beside the training rely on it."""
    step = tiny.step(optimizer=ADAMW)
    step(window[:1])
    saved = step.state_dict_shard()
    weights, state = ({name: piece.array.copy() for name, piece in each.items()}
                      for each in (saved.weights, saved.optimizer))  # fmt: skip
    step(window[:1])
    assert any(not np.array_equal(piece.array, weights[name]) for name, piece in saved.weights.items())
    assert any(not np.array_equal(piece.array, state[key]) for key, piece in saved.optimizer.items())
    assert saved.shares_memory


WEIGHT_OF = {"train_dataset": {"data_loader": {"type": "JsonlDataset", "columns": {"weight": "weight"}}}}


def test_weights_of_records_make_the_loss_a_weighted_mean() -> None:
    """Loss and gradients are sums over loss tokens of weight x loss / sum of weights, also over micro-batches."""
    trainer = shared_trainer()
    batches, weights = [make_batch(1, 9), make_batch(2, 5), make_batch(3, 7)], (0.5, 3.0, 0.0)
    parts = []
    for batch in batches:
        step = trainer.step()
        loss_sum, gradients = loss_and_gradients(step, batch)
        parts.append((loss_sum, {name: gradient.copy() for name, gradient in gradients.items()}))
    counts = [9, 5, 7]
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    loss = sum(weight * one for weight, (one, _) in zip(weights, parts, strict=True)) / total
    weighted = [
        WeightedBatch(*batch, np.full(batch.labels.shape, weight, np.float32))
        for batch, weight in zip(batches, weights, strict=True)
    ]
    joined = WeightedBatch(*join(batches, 3), np.concatenate([each.values for each in weighted]))
    for micro_batches in (weighted, [joined]):
        step = trainer.step(optimizer={"type": "SGD", "momentum": 0.5}, **WEIGHT_OF)
        result = step(micro_batches)
        assert result.loss == pytest.approx(loss, rel=LIMITS.loss) and result.tokens == sum(counts)
        right = {name: sum(weight * grads[name] for weight, (_, grads) in zip(weights, parts, strict=True)) / total
                 for name in step.optimizer.parameters}  # fmt: skip
        assert_close(step.optimizer.state["momentum_buffer"], right, LIMITS.gradients)  # after one step: the gradient


def test_one_weight_for_all_records_changes_no_mean() -> None:
    """Nor where the weights of a step sum to less than 1: a power of 2 scales all sums without rounding."""
    trainer = shared_trainer(label_smoothing=0.2, z_loss_weight=0.01)
    batch = make_batch(1, 9)
    light = WeightedBatch(*batch, np.full(batch.labels.shape, 2.0**-7, np.float32))
    right = trainer.step()([batch])
    ours = trainer.step(**WEIGHT_OF)([light])
    assert len(right.losses) == 2
    assert (ours.loss, ours.losses, ours.tokens) == (right.loss, right.losses, right.tokens)
    assert ours.global_norm == pytest.approx(right.global_norm, rel=LIMITS.gradients)
