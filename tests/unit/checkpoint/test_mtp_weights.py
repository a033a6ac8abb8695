"""Checkpoints with more or fewer tensors than the model: multi-token prediction modules, expert biases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from config_helpers import failure
from golden_files import load_model_case
from safetensors.numpy import load_file, save_file

from trainer.checkpoint.adapters import load_initial_weights, merge_adapters
from trainer.checkpoint.weights import fitting_weights
from trainer.config import Config, parse_config
from trainer.models.spec.init import initial_value
from trainer.models.spec.names import EXPERT_BIAS
from trainer.models.spec.shapes import adapter_shapes, parameter_shapes, parameter_specs
from trainer.run.export import export

SIZES = {
    "num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "vocab_size": 30, "seq_length": 8,
    "mtp_depth": 2,
}  # fmt: skip
DENSE, MTP = "dense", "mtp_2"


def config_of(name: str, folder: Path, *, mode: str = "train", moe: dict | None = None, **changes: object) -> Config:
    """Returns the model of a golden file, whose weights are in `folder`, with other keys of model_config and
    moe_config."""
    model = SIZES if name == DENSE else load_model_case(name).metadata["config_json"]
    model = model | changes | ({"moe_config": moe} if moe else {})
    if name == MTP and "mtp_depth" in changes:
        del model["num_nextn_predict_layers"]  # Hugging Face's key for the same
    text = {"run_mode": mode, "load_checkpoint": str(folder), "model_config": model}
    return parse_config("a.yaml", json.dumps(text | ({"predict_data": "a"} if mode == "predict" else {})))


def weights_of(name: str) -> dict[str, np.ndarray]:
    if name != DENSE:
        return load_model_case(name).weights
    settings = config_of(DENSE, Path()).decoder
    return {key: initial_value(spec, settings, 9) for key, spec in parameter_specs(settings).items()}


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """Returns a dense model with one layer and two multi-token prediction modules."""
    save_file(weights_of(DENSE), tmp_path / "model.safetensors")
    return tmp_path


def without_modules(folder: Path, layers: tuple[int, ...] = (1, 2)) -> Path:
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    weights = {name: array for name, array in load_file(folder / "model.safetensors").items()}
    save_file({n: a for n, a in weights.items() if not n.startswith(prefixes)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("mode", ["train", "eval", "predict"])
@pytest.mark.parametrize(
    ("name", "depth", "layers", "them"),
    [(DENSE, 0, "layers 1-2", "them"), (DENSE, 1, "layer 2", "it"), (MTP, 1, "layer 2", "it")],
)
def test_modules_that_the_model_lacks_are_left_out_with_a_note(
    tmp_path: Path, mode: str, name: str, depth: int, layers: str, them: str
) -> None:
    save_file(weights_of(name), tmp_path / "model.safetensors")
    config, notes = config_of(name, tmp_path, mode=mode, mtp_depth=depth), []
    found = load_initial_weights(config, notes.append)
    assert found.keys() == parameter_shapes(config.decoder).keys()
    (text,) = notes
    assert f"({layers}); mtp_depth: 2 would use {them}" in text
    whole = fitting_weights(weights_of(name), config_of(name, tmp_path).decoder, Path("file"))
    for key, array in found.items():
        np.testing.assert_array_equal(array, whole[key])


def test_modules_of_ernie_are_left_out_with_a_note(tmp_path: Path) -> None:
    name = "family_ernie4_5_moe"
    module = {f"model.mtp_{part}.weight": np.ones(12, np.float32) for part in ("block.0.mlp.up_proj", "emb_norm.0")}
    save_file(dict(weights_of(name)) | module, tmp_path / "model.safetensors")
    config, notes = config_of(name, tmp_path), []
    found = load_initial_weights(config, notes.append)
    assert {key: array.shape for key, array in found.items()} == parameter_shapes(config.decoder)
    bias_1E = weights_of(name)["model.layers.1.mlp.moe_statics.e_score_correction_bias"]
    np.testing.assert_array_equal(found[f"model.layers.1.{EXPERT_BIAS}"], bias_1E[0])
    (text,) = notes
    assert "as in transformers: the multi-token prediction modules of ERNIE" in text


def test_a_deeper_model_is_not_mistaken_for_modules(modules: Path) -> None:
    weights = load_file(modules / "model.safetensors")
    copies = {name.replace(".0.", ".3."): array for name, array in weights.items() if ".layers.0." in name}
    save_file(weights | copies, modules / "model.safetensors")
    message = failure(lambda: load_initial_weights(config_of(DENSE, modules, mtp_depth=0)))
    assert "it holds model.layers." in message and "use the model_config of the checkpoint" in message


@pytest.mark.parametrize("layers", [(1, 2), (2,)])
def test_missing_modules_start_from_the_seed_in_training(
    modules: Path, layers: tuple[int, ...]
) -> None:
    config, notes = config_of(DENSE, without_modules(modules, layers), mode="finetune"), []
    found = load_initial_weights(config, notes.append)
    assert found.keys() == parameter_shapes(config.decoder).keys()
    (text,) = notes
    which = "layers 1-2 (mtp_depth 2) start" if len(layers) == 2 else "layer 2 (mtp_depth 2) starts"
    assert text == f"the checkpoint has no multi-token prediction module: {which} from the seed"
    name = "model.layers.2.eh_proj.weight"
    right = initial_value(parameter_specs(config.decoder)[name], config.decoder, config.seed)
    np.testing.assert_array_equal(found[name], right)


def test_missing_modules_are_not_needed_outside_training(modules: Path, tmp_path: Path) -> None:
    without_modules(modules, (2,))
    text = "the checkpoint has no multi-token prediction module: layer 2 (mtp_depth 2); only training uses it"
    for mode in ("eval", "predict"):
        config, notes = config_of(DENSE, modules, mode=mode), []
        assert load_initial_weights(config, notes.append).keys() == parameter_shapes(config.decoder).keys()
        assert notes == [text]
    found = export(config_of(DENSE, modules), tmp_path / "exported", merge=False)
    assert found.notes[0] == text and "transformers has no multi-token prediction" in found.notes[1]
    written = load_file(tmp_path / "exported" / "model.safetensors")
    assert written.keys() == load_file(modules / "model.safetensors").keys()


def test_adapters_are_not_trained_beside_missing_modules(modules: Path) -> None:
    without_modules(modules, (2,))
    adapters = config_of(DENSE, modules, pet_config={"target_modules": ".*q_proj"})
    assert "write mtp_depth: 1 instead" in failure(lambda: load_initial_weights(adapters))


def test_a_resumed_run_needs_the_same_modules(modules: Path) -> None:
    weights = load_file(modules / "model.safetensors")
    settings = config_of(DENSE, modules, mtp_depth=0).decoder
    message = failure(lambda: fitting_weights(weights, settings, modules))
    assert "holds model.layers.1." in message and "write mtp_depth: 2, as in the checkpoint" in message


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    save_file(load_model_case("experts_mixtral").weights, tmp_path / "model.safetensors")
    return tmp_path


BALANCED = {"balance_via_topk_bias": True, "topk_bias_update_rate": 0.01}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_missing_expert_biases_start_at_zero_with_a_note(mixtral: Path, mode: str) -> None:
    config, notes = config_of("experts_mixtral", mixtral, mode=mode, moe=BALANCED), []
    found = load_initial_weights(config, notes.append)
    assert notes == ["balance_via_topk_bias: the checkpoint has no expert bias, which starts at 0"]
    biases = [array for name, array in found.items() if name.endswith(EXPERT_BIAS)]
    assert len(biases) == len(config.decoder.moe_layers) and not np.any(biases)
    assert found.keys() == parameter_shapes(config.decoder).keys()


def test_expert_biases_that_are_missing_in_some_layers_are_an_error(mixtral: Path) -> None:
    config = config_of("experts_mixtral", mixtral, moe=BALANCED)
    name = f"model.layers.0.{EXPERT_BIAS}"
    bias = np.zeros(config.decoder.experts.expert_num, np.float32)
    save_file(load_file(mixtral / "model.safetensors") | {name: bias}, mixtral / "model.safetensors")
    message = failure(lambda: load_initial_weights(config))
    assert f"it lacks model.layers.1.{EXPERT_BIAS}" in message


def test_a_mixture_with_an_expert_bias_is_exported_as_a_class_that_has_one_alone(mixtral: Path, tmp_path: Path) -> None:
    config = config_of("experts_mixtral", mixtral, moe=BALANCED)
    message = failure(lambda: export(config, tmp_path / "folder", merge=False))
    assert "MixtralForCausalLM" in message and "an expert bias" in message and not (tmp_path / "folder").exists()
    assert export(config, tmp_path / "weights.safetensors", merge=False).tensors > len(config.decoder.moe_layers)

    own = tmp_path / "glm"
    own.mkdir()
    save_file(load_model_case("experts_glm4_moe").weights, own / "model.safetensors")
    assert export(config_of("experts_glm4_moe", own), tmp_path / "glm.safetensors", merge=False).notes == ()


def test_adapters_whose_targets_are_in_experts_too_are_merged(mixtral: Path) -> None:
    config = config_of("experts_mixtral", mixtral, pet_config={"target_modules": ".*q_proj|.*gate_proj"})
    weights = load_initial_weights(config)
    assert {name.split(".")[4] for name in adapter_shapes(config.decoder)} == {"q_proj"}
    assert merge_adapters(weights, config.decoder).keys() == parameter_shapes(config.decoder).keys()
