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
    """The device of `context.device_target`; the best one there is when that is null, or with `device_fallback`.

    Raises:
        UserError: The device that was asked for is not there, or a setting of an Ascend's is none.
    """
    wanted = config.context.device_target
    lacks = _lacks(config)
    if lacks and wanted is not None and not config.context.device_fallback:
        raise UserError(
            lacks,
            where=config.source.where(_KEY),
            key=_KEY,
            value=wanted,
            fix="use --device_target CPU, remove the key to take the best device there is, or add --device_fallback;"
            " `run_trainer.py doctor` looks at this machine",
        )
    if lacks:
        device = "CPU"
    else:
        device = wanted or "Ascend"
    device_calls(config, device)
    jit_options(config, device)
    return device


def planned_device(config: Config) -> str:
    """The device that a plan is for: a file for Ascend can be planned on any machine.

    Raises:
        UserError: As of `resolve_device`, but for an Ascend that is not there.
    """
    if not plans_elsewhere(config):
        return resolve_device(config)
    device_calls(config, "Ascend")
    jit_options(config, "Ascend")
    return "Ascend"


def plans_elsewhere(config: Config) -> bool:
    """Whether the file is for an Ascend and this machine has none."""
    context = config.context
    return context.device_target == "Ascend" and not context.device_fallback and bool(_lacks(config))


def device_notes(config: Config, device: str) -> Iterator[str]:
    """What of the section `context` is different, or unused, on the device of this run."""
    wanted = config.context.device_target
    lacks = _lacks(config)
    defaults = device_default_note(config, device)
    if defaults:
        yield defaults
    if device == "Ascend" and SPEED_UP_KEY in (config.context.ascend_config or {}) and not is_semi_auto(config):
        text = f"context.ascend_config.{SPEED_UP_KEY}: not read, only semi-automatic mode has it"
        yield Note(text, "ignored")
    if lacks and device == wanted:
        yield Note(f"{_KEY} {wanted}: planned for another machine; {lacks}", "parallel")
    elif lacks and wanted is not None:
        yield f"{_KEY} {wanted}: {lacks}; the run uses the {device} (device_fallback)"
    elif lacks and find_ascend(Path("/"), os.environ).cards:
        yield f"{lacks}: the run uses the {device}"
    elif wanted is None and config.context.device_fallback:
        text = f"context.device_fallback: not used, without {_KEY} a run takes the best device there is"
        yield Note(text, "ignored")
    unused = unused_keys(config, device)
    if unused:
        yield Note(f"ignored: {', '.join(unused)}: only Ascend devices have it", "ignored")
    settings = [str(call) for call in device_calls(config, device)]
    settings += [f"mindspore.jit {name}={value}" for name, value in jit_options(config, device).items()]
    if settings:
        yield Note(f"context: set with {', '.join(settings)}", "ignored")


def _lacks(config: Config) -> str:
    """Why the requested device (by default an Ascend) cannot be used; empty when it can."""
    wanted = config.context.device_target
    if wanted == "CPU":
        return ""
    if wanted == "GPU":
        return _NO_GPU
    missing = missing_for_ascend(Path("/"), os.environ)
    if missing:
        return f"this machine cannot run on an Ascend: {', '.join(missing)}"
    return ""
