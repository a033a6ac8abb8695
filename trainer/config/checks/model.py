"""Rules about the model: sizes, positions, precision, vocabulary, families, and what a classifier lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.config.checks.adapters import adapter_problems
from trainer.config.checks.problem import ConfigError, problem
from trainer.config.families import FAMILIES, layers_with_experts, named_family
from trainer.config.precision import PART_KEYS, level_dtype
from trainer.config.recompute import recompute_problems
from trainer.config.schema.data import TokenizerConfig
from trainer.config.schema.fields import beside_of
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.root import CLASSIFIER, Config
from trainer.config.schema.system import RecomputeConfig

BYTE_VOCABULARY = 257
"""Token ids of the byte tokenizer: 256 bytes and the end of a document."""

_KEY = "model.model_config"
_EXPERTS = f"{_KEY}.moe_config"
_KIND = "model.arch.type"
_IMAGES = "MnistDataset"
_ONE = "remove one of the two"
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def model_problems(config: Config) -> Iterator[ConfigError]:
    """What the model's section says against itself, and data that the model cannot take."""
    classifier = config.classifier is not None
    for section in ("train_dataset", "eval_dataset"):
        dataset = getattr(config, section)
        key = f"{section}.data_loader.type"
        if dataset is None or (dataset.data_loader.type == _IMAGES) == classifier:
            continue
        if classifier:
            yield problem(config, key, f"an {CLASSIFIER} takes images", f"write {_IMAGES}")
        else:
            fix = f"write {_KIND}: {CLASSIFIER}, or use TextDataset, JsonlDataset or SyntheticDataset"
            yield problem(config, key, f"{config.model.arch.type} takes text, not images", fix)
    if classifier:
        yield from _classifier(config)
        return
    if config.model.classifier is not None:
        rule = f"only an {CLASSIFIER} has it, and {_KIND} is {config.model.arch.type}"
        yield problem(config, "model.classifier", rule, f"write {_KIND}: {CLASSIFIER}, or remove it", value="...")
    for rules in (_sizes, _contradictions, _positions, _attention, adapter_problems, _family, _sparse_layers,
                  _vocabulary, _precision, recompute_problems):  # fmt: skip
        yield from rules(config)


def _classifier(config: Config) -> Iterator[ConfigError]:
    """A classifier reads images, and sections that only a decoder has are not silently ignored."""
    of_decoders = {
        _KEY: config.decoder != ModelConfig(),
        "recompute_config": config.recompute_config != RecomputeConfig() or config.recompute,
        "train_dataset.tokenizer": config.train_dataset.tokenizer != TokenizerConfig(),
    }
    for key in (key for key, present in of_decoders.items() if present):
        yield problem(config, key, f"an {CLASSIFIER} has no such part", "remove it", value="...")
    if config.run_mode in ("predict", "chat"):
        fix = "use --run_mode eval, which gives the accuracy"
        yield problem(config, "run_mode", f"an {CLASSIFIER} generates no text", fix)
    if config.amp_level not in (None, "O0"):
        yield problem(config, "amp_level", f"an {CLASSIFIER} computes in float32", "remove it, or write O0")
    if config.train_dataset.held_out:
        fix = "remove it and write an eval_dataset, which reads the test images"
        yield problem(config, "train_dataset.held_out", "it keeps documents back, and images are none", fix)


def _sizes(config: Config) -> Iterator[ConfigError]:
    decoder = config.decoder
    heads = decoder.num_heads
    width = decoder.hidden_size
    head = decoder.head_size
    turned = decoder.rotary_size
    pairs = "and rotary positions turn pairs of them"
    if decoder.multi_latent_attention:
        yield from _latent(config, pairs)
    elif lost := [n for n in _LATENT if getattr(decoder, n) != ModelConfig.model_fields[n].default]:
        fix = "write multi_latent_attention: True, or leave it out"
        yield problem(config, f"{_KEY}.{lost[0]}", "only multi-head latent attention has it", fix)
    elif decoder.head_dim is None and width % heads:
        fix = f"use {_divisor(width, heads)} heads, or set head_dim"
        yield problem(config, f"{_KEY}.num_heads", f"must divide hidden_size ({width})", fix)
    elif head % 2:
        key = f"{_KEY}.{'num_heads' if decoder.head_dim is None else 'head_dim'}"
        fix = "choose hidden_size and num_heads, or head_dim, so that a head is even"
        yield problem(config, key, f"a head has {head} numbers, {pairs}: the width must be even", fix)
    elif turned % 2 or not turned:
        even = max(2 * round(turned / 2), 2)
        part = math.ceil(even / head * 1e6) / 1e6  # rounded up: the product is cut to a whole number
        rule = f"rotates {turned} of a head's {head} numbers, {pairs}"
        yield problem(config, f"{_KEY}.rotary_pct", rule, f"write {part:g} for {even} of them")
    if heads % decoder.kv_heads:
        fix = f"use {_divisor(heads, decoder.kv_heads)}, or leave it out for {heads}"
        yield problem(config, f"{_KEY}.n_kv_heads", f"must divide num_heads ({heads})", fix)
    untied = decoder.untie_embeddings_and_output_weights
    tied = decoder.tie_word_embeddings
    if untied is not None and untied == tied:
        rule = f"contradicts tie_word_embeddings = {tied} ({config.source.where(f'{_KEY}.tie_word_embeddings')})"
        yield problem(config, f"{_KEY}.untie_embeddings_and_output_weights", rule, _ONE)
    if decoder.maps_embedding and decoder.mtp_depth:
        rule = "not yet supported beside multi-token prediction modules"
        fix = "set mtp_depth to 0"
        yield problem(config, f"{_KEY}.embedding_size", rule, fix)
    if decoder.mtp_depth >= decoder.seq_length:
        rule = f"a sequence of {decoder.seq_length} tokens (seq_length) has no token {decoder.mtp_depth} further ahead"
        yield problem(config, f"{_KEY}.mtp_depth", rule, "use 1")


def _latent(config: Config, pairs: str) -> Iterator[ConfigError]:
    """Sizes of multi-head latent attention, and what it lacks."""
    decoder = config.decoder
    if decoder.qk_rope_head_dim % 2:
        rule = f"this part of a head has {decoder.qk_rope_head_dim} numbers, {pairs}: the width must be even"
        yield problem(config, f"{_KEY}.qk_rope_head_dim", rule, "use 64, as DeepSeek-V3 does")
    if config.optimizer.type == "Muon" and config.source.where("optimizer.qk_clip_threshold"):
        fix = "remove it: the queries and keys are not clipped then, which is another training"
        yield problem(config, "optimizer.qk_clip_threshold", "not yet supported: there is no QK-clip", fix)


def _contradictions(config: Config) -> Iterator[ConfigError]:
    """Yields keys that another key of the model leaves one value, and that have another one."""
    for name, field in ModelConfig.model_fields.items():
        one = beside_of(field)
        if one is not None and getattr(config.decoder, one.other) and getattr(config.decoder, name) != one.value:
            yield problem(config, f"{_KEY}.{name}", one.rule, one.fix)


def _divisor(number: int, near: int) -> int:
    """The divisor of ``number`` that is nearest to ``near``."""
    return min((part for part in range(1, number + 1) if number % part == 0), key=lambda part: abs(part - near))


def _positions(config: Config) -> Iterator[ConfigError]:
    scaling = config.decoder.rope_scaling
    kind = config.decoder.position_embedding_type
    if kind in ("yarn", "llama3") and (scaling is None or scaling.rope_type != kind):
        if scaling is None:
            found = "absent"
        else:
            found = scaling.rope_type
        fix = f"write rope_scaling with rope_type: {kind}, or rope here"
        yield problem(config, f"{_KEY}.position_embedding_type", f"rope_scaling is {found}, not {kind}", fix)
    if scaling is None:
        return
    key = f"{_KEY}.rope_scaling"
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    if scaling.rope_type == "llama3" and low >= high:
        rule = f"must be below high_freq_factor ({high})"
        fix = "use 1 and 4, as Llama 3 does"
        yield problem(config, f"{key}.low_freq_factor", rule, fix)
    if scaling.rope_type == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        rule = f"must be below beta_fast ({scaling.beta_fast})"
        yield problem(config, f"{key}.beta_slow", rule, "use 1 and 32, as yarn does")


def _attention(config: Config) -> Iterator[ConfigError]:
    """Keys about a sliding window that contradict each other, or whose meaning depends on the class."""
    decoder = config.decoder
    kind = config.model.arch.type
    types = decoder.layer_types
    if types is not None and len(types) != decoder.num_layers:
        rule = f"needs a kind for each of the {decoder.num_layers} layers, and has {len(types)}"
        yield problem(config, f"{_KEY}.layer_types", rule, "give that many, or leave it out", value="...")
    windowed = "sliding_attention" in (types or ())
    if windowed and (not decoder.sliding_window or decoder.use_sliding_window is False):
        rule = "has layers with a window, and there is none"
        fix = "write sliding_window, the number of tokens that they see, and no use_sliding_window: False"
        yield problem(config, f"{_KEY}.layer_types", rule, fix, value="...")
    if decoder.use_sliding_window and not decoder.sliding_window:
        fix = "write sliding_window, the number of tokens that attention sees"
        yield problem(config, f"{_KEY}.use_sliding_window", "there is no window", fix)
    if decoder.use_sliding_window and types is None and FAMILIES[kind].windows == "other":
        rule = f"not yet supported: {kind} has the window in other layers than Qwen2 and Qwen3"
        yield problem(config, f"{_KEY}.use_sliding_window", rule, "write layer_types, which says in which")


def _vocabulary(config: Config) -> Iterator[ConfigError]:
    size = config.decoder.vocab_size
    loader = config.train_dataset.data_loader
    kind = config.train_dataset.tokenizer.type
    reads_bytes = kind == "bytes" and loader.reads_text and loader.dataset_dir
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
    """A dtype that contradicts the amp_level."""
    level = config.amp_level
    settings = config.decoder
    for key in PART_KEYS if level not in (None, "auto") else ():
        expected = level_dtype(settings, level, key)
        if getattr(settings, key) not in (None, expected):
            rule = f"amp_level {level} ({config.source.where('amp_level')}) means {expected} here"
            fix = f"{_ONE}, or use amp_level auto, over which a written dtype wins"
            yield problem(config, f"{_KEY}.{key}", rule, fix)


def _family(config: Config) -> Iterator[ConfigError]:
    """A family that is named twice and differently, or a mixture without experts."""
    decoder = config.decoder
    kind = config.model.arch.type
    named, key = named_family({"architectures": decoder.architectures, "model_type": decoder.model_type})
    if named and named != kind:
        fix = f"write {_KIND}: {named}"
        yield problem(config, f"{_KEY}.{key}", f"contradicts {_KIND} = {kind}", fix)
    elif not FAMILIES[kind].is_mixture:
        return
    elif decoder.moe_config is None and config.source.where(_EXPERTS):
        fix = f"leave it out, or write a dense {_KIND}"
        yield problem(config, _EXPERTS, f"{kind} has experts, and this leaves none", fix)
    elif decoder.experts is None:
        written = decoder.moe_config is not None and config.source.where(f"{_EXPERTS}.expert_num")
        fix = f"write moe_config.expert_num and num_experts_chosen, or a dense {_KIND}"
        key = _KIND
        if written:
            key = f"{_EXPERTS}.expert_num"
        yield problem(config, key, f"{kind} has experts, and this model has none", fix)


def _sparse_layers(config: Config) -> Iterator[ConfigError]:
    """Qwen3-MoE's names for the layers with experts."""
    moe = config.decoder.moe_config
    layers = config.decoder.num_layers
    if moe is None:
        return
    dense = moe.mlp_only_layers or []
    outside = [layer for layer in dense if not 0 <= layer < layers]
    if outside:
        rule = f"there is no such layer: they are 0 to {layers - 1}"
        fix = "remove it, or correct num_layers"
        yield problem(config, f"{_EXPERTS}.mlp_only_layers", rule, fix, value=outside[0])
    elif moe.decoder_sparse_step != 1 or dense:
        wanted = layers_with_experts(layers, moe.decoder_sparse_step, dense)
        if moe.moe_layer_freq != wanted:
            rule = f"disagrees with moe_layer_freq = {moe.moe_layer_freq}: it means {wanted}"
            yield problem(config, f"{_EXPERTS}.{'mlp_only_layers' if dense else 'decoder_sparse_step'}", rule, _ONE)
