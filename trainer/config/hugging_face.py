"""Writes the config.json of a saved model for a class of Hugging Face, and says what a class cannot describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trainer.config.families import FAMILIES
from trainer.config.family.mixtures import shared_experts
from trainer.config.family.record import Family
from trainer.config.read.model_folder import CAUSAL, CLASSIFIER, model_from_config_json
from trainer.config.schema.fields import yaml_names
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig
from trainer.models.spec.sublayers import attention_spec, mlp_spec, norm_spec

_WRITTEN: dict[str, Callable[[ModelConfig], Any]] = {
    "intermediate_size": lambda s: s.ffn_size,
    "num_key_value_heads": lambda s: s.kv_heads,
    "head_dim": lambda s: s.rotary_head_size,
    "hidden_act": lambda s: s.activation,
    "max_position_embeddings": lambda s: s.max_positions,
    "rope_theta": lambda s: s.rope_base,
    "query_pre_attn_scalar": lambda s: _unrounded_integer(attention_spec(s).scale ** -2),
    "attention_multiplier": lambda s: attention_spec(s).scale,
    "use_sliding_window": lambda s: False,
    "sliding_window": lambda s: s.sliding_window if s.window_layers else None,
    "mlp_down_has_bias": lambda s: s.down_has_bias,
    "use_bias": lambda s: s.mlp_has_bias,
    "n_shared_experts": shared_experts,
    "moe_intermediate_size": lambda s: s.expert_size,
    "shared_expert_intermediate_size": lambda s: s.shared_expert_size,
    "shared_intermediate_size": lambda s: s.shared_expert_size,
    "n_group": lambda s: _experts(s).n_group or 1,
    "topk_group": lambda s: _experts(s).topk_group or _experts(s).n_group or 1,
    "first_k_dense_replace": lambda s: len(_dense_layers(s)),
    "decoder_sparse_step": lambda s: 1,
    "mlp_only_layers": lambda s: list(_dense_layers(s)),
    "router_aux_loss_coef": lambda s: s.balance_factor
    * (s.num_layers - len(_dense_layers(s))) / _experts(s).num_experts_chosen,
    "output_router_logits": lambda s: bool(_experts(s).output_router_logits),
    "router_jitter_noise": lambda s: 0.0,
}  # fmt: skip
"""Functions that give the values of keys in a config.json; other keys have the values of the settings."""
_CLASSIFIED = frozenset(
    "Llama Qwen2 Qwen3 SmolLM3 Olmo2 Olmo3 Gemma Gemma2 Mistral Glm Glm4 Phi3 SeedOss HunYuanDenseV1".split()
)
_ROUNDING = 1e-12
_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate",
             "mscale", "mscale_all_dim"),
    "dynamic": ("factor", "alpha"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip


def _unrounded_integer(value: float) -> float:
    """Returns the integer that a number is but for rounding, or the number."""
    if abs(value - round(value)) < value * _ROUNDING:
        return round(value)
    return value


def _experts(settings: ModelConfig) -> MoEConfig:
    assert settings.experts is not None, "only a model with experts has these keys"
    return settings.experts


def _dense_layers(settings: ModelConfig) -> tuple[int, ...]:
    return tuple(layer for layer in range(settings.num_layers) if not settings.is_moe_layer(layer))


def _written(settings: ModelConfig, architecture: str) -> dict[str, Any]:
    """Returns the values of all keys of a class; a dense model has no keys about experts."""
    family = FAMILIES[architecture]
    writers = {**_WRITTEN, **family.written}
    model_keys = yaml_names(ModelConfig)
    expert_keys = yaml_names(MoEConfig)
    values: dict[str, Any] = {}
    for key in (*family.defaults, *family.optional_experts, *family.written):
        if settings.experts is None and key in expert_keys or key == "rope_scaling":  # `config_json` writes it
            continue
        if key in writers:
            values[key] = writers[key](settings)
        elif key in model_keys:
            values[key] = getattr(settings, model_keys[key])
        else:
            values[key] = getattr(settings.experts, expert_keys[key])
    return values


def _windows(settings: ModelConfig, family: Family) -> dict[str, Any]:
    """Returns the keys for a class in which each layer may or may not have a sliding window."""
    windows = settings.window_layers
    keys: dict[str, Any] = {"sliding_window": settings.sliding_window}
    if "use_sliding_window" in family.defaults:
        keys["use_sliding_window"] = True
        if windows == tuple(range(windows[0], settings.num_layers)):  # for versions of transformers without layer_types
            keys["max_window_layers"] = windows[0]
    types = {False: "full_attention", True: "sliding_attention"}
    keys["layer_types"] = [types[settings.has_window(layer)] for layer in range(settings.num_layers)]
    return keys


def config_json(settings: ModelConfig, architecture: str, dtype: str = "float32") -> dict[str, Any]:
    """Returns the config.json of a model for the class `architecture`, without token ids.

    It describes the rotary embedding both for transformers 5 (rope_parameters) and for older versions.
    """
    family = FAMILIES[architecture]
    keys: dict[str, Any] = {"architectures": [architecture], "model_type": family.model_type}
    keys |= {"dtype": dtype, "torch_dtype": dtype, "head_dim": settings.rotary_head_size}
    keys |= _written(settings, architecture)
    if family.windows == "listed" and (settings.window_layers or family.full_attention_period):
        keys |= _windows(settings, family)
    scaling = settings.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None and scaling.rope_type != "default":
        rope = {key: getattr(scaling, key) for key in ("rope_type", *_ROPE_KEYS[scaling.rope_type])}
        # truncate is True by default, and 1.0 equals True
        rope = {key: value for key, value in rope.items() if value is not None and value is not True}
        if scaling.rope_type not in ("linear", "dynamic"):
            rope["original_max_position_embeddings"] = settings.trained_length
        keys["rope_scaling"] = dict(rope)
    keys["rope_parameters"] = {"rope_theta": settings.rope_base, **rope}
    if "partial_rotary_factor" in keys:
        keys["rope_parameters"]["partial_rotary_factor"] = settings.rotary_pct
    if "window_rope_theta" in family.model:
        window = {"rope_type": "default", "rope_theta": settings.window_rope_theta}
        keys["rope_parameters"] = {"full_attention": keys["rope_parameters"], "sliding_attention": window}
    if settings.num_labels:
        keys["architectures"] = [sequence_classifier(architecture)]
        keys |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**keys, "use_cache": True}


def sequence_classifier(architecture: str) -> str:
    """Returns the name of the class of a reward model whose language model has this class."""
    return architecture.removesuffix(CAUSAL) + CLASSIFIER


def has_sequence_classifier(architecture: str) -> bool:
    """Returns whether transformers 5.24 has the class `sequence_classifier`, for a dense decoder."""
    return architecture.removesuffix(CAUSAL) in _CLASSIFIED


# ---- differences that a class cannot describe ------------------------------------------------------------------------


class _Fact(NamedTuple):
    """A feature of a model that its config.json must describe, and words for a model that differs in it."""

    value: Callable[[ModelConfig], Any]
    """None if the feature does not apply to the model."""
    present: str
    absent: str = ""
    """Words for a model without the feature; empty if another fact reports it."""
    other: str = ""
    """Words for a model with another value of the feature; `present` by default."""


_FACTS = (
    _Fact(lambda s: s.experts is not None, "experts", "no experts"),
    _Fact(lambda s: attention_spec(s).latent is not None, "multi-head latent attention",
          "no multi-head latent attention"),
    _Fact(lambda s: (latent := attention_spec(s).latent) and latent.normed, "norms on latent vectors",
          "no norms on latent vectors"),
    _Fact(lambda s: s.layers_group, "weights that layers share"),
    _Fact(lambda s: s.maps_embedding and s.embedding_size, "an embedding of another width"),
    _Fact(lambda s: None if attention_spec(s).latent else attention_spec(s).head_norm, "norms on query and key",
          "no norms on query and key"),
    _Fact(lambda s: (attention_spec(s).norms_all_heads,), "norms on query and key over other numbers of heads"),
    _Fact(lambda s: (attention_spec(s).norms_rotated,), "norms on query and key in another place"),
    _Fact(lambda s: (s.qkv_has_bias, s.attn_proj_has_bias), "other biases in the attention"),
    _Fact(lambda s: s.mlp_has_bias, "biases in the feed-forward layer"),
    _Fact(lambda s: s.down_has_bias != s.mlp_has_bias, "a bias on one side of the feed-forward layer"),
    _Fact(lambda s: s.rotary_size != s.rotary_head_size, "rotary positions on a part of a head"),
    _Fact(lambda s: (s.rope_interleave,), "other pairs of rotary positions"),
    _Fact(lambda s: s.unrotated_layers, "layers without rotary positions"),
    _Fact(lambda s: s.window_layers, "layers with a sliding window"),
    _Fact(lambda s: s.has_window_rotary, "other rotary positions in layers with a sliding window",
          "the same rotary positions in all layers"),
    _Fact(lambda s: attention_spec(s).scale, "another factor on the attention's scores"),
    _Fact(lambda s: (attention_spec(s).score_cap,), "another cap of the attention's scores"),
    _Fact(lambda s: s.attention_sinks, "attention sinks", "no attention sinks"),
    _Fact(lambda s: (s.final_logit_softcapping,), "another cap of the logits"),
    _Fact(lambda s: (s.activation,), "another activation"),
    _Fact(lambda s: not s.gated_linear_unit and s.mlp_names, "a feed-forward layer without a gate",
          "a gate in the feed-forward layer", "other names of its matrices"),
    _Fact(lambda s: norm_spec(s)[2:], "norms of another kind"),
    _Fact(lambda s: s.parallel_attn, "attention and feed-forward layer side by side",
          "a feed-forward layer behind the attention"),
    _Fact(lambda s: s.norm_offset, "norms with zero-centered weights", "norms without zero-centered weights"),
    _Fact(lambda s: (s.embedding_multiplier, s.residual_multiplier, s.logits_factor),
          "factors on embeddings, sublayers or logits"),
    _Fact(lambda s: (attention_spec(s).post_norm, mlp_spec(s).post_norm), "other norms after the sublayers"),
    _Fact(lambda s: (s.input_norms,), "other norms before the sublayers"),
)  # fmt: skip
_FACTS_OF_EXPERTS = (
    _Fact(lambda s: _experts(s).score_function, "a {} router"),
    _Fact(lambda s: _experts(s).has_expert_bias, "an expert bias", "no expert bias"),
    _Fact(lambda s: not _experts(s).norm_topk_prob, "weights of experts that do not sum to 1"),
    _Fact(lambda s: (_experts(s).moe_norm_min,) if _experts(s).norm_topk_prob else None,
          "another least sum of the scores of a token's experts"),
    _Fact(lambda s: _experts(s).routed_scaling_factor, "a factor on the routed experts"),
    _Fact(lambda s: s.shared_expert_size, "shared experts", "no shared experts", "shared experts of another width"),
    _Fact(lambda s: s.has_shared_gate, "a gate on the shared experts", "no gate on the shared experts"),
    _Fact(lambda s: (_experts(s).n_group or 1) - 1, "groups of experts"),
    _Fact(lambda s: _dense_layers(s), "dense layers"),
    _Fact(lambda s: (_experts(s).moe_mlp_has_bias, _experts(s).moe_router_has_bias),
          "other biases of experts or router"),
    _Fact(lambda s: _experts(s).swiglu_limit and (_experts(s).swiglu_limit, _experts(s).swiglu_alpha),
          "a clamped activation", "no clamped activation", "an activation with another limit"),
)


def class_differences(settings: ModelConfig, architecture: str) -> list[str]:
    """Returns the features in which a model differs from the one that its config.json for a class describes."""
    saved_as = FAMILIES[architecture].saved_as or architecture
    described = model_from_config_json(config_json(settings, saved_as))
    facts = _FACTS
    if settings.experts is not None and described.experts is not None:
        facts += _FACTS_OF_EXPERTS
    words = (_difference(fact, fact.value(settings), fact.value(described)) for fact in facts)
    differences = [text for text in words if text]
    scaling = settings.rope_scaling
    if scaling is not None and not FAMILIES[saved_as].accepts_scaling(scaling.rope_type):
        differences.append(f"rotary positions with {scaling.rope_type} scaling")
    return differences


def _difference(fact: _Fact, value: Any, described: Any) -> str:
    if value is None or value == described or (not value and not described):
        return ""
    if not value:
        return fact.absent
    text = fact.present
    if described and fact.other:
        text = fact.other
    return text.format(value)


def saved_class(settings: ModelConfig, architecture: str) -> str:
    """Returns the class under which a model is saved: `architecture`, or the first that describes the same model.

    Classes of transformers come first. The result is empty if the config.json of every class describes another model.
    """
    if architecture not in FAMILIES:
        return ""
    candidates = sorted((architecture, *FAMILIES), key=lambda name: not FAMILIES[name].in_transformers)
    return next((name for name in candidates if not class_differences(settings, name)), "")
