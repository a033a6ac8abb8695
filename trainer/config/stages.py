"""Divides the layers into pipeline stages and model chunks: pipeline_stage, pp_interleave_num and offset."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from trainer.config.checks.problem import ConfigError, problem
from trainer.config.schema.root import Config
from trainer.parallel.schedule import (
    SEQUENCE_PIPELINES,
    Schedule,
    gpipe,
    one_forward_one_backward,
    sequence_pipeline,
    turn_size,
)

_KEY = "model.model_config.offset"


def chunk_sizes(config: Config) -> list[list[int]]:
    """Returns the numbers of layers, [chunks][stages]: in the model, chunk 0 of all stages comes first, then chunk 1.

    Each has an equal share plus its `offset`. Without offsets the last ones get the remainder.
    """
    settings = config.decoder
    stages = config.parallel_config.pipeline_stage
    chunks = settings.pp_interleave_num
    offset = settings.offset
    share, remainder = divmod(settings.num_layers, stages * chunks)
    if isinstance(offset, int):
        sizes = [share + offset + (number >= stages * chunks - remainder) for number in range(stages * chunks)]
        return [sizes[number * stages : (number + 1) * stages] for number in range(chunks)]
    return [[share + extra for extra in row] for row in offset_rows(offset)]


def chunk_layers(config: Config) -> list[list[list[int]]]:
    """Returns the layers of each model chunk, [stages][chunks][layers]; `stage_problems` must have found no error."""
    layers: list[list[list[int]]] = [[] for _ in range(config.parallel_config.pipeline_stage)]
    first = 0
    for sizes in chunk_sizes(config):
        for chunks, size in zip(layers, sizes, strict=True):
            chunks.append(list(range(first, first + size)))
            first += size
    return layers


def stage_layers(config: Config) -> list[list[int]]:
    """Returns the layers of each pipeline stage, [stages][layers]."""
    return [[layer for chunk in chunks for layer in chunk] for chunks in chunk_layers(config)]


def training_schedule(config: Config, stages: int, micro_batches: int, most: int | None = None) -> Schedule:
    """Returns the order of a pipeline's passes: GPipe or a sequence pipeline if the file asks for it, else 1F1B.

    Args:
        most: With more micro-batches than this, all but GPipe repeat themselves: the schedule then has about so many.
    """
    chunks = config.decoder.pp_interleave_num
    order = config.parallel.pipeline_config
    name = order.pipeline_scheduler
    if name == "gpipe":
        return gpipe(stages, micro_batches, chunks)
    fewer = min(micro_batches, most or micro_batches)
    if name not in SEQUENCE_PIPELINES:
        return one_forward_one_backward(stages, fewer, chunks)
    turn = turn_size(name, stages, order.slices)
    if micro_batches % turn == 0:  # then all turns have this size
        micro_batches = fewer - fewer % turn
    return sequence_pipeline(name, stages, micro_batches, chunks, order.slices)


def counts_per_stage(config: Config, written: Any) -> list[int] | None:
    """Returns the layers that a list of counts means: that many leading layers of each chunk of each stage.

    Returns:
        None if the list is not one of counts: without a pipeline, or with another shape, a list numbers layers.
    """
    stages = config.parallel_config.pipeline_stage
    chunks = config.decoder.pp_interleave_num
    if stages == 1 or config.use_parallel is False or not isinstance(written, list) or not written:
        return None
    rows = offset_rows(written)
    are_counts = all(len(row) == stages and all(type(count) is int and count >= 0 for count in row) for row in rows)
    if not are_counts or len(rows) not in (1, chunks):
        return None
    chosen: list[int] = []
    first = 0
    for sizes, counts in zip_longest(chunk_sizes(config), rows, fillvalue=[0] * stages):
        for size, count in zip(sizes, counts, strict=True):
            chosen += range(first, first + min(count, size))
            first += size
    return chosen


def stage_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors for offsets that do not fit the pipeline stages or the number of layers."""
    settings = config.decoder
    stages = config.parallel_config.pipeline_stage
    chunks = settings.pp_interleave_num
    if stages == 1 or config.use_parallel is False:
        return
    if not offset_fits(config):
        rule = f"{stages} stages need a list of {stages} numbers"
        if chunks > 1:
            rule = f"{stages} stages of {chunks} model chunks need {chunks} lists of {stages} numbers"
        yield problem(config, _KEY, rule, "write one for each stage, or 0")
        return
    sizes = [size for row in chunk_sizes(config) for size in row]
    share, remainder = divmod(settings.num_layers, stages * chunks)
    if min(sizes) < 0:
        yield problem(config, _KEY, f"a stage would have {min(sizes)} layers", f"write numbers from {-share} on")
    elif sum(sizes) != settings.num_layers:
        rule = f"the stages would have {sum(sizes)} layers, and the model has {settings.num_layers}"
        fix = f"its sum must be {remainder}"
        if isinstance(settings.offset, int):
            fix = "write 0, or a list with a number for each stage"
        if config.source.source_places:  # a list of ranges
            fix = f"write ranges of {settings.num_layers} layers"
        yield problem(config, _KEY, rule, fix)


def offset_fits(config: Config) -> bool:
    """Returns whether `offset` is one number, or has one for each stage and model chunk."""
    offset = config.decoder.offset
    shape = [config.parallel_config.pipeline_stage] * config.decoder.pp_interleave_num
    return isinstance(offset, int) or [len(row) for row in offset_rows(offset)] == shape


def offset_rows(written: Any) -> list[list[int]]:
    """Returns the numbers of stages for each model chunk; a list without lists is the row of a single chunk."""
    if written and isinstance(written[0], list):
        return written
    return [written]
