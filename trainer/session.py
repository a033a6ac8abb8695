"""What every run mode sets up: the device, the kernels, the model and its inputs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mindspore

from trainer.checkpoint.state import load_weights
from trainer.checkpoint.weights import check_weights, read_weights
from trainer.device import resolve_device
from trainer.models.decoder import Decoder
from trainer.models.inputs import InputBuilder
from trainer.models.shapes import parameter_shapes
from trainer.ops.kernel_set import load_kernels
from trainer.ops.select import select_kernels

if TYPE_CHECKING:
    from trainer.config import Config


@dataclass(frozen=True)
class Session:
    """A model on its device."""

    model: Decoder
    build_inputs: InputBuilder


def open_session(config: Config) -> Session:
    """Sets up the device and builds the model, with the weights of `load_checkpoint` if there is one.

    Raises:
        UserError: The device is not there, or the weights do not fit.
    """
    weights = _requested_weights(config)
    device = resolve_device(config)
    set_up_device(config, device)
    kernels = load_kernels(select_kernels(config.decoder, device))
    model = Decoder(config.decoder, kernels, seed=config.seed, compiled=config.context.mode == 0)
    if weights is not None:
        load_weights(model, weights)
    return Session(model, InputBuilder(config.decoder, kernels))


def set_up_device(config: Config, device: str) -> None:
    """Chooses device and execution mode.

    The outer loop always runs in PyNative mode; `context.mode: 0` compiles the blocks inside it.
    On a CPU operators are launched one after the other from the calling thread: MindSpore's asynchronous queues spin while they
    wait and take a core from the threads that compute, which doubles the time of a step on two cores.
    """
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    if device == "CPU":
        mindspore.set_device("CPU")
        mindspore.runtime.launch_blocking()
    else:
        mindspore.set_device(device, int(os.environ.get("DEVICE_ID", config.context.device_id)))


def _requested_weights(config: Config):
    # A run that resumes takes its weights from the checkpoint it resumes from.
    if not config.load_checkpoint or config.resume_training:
        return None
    path, where = Path(config.load_checkpoint).expanduser(), config.source.where("load_checkpoint")
    weights = read_weights(path, where)
    check_weights(weights, parameter_shapes(config.decoder), path, where)
    return weights
