"""Determines which weights are frozen. Pure Python: `plan` counts them, and errors appear before MindSpore loads.

Frozen weights have no gradient, no optimizer state and no weight decay, and the gradient norm leaves them out. Training
does not change a byte of them. The same holds for the expert bias of a frozen router.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.layer_ranges import LayerError, layer_numbers, layer_text
from trainer.config.patterns import wider_pattern
from trainer.config.schema.freeze import FreezeConfig
from trainer.errors import UserError
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import EMBEDDING, HEAD, SCORE, is_buffer, layer_prefix
from trainer.models.spec.shapes import all_shapes, balanced_layers, parameter_shapes

if TYPE_CHECKING:
    from trainer.config import Config

_SHORT_FORM = re.compile(r"\s*layers\s*(?::\s*|=\s*|\s)(.+)")
_ONE_EXPERT = re.compile(r"(.*\bexperts)\.(?:\d+|\*|\[[^]]*\])(\..*|\*?)")
_PLAIN_LAYERS = re.compile(r"[\d\s,-]+")


# Parts of parameter names: MindSpore Transformers' name -> Hugging Face's, which this trainer uses.
_OTHER_WORDS = {
    "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "linear_proj": "o_proj", "linear_q": "q_proj",
    "linear_k": "k_proj", "linear_v": "v_proj", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
    "linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj", "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj", "kv_layernorm": "kv_a_layernorm", "q_layernorm": "q_a_layernorm",
    "self_attention": "self_attn", "linear_fc2": "down_proj", "attention": "self_attn", "feed_forward": "mlp",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "norm_out": "norm", "tok_embeddings": "embed_tokens",
    "word_embeddings": "embed_tokens", "embedding_weight": "weight", "output": "lm_head", "output_layer": "lm_head",
}  # fmt: skip


class _FreezeEntry(NamedTuple):
    """One entry of include or exclude."""

    key: str  # dotted, for messages
    value: Any  # as the file has it, for messages
    kind: str  # pattern, embeddings, layers or unknown
    pattern_or_layers: Any


def frozen_names(config: Config) -> frozenset[str]:
    """Returns the names of the frozen weights; with adapters these include the base model.

    Raises:
        UserError: A pattern matches nothing, a layer does not exist, or nothing would be left to train.
    """
    shapes = all_shapes(config.network)
    settings = config.freeze
    items = list(_items("freeze.include", settings.include))
    if settings.embeddings:
        items.append(_FreezeEntry("freeze.embeddings", True, "embeddings", None))
    if settings.layers is not None:
        items.append(_FreezeEntry("freeze.layers", settings.layers, "layers", settings.layers))
    included = _matches(config, items, shapes)
    excluded = _matches(config, _items("freeze.exclude", settings.exclude), shapes)
    if excluded and not included:
        rule = "exclude takes weights out of include, and there is no include"
        raise _error(config, "freeze.exclude", settings.exclude, rule, "write include: ['*'] to freeze all but these")
    frozen = included - excluded
    if config.has_adapters:
        frozen |= set(parameter_shapes(config.decoder))
    if frozen >= {name for name in shapes if not is_buffer(name)}:
        rule = "every weight is frozen, which leaves nothing to train"
        fix = "freeze less, or write the weights to train in freeze.exclude"
        raise _error(config, "freeze.include", settings.include, rule, fix)
    return frozenset(frozen)


def trained_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the trainable weights by name, in forward order."""
    frozen = frozen_names(config)
    shapes = all_shapes(config.network)
    return {name: shape for name, shape in shapes.items() if name not in frozen and not is_buffer(name)}


def freeze_notes(config: Config) -> Iterator[str]:
    """Yields notes on effects of freezing that a reader of the file may not expect."""
    if config.trains and config.freeze != FreezeConfig.model_construct():
        shapes = all_shapes(config.network)
        frozen = frozen_names(config)
        total = sum(math.prod(shape) for shape in shapes.values())
        num_frozen = sum(math.prod(shapes[name]) for name in frozen)
        yield f"freeze: {num_frozen:,} of {total:,} weights are frozen"
        if model_spec(config.decoder).tied and EMBEDDING in frozen:
            yield "freeze: the output head is the embedding (tie_word_embeddings), so it is frozen with it"
    moe = config.decoder.experts
    if config.trains and moe is not None and moe.balance_via_topk_bias and moe.topk_bias_update_rate:
        if unbalanced := set(config.decoder.moe_layers) - set(balanced_layers(config.decoder, frozen_names(config))):
            layers = layer_text(unbalanced)
            yield f"moe_config.balance_via_topk_bias: the expert bias of frozen routers stays fixed ({layers})"


def _matches(config: Config, items: Iterable[_FreezeEntry], shapes: Mapping[str, Any]) -> set[str]:
    return {name for item in items for name in _names(config, item, shapes)}


def _items(key: str, written: Any) -> Iterator[_FreezeEntry]:
    """Yields the entries of include or exclude, in each form that a value may have."""
    if isinstance(written, list):
        for number, entry in enumerate(written):
            for item in _items(f"{key}.{number}", entry):
                yield item._replace(key=f"{key}.{number}")
    elif isinstance(written, dict):
        for name, value in written.items():
            if name == "layers":
                yield _FreezeEntry(key, written, "layers", value)
            elif name == "embeddings" and value in (True, None):
                yield _FreezeEntry(key, written, "embeddings", None)
            elif not (name == "embeddings" and value is False):
                yield _FreezeEntry(key, written, "unknown", name)
    elif written == "embeddings":
        yield _FreezeEntry(key, written, "embeddings", None)
    elif isinstance(written, str) and (short_form := _SHORT_FORM.fullmatch(written)):
        yield _FreezeEntry(key, written, "layers", short_form[1].strip("[] "))
    else:
        yield _FreezeEntry(key, written, "pattern", written)


def _names(config: Config, item: _FreezeEntry, shapes: Mapping[str, Any]) -> list[str]:
    """Returns the names of the weights that an entry selects."""
    if item.kind in ("embeddings", "layers") and not config.is_decoder:
        rule = "this short form works for decoders only"
        fix = f"write a pattern, for example '{next(iter(shapes))}'"
        raise _error(config, item.key, item.value, rule, fix)
    if item.kind == "embeddings":
        return [EMBEDDING]
    if item.kind == "layers":
        try:
            spec = model_spec(config.decoder)
            layers = layer_numbers(item.pattern_or_layers, spec.num_layers, spec.mtp_modules)
        except LayerError as error:
            raise _error(config, item.key, item.value, str(error), "write for example layers: 0") from None
        prefixes = tuple(layer_prefix(layer) for layer in layers)
        return [name for name in shapes if name.startswith(prefixes)]
    if item.kind == "unknown":
        rule = f"{item.pattern_or_layers!r} is not a short form; the short forms are layers and embeddings"
        if item.pattern_or_layers == "embeddings":
            rule = "embeddings is true or false"
        raise _error(config, item.key, item.value, rule, "write a pattern in quotes, embeddings, or layers: 0-3")
    pattern = item.pattern_or_layers
    names = [name for name in shapes if fnmatchcase(name, pattern)]
    if not names:
        raise _error(config, item.key, item.value, "it matches no weight of the model", _nearest(pattern, shapes))
    return names


def _nearest(pattern: str, shapes: Mapping[str, Any]) -> str:
    """Suggests a correction of a pattern that matches nothing."""
    if pattern == HEAD:
        if SCORE in shapes:
            return f"the head of a reward model is {SCORE}"
        return f"the model has no separate head (tie_word_embeddings): write {EMBEDDING}"
    stacked = _ONE_EXPERT.fullmatch(pattern)
    if stacked and (together := stacked[1] + (stacked[2] or ".*")) and any(fnmatchcase(n, together) for n in shapes):
        return f"the experts of a layer are one stacked weight, all trained or all frozen: write '{together}'"
    ours = re.sub(r"\w+", lambda word: _OTHER_WORDS.get(word[0], word[0]), pattern)
    if ours != pattern:
        if any(fnmatchcase(name, ours) for name in shapes):
            return f"the names are Hugging Face's: write '{ours}'"
        return _nearest(ours, shapes)
    if _PLAIN_LAYERS.fullmatch(pattern):
        return f"write layers: {pattern.strip()}"
    if wider := wider_pattern(pattern, shapes):
        return f"a pattern must match the whole name: write '{wider}'"
    near = difflib.get_close_matches(pattern.strip("*."), ["embeddings", *shapes], n=3, cutoff=0.0)
    return f"the nearest names are {', '.join(near)}"


def _error(config: Config, key: str, value: Any, rule: str, fix: str) -> UserError:
    parts = key.split(".")
    # The line of the entry; if it is unknown, the line of the list, then of the section.
    locations = (config.source.where(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    return UserError(rule, where=next(filter(None, locations), ""), key=key, value=value, fix=fix)
