"""Ranks that share the matrices, the experts or the sequences of a model train it as one rank does."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from rank_job import on_rank_processes
from tensor_parallel_cases import (
    COUNTED_TWICE,
    FAMILIES,
    NOT_COUNTED,
    Layout,
    Trained,
    assembled,
    config,
    every_parted,
    whole,
)
from tolerances import (
    RUN_LOCAL_NORMS,
    RUN_LOSSES,
    RUN_LOSSES_BFLOAT16,
    RUN_NORMS,
    RUN_NORMS_BFLOAT16,
    RUN_TENSOR_WEIGHTS,
)

from trainer.parallel.world import World
from trainer.plan.division import model_layout_for

LONG, SHORT = 8, 2
DENSE, MIXTRAL = "dense", "Mixtral, shared gate, frozen"
DEEPSEEK, RECOMPUTED = "DeepSeek", "DeepSeek, recomputed"
ADAPTERS, LATENT_ADAPTERS = "one key head, adapters", "latent attention, adapters"
BALANCED = "experts, load of the step"
DOCUMENTS = "windows, documents, dropout"
EXPERT_BIASES = "experts with biases"
BIASES, ONE_HEAD_RECOMPUTED = "biases", "one key head, recomputed"
_NARROW = {"bfloat16": SHORT, "bfloat16, experts": SHORT, "float16": SHORT}
_ATTENTION, _MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


class Suite(NamedTuple):
    """What so many ranks train that divide a model in one way.

    Attributes:
        cases: How many steps of each.
        mistakes: Of a case those that must be seen in its first step: see `tensor_parallel_cases.mistaken`.
        narrow: Products take rounded numbers: losses and norms alone are compared.
    """

    ranks: int
    layout: dict[str, Any]
    cases: dict[str, int]
    mistakes: Mapping[str, list[str]] = {}
    narrow: bool = False

    @property
    def data(self) -> int:
        return Layout(**self.layout).data(self.ranks)


SUITES = {
    "tensor with rows": Suite(2, {"tensor": 2, "rows": True}, {DENSE: SHORT, LATENT_ADAPTERS: SHORT, BIASES: LONG}),
    "families": Suite(2, {"tensor": 2, "rows": True}, dict.fromkeys(FAMILIES, 1)),
    "tensor": Suite(2, {"tensor": 2}, {ADAPTERS: 1, MIXTRAL: 1, BIASES: SHORT, ONE_HEAD_RECOMPUTED: SHORT}, {
        # Summed over all ranks, and over those with the same key head.
        ADAPTERS: [f"{_ATTENTION}{one}.weight" for one in ("q_proj.lora_A", "o_proj.lora_B", "v_proj.lora_B")] + [
            COUNTED_TWICE],
        MIXTRAL: [f"{_MLP}gate.weight", f"{_MLP}shared_expert_gate.weight", NOT_COUNTED],
    }),
    "tensor of four": Suite(4, {"tensor": 4}, {ADAPTERS: SHORT}),
    "context": Suite(2, {"context": 2}, {MIXTRAL: SHORT, LATENT_ADAPTERS: SHORT, DENSE: SHORT}),
    "context by heads": Suite(2, {"context": 2, "ulysses": 2}, {LATENT_ADAPTERS: SHORT, DOCUMENTS: SHORT}),
    "context in a ring of pairs": Suite(4, {"context": 4, "ulysses": 2}, {ADAPTERS: SHORT, DOCUMENTS: SHORT}),
    "experts, each on two ranks": Suite(
        4, {"experts": 2}, {MIXTRAL: SHORT}, {MIXTRAL: [f"{_MLP}experts.up_proj.weight"]},
    ),
    "experts with tensor and data": Suite(
        4, {"tensor": 2, "rows": True, "experts": 4}, {MIXTRAL: SHORT, EXPERT_BIASES: SHORT},
    ),
    "context in a ring with tensor and experts": Suite(
        4, {"tensor": 2, "rows": True, "context": 2, "experts": 2}, {DEEPSEEK: SHORT},
    ),
    "context by heads with tensor and experts": Suite(
        4, {"tensor": 2, "context": 2, "ulysses": 2, "experts": 4}, {ADAPTERS: SHORT, RECOMPUTED: SHORT},
    ),
    "context in a ring with experts": Suite(2, {"context": 2, "experts": 2}, {BALANCED: SHORT}),
    "tensor, half precision": Suite(2, {"tensor": 2}, _NARROW, narrow=True),
    "tensor with rows and experts, half precision": Suite(
        2, {"tensor": 2, "rows": True, "experts": 2}, _NARROW, narrow=True,
    ),
    "context, half precision": Suite(2, {"context": 2}, _NARROW, narrow=True),
    "context by heads, half precision": Suite(2, {"context": 2, "ulysses": 2}, _NARROW, narrow=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def one_rank() -> dict[tuple[str, int], dict[int, Trained]]:
    """Returns the training of one rank after each requested number of steps, by case and number of data-parallel
    ranks."""
    stops: dict[tuple[str, int], set[int]] = {}
    for suite in SUITES.values():
        for name, steps in suite.cases.items():
            stops.setdefault((name, suite.data), set()).add(steps)
    wanted = [(*key, sorted(each)) for key, each in stops.items()]
    [found] = on_rank_processes(1, f"{whole.__module__}:whole", wanted)
    return dict(zip(stops, found, strict=True))


@functools.cache
def of_ranks(number: int) -> dict[str, list[tuple[dict[str, Trained], dict[str, Trained]]]]:
    """Returns the training of each rank by suite: one job for all suites of so many ranks."""
    suites = {name: suite for name, suite in SUITES.items() if suite.ranks == number}
    given = [(suite.layout, suite.cases, suite.mistakes) for suite in suites.values()]
    ranks = on_rank_processes(number, f"{every_parted.__module__}:every_parted", given, limit_seconds=400)
    return {name: [found[place] for found in ranks] for place, name in enumerate(suites)}


@pytest.mark.parametrize("name", SUITES)
def test_losses_norms_and_weights_are_those_of_one_rank(name: str, one_rank: dict) -> None:
    suite = SUITES[name]
    found = of_ranks(suite.ranks)[name]
    for case, steps in suite.cases.items():
        right, parts = one_rank[case, suite.data][steps], [right[case] for right, _ in found]
        if suite.narrow:
            compare_narrow(case, right, parts)
            continue
        compare_steps(case, right, parts)
        compare_ends(case, right, parts, suite)
    for case, mistakes in suite.mistakes.items():
        for mistake in mistakes:
            right = one_rank[case, suite.data][suite.cases[case]]
            with pytest.raises(AssertionError):
                compare_steps(case, right, [wrong[mistake] for _, wrong in found])


def compare_steps(name: str, one: Trained, parts: list[Trained]) -> None:
    """Compares the steps that the ranks have done."""
    steps = len(parts[0].losses)
    for part in parts:
        close(part.losses, one.losses[:steps], RUN_LOSSES, name)
        close(part.norms, one.norms[:steps], RUN_NORMS, name)
        close(part.others, one.others[:steps], RUN_LOSSES, name)
        close(part.routers, one.routers[:steps], RUN_LOSSES, name)
        for ours, right in zip(part.local_norms, one.local_norms[:steps], strict=True):
            assert ours.keys() == right.keys()
            close(list(ours.values()), list(right.values()), RUN_LOCAL_NORMS, name)


def compare_narrow(name: str, one: Trained, parts: list[Trained]) -> None:
    for part in parts:
        assert part.losses == parts[0].losses
        close(part.losses, one.losses, RUN_LOSSES_BFLOAT16, name)
        close(part.evaluated, one.evaluated, RUN_LOSSES_BFLOAT16, name)
        close(part.norms, one.norms, RUN_NORMS_BFLOAT16, name)


def compare_ends(name: str, one: Trained, parts: list[Trained], suite: Suite) -> None:
    how = config(name, Layout(**suite.layout), suite.ranks)
    layout = model_layout_for(how, World(0, suite.ranks, 0, suite.ranks))
    close([part.evaluated for part in parts], one.evaluated, RUN_LOSSES, name)
    found, saved = assembled(layout, parts), parts[0].saved
    assert saved.keys() == one.saved.keys()
    for key, array in saved.items():
        assert array.shape == one.saved[key].shape
        np.testing.assert_allclose(array, one.saved[key], atol=RUN_TENSOR_WEIGHTS, err_msg=f"{name}: {key}")
    assert all(np.array_equal(array, saved[weight]) for weight, array in found.items())
    assert found.keys() == one.weights.keys()
    for weight, array in found.items():
        np.testing.assert_allclose(array, one.weights[weight], atol=RUN_TENSOR_WEIGHTS, err_msg=f"{name}: {weight}")


def close(ours: Any, theirs: Any, tolerance: float, name: str) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=name)
