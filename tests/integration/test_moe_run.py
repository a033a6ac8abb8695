"""Experts and multi-token prediction modules from the command line: drop rates, metrics, resuming, evaluation."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from run_helpers import (
    arrays_of,
    assert_same_bits,
    column,
    eval_records,
    figures,
    predict,
    step_records,
    train_and_read,
    write_config,
)
from tolerances import FEW_OPERATIONS, RUN_MOVES, WHOLE_NUMBER

MOE = "model.model_config.moe_config."
EXPERTS = {
    f"{MOE}expert_num": 4,
    f"{MOE}num_experts_chosen": 2,
    f"{MOE}moe_intermediate_size": 8,
    "runner_config.gradient_accumulation_steps": 2,
}
CAPACITY = {f"{MOE}capacity_factor": 1.1, f"{MOE}callback_moe_droprate": True, "do_eval": True}
# Sigmoid scores, groups, an expert bias, a shared expert, a dense first layer and a multi-token prediction module.
DEEPSEEK = {
    f"{MOE}use_gating_sigmoid": True,
    f"{MOE}n_group": 2,
    f"{MOE}topk_group": 1,
    f"{MOE}balance_via_topk_bias": True,
    f"{MOE}topk_bias_update_rate": 0.01,
    f"{MOE}shared_expert_num": 1,
    f"{MOE}first_k_dense_replace": 1,
    f"{MOE}use_gmm": True,
    "model.model_config.mtp_depth": 1,
    "model.model_config.hidden_dropout": 0.1,
    "context": {"mode": 1},
    "callbacks": [{"type": "MoEDropRateCallback", "expert_num": 4, "num_layers": 2, "mtp_depth": 1}],
}
_LINE = re.compile(r"^layer: (\d+), drop_rate: (\d\.\d{5})$", re.MULTILINE)


def run(folder: Path, data: Path, changes: dict, steps: int, **flags: object) -> str:
    """Trains `folder`/run.yaml; returns what was printed."""
    path = write_config(folder, data, EXPERTS | changes)
    return train_and_read(path, runner_config__stop_step=steps, **flags)[1]


@pytest.fixture(scope="module")
def capacity(home: Path) -> tuple[Path, str]:
    """Returns a run with capacity: its output folder and what it printed."""
    folder = home / "capacity"
    return folder / "output", run(folder, home / "data", CAPACITY, 6)


def test_every_step_prints_a_drop_rate_for_each_layer(capacity: tuple[Path, str]) -> None:
    output, printed = capacity
    records, lines = step_records(output), _LINE.findall(printed)
    assert [int(layer) for layer, _ in lines] == [0, 1] * 6
    rates = [rate for record in records for rate in record["drop_rate"]]
    assert [text for _, text in lines] == [f"{rate:.5f}" for rate in rates]
    assert max(rates) > 0, "a factor of 1.1 drops something of a fresh router"
    # Each log line is the console's.
    assert _LINE.findall(re.sub(r"^\S+ \S+ ", "", (output / "logs" / "rank-0.log").read_text(), flags=re.M)) == lines
    assert "added with the model's expert_num 4, capacity_factor 1.1, num_layers 2, mtp_depth 0" in printed


def test_the_drop_rate_counts_whole_assignments_of_the_window(capacity: tuple[Path, str]) -> None:
    """Correctness 14. 2 micro-batches of 4 rows of 16 tokens, 2 experts a token: 256 assignments a step."""
    for record in step_records(capacity[0]):
        assert record["tokens"] <= 128
        for rate, imbalance in zip(record["drop_rate"], record["load_imbalance"], strict=True):
            dropped = rate * 256
            assert abs(dropped - round(dropped)) < WHOLE_NUMBER
            assert 1 <= imbalance <= 2 and abs(imbalance * 64 - round(imbalance * 64)) < WHOLE_NUMBER
        assert all(0 < entropy <= math.log(4) + FEW_OPERATIONS for entropy in record["router_entropy"])
        assert record["aux_loss"] > 0.9 and "mtp_loss" not in record and "z_loss" not in record
        assert math.isfinite(record["loss"])


def test_capacity_resumes_bit_for_bit(home: Path, capacity: tuple[Path, str]) -> None:
    folder = home / "parts"
    run(folder, home / "data", CAPACITY, 3)
    run(folder, home / "data", CAPACITY, 6, resume_training=True)
    assert figures(folder / "output") == figures(capacity[0])
    names = ("drop_rate", "load_imbalance", "router_entropy", "aux_loss")
    for name in names:
        assert column(step_records(folder / "output"), name) == column(step_records(capacity[0]), name)
    assert_same_bits(arrays_of(folder / "output"), arrays_of(capacity[0]))


def test_recomputing_counts_every_token_once(home: Path) -> None:
    """Correctness 12."""
    kept, again = home / "kept", home / "again"
    for folder, recompute in ((kept, False), (again, True)):
        changes = {"recompute_config.recompute": recompute}
        run(folder, home / "data", CAPACITY | changes, 3)
    names = ("drop_rate", "load_imbalance", "router_entropy")
    for name in names:
        assert column(step_records(again / "output"), name) == column(step_records(kept / "output"), name)
    assert figures(again / "output") == figures(kept / "output")


def test_a_deepseek_like_model_logs_zero_and_says_why_and_resumes(home: Path) -> None:
    whole, parts = home / "deepseek", home / "deepseek_parts"
    printed = run(whole, home / "data", DEEPSEEK, 4)
    assert "the drop rate will be 0 in every layer: use_gmm drops no tokens" in printed
    # Layer 0 is dense; the multi-token prediction module counts on after layer 1.
    assert _LINE.findall(printed) == [("1", "0.00000"), ("2", "0.00000")] * 4
    assert "| mtp_loss " in printed and "| aux_loss " in printed
    for record in step_records(whole / "output"):
        assert record["drop_rate"] == [0.0, 0.0] and len(record["load_imbalance"]) == 2
        assert 0 < record["mtp_loss"] < 10
    run(parts, home / "data", DEEPSEEK, 2)
    run(parts, home / "data", DEEPSEEK, 4, resume_training=True)
    assert figures(parts / "output") == figures(whole / "output")
    assert_same_bits(arrays_of(parts / "output"), arrays_of(whole / "output"))
    biases = [array for name, array in arrays_of(whole / "output").items() if "e_score_correction_bias" in name]
    farthest = 4 * 0.01 + RUN_MOVES  # four updates
    assert len(biases) == 2 and all(np.any(bias) and np.all(np.abs(bias) <= farthest) for bias in biases)


def test_a_trained_mixture_is_evaluated_and_continues_a_text(home: Path, capacity: tuple[Path, str]) -> None:
    path, output = home / "capacity" / "run.yaml", home / "evaluated"
    flags = {"load_checkpoint": capacity[0], "output_dir": output}
    _, printed = train_and_read(path, run_mode="eval", **flags)
    assert "capacity_factor 1.1 applies to training only" in printed
    loss = json.loads((output / "eval.json").read_text())["loss"]
    assert loss == eval_records(capacity[0])[-1]["eval_loss"]
    flags |= {"predict_data": "the cat", "model__model_config__max_new_tokens": 4}
    assert len(predict(path, **flags)[0]["text"].encode()) == 4


def test_the_report_is_drawn(home: Path) -> None:
    folder = home / "drawn"
    run(folder, home / "data", CAPACITY | {"report": True}, 2)
    assert (folder / "output" / "report.png").stat().st_size > 10_000
