"""The gated feed-forward sublayer: x + W_down (silu(W_gate norm(x)) * W_up norm(x)), forward and backward.

Legend: as in tiles.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.memory import empty
from trainer.arrays.numpy_operators import Activation
from trainer.arrays.sublayer import CpuLinear, NormedInput, SublayerOutput, allocate
from trainer.arrays.tiles import CpuRmsNorm, gated, gated_gradient
from trainer.models.spec.names import MLP_NORM, POST_MLP_NORM
from trainer.models.spec.saved import mlp_saved

if TYPE_CHECKING:
    from mindspore import Tensor

    from trainer.arrays.sublayer import SequenceParallelComm
    from trainer.arrays.tiles import Gradients, Scratch, SublayerCall, Tile
    from trainer.models.spec.model import MlpSpec


class CpuMlp:
    """The sublayer of the layers with one `MlpSpec` (Shazeer 2020, equation 5).

    Args:
        spec: With the width of this rank.
        tensor: The tensor-parallel ranks; None: this rank has all columns.
        prefix: Prefix of the names of the matrices.
        is_sublayer: With norm and residual; False for shared experts.
    """

    def __init__(
        self, spec: MlpSpec, scratch: Scratch, tensor: SequenceParallelComm | None = None, prefix: str = "mlp.",
        is_sublayer: bool = True,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.activation: Activation = "silu"
        if spec.is_gelu:
            self.activation = "gelu"
        self.scratch = scratch
        self.tensor = tensor
        norm = None
        if is_sublayer and spec.pre_norm:
            norm = CpuRmsNorm(spec.hidden, spec.eps)
        self.input = NormedInput(norm, MLP_NORM, scratch, tensor, adds=is_sublayer)
        gate, up, down = (
            CpuLinear(name, spec.adapters.get(name))
            for name in (f"{prefix}gate_proj", f"{prefix}up_proj", f"{prefix}down_proj")
        )
        self.gate = gate
        self.up = up
        self.output = SublayerOutput(
            down, spec, scratch, tensor, norm_name=POST_MLP_NORM, site="mlp_output", adds=is_sublayer
        )

    def forward(self, call: SublayerCall, x_ND: np.ndarray) -> Tensor:
        """Returns the residual stream after the sublayer, or for shared experts their output, [N, D]."""
        result, out_ND = empty(*x_ND.shape)
        dtype = call.weights[self.gate.weight].dtype
        tokens = self._begin(call, x_ND, dtype)
        self.scratch.run(tokens, lambda tile: self.compute(call, x_ND, out_ND, tile))
        self.output.end_forward(call, x_ND, out_ND)
        return result

    def compute(self, call: SublayerCall, x_ND: np.ndarray, out_ND: np.ndarray, tile: Tile) -> None:
        """Computes a tile; after all tiles the caller calls `SublayerOutput.end_forward`."""
        dtype = call.weights[self.gate.weight].dtype
        width = self.spec.width
        y_nD = self.input.forward(call, x_ND, tile, dtype)
        if call.save:
            gate_nF = call.saved["gate"][tile.rows]
            up_nF = call.saved["up"][tile.rows]
        else:
            gate_nF = tile.take(width, dtype)
            up_nF = tile.take(width, dtype)
        self.gate.forward(call, y_nD, gate_nF, tile)
        self.up.forward(call, y_nD, up_nF, tile)
        inner_nF = gate_nF
        if call.save or dtype != np.float32:
            inner_nF = tile.take(width)
        gated(gate_nF, up_nF, inner_nF, tile, self.activation)
        self.output.forward(call, x_ND, tile.cast(inner_nF, dtype), out_ND, tile)

    def predict(self, call: SublayerCall, x_ND: np.ndarray, thread: int) -> np.ndarray:
        """Returns the residual stream after the sublayer for few tokens."""
        out_ND = np.empty_like(x_ND)
        self.output.begin_forward(call, x_ND, len(x_ND))
        self.compute(call, x_ND, out_ND, self.scratch.tile(slice(0, len(x_ND)), thread))
        self.output.end_forward(call, x_ND, out_ND)
        return out_ND

    def _begin(self, call: SublayerCall, x_ND: np.ndarray, dtype: type) -> int:
        """Allocates the saved arrays, and returns how many rows the rank computes."""
        if call.save:
            arrays = [array for array in mlp_saved(self.spec, self.input.gathers) if array.name != "normed"]
            rows = len(x_ND)
            if self.tensor is not None:
                rows = self.tensor.gathered_rows(rows)
            call.saved = allocate(arrays, {"stream": len(x_ND), "tokens": rows}, dtype)
        tokens = self.input.begin_forward(call, x_ND, dtype)
        self.output.begin_forward(call, x_ND, tokens)
        return tokens

    def backward(self, call: SublayerCall, x_ND: np.ndarray, grad_ND: np.ndarray) -> tuple[Tensor, Gradients]:
        """Returns the gradients of x and of the trained weights; overwrites `call.saved`."""
        result, out_ND = empty(*x_ND.shape)
        gate_NF = call.saved["gate"]
        up_NF = call.saved["up"]
        dtype = gate_NF.dtype
        down = self.output.linear
        inner_NF = None
        if call.gradients.needs(down.weight):
            inner_NF = empty(*gate_NF.shape, dtype=dtype)[1]
        grad = self.output.begin_backward(call, grad_ND, dtype)
        linears = self.gate, self.up
        y_ND, into_ND = self.input.begin_backward(call, x_ND, out_ND, dtype, linears)

        def compute(tile: Tile) -> None:
            """Computes the gradients of gate and up for a tile, and of the down projection's adapter."""
            gate_nF = gate_NF[tile.rows]
            up_nF = up_NF[tile.rows]
            inner_nF = None
            if inner_NF is not None:
                inner_nF = inner_NF[tile.rows]
            elif call.gradients.needs(down.lora_a, down.magnitude):
                inner_nF = tile.take(self.spec.width, dtype)
            grad_inner_nF = tile.take(self.spec.width)
            low_Rn = self.output.backward(call, grad, grad_inner_nF, tile)
            gated_gradient(gate_nF, up_nF, grad_inner_nF, inner_nF, tile, self.activation)
            down.add_adapter_gradients(call, low_Rn, grad.factor_ND[tile.rows], inner_nF, tile)
            # Now gate and up hold their gradients.
            into_nD = None
            if into_ND is not None:
                into_nD = into_ND[tile.rows]
            y_nD = self.input.recompute_input(call, x_ND, y_ND, tile, dtype, linears)
            for linear, grad_nF in zip(linears, (gate_nF, up_nF), strict=True):
                low_Rn = linear.backward(call, grad_nF, into_nD, tile, accumulate=linear is self.up)
                linear.add_adapter_gradients(call, low_Rn, grad_nF, y_nD, tile)
            self.input.backward(call, x_ND, grad_ND, tile, out_ND)

        self.scratch.run(len(gate_NF), compute)
        self.input.end_backward(call, x_ND, grad_ND, into_ND, out_ND)
        self.gate.add_gradients(call, gate_NF, y_ND)
        self.up.add_gradients(call, up_NF, y_ND)
        self.output.end_backward(call, grad, inner_NF)
        return result, call.gradients.compute()
