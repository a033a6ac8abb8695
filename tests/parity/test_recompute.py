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
from fork_server import FORKED, ensure_server
from operator_counts import operator_counts
from recompute_memory import LAYERS
from tiny_trainer import assert_same_bits, make_batch, shared_trainer, state_of

from trainer.data import Batch
from trainer.ops import dropout, plain
from trainer.ops.dropout import DropoutKey
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
COMPILED = ("feed-forward", "a mixture")


@pytest.fixture(scope="module")
def window() -> list[Batch]:
    return [make_batch(seed, valid) for seed, valid in enumerate((12, 3, 0, 7))]


def trained(window: list[Batch], recompute: dict, sections: dict | None = None, steps: int = 2, **build: Any) -> dict:
    """Losses, norms and everything that some steps of accumulation leave behind."""
    trainer = shared_trainer(sections={"recompute_config": recompute} | (sections or {}), **build)
    step = trainer.step(lambda update: 0.01, optimizer=ADAMW)
    results = [step(window) for _ in range(steps)]
    numbers = {"numbers": np.array([(result.loss, result.global_norm) for result in results])}
    return state_of(step.optimizer, trainer) | numbers


@pytest.fixture(scope="module")
def with_dropout(window: list[Batch]) -> dict[str, np.ndarray]:
    return trained(window, {}, **DROPOUT)


@pytest.mark.parametrize("kind", COMPILED)
def test_the_same_bits_with_dropout_and_accumulation(
    window: list[Batch], with_dropout: dict[str, np.ndarray], kind: str
) -> None:
    assert_same_bits(trained(window, KINDS[kind], **DROPOUT), with_dropout)


CASES: dict[str, dict[str, Any]] = {
    "tied, with biases and norms, frozen matrices": {
        "tie_word_embeddings": True, "use_qk_norm": True, "qkv_has_bias": True,
        "sections": {"freeze": {"include": "*_proj.weight"}},
    },
    "only the embedding trained, eager": {
        "compiled": False, "sections": {"freeze": {"include": "*", "exclude": "embeddings"}}, **DROPOUT,
    },
    "all trained, eager": {"compiled": False, "tie_word_embeddings": True, "use_qk_norm": True, "qkv_has_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_whatever_the_model(window: list[Batch], case: str) -> None:
    build = CASES[case]
    assert_same_bits(trained(window, WHOLE, steps=1, **build), trained(window, {}, steps=1, **build))


@pytest.fixture(scope="module")
def eager(window: list[Batch]) -> dict[str, np.ndarray]:
    return trained(window[:2], {}, steps=1, compiled=False, **DROPOUT)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_without_compilation(window: list[Batch], eager: dict[str, np.ndarray], kind: str) -> None:
    assert_same_bits(trained(window[:2], KINDS[kind], steps=1, compiled=False, **DROPOUT), eager)


def test_masks_are_drawn_again_not_kept(window: list[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Correctness 12, of what there is to replay: the backward pass meets the forward pass' masks, each once more."""
    drawn: list[tuple[DropoutKey, int]] = []
    original = plain.dropout_mask

    def recording(key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, part: None = None) -> np.ndarray:
        drawn.append((key, site))
        return original(key, site, shape, rate, part)

    for module in (plain, dropout):  # of the residual stream, and of the scores
        monkeypatch.setattr(module, "dropout_mask", recording)
    trainer = shared_trainer(compiled=False, sections={"recompute_config": WHOLE}, **DROPOUT)
    accumulate(window, trainer.step().backward)
    sites, batches = range(6), (0, 1, 3)
    forward = itertools.product(batches, sites)
    assert sorted((key.micro_batch, site) for key, site in drawn) == sorted([*forward] * 2)
    first = [site for key, site in drawn if key.micro_batch == 0]
    assert first == [0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1, 2]  # the backward pass begins with the last layer


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
    """What 16 layers keep; measured 7 times less than without."""
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
