"""Explicit mode on the dry Ascend backend: every kind of model and run, alone and as one of eight ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ascend_cases import DENSE, on_ascend

from trainer.dryrun.process import Measurement

Bench = Callable[[str], Measurement]

MTP = {"mtp_depth": 1}
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
LORA = {"pet_config": {"pet_type": "lora", "lora_rank": 4, "target_modules": ".*wq|.*w2"}}
ONE_RANK = {
    "dense": on_ascend(DENSE),
    "dense, mode 1": on_ascend(DENSE, {"context": {"mode": 1}}),
    "documents": on_ascend(DENSE, documents=3),
    "multi-token prediction": on_ascend(DENSE, model=MTP),
    "LoRA": on_ascend(DENSE, model=LORA),
    "frozen": on_ascend(DENSE, {"freeze": {"include": ["embeddings", {"layers": 0}]}}),
    "recomputed": on_ascend(DENSE, {"recompute_config": {"recompute": True}}),
    "dropout": on_ascend(DENSE, model={"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "float16 with a loss scale": on_ascend(
        DENSE, {"runner_wrapper": {"scale_sense": {"type": "DynamicLossScaleUpdateCell"}}},
        model={"compute_dtype": "float16"},
    ),
    "float32": on_ascend(DENSE, model={"compute_dtype": "float32", "use_flash_attention": False}),
    "SGD": on_ascend(DENSE, {"optimizer": {"type": "SGD"}}),
    "Muon": on_ascend(DENSE, {"optimizer": {"type": "Muon"}}),
    "no accumulation": on_ascend(DENSE, {"runner_config": {"gradient_accumulation_steps": 1}}),
    "evaluation": on_ascend(DENSE, task="trainer.dryrun.tasks:evaluation"),
    "prediction": on_ascend(DENSE, task="trainer.dryrun.tasks:prediction", steps=3),
    "checkpoint": on_ascend(DENSE, task="trainer.dryrun.tasks:checkpoint", steps=1),
}  # fmt: skip
CASES = dict(ONE_RANK)


@pytest.mark.parametrize("name", ONE_RANK)
def test_it_runs(bench: Bench, name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found.get("updated", True), found.found
