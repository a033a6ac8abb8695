"""Keys and defaults that families of several files share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CORE = {"seq_length": 4096, "hidden_dropout": 0.1}
"""Defaults of MindSpore Transformers' TransformerConfig, which its classes by ``model_type`` leave as they are."""
CORE_EXPERTS = CORE | {
    "moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "sub_seq_aux_loss",
    "moe_router_bias_update_rate": 0.001,
}  # fmt: skip
CORE_SIGMOID = {"moe_router_enable_expert_bias": True, **CORE_EXPERTS}
DROPPED_WINDOWS = ("max_window_layers", "sliding_window", "use_sliding_window")
DROPPED_LAYERS = (*DROPPED_WINDOWS, "layer_types")
QWEN_SOURCE = CORE | {"pad_token_id": 151643}
ALL: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768,
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "attention_dropout": 0.0,
}  # fmt: skip
QWEN = ALL | {"use_sliding_window": False}
MISTRAL = ALL | {
    "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
NO_PADDING: dict[str, Callable[[Any], Any]] = {"pad_token_id": lambda settings: None}
"""How `Family.written` has a padding token whose default in the class exceeds a small vocabulary."""
LOSSES: dict[str, Any] = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
SIGMOID_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "aux_loss_factor": 0.0}
"""An expert bias instead of an auxiliary loss balances the load: noaux means "no auxiliary loss"."""
ERNIE = {name: value for name, value in ALL.items() if name != "attention_dropout"} | {
    "vocab_size": 103424, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "use_bias": False,
}
ERNIE_MODEL = {"rope_interleave": True, "tie_word_embeddings": True}
GRANITE: dict[str, Any] = ALL | {
    "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
