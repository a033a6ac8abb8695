"""Training runs: what they leave, that they repeat bit for bit, and that a setting does what it says and only that."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from run_helpers import (
    arrays_of,
    assert_same_bits,
    call,
    column,
    config_of,
    eval_records,
    figures,
    files_below,
    step_records,
    train,
    write_config,
    write_instructions,
)
from tolerances import FRESH_LOSS, RATE_NEAR_ZERO, U_BFLOAT16, U_FLOAT16, decoder_limits, rounding_limit

from trainer.checkpoint.adapters import load_initial_weights
from trainer.cli.main import dispatch
from trainer.config import load_config, parse_config
from trainer.errors import RunError
from trainer.models.spec.shapes import parameter_shapes
from trainer.monitors.jsonl import JsonlMonitor
from trainer.report.record import read_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def first_run(home: Path) -> tuple[Path, str, str]:
    """Returns a run as a user starts it: a process of its own, in a folder of its own. Output folder and what it
    printed."""
    cwd = home / "cwd"
    changes = {"do_eval": True, "eval_step_interval": 10, "report": True}
    path = write_config(home / "first", home / "data", changes)
    cwd.mkdir()
    code, output, errors = call("--config", path, cwd=cwd)
    assert code == 0, errors
    assert files_below(cwd) == set()  # everything is in output_dir
    return home / "first" / "output", output, errors


def test_a_run_leaves_what_is_promised(first_run: tuple[Path, str, str]) -> None:
    folder, output, errors = first_run
    last = step_records(folder)[-1]["step"]
    checkpoint = f"checkpoints/step-{last:08d}"
    assert files_below(folder) == {
        "config.yaml",
        "plan.txt",
        "metrics.jsonl",
        "run.json",
        "report.html",
        "report.png",
        "logs/rank-0.log",
        *(f"{checkpoint}/{name}" for name in ("model.safetensors", "optimizer.safetensors", "state.json", "COMPLETE")),
        *(f"{checkpoint}/{name}" for name in ("config.json", "generation_config.json", "special_tokens_map.json")),
        *(f"{checkpoint}/{name}" for name in ("tokenizer.json", "tokenizer_config.json")),
    }
    # The folder is one of Hugging Face: it describes the model that was trained.
    model = parse_config("a.yaml", f"pretrained_model_dir: {folder / checkpoint}\n")
    trained = load_config(str(folder / "config.yaml"))
    assert model.model.arch.type == trained.model.arch.type
    assert parameter_shapes(model.decoder) == parameter_shapes(trained.decoder)
    assert errors == ""  # no warning of MindSpore's either
    assert "optimizer step" in (folder / "plan.txt").read_text()
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    log = (folder / "logs" / "rank-0.log").read_text()
    told = (f"training: steps 1 to {last}", f"step {last}/{last}", "eval at step", "checkpoint of step", "finished")
    for text in told:
        assert text in log and text in output, text
    for name in ("tokens", "loss", "eval loss", "peak memory", "checkpoints", "metrics", "log", "report"):
        assert any(line.startswith(f"{name} ") for line in output.splitlines()), name


def test_metrics_hold_every_step_with_all_its_fields(first_run: tuple[Path, str, str]) -> None:
    """Checks that no step or epoch is missing or counted twice, and that rates belong to the times beside them."""
    records = step_records(first_run[0])
    assert column(records, "step") == list(range(1, len(records) + 1))
    names = "step epoch loss lr global_norm loss_scale overflow tokens tokens_per_second input_tokens_per_second"
    assert list(records[0]) == [*names.split(), "step_seconds", "data_wait_seconds", "peak_rss_bytes"]
    half = len(records) // 2
    assert column(records, "epoch") == [1] * half + [2] * half
    assert all(record["loss_scale"] == 1.0 and record["overflow"] is False for record in records)
    assert all(0 < record["tokens"] <= 4 * 16 for record in records)
    assert all(math.isclose(r["tokens_per_second"], r["tokens"] / r["step_seconds"]) for r in records)
    assert all(math.isclose(r["input_tokens_per_second"], 4 * 16 / r["step_seconds"]) for r in records)
    assert all(0 <= r["data_wait_seconds"] < r["step_seconds"] for r in records)
    assert all(100e6 < record["peak_rss_bytes"] < 4e9 for record in records)


def test_the_loss_falls(first_run: tuple[Path, str, str]) -> None:
    losses = column(step_records(first_run[0]), "loss")
    assert abs(losses[0] - math.log(257)) < FRESH_LOSS  # a fresh model knows nothing
    assert losses[-1] < losses[0] - 1
    evaluations = column(eval_records(first_run[0]), "eval_loss")
    assert evaluations == sorted(evaluations, reverse=True)


def test_the_config_it_leaves_runs_again_with_the_same_bits(first_run: tuple[Path, str, str]) -> None:
    folder, _, _ = first_run
    evaluations, arrays = column(eval_records(folder), "eval_loss"), arrays_of(folder)
    assert train(folder / "config.yaml", report=False) == folder  # in this process, not in a fresh one
    assert figures(folder) == figures(folder, "metrics-1.jsonl")  # the earlier metrics were put aside
    assert column(eval_records(folder), "eval_loss") == evaluations
    assert_same_bits(arrays_of(folder), arrays)


def test_evaluation_happens_when_asked_and_changes_nothing(home: Path, first_run: tuple[Path, str, str]) -> None:
    path = write_config(home / "cadence", home / "data", {"runner_config.epochs": 2})
    quiet = train(path, output_dir=home / "quiet")
    assert eval_records(quiet) == []
    assert figures(quiet) == figures(first_run[0])
    steps = len(step_records(quiet))
    assert steps % 5 and steps // 2 % 5, "the corpus should make epochs end between evaluations"
    assert column(eval_records(first_run[0]), "step") == [*range(10, steps + 1, 10), steps]
    both = train(path, output_dir=home / "both", do_eval=True, eval_step_interval=5, eval_epoch_interval=1)
    expected = {*range(5, steps + 1, 5), steps // 2, steps}
    assert column(eval_records(both), "step") == sorted(expected)
    assert all(record["epoch"] == (1 if record["step"] <= steps // 2 else 2) for record in eval_records(both))
    last = train(path, output_dir=home / "last", do_eval=True, eval_step_interval=-1, runner_config__stop_step=3)
    assert column(eval_records(last), "step") == [3]


def assert_same_numbers(path: Path, ours: list[dict], right: list[dict]) -> None:
    """Losses and norms of runs that add the same numbers in another order."""
    limits = decoder_limits(config_of(path).decoder, rows=8)
    np.testing.assert_allclose(column(ours, "loss"), column(right, "loss"), rtol=limits.loss)
    np.testing.assert_allclose(column(ours, "global_norm"), column(right, "global_norm"), rtol=limits.gradients)


def test_without_compilation_the_numbers_are_the_same(home: Path, first_run: tuple[Path, str, str]) -> None:
    path = write_config(home / "eager", home / "data", {"context": {"mode": 1}, "runner_config.stop_step": 20})
    eager, compiled = step_records(train(path)), step_records(first_run[0])[:20]
    # The same operators, up to float32's rounding where the compiler joins two.
    assert_same_numbers(path, eager, compiled)


def test_accumulated_micro_batches_equal_one_large_batch(home: Path) -> None:
    # Prompts carry no loss: micro-batches have very unequal numbers of tokens, so a mean of means would show.
    data = write_instructions(home / "instructions.jsonl")
    changes = {
        "train_dataset.data_loader": {"type": "JsonlDataset", "dataset_dir": str(data), "shuffle": False},
        "train_dataset.packing": "cut",
        "runner_wrapper.use_clip_grad": True,
        "runner_wrapper.max_grad_norm": 0.5,
        "runner_config": {"epochs": 1, "stop_step": 8, "batch_size": 8},
    }
    path = write_config(home / "accumulation", data, changes)
    whole = step_records(train(path, output_dir=home / "whole"))
    parts = {"runner_config__batch_size": 2, "runner_config__gradient_accumulation_steps": 4}
    split = step_records(train(path, output_dir=home / "split", **parts))
    assert column(split, "tokens") == column(whole, "tokens")
    assert min(column(whole, "tokens")) < 8 * 16 * 0.6
    assert_same_numbers(path, split, whole)


def test_the_last_step_of_an_epoch_divides_by_its_fewer_tokens(home: Path) -> None:
    """Compares a last step of three micro-batches instead of four with one batch of as many rows."""
    data = write_instructions(home / "few.jsonl")
    loader = {"type": "JsonlDataset", "dataset_dir": str(data), "shuffle": False, "num_samples": 14}
    changes = {"train_dataset.data_loader": loader, "train_dataset.drop_remainder": False, "lr_schedule": {
        "type": "CosineWithWarmUpLR", "learning_rate": 1e-3, "warmup_steps": 1, "total_steps": -1,
    }}  # fmt: skip
    path = write_config(home / "partial", data, changes)
    whole = step_records(train(path, output_dir=home / "rows", runner_config={"epochs": 2, "batch_size": 8}))
    split = {"epochs": 2, "batch_size": 2, "gradient_accumulation_steps": 4}
    windows = step_records(train(path, output_dir=home / "windows", runner_config=split))
    assert column(windows, "epoch") == [1, 1, 2, 2] and windows[1]["tokens"] < windows[0]["tokens"]
    for name in ("tokens", "lr"):
        assert column(windows, name) == column(whole, name)
    assert_same_numbers(path, windows, whole)


def test_the_learning_rate_follows_the_schedule(home: Path, capsys: pytest.CaptureFixture) -> None:
    changes = {
        "lr_schedule": {"type": "CosineWithWarmUpLR", "learning_rate": 0.01, "warmup_steps": 4, "lr_end": 0.001},
        "runner_config.stop_step": 12,
    }
    path = write_config(home / "schedule", home / "data", changes)
    rates = column(step_records(train(path)), "lr")
    capsys.readouterr()
    assert dispatch(["plan", "--json", "--config", str(path)]) == 0
    total = json.loads(capsys.readouterr().out)["steps"]["total_steps"]
    assert total > 12  # stop_step does not shorten the schedule

    def expected(step: int) -> float:
        if step < 4:
            return 0.01 * step / 4
        return 0.001 + (0.01 - 0.001) * (1 + math.cos(math.pi * (step - 4) / (total - 4))) / 2

    right = [expected(step) for step in range(12)]
    np.testing.assert_allclose(rates, right, rtol=rounding_limit(4), atol=RATE_NEAR_ZERO)


def test_dropout_changes_training_repeatably_and_not_evaluation(home: Path, first_run: tuple[Path, str, str]) -> None:
    changes = {
        "model.model_config.hidden_dropout": 0.2,
        "model.model_config.attention_dropout": 0.2,
        "runner_config.stop_step": 6,
    }
    path = write_config(home / "dropout", home / "data", changes)
    one, two = train(path, output_dir=home / "drop1"), train(path, output_dir=home / "drop2")
    assert figures(one) == figures(two)
    assert figures(one)[0] != figures(first_run[0])[0]
    other_mode = train(path, output_dir=home / "drop3", context__mode=1)
    assert_same_numbers(path, step_records(other_mode), step_records(one))


def test_each_step_drops_something_else(home: Path) -> None:
    changes = {
        "model.model_config.hidden_dropout": 0.5,
        "lr_schedule.learning_rate": 0.0,  # the model stays what it is
        "train_dataset.data_loader.num_samples": 4,  # and each step has the same rows
        "train_dataset.data_loader.shuffle": False,
        "runner_config": {"batch_size": 4, "epochs": 4},
        "context": {"mode": 1},
    }
    path = write_config(home / "masks", home / "data", changes)
    losses = column(step_records(train(path)), "loss")
    assert len(set(losses)) == 4
    kept = column(step_records(train(path, model__model_config__hidden_dropout=0.0)), "loss")
    assert len(set(kept)) == 1


def test_sgd_trains_too_and_the_log_may_have_mindformers_format(home: Path, capsys: pytest.CaptureFixture) -> None:
    changes = {
        "optimizer": {"type": "SGD", "momentum": 0.9},
        "lr_schedule.learning_rate": 0.3,
        "log_format": "mindformers",
    }
    losses = column(step_records(train(write_config(home / "sgd", home / "data", changes))), "loss")
    assert losses[-1] < losses[0] - 0.5
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{ Epoch:[")]
    assert len(lines) == len(losses)
    assert "step:[    2/" in lines[1] and "per_step_time: " in lines[1] and "lr: 3.0e-01, " in lines[1]


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Returns the upper halves, rounded to nearest even."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_bfloat16(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file byte by byte, because NumPy has no bfloat16."""
    header, offset, chunks = {}, 0, []
    for name, array in weights.items():
        data = to_bfloat16(array).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        chunks.append(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def test_finetuning_starts_from_weights_in_every_form(home: Path, first_run: tuple[Path, str, str]) -> None:
    from trainer.run.session import open_session

    arrays = arrays_of(first_run[0])
    weights = {name.removeprefix("model/"): array for name, array in arrays.items() if name.startswith("model/")}
    hugging_face = home / "hugging_face"
    hugging_face.mkdir()
    first, rest = dict(list(weights.items())[:5]), dict(list(weights.items())[5:])
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}  # as older files have it
    safetensors.numpy.save_file(first | inv_freq, hugging_face / "model-1-of-2.safetensors")
    safetensors.numpy.save_file(rest, hugging_face / "model-2-of-2.safetensors")
    safetensors.numpy.save_file({n: w.astype(np.float16) for n, w in weights.items()}, home / "half.safetensors")
    write_bfloat16(home / "brain.safetensors", weights)
    newest = next((first_run[0] / "checkpoints").glob("step-*"))

    path = write_config(home / "finetune", home / "data", {"run_mode": "finetune"})
    for place, tolerance in (
        (first_run[0], 0),
        (first_run[0] / "checkpoints", 0),
        (newest, 0),
        (newest / "model.safetensors", 0),
        (hugging_face, 0),
        (home / "half.safetensors", U_FLOAT16),
        (home / "brain.safetensors", U_BFLOAT16),
    ):
        config = config_of(path, load_checkpoint=place)
        model = open_session(config, load_initial_weights(config)).model
        for name, parameter in model.parameters_by_name.items():
            np.testing.assert_allclose(parameter.asnumpy(), weights[name], rtol=tolerance, atol=tolerance / 100)

    tuned = step_records(train(path, load_checkpoint=first_run[0], runner_config__stop_step=2))
    trained = step_records(first_run[0])
    assert tuned[0]["loss"] < trained[0]["loss"] - 1  # the weights are there
    assert (tuned[0]["step"], tuned[0]["epoch"]) == (1, 1)  # and the training is a new one


def test_a_file_that_cannot_be_closed_keeps_no_other_from_its_end(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: JsonlMonitor, summary: object) -> None:
        raise RunError("the disk is full")

    monkeypatch.setattr(JsonlMonitor, "close", fail)
    path = write_config(home / "unclosed", home / "data", {"runner_config.stop_step": 1})
    with pytest.raises(RunError, match="the disk is full"):
        train(path)
    assert read_run(home / "unclosed" / "output").outcome == "finished"
