"""What every run mode sets up: the device, the kernels, the model and its inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mindspore

from trainer.checkpoint.state import load_weights
from trainer.cpu_threads import set_up_cpu_threads
from trainer.device import resolve_device
from trainer.models.decoder import Decoder
from trainer.models.inputs import InputBuilder
from trainer.ops.kernel_set import load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels

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
    model = Decoder(config.decoder, kernels, seed=config.seed, compiled=config.context.mode == 0)
    if weights is not None:
        load_weights(model, weights)
    return Session(model, InputBuilder(config.decoder, kernels))


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
