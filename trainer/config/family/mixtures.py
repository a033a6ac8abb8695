"""Families all of whose models have experts."""

from __future__ import annotations

from typing import Any

from trainer.config.family.common import (
    ALL,
    CORE_EXPERTS,
    CORE_SIGMOID,
    DROPPED_WINDOWS,
    ERNIE,
    ERNIE_MODEL,
    GRANITE,
    LOSSES,
    MISTRAL,
    QWEN,
    SIGMOID_ROUTER,
)
from trainer.config.family.record import ExpertNames, Family, SourceClass


def shared_experts(settings: Any) -> int:
    """Returns the width of the shared experts as a number of routed experts, rounded up."""
    return -(-settings.shared_expert_size // settings.expert_size)


def layer_interval(settings: Any) -> int:
    """Returns every how many layers one has experts, between the first and the last that has them (ERNIE 4.5)."""
    layers = [layer for layer in settings.moe_layers if layer < settings.num_layers]
    if len(layers) > 1:
        return layers[1] - layers[0]
    return 1


def group_method(settings: Any) -> str:
    """Returns DeepSeek-V2's name for how a router chooses experts: among groups, or not."""
    if (settings.experts.n_group or 1) > 1:
        return "group_limited_greedy"
    return "greedy"


_LATENT_NORMS = {
    "use_qk_norm": "has no norms on latent vectors unless qk_layernorm is true; here it has them: write qk_layernorm",
}  # fmt: skip
_GRANITE_MOE = Family(
    "granitemoe",
    GRANITE | LOSSES | {"num_key_value_heads": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    written={"intermediate_size": lambda settings: settings.expert_size},
    has_output_bias=True,
    expert_names=ExpertNames(
        "block_sparse_moe", ("input_linear.weight", "input_linear.weight", "output_linear.weight"), "router.layer",
        is_stacked=True,
    ),
)

MIXTURES = {
    "MixtralForCausalLM": Family(
        "mixtral",
        MISTRAL | LOSSES | {
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
        joined_tensors={"shared_mlp.input_linear": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")},
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        ALL | LOSSES | {
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
        ALL | LOSSES | {
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
        QWEN | LOSSES | {
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
        QWEN | LOSSES | {
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
            "attention_bias": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
        {"use_qk_norm": True},
        windows="other", has_output_bias=True,
        source_classes=(
            SourceClass(
                "Qwen3MoeConfig", "qwen3_moe", CORE_EXPERTS | {"pad_token_id": 151643},
                (*DROPPED_WINDOWS, "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef"),
            ),
        ),
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        ALL | {
            "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": False,
            "use_qk_norm": False, "partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1, "output_router_logits": False,
        },
        {"rotary_pct": 0.5}, SIGMOID_ROUTER,
        source_classes=(SourceClass("Glm4MoeConfig", "glm4_moe", CORE_SIGMOID | {"num_nextn_predict_layers": 0}),),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        ERNIE | LOSSES | {
            "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
            "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
            "moe_layer_interval": 1, "moe_norm_min": 1e-12,
        },
        ERNIE_MODEL, {"topk_method": "noaux_tc", "moe_norm_min": 1e-12},
        written={
            "moe_num_shared_experts": shared_experts,
            "moe_layer_start_index": lambda settings: settings.moe_layers[0],
            "moe_layer_end_index": lambda settings: settings.moe_layers[-1],
            "moe_layer_interval": layer_interval,
        },
        expert_names=ExpertNames(bias="mlp.moe_statics.e_score_correction_bias", bias_is_row=True),
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        ALL | {
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096,
            "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1, "output_router_logits": False,
        },
        {"multi_latent_attention": True, "rope_interleave": True}, SIGMOID_ROUTER,
        # The class is never without shared experts.
        written={"n_shared_experts": lambda settings: max(shared_experts(settings), 1)},
        has_output_bias=True,
        source_classes=(
            SourceClass(
                "DeepseekV3Config", "deepseek_v3",
                CORE_SIGMOID | {"hidden_dropout": 0.0, "pad_token_id": 0}, differences=_LATENT_NORMS,
            ),
            SourceClass(
                "TeleChat3MoeConfig", "telechat3_moe",
                CORE_SIGMOID | {
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
        ALL | {
            "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "num_hidden_layers": 62,
            "max_position_embeddings": 2048, "attention_bias": False, "n_routed_experts": None,
            "n_shared_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": 1408,
            "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "output_router_logits": False, "sliding_window": 4096,
            "max_window_layers": 62,
        },
        {"use_qk_norm": True, "use_sliding_window": True}, SIGMOID_ROUTER | {"norm_topk_prob": False},
        written={"n_shared_experts": lambda settings: max(shared_experts(settings), 1)},  # never without
        windows="listed", has_output_bias=True,
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        ALL | {
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
        source_classes=(
            SourceClass("DeepseekV2Config", "", {
                "num_layers": 30, "intermediate_size": 12288, "max_position_embeddings": 4096, "q_lora_rank": 1536,
                "vocab_size": 102400, "init_method_std": 0.01, "pad_token_id": 0}),
        ),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4_moe_lite",
        ALL | {
            "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47,
            "num_attention_heads": 20, "num_key_value_heads": 20, "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5, "attention_bias": False, "q_lora_rank": 768, "kv_lora_rank": 512,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_interleave": True,
            "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
            "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
            "output_router_logits": False, "mlp_layer_types": None,
        },
        {"multi_latent_attention": True, "rope_interleave": True}, SIGMOID_ROUTER | {"first_k_dense_replace": 1},
        written={
            "n_shared_experts": lambda settings: max(shared_experts(settings), 1),  # never without, as DeepSeek-V3
            "mlp_layer_types": lambda settings: [
                ("dense", "sparse")[settings.is_moe_layer(layer)] for layer in range(settings.num_layers)
            ],
        },
        has_output_bias=True,
    ),
}  # fmt: skip
