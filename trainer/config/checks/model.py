"""Rules about the model: sizes, positions, precision, vocabulary, families and classifiers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.config.checks.adapters import adapter_problems
from trainer.config.checks.moe import balance_problems, moe_layer_problems, moe_problems
from trainer.config.checks.problem import ConfigError, problem, value_of
from trainer.config.checks.qk_clip import qk_clip_problems
from trainer.config.families import FAMILIES, named_family
from trainer.config.patterns import PatternError, read_pattern
from trainer.config.precision import PART_KEYS, level_dtype
from trainer.config.recompute import recompute_problems, recomputed_parts
from trainer.config.schema.data import TokenizerConfig
from trainer.config.schema.fields import beside_of
from trainer.config.schema.images import CLASSIFIER, IMAGES
from trainer.config.schema.model import LATENT_SIZES, ModelConfig, RopeScaling
from trainer.config.schema.root import Config
from trainer.config.schema.system import RecomputeConfig
from trainer.config.stages import stage_problems

BYTE_VOCABULARY = 257
"""Token ids of the byte tokenizer: 256 bytes and the end of a document."""

_KEY = "model.model_config"
_EXPERTS = f"{_KEY}.moe_config"
_CLASS = "model.arch.type"
_REMOVE_ONE = "remove one of the two"
_EVEN = "rotary embedding requires a positive, even number"


def model_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors about keys of the model that contradict each other, and data that the model cannot read."""
    kind = config.model.arch.type
    for section in ("train_dataset", "eval_dataset"):
        dataset = getattr(config, section)
        key = f"{section}.data_loader.type"
        if dataset is None or dataset.data_loader.reads_images != config.is_decoder:
            continue
        if config.is_decoder:
            fix = f"write {_CLASS}: {CLASSIFIER}, or use TextDataset, JsonlDataset or SyntheticDataset"
            yield problem(config, key, f"{kind} takes text, not images", fix)
        else:
            yield problem(config, key, f"an {kind} takes images", f"write {IMAGES}")
    if not config.is_decoder:
        yield from _no_decoder(config)
        return
    if config.model.classifier is not None:
        rule = f"only an {CLASSIFIER} has it, and {_CLASS} is {kind}"
        yield problem(config, "model.classifier", rule, f"write {_CLASS}: {CLASSIFIER}, or remove it", value="...")
    # The last rules ask what each layer is: they need sizes and lists of layers without errors.
    sizes = [error for rule in (_sizes, _layer_lists, moe_layer_problems, stage_problems) for error in rule(config)]
    yield from sizes
    rules = [_contradictions, _positions, _windows, _initial_values, _family, _sparse_layers, _vocabulary, _precision,
             moe_problems]  # fmt: skip
    if not sizes:
        rules += [adapter_problems, recompute_problems, _parallel_blocks, qk_clip_problems, balance_problems]
    for rule in rules:
        yield from rule(config)


def _no_decoder(config: Config) -> Iterator[ConfigError]:
    """Yields errors for keys that apply to decoders alone, in the file of another model."""
    kind = config.model.arch.type
    decoder_sections = {
        _KEY: config.decoder != ModelConfig(),
        "recompute_config": config.recompute_config != RecomputeConfig() or config.recompute,
        "train_dataset.tokenizer": config.train_dataset.tokenizer != TokenizerConfig(),
        "sample_prompt": config.sample_prompt is not None,
        "loss": config.loss is not None,
    }
    for key in (key for key, is_set in decoder_sections.items() if is_set):
        yield problem(config, key, f"does not apply to {kind}", "remove it", value="...")
    if config.run_mode in ("predict", "chat"):
        fix = "use --run_mode eval, which gives the accuracy"
        yield problem(config, "run_mode", f"an {kind} generates no text", fix)
    if config.tasks:
        rule = "asks a language model, and this model is a classifier"
        yield problem(config, "lm_eval.tasks", rule, "leave it out")
    if config.amp_level not in (None, "O0"):
        yield problem(config, "amp_level", f"an {kind} computes in float32", "remove it, or write O0")
    if config.train_dataset.held_out:
        fix = "remove it and write an eval_dataset, which reads the test images"
        yield problem(config, "train_dataset.held_out", "is not supported for images", fix)


# What needs a decoder -> the key that says that there is none, the rule, its fix.
_NEEDS_DECODER = {
    "audit": (_CLASS, "has no fused operators", "audit a configuration of a language model"),
    "convert": (_CLASS, "the newer schema describes decoders alone", "use it as it is"),
    "data": (_CLASS, "images have no tokens to show", "use plan, which checks the images"),
    "semi_auto": ("parallel.parallel_mode", "semi-automatic mode supports decoders only",
                  "write 0 (explicit mode), which trains it on data-parallel ranks, too"),
    "trace": (_CLASS, "a trace observes language models", "name one of their classes"),
}  # fmt: skip


def decoder_problems(config: Config, purpose: str) -> list[ConfigError]:
    """Returns the error of a command or mode that needs a decoder (`purpose`) if the file has another model."""
    if config.is_decoder:
        return []
    return [problem(config, *_NEEDS_DECODER[purpose])]


def _sizes(config: Config) -> Iterator[ConfigError]:
    decoder = config.decoder
    heads = decoder.num_heads
    width = decoder.hidden_size
    head = decoder.head_size
    rotary = decoder.rotary_size
    if decoder.multi_latent_attention:
        if decoder.qk_rope_head_dim % 2:
            yield problem(config, f"{_KEY}.qk_rope_head_dim", _EVEN, "use 64, as DeepSeek-V3 does")
    elif latent_keys := [n for n in LATENT_SIZES if getattr(decoder, n) != ModelConfig.model_fields[n].default]:
        fix = "write multi_latent_attention: true, or leave it out"
        yield problem(config, f"{_KEY}.{latent_keys[0]}", "requires multi_latent_attention: true", fix)
    elif decoder.head_dim is None and width % heads:
        fix = f"use {_divisor(width, heads)} heads, or set head_dim"
        yield problem(config, f"{_KEY}.num_heads", f"must divide hidden_size ({width})", fix)
    elif head % 2:
        if decoder.head_dim is None:
            key = f"{_KEY}.num_heads"
        else:
            key = f"{_KEY}.head_dim"
        fix = "choose hidden_size and num_heads, or head_dim, so that the head size is even"
        yield problem(config, key, f"the head size is {head}, and {_EVEN}", fix)
    elif rotary % 2 or not rotary:
        even = max(2 * round(rotary / 2), 2)
        fraction = math.ceil(even / head * 1e6) / 1e6  # rounded up: the product is truncated
        rule = f"gives {rotary} rotary dimensions of {head}, and {_EVEN}"
        yield problem(config, f"{_KEY}.rotary_pct", rule, f"write {fraction:g} for {even} of them")
    if heads % decoder.kv_heads:
        fix = f"write a divisor of {heads}, for example {_divisor(heads, decoder.kv_heads)}"
        yield problem(config, f"{_KEY}.n_kv_heads", f"must divide num_heads ({heads})", fix)
    yield from _embedding(config)


def _embedding(config: Config) -> Iterator[ConfigError]:
    """Yields errors about the embedding and the MTP modules that use it."""
    decoder = config.decoder
    if decoder.maps_embedding and decoder.mtp_depth:
        yield problem(config, f"{_KEY}.embedding_size", "not yet supported with multi-token prediction modules",
                      "set mtp_depth to 0")
    if decoder.mtp_depth >= decoder.seq_length:
        yield problem(config, f"{_KEY}.mtp_depth", f"must be less than seq_length ({decoder.seq_length})", "use 1")


def _contradictions(config: Config) -> Iterator[ConfigError]:
    """Yields errors for keys that must have one value because another key of the model is set."""
    for name, field in ModelConfig.model_fields.items():
        for rule in beside_of(field):
            if getattr(config.decoder, rule.other) and getattr(config.decoder, name) != rule.value:
                yield problem(config, f"{_KEY}.{name}", rule.rule, rule.fix)
    if config.decoder.experts is not None and config.decoder.activation != "silu":
        yield problem(config, f"{_KEY}.hidden_act", "not yet supported with experts", "use another model")
    if config.decoder.experts is not None and config.decoder.centers_norms:
        yield problem(config, f"{_KEY}.normalization", "not yet supported with experts", "use another model")


def _parallel_blocks(config: Config) -> Iterator[ConfigError]:
    """Yields an error for recomputation of a sublayer where both are side by side."""
    if not config.decoder.parallel_attn or any(recompute_problems(config)):
        return
    if not {"", "block"}.issuperset(recomputed_parts(config)):
        rule = "not yet supported with parallel_attn, where attention and feed-forward layer are one part"
        yield problem(config, "recompute_config.select_recompute", rule, "write recompute: true, for whole blocks")


def _divisor(number: int, near: int) -> int:
    """Returns the divisor of ``number`` that is nearest to ``near``."""
    divisors = (part for part in range(1, number + 1) if number % part == 0)
    return min(divisors, key=lambda divisor: abs(divisor - near))


def _positions(config: Config) -> Iterator[ConfigError]:
    scaling = config.decoder.rope_scaling
    positions = value_of(config, f"{_KEY}.position_embedding_type")
    scaling_type = "absent"
    if scaling is not None:
        scaling_type = scaling.rope_type
    if positions in ("yarn", "llama3") and scaling_type != positions:
        yield problem(config, f"{_KEY}.position_embedding_type", f"rope_scaling is {scaling_type}, not {positions}",
                      f"write rope_scaling with rope_type: {positions}, or rope here")
    yield from _unrotated_layers(config)
    if scaling is None:
        return
    key = f"{_KEY}.rope_scaling"
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    if scaling.rope_type == "llama3" and low >= high:
        yield problem(config, f"{key}.low_freq_factor", f"must be below high_freq_factor ({high})",
                      "use 1 and 4, as Llama 3 does")
    if scaling.rope_type == "dynamic" and scaling.alpha is None:
        rule = "dynamic is supported with alpha only; without it the base grows with the length of each sequence"
        yield problem(config, f"{key}.rope_type", rule, "write alpha, or use another model")
    if scaling.rope_type == "dynamic" and config.decoder.rotary_size <= 2:
        rule = "dynamic requires more than 2 rotated numbers of a head"
        yield problem(config, f"{key}.rope_type", rule, "raise head_dim, or use another type")
    if scaling.rope_type == "longrope":
        yield from _long_rope(config, scaling)
    if scaling.rope_type == "yarn" and config.decoder.rope_base <= 1:
        rule = "yarn requires a base of the rotary frequencies, rope_theta x rope_ratio, above 1"
        yield problem(config, f"{_KEY}.rope_theta", rule, "use 10000, as most models do")
    if scaling.rope_type == "yarn" and scaling.beta_slow > scaling.beta_fast:
        rule = f"must be at most beta_fast ({scaling.beta_fast})"
        yield problem(config, f"{key}.beta_slow", rule, "use 1 and 32, as yarn does")


def _long_rope(config: Config, scaling: RopeScaling) -> Iterator[ConfigError]:
    """Yields errors about the factors of LongRoPE: one for each frequency, and one on cosine and sine."""
    if scaling.attention_factor is None and config.decoder.trained_length < 2:
        key = f"{_KEY}.rope_scaling.rope_type"
        rule = "longrope requires a trained length of more than 1 token, by whose logarithm it divides"
        yield problem(config, key, rule, "write original_max_position_embeddings, or attention_factor")
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        count = config.decoder.rotary_size // 2
        if factors is None or len(factors) != count:
            rule = f"longrope requires {count} factors, one for each frequency of a head"
            if factors is not None:
                rule += f", not {len(factors)}"
            fix = "write those of the model's config.json"
            yield problem(config, f"{_KEY}.rope_scaling.{name}", rule, fix, value="...")


def _unrotated_layers(config: Config) -> Iterator[ConfigError]:
    """Yields errors about layers without rotary positions that the model does not have or that are not supported."""
    decoder = config.decoder
    chosen = [name for name in ("nope_layer_interval", "nope_layers") if getattr(decoder, name) is not None]
    if not chosen:
        return
    key = f"{_KEY}.{chosen[0]}"
    beyond = [layer for layer in decoder.nope_layers or () if layer >= decoder.num_layers]
    if len(chosen) > 1:
        yield problem(config, key, "disagrees with nope_layers, which says it too", _REMOVE_ONE)
    elif decoder.multi_latent_attention or decoder.mtp_depth:
        rule = "not yet supported with multi_latent_attention, and with multi-token prediction modules"
        yield problem(config, key, rule, "set mtp_depth to 0, or use another model")
    elif beyond:
        rule = f"there is no layer {beyond[0]}: the model's layers are 0 to {decoder.num_layers - 1}"
        yield problem(config, key, rule, "remove it, or correct num_layers")


def _initial_values(config: Config) -> Iterator[ConfigError]:
    """Yields errors for rules about initial values whose target is no regular expression."""
    for number, rule in enumerate(config.decoder.param_init_std_rules or ()):
        try:
            read_pattern(rule.target)
        except PatternError as error:
            key = f"{_KEY}.param_init_std_rules.{number}.target"
            yield problem(config, key, str(error), "write for example .*linear_proj.*")


def _layer_lists(config: Config) -> Iterator[ConfigError]:
    """Yields errors for lists that do not have one entry for each layer; the loader replaces two of them otherwise."""
    decoder = config.decoder
    layers = decoder.num_layers
    lists: dict[str, Sequence[Any] | None] = {
        f"{_KEY}.layer_types": decoder.layer_types, f"{_KEY}.no_rope_layers": decoder.no_rope_layers,
    }  # fmt: skip
    if decoder.moe_config is not None:
        lists[f"{_EXPERTS}.mlp_layer_types"] = decoder.moe_config.mlp_layer_types
    for key, entries in lists.items():
        if entries is not None and len(entries) != layers:
            rule = f"must have one entry for each of the {layers} layers, and has {len(entries)}"
            yield problem(config, key, rule, "give that many, or leave it out", value="...")


def _windows(config: Config) -> Iterator[ConfigError]:
    """Yields errors for keys about a sliding window that contradict each other or depend on the class."""
    decoder = config.decoder
    architecture = config.model.arch.type
    types = decoder.layer_types
    yield from _window_size(config)
    windowed = "sliding_attention" in (types or ())
    if windowed and (not decoder.sliding_window or decoder.use_sliding_window is False):
        rule = "contains sliding_attention, but there is no sliding window"
        fix = "write sliding_window, the number of tokens that they see, and no use_sliding_window: false"
        yield problem(config, f"{_KEY}.layer_types", rule, fix, value="...")
    is_implied = "use_sliding_window" in FAMILIES[architecture].model
    if decoder.use_sliding_window and not decoder.sliding_window and not is_implied:
        fix = "write sliding_window, the number of tokens that attention sees"
        yield problem(config, f"{_KEY}.use_sliding_window", "requires sliding_window, which is not set", fix)
    if decoder.use_sliding_window and types is None and FAMILIES[architecture].windows == "other":
        rule = f"not yet supported: {architecture} has the window in other layers than Qwen2 and Qwen3"
        yield problem(config, f"{_KEY}.use_sliding_window", rule, "write layer_types, which says in which")


def _window_size(config: Config) -> Iterator[ConfigError]:
    """Yields errors for values of window_size and window_attn_skip_freq that are no causal window."""
    window = config.decoder.window_size
    if window is None:
        if config.decoder.window_attn_skip_freq is not None:
            yield problem(config, f"{_KEY}.window_attn_skip_freq", "requires window_size, which is not set", "write it")
    elif len(window) != 2 or window[1] != 0:
        rule = "must be two numbers, of tokens before the current one and 0 after it: attention is causal"
        fix = "write [W, 0] for a window of W tokens before the current one"
        yield problem(config, f"{_KEY}.window_size", rule, fix)


def _vocabulary(config: Config) -> Iterator[ConfigError]:
    size = config.decoder.vocab_size
    loader = config.train_dataset.data_loader
    uses_bytes = config.train_dataset.tokenizer.type == "bytes"
    reads_bytes = uses_bytes and loader.reads_text and loader.dataset_dir
    if reads_bytes and size < BYTE_VOCABULARY:
        rule = f"the byte tokenizer has {BYTE_VOCABULARY} tokens, more than the model's vocabulary"
        yield problem(config, f"{_KEY}.vocab_size", rule, f"set it to {BYTE_VOCABULARY} or more")
    if config.trains and not config.train_dataset.data_loader.reads_text:
        return  # a training on token ids reads none of these
    for name in ("eos_token_id", "bos_token_id"):
        value = getattr(config.decoder, name)
        if isinstance(value, list):
            tokens = value
        else:
            tokens = [value]
        if any(token is not None and not 0 <= token < size for token in tokens):
            rule = f"must be a token of the vocabulary, 0 to {size - 1} (vocab_size {size})"
            yield problem(config, f"{_KEY}.{name}", rule, "set it to the tokenizer's id, or leave it out")


def _precision(config: Config) -> Iterator[ConfigError]:
    """Yields errors for dtypes that contradict amp_level."""
    level = config.amp_level
    settings = config.decoder
    if level is None or level == "auto":
        return
    for key in PART_KEYS:
        expected = level_dtype(settings, level, key)
        if getattr(settings, key) not in (None, expected):
            rule = f"amp_level {level} ({config.source.where('amp_level')}) means {expected} here"
            fix = f"{_REMOVE_ONE}, or set amp_level to auto, which keeps explicit dtypes"
            yield problem(config, f"{_KEY}.{key}", rule, fix)


def _family(config: Config) -> Iterator[ConfigError]:
    """Yields errors for keys that name two families, and for a mixture-of-experts class without experts."""
    decoder = config.decoder
    architecture = config.model.arch.type
    named, key = named_family({"architectures": decoder.architectures, "model_type": decoder.model_type})
    if named and named != architecture:
        yield problem(config, f"{_KEY}.{key}", f"contradicts {_CLASS} = {architecture}", f"write {_CLASS}: {named}")
    elif not FAMILIES[architecture].is_mixture:
        return
    elif decoder.moe_config is None and config.source.where(_EXPERTS):
        fix = f"leave it out, or write a dense {_CLASS}"
        yield problem(config, _EXPERTS, f"{architecture} is a mixture of experts, but moe_config is empty", fix)
    elif decoder.experts is None:
        is_written = decoder.moe_config is not None and config.source.where(f"{_EXPERTS}.expert_num")
        fix = f"write moe_config.expert_num and num_experts_chosen, or a dense {_CLASS}"
        key = _CLASS
        if is_written:
            key = f"{_EXPERTS}.expert_num"
        yield problem(config, key, f"{architecture} requires moe_config.expert_num greater than 1", fix)


def _sparse_layers(config: Config) -> Iterator[ConfigError]:
    """Yields errors about layers of Qwen3-MoE's mlp_only_layers that the model does not have."""
    moe = config.decoder.moe_config
    layers = config.decoder.num_layers
    if moe is not None:
        for layer in moe.mlp_only_layers or ():
            if not 0 <= layer < layers:
                rule = f"there is no such layer: they are 0 to {layers - 1}"
                fix = "remove it, or correct num_layers"
                yield problem(config, f"{_EXPERTS}.mlp_only_layers", rule, fix, value=layer)
