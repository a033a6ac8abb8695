"""The description of a model: parameters, layers that are alike, sharding, initial values, dropout masks."""

from __future__ import annotations

import math

import pytest
from decoder_settings import decoder_settings

from trainer.config.schema.model import ModelConfig
from trainer.models.spec.build import dropout_sites, model_spec
from trainer.models.spec.model import AdapterSpec, MlpSpec, MoeSpec
from trainer.models.spec.shapes import parameter_specs

SIZES = {
    "num_layers": 4, "hidden_size": 64, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 96, "vocab_size": 300,
    "seq_length": 32,
}
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_kv_heads": None,
}
MOE = {"expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 32}
ADAPTERS = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8, "target_modules": ".*"}
KINDS: dict[str, tuple[dict, int, int]] = {
    "dense": ({}, 39, 161_856),
    "tied": ({"tie_word_embeddings": True}, 38, 142_656),
    "biases": ({"qkv_has_bias": True, "attn_proj_has_bias": True, "mlp_has_bias": True}, 67, 163_648),
    "no bias on the output": ({"mlp_has_bias": True, "mlp_down_has_bias": False}, 47, 162_624),
    "norms of heads": ({"use_qk_norm": True, "head_dim": 24}, 47, 186_624),
    "norms after sublayers": ({"post_self_attn_layernorm": True, "post_mlp_layernorm": True}, 47, 162_368),
    "latent": (LATENT, 77, 203_524_728),
    "latent queries": (LATENT | {"q_lora_rank": 20, "qkv_has_bias": True, "attn_proj_has_bias": True}, 92, 202_304_928),
    "experts": ({"moe_config": MOE | {"first_k_dense_replace": 1}}, 42, 255_552),
    "shared experts": ({
        "moe_config": MOE | {"shared_expert_num": 2, "use_shared_expert_gating": True, "moe_layer_freq": 2},
        "mlp_down_has_bias": True,
    }, 53, 250_176),
    "expert bias": ({"moe_config": MOE | {"balance_via_topk_bias": True, "use_gating_sigmoid": True}}, 47, 286_816),
    "modules": ({"mtp_depth": 2, "moe_config": MOE | {"first_k_dense_replace": 2}}, 69, 365_248),
    "mapped embedding": ({"embedding_size": 48}, 41, 158_384),
    "layers that share attention": ({"layers_group": 2}, 31, 137_280),
    "windows": ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, 39, 161_856),
    "adapters": ({"pet_config": ADAPTERS, "qkv_has_bias": True}, 107, 177_216),
    "adapters of some": ({
        "pet_config": ADAPTERS | {"target_modules": ".*layers.1.*.q_proj|.*layers.2.*.w2"},
    }, 43, 163_008),
    "adapters beside experts": ({
        "pet_config": ADAPTERS, "moe_config": MOE | {"first_k_dense_replace": 1}, "mtp_depth": 1,
    }, 102, 336_896),
    "adapters of latent attention": (LATENT | {"pet_config": ADAPTERS, "q_lora_rank": 20}, 145, 202_320_988),
}
"""Of each kind of model: its settings, how many parameters it has, and how many numbers in them."""


def settings_of(**changes) -> ModelConfig:
    return decoder_settings(**SIZES | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_each_kind_of_model(kind: str) -> None:
    changes, parameters, numbers = KINDS[kind]
    specs = parameter_specs(settings_of(**changes))
    assert all(name == spec.name for name, spec in specs.items())
    assert (len(specs), sum(math.prod(spec.shape) for spec in specs.values())) == (parameters, numbers)
    roles = [spec.role for spec in specs.values()]
    assert roles == sorted(roles, key=lambda role: role == "adapter")


def test_equal_layers_are_one_object() -> None:
    settings = settings_of(num_layers=61, mtp_depth=1, moe_config=MOE | {"first_k_dense_replace": 3})
    layers = model_spec(settings).layers
    assert len(layers) == 62 and len({id(layer) for layer in layers}) == len(set(layers)) == 3
    assert layers[0] is layers[2] and layers[3] is layers[60]
    assert isinstance(layers[0].mlp, MlpSpec) and isinstance(layers[3].mlp, MoeSpec)
    assert layers[61].mlp == layers[3].mlp and layers[61].attention == layers[3].attention


def test_windows_differ_by_layer() -> None:
    layers = model_spec(settings_of(**KINDS["windows"][0], mtp_depth=1)).layers
    assert [layer.attention.window for layer in layers] == [8, None, 8, None, None]


def test_layers_of_a_group_have_the_parameters_of_one_attention() -> None:
    spec = model_spec(settings_of(**KINDS["layers that share attention"][0]))
    assert "model.layers.0.self_attn.q_proj.weight" in spec.layer_parameters(1)
    assert "model.layers.1.mlp.up_proj.weight" in spec.layer_parameters(1)
    assert "model.layers.1.self_attn.q_proj.weight" not in spec.parameters()


def test_adapters_by_their_matrix() -> None:
    spec = model_spec(settings_of(**KINDS["adapters of some"][0]))
    assert not spec.layers[0].attention.adapters and not spec.layers[0].mlp.adapters
    assert spec.layers[1].attention.adapters == {"self_attn.q_proj": AdapterSpec(4, 2.0)}
    assert spec.layers[2].mlp.adapters == {"mlp.down_proj": AdapterSpec(4, 2.0)}
    assert [name for name, one in spec.parameters().items() if one.role == "adapter"] == [
        "model.layers.1.self_attn.q_proj.lora_A.weight", "model.layers.1.self_attn.q_proj.lora_B.weight",
        "model.layers.2.mlp.down_proj.lora_A.weight", "model.layers.2.mlp.down_proj.lora_B.weight",
    ]


def test_each_dropout_mask_has_its_number() -> None:
    settings = settings_of(**KINDS["adapters beside experts"][0])
    sites = [dropout_sites(settings, layer) for layer in range(5)]
    numbers = [number for of_layer in sites for number in of_layer.values()]
    assert len(set(numbers)) == len(numbers)
    assert sites[1] == {
        "probabilities": 3, "attention_output": 4, "mlp_output": 5, "self_attn.q_proj": 22, "self_attn.k_proj": 23,
        "self_attn.v_proj": 24, "self_attn.o_proj": 25,
    }
    assert sites[0]["mlp.gate_proj"] == 19 and sites[4] == {
        "probabilities": 12, "attention_output": 13, "mlp_output": 14, "self_attn.q_proj": 43, "self_attn.k_proj": 44,
        "self_attn.v_proj": 45, "self_attn.o_proj": 46,
    }
