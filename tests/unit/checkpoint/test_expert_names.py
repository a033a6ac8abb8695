"""Experts stacked in memory and one by one on disk: every form of a file gives the same parameters or a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from config_helpers import failure
from golden_files import load_model_case
from safetensors.numpy import save_file

from trainer.checkpoint.adapters import load_initial_weights
from trainer.checkpoint.tensor_names import FUSED, PER_EXPERT, disk_shapes, find_expert_names, from_disk, to_disk
from trainer.checkpoint.weights import fitting_weights
from trainer.config import parse_config
from trainer.config.families import FAMILIES
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.shapes import parameter_shapes

MIXTRAL = FAMILIES["MixtralForCausalLM"].expert_names
GATE, UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj.weight" for name in ("gate", "up", "down"))
EXPERT = "model.layers.1.mlp.experts.2"


def golden(name: str) -> tuple[dict[str, np.ndarray], ModelConfig]:
    """Returns weights as on disk, and their model."""
    case = load_model_case(name)
    text = json.dumps({"model_config": {"seq_length": 24, **case.metadata["config_json"]}})
    return dict(case.weights), parse_config(name, text).decoder


def fused(weights: dict[str, np.ndarray], settings: ModelConfig) -> dict[str, np.ndarray]:
    """Returns the weights as transformers 5 has them in memory: gate above up in one matrix, all experts in one
    tensor."""
    stacked = fitting_weights(weights, settings, Path("golden"))
    for name in [name for name in stacked if name.endswith(".mlp.experts.gate_proj.weight")]:
        layer = name.removesuffix("gate_proj.weight")
        gate_EFD, up_EFD = stacked.pop(name), stacked.pop(f"{layer}up_proj.weight")
        stacked[f"{layer}gate_up_proj"] = np.concatenate([gate_EFD, up_EFD], 1)
        stacked[f"{layer}down_proj"] = stacked.pop(f"{layer}down_proj.weight")
    return stacked


@pytest.mark.parametrize("name", ["experts_mixtral", "experts_qwen3_moe", "experts_glm4_moe", "mtp_2"])
def test_all_forms_give_the_same_parameters(name: str) -> None:
    weights, settings = golden(name)
    stacked = fitting_weights(weights, settings, Path("golden"))
    assert {key: value.shape for key, value in stacked.items()} == parameter_shapes(settings)
    assert all(value.dtype == np.float32 and value.flags.c_contiguous for value in stacked.values())
    expected = MIXTRAL if name == "experts_mixtral" else PER_EXPERT
    assert find_expert_names(weights) == expected
    saved = ((kind, to_disk(stacked, kind)) for kind in ("Qwen3MoeForCausalLM", "MixtralForCausalLM"))
    files = {MIXTRAL if kind.startswith("Mixtral") else PER_EXPERT: file for kind, file in saved}
    for form, file in (files | {FUSED: fused(weights, settings)}).items():
        assert find_expert_names(file) == form
        assert {key: value.shape for key, value in file.items()} == disk_shapes(parameter_shapes(settings), form)
        again = fitting_weights(file, settings, Path("file"))
        assert again.keys() == stacked.keys()
        for key, value in again.items():
            np.testing.assert_array_equal(value, stacked[key], key)


@pytest.mark.parametrize("name", ["experts_mixtral", "experts_qwen3_moe", "experts_glm4_moe"])
def test_saved_names_are_those_of_published_files(name: str) -> None:
    weights, settings = golden(name)
    saved = to_disk(fitting_weights(weights, settings, Path("golden")), settings.architectures[0])
    assert saved.keys() == weights.keys()
    for key, value in saved.items():
        np.testing.assert_array_equal(value, weights[key], key)
        assert value.flags.c_contiguous  # safetensors writes it as it lies


def test_saving_copies_nothing() -> None:
    stack = {UP: np.ones((4, 8, 32), np.float32)}
    saved = to_disk(stack, "Qwen3MoeForCausalLM")
    assert list(saved) == [UP.replace("experts.", f"experts.{expert}.") for expert in range(4)]
    assert all(np.shares_memory(value, stack[UP]) for value in saved.values())


def test_mixtrals_names_mean_gate_up_and_down() -> None:
    weights, settings = golden("experts_mixtral")
    stacked, file = fitting_weights(weights, settings, Path("golden")), "model.layers.1.block_sparse_moe"
    for name, part in ((GATE, "w1"), (UP, "w3"), (DOWN, "w2")):
        np.testing.assert_array_equal(stacked[name][2], weights[f"{file}.experts.2.{part}.weight"])
    np.testing.assert_array_equal(stacked["model.layers.1.mlp.gate.weight"], weights[f"{file}.gate.weight"])


def changed(form: str, name: str, value: np.ndarray | None) -> tuple[dict[str, np.ndarray], ModelConfig]:
    """Returns golden weights in a format, with one tensor left out or replaced."""
    weights, settings = golden("experts_mixtral" if form == MIXTRAL else "experts_glm4_moe")
    weights = fused(weights, settings) if form == FUSED else weights
    weights.pop(name, None)
    return weights | ({} if value is None else {name: value}), settings


@pytest.mark.parametrize(
    ("form", "name", "value", "part"),
    [
        (PER_EXPERT, f"{EXPERT}.up_proj.weight", None, "it lacks {name}"),
        (PER_EXPERT, "model.layers.1.mlp.experts.8.up_proj.weight", np.ones((8, 32)), "it holds {name}, which this"),
        (PER_EXPERT, f"{EXPERT}.up_proj.weight", np.ones((9, 32)), "{name} of shape [9, 32] where this model has [8,"),
        (MIXTRAL, "model.layers.1.block_sparse_moe.experts.3.w2.weight", None, "it lacks {name}"),
        (MIXTRAL, "model.layers.1.block_sparse_moe.experts.4.w2.weight", np.ones((32, 24)), "it holds {name}, which"),
        (MIXTRAL, "model.layers.1.block_sparse_moe.gate.weight", np.ones((8, 32)), "{name} of shape [8, 32] where"),
        (FUSED, "model.layers.1.mlp.experts.gate_up_proj", None, "it lacks {name}"),
        (FUSED, "model.layers.1.mlp.experts.gate_up_proj", np.ones((8, 8, 32)), "has [8, 16, 32]"),
        (FUSED, "model.layers.1.mlp.experts.down_proj", np.ones((7, 32, 8)), "{name} of shape [7, 32, 8] where this"),
        (PER_EXPERT, "model.layers.1.mlp.gate.e_score_correction_bias", None, "it lacks {name}"),
    ],
)
def test_an_expert_that_does_not_fit_is_named_as_in_the_file(
    form: str, name: str, value: np.ndarray | None, part: str
) -> None:
    weights, settings = changed(form, name, value)
    message = failure(lambda: fitting_weights(weights, settings, Path("file")))
    assert part.format(name=name) in message


def test_published_mtp_modules_may_repeat_embedding_and_head() -> None:
    weights, settings = golden("mtp_2")
    copies = {
        "model.layers.1.embed_tokens.weight": weights["model.embed_tokens.weight"].copy(),
        "model.layers.2.shared_head.head.weight": weights["lm_head.weight"].copy(),
    }
    found = fitting_weights(weights | copies, settings, Path("file"))
    assert found.keys() == parameter_shapes(settings).keys()
    for name, copy in copies.items():
        other = weights | {name: copy + 1}
        message = failure(lambda other=other: fitting_weights(other, settings, Path("file")))
        assert f"it holds {name}, which this model does not have" in message


def test_other_tensors_are_left_out() -> None:
    weights, settings = golden("experts_mixtral")
    tied = settings.model_copy(update={"tie_word_embeddings": True})
    found = fitting_weights(weights, tied, Path("file"))  # the head of a tied model lies in some files as well
    assert set(found) == set(parameter_shapes(tied))
    found = from_disk(weights | {"model.rotary_emb.inv_freq": np.ones(4)}, parameter_shapes(settings))
    assert set(found) == set(parameter_shapes(settings))


def test_a_published_folder_of_several_files_loads(tmp_path: Path) -> None:
    weights, settings = golden("experts_qwen3_moe")
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):  # the experts of a layer lie in both
        save_file({name: weights[name] for name in part}, tmp_path / f"model-0000{number + 1}-of-00002.safetensors")
    config_json = load_model_case("experts_qwen3_moe").metadata["config_json"]
    config = parse_config("a.yaml", json.dumps({"load_checkpoint": str(tmp_path), "model_config": config_json}))
    found = load_initial_weights(config)
    assert {key: value.shape for key, value in found.items()} == parameter_shapes(settings)
    layer = "model.layers.2.mlp.experts"
    np.testing.assert_array_equal(found[f"{layer}.gate_proj.weight"][5], weights[f"{layer}.5.gate_proj.weight"])
