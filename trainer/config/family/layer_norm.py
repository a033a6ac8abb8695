"""Families of dense models whose norms are LayerNorm."""

from __future__ import annotations

from trainer.config.family.common import ALL
from trainer.config.family.record import Family

_LAYER_NORMS = {key: value for key, value in ALL.items() if key != "rms_norm_eps"}
_COHERE = _LAYER_NORMS | {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "num_key_value_heads": None, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True, "attention_bias": False, "logit_scale": 0.0625,
}
_COHERE_MODEL = {
    "normalization": "LayerNorm", "norm_has_bias": False, "parallel_attn": True, "rope_interleave": True,
    "tie_word_embeddings": True, "logit_scale": 0.0625,
}

LAYER_NORM = {
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        _LAYER_NORMS | {
            "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
            "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096, "initializer_range": 0.018042, "norm_epsilon": 1e-5,
            "tie_word_embeddings": True, "sliding_window": None, "residual_dropout": 0.0, "use_bias": True,
        },
        {
            "normalization": "LayerNorm", "gated_linear_unit": False, "hidden_act": "gelu_pytorch_tanh",
            "mlp_names": "c_fc", "tie_word_embeddings": True, "use_bias": True,
        },
        windows="every",
    ),
    "StableLmForCausalLM": Family("stablelm", _LAYER_NORMS | {
        "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_qkv_bias": False, "qk_layernorm": False,
        "hidden_dropout": 0.0,
    }, {"normalization": "LayerNorm", "rotary_pct": 0.25}),
    "NemotronForCausalLM": Family(
        "nemotron",
        _LAYER_NORMS | {
            "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48,
            "num_key_value_heads": None, "hidden_act": "relu2", "max_position_embeddings": 4096,
            "initializer_range": 0.0134, "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": False,
            "mlp_bias": False,
        },
        {
            "normalization": "LayerNorm", "layernorm_zero_centered_gamma": True, "gated_linear_unit": False,
            "hidden_act": "relu2", "rotary_pct": 0.5,
        },
        has_output_bias=True,
    ),
    "Jais2ForCausalLM": Family(
        "jais2",
        _LAYER_NORMS | {
            "vocab_size": 150272, "hidden_size": 3328, "intermediate_size": 26624, "num_attention_heads": 26,
            "num_key_value_heads": None, "hidden_act": "relu2", "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True,
        },
        {
            "normalization": "LayerNorm", "gated_linear_unit": False, "hidden_act": "relu2", "qkv_has_bias": True,
            "attn_proj_has_bias": True, "mlp_has_bias": True,
        },
        has_output_bias=True,
    ),
    "CohereForCausalLM": Family(
        "cohere", _COHERE | {"rope_theta": 500000.0, "use_qk_norm": False}, _COHERE_MODEL, has_output_bias=True
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2", _COHERE | {"sliding_window": 4096}, _COHERE_MODEL | {"nope_without_window": True},
        windows="listed", full_attention_period=4, has_output_bias=True,
    ),
}  # fmt: skip
