"""The functions that compute the metrics of a step, and one transfer that brings the results to the host."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from trainer.arrays import measures as cpu_measures
from trainer.ops.ascend import measures as ascend_measures


def metric_functions() -> ModuleType:
    """Returns the module of metric functions for the current device.

    On a CPU they return NumPy arrays; on other devices they return tensors, which stay on the device.
    """
    if mindspore.get_context("device_target") == "CPU":
        return cpu_measures
    return ascend_measures


def read_together(values: Sequence[Tensor | np.ndarray | float]) -> list[np.ndarray]:
    """Returns the values as arrays on the host. Tensors are copied as one float32 tensor: the host waits only once."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return [np.asarray(value) for value in values]
    packed = ops.concat([tensor.reshape(-1).astype(mstype.float32) for tensor in tensors]).asnumpy()
    copies = iter(np.split(packed, np.cumsum([tensor.size for tensor in tensors])[:-1]))
    arrays = []
    for value in values:
        if isinstance(value, Tensor):
            arrays.append(next(copies).reshape(value.shape))
        else:
            arrays.append(np.asarray(value))
    return arrays
