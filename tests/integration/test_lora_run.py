"""Adapters from the command line: finetune, resume, evaluate, predict, export; what does not fit is refused."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from numpy_kernels import distance
from run_helpers import (
    assert_resumes,
    assert_same_bits,
    call,
    column,
    config_of,
    eval_records,
    evaluate,
    figures,
    predict,
    refusal,
    step_records,
    train,
    write_config,
    write_instructions,
)
from tolerances import LOSS_IN_NF4, decoder_limits, rounding_limit

from trainer.checkpoint.adapters import PREFIX
from trainer.checkpoint.hugging_face import chat_template_of
from trainer.checkpoint.store import newest_complete
from trainer.checkpoint.weights import read_weights
from trainer.cli.main import dispatch
from trainer.data import load_tokenizer
from trainer.errors import UserError
from trainer.models.spec.shapes import adapter_shapes, parameter_shapes

pytestmark = pytest.mark.slow

HALF = 6
RANK = 2
CHANGES = {
    "model.model_config.pet_config": {
        "lora_rank": RANK, "lora_alpha": 6, "lora_dropout": 0.1, "target_modules": ".*wq|.*layers.1.*(wv|down_proj)",
    },
    "run_mode": "finetune",
    "train_dataset.data_loader.type": "JsonlDataset",
    "runner_config": {"batch_size": 4, "epochs": 8, "gradient_accumulation_steps": 2, "stop_step": 2 * HALF},
    "runner_wrapper": {"use_clip_grad": True},
    "optimizer": {"type": "AdamW", "weight_decay": 0.01, "loraplus_lr_ratio": 4},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 0.02, "warmup_steps": 2},
    "do_eval": True,
    "eval_step_interval": -1,
    "context": {"mode": 1},  # what is compiled is in tests/parity/test_lora.py
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": HALF, "keep_checkpoint_max": 3}],
}  # fmt: skip


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    write_instructions(home / "answers.jsonl")
    return home


@pytest.fixture(scope="module")
def base(home: Path) -> Path:
    """Checkpoints of the base model."""
    return train(write_config(home / "base", home / "data", {"runner_config.epochs": 3})) / "checkpoints"


@pytest.fixture(scope="module")
def path(home: Path, base: Path) -> Path:
    return write_config(home / "config", home / "answers.jsonl", CHANGES | {"load_checkpoint": str(base)})


@pytest.fixture(scope="module")
def merged(home: Path, path: Path, whole: Path) -> Path:
    """Returns the model with the adapters folded in."""
    file = home / "merged" / "model.safetensors"
    output = exported("--config", path, "--adapter", whole, "--merge", "--output", file)
    assert output.startswith(f"wrote {file}: ") and "4 adapters" in output and "times 3" in output
    return file


def exported(*arguments: object) -> str:
    """Returns the output of `export`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert dispatch(["export", *map(str, arguments)]) == 0
    return printed.getvalue()


def dense(path: Path, folder: Path) -> Path:
    """Returns the configuration without adapters."""
    text = path.read_text()
    start = text.index("    pet_config:")
    end = text.index("target_modules")
    text = text[:start] + text[text.index("\n", end) + 1 :]
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(text)
    assert config_of(folder / "run.yaml").decoder.pet_config is None
    return folder / "run.yaml"


def test_a_checkpoint_holds_the_adapters_alone(whole: Path, path: Path, base: Path) -> None:
    folder, settings = newest_complete(whole / "checkpoints"), config_of(path).decoder
    assert {file.name for file in folder.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json", "COMPLETE",
    }  # fmt: skip
    adapters = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    assert {name: array.shape for name, array in adapters.items()} == {
        PREFIX + name: shape for name, shape in adapter_shapes(settings).items()
    }
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in adapters
    moments = {name.split(".", 1)[1] for name in safetensors.numpy.load_file(folder / "optimizer.safetensors")}
    assert moments == set(adapter_shapes(settings))
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["r"] == RANK and described["lora_alpha"] == 6 and described["peft_type"] == "LORA"
    assert described["target_modules"] == [  # PEFT compares full names, too
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj",
        "model.layers.1.mlp.down_proj",
    ]  # fmt: skip
    assert described["base_model_name_or_path"] == str(base)


def test_it_learns_and_the_note_about_random_weights_stays_away(whole: Path) -> None:
    losses = column(step_records(whole), "loss")
    assert losses[-1] < losses[0] - 0.1 and all(math.isfinite(loss) for loss in losses)
    assert "random base weights" not in (whole / "logs" / "rank-0.log").read_text()


def test_stopped_and_resumed_equals_never_stopped(home: Path, path: Path, whole: Path) -> None:
    """Resumes adapters from two folders, and compares every number with an uninterrupted run."""
    assert_resumes(path, whole, HALF)
    checkpoint = whole / "checkpoints" / f"step-{HALF:08d}"  # from elsewhere
    flags = {"resume_training": True, "adapter_id": checkpoint, "runner_config__stop_step": HALF + 1}
    other = train(path, output_dir=home / "elsewhere", **flags)
    assert figures(other) == figures(whole)[HALF : HALF + 1]


def predicted(file: Path, folder: Path, **more: object) -> str:
    """Returns the continuation of a prompt."""
    return predict(file, output_dir=folder, predict_data="the cat", **more)[0]["text"]


def merged_and_checked(path: Path, trained: Path, changed: dict[str, object]) -> tuple[Path, str]:
    """Folds adapters in, and compares logits before and after; returns the file and what was printed."""
    flags = [f"--{name.replace('__', '.')}={value}" for name, value in changed.items()]
    file = trained.with_suffix(".safetensors")
    output = exported("--config", path, "--adapter", trained, "--merge", "--check", "--output", file, *flags)
    found = re.search(r"by at most (\S+), of (\S+) ", output)
    assert float(found[1]) < decoder_limits(config_of(path).decoder, rows=4).loss * float(found[2])
    return file, output


PET = "model__model_config__pet_config__"
TARGETS = CHANGES["model.model_config.pet_config"]["target_modules"]
VARIANTS: dict[str, dict[str, object]] = {
    "dora": {f"{PET}use_dora": True},
    "vocabulary": {f"{PET}target_modules": f"{TARGETS}|embed_tokens|lm_head"},
    "nf4": {f"{PET}base_dtype": "nf4", "context__mode": 0, "sample_prompt": "the cat"},
    **{method: {f"{PET}init_lora_weights": method} for method in ("pissa", "pissa_niter_4", "olora")},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_starts_from_the_base_model_resumes_predicts_and_is_merged(
    home: Path, path: Path, base: Path, name: str
) -> None:
    limit = decoder_limits(config_of(path).decoder, rows=4).loss
    without = {f"{PET}lora_dropout": 0, "optimizer__loraplus_lr_ratio": 1}
    changed = VARIANTS[name] | without
    mode = {key: value for key, value in changed.items() if key == "context__mode"}
    flags = changed | {"runner_config__stop_step": HALF}
    trained = train(path, output_dir=home / name, **flags)
    losses = column(step_records(trained), "loss")
    assert losses[-1] < losses[0]
    if name != "nf4":
        usual = train(path, output_dir=home / f"{name}_usual", **without, runner_config__stop_step=1)
        assert losses[0] == pytest.approx(step_records(usual)[0]["loss"], rel=limit)
    assert_resumes(path, trained, HALF // 2, **flags)
    loss = loss_of(path, home / f"{name}_eval", adapter_id=trained, **changed)
    assert loss == eval_records(trained)[-1]["eval_loss"]
    folder = newest_complete(trained / "checkpoints")
    files = {file.name for file in folder.iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    if name == "nf4":  # the adapters fit the base model in any dtype, which costs what the dtype rounds
        wide = loss_of(path, home / "nf4_wide", adapter_id=trained, context__mode=0)
        assert wide != loss and wide == pytest.approx(loss, rel=LOSS_IN_NF4)
    if f"{PET}init_lora_weights" in changed:  # the folder is plain LoRA of twice the rank, which PEFT reads
        described = json.loads((folder / "adapter_config.json").read_text())
        assert (described["r"], described["lora_alpha"], described["init_lora_weights"]) == (2 * RANK, 12, True)
        plain_lora = {f"{PET}lora_rank": 2 * RANK, f"{PET}lora_alpha": 12}
        assert loss_of(path, home / f"{name}_lora", adapter_id=trained, **plain_lora) == pytest.approx(loss, rel=limit)
    merged, output = merged_and_checked(path, trained, changed)
    assert f"with the {4 + 2 * (name == 'vocabulary')} adapters" in output
    plain = dense(path, home / "plain")
    assert loss_of(plain, home / f"{name}_merged", load_checkpoint=merged, **mode) == pytest.approx(loss, rel=limit)
    with_adapters = predicted(path, home / f"{name}_predict", adapter_id=trained, **changed)
    assert with_adapters == predicted(plain, home / f"{name}_dense", load_checkpoint=merged)


def loss_of(path: Path, output: Path, **flags: object) -> float:
    return evaluate(path, output, **flags)["loss"]


def test_evaluation_with_adapters_equals_the_merged_model(home: Path, path: Path, whole: Path, merged: Path) -> None:
    trained = eval_records(whole)[-1]["eval_loss"]
    assert loss_of(path, home / "eval", adapter_id=whole) == trained
    assert json.loads((home / "eval" / "eval.json").read_text())["adapter_id"] == str(whole)
    plain = dense(path, home / "plain")
    limit = decoder_limits(config_of(plain).decoder, rows=4).loss
    assert loss_of(plain, home / "eval_merged", load_checkpoint=merged) == pytest.approx(trained, rel=limit)
    assert loss_of(plain, home / "eval_base") > trained  # without them


def test_prediction_with_adapters_equals_the_merged_model(home: Path, path: Path, whole: Path, merged: Path) -> None:
    with_adapters = predicted(path, home / "predict", adapter_id=whole / "checkpoints")
    assert with_adapters == predicted(dense(path, home / "plain"), home / "predict_merged", load_checkpoint=merged)


def test_adapters_of_peft_are_taken_and_trained_further(home: Path, path: Path, whole: Path) -> None:
    """A folder with the two files that PEFT writes."""
    folder, source = home / "peft", newest_complete(whole / "checkpoints")
    folder.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(source / name, folder / name)
    described = json.loads((folder / "adapter_config.json").read_text())
    described |= {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"}
    (folder / "adapter_config.json").write_text(json.dumps(described))  # the tensors say which matrices are adapted
    assert loss_of(path, home / "eval_peft", adapter_id=folder) == eval_records(whole)[-1]["eval_loss"]
    further = train(path, output_dir=home / "further", adapter_id=folder, runner_config__stop_step=2)
    assert step_records(further)[0]["loss"] < step_records(whole)[0]["loss"]


# Export


def test_the_merged_file_is_base_and_adapters(path: Path, base: Path, whole: Path, merged: Path) -> None:
    settings = config_of(path).decoder
    found, original = safetensors.numpy.load_file(merged), numbers_of(base)
    assert {name: array.shape for name, array in found.items()} == parameter_shapes(settings)
    adapters = safetensors.numpy.load_file(newest_complete(whole / "checkpoints") / "adapter_model.safetensors")
    for name, array in found.items():
        key = PREFIX + name.removesuffix("weight") + "lora_{}.weight"
        if key.format("A") in adapters:
            product = adapters[key.format("B")].astype(np.float64) @ adapters[key.format("A")]
            assert distance(array, original[name] + 3 * product) < rounding_limit(RANK + 3), name
            assert np.abs(product).max() > 1e-3
        else:
            np.testing.assert_array_equal(array, original[name])


def test_check_compares_the_logits_before_and_after(
    home: Path, path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding in float32, more in bfloat16, and far more if the merge were wrong."""
    command = ("--config", path, "--adapter", whole, "--merge", "--check", "--force", "--output", home / "checked")

    def difference(*flags: str) -> float:
        found = re.search(r"check: logits before and after .* by at most (\S+), of (\S+) ", exported(*command, *flags))
        return float(found[1]) / float(found[2])

    limit = decoder_limits(config_of(path).decoder, rows=4).loss
    exact, rounded = difference(), difference("--dtype", "bfloat16")
    assert exact < limit < rounded
    monkeypatch.setattr("trainer.run.export.merge_adapters", lambda weights, settings: {
        name: weights[name] for name in parameter_shapes(settings)})  # fmt: skip
    assert difference() > 100 * limit
    code, _, errors = call("export", "--config", path, "--output", home / "x", "--check", cwd=home)
    assert code == 2 and "--check" in errors and "add --adapter" in errors


def numbers_of(path: Path) -> dict[str, np.ndarray]:
    return {name: array.read() for name, array in read_weights(path).items()}


def test_export_of_plain_weights_and_no_file_is_replaced(home: Path, path: Path, base: Path) -> None:
    plain, folder = dense(path, home / "plain"), home / "exported"
    command = ("--config", plain, "--output", folder)
    note, told, _ = exported(*command).splitlines()
    assert note.startswith("note: the folder has no chat template") and note.endswith("wrote its records as text")
    assert told.startswith(f"wrote {folder}/model.safetensors: the weights of {base}")
    assert_same_bits(safetensors.numpy.load_file(folder / "model.safetensors"), numbers_of(base))
    (folder / "model.safetensors").write_text("of someone")
    code, _, errors = call("export", *command, cwd=home)  # the command as a process of its own
    assert code == 2 and "--output" in errors and "is there already" in errors and "--force" in errors
    assert (folder / "model.safetensors").read_text() == "of someone"
    exported(*command, "--force")
    assert_same_bits(numbers_of(folder), numbers_of(base))
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert not list(folder.glob(".tmp-*"))


# Refusals


def test_another_base_model_is_refused(home: Path, path: Path, whole: Path, base: Path) -> None:
    weights = numbers_of(base)
    weights["model.norm.weight"] = np.nextafter(weights["model.norm.weight"], np.float32(2))  # one bit
    other = home / "other.safetensors"
    safetensors.numpy.save_file(weights, other)
    for flags in ({"run_mode": "eval", "adapter_id": whole}, {"resume_training": True}):
        parts = "trained on another base model", "SHA-256", "flag --load_checkpoint"
        fix = f"the same base model with --load_checkpoint {base}"
        refusal(lambda: train(path, output_dir=whole, load_checkpoint=other, **flags), *parts, fix)  # noqa: B023


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"r": 4}, ["have lora_rank 4", f"says {RANK}", "set pet_config.lora_rank to 4"]),
        ({"lora_alpha": 8}, ["have lora_alpha 8", "says 6.0", "set pet_config.lora_alpha to 8"]),
        ({"use_dora": True}, ["have use_dora true", "set pet_config.use_dora to true"]),
        ({"init_lora_weights": "PiSSA"}, ["init_lora_weights pissa", "path_initial_model_for_weight_conversion"]),
        ({"peft_type": "LOHA"}, ["peft_type 'LOHA'"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save ['lm_head']"]),
        (None, ["no readable adapter_config.json"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_adapters_of_another_kind_are_refused(
    home: Path, path: Path, whole: Path, tmp_path: Path, changes: dict | None, parts: list[str]
) -> None:
    source = newest_complete(whole / "checkpoints")
    shutil.copy(source / "adapter_model.safetensors", tmp_path)
    if changes is not None:
        described = json.loads((source / "adapter_config.json").read_text())
        (tmp_path / "adapter_config.json").write_text(json.dumps(described | changes))
    refusal(lambda: evaluate(path, home / "refused", adapter_id=tmp_path), "flag --adapter_id", *parts)


def test_whole_models_and_adapters_are_not_taken_for_each_other(
    home: Path, path: Path, whole: Path, base: Path
) -> None:
    output, plain = home / "confused", dense(path, home / "plain")
    model = "flag --adapter_id", "contains a full model, not adapters"
    refusal(lambda: evaluate(path, output, adapter_id=base), *model)
    adapters = "flag --load_checkpoint", "contains adapters, not the weights of a model"
    refusal(lambda: evaluate(path, output, adapter_id=whole, load_checkpoint=whole), *adapters)
    resumes = "the checkpoint contains a full model, and this run trains adapters"
    refusal(lambda: train(path, output_dir=base.parent, resume_training=True), resumes)
    resumes = "the checkpoint contains adapters, and this run trains a full model"
    refusal(lambda: train(plain, output_dir=whole, resume_training=True, load_checkpoint="''"), resumes)


@pytest.mark.parametrize("names", ["output", "checkpoint", "adapter_id", "other program"])
def test_an_export_of_adapters_names_both_commands(
    home: Path, path: Path, whole: Path, base: Path, tmp_path: Path, names: str
) -> None:
    folder = whole / "checkpoints" / f"step-{2 * HALF:08d}"
    flag, given = "--load_checkpoint", whole
    if names == "checkpoint":
        given = folder
    if names == "adapter_id":
        flag = "--adapter"
    if names == "other program":
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            shutil.copy(folder / name, tmp_path)
        given = folder = tmp_path
    output = home / "both"
    with pytest.raises(UserError) as error:
        exported("--config", path, flag, given, "--output", output)
    assert f"{given}': adapters are exported as part of a model, and {folder} has adapters alone" in str(error.value)
    merging = f"export --config {path} --load_checkpoint {base} --adapter {given} --merge --output {output}"
    assert f"Fix: merge them: {merging}; or copy them, as PEFT loads them: cp -r {folder} {output}" in str(error.value)
    words = merging.split()
    printed = exported(*words[1:])
    assert f"wrote {output / 'model.safetensors'}" in printed
    if names == "other program":
        assert "nothing says with which one the weights were trained" in printed
        assert not (output / "chat_template.jinja").exists()
    else:  # the instructions were trained without a template
        assert "note:" not in printed and "### Response:" in (output / "chat_template.jinja").read_text()
    shutil.rmtree(output)


def test_a_chat_asks_in_the_form_of_the_training(path: Path, whole: Path, base: Path) -> None:
    for weights, name in ((whole, "Alpaca's form"), (None, "ChatML")):
        config = config_of(path, run_mode="chat", adapter_id=weights or "null", load_checkpoint=base)
        assert chat_template_of(config, load_tokenizer(config)).name == name


def test_an_export_of_the_base_alone_says_so(home: Path, path: Path, whole: Path) -> None:
    printed = exported("--config", whole / "config.yaml", "--output", home / "base.safetensors")
    adapters = whole / "checkpoints" / f"step-{2 * HALF:08d}"
    assert f"note: these are the weights without adapters; --adapter {adapters} --merge adds them\n" in printed
    with pytest.raises(UserError, match="needs --merge: it compares a model with adapters before and after"):
        exported("--config", path, "--check", "--output", home / "x")


def test_other_targets_are_refused(home: Path, path: Path, whole: Path) -> None:
    key = "model__model_config__pet_config__target_modules"
    more, fewer = {key: "'.*wq|.*wk|.*wv|.*w2'"}, {key: "'.*wq|.*wv'"}
    lacks = "lacks model.layers.0.self_attn.k_proj.lora_A.weight"
    refusal(lambda: evaluate(path, home / "refused", adapter_id=whole, **more), lacks)
    message = refusal(
        lambda: train(path, output_dir=whole, resume_training=True, **fewer), "this model does not have",
        "lacks model.layers.0.self_attn.v_proj.lora_A.weight", "holds model.layers.1.mlp.down_proj.lora_A.weight",
    )  # fmt: skip
    fix = re.search(r"Fix: write .*target_modules: ('.*')", message)
    assert loss_of(path, home / "fixed", adapter_id=whole, **{key: fix[1]}) == eval_records(whole)[-1]["eval_loss"]
