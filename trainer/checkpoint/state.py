"""Saves and resumes a run bit for bit: weights, optimizer state, and the position in the data.

Random numbers need no state: the order of the data is a function of (seed, epoch), a dropout mask of (seed, rank,
update, micro-batch, site), so the seed and these counters suffice.

Finding, reading and checking a checkpoint needs no MindSpore, so a bad checkpoint is reported before MindSpore loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.checkpoint import adapter_values, adapters
from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.hugging_face import class_on_disk
from trainer.checkpoint.json_models import DataLayout, RunState, read_base, read_run_state
from trainer.checkpoint.mindformers.folders import find_source
from trainer.checkpoint.store import (
    MOST_OFFERED,
    OPTIMIZER,
    Checkpoint,
    complete_checkpoints,
    damaged_checkpoint,
    errors_at,
    find_checkpoint,
    first_of,
    read_checkpoint,
    renamed_checkpoint_notes,
    resolve_best_link,
)
from trainer.checkpoint.tensor_names import DiskSlice, disk_slices
from trainer.checkpoint.weights import ShardSpecs, fitting_weights, is_finite
from trainer.checkpoint.writing import FileShards, Stages, checkpoint_stages
from trainer.config.schema.fields import Section, support_of
from trainer.errors import UserError, shorten_repr, value_text
from trainer.models.spec.adapters import SECTION, saved_settings
from trainer.models.spec.shapes import adapter_shapes, all_shapes
from trainer.optim.freeze import trained_shapes
from trainer.optim.groups import EMA, average_names, parameter_groups, state_names
from trainer.parallel.sharding import ShardedArray, ShardSpec, as_sharded_array, full_shard_spec
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.plan.plan import Plan, Resumption
from trainer.storage.quantized import FrozenMatrix
from trainer.storage.tensor_file import ArrayOrLazyArray, LazyArray, float32_infos, read_shard

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.models.decoder import Decoder
    from trainer.step.train_step import CheckpointShard

_KEY = "resume_training"
_NEW_RUN = "start a new run from its weights with --load_checkpoint"
_ONE_RANK = {"ranks": 1}  # checkpoints from before multi-rank runs lack the key
_FROM_BEGINNING = "--ignore_data_skip to start the data from its beginning"
_BATCH_KEYS = ("batch_size", "gradient_accumulation_steps", "ranks")
"""Keys of a data layout that may change, if a step keeps its sequences; a ramp-up may change, and a note says so."""

# What a step computes. Data and seed belong to the position in the data, which must fit: `data_layout`.
_SECTIONS = ("lr_schedule", "optimizer", "runner_wrapper", "model", "loss")
_KEYS = ("batch_size", "gradient_accumulation_steps", "rampup_batch_size", "epochs", "max_steps")  # of runner_config
# Keys of the model that only matter for prediction, and batch_size, which runner_config has already.
_PREDICTION = frozenset(
    "batch_size do_sample max_decode_length max_new_tokens temperature top_k top_p repetition_penalty".split()
)


@dataclass
class Position:
    """Position of a run."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # current epoch, from 0
    batch: int = 0  # micro-batches of the epoch that are done
    tokens: int = 0  # valid tokens trained on
    data_from_step: int | None = 0  # the step after which the data began; None where an earlier version saved it


@dataclass(frozen=True)
class ResumedCheckpoint:
    """A checkpoint that fits the run."""

    position: Position
    weights: dict[str, np.ndarray]  # by the names of the parameters; the parts that this rank has
    optimizer: Mapping[str, LazyArray]  # whole arrays by `kind.parameter`, flat where it was sharded
    updates: int  # of the optimizer
    step: dict[str, Any] | None  # state of the training step (loss scale); None in an older checkpoint without it
    evaluations: EvalHistory
    path: Path
    notes: tuple[str, ...]  # settings that differ from the run that saved it


def save_stages(
    folder: Path, position: Position, saved: CheckpointShard, *, step_state: Mapping[str, Any], config: Config,
    layout: Mapping[str, Any], base: Mapping[str, Any] | None, initial: Mapping[str, np.ndarray] | None = None,
    keep_max: int, evaluations: EvalHistory, files: Mapping[str, bytes] | None = None, rank: int = 0, ranks: int = 1,
    beside_training: bool = False,
) -> Stages:  # fmt: skip
    """Returns the stages of saving a checkpoint of the run. All ranks do them; each writes its shards.

    Nothing is written before the first stage starts.

    Args:
        folder: The folder of the run's checkpoints, of which `keep_max` and the best of `evaluations` are kept.
        step_state: State of the training step, see `TrainStep.state`.
        layout: See `data_layout`.
        base: The record of the base model of adapters, which are saved without it; see `base_record`.
        initial: What adapters have taken out of the base model, see `pop_initial`; None or empty: nothing.
        files: Files for other programs beside the weights of a full model, see `folder_files`.
        beside_training: The training continues before the last stage is done: arrays that it changes are copied now.
            False: nothing may change until then.

    Raises:
        RunError: The disk is full or cannot be written, on any rank; earlier checkpoints are unchanged.
    """
    weights = {name: as_sharded_array(array) for name, array in saved.weights.items()}
    optimizer_state = {name: as_sharded_array(array) for name, array in saved.optimizer.items()}
    other_files: dict[str, Any] = {}
    if base is None:
        part = "model"
        shapes = all_shapes(config.network)
        kind = class_on_disk(config)
        shards = _file_shards(weights, shapes, lambda specs: disk_slices(specs, shapes, kind))
        other_files |= files or {}
    else:
        part = adapters.PART
        on_disk = saved_settings(config.decoder)
        shapes = adapter_shapes(on_disk)
        weights = adapter_values.as_saved(weights, initial or {})
        shards = _file_shards(weights, shapes, lambda specs: _prefixed(specs, adapters.PREFIX))
        other_files[adapters.ADAPTER_CONFIG] = adapters.adapter_config(on_disk, base["load_checkpoint"])
    tensors = {part: shards, OPTIMIZER: _file_shards(optimizer_state, optimizer_shapes(config), _prefixed)}
    if beside_training and saved.shares_memory:
        tensors = {name: _copy_arrays(one) for name, one in tensors.items()}
    state = {
        "position": asdict(position),
        "optimizer": {"type": config.optimizer.type, "updates": saved.updates},
        "step": dict(step_state),
        "settings": settings_record(config),
        "data": dict(layout),
        "evaluations": evaluations.model_dump(),
    }
    if base is not None:
        state["base"] = dict(base)
    best_steps = [each.step for each in evaluations.best]
    return checkpoint_stages(
        folder, position.step, tensors, state, keep_max,
        other_files=other_files, rank=rank, ranks=ranks, best_steps=best_steps,
    )  # fmt: skip


def _copy_arrays(shards: FileShards) -> FileShards:
    copies = {name: [ShardedArray(spec, np.array(array)) for spec, array in pieces]
              for name, pieces in shards.pieces.items()}  # fmt: skip
    return shards._replace(pieces=copies)


def _prefixed(specs: Mapping[str, ShardSpec], prefix: str = "") -> dict[str, list[DiskSlice]]:
    """Returns the slices of tensors on disk that have the arrays' names with a prefix."""
    return {prefix + name: [DiskSlice(name, slice(0, spec.size), spec)] for name, spec in specs.items()}


def _file_shards(
    local: Mapping[str, ShardedArray],
    shapes: Mapping[str, tuple[int, ...]],
    to_slices: Callable[[Mapping[str, ShardSpec]], Mapping[str, Sequence[DiskSlice]]],
) -> FileShards:
    """Returns this rank's shards of the tensors of a file, from those of arrays in memory with these global shapes.

    `to_slices` returns the slices of the tensors on disk from the specs of arrays in memory.
    """
    slices = to_slices({name: local[name].spec for name in shapes if name in local})
    pieces = {name: [ShardedArray(spec, local[one].array.reshape(-1)[flat]) for one, flat, spec in tensor_slices]
              for name, tensor_slices in slices.items()}  # fmt: skip
    unsharded = to_slices({name: full_shard_spec(shape) for name, shape in shapes.items()})
    return FileShards(float32_infos({name: each[0].spec.global_shape for name, each in unsharded.items()}), pieces)


def optimizer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the optimizer's arrays by `kind.parameter`."""
    shapes = trained_shapes(config)
    groups = parameter_groups(shapes, config.optimizer)
    kinds = state_names(config.optimizer)
    return {f"{kind}.{name}": shapes[name]
            for group in groups for kind in kinds[group.optimizer] for name in group.parameters}  # fmt: skip


def load_weights(model: Decoder, weights: Mapping[str, np.ndarray]) -> None:
    """Sets every parameter of the model to its array of `weights`, this rank's shards, which have been checked."""
    load_in_turn(model, ((name, weights[name]) for name in model.parameters_by_name))


def load_in_turn(model: Decoder, weights: Iterable[tuple[str, np.ndarray]]) -> None:
    """Sets parameters of the model by their names to arrays, of which only one need be in memory."""
    from mindspore import Tensor

    for name, array in weights:
        parameter = model.parameters_by_name[name]
        if isinstance(parameter, FrozenMatrix):
            parameter.set(array)
        else:
            parameter.set_data(Tensor(array))
    model.compute_weights.refresh()


def checkpoint_to_resume(config: Config) -> Path:
    """Finds the checkpoint that `resume_training` selects: the newest complete one, or the named one.

    Raises:
        UserError: There is none.
    """
    where = config.source.where(_KEY)
    folder = _resume_folder(config)
    with errors_at(where, _KEY):
        source = find_source(folder)
    if source is not None:
        if reason := _hindrance(config):
            rule = f"is a checkpoint of MindSpore Transformers ({source.name}); this run cannot continue it: {reason}"
            fix = f"start from its weights: {_KEY}: false (in its newer schema checkpoint.no_load_optim: true)"
            raise UserError(rule, where=where, key=_KEY, value=str(folder), fix=fix)
        return source.path
    if isinstance(config.resume_training, str):
        named = resolve_best_link(folder / config.resume_training)
        if not named.is_dir():
            rule = f"there is no such checkpoint in {folder}"
            fix = "use --resume_training alone for the newest complete one"
            if names := [path.name for path in complete_checkpoints(folder)]:
                fix = f"name one that is there ({', '.join(names[-MOST_OFFERED:])}), or {fix}"
            raise UserError(rule, where=where, key=_KEY, value=config.resume_training, fix=fix)
        return named
    if not folder.exists():
        rule = f"there is nothing to resume: {folder} does not exist"
        fix = "give the output_dir of the run to continue, or leave out --resume_training"
        raise UserError(rule, where=where, key=_KEY, value=True, fix=fix)
    with errors_at(where, _KEY):
        return find_checkpoint(folder)


def _hindrance(config: Config) -> str:
    """Returns why this run can only take the weights of another program's checkpoint; empty if it can continue it."""
    if isinstance(config.resume_training, str):
        return f"{_KEY} names a checkpoint of this trainer, {config.resume_training}"
    if config.has_adapters:
        return f"{SECTION} trains adapters, of which it has no state in this form"
    if config.optimizer.type not in ("AdamW", "Muon"):
        return f"the state of AdamW and Muon is known, and optimizer.type is {config.optimizer.type}"
    if average_names(config.optimizer):
        return "it has no moving averages, which optimizer.ema_decay asks for"
    return ""


def _resume_folder(config: Config) -> Path:
    # With adapters load_checkpoint names the base model, which a checkpoint of adapters does not contain.
    path = config.load_checkpoint
    if config.has_adapters:
        path = config.adapter_id
    return Path(path or Path(config.output_dir) / "checkpoints").expanduser()


def read_resumed_checkpoint(
    path: Path, config: Config, layout: Mapping[str, Any], parts: ShardSpecs | None = None,
    world: World = SINGLE_PROCESS,
) -> ResumedCheckpoint:  # fmt: skip
    """Reads the checkpoint in `path` for a run of this configuration.

    Args:
        layout: See `data_layout`.
        parts: Shards of the weights to read; None: read them unsharded.
        world: See `read_checkpoint`.

    Raises:
        UserError: It is incomplete or damaged, or does not fit the model, the optimizer or the data.
    """
    with errors_at(config.source.where(_KEY), _KEY):
        return _resumed(read_checkpoint(path, world=world), config, layout, parts, world)


def _resumed(
    checkpoint: Checkpoint, config: Config, layout: Mapping[str, Any], parts: ShardSpecs | None, world: World
) -> ResumedCheckpoint:
    path = checkpoint.path
    _check_part(checkpoint, config)
    weights = _weights_of(checkpoint, config, parts, world)
    state = read_run_state(checkpoint)
    before = state.optimizer.type
    now = config.optimizer.type
    if before != now:
        rule = f"the checkpoint was made with {before}, and this run's optimizer.type is {now}"
        raise UserError(rule, value=str(path), fix=f"use {before}, or {_NEW_RUN}")
    if OPTIMIZER not in checkpoint.tensors:
        raise damaged_checkpoint(path, "it has no state of the optimizer")
    _check_same_freeze(checkpoint, config)
    _check_averages(checkpoint, config)
    arrays = _optimizer_arrays(checkpoint, config)
    position = _position(state, config, layout, path)
    notes = []
    # Older checkpoints have no settings.
    if state.settings is not None and (changes := changed_settings(state.settings, settings_record(config))):
        notes.append(f"differs from the run that made {path.name}: {changes}")
    if not checkpoint.has_checksums:
        notes.append(f"{path.name} was saved without checksums: only the lengths of its files are checked")
    if config.resume_training is True and resolve_best_link(_resume_folder(config)) != path:
        notes += renamed_checkpoint_notes(path)
    evaluations = state.evaluations or EvalHistory.empty(position.step)  # older checkpoints have none
    step = None
    if state.step is not None:
        step = state.step.model_dump()
    return ResumedCheckpoint(position, weights, arrays, state.optimizer.updates, step, evaluations, path, tuple(notes))


def _optimizer_arrays(checkpoint: Checkpoint, config: Config) -> dict[str, LazyArray]:
    """Opens the optimizer's state in a checkpoint; raises a UserError if names, shapes or dtypes are wrong.

    Numbers are checked for NaN and infinity when they are read.
    """
    stored = checkpoint.tensors[OPTIMIZER]
    for name, expected in optimizer_shapes(config).items():
        if name not in stored:
            raise damaged_checkpoint(checkpoint.path, f"the optimizer's state lacks {name}")
        dtype, shape = stored.about(name)
        if dtype != "F32":
            raise damaged_checkpoint(checkpoint.path, f"the optimizer's state has {name} in {dtype}, not F32")
        # Sharded arrays are flat in checkpoints of earlier versions.
        if shape not in (expected, (math.prod(expected),)):
            rule = f"the optimizer's state has {name} of shape {list(shape)}, not {list(expected)}"
            raise damaged_checkpoint(checkpoint.path, rule)

    return finite_arrays({name: stored.array(name) for name in stored}, checkpoint.path)


def finite_arrays(arrays: Mapping[str, ArrayOrLazyArray], path: Path) -> dict[str, LazyArray]:
    """Returns arrays of an optimizer that raise a UserError when numbers that are read have NaN or infinity."""

    def read(name: str, part: ShardSpec) -> np.ndarray:
        """Reads a shard of an array."""
        numbers = read_shard(arrays[name], part)
        if not is_finite(numbers):
            raise damaged_checkpoint(path, f"the optimizer's state is not finite: {name} has NaN or infinity")
        return numbers

    return {name: LazyArray(array.shape, partial(read, name)) for name, array in arrays.items()}


def plan_resumed(plan: Plan, resumed: ResumedCheckpoint) -> Plan:
    """Returns the plan of a resumed run, with the position from which it continues and the settings that differ."""
    position = resumed.position
    resumes = Resumption(str(resumed.path), position.step, position.epoch, position.batch)
    steps = plan.steps
    if position.data_from_step and steps.sizes.rampup is not None:
        sizes = replace(steps.sizes, done_before=steps.sizes.batches_of(position.data_from_step))
        steps = replace(steps, sizes=sizes)
    return replace(plan, steps=steps, resumes=resumes, notes=(*plan.notes, *resumed.notes))


def _check_same_freeze(checkpoint: Checkpoint, config: Config) -> None:
    """Checks that the optimizer has state for exactly the weights that are trained."""
    before = {name.partition(".")[2] for name in checkpoint.tensors[OPTIMIZER]}
    now = set(trained_shapes(config))
    if before == now:
        return
    changes = []
    if frozen := sorted(before - now):
        changes.append(f"{first_of(frozen)} was trained and is frozen now")
    if trained := sorted(now - before):
        changes.append(f"{first_of(trained)} was frozen and is trained now")
    rule = f"the checkpoint was made with another freeze setting: {'; '.join(changes)}"
    fix = f"use the freeze section of the checkpoint's run, or {_NEW_RUN}"
    raise UserError(rule, value=str(checkpoint.path), fix=fix)


def _check_averages(checkpoint: Checkpoint, config: Config) -> None:
    """Checks that the checkpoint has moving averages if the run keeps them."""
    has_averages = any(name.startswith(f"{EMA}.") for name in checkpoint.tensors[OPTIMIZER])
    if config.optimizer.ema_decay is not None and not has_averages:
        rule = "the checkpoint has no moving averages, which optimizer.ema_decay asks for"
        raise UserError(rule, value=str(checkpoint.path), fix=f"leave ema_decay out, or {_NEW_RUN}")


def _part(config: Config) -> str:
    """Returns the part of a checkpoint that has the run's weights."""
    if config.has_adapters:
        return adapters.PART
    return "model"


def _check_part(checkpoint: Checkpoint, config: Config) -> None:
    if _part(config) in checkpoint.tensors:
        return
    rule = "the checkpoint contains adapters, and this run trains a full model"
    change = "write"
    if config.has_adapters:
        rule = "the checkpoint contains a full model, and this run trains adapters"
        change = "remove"
    raise UserError(rule, value=str(checkpoint.path), fix=f"{change} {SECTION}, or name another checkpoint")


def _weights_of(
    checkpoint: Checkpoint, config: Config, parts: ShardSpecs | None, world: World
) -> dict[str, np.ndarray]:
    """Reads all parameters of the run: the checkpoint's, or its adapters and the base model's."""
    tensors = checkpoint.tensors[_part(config)].arrays()
    if not config.has_adapters:
        return fitting_weights(tensors, config.network, checkpoint.path, parts)
    weights, compared = adapters.read_base_weights(config, parts, world)
    adapters.check_base(read_base(checkpoint), config, compared)
    trained = adapters.fitting_adapters(tensors, config, checkpoint.path).read(parts)
    return adapters.join_weights(config, weights, trained)


def _position(state: RunState, config: Config, layout: Mapping[str, Any], path: Path) -> Position:
    """Returns the position from which the run continues, possibly with other numbers of ranks or batches.

    Each epoch has its own order of sequences, the same for any number of ranks, and a step takes the next `batch_size`
    x `gradient_accumulation_steps` x ranks of them. As long as that product stays the same, a step means the same
    sequences, and the run continues with exactly the next one: no sequence is repeated or left out.
    """
    position = Position(**state.position.model_dump())
    if config.ignore_data_skip:
        return Position(step=position.step, tokens=position.tokens, data_from_step=position.step)
    before = _ONE_RANK | state.data.model_dump(exclude_unset=True)
    now = _ONE_RANK | dict(layout)
    same = [key for key in before if key in now and key not in (*_BATCH_KEYS, "rampup_batch_size")]
    changed = [
        f"{key} was {value_text(before[key])} and is {value_text(now[key])}"
        for key in same
        if now[key] != before[key]
    ]
    if changed:
        rule = f"the checkpoint was made with other data, so its position has no meaning here: {', '.join(changed)}"
        raise UserError(rule, value=str(path), fix=f"use the same data and settings, or {_FROM_BEGINNING}")
    try:
        position.batch = resumed_batch(position.batch, before, now)
    except UserError as error:
        raise UserError(error.rule, value=str(path), fix=error.fix) from error
    return position


def resumed_batch(batch: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Returns the micro-batch of the epoch to continue with, after `batch` of them in the data layout `before`.

    Raises:
        UserError: A step would take another number of sequences, an epoch would have another number of steps, or the
            position is in the middle of a batch.
    """
    changes = ", ".join(f"{key} was {before[key]} and is {now[key]}" for key in _BATCH_KEYS if before[key] != now[key])
    size_before, size_now = (
        layout["batch_size"] * layout["gradient_accumulation_steps"] * layout["ranks"] for layout in (before, now)
    )
    if size_before != size_now:
        rule = f"a step took {size_before} sequences and would take {size_now}: {changes}"
        ranks = now["ranks"]
        fix = f"start a number of ranks that divides {size_before}"
        if size_before % ranks == 0:
            product = f"batch_size x gradient_accumulation_steps = {size_before // ranks}"
            fix = f"choose {product} for {ranks} rank{'s' * (ranks > 1)}"
        raise UserError(rule, fix=f"{fix}, or {_FROM_BEGINNING}")
    if "rows" in before and "rows" in now:
        was, sequences_before = _epoch_of(before)
        is_now, sequences_now = _epoch_of(now)
        if was != is_now or ("rampup_batch_size" in now and sequences_before != sequences_now):
            rule = f"an epoch of {now['rows']} sequences had {was} steps and would have {is_now}: {changes}"
            fix = f"change batch_size rather than gradient_accumulation_steps, or {_FROM_BEGINNING}"
            raise UserError(rule, fix=fix)
    batches, left = divmod(batch * before["batch_size"] * before["ranks"], now["batch_size"] * now["ranks"])
    if left:
        rule = f"the checkpoint is in the middle of a micro-batch of all ranks: {changes}"
        raise UserError(rule, fix=f"use the batch_size and ranks of that run, or {_FROM_BEGINNING}")
    return batches


def _epoch_of(layout: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the steps with the full global batch of an epoch, and the sequences of its micro-batches."""
    batches = DataLayout.model_validate(layout).batches or 0
    return -(-batches // layout["gradient_accumulation_steps"]), batches * layout["batch_size"] * layout["ranks"]


def settings_record(config: Config) -> dict[str, Any]:
    """Returns the values that change what a step computes, by dotted key, where they differ from the defaults.

    All of them may change in a resumed run (to lower the learning rate is a good reason to resume), but a value that
    was changed by mistake must not go unnoticed. Defaults are left out, so that a key that a later version adds is not
    a change.
    """
    record: dict[str, Any] = {}
    if config.amp_level is not None:
        record["amp_level"] = config.amp_level
    runner = config.runner_config
    for name in _KEYS:
        if getattr(runner, name) != type(runner).model_fields[name].default:
            record[f"runner_config.{name}"] = getattr(runner, name)
    for name in _SECTIONS:
        section = getattr(config, name)
        if section is not None:
            record |= dict(_differing(section, name))
    record.pop("loss.teacher", None)  # a digest records it
    return record


def _differing(section: Section, key: str) -> Iterator[tuple[str, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        dotted = f"{key}.{field.alias or name}"
        if support_of(field)[0] != "supported" or (key == "model.model_config" and name in _PREDICTION):
            continue
        if isinstance(value, Section):
            yield from _differing(value, dotted)
        elif name == "type" or value != field.get_default(call_default_factory=True):
            if isinstance(value, list):
                value = [item.model_dump() if isinstance(item, Section) else item for item in value]
            yield dotted, value


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes how two records differ; empty if they are equal.

    Example: ``lr_schedule.learning_rate 0.001 -> 0.002, amp_level O2 -> not set``.
    """
    keys = list(dict.fromkeys((*before, *now)))
    pairs = {key: tuple(_show_value(each[key]) if key in each else "not set" for each in (before, now)) for key in keys}
    # Another type has other keys: the change of the type says enough.
    kinds = {key for key, (was, is_now) in pairs.items() if key.endswith(".type") and was != is_now}
    replaced = tuple(key.removesuffix("type") for key in kinds)
    both = before.keys() & now.keys()
    return ", ".join(
        f"{key} {was} -> {is_now}"
        for key, (was, is_now) in pairs.items()
        if was != is_now and (key in both or key in kinds or not key.startswith(replaced))
    )


def _show_value(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str):
        return value
    return shorten_repr(value)
