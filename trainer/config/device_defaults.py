"""Defaults that depend on the device: those of an Ascend for keys that the file leaves out.

An Ascend computes matrix products in bfloat16 many times as fast as in float32, and its attention and grouped product
are fused operators. A CPU has no such operators and keeps the defaults of the schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.config.checks.problem import value_of
from trainer.errors import value_text

if TYPE_CHECKING:
    from trainer.config.schema.root import Config

_MODEL = "model.model_config"


def device_defaults(config: Config, device: str) -> dict[str, Any]:
    """Returns the values of a device for keys below `model_config` that the file leaves out."""
    if device != "Ascend" or not config.is_decoder:
        return {}
    settings = config.decoder
    moe = config.decoder.experts
    defaults: dict[str, Any] = {}
    if settings.compute_dtype is None and config.amp_level is None:
        defaults["compute_dtype"] = "bfloat16"
    if settings.use_flash_attention is None:
        defaults["use_flash_attention"] = True
    # With a capacity use_gmm would stop dropping tokens: a device must not change which tokens an expert computes.
    if moe is not None and moe.use_gmm is None and moe.effective_capacity is None:
        defaults["moe_config.use_gmm"] = True
    return defaults


def apply_device_defaults(config: Config, device: str) -> Config:
    """Returns the configuration with the values of `device_defaults` set. A second call changes nothing."""
    changes = device_defaults(config, device)
    if not changes:
        return config
    settings = config.decoder
    update = {key: value for key, value in changes.items() if "." not in key}
    if settings.moe_config is not None and "moe_config.use_gmm" in changes:
        update["moe_config"] = settings.moe_config.model_copy(update={"use_gmm": True})
    model = config.model.model_copy(update={"settings": settings.model_copy(update=update)})
    return config.model_copy(update={"model": model})


def device_default_note(config: Config, device: str) -> str:
    """Returns a note about the device's defaults in use; empty if there are none.

    `config` is a result of `apply_device_defaults`.
    """
    if device != "Ascend":
        return ""
    keys = ["compute_dtype", "use_flash_attention"]
    if config.decoder.experts is not None:
        keys.append("moe_config.use_gmm")
    values = {key: value_of(config, f"{_MODEL}.{key}") for key in keys if not config.source.where(f"{_MODEL}.{key}")}
    used = [f"{key} {value_text(value)}" for key, value in values.items() if value]
    if used:
        return f"defaults of an {device}: {', '.join(used)}"
    return ""
