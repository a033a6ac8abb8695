"""Muon against a float64 version in NumPy, and what orthogonal means.

Limit: tolerances.py, for the updates one after the other and the five iterations of three matrix products of one
update. A wrong step length or momentum is off by 1e-1.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from mindspore import Parameter, Tensor
from numpy_kernels import assert_close, assert_same_bits, distance
from tiny_trainer import make_batch, shared_trainer
from tolerances import rounding_limit

from trainer.config import parse_config
from trainer.optim.groups import parameter_groups
from trainer.optim.muon import Muon
from trainer.optim.optimizer import build_optimizer

SHAPES = {
    "model.embed_tokens.weight": (13, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (20, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 20),
    "model.layers.0.mlp.experts.up_proj.weight": (3, 10, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.norm.weight": (8,),
    "lm_head.weight": (13, 8),
}
MATRICES = [name for name in SHAPES if "proj.weight" in name]
STEPS = 12
LIMIT = rounding_limit(STEPS, 5 * (8 + 8 + 20))


def settings_of(**changes: object):
    return parse_config("muon", json.dumps({"optimizer": {"type": "Muon"} | changes})).optimizer


def initial() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def build(weights: dict[str, np.ndarray] | None = None, compiled: bool = False, **changes: object) -> Muon:
    settings = settings_of(**changes)
    values = initial() if weights is None else weights
    parameters = {name: Parameter(Tensor(value), name=name) for name, value in values.items()}
    groups = parameter_groups(SHAPES, settings)
    return build_optimizer(parameters, groups, settings, compiled=compiled)


def gradient(step: int, name: str) -> np.ndarray:
    return np.random.default_rng([step, list(SHAPES).index(name)]).standard_normal(SHAPES[name]).astype(np.float32)


def rate(step: int) -> float:
    return 0.02 * (1 + math.cos(step / 7))


def run(optimizer: Muon, first: int, last: int, scale: float = 1.0) -> None:
    for step in range(first, last):
        optimizer.update([Tensor(gradient(step, name) / np.float32(scale)) for name in SHAPES], rate(step), scale)


def weights_of(optimizer: Muon) -> dict[str, np.ndarray]:
    return {name: parameter.asnumpy().copy() for name, parameter in optimizer.parameters.items()}


# The same in float64, written from the papers


STANDARD = [3.4445, -4.7750, 2.0315]


def newton_schulz(x: np.ndarray, settings) -> np.ndarray:
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, settings).T
    x = x / (np.linalg.norm(x) + settings.ns_eps)
    segments = settings.ns_coefficients
    if segments == STANDARD:
        segments = [[STANDARD, settings.ns_steps]]
    for (a, b, c), steps in segments:
        for _ in range(steps):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
    return x


def reference(settings) -> dict[str, np.ndarray]:
    values = {name: value.astype(np.float64) for name, value in initial().items()}
    first, second = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    beta1, beta2 = settings.betas
    for step in range(STEPS):
        lr = rate(step)
        for name, weight in values.items():
            g = gradient(step, name).astype(np.float64)
            decay = settings.weight_decay if weight.ndim > 1 else 0.0
            if name in MATRICES:
                buffer = first[name] = settings.momentum * first[name] + g
                direction = g + settings.momentum * buffer if settings.nesterov else buffer
                rows, columns = weight.shape[-2:]
                length = math.sqrt(max(1, rows / columns))
                if settings.matched_adamw_rms is not None:
                    length = settings.matched_adamw_rms * math.sqrt(max(rows, columns))
                each = [newton_schulz(one, settings) for one in direction.reshape(-1, rows, columns)]
                moved = length * np.reshape(each, weight.shape)
            else:
                first[name] = beta1 * first[name] + (1 - beta1) * g
                second[name] = beta2 * second[name] + (1 - beta2) * g * g
                unbiased = second[name] / (1 - beta2 ** (step + 1))
                moved = first[name] / (1 - beta1 ** (step + 1)) / (np.sqrt(unbiased) + settings.eps)
            values[name] = weight - lr * decay * weight - lr * moved
    return values


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
        {"matched_adamw_rms": None, "ns_steps": 3, "adamw_betas": [0.9, 0.99], "adamw_eps": 1e-6},
        {"ns_coefficients": [[STANDARD, 2], [[2, -1.5, 0.5], 3]], "ns_eps": 0.5},
    ],
    ids=["defaults", "plain momentum", "Jordan's length", "coefficients of DeepSeek-V4's kind"],
)
def test_weights_equal_numpys(changes: dict) -> None:
    optimizer = build(**changes)
    run(optimizer, 0, STEPS)
    assert_close(optimizer.parameters, reference(settings_of(**changes)), LIMIT)


def test_compiled_and_not_are_the_same() -> None:
    ours, theirs = build(compiled=True), build(compiled=False)
    run(ours, 0, 5)
    run(theirs, 0, 5)
    assert_close(ours.parameters, theirs.parameters, LIMIT)


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_orthogonal_makes_the_singular_values_one_and_keeps_their_vectors(shape: tuple[int, int]) -> None:
    draw = np.random.default_rng(2).standard_normal(shape)
    left, values, right = np.linalg.svd(draw, full_matrices=False)
    direction = (left * np.linspace(1, 0.05, len(values)) @ right).astype(np.float32)
    found = build().orthogonal(Tensor(direction)).asnumpy().astype(np.float64)
    turned = left.T @ found @ right.T
    assert (np.diag(turned) > 0.6).all() and (np.diag(turned) < 1.3).all()
    rows, columns = sorted(shape)  # each of the five iterations: two sums over `rows`, one over `columns`
    assert np.abs(turned - np.diag(np.diag(turned))).max() < rounding_limit(5 * (rows + rows + columns))


def test_a_gradient_of_zero_moves_nothing_but_by_decay() -> None:
    optimizer = build(weight_decay=0.3)
    optimizer.update([Tensor(np.zeros(shape, np.float32)) for shape in SHAPES.values()], 0.1)
    for name, before in initial().items():
        kept = 1 - 0.1 * 0.3 if before.ndim > 1 else 1.0
        after = optimizer.parameters[name].asnumpy()
        np.testing.assert_allclose(after, before * np.float32(kept), rtol=rounding_limit(4))


def test_the_length_of_the_gradient_does_not_matter_to_matrices() -> None:
    """So the scale of clipping and loss scaling only has to be a power of two for the very same bits."""
    plain, scaled = build(), build()
    run(plain, 0, 3)
    run(scaled, 0, 3, scale=0.25)
    assert_same_bits(weights_of(plain), weights_of(scaled))


def test_state_put_into_a_new_optimizer_continues_with_the_same_bits() -> None:
    whole, first = build(), build()
    run(whole, 0, 8)
    run(first, 0, 4)
    state = first.state_arrays()
    assert sorted(state) == sorted(
        [f"momentum_buffer.{name}" for name in MATRICES]
        + [f"{kind}.{name}" for name in SHAPES if name not in MATRICES for kind in ("exp_avg", "exp_avg_sq")]
    )
    second = build(weights_of(first))
    second.load_state(state, 4)
    run(second, 4, 8)
    assert_same_bits(weights_of(second), weights_of(whole))
    assert_same_bits(second.state_arrays(), whole.state_arrays())


def test_it_learns() -> None:
    step = shared_trainer().step(lambda update: 0.05, optimizer={"type": "Muon"})
    assert isinstance(step.optimizer, Muon)
    losses = [step([make_batch(1, 9, rows=2)]).loss for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_sgd_with_nesterov_equals_numpys() -> None:
    settings = parse_config("sgd", json.dumps({"optimizer": {"type": "SGD", "momentum": 0.9, "nesterov": True}}))
    parameters = {name: Parameter(Tensor(value), name=name) for name, value in initial().items()}
    optimizer = build_optimizer(parameters, parameter_groups(SHAPES, settings.optimizer), settings.optimizer)
    run(optimizer, 0, STEPS)
    for name, weight in initial().items():
        weight, buffer = weight.astype(np.float64), 0.0
        for step in range(STEPS):
            g = gradient(step, name).astype(np.float64)
            buffer = 0.9 * buffer + g
            weight = weight - rate(step) * (g + 0.9 * buffer)
        assert distance(optimizer.parameters[name].asnumpy(), weight) < rounding_limit(4 * STEPS), name
