"""Ranks that share the matrices, the experts or the sequences of a model train it as one rank does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from rank_job import on_rank_processes
from tensor_parallel_cases import COUNTED_TWICE, NOT_COUNTED, Layout, Trained, assembled, config

from trainer.parallel.layout import model_layout

STEPS = 3
_EXPERTS, _TOKENS = "experts of four ranks, each twice", "tokens for experts of two ranks"
_SUITES: dict[str, tuple[int, dict[str, Any], list[str], int]] = {
    # ranks, how they divide the model, cases, steps
    "long": (2, {"tensor": 2, "rows": True}, ["biases, norms, dropout, clipping"], 20),
    "two ranks with rows": (
        2, {"tensor": 2, "rows": True}, ["tied, mapped, recomputed", "latent attention, adapters"], STEPS,
    ),
    "four ranks": (4, {"tensor": 4}, ["one key head, adapters"], STEPS),
    "beside data parallelism": (4, {"tensor": 2, "rows": True}, ["multi-token prediction, frozen"], STEPS),
    _EXPERTS: (4, {"experts": 2}, ["experts"], STEPS),
    _TOKENS: (2, {"tensor": 2}, ["capacity, shared gate"], 1),
    "all three in a ring": (
        4, {"tensor": 2, "context": 2, "experts": 2}, ["latent attention, sigmoid, bias", "capacity, shared gate"], 2,
    ),
    "all three with Ulysses attention": (
        4, {"tensor": 2, "rows": True, "context": 2, "in_ring": False, "experts": 4},
        ["one key head, adapters", "experts"], 2,
    ),
    "all three compiled": (
        4, {"tensor": 2, "rows": True, "context": 2, "experts": 2}, ["compiled experts, load of the step"], STEPS,
    ),
    "experts beside data parallelism": (4, {"tensor": 2, "rows": True, "experts": 4}, ["experts"], 2),
    "experts of context-parallel ranks": (2, {"context": 2}, ["capacity, shared gate"], 20),
}  # fmt: skip
_MISTAKES = {
    _EXPERTS: ["model.layers.1.mlp.experts.up_proj.weight"],
    _TOKENS: ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.shared_expert_gate.weight", NOT_COUNTED],
}
"""What trainings more do wrong, which must be seen: see `make_mistake`."""


@pytest.mark.parametrize("suite", _SUITES)
def test_losses_norms_and_weights_are_those_of_one_rank(suite: str) -> None:
    ranks, how, names, steps = _SUITES[suite]
    mistakes, layout = _MISTAKES.get(suite, ()), Layout(**how)
    parts = on_rank_processes(ranks, "tensor_parallel_cases:parted", names, how, steps, mistakes)
    for name in names:
        compare(name, of_one_rank(name, layout.data(ranks), steps), [part[name] for part in parts], layout)
    for mistake in mistakes:
        with pytest.raises(AssertionError):
            right = of_one_rank(names[0], layout.data(ranks), steps)
            compare(names[0], right, [part[mistake] for part in parts], layout)


@functools.cache
def of_one_rank(name: str, data: int, steps: int) -> Trained:
    """The same by one rank with the sequences of so many data-parallel ones."""
    [found] = on_rank_processes(1, "tensor_parallel_cases:whole", [name], data, steps)
    return found[name]


def test_a_forgotten_sum_and_a_norm_counted_twice_are_seen() -> None:
    name, layer = "one key head, adapters", "model.layers.0.self_attn."
    sums = ["q_proj.lora_A", "o_proj.lora_B", "v_proj.lora_B"]  # over all ranks, and over those with the same key head
    mistakes = [*(f"{layer}{one}.weight" for one in sums), COUNTED_TWICE]
    parts = on_rank_processes(2, "tensor_parallel_cases:parted", [name], {"tensor": 2}, 1, mistakes)
    right = of_one_rank(name, 1, 1)
    compare(name, right, [part[name] for part in parts], Layout(tensor=2))
    for mistake in mistakes:
        with pytest.raises(AssertionError):
            compare(name, right, [part[mistake] for part in parts], Layout(tensor=2))


def compare(name: str, one: Trained, parts: list[Trained], how: Layout) -> None:
    layout = model_layout(config(name).decoder, how.degrees(len(parts)), sequence_parallel=how.rows)
    for part in parts:
        close(part.losses, one.losses, 1e-5, name)
        close(part.norms, one.norms, 1e-4, name)
        close(part.evaluated, one.evaluated, 1e-5, name)
        close(part.others, one.others, 1e-5, name)
        close(part.routers, one.routers, 1e-5, name)
        assert part.local_norms.keys() == one.local_norms.keys()
        close(list(part.local_norms.values()), list(one.local_norms.values()), 1e-3, name)
    found, saved = assembled(layout, parts), parts[0].saved
    assert saved.keys() == one.saved.keys()
    for key, array in saved.items():
        assert array.shape == one.saved[key].shape
        np.testing.assert_allclose(array, one.saved[key], atol=2e-4, err_msg=f"{name}: {key}")
    assert all(np.array_equal(array, saved[weight]) for weight, array in found.items())
    assert found.keys() == one.weights.keys()
    for weight, array in found.items():
        np.testing.assert_allclose(array, one.weights[weight], atol=2e-4, err_msg=f"{name}: {weight}")


def close(ours: Any, theirs: Any, tolerance: float, name: str) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=name)
