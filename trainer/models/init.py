"""Initial weights. numpy only, so that a seed gives the same bits on every device.

===============================================  =============================================
parameter                                        initial value
===============================================  =============================================
norm weights (one axis, name ends in "norm...")  1
biases                                           0
o_proj and down_proj                             normal, initializer_range / sqrt(2 * layers)
lora_A of adapters                               uniform in +-1 / sqrt(columns)
lora_B of adapters                               0
every other matrix, each expert's too             normal, initializer_range
===============================================  =============================================

The two projections that write to the residual stream are scaled down with depth (Radford et al. 2019, section 2.3),
so that the stream's variance does not grow with the number of layers. An adapter's values are those of Hugging Face's
PEFT (He et al. 2015 with a = sqrt(5)): with B zero it adds nothing at first (Hu et al. 2021, section 4.1).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainer.config import ModelConfig


def initial_value(name: str, shape: tuple[int, ...], settings: ModelConfig, seed: int) -> np.ndarray:
    """Float32 initial value of one parameter; each name has its own random stream, so adding one changes no other."""
    if name.endswith(("bias", ".lora_B.weight")):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    if name.endswith(".lora_A.weight"):
        return (stream.random(shape, dtype=np.float32) * 2 - 1) * np.float32(shape[1] ** -0.5)
    deviation = settings.initializer_range
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= (2 * settings.num_layers) ** 0.5
    return stream.standard_normal(shape, dtype=np.float32) * np.float32(deviation)
