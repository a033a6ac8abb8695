"""compute_dtype bfloat16 on a CPU from the command line's configuration: training, resuming, evaluation, prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import assert_resumes, column, eval_records, evaluate, predict, step_records, train
from tolerances import U_BFLOAT16

pytestmark = pytest.mark.slow

HALF = 4
CHANGES = {
    "model.model_config.compute_dtype": "bfloat16",
    "runner_config": {"batch_size": 4, "epochs": 1, "gradient_accumulation_steps": 2, "stop_step": 2 * HALF},
    "runner_wrapper": {"use_clip_grad": True, "scale_sense": {"type": "DynamicLossScaleUpdateCell", "scale_window": 3}},
    "do_eval": True,
    "eval_step_interval": HALF,
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": HALF}],
}


def test_stopped_and_resumed_equals_never_stopped(path: Path, whole: Path) -> None:
    assert_resumes(path, whole, HALF)


def test_losses_are_those_of_float32_but_for_rounding(home: Path, path: Path, whole: Path) -> None:
    plain = train(path, output_dir=home / "float32", model__model_config__compute_dtype="float32")
    ours, right = (column(step_records(folder), "loss") for folder in (whole, plain))
    assert ours != right and ours == pytest.approx(right, rel=U_BFLOAT16)


def test_a_checkpoint_is_evaluated_and_continued(home: Path, path: Path, whole: Path) -> None:
    found = evaluate(path, home / "used", load_checkpoint=whole / "checkpoints")
    assert found["loss"] == eval_records(whole)[-1]["eval_loss"]
    flags = {"load_checkpoint": whole / "checkpoints", "output_dir": home / "used", "predict_data": "the cat"}
    texts = [predict(path, model__model_config__compute_dtype=dtype, **flags) for dtype in ("bfloat16", "float32")]
    assert texts[0] == texts[1] and texts[0][0]["text"]  # prediction computes in float32 in any case
