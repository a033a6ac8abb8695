"""Loss scaling, skipped steps and norm spikes in the real step.

A power of two as loss scale changes no digit of a float32 gradient, so results are compared bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy_kernels import assert_close, assert_same_bits
from tiny_trainer import NATIVE, RARE_TOKEN, TinyTrainer, config_of, make_batch, make_window, shared_trainer, state_of
from tolerances import GRADIENTS_FLOAT16, decoder_limits, rounding_limit

from trainer.data import Batch
from trainer.errors import RunError
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD
from trainer.step.guards import MOST_OVERFLOWS_IN_A_ROW
from trainer.step.train_step import TrainStep

ADAMW = {"type": "AdamW", "weight_decay": 0.1}
SGD = {"type": "SGD"}
DYNAMIC = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 1024, "scale_factor": 2, "scale_window": 3}
LIMITS = decoder_limits(config_of().decoder, rows=4)


@pytest.fixture(scope="module")
def window() -> list[Batch]:
    return make_window(12, 3, 5, 7)


def poisoned(window: list[Batch], place: int) -> list[Batch]:
    """Returns the window with a micro-batch of the token whose embedding a test makes infinite."""
    bad = window[place]._replace(input_ids=np.full_like(window[place].input_ids, RARE_TOKEN))
    return [*window[:place], bad, *window[place + 1 :]]


def poison(tiny: TinyTrainer) -> None:
    embedding = tiny.initial[EMBEDDING].copy()
    embedding[RARE_TOKEN] = np.inf
    tiny.set_weight(EMBEDDING, embedding)


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [(ADAMW, {}), (SGD, {"use_clip_grad": True, "max_grad_norm": 0.1})],
    ids=["AdamW", "SGD, clipped"],
)
def test_results_do_not_depend_on_the_loss_scale(
    tiny: TinyTrainer, window: list[Batch], optimizer: dict, clip: dict
) -> None:
    """Checks that gradients are unscaled before they are clipped; the other order leaves almost nothing."""
    window = window[:2]
    plain = tiny.step(optimizer=optimizer, runner_wrapper=clip)
    right = [plain(window), plain(window)]
    weights = state_of(plain.optimizer, tiny)
    for sense in (65536, 2.0**-10, DYNAMIC):
        step = tiny.step(optimizer=optimizer, runner_wrapper=clip | {"scale_sense": sense})
        results = [step(window), step(window)]
        assert [(r.loss, r.global_norm, r.lr) for r in results] == [(r.loss, r.global_norm, r.lr) for r in right]
        assert results[0].loss_scale == (1024 if sense is DYNAMIC else sense)
        assert_same_bits(state_of(step.optimizer, tiny), weights)


def test_a_scale_that_is_no_power_of_two_only_rounds(tiny: TinyTrainer, window: list[Batch]) -> None:
    plain = tiny.step(optimizer=SGD)
    norm, right = plain(window).global_norm, tiny.weights()
    step = tiny.step(optimizer=SGD, runner_wrapper={"scale_sense": 1000.0})
    assert step(window).global_norm == pytest.approx(norm, rel=LIMITS.gradients)
    assert_close(tiny.weights(), right, LIMITS.gradients)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_overflow_in_one_micro_batch_skips_the_update_once(
    tiny: TinyTrainer, window: list[Batch], place: int
) -> None:
    """Checks that one update is left out and the scale falls once, and that all else stays as before the step."""
    step = tiny.step(schedule=lambda n: 0.1 / (1 + n), optimizer=ADAMW, runner_wrapper={"scale_sense": DYNAMIC})
    step(window)
    poison(tiny)
    before = state_of(step.optimizer, tiny)
    result = step(poisoned(window, place))
    assert (result.updated, result.overflow, result.skipped) == (False, True, "overflow")
    assert (result.loss_scale, result.lr) == (1024, 0.05)
    assert (step.guards.loss_scale.value, step.guards.loss_scale.overflows) == (512, 1)
    assert_same_bits(state_of(step.optimizer, tiny), before)
    following = step(window)  # nothing of the bad window is left in an accumulator
    assert (following.updated, following.loss_scale, following.lr) == (True, 512, 0.05)
    assert math.isfinite(following.global_norm)


def test_a_scale_too_large_falls_until_the_gradient_fits(tiny: TinyTrainer, window: list[Batch]) -> None:
    """Starts with a scale of 2^126, which overflows float32 without bad data."""
    sense = DYNAMIC | {"loss_scale_value": 2.0**126, "scale_factor": 2**20}
    plain = tiny.step(optimizer=SGD)
    norm, right = plain(window).global_norm, tiny.weights()
    step, results = tiny.step(optimizer=SGD, runner_wrapper={"scale_sense": sense}), []
    while not (results and results[-1].updated):
        results.append(step(window))
    assert 1 < len(results) < 7 and all(result.overflow for result in results[:-1])
    assert results[-1].global_norm == norm
    assert_same_bits(tiny.weights(), right)


def test_overflows_without_end_stop_the_training(tiny: TinyTrainer, window: list[Batch]) -> None:
    step = tiny.step(optimizer=ADAMW, runner_wrapper={"scale_sense": DYNAMIC})
    poison(tiny)
    bad = poisoned(window[:1], 0)
    results = [step(bad) for _ in range(MOST_OVERFLOWS_IN_A_ROW - 1)]
    assert all(result.overflow for result in results)
    message = r"overflowed in 10 consecutive steps \(loss scale 2\); first non-finite gradient"
    with pytest.raises(RunError, match=message) as error:
        step(bad)
    assert error.value.key == "runner_wrapper.scale_sense" and error.value.fix


def test_nine_overflows_and_a_good_step_begin_the_count_anew(tiny: TinyTrainer, window: list[Batch]) -> None:
    step = tiny.step(optimizer=ADAMW, runner_wrapper={"scale_sense": 256})
    poison(tiny)
    bad = poisoned(window[:1], 0)
    for _ in range(2):
        assert all(step(bad).overflow for _ in range(MOST_OVERFLOWS_IN_A_ROW - 1))
        assert step(window[1:2]).updated
    assert step.guards.loss_scale.overflows == 18


def test_a_bad_loss_stops_at_once_when_asked_to(tiny: TinyTrainer, window: list[Batch]) -> None:
    settings = {"runner_wrapper": {"scale_sense": DYNAMIC}, "check_for_nan_in_loss_and_grad": True}
    step = tiny.step(optimizer=ADAMW, **settings)
    poison(tiny)
    before = state_of(step.optimizer, tiny)
    with pytest.raises(RunError, match="the loss is (nan|inf)"):
        step(poisoned(window, 1))
    assert_same_bits(state_of(step.optimizer, tiny), before)


def test_the_scale_goes_on_where_it_was(tiny: TinyTrainer, window: list[Batch]) -> None:
    """Six steps are three, a checkpoint's state, and three: the scale doubles after the third and the sixth."""
    window = window[:1]
    whole = tiny.step(optimizer=ADAMW, runner_wrapper={"scale_sense": DYNAMIC})
    scales = [whole(window).loss_scale for _ in range(7)]
    assert scales == [1024] * 3 + [2048] * 3 + [4096]
    first = tiny.step(optimizer=ADAMW, runner_wrapper={"scale_sense": DYNAMIC})
    for _ in range(4):
        first(window)
    second = tiny.step(optimizer=ADAMW, runner_wrapper={"scale_sense": DYNAMIC})
    second.load_state(first.state())
    assert [second(window).loss_scale for _ in range(3)] == scales[4:]


def test_a_spike_is_skipped_and_counted(tiny: TinyTrainer, window: list[Batch]) -> None:
    plain = tiny.step(optimizer=ADAMW)
    small, large = plain([window[0]]).global_norm, plain([window[1]]).global_norm
    threshold = (small + large) / 2
    quiet, spike = (window[0], window[1]) if small < large else (window[1], window[0])
    settings = {"use_skip_data_by_global_norm": True, "global_norm_spike_threshold": threshold}
    step = tiny.step(optimizer=ADAMW, runner_wrapper=settings | {"global_norm_spike_count_threshold": 2})
    before = state_of(step.optimizer, tiny)
    result = step([spike])
    assert not result.updated and not result.overflow and result.global_norm > threshold
    assert "spike" in result.skipped and step.guards.spikes == 1
    assert_same_bits(state_of(step.optimizer, tiny), before)
    assert step([quiet]).updated and step.guards.spikes_in_a_row == 0
    off = tiny.step(optimizer=ADAMW, runner_wrapper={"global_norm_spike_threshold": threshold})
    assert off([spike]).updated  # the threshold alone skips nothing


def test_spikes_in_a_row_stop_the_training(tiny: TinyTrainer, window: list[Batch]) -> None:
    settings = {"use_skip_data_by_global_norm": True, "global_norm_spike_threshold": 1e-6}
    step = tiny.step(optimizer=ADAMW, runner_wrapper=settings | {"global_norm_spike_count_threshold": 3})
    assert not step(window).updated and not step(window).updated
    with pytest.raises(RunError, match="exceeded 1e-06 in 3 consecutive steps") as error:
        step(window)
    assert error.value.fix


def test_local_norms_are_those_of_the_unscaled_gradient(tiny: TinyTrainer, window: list[Batch]) -> None:
    step = tiny.step(optimizer=SGD, runner_wrapper={"local_norm": True, "scale_sense": 4096})
    result = step(window)
    applied = step.optimizer.state_arrays()  # SGD's buffer after one step is the gradient
    for name in (EMBEDDING, HEAD):
        gradient = applied[f"momentum_buffer.{name}"]
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        assert result.local_norms[name] == pytest.approx(norm, rel=rounding_limit(gradient.size, scale=0.5))
    assert math.sqrt(sum(norm**2 for norm in result.local_norms.values())) == pytest.approx(result.global_norm)
    assert set(result.local_norms) == set(tiny.initial)
    assert tiny.step(optimizer=SGD)(window).local_norms is None
    some = tiny.step(optimizer=SGD, runner_wrapper={"local_norm": ["word_embed", "lm_head.*"], "scale_sense": 4096})
    assert some(window).local_norms == {name: result.local_norms[name] for name in (EMBEDDING, HEAD)}


def test_empty_micro_batches_are_counted(tiny: TinyTrainer, window: list[Batch]) -> None:
    empty = make_batch(9, 0)
    step = tiny.step(optimizer=SGD)
    assert step([window[0], empty, empty]).empty_micro_batches == 2
    assert step([empty]).empty_micro_batches == 1
    assert step(window).empty_micro_batches == 0


def float16_training(native: bool, scale_sense: float) -> TrainStep:
    """Returns a step from the initial weights; a later call resets the weights of an earlier one."""
    trainer = shared_trainer(native, compute_dtype="float16")
    return trainer.step(lambda update: 0.03, optimizer=TINY_EPS, runner_wrapper={"scale_sense": scale_sense})


TINY_EPS = {"type": "AdamW", "eps": 1e-12}  # far below these gradients


@NATIVE
def test_what_float16_cannot_learn_it_learns_with_a_loss_scale(
    native: bool, tiny: TinyTrainer, window: list[Batch]
) -> None:
    """2^-24 stands for a window of 16 million times more tokens, by whose number every gradient is divided: below
    6e-8 nothing is left of it in float16. A loss scale of 65536 brings it back."""
    large_window, window = 2.0**-24, window[:1]
    before = shared_trainer(native, compute_dtype="float16").initial
    found = []
    for scale, steps in ((large_window, 3), (large_window * 65536, 6)):
        step = float16_training(native, scale)
        losses = [step(window) for _ in range(steps)]
        after = shared_trainer(native, compute_dtype="float16").weights()
        found.append((losses, {name for name in before if not np.array_equal(after[name], before[name])}))
    (without, moved), (with_scale, all_moved) = found
    assert with_scale[0].loss == without[0].loss
    assert with_scale[-1].loss < 0.2 * with_scale[0].loss
    assert all_moved == before.keys()
    if native:  # between products all is float32, in the head and in the residual stream down to the embedding
        assert moved == {EMBEDDING, FINAL_NORM, HEAD}
        assert without[-1].loss > 0.5 * without[0].loss
    else:
        assert not moved
        assert without[-1].loss > 0.9 * without[0].loss
    full = tiny.step(optimizer=TINY_EPS)
    norms = [step(window).global_norm for step in (full, float16_training(native, 1024.0))]
    assert norms[1] == pytest.approx(norms[0], rel=GRADIENTS_FLOAT16)
    assert with_scale[0].global_norm == pytest.approx(norms[0], rel=GRADIENTS_FLOAT16)
