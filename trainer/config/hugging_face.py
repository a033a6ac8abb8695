"""The config.json that a model is saved with, as a class of Hugging Face reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trainer.config.families import FAMILIES, shared_experts
from trainer.config.read.model_folder import model_from_config_json
from trainer.config.schema.fields import yaml_names
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig
from trainer.models.spec.sublayers import attention_spec, mlp_spec

_WRITTEN: dict[str, Callable[[ModelConfig], Any]] = {
    "intermediate_size": lambda s: s.ffn_size,
    "num_key_value_heads": lambda s: s.kv_heads,
    "head_dim": lambda s: s.rotary_head_size,
    "hidden_act": lambda s: "silu",
    "max_position_embeddings": lambda s: s.max_positions,
    "rope_theta": lambda s: s.rope_base,
    "use_sliding_window": lambda s: False,
    "sliding_window": lambda s: s.sliding_window if s.window_layers else None,
    "mlp_down_has_bias": lambda s: s.down_has_bias,
    "n_shared_experts": shared_experts,
    "moe_intermediate_size": lambda s: s.expert_size,
    "shared_expert_intermediate_size": lambda s: s.shared_expert_size,
    "n_group": lambda s: s.experts.n_group or 1,
    "topk_group": lambda s: s.experts.topk_group or s.experts.n_group or 1,
    "first_k_dense_replace": lambda s: len(_dense_layers(s)),
    "decoder_sparse_step": lambda s: 1,
    "mlp_only_layers": lambda s: list(_dense_layers(s)),
    "router_aux_loss_coef": lambda s: s.balance_factor
    * (s.num_layers - len(_dense_layers(s))) / s.experts.num_experts_chosen,
    "output_router_logits": lambda s: bool(s.experts.output_router_logits),
    "router_jitter_noise": lambda s: 0.0,
}  # fmt: skip
"""What is written for a key; all others are written as they are set."""
_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim"),
}  # fmt: skip


def _dense_layers(settings: ModelConfig) -> tuple[int, ...]:
    return tuple(layer for layer in range(settings.num_layers) if not settings.is_moe_layer(layer))


def _written(settings: ModelConfig, kind: str) -> dict[str, Any]:
    """The values of all keys of a class; without those of experts where the model has none."""
    family = FAMILIES[kind]
    writers = {**_WRITTEN, **family.written}
    of_model = yaml_names(ModelConfig)
    of_experts = yaml_names(MoEConfig)
    found: dict[str, Any] = {}
    for key in (*family.defaults, *family.optional_experts, *family.written):
        if settings.experts is None and key in of_experts:
            continue
        if key in writers:
            found[key] = writers[key](settings)
        elif key in of_model:
            found[key] = getattr(settings, of_model[key])
        else:
            found[key] = getattr(settings.experts, of_experts[key])
    return found


def _windows(settings: ModelConfig) -> dict[str, Any]:
    """Which layers have the sliding window, where not all of them need to have it."""
    windows = settings.window_layers
    found = {"use_sliding_window": True, "sliding_window": settings.sliding_window}
    if windows == tuple(range(windows[0], settings.num_layers)):  # what versions without layer_types read
        found["max_window_layers"] = windows[0]
    kinds = {False: "full_attention", True: "sliding_attention"}
    found["layer_types"] = [kinds[settings.has_window(layer)] for layer in range(settings.num_layers)]
    return found


def config_json(settings: ModelConfig, kind: str, dtype: str = "float32") -> dict[str, Any]:
    """Describes a model as one of the class `kind`, without the ids of tokens.

    Rotary positions are written as transformers 5 has them (rope_parameters) and as older versions do.
    """
    family = FAMILIES[kind]
    found: dict[str, Any] = {"architectures": [kind], "model_type": family.model_type}
    found |= {"dtype": dtype, "torch_dtype": dtype, "head_dim": settings.rotary_head_size}
    found |= _written(settings, kind)
    if settings.window_layers and family.windows == "listed":
        found |= _windows(settings)
    scaling = settings.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None and scaling.rope_type != "default":
        rope = {key: getattr(scaling, key) for key in ("rope_type", *_ROPE_KEYS[scaling.rope_type])}
        rope = {key: value for key, value in rope.items() if value is not None}
        if scaling.rope_type != "linear":
            rope.setdefault("original_max_position_embeddings", settings.max_positions)
        found["rope_scaling"] = dict(rope)
    found["rope_parameters"] = {"rope_theta": settings.rope_base, **rope}
    if "partial_rotary_factor" in found:
        found["rope_parameters"]["partial_rotary_factor"] = settings.rotary_pct
    return {**found, "use_cache": True}


# ---- what a class cannot say -----------------------------------------------------------------------------------------


class _Fact(NamedTuple):
    """Something of a model that a config.json has to say, and words for a model that it says otherwise of."""

    value: Callable[[ModelConfig], Any]
    """None where the model has nothing of the kind."""
    present: str
    absent: str = ""
    """Words for a model without it; empty where another fact tells it."""
    other: str = ""
    """Words for a model with another value of it, `present` by default."""


_FACTS = (
    _Fact(lambda s: s.experts is not None, "experts", "no experts"),
    _Fact(lambda s: attention_spec(s).latent is not None, "multi-head latent attention",
          "no multi-head latent attention"),
    _Fact(lambda s: s.layers_group, "weights that layers share"),
    _Fact(lambda s: s.maps_embedding and s.embedding_size, "an embedding of another width"),
    _Fact(lambda s: None if attention_spec(s).latent else attention_spec(s).head_norm, "norms on query and key",
          "no norms on query and key"),
    _Fact(lambda s: (s.qkv_has_bias, s.attn_proj_has_bias), "other biases in the attention"),
    _Fact(lambda s: s.mlp_has_bias, "biases in the feed-forward layer"),
    _Fact(lambda s: s.down_has_bias != s.mlp_has_bias, "a bias on one side of the feed-forward layer"),
    _Fact(lambda s: s.rotary_size != s.rotary_head_size, "rotary positions on a part of a head"),
    _Fact(lambda s: (s.rope_interleave,), "other pairs of rotary positions"),
    _Fact(lambda s: s.window_layers, "layers with a sliding window"),
    _Fact(lambda s: (attention_spec(s).post_norm, mlp_spec(s).post_norm), "other norms after the sublayers"),
)  # fmt: skip
_FACTS_OF_EXPERTS = (
    _Fact(lambda s: s.experts.score_function, "a {} router"),
    _Fact(lambda s: s.experts.has_expert_bias, "an expert bias", "no expert bias"),
    _Fact(lambda s: not s.experts.norm_topk_prob, "weights of experts that do not sum to 1"),
    _Fact(lambda s: s.experts.routed_scaling_factor, "a factor on the routed experts"),
    _Fact(lambda s: s.shared_expert_size, "shared experts", "no shared experts", "shared experts of another width"),
    _Fact(lambda s: s.has_shared_gate, "a gate on the shared experts", "no gate on the shared experts"),
    _Fact(lambda s: (s.experts.n_group or 1) - 1, "groups of experts"),
    _Fact(lambda s: _dense_layers(s), "dense layers"),
)


def class_differences(settings: ModelConfig, kind: str) -> list[str]:
    """Says what a model has that a config.json of the class `kind` cannot say, or the reverse: what differs once it is
    written and read again."""
    theirs = model_from_config_json(config_json(settings, FAMILIES[kind].saved_as or kind))
    facts = _FACTS
    if settings.experts is not None and theirs.experts is not None:
        facts += _FACTS_OF_EXPERTS
    words = (_difference(fact, fact.value(settings), fact.value(theirs)) for fact in facts)
    return [text for text in words if text]


def _difference(fact: _Fact, ours: Any, theirs: Any) -> str:
    if ours is None or ours == theirs or not (ours or theirs):
        return ""
    if not ours:
        return fact.absent
    if not theirs:
        text = fact.present
    else:
        text = fact.other or fact.present
    return text.format(ours)


def saved_class(settings: ModelConfig, kind: str) -> str:
    """The class under which a model is saved: `kind`, or the first one whose config.json describes the same model.

    Classes of transformers come first. Empty where there is none: its config.json would describe another model.
    """
    candidates = sorted((kind, *FAMILIES), key=lambda name: not FAMILIES[name].in_transformers)
    return next((name for name in candidates if not class_differences(settings, name)), "")
