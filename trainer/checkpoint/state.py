"""What a run must remember to go on bit for bit: weights, optimizer, and its place in the data.

Random numbers need no state of their own: the order of data is a function of (seed, epoch), a dropout mask of (seed,
rank, update, micro-batch, site), so the seed and these counters are the whole of it.

Finding, reading and checking a checkpoint needs no MindSpore, so what is wrong with it is known before that loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.checkpoint.adapters import (
    CONFIG_FILE,
    PART,
    PREFIX,
    base_weights,
    check_base,
    description,
    fitting_adapters,
)
from trainer.checkpoint.changes import changed_settings, settings_record
from trainer.checkpoint.data_position import BATCH_KEYS, batch_now
from trainer.checkpoint.expert_names import to_disk
from trainer.checkpoint.store import Checkpoint, find_checkpoint, read_checkpoint, shard_name
from trainer.checkpoint.weights import fitting_weights
from trainer.checkpoint.writing import write_checkpoint
from trainer.errors import UserError
from trainer.models.shapes import adapter_shapes
from trainer.optim.freeze import trained_shapes
from trainer.parallel.communicator import Communicator, SingleProcess

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.models.decoder import Decoder
    from trainer.plan.plan import Plan
    from trainer.step.train_step import Saved

OPTIMIZER = "optimizer"
"""Name of the part that holds the optimizer's state."""

_KEY = "resume_training"
_ALONE = {"ranks": 1}  # checkpoints from before there were ranks do not say it


@dataclass
class Position:
    """Where a run stands.

    Attributes:
        step: Optimizer steps done.
        epoch: Current epoch, from 0.
        batch: Micro-batches of it that are done.
        tokens: Valid tokens trained on.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that fits the run.

    Attributes:
        position: Where the run goes on.
        weights: By name.
        optimizer: Its state, by `kind.parameter`; read from the file when it is asked for. Flat where ranks shared it.
        updates: How many the optimizer has made.
        step: State of the training step (loss scale); None in a checkpoint from before it had one.
        path: The checkpoint.
        notices: What is not as it was in the run that made it.
    """

    position: Position
    weights: dict[str, np.ndarray]
    optimizer: Mapping[str, np.ndarray]
    updates: int
    step: dict[str, Any] | None
    path: Path
    notices: tuple[str, ...]


def data_layout(config: Config, num_rows: int | None, content: str | None, ranks: int = 1) -> dict[str, Any]:
    """What a position in the data means: with another value of any of these it would be another place.

    Args:
        config: Of the run.
        num_rows, content: Of the training data, see `RowDataset`; None leaves out what is not known yet.
        ranks: How many take parts of each batch.
    """
    train, runner = config.train_dataset, config.runner_config
    layout = {
        "seed": config.seed,
        "batch_size": runner.batch_size,
        "gradient_accumulation_steps": runner.gradient_accumulation_steps,
        "ranks": ranks,
        "seq_length": config.network.labels_of_row,
        "shuffle": train.data_loader.shuffle,
        "drop_remainder": train.drop_remainder,
        "held_out": train.held_out,
        "rows": num_rows,
        "content": content,
    }
    return {key: value for key, value in layout.items() if value is not None}


def save(
    folder: Path,
    position: Position,
    saved: Saved,
    *,
    step_state: Mapping[str, Any],
    config: Config,
    layout: Mapping[str, Any],
    base: Mapping[str, Any] | None,
    keep_max: int,
    communicator: Communicator | None = None,
) -> Path:
    """Writes a checkpoint of the run as it stands; returns its folder. All ranks call it: each writes what is its own.

    Args:
        folder: Of the run's checkpoints.
        position, saved: What to write.
        step_state: Of the training step, see `TrainStep.state`.
        config: Of the run.
        layout: See `data_layout`.
        base: With adapters, which alone are written: what they were trained on, see `base_record`.
        keep_max: Checkpoints to keep.
        peers: The ranks of the run.

    Raises:
        RunError: The disk is full or does not let us write, for one of the ranks; earlier checkpoints are untouched.
    """
    communicator = communicator or SingleProcess()
    tensors, documents = {}, {}
    if communicator.rank == 0:
        if base is None:
            tensors["model"] = to_disk(saved.weights, config.model.arch.type)
        else:
            tensors[PART] = {PREFIX + name: saved.weights[name] for name in adapter_shapes(config.decoder)}
            documents[CONFIG_FILE] = description(config.decoder, base["load_checkpoint"])
    if saved.in_parts:
        tensors[shard_name(OPTIMIZER, communicator.rank, communicator.size)] = saved.optimizer
    elif communicator.rank == 0:
        tensors[OPTIMIZER] = saved.optimizer
    state = {
        "position": asdict(position),
        "optimizer": {"type": config.optimizer.type, "updates": saved.updates},
        "step": dict(step_state),
        "settings": settings_record(config),
        "data": dict(layout),
    }
    state |= {"base": dict(base)} if base is not None else {}
    return write_checkpoint(
        folder, position.step, tensors, state, keep_max, documents=documents, communicator=communicator
    )


def load_weights(model: Decoder, weights: Mapping[str, np.ndarray]) -> None:
    """Sets every parameter; `weights` has been checked."""
    from mindspore import Tensor

    for name, parameter in model.parameters_by_name.items():
        parameter.set_data(Tensor(np.ascontiguousarray(weights[name])))


def checkpoint_to_resume(config: Config) -> Path:
    """The checkpoint that `resume_training` means: the newest complete one, or the named one.

    Raises:
        UserError: There is none.
    """
    where = config.source.where(_KEY)
    # With adapters load_checkpoint names the model below them, which no checkpoint of theirs replaces.
    given = config.load_checkpoint if config.decoder.pet_config is None else config.adapter_id
    folder = Path(given or Path(config.output_dir) / "checkpoints").expanduser()
    if isinstance(config.resume_training, str):
        named = folder / config.resume_training
        if not named.is_dir():
            raise UserError(
                f"there is no such checkpoint in {folder}",
                where=where,
                key=_KEY,
                value=config.resume_training,
                fix="name a folder that is there, or use --resume_training alone for the newest complete one",
            )
        return named
    if not folder.exists():
        raise UserError(
            f"there is nothing to resume: {folder} does not exist",
            where=where,
            key=_KEY,
            value=True,
            fix="give the output_dir of the run to go on with, or leave out --resume_training",
        )
    try:
        return find_checkpoint(folder, key=_KEY)
    except UserError as error:
        raise error.at(where, _KEY) from error


def read_resumed(path: Path, config: Config, layout: Mapping[str, Any]) -> Resumed:
    """Reads a checkpoint to go on from.

    Args:
        path: Its folder.
        config: Of the run that goes on.
        layout: Of that run, see `data_layout`.

    Raises:
        UserError: It is incomplete or damaged, or does not fit the model, the optimizer or the data.
    """
    where = config.source.where(_KEY)
    try:
        found = read_checkpoint(path, lazy=(OPTIMIZER,))
    except UserError as error:
        raise error.at(where, _KEY) from error
    weights, optimizer = _weights_of(found, config, where), found.state["optimizer"]
    before, now = optimizer["type"], config.optimizer.type
    if before != now:
        raise UserError(
            f"the checkpoint was made with {before}, and this run's optimizer.type is {now}",
            where=where,
            key=_KEY,
            value=str(path),
            fix=f"use {before}, or start anew from its weights with --load_checkpoint",
        )
    _check_same_freeze(found, config, where)
    position = _position(found, config, layout, where)
    step = found.state["step"] if "step" in found.state else None
    # Checkpoints from before settings were recorded say nothing of them.
    changes = changed_settings(found.state["settings"], settings_record(config)) if "settings" in found.state else ""
    notices = (f"differs from the run that made {path.name}: {changes}",) if changes else ()
    return Resumed(position, weights, found.tensors[OPTIMIZER], optimizer["updates"], step, path, notices)


def plan_resumed(plan: Plan, resumed: Resumed) -> Plan:
    """The plan of a run that goes on: from where, and what is not as it was."""
    position = resumed.position
    place = f"epoch {position.epoch + 1}, micro-batch {position.batch + 1}"
    goes_on = f"with step {position.step + 1} ({place})" if position.step < plan.last_step else "nowhere: all is done"
    text = f"{resumed.path}: step {position.step} is done, goes on {goes_on}"
    return replace(plan, resumed=text, notices=(*plan.notices, *resumed.notices))


def _check_same_freeze(found: Checkpoint, config: Config, where: str) -> None:
    """The optimizer has state for exactly the weights that are trained.

    Raises:
        UserError: Others were trained before.
    """
    before = {name.split(".", 1)[1] for name in found.tensors[OPTIMIZER]}
    now = set(trained_shapes(config))
    if before == now:
        return
    frozen, trained = sorted(before - now), sorted(now - before)
    changes = [f"{frozen[0]}{_and_more(frozen)} was trained and is frozen now"] if frozen else []
    changes += [f"{trained[0]}{_and_more(trained)} was frozen and is trained now"] if trained else []
    raise UserError(
        f"the checkpoint was made with another freeze setting: {'; '.join(changes)}",
        where=where,
        key=_KEY,
        value=str(found.path),
        fix="use the freeze section of the checkpoint's run, or start anew from its weights with --load_checkpoint",
    )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _weights_of(found: Checkpoint, config: Config, where: str) -> dict[str, np.ndarray]:
    """All parameters of the run: of the checkpoint, or of its adapters and the weights below them."""
    part = "model" if config.decoder.pet_config is None else PART
    if part not in found.tensors:
        others = ("a whole model", "adapters") if part == PART else ("adapters", "a whole model")
        raise UserError(
            f"the checkpoint holds {others[0]}, and this run trains {others[1]}",
            where=where,
            key=_KEY,
            value=str(found.path),
            fix=f"{'write' if part == 'model' else 'remove'} model.model_config.pet_config, or name another checkpoint",
        )
    if part == "model":
        return fitting_weights(found.tensors[part], config.network, found.path, where, key=_KEY)
    base = base_weights(config)
    check_base(found.state, config, base)
    return base | fitting_adapters(found.tensors[part], config, found.path, where, key=_KEY)


def _position(found: Checkpoint, config: Config, layout: Mapping[str, Any], where: str) -> Position:
    position = Position(**found.state["position"])
    if config.ignore_data_skip:
        return Position(step=position.step, tokens=position.tokens)
    before, now = _ALONE | found.state["data"], _ALONE | layout
    same = [key for key in before if key in now and key not in BATCH_KEYS]
    changed = [f"{key} was {before[key]} and is {now[key]}" for key in same if now[key] != before[key]]
    if changed:
        raise UserError(
            "the data is not what the checkpoint was trained on, so its place in it means nothing: "
            + ", ".join(changed),
            where=where,
            key=_KEY,
            value=str(found.path),
            fix="use the same data and settings, or --ignore_data_skip to start the data from its beginning",
        )
    try:
        position.batch = batch_now(position.batch, before, now)
    except UserError as error:
        raise UserError(error.rule, where=where, key=_KEY, value=str(found.path), fix=error.fix) from error
    return position
