"""Distillation from the command line: a student learns from a larger teacher and resumes bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from run_helpers import assert_resumes, column, config_of, eval_records, refusal, step_records, train, write_config
from safetensors.numpy import load_file, save_file
from tolerances import RUN_LOSSES

from trainer.cli.main import dispatch
from trainer.config import Config, dump_config, parse_config
from trainer.errors import UserError
from trainer.parallel.world import SINGLE_PROCESS
from trainer.plan.render import plan_text
from trainer.run.plan_file import plan_file
from trainer.run.prepare import build_plan

pytestmark = pytest.mark.slow

HALF = 6
CHANGES = {
    "runner_config": {"batch_size": 2, "epochs": 4, "gradient_accumulation_steps": 2, "stop_step": 2 * HALF},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 0.01},
    "do_eval": True,
    "eval_step_interval": HALF,
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": HALF, "keep_checkpoint_max": 3}],
}
LARGER = {
    "model__model_config__hidden_size": 32, "model__model_config__num_layers": 3, "lr_schedule__learning_rate": 0.01,
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(home: Path) -> Path:
    """Returns the folder of a larger model that has learnt a little."""
    path = write_config(home / "teacher-config", home / "data", CHANGES)
    output = train(path, output_dir=home / "teacher-run", do_eval=False, **LARGER)
    return output / "checkpoints" / f"step-{2 * HALF:08d}"


@pytest.fixture(scope="module")
def path(home: Path, teacher: Path) -> Path:
    loss = {"type": "distillation", "teacher": str(teacher), "temperature": 2.0, "alpha": 0.8}
    return write_config(home / "config", home / "data", CHANGES | {"loss": loss})


def test_the_student_comes_nearer_to_its_teacher(whole: Path) -> None:
    kl = column(step_records(whole), "kl")
    assert kl[-1] < 0.5 * kl[0] and min(kl) > 0
    first, last = eval_records(whole)
    assert last["eval_kl"] < first["eval_kl"] and last["eval_loss"] < first["eval_loss"]
    assert last["eval_perplexity"] == pytest.approx(np.exp(last["eval_loss"]))
    log = (whole / "logs" / "rank-0.log").read_text()
    assert f"kl {last['eval_kl']:.4g}" in log and f"kl {kl[-1]:.4f}" in log


def test_a_stopped_run_continues_bit_for_bit(whole: Path, path: Path) -> None:
    output = assert_resumes(path, whole, HALF)
    assert column(step_records(output), "kl") == column(step_records(whole), "kl")


def test_another_teacher_cannot_continue_and_another_temperature_is_noted(
    whole: Path, path: Path, home: Path, teacher: Path
) -> None:
    output = home / "changed"
    shutil.copytree(whole / "checkpoints", output / "checkpoints")
    other = shutil.copytree(teacher, home / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * np.float32(1.001)
    leave_weights(other)
    save_file(weights, other / "model.safetensors")
    flags = {"output_dir": output, "resume_training": True, "runner_config__stop_step": 2 * HALF + 1}
    with pytest.raises(UserError, match=r"loss\.teacher = .*: the training had another teacher"):
        train(path, loss__teacher=other, **flags)
    # The same weights in another folder are the same teacher.
    moved = shutil.copytree(teacher, home / "moved")
    train(path, loss__teacher=moved, loss__temperature=3.0, **flags)
    log = (output / "logs" / "rank-0.log").read_text()
    assert "loss.temperature 2 -> 3" in log and "loss.teacher" not in log


def leave_weights(checkpoint: Path) -> None:
    """Makes a checkpoint a folder of Hugging Face, whose files have no checksums."""
    for name in ("COMPLETE", "state.json", "optimizer.safetensors"):
        (checkpoint / name).unlink()


def test_accumulation_equals_one_batch(whole: Path, path: Path, home: Path) -> None:
    once = train(path, output_dir=home / "once", runner_config__batch_size=4,
                 runner_config__gradient_accumulation_steps=1, runner_config__stop_step=4)  # fmt: skip
    for name in ("loss", "kl"):
        np.testing.assert_allclose(
            column(step_records(once), name), column(step_records(whole), name)[:4], rtol=RUN_LOSSES
        )


def test_an_exported_teacher_in_bfloat16_stays_so_in_memory(
    path: Path, home: Path, teacher: Path, capsys: pytest.CaptureFixture
) -> None:
    config = teacher.parents[1] / "config.yaml"
    words = ["--config", str(config), "--load_checkpoint", str(teacher), "--output", str(home / "exported")]
    assert dispatch(["export", *words, "--dtype", "bfloat16"]) == 0
    short = {"runner_config__stop_step": 2, "loss__teacher": home / "exported"}
    config = config_of(path, **short)
    assert config.loss.teacher_dtype == "bfloat16"
    narrow = train(path, output_dir=home / "narrow", **short)
    wide = train(path, output_dir=home / "wide", loss__teacher_dtype="float32", **short)
    ours, theirs = (step_records(each) for each in (narrow, wide))
    np.testing.assert_allclose(column(ours, "kl"), column(theirs, "kl"), rtol=RUN_LOSSES)
    memory = [build_plan(config_of(path, loss__teacher_dtype=dtype, **short)).memory_bytes["teacher"]
              for dtype in ("float32", "bfloat16")]  # fmt: skip
    assert memory[0] > memory[1]


def test_adapters_learn_from_a_teacher(path: Path, home: Path) -> None:
    adapters = '{"lora_rank": 4, "lora_alpha": 16, "target_modules": ".*"}'
    flags = {"model__model_config__pet_config": adapters, "lr_schedule__learning_rate": 0.03}
    tuned = train(path, output_dir=home / "adapters", **flags)
    kl = column(step_records(tuned), "kl")
    assert np.mean(kl[-3:]) < np.mean(kl[:3])
    assert_resumes(path, tuned, HALF, **flags)


def test_an_evaluation_reports_the_divergence(
    whole: Path, path: Path, home: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--config", str(whole / "config.yaml"), "--run_mode", "eval", "--load_checkpoint", str(whole)]
    assert dispatch([*words, "--output_dir", str(home / "evaluated")]) == 0
    found = json.loads((home / "evaluated" / "eval.json").read_text())
    last = eval_records(whole)[-1]
    assert (found["loss"], found["kl"]) == (last["eval_loss"], last["eval_kl"])
    assert f"kl {last['eval_kl']:.4g}" in capsys.readouterr().out
    # A prediction needs no teacher.
    gone = config_of(whole / "config.yaml", run_mode="predict", predict_data="a", loss__teacher="/nowhere")
    assert gone.teacher is None


def test_the_configuration_of_a_run_loads_to_an_equal_one(path: Path) -> None:
    config = config_of(path)
    again = parse_config("again", dump_config(config))
    assert again == config and again.teacher is not None
    assert again.loss.teacher_dtype == "float32"


def test_the_plan_counts_the_teacher(path: Path, teacher: Path) -> None:
    plan = build_plan(config_of(path))
    alone = build_plan(config_of(path, loss="null"))
    assert plan.model.teacher is not None and plan.model.teacher.weights == weights_of(config_of(path).teacher)
    text = plan_text(plan)
    assert f"{teacher}: {plan.model.teacher.weights:,} weights, matrices in float32; alpha 0.8, temperature 2" in text
    assert plan.memory_bytes["teacher"] > 4 * plan.model.teacher.weights
    assert alone.memory_bytes.keys() == plan.memory_bytes.keys() - {"teacher"}
    forward = plan.steps.flops_per_row - alone.steps.flops_per_row
    assert 2 * 16 * plan.model.teacher.weights * 0.5 < forward < 2 * 16 * plan.model.teacher.weights * 1.5


def weights_of(config: Config) -> int:
    from trainer.models.spec.shapes import all_shapes

    return sum(int(np.prod(shape)) for shape in all_shapes(config.decoder).values())


REFUSED = {
    "with multi-token prediction": {"model__model_config__mtp_depth": 1},
    "context.mode 1": {"context__mode": 1},
    "a distillation needs a teacher": {"loss__teacher": "null"},
    "its vocabulary has 257 tokens and that of the model 300": {"model__model_config__vocab_size": 300},
    "alpha weighs the divergence": {"loss__beta": 0.1},
    "only simpo has a margin": {"loss__gamma": 0.1},
    "only distillation has a teacher, and loss.type is dpo": {"loss__type": "dpo"},
    "there is no such folder": {"loss__teacher": "/nowhere"},
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused(path: Path, text: str) -> None:
    refusal(lambda: build_plan(config_of(path, **REFUSED[text])), text)


def test_a_plan_for_an_ascend_refuses_the_loss(path: Path) -> None:
    with pytest.raises(UserError, match="not yet supported with anything but native layers on a CPU"):
        plan_file(config_of(path, context__device_target="Ascend"), SINGLE_PROCESS, [])


def test_a_teacher_with_another_tokenizer_or_other_weights_is_refused(path: Path, home: Path, teacher: Path) -> None:
    other = shutil.copytree(teacher, home / "tokens")
    leave_weights(other)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(tokenizer))
    tokens = "has another tokenizer than train_dataset: the id of 'a' is 97, and the teacher's is 98"
    refusal(lambda: build_plan(config_of(path, loss__teacher=other)), tokens, "loss.teacher", "(and 1 more)")
    file.unlink()
    plan = build_plan(config_of(path, loss__teacher=other))
    assert any("only the sizes of the vocabularies are compared" in note for note in plan.notes)
    described = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 8}))
    notes = build_plan(config_of(path, loss__teacher=other)).notes
    assert any("seq_length 16 exceeds its max_position_embeddings 8" in note for note in notes)
    (other / "config.json").write_text(json.dumps(described | {"intermediate_size": 48}))
    with pytest.raises(UserError, match=r"loss\.teacher.*does not fit"):
        build_plan(config_of(path, loss__teacher=other))
