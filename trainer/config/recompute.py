"""Which part of each layer is computed again in the backward pass: recompute_config and the older key recompute.

A block has two parts that can be computed again on their own: attention and feed-forward layer ("mlp"), each with its
norm and its residual connection. MindSpore Transformers' files name single operators by regular expressions; they are
taken as the sublayer that they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from trainer.config.checks.problem import ConfigError, problem
from trainer.config.layer_ranges import LayerError, layer_numbers, layer_text
from trainer.config.schema.root import Config
from trainer.config.schema.system import RecomputeConfig
from trainer.config.stages import counts_per_stage

Part: TypeAlias = Literal["", "attention", "mlp", "block"]
"""What of a layer is computed again: nothing, a sublayer, or all of it."""

SUBLAYERS = ("attention", "mlp")
_NAMES = {"attention": "the attention sublayer", "mlp": "the feed-forward sublayer", "block": "the whole block"}
_KEY = "recompute_config"
# Words of operators' names in MindSpore Transformers and Hugging Face.
_WORDS = {
    "attention": re.compile(
        r"(?<!post_)attention|attn|flash|softmax|rotary|\bw[qkvo]\b|\b[qkvo]_proj|linear_(q|k|v|qkv|proj)\b"
    ),
    "mlp": re.compile(
        r"feed_forward|mlp|ffn|silu|swiglu|activation|\bw[123]\b|(gate|up|down)_proj|linear_fc|post_attention"
    ),
}


class _Choice:
    """Layers of each sublayer, as one key says it, and the patterns that were read as one."""

    def __init__(self) -> None:
        self.layers: dict[str, set[int]] = {sublayer: set() for sublayer in SUBLAYERS}
        self.guessed: dict[str, list[str]] = {sublayer: [] for sublayer in SUBLAYERS}
        self.unknown: list[str] = []

    def add(self, pattern: str, layers: list[int]) -> None:
        """Adds the sublayers that a pattern means."""
        plain = pattern.strip().lower()
        if plain in SUBLAYERS:
            sublayers = [plain]
        else:
            sublayers = [name for name in SUBLAYERS if _WORDS[name].search(plain)]
        for sublayer in sublayers:
            self.layers[sublayer].update(layers)
            if plain != sublayer:
                self.guessed[sublayer].append(pattern)
        if not sublayers:
            self.unknown.append(pattern)


def recomputed_parts(config: Config) -> tuple[Part, ...]:
    """For each layer what of it is computed again; the configuration has passed `recompute_problems`."""
    settings = config.recompute_config
    count = config.decoder.num_layers
    whole = _layers(True if config.recompute else settings.recompute, config)
    selected = _sublayers(settings.select_recompute, config)
    excluded = _sublayers(settings.select_recompute_exclude, config, SUBLAYERS)
    parts: list[Part] = []
    for layer in range(count):
        sublayers = [
            sublayer
            for sublayer in SUBLAYERS
            if (layer in whole or layer in selected.layers[sublayer]) and layer not in excluded.layers[sublayer]
        ]
        parts.append("block" if len(sublayers) == 2 else sublayers[0] if sublayers else "")  # type: ignore[arg-type]
    return tuple(parts)


def comm_recompute_layers(config: Config) -> set[int]:
    """The layers whose gathering of tokens before a product is repeated: select_comm_recompute.

    MindSpore Transformers' patterns name the norms before the products, in all their spellings.
    """
    written = config.recompute_config.select_comm_recompute
    if isinstance(written, dict):
        return {layer for layers in written.values() for layer in _layers(layers, config)}
    names = isinstance(written, list) and any(isinstance(item, str) and not item[:1].isdigit() for item in written)
    return set(_layers(True if names else written, config))


def _layers(written: Any, config: Config) -> list[int]:
    """The layers that a key names. True: all; an integer: so many from the first; a string or a list: these.

    In a pipeline a list with a number for each stage counts layers of each, as in MindSpore Transformers.
    """
    num_layers = config.decoder.num_layers
    counted = counts_per_stage(config, written)
    if counted is not None:
        return counted
    if isinstance(written, bool) or written == []:
        if written:
            return list(range(num_layers))
        return []
    if isinstance(written, (str, list)):
        return layer_numbers(written, num_layers)
    if not 0 <= written <= num_layers:
        raise LayerError(f"an integer counts layers from the first, and the model has {num_layers}")
    return list(range(written))


def _sublayers(written: Any, config: Config, meant: tuple[str, ...] = ("mlp",)) -> _Choice:
    """What a key says about sublayers: patterns for all layers, or a mapping of patterns to layers.

    Without a pattern `meant` is: to select, the feed-forward sublayer, as MindSpore Transformers then takes
    feed_forward.mul and its activation.
    """
    choice = _Choice()
    everywhere = list(range(config.decoder.num_layers))
    if isinstance(written, str):
        written = [written]
    named = isinstance(written, list) and any(isinstance(item, str) and not item[:1].isdigit() for item in written)
    if isinstance(written, dict):
        for pattern, layers in written.items():
            choice.add(pattern, _layers(layers, config))
    elif named:
        for pattern in written:
            if not isinstance(pattern, str):
                raise LayerError(f"{pattern!r} is no name of a part: write attention or mlp")
            choice.add(pattern, everywhere)
    elif written:
        for sublayer in meant:
            choice.add(sublayer, _layers(written, config))
    if choice.unknown and not any(choice.layers.values()):
        raise LayerError(f"{choice.unknown[0]!r} belongs to no part of a block: write attention or mlp")
    return choice


def recompute_problems(config: Config) -> Iterator[ConfigError]:
    """Layers and parts that the model does not have."""
    readers = {"recompute": _layers, "select_recompute": _sublayers, "select_recompute_exclude": _sublayers,
               "select_comm_recompute": lambda written, config: comm_recompute_layers(config)}  # fmt: skip
    for name, read in readers.items():
        written = getattr(config.recompute_config, name)
        try:
            read(written, config)
        except LayerError as error:
            fix = RecomputeConfig.model_fields[name].description.split(":", 1)[1].strip(" .")
            yield problem(config, f"{_KEY}.{name}", str(error), f"{name}: {fix}")


def recompute_notes(config: Config) -> Iterator[str]:
    """What was taken for a file's regular expressions, and what a list of numbers means."""
    settings = config.recompute_config
    if not config.trains:
        return
    written = settings.recompute
    numbers = isinstance(written, list) and bool(written) and all(isinstance(layer, int) for layer in written)
    if numbers and counts_per_stage(config, written) is None:
        layers = layer_text(set(_layers(settings.recompute, config)))
        yield f"{_KEY}.recompute: {layers}; in MindSpore Transformers a list counts layers of pipeline stages"
    if settings.select_recompute is True:
        yield f"{_KEY}.select_recompute True: {_NAMES['mlp']} of every block, as in MindSpore Transformers"
    for name in ("select_recompute", "select_recompute_exclude"):
        choice = _sublayers(getattr(settings, name), config)
        verb = "computed again"
        if name == "select_recompute_exclude":
            verb = "kept"
        for sublayer, patterns in choice.guessed.items():
            if patterns and choice.layers[sublayer]:
                layers = layer_text(choice.layers[sublayer])
                yield (f"{_KEY}.{name}: {_NAMES[sublayer]} of {layers} is {verb}, for"
                       f" {', '.join(dict.fromkeys(patterns))}: single operators are not told apart")
        if choice.unknown:
            yield f"{_KEY}.{name}: {', '.join(choice.unknown)}: no part of a block here, changes nothing"


def recompute_text(parts: tuple[Part, ...]) -> str:
    """What is computed again, for `plan`; empty for nothing."""
    phrases = []
    for part, name in (("block", "blocks"), *((sublayer, _NAMES[sublayer]) for sublayer in SUBLAYERS)):
        layers = [layer for layer, found in enumerate(parts) if found == part]
        if layers:
            phrases.append(f"{name} of {layer_text(layers)}")
    if phrases:
        return f"{'; '.join(phrases)}: computed again in the backward pass"
    return ""
