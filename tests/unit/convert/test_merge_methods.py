"""Averages of weights against their formulas, number by number in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from golden_distillation_cases import summary
from golden_merges_cases import BASE, CASES, MODELS, MergeCase, load_results
from tolerances import OPERATOR

from trainer.convert.merge_methods import linear, slerp, task_arithmetic, ties

WEIGHTS = (0.5, 1.25, 0.3)


def close(array: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(array - expected).max() < OPERATOR * np.abs(expected).max())


def test_linear_is_the_weighted_mean() -> None:
    expected = sum(weight * model.astype(np.float64) for weight, model in zip(WEIGHTS, MODELS, strict=True)) / 2.05
    assert close(linear(MODELS, WEIGHTS), expected)
    np.testing.assert_array_equal(linear(MODELS[:2], (1, 1)), (MODELS[0] / 2) + (MODELS[1] / 2))


def test_slerp_keeps_the_angle_and_the_length() -> None:
    first = np.array([[3, 0], [0, 0]], np.float32)
    second = np.array([[0, 3], [0, 0]], np.float32)
    for t in (0, 0.25, 1):
        angle = t * math.pi / 2
        expected = np.array([[3 * math.cos(angle), 3 * math.sin(angle)], [0, 0]])
        assert close(slerp(first, second, t), expected)
    assert close(slerp(first, 2 * first, 0.25), 1.25 * first)  # in one direction it is linear
    assert close(slerp(np.zeros_like(first), first, 0.25), 0.25 * first)


def test_task_arithmetic_adds_differences() -> None:
    wide = BASE.astype(np.float64)
    expected = wide + 0.7 * sum(weight * (model - wide) for weight, model in zip(WEIGHTS, MODELS, strict=True))
    assert close(task_arithmetic(BASE, MODELS, WEIGHTS, 0.7), expected)


@pytest.mark.parametrize("density", [0.4, 1.0])
def test_ties_trims_elects_and_merges(density: float) -> None:
    deltas = [(model - BASE).reshape(-1).astype(np.float64) for model in MODELS]
    for delta in deltas:  # trim
        order = sorted(range(delta.size), key=lambda place, delta=delta: -abs(delta[place]))
        delta[order[int(density * delta.size) :]] = 0
    expected = BASE.reshape(-1).astype(np.float64)
    for place in range(expected.size):
        values = [weight * delta[place] for weight, delta in zip(WEIGHTS, deltas, strict=True)]
        sign = 1 if sum(values) >= 0 else -1  # elect
        agreeing = [(value, weight) for value, weight in zip(values, WEIGHTS, strict=True) if value * sign > 0]
        if agreeing:  # merge
            expected[place] += 0.7 * sum(value for value, _ in agreeing) / sum(weight for _, weight in agreeing)
    assert close(ties(BASE, MODELS, WEIGHTS, 0.7, density).reshape(-1), expected)


def test_ties_of_nothing_is_the_base() -> None:
    np.testing.assert_array_equal(ties(BASE, MODELS, WEIGHTS, 1.0, 0.0), BASE)
    np.testing.assert_array_equal(ties(BASE, [BASE, BASE], (1, 1), 1.0, 0.5), BASE)


def merged(case: MergeCase) -> np.ndarray:
    if case.method == "slerp":
        return slerp(MODELS[0], MODELS[1], case.t)
    if case.method == "linear":
        return linear(MODELS, case.weights)
    if case.method == "task_arithmetic":
        return task_arithmetic(BASE, MODELS, case.weights, case.scale)
    return ties(BASE, MODELS, case.weights, case.scale, case.density)


def test_merged_tensors_are_those_of_mergekit() -> None:
    """scripts/golden_merges.py ran mergekit."""
    found = np.array([summary(merged(case)) for case in CASES])
    right = np.array(load_results())
    assert len({*np.round(right[:, 1], 3)}) == len(CASES)
    assert close(found, right)
