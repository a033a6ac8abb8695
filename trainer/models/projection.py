"""A matrix of a block, with its bias and its adapter.

Legend: N tokens, I/O in and out features, R rank of an adapter: A [R, I], B [O, R].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Layout, Tensor, nn, ops
from mindspore.ops import operations as P

from trainer.models.spec.adapters import adapter_spec, merged_matrix, scales_by_rank
from trainer.models.spec.names import adapter_names, magnitude_name, mask_name
from trainer.models.spec.shapes import adapted_projections, block_names, dropped_projections
from trainer.parallel.tensor import RowParallelOutputAfter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.config.schema.model import ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.tensor import TensorParallel


class Projection(nn.Cell):
    """(x_NI, all weights of the block, in the order of `block_names`) -> y_NO, with an adapter where there is one:

        y = x W^T (+ bias) + scale * dropout(x) A^T B^T    (Hu et al. 2021, equation 3)

    With DoRA (Liu et al. 2024) y without its bias is multiplied by magnitude / |rows of W + scale B A|, whose
    denominator counts as a constant (section 4.3).

    MindSpore differentiates it automatically: the kernel of the product has a hand-written gradient, the products with
    A and B are small, and the gradient of a frozen W is never computed.

    Args:
        name: The name of the projection in the block, for example "self_attn.q_proj".
        tensor: The tensor-parallel ranks, of which each has some columns of W, A and x. Their products are summed; then
            the bias is added to the rows of the residual stream that the rank has. None: the rank has all inputs.
    """

    def __init__(
        self, name: str, settings: ModelConfig, kernels: KernelSet, tensor: TensorParallel | None = None
    ) -> None:
        super().__init__()
        argnums = {entry: argnum for argnum, entry in enumerate(block_names(settings))}
        self.weight = argnums[f"{name}.weight"]
        self.has_bias = f"{name}.bias" in argnums
        self.leaves = tensor is not None
        self.linear = kernels.linear()
        if tensor is not None:
            self.row_parallel_output = RowParallelOutputAfter(tensor)
            self.add_bias = P.Add()
            self.cast = P.Cast()
        adapter = adapter_spec(settings)
        self.has_adapter = adapter is not None and name in adapted_projections(settings)
        if adapter is not None and self.has_adapter:
            self.a, self.b = (argnums[part] for part in adapter_names(name))
            self.mask: int | None = None
            if name in dropped_projections(settings):
                self.mask = argnums[mask_name(name)]
            self.down = kernels.linear()
            self.up = kernels.linear()
            self.scales = scales_by_rank(settings, name)
            self.drop = kernels.dropout(adapter.dropout)
            self.scale_up = P.Mul()
            self.add = P.Add()
        self.has_magnitude = self.has_adapter and adapter is not None and adapter.has_magnitude
        if self.has_magnitude:
            self.magnitude = argnums[magnitude_name(name)]
            self.add_bias = P.Add()
            self.cast = P.Cast()

    def matrix(self, weights: Sequence[Tensor | None]) -> Tensor:
        """Returns the matrix that the projection multiplies by, [O, I], with its adapter and without dropout."""
        if not self.has_adapter or weights[self.a] is None:
            return weights[self.weight]
        merged_OI = merged_matrix(weights[self.weight], weights[self.a], weights[self.b], self.scale(weights))
        if self.has_magnitude:
            merged_OI = merged_OI * self.factors(weights).expand_dims(-1)
        return merged_OI

    def factors(self, weights: Sequence[Tensor | None]) -> Tensor:
        """Returns what DoRA multiplies the outputs by, [O]: magnitudes over row lengths, which have no gradient."""
        merged_OI = merged_matrix(weights[self.weight], weights[self.a], weights[self.b], self.scale(weights))
        squares_O = ops.square(ops.stop_gradient(merged_OI)).sum(-1)
        return weights[self.magnitude] / ops.sqrt(squares_O)

    def scale(self, weights: Sequence[Tensor | None]) -> float:
        """Returns the factor on the adapter's output, which may differ between layers that have other ranks."""
        a_RI = weights[self.a]
        assert a_RI is not None
        return self.scales[a_RI.shape[0]]

    def construct(self, x_NI: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
        bias_O = None
        if self.has_bias:
            bias_O = weights[self.weight + 1]
        has_magnitude = self.has_magnitude and weights[self.a] is not None
        if self.leaves or bias_O is None or has_magnitude:
            y_NO = self.linear(x_NI, weights[self.weight])
        else:
            y_NO = self.linear(x_NI, weights[self.weight], bias_O)
        y_NO = self.add_adapter(x_NI, y_NO, weights)
        if has_magnitude:
            y_NO = y_NO * self.cast(self.factors(weights), y_NO.dtype)
            if bias_O is not None:
                y_NO = self.add_bias(y_NO, self.cast(bias_O, y_NO.dtype))
        if self.leaves:
            y_NO = self.row_parallel_output(y_NO, ops.stop_gradient(x_NI))
            if bias_O is not None:
                y_NO = self.add_bias(y_NO, self.cast(bias_O, y_NO.dtype))
        return y_NO

    def add_adapter(self, x_NI: Tensor, y_NO: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
        """Returns y plus the output of the adapter."""
        if not self.has_adapter or weights[self.a] is None:  # None: adapted in other layers only
            return y_NO
        mask = None
        if self.mask is not None:
            mask = weights[self.mask]
        if mask is not None:
            x_NI = self.drop(x_NI, mask)
        x_NR = self.down(x_NI, weights[self.a])
        # The factor multiplies the smallest of the matrices.
        return self.add(y_NO, self.up(x_NR, self.scale_up(weights[self.b], self.scale(weights))))

    def shard_over(self, data: int, columns: int = 1, rows: int = 1, tokens: int = 0, copies: int = 1) -> None:
        """Sets the strategies of semi-automatic mode. The numbers between the adapter's two matrices are replicated.

        Args:
            data: Ranks that shard the tokens.
            columns: Ranks that shard the outputs.
            rows: Ranks that shard the inputs.
            tokens: Ranks that shard the rows of the result; 0: as many as `data`.
            copies: Tensor-parallel ranks that compute the same, where neither columns nor rows are sharded.
        """
        self.linear.shard_over(data, columns, rows, tokens)
        if self.has_adapter:
            self.down.shard_over(data, rows=rows)
            self.up.shard_over(data, columns=columns)
            tensor = columns * rows * copies
            input_axis = "None"
            if rows > 1:
                input_axis = "tensor"
            output_axis = "None"
            if columns > 1:
                output_axis = "tensor"
            self.drop.shard_over(data, tensor, columns=input_axis)
            # The axes need names: given numbers alone, MindSpore would take neighbouring ranks for replicas.
            layout = Layout((data, tensor), ("data", "tensor"))
            self.scale_up.shard((layout(output_axis, "None"), layout()))
            strategy = max(data, tokens), columns
            self.add.shard((strategy, strategy))
