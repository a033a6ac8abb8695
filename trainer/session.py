"""What every run mode sets up: the device, the kernels, the model and its inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mindspore

from trainer.checkpoint.state import load_weights
from trainer.config.recompute import recomputed_parts
from trainer.cpu_threads import set_up_cpu_threads
from trainer.device import resolve_device
from trainer.models.decoder import Decoder
from trainer.models.inputs import InputBuilder
from trainer.ops.kernel_set import load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels
from trainer.optim.freeze import frozen_names, trained_shapes
from trainer.optim.groups import parameter_groups
from trainer.optim.optimizer import build_optimizer
from trainer.step.train_step import TrainStep

if TYPE_CHECKING:
    import numpy as np

    from trainer.config import Config


@dataclass(frozen=True)
class Session:
    """A model on its device."""

    model: Decoder
    build_inputs: InputBuilder


def open_session(config: Config, weights: Mapping[str, np.ndarray] | None = None) -> Session:
    """Sets up the device and builds the model.

    Args:
        config: Of the run.
        weights: For the model, checked to fit; None for those of `seed`.

    Raises:
        UserError: The device is not there.
    """
    device = resolve_device(config)
    set_up_device(config, device)
    precision = resolve_precision(config.decoder, config.amp_level, device)
    kernels = load_kernels(select_kernels(config.decoder, device, precision), precision)
    model = Decoder(
        config.decoder,
        kernels,
        seed=config.seed,
        compiled=config.context.mode == 0,
        frozen=frozen_names(config) if config.trains else (),
        recomputed=recomputed_parts(config) if config.trains else (),
    )
    if weights is not None:
        load_weights(model, weights)
    return Session(model, InputBuilder(config.decoder, kernels))


def open_training(
    config: Config, schedule: Callable[[int], float], weights: Mapping[str, np.ndarray] | None = None
) -> TrainStep:
    """The model with its optimizer over the weights that are trained, ready to step; also for notebooks.

    Args:
        config: Of the run.
        schedule: Learning rate of update number `n`, from 0; see `trainer.optim.schedules.build_schedule`.
        weights: As in `open_session`.

    Raises:
        UserError: The device is not there, or `freeze` names no weight.
    """
    session, shapes = open_session(config, weights), trained_shapes(config)
    groups = parameter_groups(shapes, config.optimizer.weight_decay, config.optimizer.type)
    trained = {name: session.model.parameters_by_name[name] for name in shapes}
    return TrainStep(
        session.model,
        build_optimizer(trained, groups, config.optimizer, compiled=config.context.mode == 0),
        schedule,
        session.build_inputs,
        config.runner_wrapper,
        seed=config.seed,
        stop_at_bad_loss=config.check_for_nan_in_loss_and_grad,
    )


def set_up_device(config: Config, device: str) -> None:
    """Chooses device and execution mode.

    The outer loop always runs in PyNative mode; `context.mode: 0` compiles the blocks inside it.
    """
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    if device == "CPU":
        # Once an operator has run, MindSpore refuses to be told a device, the one it is on included.
        if mindspore.get_context("device_target") != "CPU":
            mindspore.set_device("CPU")
        set_up_cpu_threads()
    else:
        mindspore.set_device(device, int(os.environ.get("DEVICE_ID", config.context.device_id)))
