"""The rules of the loss scale, without arrays."""

from __future__ import annotations

import json

import pytest
from config_helpers import error_of, load

from trainer.step.loss_scale import LossScale, build_loss_scale


def dynamic(value: float = 65536.0, window: int = 3) -> LossScale:
    return LossScale(value, factor=2.0, window=window)


def test_overflow_halves_the_scale_and_restarts_the_window():
    scale = dynamic()
    scale.update(overflow=False)
    scale.update(overflow=False)
    scale.update(overflow=True)
    assert (scale.value, scale.quiet_steps, scale.overflows_in_a_row, scale.overflows) == (32768.0, 0, 1, 1)


def test_the_scale_doubles_after_each_quiet_window():
    scale, values = dynamic(window=3), []
    for _ in range(7):
        scale.update(overflow=False)
        values.append(scale.value / 65536)
    assert values == [1, 1, 2, 2, 2, 4, 4]


def test_a_quiet_step_resets_the_consecutive_overflows_but_not_the_total():
    scale = dynamic()
    for overflow in (True, True, False, True):
        scale.update(overflow=overflow)
    assert (scale.overflows_in_a_row, scale.overflows) == (1, 3)


@pytest.mark.parametrize(("first", "last"), [(2.0, 1.0), (0.25, 0.25)])
def test_a_dynamic_scale_falls_to_one_at_most(first, last):
    scale = dynamic(value=first)
    for _ in range(5):
        scale.update(overflow=True)
    assert scale.value == last


def test_a_fixed_scale_never_moves():
    scale = LossScale(1024.0, window=1)
    for overflow in (True, False, False):
        scale.update(overflow=overflow)
    assert scale.value == 1024.0 and scale.overflows == 1


def test_a_scale_is_active_if_it_scales_or_moves():  # without one an overflow is an error of the run
    assert not LossScale().active
    assert LossScale(1024.0).active and dynamic(1.0).active


def test_state_survives_json_and_continues():
    scale, other = dynamic(), dynamic()
    for overflow in (True, False, False):
        scale.update(overflow=overflow)
    other.load_state(json.loads(json.dumps(scale.state())))
    assert other == scale
    scale.update(overflow=False)
    other.update(overflow=False)
    assert other.value == scale.value == 65536.0


def test_a_scale_of_another_kind_keeps_its_configured_value():
    fixed, scaled = LossScale(512.0), dynamic()
    scaled.load_state(fixed.state())
    assert scaled.value == 65536.0
    scaled.update(overflow=True)
    fixed.load_state(scaled.state())
    assert fixed.value == 512.0


@pytest.mark.parametrize(
    ("text", "value", "factor", "window"),
    [
        ("1.0", 1.0, None, 1000),
        ("4096", 4096.0, None, 1000),
        ("{type: FixedLossScaleUpdateCell, loss_scale_value: 128}", 128.0, None, 1000),
        ("{type: DynamicLossScaleUpdateCell}", 65536.0, 2.0, 1000),
        ("{loss_scale_value: 16, scale_factor: 4, scale_window: 7}", 16.0, 4.0, 7),
    ],
)
def test_every_form_of_scale_sense(text, value, factor, window):
    scale = build_loss_scale(load(f"runner_wrapper: {{scale_sense: {text}}}\n").runner_wrapper)
    assert (scale.value, scale.factor, scale.window) == (value, factor, window)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0", ["scale_sense = 0", "greater than 0"]),
        ("-1.0", ["scale_sense = -1.0", "greater than 0"]),
        ("many", ["scale_sense = 'many'"]),
        ("{type: DynamicLossScaleUpdateCel}", ["DynamicLossScaleUpdateCell"]),
        ("{loss_scale_value: 0}", ["loss_scale_value = 0", "greater than 0"]),
        ("{scale_factor: 0}", ["scale_factor = 0", "at least 1"]),
        ("{scale_window: 0}", ["scale_window = 0", "at least 1"]),
        ("{scale_windw: 5}", ["scale_windw", "scale_window"]),
    ],
)
def test_bad_values_are_named(text, parts):
    message = error_of(f"runner_wrapper: {{scale_sense: {text}}}\n")
    assert all(part in message for part in parts), message


def test_a_bad_value_in_the_section_is_reported_once():
    message = error_of("runner_wrapper: {scale_sense: {type: DynamicLossScaleUpdateCell, loss_scale_value: 0}}\n")
    assert "must be a number" not in message and "problems" not in message
    assert message.count("scale_sense") == 1
