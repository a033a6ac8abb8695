"""The operator AdamW of an Ascend, see trainer/ops/ascend/optim.py, with NumPy on the memory of a CPU."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor


def adamw_as_documented(
    var: Parameter, m: Parameter, v: Parameter, max_v: Parameter, gradient: Tensor, step: Tensor, lr: float,
    beta1: float, beta2: float, decay: float, eps: float,
) -> None:  # fmt: skip
    """Updates var, m and v in place; the first update is step 0."""
    assert max_v is v and step.asnumpy().dtype == np.float32
    p, m, v, g = (tensor.asnumpy() for tensor in (var, m, v, gradient))
    lr, beta1, beta2, decay, eps = (np.float32(number) for number in (lr, beta1, beta2, decay, eps))
    number = step.asnumpy() + np.float32(1)
    p *= 1 - lr * decay
    m[...] = beta1 * m + (1 - beta1) * g
    v[...] = beta2 * v + (1 - beta2) * g * g
    p -= lr / (1 - beta1**number) * (m / (np.sqrt(v) / np.sqrt(1 - beta2**number) + eps))
