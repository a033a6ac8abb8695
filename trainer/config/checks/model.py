"""Rules about the sizes of the decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from trainer.config.checks.adapter import adapter_problems
from trainer.config.checks.problem import Problem
from trainer.config.schema.root import Config

_KEY = "model.model_config"


def model_problems(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    """Sizes that do not divide each other, and options that contradict each other."""
    yield from _heads(config, report)
    yield from _positions(config, report)
    yield from _windows(config, report)
    yield from adapter_problems(config, report)
    decoder = config.decoder
    untied = decoder.untie_embeddings_and_output_weights
    if untied is not None and untied == decoder.tie_word_embeddings:
        yield report(
            f"{_KEY}.untie_embeddings_and_output_weights",
            untied,
            f"contradicts tie_word_embeddings = {decoder.tie_word_embeddings}"
            f" ({config.source.where(f'{_KEY}.tie_word_embeddings')})",
            "remove one of the two",
        )


def _heads(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    decoder = config.decoder
    heads, width = decoder.num_heads, decoder.hidden_size
    if decoder.head_dim is None and width % heads:
        yield report(
            f"{_KEY}.num_heads",
            heads,
            f"must divide hidden_size ({width})",
            f"use {_divisor(width, heads)} heads, or set head_dim",
        )
    elif decoder.head_size % 2:
        key = "num_heads" if decoder.head_dim is None else "head_dim"
        yield report(
            f"{_KEY}.{key}",
            getattr(decoder, key),
            f"a head has {decoder.head_size} numbers, and rotary positions turn pairs of them: the width must be even",
            "choose hidden_size and num_heads, or head_dim, so that a head is even",
        )
    elif decoder.rotary_size % 2 or not decoder.rotary_size:
        turned = decoder.rotary_size
        even = max(2 * round(turned / 2), 2)
        part = math.ceil(even / decoder.head_size * 1e6) / 1e6  # rounded up: the product is cut to a whole number
        yield report(
            f"{_KEY}.rotary_pct",
            decoder.rotary_pct,
            f"rotates {turned} of a head's {decoder.head_size} numbers, and rotary positions turn pairs of them",
            f"write {part:g} for {even} of them",
        )
    if heads % decoder.kv_heads:
        yield report(
            f"{_KEY}.n_kv_heads",
            decoder.kv_heads,
            f"must divide num_heads ({heads})",
            f"use {_divisor(heads, decoder.kv_heads)}, or leave it out for {heads}",
        )


def _windows(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    """Attention that does not see all earlier tokens: Hugging Face's files name it even where it is off."""
    decoder = config.decoder
    if decoder.sliding_window is not None and not config.source.where(f"{_KEY}.use_sliding_window"):
        yield report(
            f"{_KEY}.sliding_window",
            decoder.sliding_window,
            "not yet supported: attention sees all earlier tokens",
            "leave it out, or write use_sliding_window: False where the model does not use it",
        )
    others = sorted(set(decoder.layer_types or ()) - {"full_attention"})
    if others:
        yield report(
            f"{_KEY}.layer_types",
            others,
            "not yet supported: every layer has full_attention",
            "leave it out, or use a model of full_attention layers",
        )


def _divisor(number: int, near: int) -> int:
    """The divisor of ``number`` that is nearest to ``near``."""
    return min((part for part in range(1, number + 1) if number % part == 0), key=lambda part: abs(part - near))


def _positions(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    scaling, kind = config.decoder.rope_scaling, config.decoder.position_embedding_type
    if kind in ("yarn", "llama3") and (scaling is None or scaling.rope_type != kind):
        yield report(
            f"{_KEY}.position_embedding_type",
            kind,
            f"positions are not scaled by {kind}: rope_scaling is {'absent' if scaling is None else scaling.rope_type}",
            f"write rope_scaling with rope_type: {kind}, or rope here",
        )
    if scaling is None:
        return
    if scaling.rope_type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield report(
            f"{_KEY}.rope_scaling.low_freq_factor",
            scaling.low_freq_factor,
            f"must be below high_freq_factor ({scaling.high_freq_factor})",
            "use 1 and 4, as Llama 3 does",
        )
    if scaling.rope_type == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        yield report(
            f"{_KEY}.rope_scaling.beta_slow",
            scaling.beta_slow,
            f"must be below beta_fast ({scaling.beta_fast})",
            "use 1 and 32, as yarn does",
        )
