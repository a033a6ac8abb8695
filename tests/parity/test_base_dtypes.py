"""Adapters on a base model in few bytes: the numbers are those of the float32 model with the decompressed matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_decoder import golden_decoder
from golden_files import load_adapter_case, load_model_case, model_settings
from numpy_kernels import assert_close, assert_same_bits, distance
from tiny_trainer import TinyTrainer, config_of, loss_and_gradients, make_batch
from tolerances import decoder_limits, rounding_limit

from trainer.checkpoint.adapters import ADAPTER_CONFIG, fitting_adapters, merge_adapters
from trainer.checkpoint.state import load_weights
from trainer.models.spec.shapes import adapter_shapes, base_dtypes, parameter_shapes
from trainer.storage.quantized import FrozenMatrix, QuantizedArray

LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
EXPERTS = {"moe_config": {"expert_num": 4, "num_experts_chosen": 2, "shared_expert_num": 1}}
MODELS = {
    "dora": {"pet": {"use_dora": True}, "qkv_has_bias": True, "mlp_has_bias": True,
             "compute_dtype": "bfloat16"},
    "experts": {**EXPERTS, "compute_dtype": "float16", "mtp_depth": 1},
    "latent": {**LATENT, "tie_word_embeddings": True},
    "vocabulary": {"vocab_size": 9000},  # the head takes it in two parts
}


def adapted(dtype: str, **model: object) -> dict:
    pet = {"lora_rank": 3, "lora_alpha": 7.5, "target_modules": ".*_proj", "lora_b_std": 0.1, "base_dtype": dtype}
    return {"pet_config": pet | model.pop("pet", {}), "num_layers": 2} | model


@pytest.mark.parametrize(
    ("dtype", "name"), [*(("nf4", name) for name in MODELS), ("int8", "experts"), ("bfloat16", "dora")]
)
def test_it_computes_what_the_decompressed_model_computes(dtype: str, name: str) -> None:
    """The same operands give the same bits; only a head in several parts adds up in another order."""
    small = TinyTrainer(**adapted(dtype, **MODELS[name]))
    wide = TinyTrainer(**adapted("float32", **MODELS[name]))
    held = {each for each, parameter in small.model.parameters_by_name.items() if isinstance(parameter, FrozenMatrix)}
    assert held == base_dtypes(small.model.settings).keys() and "model.embed_tokens.weight" in held
    decompressed = {each: np.asarray(numbers) for each, numbers in small.initial.items()}
    rounded = [each for each in held if not np.array_equal(decompressed[each], wide.initial[each])]
    assert len(rounded) > 0.9 * len(held)
    wide.initial = decompressed
    mine, gradients = loss_and_gradients(small.step(), make_batch(3, 9, rows=2))
    right, expected = loss_and_gradients(wide.step(), make_batch(3, 9, rows=2))
    assert gradients.keys() == adapter_shapes(small.model.settings).keys()
    if name != "vocabulary":
        assert mine == right
        assert_same_bits(gradients, expected)
        return
    limits = decoder_limits(small.model.settings, rows=2)
    assert distance(np.float32(mine), np.float32(right)) < limits.loss
    assert_close(gradients, expected, limits.gradients)


def test_what_has_how_many_bits() -> None:
    settings = config_of(model=adapted("nf4", **EXPERTS)).decoder
    dtypes = base_dtypes(settings)
    prefix = "model.layers.1."
    assert dtypes[f"{prefix}self_attn.q_proj.weight"] == dtypes[f"{prefix}mlp.experts.up_proj.weight"] == "nf4"
    assert dtypes["model.embed_tokens.weight"] == dtypes["lm_head.weight"] == "bfloat16"
    others = parameter_shapes(settings).keys() - dtypes.keys()
    assert all("norm" in name or name.endswith("mlp.gate.weight") for name in others)


def test_logits_and_gradients_are_those_of_peft_on_bitsandbytes(tmp_path: Path) -> None:
    """The base is what bitsandbytes holds; `tests/unit/arrays/test_quantized.py` compares the quantization itself."""
    case = load_adapter_case("quantized_nf4")
    model = load_model_case(case.model)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(case.adapter_config))
    pet = {"lora_rank": case.settings["r"], "lora_alpha": case.settings["lora_alpha"], "base_dtype": "nf4",
           "target_modules": "|".join(case.settings["target_modules"])}  # fmt: skip
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    config = config_of(model={**model_settings(model.config | sizes), "pet_config": pet})
    weights: dict[str, Any] = dict(fitting_adapters(case.adapters, config, tmp_path).read())
    for name, shape in parameter_shapes(config.decoder).items():
        matrix = name.removesuffix(".weight")
        held = case.stored.get(f"other.{name}")
        if held is None:
            arrays = (case.stored[f"{part}.{matrix}"] for part in ("codes", "scales", "scales_of_scales", "mean"))
            codes, scales, of_scales, mean = arrays
            held = QuantizedArray("nf4", shape, codes, scales, of_scales, mean[0])
        weights[name] = held
    base = {name: np.asarray(weights[name]) for name in parameter_shapes(config.decoder)}
    golden = golden_decoder(model._replace(weights=base), config.decoder, 0)
    load_weights(golden.model, weights)
    golden.check_adapters(case)


def test_a_merge_adds_to_the_decompressed_matrices() -> None:
    tiny = TinyTrainer(**adapted("nf4"))
    settings = tiny.model.settings
    merged = merge_adapters(tiny.initial, settings)
    assert merged.keys() == parameter_shapes(settings).keys()
    assert all(isinstance(array, np.ndarray) and array.dtype == np.float32 for array in merged.values())
    name = "model.layers.0.mlp.down_proj"
    a, b = (tiny.initial[f"{name}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    expected = np.asarray(tiny.initial[f"{name}.weight"]) + 2.5 * b @ a
    assert distance(merged[f"{name}.weight"], expected) < rounding_limit(3)
