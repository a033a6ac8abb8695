"""What a run must remember to go on bit for bit: weights, optimizer, and its place in the data.

Random numbers need no state of their own: the order of data is a function of (seed, epoch), a dropout mask of (seed, rank,
update, micro-batch, site), so the seed and these counters are the whole of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor

from trainer.checkpoint.store import Checkpoint, find_checkpoint, read_checkpoint, write_checkpoint
from trainer.checkpoint.weights import check_weights
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.models.decoder import Decoder
    from trainer.optim.optimizer import Optimizer


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


def data_layout(config: Config, num_rows: int) -> dict[str, Any]:
    """What a position in the data means: with another value of any of these it would be another place."""
    return {
        "seed": config.seed,
        "batch_size": config.runner_config.batch_size,
        "seq_length": config.decoder.seq_length,
        "rows": num_rows,
        "shuffle": config.train_dataset.data_loader.shuffle,
    }


def save(
    folder: Path, position: Position, model: Decoder, optimizer: Optimizer, layout: dict[str, Any], keep_max: int
) -> Path:
    """Writes a checkpoint of the run as it stands; returns its folder."""
    tensors = {
        "model": {name: parameter.asnumpy() for name, parameter in model.parameters_by_name.items()},
        "optimizer": optimizer.state_arrays(),
    }
    state = {"position": asdict(position), "optimizer_updates": optimizer.updates, "data": layout}
    return write_checkpoint(folder, position.step, tensors, state, keep_max)


def load_weights(model: Decoder, weights: dict[str, np.ndarray]) -> None:
    """Sets every parameter; `weights` has been checked."""
    for name, parameter in model.parameters_by_name.items():
        parameter.set_data(Tensor(np.ascontiguousarray(weights[name])))


def checkpoint_to_resume(config: Config) -> Path:
    """The checkpoint that `resume_training` means: the newest complete one, or the named one.

    Raises:
        UserError: There is none.
    """
    where = config.source.where("resume_training")
    folder = Path(config.load_checkpoint or Path(config.output_dir) / "checkpoints").expanduser()
    if isinstance(config.resume_training, str):
        named = folder / config.resume_training
        if not named.is_dir():
            raise UserError(
                f"there is no such checkpoint in {folder}",
                where=where,
                key="resume_training",
                value=config.resume_training,
                fix="name a folder that is there, or use --resume_training alone for the newest complete one",
            )
        return named
    if not folder.exists():
        raise UserError(
            f"there is nothing to resume: {folder} does not exist",
            where=where,
            key="resume_training",
            value=True,
            fix="give the output_dir of the run to go on with, or leave out --resume_training",
        )
    return find_checkpoint(folder, key="resume_training")


def resume(path: Path, model: Decoder, optimizer: Optimizer, layout: dict[str, Any], ignore_data: bool) -> Position:
    """Takes over weights, optimizer and position from a checkpoint.

    Args:
        path: Checkpoint folder.
        model: Gets the weights.
        optimizer: Gets its state and count of updates.
        layout: Of this run, see `data_layout`.
        ignore_data: Start the data from the beginning (`ignore_data_skip`).

    Raises:
        UserError: The checkpoint does not fit the model, the optimizer or the data.
    """
    found = read_checkpoint(path)
    weights = found.tensors["model"]
    check_weights(weights, {name: tuple(p.shape) for name, p in model.parameters_by_name.items()}, path)
    wanted = optimizer.state_arrays()
    if set(found.tensors["optimizer"]) != set(wanted):
        raise UserError(
            "the checkpoint was made by another optimizer",
            key="resume_training",
            value=str(path),
            fix="use the optimizer section of its config.yaml, or start anew from its weights with --load_checkpoint",
        )
    position = _position(found, layout, ignore_data)
    load_weights(model, weights)
    optimizer.load_state(found.tensors["optimizer"], found.state["optimizer_updates"])
    return position


def _position(found: Checkpoint, layout: dict[str, Any], ignore_data: bool) -> Position:
    position = Position(**found.state["position"])
    if ignore_data:
        return Position(step=position.step, tokens=position.tokens)
    changed = {key: (value, layout[key]) for key, value in found.state["data"].items() if layout[key] != value}
    if changed:
        listed = ", ".join(f"{key} was {before} and is {now}" for key, (before, now) in changed.items())
        raise UserError(
            f"the data is not what the checkpoint was trained on, so its place in it means nothing: {listed}",
            key="resume_training",
            value=str(found.path),
            fix="use the same data and settings, or --ignore_data_skip to start the data from its beginning",
        )
    return position
