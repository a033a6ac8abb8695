"""Training and prediction do not grow: memory, open files and threads of the process, over steps of all kinds."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence

import pytest
from run_helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import benchmark_soak  # noqa: E402
from benchmark_tools import last_json, run_process  # noqa: E402

pytestmark = pytest.mark.slow

# Bytes in each step that is counted. Measured: the heap grows by 0.3 kB; without the compiled lookup of the embedding
# by 85 kB, while private memory grows by 7 and 8.5 kB, because it has room for that. A MatMul called alone leaks
# 0.33 kB of heap and 1.5 kB of private memory; a step here has two micro-batches of two layers. A step of a prediction
# is a token.
MOST_HEAP_BYTES, MOST_PRIVATE_BYTES = 1_200, 15_000


def test_training_and_prediction_do_not_grow() -> None:
    """Experts, accumulation, an evaluation every ten steps; documents make new tables and masks in every step.
    Then predictions of all kinds in the same process, with prompts of new lengths every ten tokens."""
    flags = benchmark_soak.CASES["experts, accumulation, evaluation"] | {
        "eval_step_interval": "10",
        "train_dataset.data_loader": json.dumps({"type": "TextDataset", "dataset_dir": str(REPOSITORY / "docs")}),
        "train_dataset.tokenizer": json.dumps({"type": "bytes"}),
        "model.model_config.vocab_size": "257",
    }
    command = [sys.executable, REPOSITORY / "scripts" / "benchmark_soak.py", "--flags", json.dumps(flags)]
    predictions = [case for name, case in benchmark_soak.CASES.items() if name.startswith("prediction")]
    command += ["--steps", "40", "--warm_up", "60", "--every", "10", "--then", *map(json.dumps, predictions)]
    report = last_json(run_process(command))
    assert len(report["then"]) == 3
    for samples in (report["samples"], *report["then"]):
        found = benchmark_soak.growth(samples)
        assert found.steps == 40
        assert median_growth(samples, "heap_bytes_a_step") < MOST_HEAP_BYTES
        assert median_growth(samples, "bytes_a_step") < MOST_PRIVATE_BYTES
        assert found.files <= 0 and found.threads <= 0


def median_growth(samples: Sequence[Sequence[int]], name: str) -> float:
    """Returns the median growth of every ten steps, in bytes a step; it ignores what a new shape of the data takes
    once."""
    pairs = zip(samples, samples[1:], strict=False)
    return statistics.median(getattr(benchmark_soak.growth(pair), name) for pair in pairs)
