"""Families of dense models with RMSNorm: a Llama but for some keys."""

from __future__ import annotations

from trainer.config.family.common import (
    ALL,
    CORE,
    DROPPED_LAYERS,
    ERNIE,
    ERNIE_MODEL,
    GRANITE,
    MISTRAL,
    NO_PADDING,
    QWEN,
    QWEN_SOURCE,
)
from trainer.config.family.record import ROPE_TYPES, Family, SourceClass

_OLMO_KEYS = ALL | {
    "vocab_size": 50304, "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "attention_bias": False,
}
_NORMS_AFTER = {
    "use_qk_norm": True, "input_norms": False, "post_self_attn_layernorm": True, "post_mlp_layernorm": True,
}  # fmt: skip
_OLMO = _NORMS_AFTER | {"qk_norm_all_heads": True}
_NORMS_AFTER_NAMES = {
    ".post_self_attn_layernorm.": ".post_attention_layernorm.",
    ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
}
GLM = Family(
    "glm",
    ALL | {
        "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    {"rotary_pct": 0.5, "rope_interleave": True, "qkv_has_bias": True},
    written=NO_PADDING,
    joined_tensors={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
)  # fmt: skip
_GEMMA_TEXT = {key: value for key, value in ALL.items() if key != "hidden_act"} | {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh", "layernorm_zero_centered_gamma": True, "tie_word_embeddings": True,
}  # fmt: skip

# The order matters: a name on disk is another one in memory.
_GEMMA_NORMS = {
    ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
    ".post_self_attn_layernorm.": ".post_attention_layernorm.",
    ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
}

DENSE = {
    "LlamaForCausalLM": Family(
        "llama",
        ALL | {
            "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None,
            "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False,
        },
        has_output_bias=True,
        source_classes=(
            SourceClass("LlamaConfig", "", {"rms_norm_eps": 1e-5, "init_method_std": 0.01, "pad_token_id": 0}),
        ),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", QWEN, {"qkv_has_bias": True}, windows="listed",
        source_classes=(SourceClass("Qwen2Config", "qwen2", QWEN_SOURCE, DROPPED_LAYERS),),
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", QWEN | {"head_dim": 128, "attention_bias": False}, {"use_qk_norm": True},
        windows="listed", has_output_bias=True,
        source_classes=(SourceClass("Qwen3Config", "qwen3", QWEN_SOURCE, DROPPED_LAYERS),),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        ALL | {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4, "rope_theta": 2000000.0, "attention_bias": False,
            "mlp_bias": False, "tie_word_embeddings": True, "use_sliding_window": False, "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        {"nope_layer_interval": 4, "tie_word_embeddings": True},
        written={
            "no_rope_layers": lambda settings: [int(settings.has_rotary(n)) for n in range(settings.num_layers)],
            "no_rope_layer_interval": lambda settings: settings.nope_layer_interval or 4,  # an integer of the class
            **NO_PADDING,
        },
        windows="other", has_output_bias=True,
    ),
    "ArceeForCausalLM": Family("arcee", ALL | {
        "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 18432, "num_key_value_heads": None,
        "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False,
        "mlp_bias": False,
    }, {"gated_linear_unit": False, "hidden_act": "relu2"}, has_output_bias=True),
    "GraniteForCausalLM": Family("granite", GRANITE | {"mlp_bias": False}, has_output_bias=True),
    "Olmo2ForCausalLM": Family("olmo2", _OLMO_KEYS, _OLMO, has_output_bias=True, tensor_names=_NORMS_AFTER_NAMES),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        _OLMO_KEYS | {"rope_theta": 500000.0, "sliding_window": 4096},
        _OLMO | {"window_rope_theta": 500000.0}, windows="listed", full_attention_period=4, has_output_bias=True,
        tensor_names=_NORMS_AFTER_NAMES,
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        ALL | {
            "vocab_size": 102400, "intermediate_size": 16384, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        _NORMS_AFTER, model_with_window={"nope_without_window": True}, windows="listed", full_attention_period=4,
        tensor_names=_NORMS_AFTER_NAMES,
    ),
    "GemmaForCausalLM": Family("gemma", ALL | {
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False,
    }, _GEMMA, scales_embeddings=True, has_output_bias=True),
    "Gemma2ForCausalLM": Family(
        "gemma2", _GEMMA_TEXT,
        _GEMMA | {
            "post_self_attn_layernorm": True, "post_mlp_layernorm": True, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        scales_embeddings=True, windows="listed", full_attention_period=2, has_output_bias=True,
        tensor_names=_GEMMA_NORMS,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _GEMMA_TEXT | {
            "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
            "attn_logit_softcapping": None, "final_logit_softcapping": None,
        },
        _GEMMA | {
            "use_qk_norm": True, "post_self_attn_layernorm": True, "post_mlp_layernorm": True,
            "window_rope_theta": 10000.0,
        },
        scales_embeddings=True, windows="listed", full_attention_period=6, has_output_bias=True,
        tensor_names=_GEMMA_NORMS,
    ),
    "MistralForCausalLM": Family("mistral", MISTRAL | {"sliding_window": 4096}, windows="every"),
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM._replace(
        model_type="glm4", model={**GLM.model, "post_self_attn_layernorm": True, "post_mlp_layernorm": True},
        source_classes=(SourceClass("Glm4Config", "glm4", CORE | {"pad_token_id": 151329}),),
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        ALL | {
            "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": None,
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0, "resid_pdrop": 0.0, "sliding_window": None,
        },
        written={"original_max_position_embeddings": lambda settings: settings.trained_length, **NO_PADDING},
        windows="every", rope_types=("default", "longrope"),
        joined_tensors={
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        },
    ),
    "HeliumForCausalLM": Family("helium", ALL | {
        "vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24,
        "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8, "rope_theta": 100000.0, "attention_bias": False, "mlp_bias": False,
    }, {"rope_interleave": True}, written=NO_PADDING),
    "SeedOssForCausalLM": Family("seed_oss", ALL | {
        "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
        "attention_out_bias": False, "attention_dropout": 0.1, "residual_dropout": 0.1, "mlp_bias": False,
    }, {"qkv_has_bias": True}),
    "Ernie4_5ForCausalLM": Family("ernie4_5", ERNIE | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 128,
    }, ERNIE_MODEL),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        ALL | {
            "vocab_size": 290943, "intermediate_size": 11008, "num_key_value_heads": None,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False,
        },
        {"use_qk_norm": True, "qk_norm_after_rotary": True}, has_output_bias=True,
        rope_types=(*ROPE_TYPES, "dynamic"),
        tensor_names={
            ".self_attn.q_norm.": ".self_attn.query_layernorm.", ".self_attn.k_norm.": ".self_attn.key_layernorm.",
        },
    ),
}  # fmt: skip
