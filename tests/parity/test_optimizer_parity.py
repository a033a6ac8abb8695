"""AdamW and SGD against PyTorch's, through the golden files, and what the step relies on beyond the formula.

Limit: tolerances.py, for 100 updates one after the other and the ten operations of an update. A wrong bias correction,
eps in the wrong place or coupled decay is off by 1e-3 and more.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from adamw_operator import adamw_as_documented
from golden_files import OptimizerCase, golden_gradient, load_optimizer_case
from mindspore import Parameter, Tensor
from numpy_kernels import assert_close, assert_same_bits, distance
from tolerances import rounding_limit

from trainer.config import parse_config
from trainer.optim.averages import WeightAverages
from trainer.optim.groups import parameter_groups
from trainer.optim.optimizer import AdamW, Optimizer, build_optimizer

LIMIT = rounding_limit(100, 10)
SETTINGS = {
    "optimizer_adamw": ("type", "betas", "eps"),
    "optimizer_sgd": ("type", "momentum"),
    "optimizer_loraplus": ("type", "betas", "eps", "loraplus_lr_ratio"),
}
EACH = pytest.mark.parametrize("name", SETTINGS)


def settings_of(case: OptimizerCase, **changes):
    known = {"type": case.settings["optimizer"], "weight_decay": max(case.settings["weight_decay"].values())}
    known |= {key: case.settings[key] for key in SETTINGS[case.name] if key != "type"}
    return parse_config(case.name, json.dumps({"optimizer": known | changes})).optimizer


def build(case: OptimizerCase, weights: dict[str, np.ndarray] | None = None, **changes) -> Optimizer:
    """Returns the optimizer of a golden case over its tensors, with the decay that `parameter_groups` gives each."""
    settings = settings_of(case, **changes)
    values = case.initial if weights is None else weights
    parameters = {key: Parameter(Tensor(values[key]), name=key) for key in case.names}
    groups = parameter_groups({key: value.shape for key, value in values.items()}, settings)
    return build_optimizer(parameters, groups, settings)


def gradients(case: OptimizerCase, step: int) -> list[Tensor]:
    return [Tensor(golden_gradient(step, i, case.initial[key].shape)) for i, key in enumerate(case.names)]


def run(optimizer: Optimizer, case: OptimizerCase, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.update(gradients(case, step), float(case.learning_rates[step]))


def weights_of(optimizer: Optimizer) -> dict[str, np.ndarray]:
    return {name: parameter.asnumpy().copy() for name, parameter in optimizer.parameters.items()}


def check(optimizer: Optimizer, case: OptimizerCase) -> None:
    """Compares weights and state of a whole run with those of PyTorch."""
    done = 0
    for steps, expected in case.after.items():
        run(optimizer, case, done, steps)
        done = steps
        assert optimizer.updates == steps
        assert_close(optimizer.parameters, expected, LIMIT)
    state = {f"{kind}.{key}": array for kind, arrays in case.state.items() for key, array in arrays.items()}
    assert_close(optimizer.state_arrays(), state, LIMIT)


@EACH
def test_weights_and_state_equal_pytorchs(name: str) -> None:
    case = load_optimizer_case(name)
    optimizer = build(case)
    assert optimizer.decay == case.settings["weight_decay"]
    check(optimizer, case)


@pytest.mark.parametrize("name", ["optimizer_adamw", "optimizer_loraplus"])
def test_the_operator_of_an_ascend_equals_pytorchs_too(name: str) -> None:
    """With the operator as CANN documents it."""
    case = load_optimizer_case(name)
    groups = parameter_groups({key: value.shape for key, value in case.initial.items()}, settings_of(case))
    parameters = {key: Parameter(Tensor(case.initial[key]), name=key) for key in case.names}
    optimizer = AdamW(parameters, groups, settings_of(case), device="Ascend")
    optimizer.apply.update = adamw_as_documented
    check(optimizer, case)
    host = build(case)
    host.load_state(optimizer.state_arrays(), optimizer.updates)
    assert_same_bits(host.state_arrays(), optimizer.state_arrays())


@EACH
def test_state_put_into_a_new_optimizer_continues_with_the_same_bits(name: str) -> None:
    case = load_optimizer_case(name)
    whole, first = build(case), build(case)
    run(whole, case, 0, 12)
    run(first, case, 0, 5)
    state, weights = first.state_arrays(), weights_of(first)
    run(first, case, 5, 8)  # what was handed out must not move with the optimizer
    second = build(case, weights)
    second.load_state(state, 5)
    run(second, case, 5, 12)
    assert_same_bits(weights_of(second), weights_of(whole))
    assert_same_bits(second.state_arrays(), whole.state_arrays())
    assert second.updates == whole.updates == 12


@EACH
def test_taking_over_a_state_leaves_its_arrays_alone(name: str) -> None:
    case = load_optimizer_case(name)
    optimizer = build(case)
    run(optimizer, case, 0, 3)
    state = optimizer.state_arrays()
    kept = {key: array.copy() for key, array in state.items()}
    optimizer.load_state(state, 3)
    run(optimizer, case, 3, 5)
    assert_same_bits(state, kept)


@EACH
def test_scale_is_a_factor_on_the_gradients(name: str) -> None:
    case, scale = load_optimizer_case(name), 0.37
    scaled, plain = build(case), build(case)
    for step in range(6, 11):
        rate = float(case.learning_rates[step])
        scaled.update(gradients(case, step), rate, scale)
        plain.update([gradient * scale for gradient in gradients(case, step)], rate)
    assert_same_bits(weights_of(scaled), weights_of(plain))
    assert_same_bits(scaled.state_arrays(), plain.state_arrays())
    unscaled = build(case)
    run(unscaled, case, 6, 11)
    state = scaled.state_arrays()
    assert not any(np.array_equal(state[key], array) for key, array in unscaled.state_arrays().items())


@EACH
def test_gradients_are_left_as_they_were(name: str) -> None:
    """The step reports their norm and may look at them again."""
    case = load_optimizer_case(name)
    given = gradients(case, 0)
    before = [gradient.asnumpy().copy() for gradient in given]
    build(case).update(given, 0.1, 0.5)
    assert_same_bits(given, before)


@EACH
def test_decay_shrinks_matrices_and_nothing_else(name: str) -> None:
    """With a gradient of zero, weights move by their decay alone: norms and biases keep their bits."""
    case, rate, decay = load_optimizer_case(name), 0.1, 0.3
    optimizer = build(case, weight_decay=decay)
    optimizer.update([Tensor(np.zeros_like(case.initial[key])) for key in case.names], rate)
    for key, before in case.initial.items():
        after = optimizer.parameters[key].asnumpy()
        if before.ndim > 1:
            keep = 1 - rate * optimizer.lr_ratio[key] * decay
            np.testing.assert_allclose(after, before * keep, rtol=rounding_limit(4))
        else:
            np.testing.assert_array_equal(after, before)


@EACH
def test_learning_rate_zero_changes_the_state_only(name: str) -> None:
    case = load_optimizer_case(name)
    optimizer = build(case)
    optimizer.update(gradients(case, 7), 0.0)
    assert_same_bits(weights_of(optimizer), case.initial)
    assert optimizer.updates == 1
    assert all(array.any() for array in optimizer.state_arrays().values())


@EACH
def test_zero_gradients_stay_finite(name: str) -> None:
    """0 / (sqrt(0) + eps): the first updates of a weight that no token touches."""
    case = load_optimizer_case(name)
    optimizer = build(case, weight_decay=0.0)
    for _ in range(3):
        optimizer.update([Tensor(np.zeros_like(case.initial[key])) for key in case.names], 0.1)
    assert_same_bits(weights_of(optimizer), case.initial)


@pytest.mark.parametrize("algorithm", ["ema", "sma"])
def test_averages_follow_their_formulas(algorithm: str) -> None:
    """PmaAdamW as mindformers/core/optim/pma_adamw.py computes it, and the moving average of all its weights."""
    case = load_optimizer_case("optimizer_adamw")
    changes = {"type": "PmaAdamW", "fused_algo": algorithm, "fused_num": 3, "interleave_step": 2, "ema_decay": 0.9}
    settings = settings_of(case, **changes)
    optimizer = build(case, **changes)
    averages = WeightAverages(optimizer, settings)
    plain = build(case)
    alpha = settings.ema_alpha
    pma = {key: np.zeros(value.shape) for key, value in case.initial.items()}
    ema = {key: value.astype(np.float64) for key, value in case.initial.items()}
    for step in range(14):
        run(optimizer, case, step, step + 1)
        averages.update()
        run(plain, case, step, step + 1)
        for key, parameter in plain.parameters.items():
            weight = parameter.asnumpy().astype(np.float64)
            if (step + 1) % 2 == 0 and algorithm == "ema":
                pma[key] = (1 - alpha) * pma[key] + alpha * weight
            elif (step + 1) % 2 == 0:
                pma[key] = pma[key] + weight
            if (step + 1) % 6 == 0:
                weight = pma[key] / (3 if algorithm == "sma" else 1)
                parameter.set_data(Tensor(weight.astype(np.float32)))
                pma[key] = np.zeros_like(weight)
            ema[key] = 0.9 * ema[key] + 0.1 * weight
            assert distance(optimizer.parameters[key].asnumpy(), weight) < LIMIT, (key, step)
            assert distance(optimizer.state["ema"][key], ema[key]) < LIMIT, (key, step)
    state, weights = optimizer.state_arrays(), weights_of(optimizer)
    assert any(array.any() for name, array in state.items() if name.startswith("pma_weight"))
    with averages.in_use(lambda: None):
        assert_same_bits(optimizer.parameters, {key: state[f"ema.{key}"] for key in optimizer.parameters})
    assert_same_bits(weights_of(optimizer), weights)
    assert_same_bits(optimizer.state_arrays(), state)
    again = build(case, weights, **changes)
    continued = WeightAverages(again, settings)
    again.load_state(state, 14)
    for one, of_one in ((optimizer, averages), (again, continued)):
        for step in range(14, 19):
            run(one, case, step, step + 1)
            of_one.update()
    assert_same_bits(again.state_arrays(), optimizer.state_arrays())
    assert_same_bits(weights_of(again), weights_of(optimizer))
