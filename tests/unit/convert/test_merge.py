"""`merge`: several models become one folder, without MindSpore."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_lines import answers_of
from config_helpers import failure
from safetensors.numpy import load_file, save_file

from trainer.convert import merge as merge_module
from trainer.convert.merge import MergeOptions, merge
from trainer.convert.merge_methods import slerp, task_arithmetic, ties
from trainer.errors import RunError

RANDOM = np.random.default_rng(5)
SHAPES = {"model.embed_tokens.weight": (5, 4), "model.norm.weight": (4,), "lm_head.weight": (5, 4)}


def weights_of(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    weights = {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    for name, array in changes.items():
        if array is None:
            del weights[name.replace("__", ".")]
        else:
            weights[name.replace("__", ".")] = array
    return weights


def folder_of(path: Path, weights: dict[str, np.ndarray], shards: int = 1) -> Path:
    path.mkdir()
    for shard in range(shards):
        part = {name: array for number, (name, array) in enumerate(weights.items()) if number % shards == shard}
        save_file(part, path / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "from": path.name}))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [folder_of(tmp_path / name, weights_of(), shards) for name, shards in (("a", 1), ("b", 3), ("base", 1))]


def saved(folder: Path) -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def test_each_method_merges_every_tensor(tmp_path: Path, models: list[Path]) -> None:
    first, second, base = models
    one, other, before = map(saved, models)
    tasks = {"base": base, "weights": (0.5, 1.5), "scale": 0.7}
    cases = {
        "linear": ({}, lambda n: (one[n] + other[n]) / 2),
        "slerp": ({"t": 0.25}, lambda n: slerp(one[n], other[n], 0.25)),
        "task_arithmetic": (tasks, lambda n: task_arithmetic(before[n], [one[n], other[n]], (0.5, 1.5), 0.7)),
        "ties": ({**tasks, "density": 0.5}, lambda n: ties(before[n], [one[n], other[n]], (0.5, 1.5), 0.7, 0.5)),
    }
    for method, (options, expected) in cases.items():
        line = merge(MergeOptions((first, second), tmp_path / method, method=method, **options))
        assert line.startswith(f"wrote {tmp_path / method}: 2 models by {method}, 3 tensors, ")
        found = saved(tmp_path / method)
        assert found.keys() == SHAPES.keys()
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected(name), f"{method}: {name}")
        assert json.loads((tmp_path / method / "config.json").read_text())["from"] == "a"
        assert (tmp_path / method / "tokenizer.json").exists()


def test_a_model_may_be_replaced_but_is_never_missing(
    tmp_path: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = models
    before = [saved(first), saved(second)]

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left"):
        patch.setattr("trainer.run.export.write_weights", fail)
        merge(MergeOptions((first, second), second, force=True))
    assert saved(second).keys() == SHAPES.keys()
    merge(MergeOptions((first, second), second, force=True))
    assert [path.name for path in second.glob("*.safetensors")] == ["model.safetensors"]
    for name, array in saved(second).items():
        np.testing.assert_array_equal(array, (before[0][name] + before[1][name]) / 2)


def test_codes_of_quantized_experts_are_not_averaged(tmp_path: Path) -> None:
    codes = {"model.layers.0.mlp.experts.down_proj_blocks": np.ones((1, 4, 1, 16), np.uint8)}
    folders = [folder_of(tmp_path / name, codes) for name in "ab"]
    message = failure(lambda: merge(MergeOptions(tuple(folders), tmp_path / "out")))
    assert "experts are quantized" in message and "down_proj_blocks" in message and "export" in message


def test_large_models_get_several_files(tmp_path: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "SHARD_BYTES", 90)
    merge(MergeOptions((models[0], models[0]), tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == SHAPES.keys()
    for name, array in saved(tmp_path / "out").items():
        np.testing.assert_array_equal(array, saved(models[0])[name])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"method": "ties"}, ["--base", "ties needs the model from which the others were trained"]),
        ({"base": Path("a")}, ["--base", "linear has no base"]),
        ({"weights": (1.0,)}, ["--weight = '1.0'", "there are 2 models and 1 weights"]),
        ({"weights": (1.0, -1.0)}, ["the weights sum to 0"]),
        ({"method": "slerp", "weights": (1.0, 1.0)}, ["SLERP has no weights", "write --t"]),
        ({"models": (Path("a"),)}, ["at least two models are needed"]),
        ({"method": "slerp", "models": (Path("a"),) * 3}, ["SLERP interpolates between two models"]),
        ({"output": Path("a")}, ["is there already", "--force"]),
        ({"models": (Path("a"), Path("nowhere"))}, ["nowhere"]),
        ({"models": (Path("a"), Path("fewer"))}, ["'fewer'", "it lacks model.norm.weight, which a has"]),
        ({"models": (Path("fewer"), Path("a"))}, ["it has model.norm.weight, which fewer lacks"]),
        ({"models": (Path("a"), Path("other"))}, ["its model.norm.weight has the shape [3], that of a has [4]"]),
    ],
)
def test_models_that_do_not_fit_are_an_error(
    tmp_path: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch, options: dict, parts: list[str]
) -> None:
    folder_of(tmp_path / "fewer", weights_of(model__norm__weight=None))
    folder_of(tmp_path / "other", weights_of(model__norm__weight=np.ones(3, np.float32)))
    monkeypatch.chdir(tmp_path)
    usual = {"models": (Path("a"), Path("b")), "output": Path("new")}
    message = failure(lambda: merge(MergeOptions(**usual | options)))
    for part in parts:
        assert part in message
    assert not Path("new").exists()


def test_the_command_needs_no_mindspore(tmp_path: Path, models: list[Path]) -> None:
    lines = {
        "merged": ["merge", models[0], models[1], "-o", tmp_path / "out", "--weight", "3", "--weight", "1", "--dtype",
                   "bfloat16"],
        "method": ["merge", models[0], models[1], "-o", tmp_path / "no", "--method", "mean"],
        "weight": ["merge", models[0], models[1], "-o", tmp_path / "no", "--weight", "1", "--weight", "nan"],
        "scale": ["merge", models[0], models[1], "-o", tmp_path / "no", "--scale", "1e39"],
    }  # fmt: skip
    answers = answers_of(lines, tmp_path)
    assert answers["merged"].code == 0 and "2 models by linear, 3 tensors" in answers["merged"].output
    assert not answers["merged"].loaded_mindspore
    for name, value in (("weight", "nan"), ("scale", "1e+39")):  # a folder of NaN would be written
        assert answers[name].code == 2 and f"flag --{name}: value = {value}: must be a finite" in answers[name].errors
    assert not (tmp_path / "no").exists()
    assert answers["method"].code == 2 and "write linear, slerp, task_arithmetic, ties" in answers["method"].errors
