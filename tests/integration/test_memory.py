"""A training does not grow: memory, open files and threads of the process, over steps of all kinds."""

from __future__ import annotations

import json
import sys

import pytest
from run_helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import benchmark_soak  # noqa: E402
from benchmark_tools import last_json, run_process  # noqa: E402

pytestmark = pytest.mark.slow

MOST_BYTES = 600_000
"""Operators that leak cost 90 kB for each of these steps, eight times as much altogether."""


def test_a_training_does_not_grow() -> None:
    """Experts, accumulation, an evaluation every ten steps; documents make new tables and masks in every step."""
    flags = benchmark_soak.CASES["experts, accumulation, evaluation"] | {
        "eval_step_interval": "10",
        "train_dataset.data_loader": json.dumps({"type": "TextDataset", "dataset_dir": str(REPOSITORY / "docs")}),
        "train_dataset.tokenizer": json.dumps({"type": "bytes"}),
        "model.model_config.vocab_size": "257",
    }
    command = [sys.executable, REPOSITORY / "scripts" / "benchmark_soak.py", "--flags", json.dumps(flags)]
    samples = last_json(run_process([*command, "--steps", "60", "--warm_up", "60", "--every", "20"]))["samples"]
    found = benchmark_soak.growth(samples)
    assert found.steps == 60
    assert found.bytes_a_step * found.steps < MOST_BYTES and found.files <= 0 and found.threads <= 0
