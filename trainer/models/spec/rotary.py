"""Rotary position tables: cosines and sines of every position, with the scalings for longer contexts. numpy only.

Sources: Su et al. 2021 (RoPE); linear: Chen et al. 2023; yarn: Peng et al. 2023; llama3: Meta's Llama 3.1 release;
longrope: Ding et al. 2024; dynamic: Hunyuan's NTK scaling with a fixed alpha. The arithmetic follows Hugging Face's
`modeling_rope_utils`, against which it is tested.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig, RopeScaling


def rotary_angles(settings: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines of the first `positions` positions, float32 [positions, rotary_head_size].

    The second half of the rotated width repeats the first half; with rope_interleave, neighbours are equal instead. The
    rest of a head has cosine 1 and sine 0, and so has every head without positions.
    """
    size = settings.rotary_size
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    frequencies = 1.0 / settings.rope_base**exponents
    factor = 1.0
    if settings.rope_scaling is not None and settings.rope_scaling.rope_type != "default":
        frequencies, factor = _scale(frequencies, settings, settings.rope_scaling)
    if settings.position_embedding_type == "none":
        frequencies = np.zeros_like(frequencies)
        factor = 1.0
    angles = np.outer(np.arange(positions), frequencies)
    if settings.rope_interleave:
        angles = np.repeat(angles, 2, axis=-1)
    else:
        angles = np.concatenate([angles, angles], axis=-1)
    unrotated = ((0, 0), (0, settings.rotary_head_size - size))
    cos = np.pad(np.cos(angles) * factor, unrotated, constant_values=1.0)
    sin = np.pad(np.sin(angles) * factor, unrotated)
    return cos.astype(np.float32), sin.astype(np.float32)


def all_rotary_angles(settings: ModelConfig, positions: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the tables of `rotary_angles`; a second item has those of layers with a sliding window, if they differ.
    """
    angles = [rotary_angles(settings, positions)]
    if settings.has_window_rotary:
        changes = {"rope_theta": settings.window_rope_theta, "rope_ratio": 1.0, "rope_scaling": None}
        angles.append(rotary_angles(settings.model_copy(update=changes), positions))
    return angles


def _scale(frequencies: np.ndarray, settings: ModelConfig, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    """Returns scaled frequencies, and the factor on cosines and sines."""
    trained_length = settings.trained_length
    if scaling.rope_type == "longrope":
        return _longrope(frequencies, settings, scaling)
    if scaling.rope_type == "dynamic":
        return _ntk_alpha(frequencies, settings.rotary_size, scaling), 1.0
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling, trained_length), 1.0
    return _yarn(frequencies, settings, scaling, trained_length), _yarn_attention_factor(scaling)


def _longrope(frequencies: np.ndarray, settings: ModelConfig, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    """Divides each frequency by its short factor, or where sequences exceed the trained length by its long factor."""
    divisors = scaling.short_factor
    if settings.seq_length > settings.trained_length:
        divisors = scaling.long_factor
    factor = scaling.attention_factor
    if factor is None:
        factor = math.sqrt(1 + math.log(scaling.factor) / math.log(settings.trained_length))
    return frequencies / np.array(divisors, np.float64), factor


def _ntk_alpha(frequencies: np.ndarray, size: int, scaling: RopeScaling) -> np.ndarray:
    """Multiplies the base by alpha^(d / (d - 2)): the lowest frequency is divided by alpha, and the highest stays."""
    assert scaling.alpha is not None, "a rule requires it"
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    return frequencies / (scaling.alpha ** (size / (size - 2))) ** exponents


def _llama3(frequencies: np.ndarray, scaling: RopeScaling, trained_length: int) -> np.ndarray:
    """Keeps short wavelengths, divides long ones by the factor, and blends those between."""
    turns = trained_length * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: np.ndarray, settings: ModelConfig, scaling: RopeScaling, trained_length: int) -> np.ndarray:
    """Keeps frequencies with many rotations in the trained length, divides those with few, and blends in between."""
    size = settings.rotary_size

    def dimension_of(rotations: float) -> float:
        """Returns the dimension that makes this many rotations over the trained length."""
        return size * math.log(trained_length / (rotations * 2 * math.pi)) / (2 * math.log(settings.rope_base))

    low = dimension_of(scaling.beta_fast)
    high = dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / ((high - low) or 0.001), 0, 1)
    return frequencies * (1 - ramp) + frequencies / scaling.factor * ramp


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.mscale_of(scaling.mscale) / scaling.mscale_of(scaling.mscale_all_dim)
    return scaling.mscale_of(1.0)
