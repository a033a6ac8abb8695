"""The dtype that each part of the model computes in on a device, and why. Pure Python: `plan` prints it.

What each `amp_level` means is in `trainer.config.precision`. Always float32: parameters and their gradients, the
residual stream, the softmax of the loss and the loss, norms of gradients, the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainer.config.precision import requested_dtype
from trainer.config.schema.classifier import ClassifierConfig

if TYPE_CHECKING:
    from trainer.config import ModelConfig


class PartDtype(NamedTuple):
    """Dtype of one part ("float32", "float16" or "bfloat16") and the reason."""

    dtype: str
    why: str


class NarrowProducts(NamedTuple):
    """Who multiplies in half precision on a CPU, "oneDNN" or "emulated", and how; or why nobody does in bfloat16."""

    by: str = ""
    why: str = "of which a CPU has no kernels"
    nothing_else: bool = False
    """Whether nothing else is in half precision either, float16 included."""


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
        by: Who multiplies, where native layers of a CPU have products in half precision.
    """

    compute: PartDtype = _DEFAULT
    norm: PartDtype = _DEFAULT
    softmax: PartDtype = _DEFAULT
    rotary: PartDtype = _DEFAULT
    by: str = ""


FLOAT32 = Precision()


def resolve_precision(
    settings: ModelConfig | ClassifierConfig, amp_level: str | None, device: str, narrow: NarrowProducts | None = None
) -> Precision:
    """The dtype that each part computes in, by `amp_level` and the keys of the parts.

    On a CPU only matrix products compute in half precision, those of native layers (`narrow.by`); beside such products
    all is float32. Elsewhere on a CPU what asks for bfloat16 is float32.
    """
    if isinstance(settings, ClassifierConfig):
        return FLOAT32
    narrow = narrow or NarrowProducts()
    has_narrow_products = (
        device == "CPU" and bool(narrow.by) and requested_dtype(settings, amp_level, "compute_dtype") != "float32"
    )

    def part(key: str) -> PartDtype:
        dtype = requested_dtype(settings, amp_level, key)
        if getattr(settings, key) is not None:
            why = key
        else:
            if amp_level:
                why = f"amp_level {amp_level}"
            else:
                why = _DEFAULT.why
        if has_narrow_products and key == "compute_dtype":
            return PartDtype(dtype, f"{why}; {narrow.why}")
        if has_narrow_products and dtype != "float32":
            return PartDtype("float32", f"{why} asks for {dtype}; between products in half precision a CPU has float32")
        if dtype != "float32" and narrow.nothing_else:
            return PartDtype("float32", f"{why} asks for {dtype}, {narrow.why}")
        if dtype == "bfloat16" and device == "CPU":
            if narrow.by:
                reason = "of which a CPU has matrix products alone"
            else:
                reason = narrow.why
            return PartDtype("float32", f"{why} asks for bfloat16, {reason}")
        return PartDtype(dtype, why)

    return Precision(
        compute=part("compute_dtype"),
        norm=part("layernorm_compute_type"),
        softmax=part("softmax_compute_type"),
        rotary=part("rotary_dtype"),
        by=narrow.by if has_narrow_products else "",
    )
