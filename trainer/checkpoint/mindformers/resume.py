"""Continues the training in a checkpoint: one of this trainer, or one of MindSpore Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.json_models import DataLayout
from trainer.checkpoint.mindformers.folders import Source, find_source
from trainer.checkpoint.mindformers.training import Counters, open_moments, open_state, read_counters
from trainer.checkpoint.state import (
    Position,
    ResumedCheckpoint,
    finite_arrays,
    optimizer_shapes,
    read_resumed_checkpoint,
)
from trainer.checkpoint.store import errors_at
from trainer.checkpoint.weights import ShardSpecs, fitting_weights, unused_modules
from trainer.data.batches.step_sizes import step_sizes
from trainer.errors import UserError
from trainer.parallel.world import SINGLE_PROCESS, World

if TYPE_CHECKING:
    from trainer.config import Config

_KEY = "resume_training"
_FROM_BEGINNING = "--ignore_data_skip to start the data from its beginning"


def read_training(
    path: Path, config: Config, layout: Mapping[str, Any], parts: ShardSpecs | None = None,
    world: World = SINGLE_PROCESS,
) -> ResumedCheckpoint:  # fmt: skip
    """Reads the checkpoint in `path`, of either program, for a run of this configuration.

    The arguments and errors are those of `read_resumed_checkpoint`.
    """
    with errors_at(config.source.where(_KEY), _KEY):
        source = find_source(path)
        if source is not None:
            return _read_source(source, config, layout, parts, world)
    return read_resumed_checkpoint(path, config, layout, parts, world)


def _read_source(
    source: Source, config: Config, layout: Mapping[str, Any], parts: ShardSpecs | None, world: World
) -> ResumedCheckpoint:
    """Reads weights, optimizer state and position of a training of MindSpore Transformers."""
    path = source.path
    counters = read_counters(source)
    position = _position(counters, config, layout, path)
    arrays, open_arrays = open_state(source, config, world)
    unused, _ = unused_modules(arrays, config.decoder)
    used = {name: array for name, array in arrays.items() if name not in unused}
    weights = fitting_weights(used, config.network, path, parts)
    moments = finite_arrays(open_moments(optimizer_shapes(config), open_arrays, path), path)
    note = f"continues the training of MindSpore Transformers' checkpoint ({source.name}) with its optimizer state"
    note += "; the checkpoint does not say with which settings it was made"
    return ResumedCheckpoint(position, weights, moments, counters.updates, None, EvalHistory.empty(), path, (note,))


def _position(counters: Counters, config: Config, layout: Mapping[str, Any], path: Path) -> Position:
    """Returns the position in the data, which both programs read in order, the micro-batches of a step together.

    Raises a UserError if this run would have read other sequences in as many steps.
    """
    step = counters.step
    rows = layout["batch_size"] * layout["ranks"]
    batches_of_epoch = DataLayout.model_validate(layout).batches or 1
    sizes = step_sizes(layout, batches_of_epoch)
    here = sizes.batches_of(step)
    sequences = here * rows
    if counters.sequences is not None:
        sequences = counters.sequences
    tokens = sequences * layout["seq_length"]
    if config.ignore_data_skip:
        return Position(step=step, tokens=tokens, data_from_step=step)
    if sequences != here * rows:
        rule = f"it has read {sequences} sequences in {step} steps, and this run takes {here * rows} for them"
        raise UserError(rule, value=str(path), fix=f"use its batch size and data, or {_FROM_BEGINNING}")
    if layout["shuffle"]:
        rule = "it has read the data in a random order, which is another one here"
        raise UserError(rule, value=str(path), fix=f"use data that are not shuffled, or {_FROM_BEGINNING}")
    epoch, batch = divmod(here, batches_of_epoch)
    return Position(step, epoch, batch, tokens)
