"""gpt-oss's files: experts whose gate and up take turns, as numbers or quantized in MXFP4."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from config_helpers import failure, load
from golden_files import load_model_case
from safetensors.numpy import load_file, save_file
from test_array_parts import parts_of, right

from trainer.checkpoint.tensor_names import to_disk
from trainer.checkpoint.weights import fitting_weights, read_weights
from trainer.config import parse_config
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.shapes import parameter_shapes

LAYER = "model.layers.0.mlp.experts."
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
"""The numbers of E2M1 without sign (Open Compute Project 2023, Microscaling Formats, table 5)."""


def settings_of(**changes: object) -> ModelConfig:
    described = {**load_model_case("family_gpt_oss").metadata["config_json"], **changes}
    return parse_config("gpt-oss", json.dumps({"model_config": {"seq_length": 24, **described}})).decoder


def quantized(shape: tuple[int, int, int], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns bytes, exponents, and the numbers that they mean, each found by itself; `shape` is [E, outputs, inputs].
    """
    rng = np.random.default_rng(seed)
    experts, outputs, inputs = shape
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    scales = rng.integers(120, 130, (experts, outputs, inputs // 32), np.uint8)
    numbers = np.empty(shape, np.float32)
    for expert, output, place in np.ndindex(*shape):
        group, within = divmod(place, 32)
        code = int(blocks[expert, output, group, within // 2]) >> (4 * (within % 2)) & 15
        value = math.ldexp(VALUES[code % 8], int(scales[expert, output, group]) - 127)
        numbers[expert, output, place] = math.copysign(value, -1 if code >= 8 else 1)
    return blocks, scales, numbers


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, ModelConfig]:
    """Returns a file with experts in MXFP4, one with the same numbers, and the model."""
    settings = settings_of(hidden_size=64, intermediate_size=32)
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("files")
    wide = {
        name.replace(".mlp.gate.", ".mlp.router."): rng.standard_normal(shape).astype(np.float32)
        for name, shape in parameter_shapes(settings).items()
        if ".experts." not in name
    }
    packed = dict(wide)
    plain = dict(wide)
    for layer in range(settings.num_layers):
        experts = f"model.layers.{layer}.mlp.experts."
        for matrix, outputs, inputs in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            blocks, scales, numbers = quantized((4, outputs, inputs), layer)
            packed |= {f"{experts}{matrix}_blocks": blocks, f"{experts}{matrix}_scales": scales}
            plain[f"{experts}{matrix}"] = np.ascontiguousarray(numbers.swapaxes(1, 2))
            bias = rng.standard_normal((4, outputs)).astype(np.float32)
            packed[f"{experts}{matrix}_bias"] = bias
            plain[f"{experts}{matrix}_bias"] = bias
    save_file(packed, folder / "packed.safetensors")
    save_file(plain, folder / "plain.safetensors")
    return folder / "packed.safetensors", folder / "plain.safetensors", settings


def test_quantized_experts_are_the_numbers_that_they_mean(files: tuple[Path, Path, ModelConfig]) -> None:
    packed, plain, settings = files
    found = fitting_weights(read_weights(packed), settings, packed)
    expected = fitting_weights(read_weights(plain), settings, plain)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], name)
    gate_up = load_file(plain)[f"{LAYER}gate_up_proj"]
    np.testing.assert_array_equal(found[f"{LAYER}up_proj.weight"][2], gate_up[2, :, 1::2].T)
    saved = to_disk(found, "GptOssForCausalLM")
    assert saved.keys() == load_file(plain).keys()
    for name, array in load_file(plain).items():
        np.testing.assert_array_equal(saved[name], array, name)


def test_a_rank_reads_its_part(files: tuple[Path, Path, ModelConfig]) -> None:
    packed, _, settings = files
    whole = fitting_weights(read_weights(packed), settings, packed)
    every = {key: list(parts_of(array.shape, seed, 3))[1:] for seed, (key, array) in enumerate(whole.items())}
    for number in range(3):
        parts = {key: found[number] for key, found in every.items()}
        for key, array in fitting_weights(read_weights(packed), settings, packed, parts=parts).items():
            np.testing.assert_array_equal(array, right(whole[key], parts[key]), key)


def test_bytes_of_other_tensors_are_an_error(tmp_path: Path) -> None:
    save_file({"model.norm.weight": np.zeros(4, np.uint8)}, tmp_path / "model.safetensors")
    message = failure(lambda: read_weights(tmp_path))
    assert "must be floating-point numbers" in message and "model.norm.weight is U8" in message


def test_experts_of_other_shapes_are_named(files: tuple[Path, Path, ModelConfig]) -> None:
    packed, plain, settings = files
    for file, tensor, axes in ((packed, "gate_up_proj_scales", None), (packed, "down_proj_blocks", (4, 64, 16)),
                               (plain, "gate_up_proj", (4,)), (plain, "down_proj_bias", (256,))):  # fmt: skip
        weights = load_file(file)
        array = weights.pop(f"{LAYER}{tensor}")
        if axes is not None:
            weights[f"{LAYER}{tensor}"] = np.resize(array, axes)
        message = failure(lambda weights=weights: fitting_weights(weights, settings, Path("file")))
        assert f"lacks {LAYER}" in message and f" {LAYER}{tensor.replace('scales', 'blocks')}" in message


def test_another_quantization_of_a_folder_is_an_error(tmp_path: Path) -> None:
    described = load_model_case("family_gpt_oss").metadata["config_json"]
    for method, is_read in (("mxfp4", True), ("awq", False)):
        content = {**described, "quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(content))
        text = f"pretrained_model_dir: {tmp_path}\n"
        if is_read:
            assert load(text).decoder.attention_sinks
        else:
            assert "quantization_config" in failure(lambda text=text: load(text))
