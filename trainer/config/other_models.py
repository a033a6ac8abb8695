"""What other models do differently: families that are not built, and keys of config.json that change the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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


def unsupported_features(name: str) -> str:
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
    if changes_nothing(found[key], found):
        return ""
    return what


def differences(found: Mapping[str, Any]) -> Iterator[str]:
    """What is unlike a Llama in a model with this config.json, in sentences, as far as it can be told."""
    kind = found.get("model_type")
    if isinstance(kind, str) and kind in OTHERS:
        yield OTHERS[kind]
    for key in _NUMBERS:
        if key in found and (what := effect_of(key, found)):
            yield f"{key} {found[key]} means {what}"
    kinds = found.get("layer_types")
    if isinstance(kinds, list):
        others = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    else:
        others = []
    if others:
        yield f"layer_types has layers of {', '.join(others)}"
    if found.get("hidden_act") not in (None, "silu", "swiglu", "fusedswiglu"):
        yield f"hidden_act {found['hidden_act']} means another activation"
