"""Hugging Face's config.json: defaults of the classes that are known here, and what other models do differently.

`scripts/make_families.py` asks transformers for the defaults, which a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.config.families import FAMILIES
from trainer.config.schema.fields import yaml_names
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig

_ALL: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768,
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "attention_dropout": 0.0,
}  # fmt: skip
_WINDOWS = {"use_sliding_window": False}
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_WINDOWED = tuple(f"{name}ForCausalLM" for name in "Mistral Mixtral Qwen2 Qwen3 Qwen2Moe Qwen3Moe".split())
"""The classes whose attention may have a sliding window."""
_LOSSES = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_ALL_OF_GLM = _ALL | {
    "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
    "partial_rotary_factor": 0.5,
}  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _ALL | {
        "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048,
        "attention_bias": False, "mlp_bias": False,
    },
    "Qwen2ForCausalLM": _ALL | _WINDOWS,
    "Qwen3ForCausalLM": _ALL | _WINDOWS | {"head_dim": 128, "attention_bias": False},
    "MistralForCausalLM": _ALL | {
        "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "MixtralForCausalLM": _ALL | _LOSSES | {
        "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_local_experts": 8, "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0, "sliding_window": None,
    },
    "Qwen2MoeForCausalLM": _ALL | _WINDOWS | _LOSSES | {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "qkv_bias": True,
    },
    "Qwen3MoeForCausalLM": _ALL | _WINDOWS | _LOSSES | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "attention_bias": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "Glm4MoeForCausalLM": _ALL | {
        "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": False,
        "use_qk_norm": False, "partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
        "output_router_logits": False,
    },
    "GlmForCausalLM": _ALL_OF_GLM,
    "Glm4ForCausalLM": _ALL_OF_GLM,
    "ChatGLM2ForConditionalGeneration": {
        "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28,
        "num_attention_heads": 32, "kv_channels": 128, "seq_length": 2048, "layernorm_epsilon": 1e-5,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "rope_ratio": 1.0, "add_bias_linear": False,
        "add_qkv_bias": False, "multi_query_attention": False, "multi_query_group_num": 1,
        "tie_word_embeddings": False,
    },
    "TelechatForCausalLM": _ALL | {
        "vocab_size": 131072, "num_key_value_heads": None, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "hidden_dropout": 0.0, "out_proj_has_bias": True, "mlp_down_has_bias": True,
    },
    "TeleChat3ForCausalLM": _ALL | {
        "vocab_size": 131072, "head_dim": 128, "attention_bias": False, "num_nextn_predict_layers": 0,
        "out_proj_has_bias": False, "embedding_size": None, "layers_group": 1,
    },
    "DeepseekV3ForCausalLM": _ALL | {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096,
        "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1, "output_router_logits": False,
    },
}  # fmt: skip
"""By class, what transformers takes for a key that a config.json leaves out: all keys that its class reads. Of a class
that it does not have, what the code that is published with the weights takes."""

_EVERY_CLASS = frozenset(
    "architectures model_type head_dim rope_scaling rope_parameters quantization_config auto_map".split()
)
_HARMLESS = frozenset(
    "_name_or_path bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version use_cache id2label"
    " label2id pretraining_tp return_dict output_attentions output_hidden_states is_encoder_decoder problem_type"
    " chunk_size_feed_forward tokenizer_class attn_implementation _attn_implementation"
    " attention_type bos_token eos_token pad_token do_sample temperature top_k top_p repetition_penalty max_length"
    " no_rope_layers no_rope_layer_interval qk_head_dim".split()
)
"""Keys that change nothing of what a model computes, or that are judged elsewhere."""

OTHERS = {
    "cohere": "attention and feed-forward layer stand side by side, norms are LayerNorm, and logits are scaled",
    "deepseek_v2": "attention is multi-head latent attention, and the router is another",
    "ernie4_5": "rotary positions turn neighbouring numbers of a head, not its two halves",
    "ernie4_5_moe": "rotary positions turn neighbouring numbers of a head, and the router is another",
    "gemma": "norms multiply by 1 + weight, embeddings are multiplied by sqrt(hidden_size), and the activation is GELU",
    "gemma2": "norms multiply by 1 + weight and stand after the sublayers too, embeddings are multiplied by"
              " sqrt(hidden_size), the activation is GELU, scores and logits are softcapped, and every other layer has"
              " a sliding window",
    "gemma3_text": "norms multiply by 1 + weight and stand after the sublayers too, embeddings are multiplied by"
                   " sqrt(hidden_size), the activation is GELU, and most layers have a sliding window",
    "gpt_oss": "attention has sinks, every other layer has a sliding window, and the activation is clipped",
    "granite": "embeddings, residuals, attention and logits have multipliers",
    "granitemoe": "embeddings, residuals, attention and logits have multipliers",
    "helium": "rotary positions turn neighbouring numbers of a head, not its two halves",
    "olmo2": "norms stand after the sublayers instead of before, and query and key have norms over all heads",
    "olmoe": "query and key have norms over all heads",
    "phi3": "query, key and value are one matrix, and so are gate and up",
    "qwen3_next": "some layers have linear attention",
    "smollm3": "some layers have no rotary positions (no_rope_layers)",
    "stablelm": "norms are LayerNorm, and rotary positions turn a part of a head",
    "starcoder2": "norms are LayerNorm, the feed-forward layer has no gate, and matrices have biases",
}  # fmt: skip
"""What is unlike a Llama in families that are not known here, by model_type: sentences."""


_SUFFIX = "ForCausalLM"


def of_other_class(name: str) -> str:
    """What is unlike a Llama in a class of transformers that is not built; empty where nothing is known of it."""
    stem = name.removesuffix(_SUFFIX).lower()
    found = (text for kind, text in OTHERS.items() if stem in (kind.replace("_", ""), kind.removesuffix("_text")))
    return next(found, "")


def _head_size(found: Mapping[str, Any]) -> Any:
    width, heads = (found.get(key) for key in ("hidden_size", "num_attention_heads"))
    both = isinstance(width, int) and isinstance(heads, int) and heads
    return found.get("head_dim") or (width // heads if both else None)


def _is(*neutral: Any) -> Callable[[Any, Mapping[str, Any]], bool]:
    return lambda value, found: value in neutral


def _scales_as_usual(value: Any, found: Mapping[str, Any]) -> bool:
    size = _head_size(found)
    return value is None or (isinstance(value, int | float) and bool(size) and abs(value - size**-0.5) < 1e-6)


def _not_beyond_base(value: Any, found: Mapping[str, Any]) -> bool:
    """TeleChat2's lengths: its published code changes the base of rotary positions beyond base_seqlen."""
    base = found.get("base_seqlen", value)
    return value is None or (isinstance(value, int) and isinstance(base, int) and value <= base)


def _every_layer(value: Any, found: Mapping[str, Any]) -> bool:
    return value is None or (isinstance(value, list) and all(value))


def _beyond_layers(value: Any, found: Mapping[str, Any]) -> bool:
    layers = found.get("num_hidden_layers")
    listed = found.get("no_rope_layers") is not None
    return listed or not value or (isinstance(layers, int) and isinstance(value, int) and value > layers)


_NUMBERS: dict[str, tuple[Callable[[Any, Mapping[str, Any]], bool], str]] = {
    "embedding_multiplier": (_is(1, None), "a factor on the embeddings"),
    "residual_multiplier": (_is(1, None), "a factor on each sublayer's output"),
    "attention_multiplier": (_scales_as_usual, "a factor on the attention's scores"),
    "logits_scaling": (_is(1, None), "a divisor of the logits"),
    "logit_scale": (_is(1, None), "a factor on the logits"),
    "scale_emb": (_is(1, None), "a factor on the embeddings"),
    "scale_depth": (_is(None), "a factor on each sublayer's output"),
    "dim_model_base": (_is(None), "a divisor of the logits"),
    "attn_logit_softcapping": (_is(None), "softcapping of the attention's scores"),
    "final_logit_softcapping": (_is(None), "softcapping of the logits"),
    "query_pre_attn_scalar": (lambda value, found: value in (None, _head_size(found)), "a divisor of the queries"),
    "no_rope_layers": (_every_layer, "layers without rotary positions"),
    "no_rope_layer_interval": (_beyond_layers, "layers without rotary positions"),
    "hidden_activation": (_is("silu", None), "another activation"),
    "attention_chunk_size": (_is(None), "attention within chunks"),
    "clip_qkv": (_is(None), "bounds on query, key and value"),
    "use_bias": (_is(False, None), "biases in every matrix"),
    "use_parallel_residual": (_is(False, None), "attention and feed-forward layer side by side"),
    "parallel_attn": (_is(False, None), "attention and feed-forward layer side by side"),
    "alibi": (_is(False, None), "positions as a bias on the attention's scores"),
    "training_seqlen": (_not_beyond_base, "rotary positions whose base grows with the length of a sequence"),
    "base_seqlen": (lambda value, found: True, "the length from which training_seqlen counts"),
    "logn": (_is(False, None), "queries that are multiplied by the logarithm of their position"),
    "embed_layernorm": (_is(False, None), "a norm on the embeddings"),
}  # fmt: skip
"""Keys that change what a model computes and are not built: whether a value changes nothing, and what it is."""

NOT_BUILT = "use another model: without it the weights of this one compute something else"
"""The fix for such a key: to leave it out would give wrong results."""


def is_known_effect(key: str) -> bool:
    """Whether a key of config.json is one of those that change what a model computes and are not built."""
    return key in _NUMBERS


def effect_of(key: str, found: Mapping[str, Any]) -> str:
    """What such a key of a config.json does; empty where its value changes nothing."""
    changes_nothing, what = _NUMBERS[key]
    return "" if changes_nothing(found[key], found) else what


def differences(found: Mapping[str, Any]) -> Iterator[str]:
    """What is unlike a Llama in a model with this config.json, in sentences, as far as it can be told."""
    kind = found.get("model_type")
    if isinstance(kind, str) and kind in OTHERS:
        yield OTHERS[kind]
    for key in _NUMBERS:
        if key in found and (what := effect_of(key, found)):
            yield f"{key} {found[key]} means {what}"
    kinds = found.get("layer_types")
    others = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"}) if isinstance(kinds, list) else []
    if others:
        yield f"layer_types has layers of {', '.join(others)}"
    if found.get("hidden_act") not in (None, "silu", "swiglu", "fusedswiglu"):
        yield f"hidden_act {found['hidden_act']} means another activation"


def verdict(key: str, value: Any, family: str, named: str) -> str:
    """What to do with a key of a config.json whose model is taken as `family`; `named` is the class that it names.

    Returns:
        "read"; "harmless": it changes nothing; "unread": the class in transformers does not read it either; "unknown":
        the class is not known, and nobody can tell what the key changes.
    """
    if key == "auto_map" and named:  # the published code of a class that is known
        return "harmless"
    is_expert_count = key in ("num_local_experts", "num_experts") and FAMILIES[family].is_mixture
    if key in _WINDOW_KEYS:
        return "read" if family in _WINDOWED or not named else "unread" if value else "harmless"
    if key in _NUMBERS or key in _EVERY_CLASS or key in DEFAULTS[family] or is_expert_count:
        return "read"
    if not FAMILIES[family].in_transformers and (key in yaml_names(ModelConfig) or key in yaml_names(MoEConfig)):
        return "read"
    if key in _HARMLESS:
        return "harmless"
    if named:
        return "unread"
    if key in ("rope_interleave", "rope_interleaved"):
        return "read"
    return "harmless" if value in (None, False, "", [], {}) else "unknown"


def known_families() -> str:
    """The names of all that are known, for messages."""
    return ", ".join(f"{name} ({family.model_type})" for name, family in FAMILIES.items())


# ---- writing ---------------------------------------------------------------------------------------------------------

_VALUES: dict[str, Callable[[ModelConfig], Any]] = {
    "vocab_size": lambda s: s.vocab_size,
    "hidden_size": lambda s: s.hidden_size,
    "intermediate_size": lambda s: s.ffn_size,
    "num_hidden_layers": lambda s: s.num_layers,
    "num_attention_heads": lambda s: s.num_heads,
    "num_key_value_heads": lambda s: s.kv_heads,
    "hidden_act": lambda s: "silu",
    "max_position_embeddings": lambda s: s.max_positions,
    "initializer_range": lambda s: s.initializer_range,
    "rms_norm_eps": lambda s: s.rms_norm_eps,
    "tie_word_embeddings": lambda s: s.tie_word_embeddings,
    "rope_theta": lambda s: s.rope_base,
    "attention_dropout": lambda s: s.attention_dropout,
    "attention_bias": lambda s: s.qkv_has_bias,
    "qkv_bias": lambda s: s.qkv_has_bias,
    "mlp_bias": lambda s: s.mlp_has_bias,
    "use_qk_norm": lambda s: s.use_qk_norm,
    "partial_rotary_factor": lambda s: s.rotary_pct,
    "use_sliding_window": lambda s: bool(s.window_layers),
    "sliding_window": lambda s: s.sliding_window if s.window_layers else None,
    "n_routed_experts": lambda s: s.experts.expert_num,
    "num_experts": lambda s: s.experts.expert_num,
    "num_local_experts": lambda s: s.experts.expert_num,
    "num_experts_per_tok": lambda s: s.experts.num_experts_chosen,
    "n_shared_experts": lambda s: s.shared_expert_size // s.expert_size,
    "moe_intermediate_size": lambda s: s.expert_size,
    "shared_expert_intermediate_size": lambda s: s.shared_expert_size,
    "norm_topk_prob": lambda s: s.experts.norm_topk_prob,
    "routed_scaling_factor": lambda s: s.experts.routed_scaling_factor,
    "n_group": lambda s: s.experts.n_group or 1,
    "topk_group": lambda s: s.experts.topk_group or s.experts.n_group or 1,
    "first_k_dense_replace": lambda s: len(_dense_layers(s)),
    "num_nextn_predict_layers": lambda s: s.mtp_depth,
    "decoder_sparse_step": lambda s: 1,
    "mlp_only_layers": lambda s: _dense_layers(s),
    "router_aux_loss_coef": lambda s: s.balance_factor
    * (s.num_layers - len(_dense_layers(s))) / s.experts.num_experts_chosen,
    "output_router_logits": lambda s: bool(s.experts.output_router_logits),
    "router_jitter_noise": lambda s: 0.0,
    "head_dim": lambda s: s.rotary_head_size,
    "q_lora_rank": lambda s: s.q_lora_rank,
    "kv_lora_rank": lambda s: s.kv_lora_rank,
    "qk_nope_head_dim": lambda s: s.qk_nope_head_dim,
    "qk_rope_head_dim": lambda s: s.qk_rope_head_dim,
    "v_head_dim": lambda s: s.v_head_dim,
    "rope_interleave": lambda s: s.rope_interleave,
    "hidden_dropout": lambda s: s.hidden_dropout,
    "out_proj_has_bias": lambda s: s.attn_proj_has_bias,
    "mlp_down_has_bias": lambda s: s.down_has_bias,
    "embedding_size": lambda s: s.embedding_size,
    "layers_group": lambda s: s.layers_group,
}  # fmt: skip
"""The value of each key of `DEFAULTS`."""


def _dense_layers(settings: ModelConfig) -> list[int]:
    return [layer for layer in range(settings.num_layers) if not settings.is_moe_layer(layer)]


def _keys_of(settings: ModelConfig, kind: str) -> tuple[str, ...]:
    """The keys of a config.json of the class `kind`."""
    if settings.experts is None or FAMILIES[kind].is_mixture:
        return tuple(DEFAULTS[kind])
    return (*DEFAULTS[kind], "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def config_json(settings: ModelConfig, kind: str, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of a model as the class `kind`, without the ids of tokens.

    Rotary positions are written as transformers 5 has them (rope_parameters) and as older versions do.
    """
    found: dict[str, Any] = {"architectures": [kind], "model_type": FAMILIES[kind].model_type}
    found |= {"dtype": dtype, "torch_dtype": dtype, "head_dim": settings.rotary_head_size}
    found |= {key: _VALUES[key](settings) for key in _keys_of(settings, kind)}
    if DEFAULTS[kind] is _ALL_OF_GLM:
        found["pad_token_id"] = None  # the class has one that small vocabularies lack
    if settings.window_layers and "use_sliding_window" in found:
        kinds = {False: "full_attention", True: "sliding_attention"}
        windows = settings.window_layers
        found["sliding_window"] = settings.sliding_window
        if windows == tuple(range(windows[0], settings.num_layers)):  # what versions without layer_types read
            found["max_window_layers"] = windows[0]
        found["layer_types"] = [kinds[settings.has_window(layer)] for layer in range(settings.num_layers)]
    if kind == "MixtralForCausalLM":
        found["intermediate_size"] = settings.expert_size
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


_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim"),
}  # fmt: skip


def saved_class(settings: ModelConfig, kind: str) -> str:
    """The class under which a model is saved: `kind`, or the first one whose config.json describes the same model.

    Classes of transformers come first. Empty where there is none: its config.json would describe another model.
    """
    candidates = sorted((kind, *FAMILIES), key=lambda name: not FAMILIES[name].in_transformers)
    return next((name for name in candidates if not class_differences(settings, name)), "")


_NORMS_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")


def class_differences(settings: ModelConfig, kind: str) -> list[str]:
    """What a model has that a config.json of the class `kind` cannot say, or the reverse, in words."""
    moe, family, keys = settings.experts, FAMILIES[kind], DEFAULTS[kind]
    if kind == "ChatGLM2ForConditionalGeneration":  # never written: this class of transformers computes the same
        return class_differences(settings, "GlmForCausalLM")
    fits = family.is_mixture == (moe is not None) or (family.may_be_mixture and moe is not None)
    latent = settings.multi_latent_attention
    has_norm = family.model.get("use_qk_norm", False)
    windows, every = settings.window_layers, kind in ("MistralForCausalLM", "MixtralForCausalLM")
    has_windows = kind in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") or (every and len(windows) == settings.num_layers)
    norms_after = [getattr(settings, name) for name in _NORMS_AFTER]
    found = {
        "experts" if moe is not None else "no experts": not fits,
        "multi-head latent attention" if latent else "no multi-head latent attention":
            latent != family.model.get("multi_latent_attention", False),
        "weights that layers share": settings.layers_group > 1 and "layers_group" not in keys,
        "an embedding of another width": settings.maps_embedding and "embedding_size" not in keys,
        "norms on query and key" if settings.use_qk_norm else "no norms on query and key":
            settings.use_qk_norm != has_norm and "use_qk_norm" not in keys and not latent,
        "other biases in the attention":
            (settings.qkv_has_bias, settings.attn_proj_has_bias) not in _attention_biases(kind),
        "biases in the feed-forward layer": settings.mlp_has_bias and "mlp_bias" not in keys,
        "a bias on one side of the feed-forward layer":
            settings.down_has_bias != settings.mlp_has_bias and "mlp_down_has_bias" not in keys,
        "rotary positions on a part of a head":
            settings.rotary_size != settings.rotary_head_size and "partial_rotary_factor" not in keys,
        "other pairs of rotary positions":
            settings.rope_interleave != family.model.get("rope_interleave", False) and "rope_interleave" not in keys,
        "layers with a sliding window": bool(windows) and not has_windows,
        "other norms after the sublayers": norms_after != [family.model.get(name, False) for name in _NORMS_AFTER],
    }  # fmt: skip
    if fits and moe is not None:
        found |= _expert_differences(settings, moe, kind)
    return [what for what, differs in found.items() if differs]


def _attention_biases(kind: str) -> set[tuple[bool, bool]]:
    """What a class can have: biases on query, key and value, and one on the output."""
    family, keys = FAMILIES[kind], DEFAULTS[kind]
    is_free = "attention_bias" in keys or "qkv_bias" in keys
    inputs = {True, False} if is_free else {family.model.get("qkv_has_bias", False)}
    outputs = {True, False} if "out_proj_has_bias" in keys else set[bool]()
    return {(bias, output) for bias in inputs for output in outputs or {bias and family.has_output_bias}}


def _expert_differences(settings: ModelConfig, moe: MoEConfig, kind: str) -> dict[str, bool]:
    family, keys = FAMILIES[kind], _keys_of(settings, kind)
    dense = _dense_layers(settings)
    prefix = dense == list(range(len(dense)))
    is_gated, may_share = "shared_expert_intermediate_size" in keys, "n_shared_experts" in keys
    return {
        f"a {moe.score_function} router": (moe.score_function == "sigmoid") != family.has_expert_bias,
        "an expert bias" if moe.has_expert_bias else "no expert bias": moe.has_expert_bias != family.has_expert_bias,
        "weights of experts that do not sum to 1": not moe.norm_topk_prob and "norm_topk_prob" not in keys,
        "a factor on the routed experts": moe.routed_scaling_factor != 1 and "routed_scaling_factor" not in keys,
        "shared experts": bool(settings.shared_expert_size) and not (may_share or is_gated),
        "no shared experts": not settings.shared_expert_size and (is_gated or kind == "DeepseekV3ForCausalLM"),
        "a gate on the shared experts" if not is_gated else "no gate on the shared experts":
            settings.has_shared_gate != is_gated,
        "shared experts of another width": may_share and bool(settings.shared_expert_size % settings.expert_size),
        "groups of experts": (moe.n_group or 1) > 1 and "n_group" not in keys,
        "dense layers": bool(dense) and "mlp_only_layers" not in keys
            and not ("first_k_dense_replace" in keys and prefix),
    }  # fmt: skip
