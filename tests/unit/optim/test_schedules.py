"""Every learning rate schedule against formulas in NumPy, and against the examples of MindSpore Transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from tolerances import BETWEEN_STEPS, FLOAT64, PRINTED, SCHEDULE, SCHEDULE_NEAR_ZERO

from trainer.config.schema.optimizer import LrSchedule
from trainer.errors import UserError
from trainer.optim.schedules import build_schedule, warmup_steps

LR, INIT, END, WARM, TOTAL = 3e-3, 1e-4, 2e-4, 10, 60
STEPS = np.arange(0, TOTAL + 30)

WARM_UP = {"learning_rate": LR, "warmup_lr_init": INIT, "warmup_steps": WARM, "warmup_ratio": None, "total_steps": -1}
OWN = {
    "ConstantWarmUpLR": {},
    "LinearWithWarmUpLR": {},
    "CosineWithWarmUpLR": {"num_cycles": 0.5, "lr_end": END, "decay_steps": None, "decay_ratio": None},
    "CosineWithRestartsAndWarmUpLR": {"num_cycles": 3.0, "lr_end": END, "decay_steps": None},
    "PolynomialWithWarmUpLR": {"power": 2.0, "lr_end": END, "decay_steps": None},
    "WarmUpStableDecayLR": {"lr_end": END, "decay_start_steps": 40, "decay_start_ratio": None},
    "ConstantWithCoolDownLR": {"keep_steps": 5, "decay_steps": 20, "decay_ratio": None, "num_cycles": 0.5,
                               "lr_end1": END, "final_steps": 8, "lr_end2": 5e-5},
}
END_VALUE = {"ConstantWarmUpLR": LR, "LinearWithWarmUpLR": 0.0, "ConstantWithCoolDownLR": 5e-5}
ANNEALING = {"type": "CosineAnnealingLR", "base_lr": LR, "t_max": 15, "eta_min": END, "total_steps": -1}
RESTARTS = {"type": "CosineAnnealingWarmRestarts", "base_lr": LR, "t_0": 5, "t_mult": 2, "eta_min": END,
            "total_steps": -1}


def section(type_: str, **changes) -> SimpleNamespace:
    keys = {"type": type_, **WARM_UP, **OWN[type_]}
    assert set(changes) <= set(keys), "a test must not set a key that the section lacks"
    return SimpleNamespace(**{**keys, **changes})


def curve(config: SimpleNamespace, total: int = TOTAL, steps: np.ndarray = STEPS) -> np.ndarray:
    schedule = build_schedule(config, total)
    values = [schedule(int(step)) for step in steps]
    assert all(type(value) is float for value in values)
    return np.array(values)


def with_warm_up(after: np.ndarray, warm: int = WARM) -> np.ndarray:
    """Returns the straight line of the warm-up drawn by numpy before step ``warm``, ``after`` from there on."""
    return np.where(STEPS < warm, np.interp(STEPS, [0, max(1, warm)], [INIT, LR]), after)


def progress(start: int, end: int) -> np.ndarray:
    return np.clip((STEPS - start) / (end - start), 0, 1)


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=SCHEDULE, atol=SCHEDULE_NEAR_ZERO)


# --- the shapes ---------------------------------------------------------------------------------------------------


def test_constant():
    close(curve(section("ConstantWarmUpLR")), with_warm_up(np.full(len(STEPS), LR)))


def test_linear_falls_to_zero_at_the_end():
    close(curve(section("LinearWithWarmUpLR")), with_warm_up(np.interp(STEPS, [WARM, TOTAL], [LR, 0])))


def test_cosine_falls_once_with_half_a_wave():
    expected = END + (LR - END) * np.cos(np.pi / 2 * progress(WARM, TOTAL)) ** 2
    close(curve(section("CosineWithWarmUpLR")), with_warm_up(expected))


def test_cosine_with_more_waves_rises_again_within_the_run():
    lr = curve(section("CosineWithWarmUpLR", num_cycles=1.5))
    inside = (STEPS >= WARM) & (STEPS < TOTAL)
    expected = END + (LR - END) * (np.cos(3 * np.pi * progress(WARM, TOTAL)) + 1) / 2
    close(lr[inside], expected[inside])
    # The second peak, at two thirds of the 50 steps after warm-up.
    assert lr[WARM + 33] == pytest.approx(LR, rel=BETWEEN_STEPS)


@pytest.mark.parametrize(("type_", "keys", "cut"), [
    ("CosineWithWarmUpLR", {"decay_steps": 35}, 35), ("CosineWithWarmUpLR", {"decay_ratio": 0.5}, 30),
    ("CosineWithWarmUpLR", {"decay_steps": 35, "decay_ratio": 0.5}, 30),
    ("CosineWithWarmUpLR", {"decay_steps": 35, "decay_ratio": 0.0}, 35),
    ("CosineWithWarmUpLR", {"decay_steps": 900}, TOTAL), ("CosineWithRestartsAndWarmUpLR", {"decay_steps": 20}, 20),
])
def test_decay_steps_truncate_a_cosine_without_scaling_it(type_, keys, cut):
    close(curve(section(type_, **keys)), np.where(STEPS < cut, curve(section(type_)), END))


def test_cosine_with_restarts_jumps_back_to_the_peak():
    # 50 steps after warm-up, 3 falls: each a half wave over 50/3 steps.
    within_fall = np.mod(3 * (STEPS - WARM), 50) / 50
    expected = END + (LR - END) * (1 + np.cos(np.pi * within_fall)) / 2
    close(curve(section("CosineWithRestartsAndWarmUpLR")), with_warm_up(np.where(STEPS < TOTAL, expected, END)))


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial(power):
    expected = END + (LR - END) * (1 - progress(WARM, TOTAL)) ** power
    close(curve(section("PolynomialWithWarmUpLR", power=power)), with_warm_up(expected))


def test_polynomial_decay_steps_count_from_the_end_of_warm_up_and_stay_at_lr_end():
    expected = END + (LR - END) * (1 - progress(WARM, WARM + 20)) ** 2
    close(curve(section("PolynomialWithWarmUpLR", decay_steps=20)), with_warm_up(expected))


def test_polynomial_decay_longer_than_the_run_ends_at_lr_end_after_it():
    slow = END + (LR - END) * (1 - progress(WARM, WARM + 500)) ** 2
    close(curve(section("PolynomialWithWarmUpLR", decay_steps=500)), with_warm_up(np.where(STEPS <= TOTAL, slow, END)))


@pytest.mark.parametrize(("keys", "start"), [({}, 40), ({"decay_start_ratio": 0.75}, 45),
                                             ({"decay_start_steps": 10}, 10)])
def test_warm_up_stable_decay(keys, start):
    close(curve(section("WarmUpStableDecayLR", **keys)), with_warm_up(np.interp(STEPS, [start, TOTAL], [LR, END])))


def test_warm_up_stable_decay_may_start_at_once_and_without_warm_up():
    lr = curve(section("WarmUpStableDecayLR", warmup_steps=0, decay_start_ratio=0.0))
    close(lr, np.interp(STEPS, [0, TOTAL], [LR, END]))


def test_warm_up_stable_decay_that_starts_after_the_run_never_decays_within_it():
    assert set(curve(section("WarmUpStableDecayLR", decay_start_steps=70))[WARM:TOTAL]) == {LR}


@pytest.mark.parametrize("keys", [{}, {"decay_steps": None, "decay_ratio": 1 / 3}, {"decay_ratio": 0.0}])
def test_constant_with_cool_down_has_five_phases(keys):
    cosine = END + (LR - END) * (1 + np.cos(np.pi * progress(15, 35))) / 2
    expected = np.where(STEPS < 15, LR, np.where(STEPS < 35, cosine, np.where(STEPS < 43, END, 5e-5)))
    close(curve(section("ConstantWithCoolDownLR", **keys)), with_warm_up(expected))


@pytest.mark.parametrize(("lr_end2", "last"), [(None, END), (0.0, 0.0)])
def test_constant_with_cool_down_last_value(lr_end2, last):
    assert curve(section("ConstantWithCoolDownLR", lr_end2=lr_end2))[-1] == last


def test_constant_with_cool_down_decays_over_the_whole_total_by_default():
    cosine = END + (LR - END) * (1 + np.cos(np.pi * (STEPS - WARM) / TOTAL)) / 2
    lr = curve(section("ConstantWithCoolDownLR", decay_steps=None, keep_steps=None, final_steps=None))
    close(lr[: WARM + TOTAL], with_warm_up(cosine)[: WARM + TOTAL])
    assert lr[WARM + TOTAL] == 5e-5


def test_cosine_annealing_never_ends():
    close(curve(SimpleNamespace(**ANNEALING)), END + (LR - END) * (1 + np.cos(np.pi * STEPS / 15)) / 2)


@pytest.mark.parametrize("t_mult", [1, 2, 3])
def test_warm_restarts_lengthen_their_period(t_mult):
    expected, period = [], 5
    while len(expected) < len(STEPS):
        expected += list(END + (LR - END) * (1 + np.cos(np.pi * np.arange(period) / period)) / 2)
        period *= t_mult
    close(curve(SimpleNamespace(**{**RESTARTS, "t_mult": t_mult})), np.array(expected[: len(STEPS)]))


def test_warm_restarts_restart_exactly_where_a_float_logarithm_could_miss():
    starts = [5 * (2**k - 1) for k in range(40)]
    schedule = build_schedule(SimpleNamespace(**RESTARTS), TOTAL)
    assert [schedule(start) for start in starts] == [LR] * 40
    assert all(schedule(start - 1) < LR / 2 for start in starts[1:])


@pytest.mark.parametrize("eta_min", [None, 0.0])
def test_warm_restarts_without_eta_min_fall_towards_zero(eta_min):
    config = SimpleNamespace(**{**RESTARTS, "t_mult": 1, "eta_min": eta_min})
    close(curve(config), LR * (1 + np.cos(np.pi * (STEPS % 5) / 5)) / 2)


# --- the examples of MindSpore Transformers' API documentation (learning_rate 0.005, warm-up 10, total 20) ----------


@pytest.mark.parametrize(("type_", "keys", "step", "printed"), [
    ("ConstantWarmUpLR", {}, 1, 0.0005), ("ConstantWarmUpLR", {}, 15, 0.005),
    ("LinearWithWarmUpLR", {}, 1, 0.0005), ("LinearWithWarmUpLR", {}, 15, 0.0025),
    ("CosineWithWarmUpLR", {"lr_end": 0.0}, 15, 0.0024999997),
    ("CosineWithRestartsAndWarmUpLR", {"lr_end": 0.0, "num_cycles": 1.0}, 15, 0.0024999997),
    ("PolynomialWithWarmUpLR", {"lr_end": 1e-7, "power": 1.0}, 15, 0.0025000498),
    *[("ConstantWithCoolDownLR",
       {"keep_steps": 10, "decay_steps": 10, "final_steps": 10, "lr_end1": 0.002, "lr_end2": 0.001}, step, value)
      for step, value in [(1, 0.0005), (15, 0.005), (25, 0.0035), (35, 0.002), (45, 0.001)]],
])
def test_documented_values_of_mindspore_transformers(type_, keys, step, printed):
    config = section(type_, learning_rate=0.005, warmup_lr_init=0.0, **keys)
    assert build_schedule(config, 20)(step) == pytest.approx(printed, rel=PRINTED)


def test_documented_annealing_values_of_mindspore_transformers():
    annealing = build_schedule(SimpleNamespace(**{**ANNEALING, "base_lr": 0.005, "t_max": 10, "eta_min": 1e-7}), 20)
    assert [annealing(1), annealing(15)] == pytest.approx([0.0048776437, 0.0025000498], rel=PRINTED)
    restarts = build_schedule(SimpleNamespace(**{**RESTARTS, "base_lr": 0.005, "t_0": 10, "eta_min": 1e-7}), 20)
    assert [restarts(1), restarts(15)] == pytest.approx([0.0048776437, 0.0042677815], rel=PRINTED)


# --- borders, common to all with warm-up ----------------------------------------------------------------------------


@pytest.mark.parametrize("type_", OWN)
def test_borders(type_):
    lr = build_schedule(section(type_), TOTAL)
    assert lr(0) == INIT
    assert INIT < lr(WARM - 1) < LR
    assert lr(WARM) == pytest.approx(LR, rel=FLOAT64)
    end = END_VALUE.get(type_, END)
    assert [lr(TOTAL), lr(TOTAL + 1), lr(10 * TOTAL)] == [end] * 3
    if type_ not in ("ConstantWarmUpLR", "ConstantWithCoolDownLR"):
        assert end < lr(TOTAL - 1) < LR


@pytest.mark.parametrize("type_", OWN)
def test_rises_during_warm_up_and_never_after_it(type_):
    changes = np.diff(curve(section(type_, **({"num_cycles": 1.0} if "Restarts" in type_ else {}))))
    assert (changes[:WARM] > 0).all()
    assert (changes[WARM:] <= 0).all()
    assert curve(section(type_)).min() >= 0


@pytest.mark.parametrize("type_", OWN)
def test_without_warm_up_the_first_step_has_the_full_learning_rate(type_):
    # MindSpore Transformers computes 0 / 0 here in WarmUpStableDecayLR.
    assert build_schedule(section(type_, warmup_steps=None), TOTAL)(0) == pytest.approx(LR, rel=FLOAT64)


@pytest.mark.parametrize("type_", sorted(set(OWN) - {"WarmUpStableDecayLR"}))
def test_run_shorter_than_its_warm_up(type_):
    lr = curve(section(type_), total=4, steps=np.arange(4))
    close(lr, np.interp(np.arange(4), [0, WARM], [INIT, LR]))


@pytest.mark.parametrize("type_", OWN)
def test_one_step_run(type_):
    keys = {"decay_start_steps": 0} if type_ == "WarmUpStableDecayLR" else {}
    assert build_schedule(section(type_, warmup_steps=0, **keys), 1)(0) == pytest.approx(LR)


@pytest.mark.parametrize(("steps", "ratio", "expected"), [(7, None, 7), (None, None, 0), (7, 0.25, 15), (7, 0.0, 0),
                                                          (None, 0.999, 59)])
def test_warm_up_ratio_wins_over_steps_and_rounds_down(steps, ratio, expected):
    assert warmup_steps(section("ConstantWarmUpLR", warmup_steps=steps, warmup_ratio=ratio), TOTAL) == expected


@pytest.mark.parametrize("type_", OWN)
@pytest.mark.parametrize("own_total", [TOTAL, -1, None])
def test_total_steps_of_the_section_replace_those_of_the_data(type_, own_total):
    data_steps = 2 * TOTAL if own_total == TOTAL else TOTAL
    close(curve(section(type_, total_steps=own_total), total=data_steps), curve(section(type_), total=TOTAL))


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "key", "parts"), [
    (section("WarmUpStableDecayLR", decay_start_steps=None), "type", ["decay_start_steps or decay_start_ratio"]),
    (section("WarmUpStableDecayLR", decay_start_steps=9), "decay_start_steps",
     ["= 9", "start at step 9", "ends at step 10"]),
    (section("WarmUpStableDecayLR", decay_start_ratio=0.1), "decay_start_ratio", ["= 0.1", "start at step 6"]),
    (section("WarmUpStableDecayLR", lr_end=LR), "lr_end", ["below learning_rate (0.003)"]),
    (section("PolynomialWithWarmUpLR", lr_end=0.1), "lr_end", ["= 0.1", "below learning_rate"]),
    (section("CosineWithWarmUpLR", decay_steps=9), "decay_steps", ["= 9", "end at step 9", "ends at step 10"]),
    (section("CosineWithWarmUpLR", decay_ratio=0.1), "decay_ratio", ["= 0.1", "end at step 6"]),
    (section("CosineWithRestartsAndWarmUpLR", decay_steps=3), "decay_steps", ["end at step 3"]),
    (section("ConstantWarmUpLR", total_steps=0), "total_steps", ["= 0", "at least 1"]),
    (section("ConstantWarmUpLR", total_steps=-2), "total_steps", ["= -2", "at least 1"]),
    (SimpleNamespace(type="CosineLR", total_steps=-1), "type", ["'CosineLR'", "CosineWithWarmUpLR"]),
])
def test_contradictions_are_an_error(config, key, parts):
    with pytest.raises(UserError) as caught:
        build_schedule(config, TOTAL, where=lambda dotted: f"a.yaml:7 <{dotted}>")
    message = str(caught.value)
    assert caught.value.key == f"lr_schedule.{key}"
    assert message.startswith(f"a.yaml:7 <lr_schedule.{key}>")
    assert "Fix: " in message
    assert all(part in message for part in parts), message


def test_a_run_without_steps_is_an_error():
    with pytest.raises(UserError, match="at least 1"):
        build_schedule(section("ConstantWarmUpLR"), 0)


# --- the schema's sections ------------------------------------------------------------------------------------------

NEEDED = {"CosineAnnealingLR": {"t_max": 7}, "CosineAnnealingWarmRestarts": {"t_0": 7},
          "WarmUpStableDecayLR": {"decay_start_ratio": 0.5}}


@pytest.mark.parametrize("kind", get_args(get_args(LrSchedule)[0]), ids=lambda kind: kind.__name__)
def test_every_section_of_the_schema_builds_with_its_defaults(kind):
    config = kind.model_validate({"type": kind.__name__, **NEEDED.get(kind.__name__, {})})
    schedule = build_schedule(config, TOTAL)
    assert schedule(0) == 5e-5  # the default peak: no schedule warms up unless it is told to
    assert all(0 <= schedule(step) <= 5e-5 for step in range(2 * TOTAL))
