"""The model of a smoke run: the file's kinds of attention and experts with its ratios, and far smaller sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.config import Config
from trainer.config.precision import PART_KEYS, requested_dtype
from trainer.config.schema.callbacks import MoEDropRate, TopkBiasBalance
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.sublayers import latent_spec
from trainer.ops.select import precision_on_cpu
from trainer.smoke.changes import NewValue, Setup
from trainer.smoke.layers import layer_changes, layers_to_keep

_MODEL = "model.model_config"
_EXPERTS = f"{_MODEL}.moe_config"
NO_SIZES = (*PART_KEYS, "param_init_type", "seq_length")
"""Keys of the model that do not change the shapes of weights."""
LARGEST_KEPT_WIDTH = 256
"""A model of this hidden_size or less keeps its widths."""
_SEQ_LENGTH = 128
_PAIR_LENGTH = 1024
SMALL_VOCABULARY = 512
_HEAD_SIZE = 16
_MANY_HEADS = 8
_MULTIPLE = 8
_EXPERT_NUM = 8
_SMALLER = "small enough for this machine"
CHUNKS = 2
"""Most chunks of layers that a stage of a pipeline keeps."""


def model_changes(config: Config, setup: Setup, vocab_size: int) -> Iterator[NewValue]:
    """Yields the changes of sizes, layers, experts, adapters and dtypes."""
    decoder = config.decoder
    stages = setup.layout.degrees.pipeline_stage
    kept = layers_to_keep(config, _fewest_layers(config, stages))
    layers = list(layer_changes(config, kept, stages))
    yield from layers
    if decoder.hidden_size > LARGEST_KEPT_WIDTH:
        yield from _widths(config, vocab_size)
    yield NewValue(f"{_MODEL}.vocab_size", vocab_size, _SMALLER)
    yield NewValue(f"{_MODEL}.seq_length", seq_length(config), _SMALLER)
    if decoder.window_layers and (decoder.sliding_window or 0) >= seq_length(config):
        why = "a window that is smaller than the sequence"
        yield NewValue(f"{_MODEL}.sliding_window", seq_length(config) // 2, why)
    experts = list(_expert_number(config))
    yield from experts
    yield from _callbacks(config, [*layers, *experts])
    if setup.device == "CPU":
        yield from _dtypes(config, setup)


def _fewest_layers(config: Config, stages: int) -> int:
    """Returns the smallest number of layers: one for each model chunk, or two if layers share their attention."""
    decoder = config.decoder
    if stages == 1:
        return 1
    chunks = stages * min(decoder.pp_interleave_num, CHUNKS)
    if decoder.layers_group > 1:
        return 2 * chunks
    return chunks


def seq_length(config: Config) -> int:
    """Returns the sequence length of the smoke run."""
    longest = _SEQ_LENGTH
    if config.preferences is not None:  # a sequence holds both answers of a pair, with their prompt
        longest = _PAIR_LENGTH
    return min(config.decoder.seq_length, longest)


def _round_width(value: float) -> int:
    """Rounds a width to a multiple of 8, at least 8."""
    return max(_MULTIPLE, round(value / _MULTIPLE) * _MULTIPLE)


def _widths(config: Config, vocab_size: int) -> Iterator[NewValue]:
    """Yields a smaller hidden_size with the same number of query heads per key head, and other widths in proportion."""
    decoder = config.decoder
    group = decoder.num_heads // decoder.kv_heads
    kv_heads = min(decoder.kv_heads, 4)
    if group > 1:
        kv_heads = min(decoder.kv_heads, 2)
    most = 4 * _MANY_HEADS
    if vocab_size > SMALL_VOCABULARY:  # the full vocabulary needs a narrower model
        most = 2 * _MANY_HEADS
    if kv_heads * group > most:
        kv_heads = 1
    heads = kv_heads * group
    head = _HEAD_SIZE
    if heads > _MANY_HEADS:
        head = _HEAD_SIZE // 2
    ratio = _SMALLER
    if group > 1:
        ratio = f"{_SMALLER}; {group} query heads to a key head, as before"
    yield NewValue(f"{_MODEL}.num_heads", heads, ratio)
    if decoder.n_kv_heads is not None:
        yield NewValue(f"{_MODEL}.n_kv_heads", kv_heads, ratio)
    hidden = heads * head
    latent = latent_spec(decoder) is not None
    if decoder.head_dim is not None and not latent:
        hidden = _round_width(heads * head * decoder.hidden_size / (decoder.num_heads * decoder.head_dim))
        yield NewValue(f"{_MODEL}.head_dim", head, _SMALLER)
    yield NewValue(f"{_MODEL}.hidden_size", hidden, _SMALLER)
    for name, value in _by_ratio(decoder, hidden / decoder.hidden_size, latent).items():
        yield NewValue(name, value, f"{_SMALLER}, in its ratio")


def _by_ratio(decoder: ModelConfig, scale: float, latent: bool) -> dict[str, int]:
    """Returns the widths of feed-forward layers, experts and latent attention in proportion to hidden_size."""
    moe = decoder.moe_config
    sizes = {f"{_MODEL}.intermediate_size": _round_width(decoder.ffn_size * scale)}
    if moe is not None and moe.moe_intermediate_size is not None:
        expert = sizes[f"{_EXPERTS}.moe_intermediate_size"] = _round_width(moe.moe_intermediate_size * scale)
    else:
        expert = sizes[f"{_MODEL}.intermediate_size"]
    if moe is not None and moe.moe_shared_expert_intermediate_size is not None:
        shared = moe.moe_shared_expert_intermediate_size / decoder.expert_size
        sizes[f"{_EXPERTS}.moe_shared_expert_intermediate_size"] = _round_width(expert * shared)
    if decoder.maps_embedding:
        sizes[f"{_MODEL}.embedding_size"] = _round_width(decoder.embedding_width * scale)
    if not latent:
        return sizes
    head = _HEAD_SIZE / max(decoder.v_head_dim, decoder.qk_nope_head_dim)
    scales = {"q_lora_rank": scale, "kv_lora_rank": scale, "qk_nope_head_dim": head, "qk_rope_head_dim": head,
              "v_head_dim": head}
    for name, factor in scales.items():
        width = getattr(decoder, name)
        if width:
            sizes[f"{_MODEL}.{name}"] = _round_width(width * factor)
    return sizes


def _expert_number(config: Config) -> Iterator[NewValue]:
    """Yields the smallest number of experts that leaves the router a choice, in as many groups as before."""
    moe = config.decoder.experts
    if moe is None:
        return
    groups = max(moe.n_group or 1, 1)
    reached = max(moe.topk_group or groups, 1)
    group_size = moe.expert_num // groups
    size = max(2, -(-3 * moe.num_experts_chosen // (2 * reached)))  # half as many again as a token goes to
    number = groups * min(group_size, size)
    if groups == 1:
        number = max(number, min(_EXPERT_NUM, moe.expert_num))
    number += number % 2 * groups * (number < moe.expert_num)  # so that two ranks can share them
    why = f"{_SMALLER}; a token goes to {moe.num_experts_chosen}, as before"
    if groups > 1:
        why += f", in {reached} of {groups} groups"
    yield NewValue(f"{_EXPERTS}.expert_num", number, why)


def _callbacks(config: Config, changes: Sequence[NewValue]) -> Iterator[NewValue]:
    """Yields the keys of callbacks that repeat keys of the model, with the new values."""
    for number, callback in enumerate(config.callbacks):
        for name, after in ((change.key.split(".")[-1], change.after) for change in changes):
            if isinstance(callback, MoEDropRate | TopkBiasBalance) and getattr(callback, name, None) is not None:
                yield NewValue(f"callbacks.{number}.{name}", after, "that of the model")


def _dtypes(config: Config, setup: Setup) -> Iterator[NewValue]:
    # The small copy runs in explicit mode.
    precision = precision_on_cpu(config, config.context.mode == 0 or setup.layout.degrees.shards_layers)
    parts = precision.compute, precision.norm, precision.softmax, precision.rotary
    for key, part in zip(PART_KEYS, parts, strict=True):
        if requested_dtype(config.decoder, config.amp_level, key) != "bfloat16" or part.dtype == "bfloat16":
            continue
        if getattr(config.decoder, key) is not None and config.amp_level in (None, "auto"):
            yield NewValue(f"{_MODEL}.{key}", "float32", "here a CPU computes it in float32")
    yield NewValue(f"{_MODEL}.param_init_type", "float32", "the dtype that parameters are kept in")
