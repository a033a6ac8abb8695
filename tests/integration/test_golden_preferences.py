"""Trainings on preferences have the losses, rewards and norms of TRL (scripts/golden_preferences.py), from text on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from golden_preferences_cases import (
    BETAS,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    SETTINGS,
    STEPS,
    WEIGHT_DECAY,
    load_results,
    records_of,
    write_model,
)
from run_helpers import step_records, train
from tolerances import RUN_NEAR_ZERO, RUN_NORMS

pytestmark = pytest.mark.slow

NAMES = {"grad_norm": "global_norm", "accuracy": "rewards/accuracies", "margin": "rewards/margins"}
"""Of TRL's numbers -> in metrics.jsonl, where they differ."""


@pytest.mark.parametrize("batch", [4, 1], ids=["one batch", "accumulated"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_steps_are_those_of_trl(kind: str, batch: int, tmp_path: Path) -> None:
    write_model(kind, tmp_path / "model")
    records = records_of(kind)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({
        "output_dir": str(tmp_path / "output"),
        "report": False,
        "run_mode": "finetune",
        "pretrained_model_dir": str(tmp_path / "model"),
        "model": {"model_config": {"seq_length": 24}},
        "loss": {"type": kind, **SETTINGS[kind]},
        "train_dataset": {
            "cache_dir": str(tmp_path / "cache"), "packing": "none",
            "data_loader": {"type": "JsonlDataset", "dataset_dir": str(tmp_path / "data.jsonl")},
        },
        "runner_config": {
            "batch_size": batch, "gradient_accumulation_steps": len(records) // batch, "epochs": STEPS,
        },
        "runner_wrapper": {"use_clip_grad": True, "max_grad_norm": CLIP},
        "optimizer": {"type": "AdamW", "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
        "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": LEARNING_RATE},
    }))  # fmt: skip
    steps = step_records(train(path))
    results = load_results()[kind]
    assert len(steps) == STEPS
    for name, right in results.items():
        found = [step[NAMES.get(name, name)] for step in steps]
        np.testing.assert_allclose(found, right, rtol=RUN_NORMS, atol=RUN_NEAR_ZERO, err_msg=name)
    if kind == "kto":
        assert results["kl"][-1] > 0 == results["kl"][0]
