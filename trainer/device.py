"""Which device a run uses. Pure Python: looks at the machine without importing MindSpore."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config

_ASCEND_SIGNS = (Path("/dev/davinci0"), Path("/dev/davinci_manager"))


def resolve_device(config: Config) -> str:
    """The device of `context.device_target`; the best one there is when that is null.

    Raises:
        UserError: The device that was asked for is not there.
    """
    wanted = config.context.device_target
    ascend = any(sign.exists() for sign in _ASCEND_SIGNS) or shutil.which("npu-smi") is not None
    if wanted is None:
        return "Ascend" if ascend else "CPU"
    if wanted == "Ascend" and not ascend:
        raise UserError(
            "this machine has no Ascend device (no /dev/davinci*, no npu-smi)",
            where=config.source.where("context.device_target"),
            key="context.device_target",
            value=wanted,
            fix="use --device_target CPU, or remove the key to take the best device there is",
        )
    if wanted == "GPU":
        raise UserError(
            "MindSpore 2.10 from the package index has no GPU kernels",
            where=config.source.where("context.device_target"),
            key="context.device_target",
            value=wanted,
            fix="use --device_target CPU",
        )
    return wanted
