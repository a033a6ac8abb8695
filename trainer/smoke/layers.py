"""The layers that a smoke run keeps, and the keys about single layers: experts, recomputation, freezing, LoRA.

Two layers are of one kind if they compute the same and are trained in the same way. A layer of each kind is kept, and a
second one of the most frequent kind, in their order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from trainer.config import Config
from trainer.config.recompute import SUBLAYERS, comm_recompute_layers, recomputed_parts
from trainer.config.schema.freeze import FreezeConfig
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.adapters import module_names, projections, target_pattern
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import layer_prefix
from trainer.models.spec.shapes import all_shapes
from trainer.optim.freeze import frozen_names
from trainer.smoke.changes import NewValue

_MODEL = "model.model_config"
_EXPERTS = f"{_MODEL}.moe_config"
_REMAIN = "the layers that remain"
_LORA_RANK = 4
_NUMBERED = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layers_to_keep(config: Config, fewest: int = 1) -> list[int]:
    """Returns the layers that the small copy keeps, in order, without multi-token prediction modules.

    Args:
        fewest: The smallest number of layers, so that each stage of a pipeline has some.
    """
    kinds = _kinds(config)
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    frequent = Counter(kinds).most_common(1)[0][0]
    again = [layer for layer, kind in enumerate(kinds) if kind == frequent and layer not in first]
    kept = {*first, *again[:1]}
    more = [layer for layer in (*again, *range(len(kinds))) if layer not in kept]
    return sorted({*kept, *list(dict.fromkeys(more))[: max(0, fewest - len(kept))]})


def _kinds(config: Config) -> list[Any]:
    spec = model_spec(config.decoder)
    parts = recomputed_parts(config)
    below: dict[int, list[str]] = {}
    for name in frozen_names(config):
        match = _NUMBERED.search(name)
        if match:
            below.setdefault(int(match[1]), []).append(name[match.end() :])
    return [
        (spec.layers[layer], layer % spec.attention_group > 0, parts[layer], tuple(sorted(below.get(layer, ()))))
        for layer in range(spec.num_layers)
    ]


def layer_changes(config: Config, kept: Sequence[int], stages: int = 1) -> Iterator[NewValue]:
    """Yields the changes of the keys about layers, for a pipeline of `stages` stages."""
    decoder = config.decoder
    why = "a layer of each kind, and a second one of the most frequent kind"
    yield NewValue(f"{_MODEL}.num_layers", len(kept), why)
    yield from _adapters(config, kept)
    for name in ("window_size", "window_attn_skip_freq"):
        yield NewValue(f"{_MODEL}.{name}", None, "sliding_window and layer_types say it")
    if len(kept) == decoder.num_layers:
        return
    if decoder.layer_types:
        yield NewValue(f"{_MODEL}.layer_types", [decoder.layer_types[layer] for layer in kept], _REMAIN)
    elif decoder.use_sliding_window and decoder.max_window_layers:
        below = sum(layer < decoder.max_window_layers for layer in kept)
        yield NewValue(f"{_MODEL}.max_window_layers", below, _REMAIN)
    if decoder.unrotated_layers and decoder.position_embedding_type != "none":
        unrotated = [new for new, old in enumerate(kept) if not decoder.has_rotary(old)]
        yield NewValue(f"{_MODEL}.nope_layers", unrotated, _REMAIN)
        yield NewValue(f"{_MODEL}.nope_layer_interval", None, "nope_layers says it")
    if decoder.layers_group > 1:  # so that one layer shares its attention with the next, and another does not
        yield NewValue(f"{_MODEL}.layers_group", 2, _REMAIN)
    yield from _expert_layers(config, kept)
    yield from _recompute(config, kept, stages)
    yield from _freeze(config, kept)


def _expert_layers(config: Config, kept: Sequence[int]) -> Iterator[NewValue]:
    moe = config.decoder.experts
    if moe is None:
        return
    if moe.first_k_dense_replace is not None:
        dense = sum(layer < moe.first_k_dense_replace for layer in kept)
        yield NewValue(f"{_EXPERTS}.first_k_dense_replace", dense, _REMAIN)
    if moe.moe_layer_end_index >= 0:
        last = sum(layer <= moe.moe_layer_end_index for layer in kept) - 1
        yield NewValue(f"{_EXPERTS}.moe_layer_end_index", last, _REMAIN)
    if moe.moe_layer_freq != 1:
        every = [int(config.decoder.is_moe_layer(layer)) for layer in kept]
        yield NewValue(f"{_EXPERTS}.moe_layer_freq", every, _REMAIN)
        yield NewValue(f"{_EXPERTS}.decoder_sparse_step", 1, "moe_layer_freq says it")
        yield NewValue(f"{_EXPERTS}.mlp_only_layers", None, "moe_layer_freq says it")


def _recompute(config: Config, kept: Sequence[int], stages: int) -> Iterator[NewValue]:
    """Yields recomputation by layer with the new numbers of the layers; True and False are kept."""
    settings = config.recompute_config
    places = [*kept, *model_spec(config.decoder).module_layers]

    def renumbered(layers: Collection[int]) -> list[int] | list[str]:
        """Returns the new numbers of the layers that are left."""
        numbers = [new for new, old in enumerate(places) if old in layers]
        if stages == 1:
            return numbers
        return [str(layer) for layer in numbers]  # in a pipeline numbers would count layers of each stage

    if not isinstance(settings.select_comm_recompute, bool):
        again = renumbered(comm_recompute_layers(config)) or False
        yield NewValue("recompute_config.select_comm_recompute", again, _REMAIN)
    names = ("recompute", "select_recompute", "select_recompute_exclude")
    if all(isinstance(getattr(settings, name), bool) for name in names):
        return
    parts = recomputed_parts(config)
    layers_of = {
        part: renumbered([layer for layer in places if parts[layer] == part]) for part in ("block", *SUBLAYERS)
    }
    selected = {part: layers_of[part] for part in SUBLAYERS if layers_of[part]}
    for name, value in zip(names, (layers_of["block"] or False, selected or False, False), strict=True):
        yield NewValue(f"recompute_config.{name}", value, _REMAIN)


def _freeze(config: Config, kept: Sequence[int]) -> Iterator[NewValue]:
    """Yields patterns of frozen weights with the new numbers of the layers."""
    settings = config.freeze
    if settings == FreezeConfig.model_construct() or not re.search(r"\d", str(settings.model_dump())):
        return
    frozen = frozen_names(config)
    include = []
    places = [*kept, *model_spec(config.decoder).module_layers]
    shapes = all_shapes(config.network)
    include += sorted(name for name in frozen if not _NUMBERED.search(name))
    for new, old in enumerate(places):
        prefix = layer_prefix(old)
        layer_names = [name for name in shapes if name.startswith(prefix)]
        names = [name.removeprefix(prefix) for name in layer_names if name in frozen]
        if len(names) == len(layer_names):
            names = ["*"]
        include += [f"{layer_prefix(new)}{name}" for name in names]
    for name, value in {"include": include, "exclude": [], "embeddings": False, "layers": None}.items():
        yield NewValue(f"freeze.{name}", value, f"the same weights of {_REMAIN}")


def _adapters(config: Config, kept: Sequence[int]) -> Iterator[NewValue]:
    """Yields a smaller rank, and the matrices of single layers as those of the layers that remain."""
    key = f"{_MODEL}.pet_config"
    adapters = config.decoder.pet_config
    if adapters is None:
        return
    if adapters.lora_rank > _LORA_RANK:
        yield NewValue(f"{key}.lora_rank", _LORA_RANK, "small enough for this machine")
        scaled = adapters.scale * adapters.divisor(_LORA_RANK)
        yield NewValue(f"{key}.lora_alpha", scaled, "the same factor on the adapters")
    for pattern_key in ("rank_pattern", "alpha_pattern"):
        if getattr(adapters, pattern_key):
            yield NewValue(f"{key}.{pattern_key}", {}, f"all adapters of {_REMAIN} have one rank")
    targets = _targets(config.decoder, [*kept, *model_spec(config.decoder).module_layers])
    small = config.decoder.model_copy(update={"num_layers": len(kept)})
    if targets == _targets(small, range(len(targets))):
        return
    pattern = target_pattern(dict(enumerate(targets)))
    for name, value in {"target_modules": pattern, "exclude_layers": [], "match": "full"}.items():
        yield NewValue(f"{key}.{name}", value, f"the same of {_REMAIN}")


def _targets(decoder: ModelConfig, layers: Sequence[int]) -> list[list[str]]:
    """Returns the adapted matrices of each layer; those of a dense layer are included in an MoE layer."""
    adapters = decoder.pet_config
    assert adapters is not None
    names = projections(decoder)
    return [[name for name in names if adapters.adapts(module_names(decoder, layer, name))] for layer in layers]
