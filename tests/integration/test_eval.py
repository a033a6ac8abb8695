"""Evaluation: loss and perplexity are those that numpy computes from the logits, alone and while training."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from run_helpers import (
    arrays_of,
    assert_same_bits,
    column,
    config_of,
    eval_records,
    evaluate,
    figures,
    predict,
    train,
    write_config,
    write_instructions,
)
from tolerances import decoder_limits

from trainer.checkpoint.adapters import load_initial_weights
from trainer.checkpoint.store import newest_complete
from trainer.data import IGNORE_INDEX, build_eval_dataset
from trainer.errors import EXIT_SIGTERM, RunError, UserError
from trainer.monitors.metrics import EvalMetrics, Monitor
from trainer.report.curves import MetricsReader
from trainer.run.export import export
from trainer.run.loop import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    write_instructions(home / "instructions.jsonl", 30)
    return home


@pytest.fixture(scope="module")
def path(home: Path) -> Path:
    changes = {"do_eval": True, "model.model_config.hidden_dropout": 0.3, "runner_config.stop_step": 12}
    return write_config(home / "run", home / "data", changes)


@pytest.fixture(scope="module")
def trained(path: Path) -> Path:
    return train(path)


def limit_of(path: Path) -> float:
    return decoder_limits(config_of(path).decoder, rows=4).loss


def evaluated(path: Path, trained: Path, **flags: object) -> dict:
    return evaluate(path, trained.parent / "evaluated", load_checkpoint=trained, **flags)


def by_numpy(path: Path, trained: Path, rows: int | None = None, **flags: object) -> tuple[float, int]:
    """Returns mean loss of a valid token, row by row, from the model's logits in float64; and how many tokens."""
    from trainer.run.session import open_session

    config = config_of(path, run_mode="eval", load_checkpoint=trained, context__mode=1, **flags)
    session = open_session(config, load_initial_weights(config))
    dataset = build_eval_dataset(config)
    total, tokens = 0.0, 0
    for row in range(dataset.num_sequences if rows is None else rows):
        batch = dataset.batch([row])
        logits_NV = session.model.logits(session.build_inputs(batch)).asnumpy().astype(np.float64)
        labels_N = batch.labels.reshape(-1)
        valid = labels_N != IGNORE_INDEX
        log_sum_N = np.log(np.exp(logits_NV - logits_NV.max(-1, keepdims=True)).sum(-1)) + logits_NV.max(-1)
        total += (log_sum_N - logits_NV[np.arange(len(labels_N)), np.where(valid, labels_N, 0)])[valid].sum()
        tokens += int(valid.sum())
    return total / tokens, tokens


def test_the_loss_is_that_of_the_logits(path: Path, trained: Path, capsys: pytest.CaptureFixture) -> None:
    found = evaluated(path, trained)
    loss, tokens = by_numpy(path, trained)
    assert found["tokens"] == tokens
    assert found["loss"] == pytest.approx(loss, rel=limit_of(path))
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=loss * limit_of(path))
    assert found["load_checkpoint"] == str(trained) and found["seconds"] > 0
    assert f"loss {loss:.4f}, perplexity {math.exp(loss):.4g}" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_null(
    path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    metrics = EvalMetrics(0, 1, math.nan, math.inf, 8, 0.5, kl=math.inf)
    monkeypatch.setattr("trainer.run.evaluate.evaluate_on_all_ranks", lambda *arguments, **named: metrics)
    found = evaluated(path, trained)
    assert found.pop("load_checkpoint")
    assert found == {"loss": None, "perplexity": None, "tokens": 8, "seconds": 0.5, "kl": None}


def test_it_is_the_one_made_while_training(path: Path, trained: Path) -> None:
    while_training = eval_records(trained)[-1]
    found = evaluated(path, trained)
    assert while_training["eval_loss"] == found["loss"]
    assert while_training["eval_tokens"] == found["tokens"]
    assert while_training["eval_perplexity"] == math.exp(found["loss"])


SAMPLES = {
    "do_eval": True, "eval_step_interval": 5, "sample_prompt": ["the cat", "ä", "the cat"],
    "model.model_config.hidden_dropout": 0.3, "model.model_config.do_sample": True,
    "model.model_config.max_new_tokens": 5,
}  # fmt: skip


def samples(output: Path) -> list[tuple[int, str, str]]:
    records = map(json.loads, (output / "samples.jsonl").read_text().splitlines())
    return [(record["step"], record["prompt"], record["text"]) for record in records]


def test_samples_change_no_number_and_are_what_run_mode_predict_gives(home: Path, trained: Path) -> None:
    path = write_config(home / "sampled", home / "data", SAMPLES)
    output = train(path, runner_config__stop_step=5)
    train(path, runner_config__stop_step=12, resume_training=True)
    assert figures(output) == figures(trained)
    assert eval_records(output)[-1]["eval_loss"] == eval_records(trained)[-1]["eval_loss"]
    found = samples(output)
    assert [(step, prompt) for step, prompt, _ in found] == [
        (step, prompt) for step in (5, 10, 12) for prompt in SAMPLES["sample_prompt"]
    ]
    assert len({text for *_, text in found}) > 3
    for step in (5, 12):
        checkpoint = output / "checkpoints" / f"step-{step:08d}"
        prompts = json.dumps(SAMPLES["sample_prompt"])
        flags = {"load_checkpoint": checkpoint, "predict_data": prompts, "output_dir": home / "predicted"}
        assert column(predict(path, **flags), "text") == [text for at, _, text in found if at == step]
    train(path, runner_config__stop_step=12, resume_training="step-00000005")
    assert samples(output) == found
    train(path, runner_config__stop_step=3, sample_prompt="a", do_eval=False)
    assert samples(output)[0][:2] == (3, "a") and len(samples(output)) == 1
    assert (output / "samples-1.jsonl").exists()
    pauses = [one for one in MetricsReader(output / "metrics-1.jsonl").read().pauses if one.kind == "sampling"]
    assert [pause.step for pause in pauses] == [5, 10, 12] and all(pause.seconds > 0 for pause in pauses)


class Interrupts(Monitor):
    """Sends a signal when the run begins to sample."""

    def on_activity(self, name: str, done: int = 0, total: int = 0) -> None:
        if name == "sampling":
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_while_it_samples_ends_the_run_with_a_checkpoint(home: Path) -> None:
    path = write_config(home / "interrupted", home / "data", SAMPLES)
    assert run(config_of(path), [Interrupts()]) == EXIT_SIGTERM
    output = home / "interrupted" / "output"
    assert not (output / "samples.jsonl").exists()
    assert newest_complete(output / "checkpoints").name == "step-00000005"


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [("x" * 16, "a prompt of 16 tokens leaves no room"), ("[a, '']", "a prompt is empty")],
)
def test_a_prompt_that_cannot_be_sampled_from_ends_a_run_before_it_begins(home: Path, prompt: str, rule: str) -> None:
    path = write_config(home / "refused", home / "data", SAMPLES)
    with pytest.raises(UserError, match=rule) as caught:
        train(path, sample_prompt=prompt)
    assert "flag --sample_prompt: sample_prompt = " in str(caught.value) and "Fix: " in str(caught.value)
    assert not (home / "refused" / "output").exists()


def test_max_batches_reads_only_so_many(path: Path, trained: Path) -> None:
    found = evaluated(path, trained, train_dataset__max_batches=2)
    loss, tokens = by_numpy(path, trained, rows=2 * 4)
    assert (found["tokens"], found["loss"]) == (tokens, pytest.approx(loss, rel=limit_of(path)))


def test_a_data_set_of_its_own_with_masked_prompts(home: Path, path: Path, trained: Path) -> None:
    own = {"data_loader": {"type": "JsonlDataset", "dataset_dir": str(home / "instructions.jsonl")}, "batch_size": 7}
    changes = {"eval_dataset": own, "train_dataset.data_loader.dataset_dir": str(home / "not there")}
    path = write_config(home / "own", home / "data", changes)  # training data is not looked for
    found = evaluated(path, trained)
    loss, tokens = by_numpy(path, trained)
    assert (found["tokens"], found["loss"]) == (tokens, pytest.approx(loss, rel=limit_of(path)))


def test_data_without_a_label_cannot_be_evaluated(home: Path, trained: Path) -> None:
    lines = home / "unlabelled.jsonl"
    record = {"instruction": "the cat sat on a mat", "output": "a"}
    lines.write_text(f"{json.dumps(record)}\n" * 4)
    own = {"data_loader": {"type": "JsonlDataset", "dataset_dir": str(lines)}, "batch_size": 1, "max_batches": 1}
    own["packing"] = "cut"
    path = write_config(home / "unlabelled", home / "data", {"eval_dataset": own, "model.model_config.seq_length": 8})
    with pytest.raises(RunError, match="every label is masked") as caught:
        evaluated(path, trained)
    assert caught.value.exit_code == 1 and "Fix: add data" in str(caught.value)


def test_averages_are_evaluated_exported_and_resumed_and_change_no_number(home: Path, trained: Path) -> None:
    changes = {"do_eval": True, "eval_step_interval": 5, "model.model_config.hidden_dropout": 0.3,
               "optimizer.ema_decay": 0.5, "use_ema": True}  # fmt: skip
    path = write_config(home / "averaged", home / "data", changes)
    whole = train(path, runner_config__stop_step=12, output_dir=home / "averaged" / "whole")
    output = train(path, runner_config__stop_step=5)
    train(path, runner_config__stop_step=12, resume_training=True)
    assert figures(output) == figures(whole) == figures(trained)
    arrays = arrays_of(output)
    assert_same_bits(arrays, arrays_of(whole))
    recorded = [record["eval_loss"] for record in eval_records(output)]
    assert recorded == [record["eval_loss"] for record in eval_records(whole)]
    assert recorded[-1] != eval_records(trained)[-1]["eval_loss"]
    assert evaluated(path, output)["loss"] == recorded[-1]
    config = config_of(path, load_checkpoint=output)
    exported = export(config, home / "averaged" / "model", merge=False)
    assert "moving averages" in str(exported)
    folder = config_of(path, load_checkpoint=exported.path.parent, use_ema=False)
    loaded = load_initial_weights(folder)
    averages = {name.removeprefix("optimizer/ema."): array for name, array in arrays.items() if "/ema." in name}
    assert_same_bits(loaded, averages)
    with pytest.raises(UserError, match="no moving averages of weights, which use_ema asks for"):
        load_initial_weights(config_of(path, load_checkpoint=trained), averages=True)
    with pytest.raises(UserError, match="the checkpoint has no moving averages, which optimizer.ema_decay asks for"):
        train(path, output_dir=trained, resume_training=True)


@pytest.mark.parametrize("method", [True, "pissa"], ids=["lora", "pissa"])
def test_averages_of_adapters_are_evaluated_and_merged(home: Path, trained: Path, method: bool | str) -> None:
    pet_config = {"pet_type": "lora", "lora_rank": 2, "target_modules": ".*q_proj|.*v_proj",
                  "init_lora_weights": method}  # fmt: skip
    changes = {
        "run_mode": "finetune", "load_checkpoint": str(trained), "do_eval": True, "optimizer.ema_decay": 0.5,
        "use_ema": True, "model.model_config.pet_config": pet_config, "runner_config.stop_step": 4,
    }  # fmt: skip
    folder = home / f"averaged {method}"
    path = write_config(folder, home / "data", changes)
    output = train(path)
    recorded = eval_records(output)[-1]["eval_loss"]
    names = {name.partition("/ema.")[2] for name in arrays_of(output) if "/ema." in name}
    assert len(names) == 8 and all(".lora_" in name for name in names)
    config = config_of(path, adapter_id=output)
    assert evaluated(path, trained, adapter_id=output)["loss"] == recorded
    merged = export(config, folder / "merged.safetensors", merge=True)
    plain = write_config(folder / "plain", home / "data")
    found = evaluated(plain, merged.path)["loss"]
    assert found == pytest.approx(recorded, rel=limit_of(path))
    weights = export(config_of(path, adapter_id=output, use_ema=False), folder / "weights.safetensors", merge=True)
    assert abs(evaluated(plain, weights.path)["loss"] - recorded) > 10 * abs(found - recorded)
