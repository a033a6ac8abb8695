"""Where a step computes what it reports, and how the host reads it: once a step, all together."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from trainer.arrays import measures as of_host
from trainer.ops.ascend import measures as of_device


def device_measures() -> ModuleType:
    """The functions for the current device: a CPU's compute arrays, those of other devices leave tensors there."""
    if mindspore.get_context("device_target") == "CPU":
        return of_host
    return of_device


def read_together(values: Sequence[Tensor | np.ndarray | float]) -> list[np.ndarray]:
    """The values on the host. Tensors travel as one float32 tensor: the host waits once for the device."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if tensors:
        packed = ops.concat([tensor.reshape(-1).astype(mstype.float32) for tensor in tensors]).asnumpy()
        parts = iter(np.split(packed, np.cumsum([tensor.size for tensor in tensors])[:-1]))
    return [
        next(parts).reshape(value.shape) if isinstance(value, Tensor) else np.asarray(value) for value in values
    ]
