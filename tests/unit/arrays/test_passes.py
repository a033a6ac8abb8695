"""The tape: gradients of what several passes take, against central differences, and what a backward pass leaves."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from mindspore import Parameter, Tensor
from numpy_kernels import central_differences, distance
from tolerances import rounding_limit

from trainer.arrays.passes import PartWeights, Tape, Variable, run_part
from trainer.arrays.tiles import SublayerCall


class Scaled:
    """x, y -> the rows of x * weight + y, and the sum of x * y; a part with two inputs and two results."""

    def forward(self, call: SublayerCall, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.float32]:
        if call.save:
            call.saved["x"] = x.copy()
        return x * call.weights["weight"] + y, np.float32((x * y).sum())

    def backward(
        self, call: SublayerCall, x: np.ndarray, y: np.ndarray, rows: np.ndarray, loss: np.float32
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        weight_gradient = (call.saved["x"] * rows).sum(0)
        return rows * call.weights["weight"] + loss * y, rows + loss * x, {"weight": weight_gradient}


WEIGHT = np.array([0.5, -1.5, 2.0], np.float32)
X, Y = (np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32) for seed in (1, 2))


def twice(weights: PartWeights, x: Variable, y: Variable, tape: Tape | None, save: bool = True) -> Variable:
    """Returns a loss to which two passes with the same weights contribute; the second takes y again."""
    first, first_loss = run_part(Scaled(), weights, (x, y), tape=tape, save=save)
    second, second_loss = run_part(Scaled(), weights, (first, y), tape=tape, save=save)
    del second
    return first_loss * 3.0 + second_loss


def literal(weight: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return 3 * (x * y).sum() + ((x * weight + y) * y).sum()


def part_weights(trained: bool = True) -> tuple[PartWeights, Parameter]:
    parameter = Parameter(Tensor(WEIGHT), "weight", requires_grad=trained)
    return PartWeights({"weight": parameter}, "float32"), parameter


@pytest.mark.parametrize("save", [True, False], ids=["saved", "recomputed"])
def test_gradients_of_inputs_and_weights_that_two_passes_take(save: bool) -> None:
    weights, parameter = part_weights()
    tape = Tape()
    x, y = Variable(X, tape), Variable(Y, tape)
    loss = twice(weights, x, y, tape, save)
    loss.add_gradient(np.float32(2))
    tape.backward()
    found = [tape.take_gradient(parameter), x.take_gradient(), y.take_gradient()]
    for gradient, right in zip(found, central_differences(literal, [WEIGHT, X, Y], np.float64(2)), strict=True):
        assert distance(gradient, right) < rounding_limit(8)
    assert not tape.gradients and not tape.passes


def test_what_needs_no_gradient_is_not_recorded() -> None:
    weights, _ = part_weights(trained=False)
    tape = Tape()
    loss = twice(weights, Variable(X), Variable(Y), tape)
    assert not tape.passes and loss.tape is None
    loss.add_gradient(np.float32(1))
    assert loss.gradient is None
    twice(weights, Variable(X), Variable(Y, tape), tape)
    assert len(tape.passes) == 4  # two passes of the part, a product and a sum


def test_parameters_and_results_that_nothing_uses_have_zero_gradients() -> None:
    unused = Parameter(Tensor(WEIGHT), "unused")
    gradient = Tape().take_gradient(unused)
    assert gradient.shape == WEIGHT.shape and not gradient.any()
    assert not Variable(X, Tape()).take_gradient().any()


def test_a_watcher_sees_the_sum_of_the_gradients() -> None:
    seen: list[np.ndarray] = []
    tape = Tape()
    x = Variable(X, tape)
    x.watch(seen.append)
    total = x * 2.0 + x * 3.0
    total.add_gradient(np.ones_like(X))
    tape.backward()
    np.testing.assert_array_equal(seen[0], np.full_like(X, 5))
    np.testing.assert_array_equal(x.take_gradient(), seen[0])


def test_a_backward_pass_frees_results_when_it_has_used_them() -> None:
    weights, _ = part_weights()
    tape = Tape()
    kept: list[weakref.ref] = []

    class Seeing(Scaled):
        def backward(self, call: SublayerCall, *arguments: np.ndarray) -> tuple:
            assert kept[0]() is None, "the array of a result still exists"
            return super().backward(call, *arguments)

    rows, loss = run_part(Seeing(), weights, (Variable(X), Variable(Y)), tape=tape)
    kept.append(weakref.ref(rows.array))
    del rows
    loss.add_gradient(np.float32(1))
    tape.backward()
