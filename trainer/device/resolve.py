"""Which device a run uses. Pure Python: looks at the machine without importing MindSpore."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.checks.parallel import is_semi_auto
from trainer.config.device_defaults import device_default_note
from trainer.config.note import Note
from trainer.device.doctor import find_ascend, missing_for_ascend
from trainer.device.settings import SPEED_UP_KEY, device_calls, jit_options, unused_keys
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config

_KEY = "context.device_target"
_NO_GPU = "MindSpore 2.10 from the package index has no GPU kernels"


def resolve_device(config: Config) -> str:
    """Returns the device of `context.device_target`, or the best available one if that is null or with
    `device_fallback`.

    Raises:
        UserError: The requested device is not available, or a setting for an Ascend is not valid.
    """
    target = config.context.device_target
    obstacle = _obstacle(config)
    if obstacle and target is not None and not config.context.device_fallback:
        fix = "use --device_target CPU, or add --device_fallback to use the best available device"
        details = "`run_trainer.py doctor` shows details"
        raise UserError(obstacle, where=config.source.where(_KEY), key=_KEY, value=target, fix=f"{fix}; {details}")
    device = "CPU"
    if not obstacle:
        device = target or "Ascend"
    device_calls(config, device)
    jit_options(config, device)
    return device


def planned_device(config: Config) -> str:
    """Returns the device for which a plan is made: a file for Ascend can be planned on any machine.

    Raises:
        UserError: The requested device is not available, unless it is an Ascend, or one of its settings is not valid.
    """
    if not plans_elsewhere(config):
        return resolve_device(config)
    device_calls(config, "Ascend")
    jit_options(config, "Ascend")
    return "Ascend"


def plans_elsewhere(config: Config) -> bool:
    """Returns whether the file is for an Ascend and this machine has none."""
    context = config.context
    return context.device_target == "Ascend" and not context.device_fallback and bool(_obstacle(config))


def device_notes(config: Config, device: str) -> Iterator[str]:
    """Yields notes on keys of the section `context` that are unused, or have another effect, on the device of this run.
    """
    target = config.context.device_target
    obstacle = _obstacle(config)
    if defaults := device_default_note(config, device):
        yield defaults
    if device == "Ascend" and SPEED_UP_KEY in (config.context.ascend_config or {}) and not is_semi_auto(config):
        text = f"context.ascend_config.{SPEED_UP_KEY}: not read, only semi-automatic mode has it"
        yield Note(text, "ignored")
    if obstacle and device == target:
        yield Note(f"{_KEY} {target}: planned for another machine; {obstacle}", "parallel")
    elif obstacle and target is not None:
        yield f"{_KEY} {target}: {obstacle}; the run uses the {device} (device_fallback)"
    elif obstacle and find_ascend(Path("/"), os.environ).cards:
        yield f"{obstacle}: the run uses the {device}"
    elif target is None and config.context.device_fallback:
        text = f"context.device_fallback: not used, without {_KEY} a run takes the best device there is"
        yield Note(text, "ignored")
    if unused := unused_keys(config, device):
        yield Note(f"ignored: {', '.join(unused)}: only Ascend devices have it", "ignored")
    settings = [str(call) for call in device_calls(config, device)]
    settings += [f"mindspore.jit {name}={value}" for name, value in jit_options(config, device).items()]
    if settings:
        yield Note(f"context: set with {', '.join(settings)}", "ignored")


def _obstacle(config: Config) -> str:
    """Returns why the requested device, by default an Ascend, cannot be used; empty if it can."""
    target = config.context.device_target
    if target == "CPU":
        return ""
    if target == "GPU":
        return _NO_GPU
    if missing := missing_for_ascend(Path("/"), os.environ):
        return f"this machine has no usable Ascend: {', '.join(missing)}"
    return ""
