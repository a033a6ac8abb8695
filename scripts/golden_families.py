"""The golden models of tests/parity/test_families.py: one or two of each family, which these tests need no further
entry for.

Part of make_golden.py. Sizes are unusual on purpose: heads of 6 numbers, one key/value head, an odd vocabulary and
several documents in a row. Two ranks can share the heads.
"""

from __future__ import annotations

from typing import Any

from golden_models import Case, Removal

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-3,
}
"""The least epsilon of a norm that a test can feel is this one."""


def family(
    what: str, model_type: str, changes: dict[str, Any], removals: dict[str, Removal], salt: str = ""
) -> Case:
    return Case(what, SIZES | changes, model_type, packed=True, removals=removals, salt=salt)


LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.4, 1.8], "long_factor": [1.0, 2.5, 3.5]}
PHI3 = {
    "vocab_size": 31, "hidden_size": 20, "partial_rotary_factor": 0.6, "rope_theta": 20.0, "rope_scaling": LONG_ROPE,
    "pad_token_id": None,
}
OLMO = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": None}
OLMO3_YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.2,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
OLMO_REMOVALS = {
    "norms of query and key": Removal(neutral={"q_norm.weight": 1.0, "k_norm.weight": 1.0}),
    "norms after": Removal(neutral={"post_attention_layernorm.weight": 1.0, "post_feedforward_layernorm.weight": 1.0}),
}
DEEPSEEK_V2 = {
    "num_key_value_heads": 2, "q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 7, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 12, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
    "routed_scaling_factor": 1.7, "first_k_dense_replace": 1, "pad_token_id": None, "rope_theta": 20.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.707,
                     "mscale_all_dim": 0.707},
}
FEW: dict[str, Any] = {
    "num_hidden_layers": 1, "vocab_size": 31, "tie_word_embeddings": True, "pad_token_id": None,
}  # fmt: skip
"""One layer and few tokens: the golden files together have a limit."""
FAMILY_CASES = {
    "smollm3": family(
        "a layer without rotary positions", "smollm3",
        {"vocab_size": 31, "no_rope_layers": [0, 1], "pad_token_id": None},
        {"no rotary": Removal({"no_rope_layers": [1, 1]}), "rotary": Removal({"no_rope_layers": [0, 0]})},
    ),
    "olmo2": family(
        "norms after the sublayers only, norms over all heads of query and key, biases in the attention", "olmo2",
        OLMO | {"attention_bias": True}, OLMO_REMOVALS | {"biases": Removal({"attention_bias": False})}, "1",
    ),
    "olmo3": family(
        "as OLMo-2, with a window in one of two layers, and yarn in the other", "olmo3",
        OLMO | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "rope_theta": 20.0,
                "rope_scaling": OLMO3_YARN},
        OLMO_REMOVALS | {
            "window": Removal({"layer_types": ["full_attention"] * 2}),
            "yarn": Removal({"rope_scaling": None}),
        }, "1",
    ),
    "olmoe": family(
        "norms over all heads of query and key, experts with weights as the softmax gives them", "olmoe",
        {"num_hidden_layers": 1, "intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
         "norm_topk_prob": False, "pad_token_id": None},
        {"norms of query and key": OLMO_REMOVALS["norms of query and key"],
         "weights as they are": Removal({"norm_topk_prob": True})}, "1",
    ),
    "phi3": family(
        "long factors of LongRoPE on a part of a head", "phi3", {**PHI3, "original_max_position_embeddings": 8},
        {
            "long factors": Removal({"rope_scaling": {**LONG_ROPE, "long_factor": [1.0, 1.4, 1.8]}}),
            "attention factor": Removal({"rope_scaling": {**LONG_ROPE, "attention_factor": 1.0}}),
            "rotary on a part": Removal({"partial_rotary_factor": 1.0, "rope_scaling": None}),
        },
    ),
    "phi3_short": family(
        "short factors of LongRoPE, tied head", "phi3",
        {**PHI3, "original_max_position_embeddings": 32, "tie_word_embeddings": True, "num_hidden_layers": 1},
        {"short factors": Removal({"rope_scaling": {**LONG_ROPE, "short_factor": [1.0, 2.5, 3.5]}})},
    ),
    "exaone4": family(
        "norms after the sublayers only, norms of query and key, a window and rotary positions in one of two layers; a"
        " tied head", "exaone4",
        FEW | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
               "rope_theta": 20.0},
        OLMO_REMOVALS | {"window": Removal({"layer_types": ["full_attention"] * 2}),
                         "no rotary": Removal({"layer_types": ["sliding_attention"] * 2, "sliding_window": 24})},
    ),
    "gemma": family(
        "norms of 1 + weight, a factor on the embeddings, GELU; a tied head", "gemma",
        {"head_dim": 6, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        {"GELU": Removal({"hidden_act": "silu"}), "norms": Removal(neutral={"norm.weight": 0.0})},
    ),
    "gemma2": family(
        "caps on scores and logits, norms before and after the sublayers, a window in one of two layers", "gemma2",
        {"head_dim": 6, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 9, "sliding_window": 5,
         "tie_word_embeddings": True, "attn_logit_softcapping": 0.8, "final_logit_softcapping": 1.5,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"cap of scores": Removal({"attn_logit_softcapping": None}),
         "cap of logits": Removal({"final_logit_softcapping": None}),
         "window": Removal({"layer_types": ["full_attention"] * 2}),
         "scale": Removal({"query_pre_attn_scalar": 6})},
    ),
    "gemma3": family(
        "norms before and after the sublayers, two rotary bases, a window in one of two layers", "gemma3_text",
        {"head_dim": 6, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 9, "sliding_window": 5,
         "tie_word_embeddings": True, "rope_theta": 100.0, "rope_local_base_freq": 20.0,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"window": Removal({"layer_types": ["full_attention"] * 2}),
         "scale": Removal({"query_pre_attn_scalar": 6}),
         "local base": Removal({"rope_local_base_freq": 100.0}),
         "norms": Removal(neutral={"norm.weight": 0.0})},
    ),
    "granite": family(
        "four factors", "granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7, "logits_scaling": 0.6,
         "vocab_size": 31, "tie_word_embeddings": True},
        {name: Removal({name: 1.0}) for name in (
            "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")},
    ),
    "granitemoe": family(
        "four factors, experts with weights that sum to 1, stacked on disk", "granitemoe",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7, "logits_scaling": 0.6,
         "num_hidden_layers": 1, "intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"factor": Removal({"residual_multiplier": 1.0}), "chosen experts": Removal({"num_experts_per_tok": 3})}, "1",
    ),
    "granitemoeshared": family(
        "as GraniteMoE, with a shared expert; a tied head", "granitemoeshared",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7, "logits_scaling": 0.6,
         "num_hidden_layers": 1, "intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
         "shared_intermediate_size": 12, "tie_word_embeddings": True},
        {"factor": Removal({"residual_multiplier": 1.0}),
         "shared expert": Removal(neutral={"shared_mlp.output_linear.weight": 0.0})}, "1",
    ),
    "gpt_oss": family(
        "sinks, a window in one of two layers, a clamped activation, biases of router and experts, yarn without whole"
        " ends", "gpt_oss",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 8,
         "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "swiglu_limit": 0.6,
         "attention_bias": True,
         "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": None, "rope_theta": 20.0,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
                          "original_max_position_embeddings": 16}},
        {
            "sinks": Removal(neutral={"self_attn.sinks": -1e9}),
            "window": Removal({"layer_types": ["full_attention"] * 2}),
            "limit": Removal({"swiglu_limit": 7.0}),
            "slope": Removal({"swiglu_alpha": 1.0}),
            "biases": Removal(neutral={"router.bias": 0.0, "gate_up_proj_bias": 0.0, "down_proj_bias": 0.0}),
            "ends": Removal({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
                                              "truncate": True, "original_max_position_embeddings": 16}}),
        }, "7",
    ),
    "helium": family(
        "neighbouring numbers of a head rotated; a tied head", "helium", FEW | {"head_dim": 6, "rope_theta": 20.0},
        {"pairs": Removal({"rope_theta": 1e30})},
    ),
    "seed_oss": family(
        "biases on query, key and value, heads wider than hidden / heads", "seed_oss",
        {"vocab_size": 31, "head_dim": 10, "attention_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0,
         "pad_token_id": None},
        {"biases": Removal(neutral={".bias": 0.0})},
    ),
    "seed_oss_out": family(
        "biases on the outputs too, tied head", "seed_oss",
        {"head_dim": 6, "attention_out_bias": True, "mlp_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0,
         "pad_token_id": None, "num_hidden_layers": 1, "tie_word_embeddings": True},
        {"biases": Removal(neutral={"o_proj.bias": 0.0, "down_proj.bias": 0.0})},
    ),
    "ernie4_5": family(
        "neighbouring numbers of a head rotated, biases on every matrix, tied head", "ernie4_5",
        {"vocab_size": 31, "head_dim": 6, "tie_word_embeddings": True, "pad_token_id": None, "use_bias": True},
        {"pairs": Removal({"rope_theta": 1e30}), "biases": Removal(neutral={"_proj.bias": 0.0})},
    ),
    "ernie4_5_moe": family(
        "neighbouring numbers of a head rotated, a softmax router with a bias, a least sum of its scores, dense layers"
        " around one with experts", "ernie4_5_moe",
        {"num_hidden_layers": 3, "head_dim": 6, "pad_token_id": None, "use_bias": False, "moe_num_experts": 6,
         "moe_k": 2, "moe_intermediate_size": 8, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
         "moe_layer_end_index": 1, "moe_norm_min": 0.4},
        {
            "pairs": Removal({"rope_theta": 1e30}),
            "correction bias": Removal(neutral={"e_score_correction_bias": 0.0}),
            "least sum": Removal({"moe_norm_min": 1e-12}),
            "shared experts": Removal(neutral={"shared_experts.down_proj.weight": 0.0}),
            "dense last layer": Removal({"moe_layer_end_index": 2}),
            "dense first layer": Removal({"moe_layer_start_index": 0}),
        },
        salt="9",
    ),
    "hunyuan_v1_dense": family(
        "norms of query and key after they are rotated, a rotary base with a power of alpha", "hunyuan_v1_dense",
        {"head_dim": 6, "attention_bias": True, "pad_token_id": None, "rope_theta": 20.0,
         "rope_scaling": {"rope_type": "dynamic", "alpha": 30.0, "factor": 1.0}},
        {"alpha": Removal({"rope_scaling": None}), "biases": Removal(neutral={"_proj.bias": 0.0}),
         "norms": Removal(neutral={"query_layernorm.weight": 1.0, "key_layernorm.weight": 1.0})},
    ),
    "arcee": family(
        "a feed-forward layer without a gate, the square of ReLU, biases in every matrix; a tied head", "arcee",
        FEW | {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True, "rope_theta": 20.0},
        {"square of ReLU": Removal({"hidden_act": "gelu_pytorch_tanh"}),
         "biases": Removal(neutral={"_proj.bias": 0.0})},
    ),
    "starcoder2": family(
        "LayerNorm with biases, a feed-forward layer without a gate, biases in every matrix, a window, a tied head",
        "starcoder2", FEW | {"norm_epsilon": 1e-3, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 5},
        {"window": Removal({"sliding_window": None}),
         "biases of matrices": Removal(neutral={"_proj.bias": 0.0, "c_fc.bias": 0.0}),
         "biases of norms": Removal(neutral={"norm.bias": 0.0}),
         "GELU": Removal({"hidden_act": "silu"})},
    ),
    "stablelm": family(
        "LayerNorm with biases, biases on query, key and value, rotary positions on a part of a head; a tied head",
        "stablelm", FEW | {"layer_norm_eps": 1e-3, "use_qkv_bias": True, "partial_rotary_factor": 0.7,
                           "rope_theta": 20.0},
        {"biases of matrices": Removal(neutral={"_proj.bias": 0.0}),
         "biases of norms": Removal(neutral={"norm.bias": 0.0}),
         "rotary on a part": Removal({"partial_rotary_factor": 1.0})},
    ),
    "nemotron": family(
        "LayerNorm of 1 + weight with biases, a feed-forward layer without a gate, the square of ReLU, rotary positions"
        " on a part of a head; a tied head", "nemotron",
        FEW | {"norm_eps": 1e-3, "hidden_act": "relu2", "head_dim": 8, "partial_rotary_factor": 0.5,
               "rope_theta": 20.0},
        {"square of ReLU": Removal({"hidden_act": "gelu_pytorch_tanh"}),
         "norms": Removal(neutral={"norm.weight": 0.0}), "biases of norms": Removal(neutral={"norm.bias": 0.0}),
         "rotary on a part": Removal({"partial_rotary_factor": 1.0})},
    ),
    "jais2": family(
        "LayerNorm with biases, a feed-forward layer without a gate, the square of ReLU, biases in every matrix; a tied"
        " head", "jais2",
        FEW | {"layer_norm_eps": 1e-3, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
        {"square of ReLU": Removal({"hidden_act": "gelu_pytorch_tanh"}),
         "biases of norms": Removal(neutral={"norm.bias": 0.0}),
         "biases of matrices": Removal(neutral={"_proj.bias": 0.0})},
    ),
    "cohere": family(
        "attention and feed-forward layer side by side behind a LayerNorm without bias, neighbouring numbers of a head"
        " rotated, a factor on the logits; a tied head", "cohere",
        FEW | {"layer_norm_eps": 1e-3, "logit_scale": 0.7, "attention_bias": True, "rope_theta": 20.0},
        {"scale": Removal({"logit_scale": 1.0}), "pairs": Removal({"rope_theta": 1e30}),
         "biases": Removal(neutral={"_proj.bias": 0.0}), "norms": Removal(neutral={"norm.weight": 1.0})},
    ),
    "cohere2": family(
        "attention and feed-forward layer side by side behind a LayerNorm without bias, a window and rotary positions"
        " of neighbouring numbers in one of two layers, a factor on the logits; a tied head", "cohere2",
        FEW | {"layer_norm_eps": 1e-3, "logit_scale": 0.7, "rope_theta": 20.0, "num_hidden_layers": 2,
               "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        {"window": Removal({"layer_types": ["full_attention"] * 2}), "pairs": Removal({"rope_theta": 1e30}),
         "scale": Removal({"logit_scale": 1.0})},
    ),
    "deepseek_v2": family(
        "a softmax router with groups, a dense first layer, latent queries and yarn", "deepseek_v2", DEEPSEEK_V2,
        {
            "groups": Removal({"topk_method": "greedy"}),
            "shared experts": Removal(neutral={"shared_experts.down_proj.weight": 0.0}),
            "scaling factor": Removal({"routed_scaling_factor": 1.0}),
            "dense first layer": Removal({"first_k_dense_replace": 0}),
            "yarn": Removal({"rope_scaling": None}),
        },
        salt="2",
    ),
    "deepseek_v2_lite": family(
        "a softmax router without groups, no latent queries, biases", "deepseek_v2",
        {**DEEPSEEK_V2, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None,
         "attention_bias": True, "rope_scaling": None, "first_k_dense_replace": 0, "num_hidden_layers": 1},
        {"biases": Removal(neutral={"_proj.bias": 0.0, "_with_mqa.bias": 0.0}),
         "scaling factor": Removal({"routed_scaling_factor": 1.0})},
        salt="3",
    ),
    "glm4_moe_lite": family(
        "a sigmoid router with a bias, a dense first layer, latent queries; a tied head", "glm4_moe_lite",
        FEW | {"num_hidden_layers": 2, "num_key_value_heads": 2, "q_lora_rank": 6, "kv_lora_rank": 10,
               "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "n_routed_experts": 4,
               "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 4, "intermediate_size": 8,
               "routed_scaling_factor": 1.7, "mlp_layer_types": ["dense", "sparse"], "rope_theta": 20.0},
        {
            "dense first layer": Removal({"mlp_layer_types": ["sparse"] * 2}),
            "shared experts": Removal(neutral={"shared_experts.down_proj.weight": 0.0}),
            "scaling factor": Removal({"routed_scaling_factor": 1.0}),
            "correction bias": Removal(neutral={"e_score_correction_bias": 0.0}),
        },
    ),
    "dots1": family(
        "a window in one layer, norms on query and key, a sigmoid router with a bias, a dense first layer", "dots1",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 12,
         "routed_scaling_factor": 1.7, "first_k_dense_replace": 1, "head_dim": 10, "sliding_window": 7,
         "max_window_layers": 1},
        {
            "window": Removal({"sliding_window": None}),
            "norms": Removal(neutral={"q_norm.weight": 1.0, "k_norm.weight": 1.0}),
            "weights as they are": Removal({"norm_topk_prob": True}),
            "scaling factor": Removal({"routed_scaling_factor": 1.0}),
            "correction bias": Removal(neutral={"e_score_correction_bias": 0.0}),
            "dense first layer": Removal({"first_k_dense_replace": 0}),
        },
        salt="1",
    ),
}  # fmt: skip
