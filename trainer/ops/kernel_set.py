"""Choices (`select.py`) turned into classes: the only place that imports both implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindspore import nn

from trainer.ops import ascend, reference
from trainer.ops.select import KernelChoice


@dataclass(frozen=True)
class KernelSet:
    """The kernels that a model is built from. Cells are classes: make one instance for every call site."""

    linear: type[nn.Cell]
    linear_bias: type[nn.Cell]
    rms_norm: type[nn.Cell]
    rotary: type[nn.Cell]
    swiglu: type[nn.Cell]
    attention: type[nn.Cell]
    cross_entropy: type[nn.Cell]
    rotary_tables: Callable
    attention_mask: Callable
    cached_mask: Callable
    cached_attention: Callable
    sum_of_squares: Callable


def load_kernels(choices: Sequence[KernelChoice]) -> KernelSet:
    """The classes and functions that the choices name."""
    room = {choice.kernel: ascend if choice.fused else reference for choice in choices}
    return KernelSet(
        linear=reference.Linear,
        linear_bias=reference.LinearBias,
        rms_norm=room["rms_norm"].RmsNorm,
        rotary=room["rotary_embedding"].Rotary,
        swiglu=room["swiglu"].SwiGLU,
        attention=room["attention"].Attention,
        cross_entropy=reference.CrossEntropy,
        rotary_tables=room["rotary_embedding"].rotary_tables,
        attention_mask=room["attention"].attention_mask,
        cached_mask=reference.attention_mask,
        cached_attention=reference.cached_attention,
        sum_of_squares=reference.sum_of_squares,
    )
