"""Activation recomputation: which part of each layer recompute_config, or the older key recompute, selects.

A block has two parts that can be recomputed alone: attention and feed-forward layer ("mlp"), each with its norm and its
residual connection. MindSpore Transformers' files name single operators by regular expressions; each stands for the
sublayer that the operator belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from trainer.config.checks.problem import ConfigError, problem
from trainer.config.layer_ranges import LayerError, layer_numbers, layer_text
from trainer.config.schema.root import Config
from trainer.config.schema.system import RecomputeConfig
from trainer.config.stages import counts_per_stage

Part: TypeAlias = Literal["", "attention", "mlp", "block"]
"""The recomputed part of a layer: nothing, a sublayer, or the block."""

SUBLAYERS = ("attention", "mlp")
_PARTS: dict[tuple[str, ...], Part] = {(): "", ("attention",): "attention", ("mlp",): "mlp", SUBLAYERS: "block"}
"""The recomputed sublayers -> the part."""
_NAMES = {"attention": "the attention sublayer", "mlp": "the feed-forward sublayer"}
_KEY = "recompute_config"
# Words in the names of operators of MindSpore Transformers and Hugging Face.
_WORDS = {
    "attention": re.compile(
        r"(?<!post_)attention|attn|flash|softmax|rotary|\bw[qkvo]\b|\b[qkvo]_proj|linear_(q|k|v|qkv|proj)\b"
    ),
    "mlp": re.compile(
        r"feed_forward|mlp|ffn|silu|swiglu|activation|\bw[123]\b|(gate|up|down)_proj|linear_fc|post_attention"
    ),
}


class _Choice:
    """The layers that a key selects for each sublayer, and the patterns that stand for a sublayer."""

    def __init__(self) -> None:
        self.layers: dict[str, set[int]] = {sublayer: set() for sublayer in SUBLAYERS}
        self.guessed: dict[str, list[str]] = {sublayer: [] for sublayer in SUBLAYERS}
        self.unknown: list[str] = []

    def add(self, pattern: str, layers: list[int]) -> None:
        """Adds the sublayers that a pattern stands for."""
        name = pattern.strip().lower()
        sublayers = [name]
        if name not in SUBLAYERS:
            sublayers = [sublayer for sublayer in SUBLAYERS if _WORDS[sublayer].search(name)]
        for sublayer in sublayers:
            self.layers[sublayer].update(layers)
            if name != sublayer:
                self.guessed[sublayer].append(pattern)
        if not sublayers:
            self.unknown.append(pattern)


def recomputed_parts(config: Config) -> tuple[Part, ...]:
    """Returns the recomputed part of each layer and MTP module; `recompute_problems` must have found no error.

    MTP modules, which are layers from num_layers on, recompute what the last layer does unless a key selects them.
    """
    settings = config.recompute_config
    blocks = _layers(config.recompute or settings.recompute, config)
    selected = _sublayers(settings.select_recompute, config)
    excluded = _sublayers(settings.select_recompute_exclude, config, SUBLAYERS)
    layers = config.decoder.num_layers
    chosen = set(blocks).union(*selected.layers.values(), *excluded.layers.values())
    parts: list[Part] = []
    for layer in config.decoder.layers:
        if layer >= layers > max(chosen, default=0):
            parts.append(parts[layers - 1])
            continue
        asked = [sublayer for sublayer in SUBLAYERS if layer in blocks or layer in selected.layers[sublayer]]
        parts.append(_PARTS[tuple(sublayer for sublayer in asked if layer not in excluded.layers[sublayer])])
    return tuple(parts)


def comm_recompute_layers(config: Config) -> set[int]:
    """Returns the layers of select_comm_recompute: their backward pass gathers the tokens before a product again.

    MindSpore Transformers' patterns name the norms before the products, in several spellings.
    """
    written = config.recompute_config.select_comm_recompute
    if isinstance(written, dict):
        return {layer for layers in written.values() for layer in _layers(layers, config)}
    return set(_layers(_has_names(written) or written, config))


def _has_names(written: Any) -> bool:
    """Returns whether a list has names of sublayers or operators, not only layers."""
    return isinstance(written, list) and any(isinstance(item, str) and not item[:1].isdigit() for item in written)


def _layers(written: Any, config: Config) -> list[int]:
    """Returns the layers of a value: all for True, the first N for an integer N, or those of a string or a list.

    MTP modules are layers from num_layers on. In a pipeline a list with a number for each stage counts layers of each
    stage, as in MindSpore Transformers.

    Raises:
        LayerError: The value names layers that the model does not have.
    """
    num_layers = config.decoder.num_layers
    layers = config.decoder.layers
    counted = counts_per_stage(config, written)
    if counted is not None:
        return counted
    if written is True:
        return list(layers)
    if written is False or written == []:
        return []
    if isinstance(written, (str, list)):
        return layer_numbers(written, num_layers, len(layers) - num_layers)
    if not 0 <= written <= num_layers:
        raise LayerError(f"an integer counts layers from the first, and the model has {num_layers}")
    return list(range(written))


def _sublayers(written: Any, config: Config, default: tuple[str, ...] = ("mlp",)) -> _Choice:
    """Reads a key about sublayers: names for all layers, or a mapping of names to layers.

    A value without names is about the `default` sublayers. To select it is the feed-forward sublayer: MindSpore
    Transformers then recomputes feed_forward.mul and its activation.

    Raises:
        LayerError: A name or a layer is not part of the model.
    """
    choice = _Choice()
    if isinstance(written, str):
        written = [written]
    if isinstance(written, dict):
        for pattern, layers in written.items():
            choice.add(pattern, _layers(layers, config))
    elif _has_names(written):
        for pattern in written:
            if not isinstance(pattern, str):
                raise LayerError(f"{pattern!r} is not the name of a sublayer: write attention or mlp")
            choice.add(pattern, _layers(True, config))
    elif written:
        for sublayer in default:
            choice.add(sublayer, _layers(written, config))
    if choice.unknown and not any(choice.layers.values()):
        raise LayerError(f"{choice.unknown[0]!r} matches no sublayer of a block: write attention or mlp")
    return choice


def recompute_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors for layers and sublayers that the model does not have."""
    readers: dict[str, Callable[[Any, Config], object]] = {
        "recompute": _layers,
        "select_recompute": _sublayers,
        "select_recompute_exclude": _sublayers,
        "select_comm_recompute": lambda written, config: comm_recompute_layers(config),
    }
    for name, read in readers.items():
        written = getattr(config.recompute_config, name)
        try:
            read(written, config)
        except LayerError as error:
            description = RecomputeConfig.model_fields[name].description or ""
            fix = f"{name}: {description.split(':', 1)[1].strip(' .')}"
            if config.source.source_places:  # the other schema has other forms
                fix = "write numbers and ranges of layers of the model, as [0-3]"
            yield problem(config, f"{_KEY}.{name}", str(error), fix)


def recompute_notes(config: Config) -> Iterator[str]:
    """Yields notes about the meaning of patterns and of lists of numbers."""
    settings = config.recompute_config
    if not config.trains:
        return
    written = settings.recompute
    is_number_list = isinstance(written, list) and bool(written) and all(isinstance(layer, int) for layer in written)
    if is_number_list and counts_per_stage(config, written) is None:
        layers = layer_text(set(_layers(written, config)))
        yield f"{_KEY}.recompute: {layers}; in MindSpore Transformers a list counts layers of pipeline stages"
    if settings.select_recompute is True:
        yield f"{_KEY}.select_recompute true: {_NAMES['mlp']} of every block, as in MindSpore Transformers"
    for name, verb in (("select_recompute", "recomputed"), ("select_recompute_exclude", "kept")):
        choice = _sublayers(getattr(settings, name), config)
        for sublayer, patterns in choice.guessed.items():
            if patterns and choice.layers[sublayer]:
                layers = layer_text(choice.layers[sublayer])
                yield (f"{_KEY}.{name}: {_NAMES[sublayer]} of {layers} is {verb}, for"
                       f" {', '.join(dict.fromkeys(patterns))}: single operators cannot be selected")
        if choice.unknown:
            yield f"{_KEY}.{name}: {', '.join(choice.unknown)}: no effect, no sublayer matches"


def recompute_text(parts: tuple[Part, ...]) -> str:
    """Returns the recomputed parts as text; empty if nothing is recomputed."""
    phrases = []
    for part, name in {"block": "blocks", **_NAMES}.items():
        layers = [layer for layer, recomputed in enumerate(parts) if recomputed == part]
        if layers:
            phrases.append(f"{name} of {layer_text(layers)}")
    return "; ".join(phrases)
