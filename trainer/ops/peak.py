"""The published peak FLOP/s of devices, against which model FLOPs are compared. A CPU has none."""

from __future__ import annotations

_PEAKS = {
    "Ascend910B1": 373.88e12, "Ascend910B2": 353.8944e12, "Ascend910B3": 294.912e12, "Ascend910B4": 245.76e12,
    "Ascend910_9362": 353.8944e12, "Ascend910_9392": 353.8944e12,
}  # fmt: skip
"""FLOP/s of matrix products in float16 and bfloat16, by MindSpore's name of the device.

A peak is the number of cube cores x the 16 x 16 x 16 multiplications and additions of a cycle x the clock; for a 910B3
20 x 8192 x 1.8 GHz. Slightly larger figures are also quoted: they include the vector cores. Source: the published
specifications, as in torchtitan's plug-in for Ascend."""


def peak_flops(device: str, dtype: str, ranks: int) -> float | None:
    """Returns the peak FLOP/s of all ranks' devices together for matrix products of this dtype; None if unknown."""
    if device == "CPU" or dtype not in ("float16", "bfloat16"):
        return None
    peak = _PEAKS.get(_device_name())
    return peak and peak * ranks


def _device_name() -> str:
    import mindspore

    try:
        return mindspore.hal.get_device_name(0)
    except Exception:  # MindSpore does not know this device
        return ""
