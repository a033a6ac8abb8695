"""The dtype that each part of the model computes in on a device, and the reason. Pure Python: `plan` prints both.

`trainer.config.precision` documents each `amp_level`. Always float32: parameters and their gradients, the residual
stream, the loss and its softmax, gradient norms, the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainer.config.precision import requested_dtype

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig


class PartDtype(NamedTuple):
    """The dtype of one part ("float32", "float16" or "bfloat16") and the reason."""

    dtype: str
    why: str


class NarrowProducts(NamedTuple):
    """How a CPU multiplies matrices in half precision.

    Attributes:
        by: "oneDNN", "emulated" or, if bfloat16 is not available, empty.
        why: How the products are computed, or why bfloat16 is not available.
        nothing_else: Whether all parts are float32, even those with float16.
    """

    by: str = ""
    why: str = "of which a CPU has no kernels"
    nothing_else: bool = False


_DEFAULT = PartDtype("float32", "the default")


@dataclass(frozen=True)
class Precision:
    """The dtype of each part.

    Only matrix products and fused operators compute in half precision. The plain kernels of other parts round their
    inputs and results to their dtype and compute in float32 in between, as fused operators do.

    Attributes:
        compute: Matrix products, SwiGLU, and the values between them inside a block.
        norm: RMSNorm with its weight.
        softmax: The attention's softmax.
        rotary: Rotary tables and the rotation.
        by: `NarrowProducts.by` if native CPU layers multiply in half precision, else empty.
    """

    compute: PartDtype = _DEFAULT
    norm: PartDtype = _DEFAULT
    softmax: PartDtype = _DEFAULT
    rotary: PartDtype = _DEFAULT
    by: str = ""


FLOAT32 = Precision()


def resolve_precision(
    settings: ModelConfig, amp_level: str | None, device: str, narrow: NarrowProducts | None = None
) -> Precision:
    """Returns the dtype of each part, from `amp_level` and the keys of the parts.

    On a CPU, only the matrix products of native layers have half precision (`narrow.by`). All other parts are then
    float32. Without such products, a CPU computes parts with bfloat16 in float32.
    """
    narrow = narrow or NarrowProducts()
    has_narrow_products = (
        device == "CPU" and bool(narrow.by) and requested_dtype(settings, amp_level, "compute_dtype") != "float32"
    )

    def part(key: str) -> PartDtype:
        """Returns the dtype of a part on this device, and why."""
        dtype = requested_dtype(settings, amp_level, key)
        why = _DEFAULT.why
        if getattr(settings, key) is not None:
            why = key
        elif amp_level:
            why = f"amp_level {amp_level}"
        if has_narrow_products and key == "compute_dtype":
            return PartDtype(dtype, f"{why}; {narrow.why}")
        if has_narrow_products and dtype != "float32":
            return PartDtype("float32", f"{why} asks for {dtype}; between products in half precision a CPU has float32")
        if dtype != "float32" and narrow.nothing_else:
            return PartDtype("float32", f"{why} asks for {dtype}, {narrow.why}")
        if dtype == "bfloat16" and device == "CPU":
            reason = narrow.why
            if narrow.by:
                reason = "of which a CPU has matrix products alone"
            return PartDtype("float32", f"{why} asks for bfloat16, {reason}")
        return PartDtype(dtype, why)

    return Precision(
        compute=part("compute_dtype"),
        norm=part("layernorm_compute_type"),
        softmax=part("softmax_compute_type"),
        rotary=part("rotary_dtype"),
        by=narrow.by if has_narrow_products else "",
    )
