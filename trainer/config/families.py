"""Model families of Hugging Face: one record has all facts about a family.

Readers and writers of config.json, derived defaults, the names of tensors on disk and configuration errors use it.
`scripts/make_families.py` asks transformers for the defaults, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.family_record import ROPE_TYPES, ExpertNames, Family, SourceClass


def shared_experts(settings: Any) -> int:
    """Returns the width of the shared experts as a number of routed experts, rounded up."""
    return -(-settings.shared_expert_size // settings.expert_size)


def layer_interval(settings: Any) -> int:
    """Returns every how many layers one has experts, between the first and the last that has them (ERNIE 4.5)."""
    first, *others = (layer for layer in settings.moe_layers if layer < settings.num_layers)
    if others:
        return others[0] - first
    return 1


def group_method(settings: Any) -> str:
    """Returns DeepSeek-V2's name for how a router chooses experts: among groups, or not."""
    if (settings.experts.n_group or 1) > 1:
        return "group_limited_greedy"
    return "greedy"


_CORE = {"seq_length": 4096, "hidden_dropout": 0.1}
"""Defaults of MindSpore Transformers' TransformerConfig, which its classes by ``model_type`` leave as they are."""
_CORE_EXPERTS = _CORE | {
    "moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "sub_seq_aux_loss",
    "moe_router_bias_update_rate": 0.001,
}  # fmt: skip
_CORE_SIGMOID = {"moe_router_enable_expert_bias": True, **_CORE_EXPERTS}
LATENT_DEFAULTS = {"use_qk_norm": True}
"""Keys of ``model_config`` that multi-head latent attention implies, as in DeepSeek's models."""
_LATENT_NORMS = {
    "use_qk_norm": "has no norms on latent vectors unless qk_layernorm is True; here it has them: write qk_layernorm",
}  # fmt: skip
_DROPPED_WINDOWS = ("max_window_layers", "sliding_window", "use_sliding_window")
_DROPPED_LAYERS = (*_DROPPED_WINDOWS, "layer_types")
_QWEN_SOURCE = _CORE | {"pad_token_id": 151643}
_ALL: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768,
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "attention_dropout": 0.0,
}  # fmt: skip
_QWEN = _ALL | {"use_sliding_window": False}
_MISTRAL = _ALL | {
    "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
_OLMO_KEYS = _ALL | {
    "vocab_size": 50304, "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "attention_bias": False,
}
_OLMO = {
    "use_qk_norm": True, "qk_norm_all_heads": True, "input_norms": False, "post_self_attn_layernorm": True,
    "post_mlp_layernorm": True,
}  # fmt: skip
_OLMO_NORMS = {
    ".post_self_attn_layernorm.": ".post_attention_layernorm.",
    ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
}
_LOSSES: dict[str, Any] = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_SIGMOID_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "aux_loss_factor": 0.0}
"""An expert bias instead of an auxiliary loss balances the load: noaux means "no auxiliary loss"."""
_GLM = Family(
    "glm",
    _ALL | {
        "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    {"rotary_pct": 0.5, "rope_interleave": True, "qkv_has_bias": True},
    written={"pad_token_id": lambda settings: None},  # the default of the class exceeds a small vocabulary
    joined_tensors={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
)  # fmt: skip
_ERNIE = {name: value for name, value in _ALL.items() if name != "attention_dropout"} | {
    "vocab_size": 103424, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "use_bias": False,
}
_ERNIE_MODEL = {"rope_interleave": True, "tie_word_embeddings": True}

_LAYER_NORMS = {key: value for key, value in _ALL.items() if key != "rms_norm_eps"}
_COHERE = _LAYER_NORMS | {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "num_key_value_heads": None, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True, "attention_bias": False, "logit_scale": 0.0625,
}
_COHERE_MODEL = {
    "normalization": "LayerNorm", "norm_has_bias": False, "parallel_attn": True, "rope_interleave": True,
    "tie_word_embeddings": True, "logit_scale": 0.0625,
}
_GEMMA_TEXT = {key: value for key, value in _ALL.items() if key != "hidden_act"} | {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh", "layernorm_zero_centered_gamma": True, "tie_word_embeddings": True,
}  # fmt: skip
_GRANITE: dict[str, Any] = _ALL | {
    "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
_GRANITE_MOE = Family(
    "granitemoe",
    _GRANITE | _LOSSES | {"num_key_value_heads": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    written={"intermediate_size": lambda settings: settings.expert_size},
    has_output_bias=True,
    expert_names=ExpertNames(
        "block_sparse_moe", ("input_linear.weight", "input_linear.weight", "output_linear.weight"), "router.layer",
        is_stacked=True,
    ),
)

# The order matters: a name on disk is another one in memory.
_GEMMA_NORMS = {
    ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
    ".post_self_attn_layernorm.": ".post_attention_layernorm.",
    ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
}

FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama",
        _ALL | {
            "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None,
            "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False,
        },
        has_output_bias=True,
        source_classes=(
            SourceClass("LlamaConfig", "", {"rms_norm_eps": 1e-5, "init_method_std": 0.01, "pad_token_id": 0}),
        ),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", _QWEN, {"qkv_has_bias": True}, windows="listed",
        source_classes=(SourceClass("Qwen2Config", "qwen2", _QWEN_SOURCE, _DROPPED_LAYERS),),
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", _QWEN | {"head_dim": 128, "attention_bias": False}, {"use_qk_norm": True},
        windows="listed", has_output_bias=True,
        source_classes=(SourceClass("Qwen3Config", "qwen3", _QWEN_SOURCE, _DROPPED_LAYERS),),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        _ALL | {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4, "rope_theta": 2000000.0, "attention_bias": False,
            "mlp_bias": False, "tie_word_embeddings": True, "use_sliding_window": False, "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        {"nope_layer_interval": 4, "tie_word_embeddings": True},
        written={
            "no_rope_layers": lambda settings: [int(settings.has_rotary(n)) for n in range(settings.num_layers)],
            "no_rope_layer_interval": lambda settings: settings.nope_layer_interval or 4,  # an integer of the class
            "pad_token_id": lambda settings: None,  # the default of the class exceeds a small vocabulary
        },
        windows="other", has_output_bias=True,
    ),
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
            "tie_word_embeddings": True, "use_bias": True,
        },
        windows="every",
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        _LAYER_NORMS | {
            "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_qkv_bias": False, "qk_layernorm": False,
            "hidden_dropout": 0.0,
        },
        {"normalization": "LayerNorm", "rotary_pct": 0.25},
    ),
    "CohereForCausalLM": Family(
        "cohere", _COHERE | {"rope_theta": 500000.0, "use_qk_norm": False}, _COHERE_MODEL, has_output_bias=True
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2", _COHERE | {"sliding_window": 4096}, _COHERE_MODEL | {"nope_without_window": True},
        windows="listed", full_attention_period=4, has_output_bias=True,
    ),
    "GraniteForCausalLM": Family("granite", _GRANITE | {"mlp_bias": False}, has_output_bias=True),
    "Olmo2ForCausalLM": Family(
        "olmo2", _OLMO_KEYS, _OLMO, has_output_bias=True, tensor_names=_OLMO_NORMS
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        _OLMO_KEYS | {"rope_theta": 500000.0, "sliding_window": 4096},
        _OLMO | {"window_rope_theta": 500000.0}, windows="listed", full_attention_period=4, has_output_bias=True,
        tensor_names=_OLMO_NORMS,
    ),
    "GemmaForCausalLM": Family(
        "gemma",
        _ALL | {
            "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False,
        },
        _GEMMA, scales_embeddings=True, has_output_bias=True,
    ),
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
    "MistralForCausalLM": Family("mistral", _MISTRAL | {"sliding_window": 4096}, windows="every"),
    "MixtralForCausalLM": Family(
        "mixtral",
        _MISTRAL | _LOSSES | {
            "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_local_experts": 8, "num_experts_per_tok": 2,
            "router_jitter_noise": 0.0, "sliding_window": None,
        },
        written={"intermediate_size": lambda settings: settings.expert_size},
        windows="every",
        expert_names=ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
    ),
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": _GRANITE_MOE._replace(
        model_type="granitemoeshared", defaults={**_GRANITE_MOE.defaults, "shared_intermediate_size": 0},
        tensor_names={".mlp.shared_experts.down_proj.": ".shared_mlp.output_linear."},
        joined_tensors={
            "shared_mlp.input_linear": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        },
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        _ALL | _LOSSES | {
            "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True, "sliding_window": 128,
            "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        {"attention_sinks": True, "qkv_has_bias": True, "attn_proj_has_bias": True},
        {"moe_mlp_has_bias": True, "moe_router_has_bias": True, "swiglu_limit": 7.0},
        written={"intermediate_size": lambda settings: settings.expert_size},
        windows="listed", full_attention_period=2, has_output_bias=True,
        tensor_names={".mlp.gate.": ".mlp.router."}, interleaves_experts=True,
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        _ALL | _LOSSES | {
            "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": None, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "attention_bias": False, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
        },
        {"use_qk_norm": True, "qk_norm_all_heads": True},
        {"norm_topk_prob": False},
        written={"intermediate_size": lambda settings: settings.expert_size},
        has_output_bias=True,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        _QWEN | _LOSSES | {
            "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "qkv_bias": True,
        },
        {"qkv_has_bias": True},
        {"use_shared_expert_gating": True, "norm_topk_prob": False},
        # The class is never without shared experts.
        written={"shared_expert_intermediate_size": lambda settings: settings.shared_expert_size or 1},
        windows="other",
        tensor_names={".mlp.shared_experts.": ".mlp.shared_expert."},
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _QWEN | _LOSSES | {
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
            "attention_bias": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
        {"use_qk_norm": True},
        windows="other", has_output_bias=True,
        source_classes=(
            SourceClass(
                "Qwen3MoeConfig", "qwen3_moe", _CORE_EXPERTS | {"pad_token_id": 151643},
                (*_DROPPED_WINDOWS, "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef"),
            ),
        ),
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        _ALL | {
            "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": False,
            "use_qk_norm": False, "partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1, "output_router_logits": False,
        },
        {"rotary_pct": 0.5}, _SIGMOID_ROUTER,
        source_classes=(SourceClass("Glm4MoeConfig", "glm4_moe", _CORE_SIGMOID | {"num_nextn_predict_layers": 0}),),
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM._replace(
        model_type="glm4", model={**_GLM.model, "post_self_attn_layernorm": True, "post_mlp_layernorm": True},
        source_classes=(SourceClass("Glm4Config", "glm4", _CORE | {"pad_token_id": 151329}),),
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        _ALL | {
            "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": None,
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0, "resid_pdrop": 0.0, "sliding_window": None,
        },
        written={
            "original_max_position_embeddings": lambda settings: settings.trained_length,
            "pad_token_id": lambda settings: None,  # the default of the class exceeds a small vocabulary
        },
        windows="every", rope_types=("default", "longrope"),
        joined_tensors={
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        },
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        _ALL | {
            "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
            "attention_out_bias": False, "attention_dropout": 0.1, "residual_dropout": 0.1, "mlp_bias": False,
        },
        {"qkv_has_bias": True},
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        _ERNIE | {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 128,
        },
        _ERNIE_MODEL,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        _ERNIE | _LOSSES | {
            "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
            "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
            "moe_layer_interval": 1, "moe_norm_min": 1e-12,
        },
        _ERNIE_MODEL, {"topk_method": "noaux_tc", "moe_norm_min": 1e-12},
        written={
            "moe_num_shared_experts": shared_experts,
            "moe_layer_start_index": lambda settings: settings.moe_layers[0],
            "moe_layer_end_index": lambda settings: settings.moe_layers[-1],
            "moe_layer_interval": layer_interval,
        },
        expert_names=ExpertNames(bias="mlp.moe_statics.e_score_correction_bias", bias_is_row=True),
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        _ALL | {
            "vocab_size": 290943, "intermediate_size": 11008, "num_key_value_heads": None,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False,
        },
        {"use_qk_norm": True, "qk_norm_after_rotary": True}, has_output_bias=True,
        rope_types=(*ROPE_TYPES, "dynamic"),
        tensor_names={
            ".self_attn.q_norm.": ".self_attn.query_layernorm.", ".self_attn.k_norm.": ".self_attn.key_layernorm.",
        },
    ),
    "ChatGLM2ForConditionalGeneration": Family(
        "chatglm",
        {
            "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28,
            "num_attention_heads": 32, "kv_channels": 128, "seq_length": 2048, "layernorm_epsilon": 1e-5,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "rope_ratio": 1.0, "add_bias_linear": False,
            "add_qkv_bias": False, "multi_query_attention": False, "multi_query_group_num": 1,
            "tie_word_embeddings": False,
        },
        _GLM.model,
        renamed_keys={"seq_length": "max_position_embeddings"},  # in other families the length of training sequences
        in_transformers=False, saved_as="GlmForCausalLM",
        source_classes=(
            SourceClass(
                "ChatGLM2Config", "",
                {
                    "padded_vocab_size": 65024, "num_layers": 28, "ffn_hidden_size": 13696, "kv_channels": 128,
                    "multi_query_group_num": 2, "layernorm_epsilon": 1e-5, "pad_token_id": 0,
                },
            ),
        ),
        other_names=("ChatGLMModel", "ChatGLMForConditionalGeneration", "glm2"),
        published_names={  # also those of MindSpore Transformers' files, fused or not
            "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "transformer.embedding.embedding_weight": "model.embed_tokens.weight",
            "transformer.encoder.layers.": "model.layers.",
            "transformer.encoder.final_layernorm.": "model.norm.", "transformer.output_layer.": "lm_head.",
            ".self_attention.query_key_value.": ".self_attn.qkv_proj.", ".self_attention.dense.": ".self_attn.o_proj.",
            **{f".self_attention.w{letter}.": f".self_attn.{letter}_proj." for letter in "qkv"},
            ".mlp.dense_h_to_4h.": ".mlp.gate_up_proj.", ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
            ".mlp.dense_left.": ".mlp.gate_proj.", ".mlp.dense_right.": ".mlp.up_proj.",
        },
    ),
    "TelechatForCausalLM": Family(
        "telechat",
        _ALL | {
            "vocab_size": 131072, "num_key_value_heads": None, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "hidden_dropout": 0.0, "out_proj_has_bias": True, "mlp_down_has_bias": True,
        },
        {"attn_proj_has_bias": True, "mlp_down_has_bias": True, "initializer_range": 0.0048},
        optional_experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        renamed_keys={"seq_length": "max_position_embeddings"},
        in_transformers=False,
        source_classes=(
            SourceClass("TelechatConfig", "", {"rms_norm_eps": 1e-5, "pad_token_id": 0}),
            SourceClass(
                "Telechat2Config", "telechat",
                _CORE | {
                    "vocab_size": 160256, "num_hidden_layers": 30, "intermediate_size": 12288,
                    "max_position_embeddings": 4096, "hidden_dropout": 0.0, "initializer_range": 0.02,
                    "pad_token_id": 0,
                },
                _DROPPED_LAYERS,
            ),
        ),
        other_names=("ParallelTelechatForCausalLM", "Telechat2ForCausalLM"),
        published_names={
            "transformer.word_embeddings.": "model.embed_tokens.", "transformer.h.": "model.layers.",
            "transformer.ln_f.": "model.norm.", ".self_attention.query.": ".self_attn.q_proj.",
            ".self_attention.key_value.": ".self_attn.kv_proj.", ".self_attention.dense.": ".self_attn.o_proj.",
            ".mlp.local_experts.": ".mlp.experts.", ".mlp.router.": ".mlp.gate.",
        },
    ),
    "TeleChat3ForCausalLM": Family(
        "telechat3",
        _ALL | {
            "vocab_size": 131072, "head_dim": 128, "attention_bias": False, "num_nextn_predict_layers": 0,
            "out_proj_has_bias": False, "embedding_size": None, "layers_group": 1,
        },
        in_transformers=False, other_names=("Telechat3ForCausalLM",),
        source_classes=(SourceClass("TeleChat3Config", "telechat3", _CORE, _DROPPED_LAYERS),),
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        _ALL | {
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096,
            "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1, "output_router_logits": False,
        },
        {"multi_latent_attention": True, "rope_interleave": True}, _SIGMOID_ROUTER,
        # The class is never without shared experts.
        written={"n_shared_experts": lambda settings: max(shared_experts(settings), 1)},
        has_output_bias=True,
        source_classes=(
            SourceClass(
                "DeepseekV3Config", "deepseek_v3",
                _CORE_SIGMOID | {"hidden_dropout": 0.0, "pad_token_id": 0}, differences=_LATENT_NORMS,
            ),
            SourceClass(
                "TeleChat3MoeConfig", "telechat3_moe",
                _CORE_SIGMOID | {
                    "hidden_dropout": 0.0, "pad_token_id": 0, "vocab_size": 131072, "hidden_size": 2560,
                    "intermediate_size": 7680, "moe_intermediate_size": 1536, "num_hidden_layers": 4,
                    "num_attention_heads": 32, "num_key_value_heads": 32, "n_routed_experts": 192,
                    "routed_scaling_factor": 2.8,
                },
                differences=_LATENT_NORMS,
            ),
            SourceClass("DeepseekV3Config", "", {
                "intermediate_size": 18432, "max_position_embeddings": 32768, "q_lora_rank": 1536,
                "vocab_size": 129280, "init_method_std": 0.006, "pad_token_id": 0}),
        ),
        other_names=("TeleChat3MoeForCausalLM", "telechat3_moe", "kimi_k2"),
    ),
    "Dots1ForCausalLM": Family(
        "dots1",
        _ALL | {
            "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "num_hidden_layers": 62,
            "max_position_embeddings": 2048, "attention_bias": False, "n_routed_experts": None,
            "n_shared_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": 1408,
            "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "output_router_logits": False, "sliding_window": 4096,
            "max_window_layers": 62,
        },
        {"use_qk_norm": True, "use_sliding_window": True}, _SIGMOID_ROUTER | {"norm_topk_prob": False},
        written={"n_shared_experts": lambda settings: max(shared_experts(settings), 1)},  # never without
        windows="listed", has_output_bias=True,
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        _ALL | {
            "vocab_size": 102400, "intermediate_size": 11008, "num_key_value_heads": None,
            "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None, "moe_intermediate_size": 1407,
            "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None,
            "topk_method": "greedy", "first_k_dense_replace": 0, "output_router_logits": False,
        },
        {"multi_latent_attention": True, "rope_interleave": True},
        {"norm_topk_prob": False, "aux_loss_factor": 0.0},
        written={
            "n_shared_experts": lambda settings: max(shared_experts(settings), 1),  # never without, as DeepSeek-V3
            "topk_method": group_method,
        },
        has_output_bias=True,
        source_classes=(SourceClass("DeepseekV2Config", "", {
                "num_layers": 30, "intermediate_size": 12288, "max_position_embeddings": 4096, "q_lora_rank": 1536,
                "vocab_size": 102400, "init_method_std": 0.01, "pad_token_id": 0}),),
    ),
}  # fmt: skip
"""Families by ``model.arch.type``: Hugging Face's class, or MindSpore Transformers' if transformers has none."""


def source_class(architecture: str, settings: Mapping[str, Any]) -> SourceClass | None:
    """Returns the class of MindSpore Transformers that reads a ``model_config``; None if its file is not for it.

    Newer classes are selected by ``model_type``, older ones by ``type``; ``model.arch.type`` selects none.
    """
    for candidate in FAMILIES[architecture].source_classes:
        if candidate.model_type:
            if settings.get("model_type") == candidate.model_type:
                return candidate
        elif settings.get("type") == candidate.name:
            return candidate
    return None


def has_latent_attention(architecture: str, settings: Mapping[str, Any]) -> bool:
    """Returns whether a ``model_config`` of a family has multi-head latent attention."""
    key = "multi_latent_attention"
    return settings.get(key, FAMILIES[architecture].model.get(key)) is True


def known_class(name: Any) -> str:
    """Returns the class of `FAMILIES` with this name or other name; empty if there is none."""
    return next((known for known, family in FAMILIES.items() if name in (known, *family.other_names)), "")


def named_family(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the known family that a ``model_config`` names and the key that names it; both empty if there is none."""
    names = settings.get("architectures")
    if not isinstance(names, list):
        names = [names]
    for name in names:
        if architecture := known_class(name):
            return architecture, "architectures"
    model_type = settings.get("model_type")
    for name, family in FAMILIES.items():
        if model_type is not None and model_type in (family.model_type, *family.other_names):
            return name, "model_type"
    return "", ""


def known_families() -> str:
    """Lists all of `FAMILIES` for a message."""
    return ", ".join(f"{name} ({family.model_type})" for name, family in FAMILIES.items())


def layers_with_experts(layers: int, step: int, dense: list[int]) -> list[int]:
    """Converts Qwen3-MoE's decoder_sparse_step and mlp_only_layers to ``moe_layer_freq``: 1 or 0 for each layer."""
    return [int((layer + 1) % step == 0 and layer not in dense) for layer in range(layers)]
