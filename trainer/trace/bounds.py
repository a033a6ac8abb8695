"""How far rounding may move a tensor: the bound of a comparison.

A product of n terms whose factors are rounded to a dtype with unit roundoff u, and which is summed in float32, is off
by about u + u32 sqrt(n) of its norm, because the errors of the terms have random signs (Higham and Mary 2019, "A new
approach to probabilistic rounding error analysis"). A sublayer adds such errors to the residual stream, so after d
sublayers they have grown by sqrt(d). The backward pass goes through all sublayers and back. `MARGIN` covers the few
roundings of a sublayer and the exponential of the attention, which a clean run does not exceed:
`scripts/check_trace.py` measures that.

Each later step begins with weights that differ: AdamW moves a weight by the learning rate, whatever the size of its
gradient, so where the gradient is nothing but rounding, two runs move it apart by twice that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.trace.record import Key
from trainer.trace.sketch import Summary

MARGIN = 6.0
UNIT_ROUNDOFFS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_STEEP = ("self_attn.q_", "self_attn.k_", "self_attn.kv_", "self_attn.sinks", "mlp.gate.")
"""Parameters whose gradients pass the derivative of a softmax, a difference of numbers that nearly cancel."""
_STEEPNESS = 4.0


def coarsest(dtypes: Iterable[str]) -> str:
    """Returns the dtype that rounds most."""
    return max(dtypes, key=lambda name: UNIT_ROUNDOFFS.get(name, 0.0))


@dataclass(frozen=True)
class Rounding:
    """What is known about the rounding of two runs that are compared.

    Attributes:
        dtype: The coarser of the dtypes of their matrix products.
        layers: Layers of the model.
        summands: Terms of the longest sum.
        learning_rates: Of the steps; the larger ones of the two runs.
        drift: 2 / the root mean square of a weight, for the matrix with the smallest weights.
    """

    dtype: str
    layers: int
    summands: int
    learning_rates: Sequence[float] = ()
    drift: float = 0.0

    @property
    def unit(self) -> float:
        """Returns the relative error of one product."""
        return UNIT_ROUNDOFFS[self.dtype] + UNIT_ROUNDOFFS["float32"] * math.sqrt(self.summands)

    def bound(self, key: Key, layer: int | None, stored: str, summary: Summary, scale: float | None = None) -> float:
        """Returns the largest relative deviation of a tensor that rounding explains.

        Args:
            layer: Its layer; None outside of the layers.
            stored: The coarser of the dtypes in which the runs have the tensor.
            scale: See `Piece.scale`.
        """
        # Numbers that are stored more coarsely than the run computes are no rounding, but what is looked for.
        unit_stored = min(UNIT_ROUNDOFFS.get(stored, UNIT_ROUNDOFFS["float32"]), UNIT_ROUNDOFFS[self.dtype])
        moved = sum(self.learning_rates[: key.step - 1])
        if key.kind == "weight":
            drift = 0.0
            if summary.norm:
                drift = 2 * moved * math.sqrt(summary.size) / summary.norm
            return 2 * unit_stored + drift
        depth = self.depth(key, layer)
        bound = MARGIN * self.unit * math.sqrt(depth)
        if key.kind == "gradient" and any(part in key.name for part in _STEEP):
            bound *= _STEEPNESS
        if scale is not None and scale > summary.norm > 0:
            bound += 2 * unit_stored * scale / summary.norm
        return bound + 2 * unit_stored + self.drift * moved * math.sqrt(depth)

    def depth(self, key: Key, layer: int | None) -> int:
        """Returns how many sublayers, forward and backward, the numbers of a tensor have passed."""
        sublayers = 2 * self.layers + 2
        if key.kind == "loss":
            return sublayers
        if key.kind == "norm":
            return 2 * sublayers
        before = 0
        if layer is not None:
            before = 2 * layer + 2
        elif key.name != "model.embed_tokens":
            before = sublayers
        if key.kind in ("activation", "choice"):
            return max(1, before)
        if key.name.startswith("model.embed_tokens"):
            before = 0
        return 2 * sublayers - before
