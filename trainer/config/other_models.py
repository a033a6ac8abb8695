"""Families that are not supported, and keys of config.json that change what a model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from trainer.config.schema.model import ModelConfig

UNSUPPORTED_FAMILIES = {
    "deepseek_v4": "residual streams are hyper-connections, attention is compressed and sparse, and the first layers"
                   " route tokens by a hash",
    "olmo": "norms have no weights",
    "qwen3_next": "some layers have linear attention",
}  # fmt: skip
"""Sentences about the differences between a Llama and other families, by model_type."""


DEEPSEEK_V4_KEYS = frozenset(
    "enable_hyper_connections enable_hc_head num_residual_streams hc_mult hc_eps hc_sinkhorn_iters"
    " mhc_layernorm_epsilon mhc_sinkhorn_iterations mhc_init_gating_factor use_fused_mhc csa_window_size"
    " csa_compress_ratios compress_ratios csa_compress_rotary_base compress_rope_theta csa_dense_mode o_groups"
    " o_lora_rank num_hash_layers moe_n_hash_layers actual_vocab_size activation_func_clamp_value"
    " apply_dsa_kernel_fusion experimental_attention_variant index_n_heads index_head_dim index_topk"
    " dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss"
    .split()
)
"""Keys of the parts of DeepSeek-V4, some of which DeepSeek-V3.2 has, too."""
_SPARSE = ("experimental_attention_variant", "index_", "dsa_", "apply_dsa_")
"""How those of DeepSeek-V3.2 begin."""

_SUFFIX = "ForCausalLM"


def parts_rule(names: Sequence[str]) -> str:
    """Returns the rule for keys of `DEEPSEEK_V4_KEYS`, which names the model that they belong to."""
    model = "DeepSeek-V4"
    if all(name.startswith(_SPARSE) for name in names):
        model = "DeepSeek-V3.2 and V4"
    return f"not yet supported, a part of {model}: {', '.join(names)}"


def unsupported_features(name: str) -> str:
    """Returns how a class of transformers that is not supported differs from a Llama; empty if that is not known."""
    stem = name.removesuffix(_SUFFIX).lower()
    for model_type, text in UNSUPPORTED_FAMILIES.items():
        if stem == model_type.replace("_", ""):
            return text
    return ""


_EFFECTS: dict[str, tuple[Any, str]] = {
    "scale_emb": (1, "a factor on the embeddings"),
    "scale_depth": (None, "a factor on each sublayer's output"),
    "dim_model_base": (None, "a divisor of the logits"),
    "use_bidirectional_attention": (False, "attention to later tokens"),
    "attention_chunk_size": (None, "attention within chunks"),
    "clip_qkv": (None, "bounds on query, key and value"),
    "embedding_dropout": (0, "dropout of the embeddings"),
    "use_parallel_residual": (False, "attention and feed-forward layer side by side"),
    "alibi": (False, "positions as a bias on the attention's scores"),
    "training_seqlen": (None, "rotary positions whose base grows with the length of a sequence"),
    "logn": (False, "queries that are multiplied by the logarithm of their position"),
    "embed_layernorm": (False, "a norm on the embeddings"),
}
"""Unsupported keys that change what a model computes: the value without effect beside null, and what the key does."""
_BASE = "base_seqlen"
"""The length up to which TeleChat2's training_seqlen has no effect: beyond, its code changes the rotary base."""

NOT_BUILT = "use another model: without it the weights of this one compute something else"
"""The fix for such a key: leaving it out would give wrong results."""


def is_known_effect(key: str) -> bool:
    """Returns whether a key of config.json is known to change what a model computes, and is not supported."""
    return key in _EFFECTS or key == _BASE


def effect_of(key: str, settings: Mapping[str, Any]) -> str:
    """Returns what such a key of a config.json does; empty if its value has no effect."""
    value = settings[key]
    base = settings.get(_BASE, value)
    is_within_base = key == "training_seqlen" and isinstance(value, int) and isinstance(base, int) and value <= base
    if key == _BASE or is_within_base or value in (None, _EFFECTS[key][0]):
        return ""
    return _EFFECTS[key][1]


def differences(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields sentences about the known differences between a Llama and the model of a config.json."""
    model_type = settings.get("model_type")
    if isinstance(model_type, str) and model_type in UNSUPPORTED_FAMILIES:
        yield UNSUPPORTED_FAMILIES[model_type]
    for key in _EFFECTS:
        if key in settings and (effect := effect_of(key, settings)):
            yield f"{key} {settings[key]} means {effect}"
    types = settings.get("layer_types")
    if isinstance(types, list):
        others = sorted(set(map(str, types)) - {"full_attention", "sliding_attention"})
        if others:
            yield f"layer_types has layers of {', '.join(others)}"
    if settings.get("hidden_act") not in (None, *get_args(ModelConfig.model_fields["hidden_act"].annotation)):
        yield f"hidden_act {settings['hidden_act']} means another activation"
