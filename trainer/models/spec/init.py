"""Initial weights. numpy only, so that a seed gives the same bits on every device.

========  ============================================  =============================================
kind      parameters                                    initial value
========  ============================================  =============================================
ones      norms                                         1
zeros     biases                                        0
residual  o_proj and down_proj, those of experts too    normal, initializer_range / sqrt(2 * layers)
lora_a    lora_A of adapters                            uniform in +-1 / sqrt(columns), or normal, lora_a_std
lora_b    lora_B of adapters                            0, or normal, lora_b_std
lora_embedding_b  of the embedding's adapter     normal, 1; its lora_A is 0
lora_magnitude  of adapters                      1; lengths of rows, which need the weights, replace it
normal    every other matrix, each expert's too         normal, initializer_range
========  ============================================  =============================================

The projections that write to the residual stream are scaled down with depth (Radford et al. 2019, section 2.3), so that
the stream's variance does not grow with the number of layers. An adapter's values are by default those of Hugging
Face's PEFT (He et al. 2015 with a = sqrt(5)): with B zero it adds nothing at first (Hu et al. 2021, section 4.1).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from trainer.config.patterns import read_pattern
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.adapters import adapter_spec
from trainer.models.spec.names import starts_with_name
from trainer.parallel.sharding import ShardSpec, full_shard_spec

if TYPE_CHECKING:
    from trainer.config.schema.root import Network
    from trainer.models.spec.model import ParameterSpec


_BLOCK = 1 << 20  # numbers that are drawn at a time for a shard of a parameter


def initial_value(
    parameter: ParameterSpec, settings: Network, seed: int, part: ShardSpec | None = None
) -> np.ndarray:
    """Returns the float32 initial value of a parameter, or of the shard `part` of it; `parameter` has its full name.

    Each name has its own random stream, so another parameter changes no value.
    """
    shape = parameter.shape
    if part is None:
        part = full_shard_spec(shape)
    if parameter.init == "lora_magnitude":
        return np.ones(part.shape, np.float32)
    deviation = _rule_deviation(parameter, settings)
    if deviation is None:
        if parameter.init == "ones":
            return np.full(part.shape, 1.0 - settings.norm_offset, np.float32)
        deviation = _deviation(parameter, settings)
    if deviation == 0:
        return np.zeros(part.shape, np.float32)
    stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(parameter.name.encode())]))
    if deviation is None:
        values = _draw_shard(lambda out: stream.random(out=out, dtype=np.float32), math.prod(shape), part)
        values *= 2
        values -= 1
        values *= np.float32(shape[1] ** -0.5)
        return values
    values = _draw_shard(lambda out: stream.standard_normal(out=out, dtype=np.float32), math.prod(shape), part)
    values *= np.float32(deviation)
    return values


def _rule_deviation(parameter: ParameterSpec, settings: Network) -> float | None:
    """Returns the standard deviation that the last rule for a parameter says; None if there is no rule for it."""
    if parameter.role in ("adapter", "buffer"):
        return None
    for rule in reversed(settings.param_init_std_rules or ()):
        if starts_with_name(read_pattern(rule.target), parameter.name):
            return rule.init_method_std
    return None


def _deviation(parameter: ParameterSpec, settings: Network) -> float | None:
    """Returns the standard deviation of the normal values of a matrix; None where they are uniform."""
    if parameter.init == "zeros":
        return 0.0
    if not isinstance(settings, ModelConfig) or parameter.init == "normal":
        return settings.initializer_range
    if parameter.init == "residual":
        return settings.initializer_range / (2 * settings.num_layers) ** 0.5
    if parameter.init == "lora_embedding_b":
        return 1.0
    adapter = adapter_spec(settings)
    if adapter is None:
        return None
    if parameter.init == "lora_a":
        return adapter.a_std
    return adapter.b_std


def _draw_shard(draw: Callable[[np.ndarray], object], size: int, part: ShardSpec) -> np.ndarray:
    """Returns the elements of a shard, of the `size` elements that `draw` yields: it fills arrays one after another."""
    values = np.empty(part.size, np.float32)
    if part.size == size:
        draw(values)
        return values.reshape(part.shape)
    # The block has the elements from begin to end.
    block = np.empty(min(size, _BLOCK), np.float32)
    begin = 0
    end = 0
    for position, at, count in part.runs():
        while count:
            while position >= end:
                begin = end
                end = min(end + _BLOCK, size)
                draw(block[: end - begin])
            taken = min(count, end - position)
            values[at : at + taken] = block[position - begin : position - begin + taken]
            position = position + taken
            at = at + taken
            count = count - taken
    return values.reshape(part.shape)
