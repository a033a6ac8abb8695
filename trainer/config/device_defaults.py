"""Defaults that depend on the device: what an Ascend does unless the file says otherwise.

An Ascend computes matrix products in bfloat16 many times as fast as in float32, and its attention and grouped product
are fused operators. A CPU has none of these, so there the same keys mean what they always meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.schema.root import Config

_MODEL = "model.model_config"


def device_defaults(config: Config, device: str) -> dict[str, Any]:
    """The keys below `model_config` that the file leaves to the device, with their values there."""
    if device != "Ascend" or config.classifier is not None:
        return {}
    settings = config.decoder
    moe = config.decoder.experts
    found: dict[str, Any] = {}
    if settings.compute_dtype is None and config.amp_level is None:
        found["compute_dtype"] = "bfloat16"
    if settings.use_flash_attention is None:
        found["use_flash_attention"] = True
    # With a capacity use_gmm would stop dropping tokens: a device must not change which tokens an expert computes.
    if moe is not None and moe.use_gmm is None and moe.effective_capacity is None:
        found["moe_config.use_gmm"] = True
    return found


def apply_device_defaults(config: Config, device: str) -> Config:
    """The configuration with the values of `device_defaults` written in, so that whatever reads or saves it sees them.

    A second call changes nothing.
    """
    changes = device_defaults(config, device)
    if not changes:
        return config
    settings = config.decoder
    update = {key: value for key, value in changes.items() if "." not in key}
    if "moe_config.use_gmm" in changes:
        update["moe_config"] = settings.moe_config.model_copy(update={"use_gmm": True})
    model = config.model.model_copy(update={"settings": settings.model_copy(update=update)})
    return config.model_copy(update={"model": model})


def device_default_note(config: Config, device: str) -> str:
    """Which of these values the run has although nothing wrote them; empty if there are none.

    `config` is one that `apply_device_defaults` has completed.
    """
    if device != "Ascend" or config.classifier is not None:
        return ""
    settings = config.decoder
    moe = config.decoder.experts
    values = {"compute_dtype": settings.compute_dtype, "use_flash_attention": settings.use_flash_attention}
    values |= {} if moe is None else {"moe_config.use_gmm": moe.use_gmm}
    found = [f"{key} {value}" for key, value in values.items() if value and not config.source.where(f"{_MODEL}.{key}")]
    if found:
        return f"defaults of an {device}: {', '.join(found)}"
    return ""
