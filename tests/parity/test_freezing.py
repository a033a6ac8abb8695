"""Frozen weights: the others get the very gradients they would have got, and nothing of the frozen ones is computed,
kept or changed. Every trained weight's gradient is compared bit for bit: leaving out a product changes no other."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy_kernels import assert_same_bits
from operator_counts import operator_counts
from product_counts import product_counts
from tiny_trainer import TinyTrainer, by_name, make_window, shared_trainer

from trainer.data import Batch
from trainer.models.spec.names import EMBEDDING
from trainer.step.accumulate import accumulate

ADAMW = {"type": "AdamW", "weight_decay": 0.1}
SGD = {"type": "SGD", "weight_decay": 0.1, "momentum": 0.9}
PROJECTIONS = 7  # matrices of a block
FREEZES: dict[str, dict[str, Any]] = {
    "lower half": {"embeddings": True, "layers": 0},
    "upper layer": {"layers": 1},
    "matrices": {"include": ["*_proj.weight"]},
    "all but norms": {"include": "*", "exclude": "*norm*"},
    "head": {"include": ["lm_head.weight", "model.norm.weight"]},
}
WAYS: dict[str, dict[str, Any]] = {
    "native": {},
    "cells": {"compiled": False},
    "compiled cells": {"host_layers": False},  # as on an Ascend
}
CASES = [
    *((name, "native") for name in FREEZES), ("upper layer", "cells"), ("all but norms", "cells"),
    ("lower half", "compiled cells"), ("matrices", "compiled cells"),
]  # fmt: skip
WINDOW = make_window(12, 3, 0, 7)


class Partial(NamedTuple):
    """A model with frozen weights, and the gradients of the same one without."""

    kind: str
    trainer: TinyTrainer
    right: dict[str, np.ndarray]


@functools.cache
def full_gradients(way: str) -> dict[str, np.ndarray]:
    return gradients(shared_trainer(**WAYS[way]), WINDOW)


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def partial(request: pytest.FixtureRequest) -> Partial:
    kind, way = request.param
    trainer = shared_trainer(sections={"freeze": FREEZES[kind]}, **WAYS[way])
    return Partial(kind, trainer, full_gradients(way))


def gradients(trainer: TinyTrainer, window: list[Batch]) -> dict[str, np.ndarray]:
    step = trainer.step()
    return by_name(step, accumulate(window, step.backward).gradients)


def assert_trained_get_the_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], missing: int) -> None:
    assert len(theirs) - len(ours) == missing > 0
    assert_same_bits(ours, {name: theirs[name] for name in ours})
    assert all(gradient.any() for gradient in ours.values())


def test_trained_weights_get_the_gradients_of_the_full_model(partial: Partial, window: list[Batch]) -> None:
    trainer = partial.trainer
    frozen = sum(not each.requires_grad for each in trainer.model.parameters_by_name.values())
    assert_trained_get_the_same(gradients(trainer, window), partial.right, frozen)


@pytest.mark.parametrize("way", ["native", "cells"])
def test_a_tied_embedding_is_frozen_in_both_places(window: list[Batch], way: str) -> None:
    full, frozen = (
        TinyTrainer(**WAYS[way], tie_word_embeddings=True, sections={"freeze": {"embeddings": freezes}})
        for freezes in (False, True)
    )
    assert_trained_get_the_same(gradients(frozen, window), gradients(full, window), 1)
    step = frozen.step(optimizer=ADAMW)
    step(window)
    np.testing.assert_array_equal(frozen.weights()[EMBEDDING], frozen.initial[EMBEDDING])


@pytest.mark.parametrize("way", ["native", "cells"])
@pytest.mark.parametrize("name", ["model.layers.2.eh_proj.weight", "model.norm.weight"])
def test_an_mtp_module_is_reached_from_what_its_merge_trains(window: list[Batch], way: str, name: str) -> None:
    """The layers below keep nothing; that of the module keeps its activations, and its merge gets its gradient."""
    freeze = {"include": "*", "exclude": name}
    trainer = shared_trainer(sections={"freeze": freeze}, mtp_depth=1, **WAYS[way])
    full = gradients(shared_trainer(mtp_depth=1, **WAYS[way]), window)
    assert_trained_get_the_same(gradients(trainer, window), full, len(full) - 1)
    parts = trainer.model.parts
    if way == "native":
        kept = [layer["block"] for layer in parts.save]
    else:
        kept = [layer["block"].keeps_activations for layer in parts.layers]
    assert kept == [False, False, True]


@pytest.mark.parametrize("way", WAYS)
def test_the_norm_of_an_mtp_module_is_trained_beside_a_frozen_final_norm(window: list[Batch], way: str) -> None:
    freeze = {"include": "model.norm.weight"}
    frozen = shared_trainer(sections={"freeze": freeze}, mtp_depth=1, **WAYS[way])
    full = gradients(shared_trainer(mtp_depth=1, **WAYS[way]), window)
    assert_trained_get_the_same(gradients(frozen, window), full, 1)


def test_frozen_weights_have_no_norm_no_decay_no_state_and_never_change(partial: Partial, window: list[Batch]) -> None:
    """Checks norm, weight decay and optimizer state of frozen parameters; each optimizer has three models or more."""
    kind, trainer, full = partial
    trained = {name for name, each in trainer.model.parameters_by_name.items() if each.requires_grad}
    right = {name: gradient for name, gradient in full.items() if name in trained}
    clipping = {"use_clip_grad": True, "max_grad_norm": 0.1}
    optimizer = SGD if kind in ("matrices", "upper layer", "all but norms") else ADAMW
    step = trainer.step(lambda update: 0.01, optimizer=optimizer, runner_wrapper=clipping)
    norm = step(window).global_norm
    assert norm == pytest.approx(math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in right.values())))
    losses = [step(window).loss for _ in range(4)]
    assert losses[-1] < losses[0]
    kinds = {name.split(".", 1)[0] for name in step.optimizer.state_arrays()}
    assert set(step.optimizer.state_arrays()) == {f"{kind}.{name}" for kind in kinds for name in trained}
    after = trainer.weights()
    for name, before in trainer.initial.items():
        assert np.array_equal(after[name], before) != (name in trained), name


def test_native_layers_compute_no_products_for_frozen_weights(
    window: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One product fewer for each frozen matrix above the lowest trained layer, the whole backward pass fewer below."""
    count, full = product_counts(monkeypatch), shared_trainer()

    def counted(**freeze: Any) -> int:
        step = shared_trainer(sections={"freeze": freeze}).step()
        return count(lambda: accumulate(window[:1], step.backward))

    every = counted()
    inputs = full.build_inputs(window[0])
    layer = (count(lambda: full.model(inputs)) - 1) / full.model.num_layers  # forward pass of a layer
    assert counted(**FREEZES["matrices"]) == every - 2 * PROJECTIONS
    assert counted(**FREEZES["head"]) == every - 1
    # The lower one of two layers has those of its forward pass only; the head has three products.
    assert counted(**FREEZES["lower half"]) == every - ((every - 3) / 2 - layer)


def test_compiled_cells_compute_no_products_for_frozen_weights(window: list[Batch], tmp_path: Path) -> None:
    """Counts the products of the cells that an Ascend compiles."""
    full = shared_trainer(**WAYS["compiled cells"])

    def count(name: str, trainer: TinyTrainer) -> tuple[int, int]:
        step = trainer.step()
        found = operator_counts(lambda: accumulate(window[:1], step.backward).gradients[0].asnumpy(), tmp_path / name)
        return found["MatMul"], found["BatchMatMul"]

    def frozen(name: str) -> tuple[int, int]:
        return count(name, shared_trainer(sections={"freeze": FREEZES[name]}, **WAYS["compiled cells"]))

    inputs = full.build_inputs(window[0])
    forward = operator_counts(lambda: full.model(inputs).tokens.asnumpy(), tmp_path / "forward")["BatchMatMul"]
    products, attention_products = count("full", full)
    assert frozen("matrices") == (products - 2 * PROJECTIONS, attention_products)
    # The lower one of two layers has the products of its forward pass only.
    assert frozen("lower half") == (products - 2 * PROJECTIONS, forward + (attention_products - forward) / 2)
