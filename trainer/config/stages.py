"""Which layers each stage of a pipeline has: pipeline_stage, pp_interleave_num and offset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.config.checks.problem import ConfigError, problem
from trainer.config.schema.root import Config

_KEY = "model.model_config.offset"


def chunk_sizes(config: Config) -> list[list[int]]:
    """Layers of each part of each stage, [parts][stages]: the model's order is all stages of part 0, then of part 1.

    Each has an equal share plus its `offset`. Without offsets the last ones take what does not divide evenly.
    """
    settings = config.decoder
    stages = config.parallel_config.pipeline_stage
    parts = settings.pp_interleave_num
    written = settings.offset
    share, rest = divmod(settings.num_layers, stages * parts)
    if isinstance(written, int):
        sizes = [share + written + (number >= stages * parts - rest) for number in range(stages * parts)]
        return [sizes[number * stages : (number + 1) * stages] for number in range(parts)]
    return [[share + more for more in one] for one in _rows(written)]


def chunk_layers(config: Config) -> list[list[list[int]]]:
    """The layers of each part of each stage, [stages][parts]; the configuration has passed `stage_problems`."""
    found: list[list[list[int]]] = [[] for _ in range(config.parallel_config.pipeline_stage)]
    first = 0
    for sizes in chunk_sizes(config):
        for parts, size in zip(found, sizes, strict=True):
            parts.append(list(range(first, first + size)))
            first += size
    return found


def stage_layers(config: Config) -> list[list[int]]:
    """The layers of each stage."""
    return [[layer for part in parts for layer in part] for parts in chunk_layers(config)]


def counts_per_stage(config: Config, written: Any) -> list[int] | None:
    """The layers that a list of counts means: so many from the first of each part of each stage; None for no such list.

    Only a job with a pipeline has such lists; elsewhere a list numbers layers.
    """
    stages = config.parallel_config.pipeline_stage
    parts = config.decoder.pp_interleave_num
    if stages == 1 or not config.use_parallel or not isinstance(written, list) or not written:
        return None
    rows = _rows(written)
    counts = all(len(row) == stages and all(type(count) is int and count >= 0 for count in row) for row in rows)
    if not counts or len(rows) not in (1, parts):
        return None
    chosen: list[int] = []
    first = 0
    for number, sizes in enumerate(chunk_sizes(config)):
        for stage, size in enumerate(sizes):
            if len(rows) == parts:
                count = rows[number][stage]
            else:
                count = rows[0][stage] * (number == 0)
            chosen += range(first, first + min(count, size))
            first += size
    return chosen


def stage_problems(config: Config) -> Iterator[ConfigError]:
    """Offsets that do not fit the stages, or leave layers over."""
    settings = config.decoder
    stages = config.parallel_config.pipeline_stage
    written = settings.offset
    parts = settings.pp_interleave_num
    if stages == 1 or isinstance(written, int) or not config.use_parallel:
        return
    rows = _rows(written)
    if len(rows) != parts or any(len(row) != stages for row in rows):
        if parts > 1:
            shape = f"{parts} lists of {stages} numbers"
        else:
            shape = f"a list of {stages} numbers"
        yield problem(config, _KEY, f"{stages} stages of {parts} parts need {shape}", "write one for each stage, or 0")
        return
    sizes = [size for row in chunk_sizes(config) for size in row]
    if min(sizes) < 0 or sum(sizes) != settings.num_layers:
        rule = f"the stages then have {sum(sizes)} layers, and the model has {settings.num_layers}"
        yield problem(config, _KEY, rule, f"its sum must be {settings.num_layers % (stages * parts)}")


def _rows(written: Any) -> list[list[int]]:
    if written and isinstance(written[0], list):
        return written
    return [written]
