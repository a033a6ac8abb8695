"""The published peaks of devices, which model FLOPs are compared with. A CPU has none."""

from __future__ import annotations

_PEAKS = {
    "Ascend910B1": 373.88e12, "Ascend910B2": 353.8944e12, "Ascend910B3": 294.912e12, "Ascend910B4": 245.76e12,
    "Ascend910_9362": 353.8944e12, "Ascend910_9392": 353.8944e12,
}  # fmt: skip
"""FLOP/s of products in float16 and bfloat16, by MindSpore's name of the device: its cube cores, times the 16 x 16 x 16
products and sums of a cycle, times its clock (of a 910B3 20 x 8192 x 1.8 GHz). Figures a little larger that are quoted
as well include the vector cores. Source: the published specifications, as torchtitan's plug-in for Ascend has them."""


def peak_flops(device: str, dtype: str, ranks: int) -> float | None:
    """Returns the FLOP/s that the devices of all ranks reach together in products of this dtype; None if unknown."""
    if device == "CPU" or dtype not in ("float16", "bfloat16"):
        return None
    peak = _PEAKS.get(_device_name())
    return peak and peak * ranks


def _device_name() -> str:
    import mindspore

    try:
        return mindspore.hal.get_device_name(0)
    except Exception:  # a device whose name MindSpore does not know has no published peak
        return ""
