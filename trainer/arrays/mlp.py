"""The feed-forward sublayer: x + W_down (silu(W_gate norm(x)) * W_up norm(x)), forward and backward.

Without a gate it is x + W_down act(W_up norm(x)); the activation may be another one than silu. In a parallel block
(`parallel_attn`) attention and MLP have the same input x, and both add to it.

Legend: N tokens, n rows of a tile, D hidden, F width of the sublayer, R rank of an adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.memory import empty, part_of
from trainer.arrays.sublayer import CpuLinear, NormedInput, SublayerOutput, allocate
from trainer.arrays.tiles import CpuRmsNorm, gated, gated_gradient
from trainer.models.spec.names import POST_MLP_NORM
from trainer.models.spec.saved import mlp_saved

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        self.scratch = scratch
        self.tensor = tensor
        norm = None
        if is_sublayer and spec.pre_norm:
            norm = CpuRmsNorm(spec.norm)
        # In a parallel block the backward pass of attention alone adds the gradient of the residual stream.
        adds = is_sublayer and not spec.is_parallel
        self.input = NormedInput(norm, spec.norm_name, scratch, tensor, adds=adds)
        names = [prefix + name.removeprefix("mlp.") for name in spec.matrices]
        *inner, output = (CpuLinear(name, spec.adapters.get(name)) for name in names)
        # Under the names of the arrays that the forward pass saves; without a gate there is "up" alone.
        self.linears = dict(zip(("gate", "up")[-len(inner) :], inner, strict=True))
        self.output = SublayerOutput(
            output, spec, scratch, tensor, norm_name=POST_MLP_NORM, site="mlp_output", adds=is_sublayer
        )

    def forward(self, call: SublayerCall, x_ND: np.ndarray, stream_ND: np.ndarray | None = None) -> np.ndarray:
        """Returns the residual stream after the sublayer, or for shared experts their output, [N, D].

        Args:
            x_ND: The input of the norm.
            stream_ND: What the sublayer adds to: in a parallel block the stream after attention. None: x.
        """
        if stream_ND is None:
            stream_ND = x_ND
        out_ND = empty(*x_ND.shape)
        dtype = call.weights[self.output.linear.weight].dtype
        tokens = self._begin(call, x_ND, dtype)
        self.scratch.run(tokens, lambda tile: self.compute(call, x_ND, stream_ND, out_ND, tile))
        self.output.end_forward(call, stream_ND, out_ND)
        return out_ND

    def compute(
        self, call: SublayerCall, x_ND: np.ndarray, stream_ND: np.ndarray, out_ND: np.ndarray, tile: Tile
    ) -> None:
        """Computes a tile; after all tiles the caller calls `SublayerOutput.end_forward`."""
        dtype = call.weights[self.output.linear.weight].dtype
        width = self.spec.width
        y_nD = self.input.forward(call, x_ND, tile, dtype)
        if call.save:
            arrays = [call.saved[name][tile.rows] for name in self.linears]
        else:
            arrays = [tile.take(width, dtype) for _ in self.linears]
        for linear, out_nF in zip(self.linears.values(), arrays, strict=True):
            linear.forward(call, y_nD, out_nF, tile)
        inner_nF = arrays[0]
        if call.save or dtype != np.float32:
            inner_nF = tile.take(width)
        gated(*self._gate_and_up(arrays), inner_nF, tile, self.spec.activation)
        self.output.forward(call, stream_ND, tile.cast(inner_nF, dtype), out_ND, tile)

    @staticmethod
    def _gate_and_up(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns what the activation takes, and what multiplies it: None without a gate."""
        if len(arrays) == 1:
            return arrays[0], None
        return arrays[0], arrays[1]

    def predict(
        self, call: SublayerCall, x_ND: np.ndarray, thread: int, stream_ND: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the residual stream after the sublayer for few tokens; arguments as in `forward`."""
        if stream_ND is None:
            stream_ND = x_ND
        out_ND = np.empty_like(x_ND)
        self.output.begin_forward(call, x_ND, len(x_ND))
        self.compute(call, x_ND, stream_ND, out_ND, self.scratch.tile(slice(0, len(x_ND)), thread))
        self.output.end_forward(call, stream_ND, out_ND)
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

    def backward(self, call: SublayerCall, x_ND: np.ndarray, grad_ND: np.ndarray) -> tuple[np.ndarray, Gradients]:
        """Returns the gradients of x and of the trained weights; overwrites `call.saved`."""
        out_ND = empty(*x_ND.shape)
        saved = [call.saved[name] for name in self.linears]
        rows = len(saved[0])
        dtype = saved[0].dtype
        down = self.output.linear
        inner_NF = None
        if call.gradients.needs(down.weight):
            inner_NF = empty(rows, self.spec.width, dtype=dtype)
        grad = self.output.begin_backward(call, grad_ND, dtype)
        linears = tuple(self.linears.values())
        y_ND, into_ND = self.input.begin_backward(call, x_ND, out_ND, dtype, linears)

        def compute(tile: Tile) -> None:
            """Computes the gradients of gate and up for a tile, and of the down projection's adapter."""
            arrays = [array[tile.rows] for array in saved]  # results of gate and up; then their gradients
            inner_nF = part_of(inner_NF, tile.rows)
            if inner_NF is None and call.gradients.needs(down.lora_a, down.magnitude):
                inner_nF = tile.take(self.spec.width, dtype)
            grad_inner_nF = tile.take(self.spec.width)
            low_Rn = self.output.backward(call, grad, grad_inner_nF, tile)
            gated_gradient(*self._gate_and_up(arrays), grad_inner_nF, inner_nF, tile, self.spec.activation)
            down.add_adapter_gradients(call, low_Rn, grad.factor_ND[tile.rows], inner_nF, tile)
            into_nD = part_of(into_ND, tile.rows)
            y_nD = self.input.recompute_input(call, x_ND, y_ND, tile, dtype, linears)
            for place, (linear, grad_nF) in enumerate(zip(linears, arrays, strict=True)):
                low_Rn = linear.backward(call, grad_nF, into_nD, tile, accumulate=place > 0)
                linear.add_adapter_gradients(call, low_Rn, grad_nF, y_nD, tile)
            self.input.backward(call, x_ND, grad_ND, tile, out_ND)

        self.scratch.run(rows, compute)
        self.input.end_backward(call, x_ND, grad_ND, into_ND, out_ND)
        for linear, grad_NF in zip(linears, saved, strict=True):
            linear.add_gradients(call, grad_NF, y_ND)
        self.output.end_backward(call, grad, inner_NF)
        return out_ND, call.gradients.compute()
