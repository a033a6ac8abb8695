"""Clipping on gradients: elements, factors for each parameter, and norms that neither overflow nor hide an inf."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from mindspore import Parameter, Tensor
from numpy_kernels import assert_same_bits
from tolerances import rounding_limit

from trainer.arrays import measures
from trainer.config import parse_config
from trainer.config.schema.runner import RunnerWrapper
from trainer.optim.groups import parameter_groups
from trainer.optim.optimizer import Optimizer, build_optimizer
from trainer.step.clip import GradientNorms, clip, clip_by_value, norm_groups

OF_NORMS = rounding_limit(1024, scale=0.5)  # sums of 1024 squares; a root halves the relative error


def gradients_of(*arrays: list) -> list[Tensor]:
    return [Tensor(np.array(array, np.float32)) for array in arrays]


def norms_of(gradients: list[Tensor], wrapper: RunnerWrapper, group_of: dict[str, str]) -> GradientNorms:
    """Returns the norms as a step computes them."""
    wanted = norm_groups(list(group_of), wrapper, group_of)
    sums = measures.square_sums(measures.squares(gradients), list(wanted.groups.values()), bool(wanted.per_gradient))
    return wanted.norms(sums)


def global_norm(gradients: list[Tensor]) -> float:
    return float(np.sqrt(measures.square_sums(measures.squares(gradients), [], False)[0]))


def clipped(gradients: list[Tensor], scale: float = 1.0, **settings: object) -> list[np.ndarray]:
    """Returns what reaches the optimizer: gradients times factors."""
    wrapper = parse_config("clip", json.dumps({"runner_wrapper": {"use_clip_grad": True} | settings})).runner_wrapper
    names = [str(number) for number in range(len(gradients))]
    group_of = {name: name for name in names}
    kept, factors = clip(gradients, norms_of(gradients, wrapper, group_of), names, wrapper, group_of, scale)
    return [gradient.asnumpy() * np.float32(factor) for gradient, factor in zip(kept, factors, strict=True)]


def test_by_value_each_element_is_brought_in() -> None:
    (found,) = clipped(gradients_of([[-7.0, -0.5, 0.0], [0.25, 0.5, 3.0]]), clip_type="value", clip_value=0.5)
    np.testing.assert_array_equal(found, [[-0.5, -0.5, 0.0], [0.25, 0.5, 0.5]])


def test_by_value_under_a_loss_scale_is_the_same() -> None:
    plain = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    expected = clipped([Tensor(plain)], clip_type="value", clip_value=0.3)
    found = clipped([Tensor(plain * 1024)], scale=1024.0, clip_type="value", clip_value=0.3)
    np.testing.assert_array_equal(found, expected)


def test_by_value_within_the_limit_keeps_every_bit_and_the_dtype() -> None:
    for dtype in (np.float32, np.float16):
        values = np.array([1e-30, -1.5, 0.0, 1.5], dtype)
        found = clip_by_value(Tensor(values), 1.5).asnumpy()
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, values)


def test_all_zero_gradients_stay_zero() -> None:
    zeros = gradients_of([[0.0, 0.0]], [0.0])
    for settings in ({}, {"clip_by_group": True}, {"clip_type": "value"}):
        for found in clipped(zeros, **settings):
            np.testing.assert_array_equal(found, 0.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_reported_by_the_norm(bad: float) -> None:
    assert not math.isfinite(global_norm(gradients_of([1.0, 2.0], [bad, 1.0])))


def test_many_small_gradients_are_not_lost_beside_a_large_one() -> None:
    """Added one by one to 1e16, each 1.0 would be rounded away."""
    squares_P = np.array([1e16] + [1.0] * 1000)
    assert measures.square_sums(squares_P, [[0, 1]], True).tolist() == [1e16 + 1000, 0, 1e16, *squares_P]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_sums_of_squares_name_the_first_gradient_that_is_not_finite(bad: float) -> None:
    """Counted from the end, so that 0 means none."""
    found = measures.square_sums(np.array([1.0, bad, 2.0, bad]), [[0, 2], [1]], False)
    assert found[1:3].tolist() == [3.0, 3.0] and not np.isfinite(found[[0, 3]]).any()


def test_squares_of_float16_gradients_are_summed_in_float32() -> None:
    """Takes gradients whose squares float16 cannot represent: 1000 squared is above its 65504."""
    gradient = Tensor(np.full((64, 64), 1000.0, np.float16))
    assert global_norm([gradient]) == pytest.approx(64 * 1000.0, rel=OF_NORMS)
    small = Tensor(np.full((64, 64), 1e-4, np.float16))  # its square is below float16's smallest number
    assert global_norm([small]) == pytest.approx(64 * float(np.float16(1e-4)), rel=OF_NORMS)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_the_optimizer_takes_a_factor_for_each_parameter(kind: str) -> None:
    draw = np.random.default_rng(1)
    values = {"a": draw.standard_normal((4, 3)), "b": draw.standard_normal(3), "c": draw.standard_normal((2, 2))}
    gradients = [Tensor(draw.standard_normal(value.shape).astype(np.float32)) for value in values.values()]

    def build() -> Optimizer:
        settings = parse_config("clip", json.dumps({"optimizer": {"type": kind, "weight_decay": 0.1}})).optimizer
        parameters = {name: Parameter(Tensor(value.astype(np.float32)), name=name) for name, value in values.items()}
        groups = parameter_groups({name: value.shape for name, value in values.items()}, settings)
        return build_optimizer(parameters, groups, settings)

    one, other = build(), build()
    assert one.group_of == {"a": "matrices", "b": "norms and biases", "c": "matrices"}
    factors = [0.5, 1.0, 0.25]
    one.update(gradients, 0.1, factors)
    other.update([gradient * factor for gradient, factor in zip(gradients, factors, strict=True)], 0.1)
    assert_same_bits(one.parameters, other.parameters)
