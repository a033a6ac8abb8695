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

import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from trainer.parallel.sharding import ArrayPart, whole_array

if TYPE_CHECKING:
    from trainer.config import ModelConfig


_BLOCK = 1 << 20  # numbers that are drawn at a time where a part of them is needed


def initial_value(
    name: str, shape: tuple[int, ...], settings: ModelConfig, seed: int, part: ArrayPart | None = None
) -> np.ndarray:
    """Float32 initial value of one parameter of this shape, or of a part of it.

    Each name has its own random stream, so adding one changes no other.
    """
    part = whole_array(shape) if part is None else part
    if name.endswith(("bias", ".lora_B.weight")):
        return np.zeros(part.shape, np.float32)
    if len(shape) == 1:
        return np.ones(part.shape, np.float32)
    stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    if name.endswith(".lora_A.weight"):
        values = _drawn(lambda out: stream.random(out=out, dtype=np.float32), math.prod(shape), part)
        values *= 2
        values -= 1
        values *= np.float32(shape[1] ** -0.5)
        return values
    deviation = settings.initializer_range
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= (2 * settings.num_layers) ** 0.5
    values = _drawn(lambda out: stream.standard_normal(out=out, dtype=np.float32), math.prod(shape), part)
    values *= np.float32(deviation)
    return values


def _drawn(draw: Callable[[np.ndarray], object], size: int, part: ArrayPart) -> np.ndarray:
    """The numbers of a part among `size` numbers that `draw` fills arrays with, one after the other."""
    values = np.empty(part.size, np.float32)
    if part.size == size:
        draw(values)
        return values.reshape(part.shape)
    block, begin, end = np.empty(min(size, _BLOCK), np.float32), 0, 0  # it has the numbers from begin to end
    for position, at, count in part.runs():
        while count:
            while position >= end:
                begin, end = end, min(end + _BLOCK, size)
                draw(block[: end - begin])
            taken = min(count, end - position)
            values[at : at + taken] = block[position - begin : position - begin + taken]
            position, at, count = position + taken, at + taken, count - taken
    return values.reshape(part.shape)
