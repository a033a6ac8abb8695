"""Preferences from the command line: DPO learns, resumes bit for bit, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from run_helpers import (
    assert_resumes,
    assert_same_run,
    column,
    config_of,
    eval_records,
    figures,
    refusal,
    step_records,
    train,
    write_config,
    write_labelled,
    write_preferences,
)
from tolerances import RUN_LOSSES, RUN_NORMS, rounding_limit

from trainer.cli.main import dispatch
from trainer.config import load_config
from trainer.errors import UserError
from trainer.parallel.world import SINGLE_PROCESS
from trainer.run.plan_file import plan_file
from trainer.run.prepare import build_plan

pytestmark = pytest.mark.slow

HALF = 8
REWARDS = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"]
CHANGES = {
    "loss": {"type": "dpo", "beta": 0.5},
    "model.model_config.seq_length": 48,
    "train_dataset.data_loader.type": "JsonlDataset",
    "runner_config": {"batch_size": 4, "epochs": 4, "gradient_accumulation_steps": 2, "stop_step": 2 * HALF},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 0.01},
    "do_eval": True,
    "eval_step_interval": HALF,
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": HALF, "keep_checkpoint_max": 3}],
}


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    write_preferences(home / "pairs.jsonl")
    return home


@pytest.fixture(scope="module")
def path(home: Path) -> Path:
    return write_config(home / "config", home / "pairs.jsonl", CHANGES)


def references(home: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (home / "config" / "cache").glob("reference-*.bin")}


def test_the_margin_grows(whole: Path) -> None:
    steps = step_records(whole)
    assert abs(steps[0]["loss"] - np.log(2)) < RUN_LOSSES  # the weights are those of the reference
    assert [steps[0][name] for name in REWARDS] == [0, 0, 0, 0]
    assert steps[-1]["rewards/accuracies"] == 1 and steps[-1]["rewards/margins"] > 1
    assert steps[-1]["loss"] < 0.3
    first, last = eval_records(whole)
    assert last["eval_accuracy"] >= 0.9 and last["eval_margin"] > first["eval_margin"] > 0
    assert last["eval_loss"] < first["eval_loss"] and "eval_perplexity" not in last


def test_the_reference_is_computed_once_for_weights_and_data(whole: Path, path: Path, home: Path) -> None:
    before = references(home)
    assert len(before) == 2  # of the training data and of what is held out
    train(path, output_dir=home / "again", runner_config__stop_step=2)
    assert references(home) == before
    train(path, output_dir=home / "other", runner_config__stop_step=1, seed=2)
    assert len(references(home)) == 4


def test_damaged_references_are_computed_again(whole: Path, path: Path, home: Path) -> None:
    before = references(home)
    for name, content in before.items():
        (home / "config" / "cache" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    train(path, output_dir=home / "damaged", runner_config__stop_step=1)
    assert figures(home / "damaged") == figures(whole)[:1]
    after = references(home)
    assert after.keys() == before.keys()
    assert sum(after[name] == before[name] for name in before) == 2  # of this seed


@pytest.mark.parametrize("keeps", [True, False], ids=["file", "no file"])
def test_a_stopped_run_continues_bit_for_bit(whole: Path, path: Path, home: Path, keeps: bool) -> None:
    output = home / f"resumed-{keeps}"
    train(path, output_dir=output, runner_config__stop_step=HALF)
    if not keeps:
        for name in references(home):
            (home / "config" / "cache" / name).unlink()
    train(path, output_dir=output, resume_training=True)
    assert_same_run(output, whole)
    for name in REWARDS:
        assert column(step_records(output), name) == column(step_records(whole), name)


def test_another_first_model_cannot_continue(whole: Path, path: Path, home: Path) -> None:
    output = home / "changed"
    shutil.copytree(whole / "checkpoints", output / "checkpoints")
    state = output / "checkpoints" / f"step-{2 * HALF:08d}" / "state.json"
    assert json.loads(state.read_text())["step"]["first_weights"]
    first = home / "first"
    train(path, output_dir=first, runner_config__stop_step=1)
    with pytest.raises(UserError, match="compares with the weights before the training"):
        train(path, output_dir=output, resume_training=True, runner_config__stop_step=2 * HALF + 1,
              load_checkpoint=first / "checkpoints")  # fmt: skip


def test_another_loss_is_told_when_a_run_continues(whole: Path, path: Path) -> None:
    for flags, told in [
        ({"loss__beta": 0.2}, "loss.beta 0.5 -> 0.2"),
        ({"loss__type": "ipo"}, "loss.type dpo -> ipo"),
        ({"loss__beta": "null"}, "loss.beta 0.5 -> not set"),
    ]:
        notes = build_plan(config_of(path, output_dir=whole, resume_training=True, **flags)).notes
        assert f"differs from the run that made step-{2 * HALF:08d}: {told}" in notes


def test_accumulation_equals_one_batch(whole: Path, path: Path, home: Path) -> None:
    once = train(path, output_dir=home / "once", runner_config__batch_size=8,
                 runner_config__gradient_accumulation_steps=1)  # fmt: skip
    np.testing.assert_allclose(
        column(step_records(once), "loss")[:4], column(step_records(whole), "loss")[:4], rtol=RUN_NORMS
    )


@pytest.mark.parametrize("kind", ["ipo", "simpo", "orpo"])
def test_other_losses_learn(path: Path, home: Path, kind: str) -> None:
    before = references(home)
    output = train(path, output_dir=home / kind, loss__type=kind, loss__beta="null")
    steps = step_records(output)
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]
    assert eval_records(output)[-1]["eval_accuracy"] >= 0.8
    if kind != "ipo":
        assert references(home) == before


def test_labelled_answers_learn_and_continue_bit_for_bit(path: Path, home: Path) -> None:
    flags = {
        "loss__type": "kto", "loss__desirable_weight": 1.2, "loss__beta": 1.0, "runner_config__epochs": 6,
        "train_dataset__data_loader__dataset_dir": write_labelled(home / "labelled.jsonl"),
    }  # fmt: skip
    whole = train(path, output_dir=home / "kto", **flags)
    steps = step_records(whole)
    # The reference read longer sequences than the pass over the answers, whose products have other tiles.
    assert [steps[0][name] for name in ("kl", *REWARDS[:3])] == pytest.approx([0] * 4, abs=rounding_limit(256))
    assert 0.5 < steps[0]["loss"] < 0.6  # a mean of 0.5 and 0.5 * 1.2
    assert steps[-1]["rewards/margins"] == steps[-1]["rewards/chosen"] - steps[-1]["rewards/rejected"] > 1
    assert max(column(steps, "kl")) > 0
    first, last = eval_records(whole)
    assert last["eval_margin"] > first["eval_margin"] > 0 and last["eval_accuracy"] >= 0.7
    assert last["eval_loss"] < first["eval_loss"] and "eval_perplexity" not in last
    assert_resumes(path, whole, HALF, **flags)


def test_a_reward_model_learns_continues_and_scores(path: Path, home: Path, capsys: pytest.CaptureFixture) -> None:
    flags = {"loss__type": "reward", "loss__beta": "null"}
    base = train(path, output_dir=home / "language-model", loss__type="simpo", runner_config__stop_step=1)
    before = references(home)
    first = {"run_mode": "finetune", "load_checkpoint": base}
    whole = train(path, output_dir=home / "reward", **flags, **first)
    assert "the checkpoint has no score head" in (whole / "logs" / "rank-0.log").read_text()
    assert references(home) == before
    steps = step_records(whole)
    assert steps[-1]["rewards/accuracies"] == 1 and steps[-1]["loss"] < 0.3 < steps[0]["loss"]
    last = eval_records(whole)[-1]
    assert last["eval_accuracy"] >= 0.9 and last["eval_margin"] > 1 and "eval_perplexity" not in last
    assert_resumes(path, whole, HALF, first, **flags)
    # The run's own configuration evaluates the model, and scores answers with it.
    own = load_config(str(whole / "config.yaml"))
    assert own.decoder.num_labels == 1
    answers = home / "answers.jsonl"
    records = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()[:8]]
    completions = [(each["prompt"], each[name]) for each in records for name in ("chosen", "rejected")]
    rows = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in completions]
    answers.write_text("\n".join(rows))
    words = ["--config", str(whole / "config.yaml"), "--run_mode", "predict", "--load_checkpoint", str(whole)]
    capsys.readouterr()
    assert dispatch([*words, "--predict_data", str(answers), "--output_dir", str(home / "scores")]) == 0
    printed = capsys.readouterr().out.splitlines()
    found = [json.loads(line) for line in (home / "scores" / "predictions.jsonl").read_text().splitlines()]
    assert [each["completion"] for each in found] == [completion for _, completion in completions]
    scores = np.array([each["score"] for each in found])
    assert (scores[::2] > scores[1::2]).mean() >= 0.8
    assert printed[0] == f"[1/16] {completions[0][1]!r}: {scores[0]:.6g}"
    # With use_ema the moving averages score.
    averaged = train(path, output_dir=home / "averaged", optimizer__ema_decay=0.9, **flags, **first)
    words = ["--config", str(averaged / "config.yaml"), "--run_mode", "predict", "--load_checkpoint", str(averaged)]
    for use_ema in ("false", "true"):
        flag = ["--use_ema", use_ema, "--predict_data", "a question", "--output_dir", str(home / use_ema)]
        assert dispatch([*words, *flag]) == 0
    texts = [(home / use_ema / "predictions.jsonl").read_text() for use_ema in ("false", "true")]
    assert texts[0] != texts[1]


def test_adapters_compare_with_the_base_model(path: Path, home: Path) -> None:
    base = train(path, output_dir=home / "base", runner_config__stop_step=2)
    adapters = '{"lora_rank": 2, "lora_alpha": 4, "target_modules": ".*wq|.*wv|.*w2", "lora_dropout": 0.1}'
    flags = {"load_checkpoint": base, "run_mode": "finetune", "model__model_config__pet_config": adapters}
    tuned = train(path, output_dir=home / "adapters", **flags)
    steps = step_records(tuned)
    assert [steps[0][name] for name in REWARDS] == [0, 0, 0, 0]
    first, last = eval_records(tuned)
    assert last["eval_margin"] > first["eval_margin"] > 0
    assert_resumes(path, tuned, HALF, **flags)


REFUSED = {
    "experts": {"model__model_config__moe_config": '{"expert_num": 4, "num_experts_chosen": 2}'},
    "multi-token prediction": {"model__model_config__mtp_depth": 1},
    "context.mode 1": {"context__mode": 1},
    "does not know the weights before the training": {"run_mode": "eval"},
    "only simpo has a margin": {"loss__gamma": 0.1},
    "so there is no strength": {"loss__type": "reward"},
    "with adapters of a reward model": {
        "loss__type": "reward", "loss__beta": "null", "model__model_config__pet_config": '{"lora_rank": 2}',
    },
    "a reward model writes no text": {"loss__type": "reward", "loss__beta": "null", "sample_prompt": "a"},
    "is trained and evaluated with the loss of reward models": {"model__model_config__num_labels": 1},
    "only kto has labels to weigh": {"loss__desirable_weight": 2.0},
    "needs records with prompt, completion and label": {
        "loss__type": "kto", "train_dataset__data_loader__type": "TextDataset",
    },
    "needs records with chosen and rejected": {"train_dataset__data_loader__type": "TextDataset"},
    "a pair stays whole in a sequence": {"train_dataset__packing": "cut"},
    "which carry loss without their prompt": {"train_dataset__train_on": "all"},
    "; pair 1 of": {"model__model_config__seq_length": 20},
}


def test_a_plan_for_an_ascend_refuses_the_loss(path: Path) -> None:
    with pytest.raises(UserError, match="not yet supported with anything but native layers on a CPU"):
        plan_file(config_of(path, context__device_target="Ascend"), SINGLE_PROCESS, [])


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused(whole: Path, path: Path, home: Path, text: str) -> None:
    flags = dict(REFUSED[text])
    if flags.get("run_mode"):
        flags["load_checkpoint"] = str(whole)
    refusal(lambda: build_plan(config_of(path, **flags)), text)
