"""Recomputation: the same bits as without, for less memory. Nothing is rounded differently, so nothing is tolerated."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_masks import drawn_masks
from fork_server import FORKED, ensure_server
from numpy_kernels import assert_same_bits
from operator_counts import operator_counts
from product_counts import product_counts
from recompute_memory import LAYERS
from tiny_trainer import NATIVE, config_of, garbage_of, shared_trainer, state_of
from tolerances import decoder_limits

from trainer.data import Batch
from trainer.step.accumulate import accumulate

REPOSITORY = Path(__file__).resolve().parents[2]
ADAMW = {"type": "AdamW", "weight_decay": 0.1}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
WHOLE = {"recompute": True}
KINDS: dict[str, dict[str, Any]] = {
    "blocks": WHOLE,
    "attention": {"select_recompute": ["attention"]},
    "feed-forward": {"select_recompute": [r"feed_forward\.mul"]},
    "a mixture": {"recompute": 1, "select_recompute": {"attention": [1]}},  # one layer as blocks, one as attention
}


def trained(window: list[Batch], recompute: dict, sections: dict | None = None, steps: int = 2, **build: Any) -> dict:
    """Losses, norms and everything that some steps of accumulation leave behind."""
    trainer = shared_trainer(sections={"recompute_config": recompute} | (sections or {}), **build)
    step = trainer.step(lambda update: 0.01, optimizer=ADAMW)
    results = [step(window) for _ in range(steps)]
    numbers = {"numbers": np.array([(result.loss, result.global_norm) for result in results])}
    return state_of(step.optimizer, trainer) | numbers


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_with_dropout_and_accumulation(window: list[Batch], kind: str) -> None:
    assert_same_bits(trained(window, KINDS[kind], **DROPOUT), trained(window, {}, **DROPOUT))


def test_the_same_bits_of_cells_that_an_ascend_compiles(window: list[Batch]) -> None:
    """They see updated weights and the masks of each call, as cells that are not compiled do, and leave no garbage:
    reference cycles would hold the activations of every micro-batch until Python's collector comes by."""
    found = []
    for recompute in (KINDS["a mixture"], {}):
        found.append(trained(window, recompute, host_layers=False, **DROPOUT))
        trainer = shared_trainer(sections={"recompute_config": recompute}, host_layers=False, **DROPOUT)
        assert garbage_of(trainer.step(), window) == 0
    assert_same_bits(*found)
    right = trained(window, {}, compiled=False, **DROPOUT)["numbers"]
    np.testing.assert_allclose(found[0]["numbers"], right, rtol=2 * decoder_limits(config_of().decoder).gradients)


CASES: dict[str, dict[str, Any]] = {
    "tied, with biases and norms, frozen matrices": {
        "tie_word_embeddings": True, "use_qk_norm": True, "qkv_has_bias": True,
        "sections": {"freeze": {"include": "*_proj.weight"}},
    },
    "only the embedding trained": {"sections": {"freeze": {"include": "*", "exclude": "embeddings"}}, **DROPOUT},
    "all trained": {"tie_word_embeddings": True, "use_qk_norm": True, "qkv_has_bias": True},
}  # fmt: skip


@NATIVE
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_whatever_the_model(window: list[Batch], case: str, native: bool) -> None:
    build = {"compiled": native, **CASES[case]}
    assert_same_bits(trained(window, WHOLE, steps=1, **build), trained(window, {}, steps=1, **build))


@pytest.fixture(scope="module")
def eager(window: list[Batch]) -> dict[str, np.ndarray]:
    return trained(window[:2], {}, steps=1, compiled=False, **DROPOUT)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_without_compilation(window: list[Batch], eager: dict[str, np.ndarray], kind: str) -> None:
    assert_same_bits(trained(window[:2], KINDS[kind], steps=1, compiled=False, **DROPOUT), eager)


def test_masks_are_drawn_again_not_kept(window: list[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Correctness 12, of what there is to replay: the backward pass meets the forward pass' masks, each once more."""
    drawn = drawn_masks(monkeypatch)
    trainer = shared_trainer(compiled=False, sections={"recompute_config": WHOLE}, **DROPOUT)
    accumulate(window, trainer.step().backward)
    sites, batches = range(6), (0, 1, 3)
    forward = itertools.product(batches, sites)
    assert sorted((mask.key.micro_batch, mask.site) for mask in drawn) == sorted([*forward] * 2)
    first = [mask.site for mask in drawn if mask.key.micro_batch == 0]
    assert first == [0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1, 2]  # the backward pass begins with the last layer


def test_each_native_layer_is_computed_once_more_and_no_more(
    window: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = product_counts(monkeypatch)

    def counted(freeze: dict, **recompute: Any) -> int:
        step = shared_trainer(sections={"recompute_config": recompute, "freeze": freeze}).step()
        return count(lambda: accumulate(window[:1], step.backward))

    lower: dict[str, Any] = {"layers": 0, "embeddings": True}
    trainer = shared_trainer()
    inputs = trainer.build_inputs(window[0])
    forward = count(lambda: trainer.model(inputs)) - 1  # without that of the head
    # All products of a layer but the last one, whose result nobody needs again.
    assert counted({}, recompute=True) == counted({}) + forward - trainer.model.num_layers
    # Where no gradient flows there is nothing to compute again.
    assert counted(lower, recompute=[0]) == counted(lower)


def test_each_block_is_computed_once_more_and_no_more(window: list[Batch], tmp_path: Path) -> None:
    def counts(name: str, freeze: dict, **recompute: Any) -> dict[str, int]:
        step = shared_trainer(compiled=False, sections={"recompute_config": recompute, "freeze": freeze}).step()
        return operator_counts(lambda: accumulate(window[:1], step.backward).gradients[0].asnumpy(), tmp_path / name)

    lower: dict[str, Any] = {"layers": 0, "embeddings": True}
    trainer = shared_trainer(compiled=False)
    inputs = trainer.build_inputs(window[0])
    forward = operator_counts(lambda: trainer.model(inputs).tokens.asnumpy(), tmp_path / "forward")
    plain, again = counts("plain", {}), counts("again", {}, recompute=True)
    assert plain["BatchMatMul"] > 2 * forward["BatchMatMul"] > 0  # the backward pass has two for each
    assert again["BatchMatMul"] == plain["BatchMatMul"] + forward["BatchMatMul"]
    # Where no gradient flows there is nothing to compute again.
    assert counts("frozen", lower, recompute=[0]) == counts("plain frozen", lower)


def test_memory_of_activations_is_a_quarter_or_less_and_of_frozen_layers_nothing() -> None:
    """Measures what 16 layers keep: six times less than without recomputation."""
    ensure_server()
    done = subprocess.run(
        [sys.executable, FORKED, Path(__file__).with_name("recompute_memory.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests")))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    layer = found["kept"] / (LAYERS - 1)
    assert 4 * (found["recomputed"] + layer) < found["kept"] + layer, found
    assert found["lower half frozen"] < 0.6 * found["kept"], found
