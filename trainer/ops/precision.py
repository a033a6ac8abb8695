"""The dtype that each part of the model computes in on a device, and why. Pure Python: `plan` prints it.

What each `amp_level` means is in `trainer.config.precision`. Always float32: parameters and their gradients, the
residual stream, the softmax of the loss and the loss, norms of gradients, the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainer.config.precision import asked_dtype
from trainer.config.schema.classifier import ClassifierConfig

if TYPE_CHECKING:
    from trainer.config import ModelConfig


class PartDtype(NamedTuple):
    """Dtype of one part ("float32", "float16" or "bfloat16") and the reason."""

    dtype: str
    why: str


_DEFAULT = PartDtype("float32", "the default")


@dataclass(frozen=True)
class Precision:
    """Dtype of each part.

    Only products and fused operators compute in half precision. A reference kernel of another part rounds what it takes
    and what it gives to its dtype and computes in float32 in between, as fused operators do.

    Attributes:
        compute: Matrix products, SwiGLU, and what flows between them inside a block.
        norm: RMSNorm with its weight.
        softmax: The attention's softmax.
        rotary: Rotary tables and the rotation.
    """

    compute: PartDtype = _DEFAULT
    norm: PartDtype = _DEFAULT
    softmax: PartDtype = _DEFAULT
    rotary: PartDtype = _DEFAULT


FLOAT32 = Precision()


def resolve_precision(settings: ModelConfig | ClassifierConfig, amp_level: str | None, device: str) -> Precision:
    """The dtype that each part computes in, by `amp_level` and the keys of the parts.

    A CPU has no bfloat16 kernels: there bfloat16 becomes float32.
    """
    if isinstance(settings, ClassifierConfig):
        return FLOAT32

    def part(key: str) -> PartDtype:
        dtype = asked_dtype(settings, amp_level, key)
        why = key if getattr(settings, key) is not None else f"amp_level {amp_level}" if amp_level else _DEFAULT.why
        if dtype == "bfloat16" and device == "CPU":
            return PartDtype("float32", f"{why} asks for bfloat16, of which a CPU has no kernels")
        return PartDtype(dtype, why)

    return Precision(
        compute=part("compute_dtype"),
        norm=part("layernorm_compute_type"),
        softmax=part("softmax_compute_type"),
        rotary=part("rotary_dtype"),
    )
