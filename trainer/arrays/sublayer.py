"""The pieces of the sublayers of a decoder layer: linear layers, the norm before them, the way to the residual stream.

Tensor-parallel ranks compute a sublayer together, each with its heads or columns; `SequenceParallelComm` has their
collectives before and after it.

Legend: N tokens, n rows of a tile or those of the residual stream that a rank has, D hidden, I/O in and out features,
R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from trainer.arrays.memory import downcast_if_needed, empty, narrow_like, store, upcast_if_needed
from trainer.arrays.operators import operators
from trainer.arrays.tiles import CpuRmsNorm, Scratch, SublayerCall, Tile
from trainer.models.spec.names import magnitude_name, norm_bias

_DORA_ROWS = 256  # of a matrix, at a time

if TYPE_CHECKING:
    from trainer.arrays.dropout import LayerDropout
    from trainer.models.spec.model import AdapterSpec, AttentionSpec, MlpSpec
    from trainer.models.spec.saved import SavedArray


class CpuLinear:
    """y = x W^T (+ b) (+ scale * dropout(x) A^T B^T), tile by tile, and its gradients (Hu et al. 2021, equation 3).

    With DoRA (Liu et al. 2024) y without b is multiplied by magnitude / |rows of W + scale B A|, whose denominator has
    no gradient (section 4.3).

    A backward pass calls `backward` and `add_adapter_gradients` for each tile, and then `add_gradients`.
    """

    def __init__(self, name: str, adapter: AdapterSpec | None = None, weight: str | None = None) -> None:
        self.name = name
        self.weight = weight or f"{name}.weight"
        self.bias = f"{name}.bias"
        self.adapter = adapter
        self.lora_a = f"{name}.lora_A.weight"
        self.lora_b = f"{name}.lora_B.weight"
        self.magnitude = magnitude_name(name)

    def forward(
        self, call: SublayerCall, x_nI: np.ndarray, out_nO: np.ndarray, tile: Tile, *, accumulate: bool = False,
        adds_bias: bool = True,
    ) -> None:  # fmt: skip
        """Writes y to `out_nO`, or with `accumulate` adds it; x is in the dtype of the matrix.

        Tensor-parallel ranks, which add the bias to the sum of their results, call it without `adds_bias`.
        """
        weights = call.weights
        bias_O = None
        if adds_bias:
            bias_O = weights.get(self.bias)
        wide_nO = out_nO
        factor_O = self._factors(call)
        if factor_O is not None or (out_nO.dtype != np.float32 and (bias_O is not None or self.adapter is not None)):
            wide_nO = tile.take(out_nO.shape[1])
        tile.project(x_nI, weights[self.weight], wide_nO, accumulate and factor_O is None)
        if self.adapter is not None:
            low_Rn = self.apply_lora_a(call, x_nI, tile)
            operators().matmul(low_Rn.T, weights[self.lora_b].T, wide_nO, True)
        if factor_O is not None:
            wide_nO *= factor_O
            if accumulate:
                out_nO += wide_nO
                wide_nO = out_nO
            elif out_nO.dtype == np.float32:
                out_nO[...] = wide_nO
                wide_nO = out_nO
        if bias_O is not None:
            wide_nO += bias_O
        if wide_nO is not out_nO:
            downcast_if_needed(wide_nO, out_nO)

    def _factors(self, call: SublayerCall) -> np.ndarray | None:
        """Returns what DoRA multiplies the outputs by, [O]; None without DoRA."""
        if self.adapter is None or not self.adapter.has_magnitude:
            return None
        if self.magnitude not in call.working:
            call.working[self.magnitude] = call.weights[self.magnitude] / self._row_lengths(call)
        return call.working[self.magnitude]

    def _row_lengths(self, call: SublayerCall) -> np.ndarray:
        """Returns the lengths of the rows of W + scale B A, [O], some rows at a time."""
        assert self.adapter is not None
        weights = call.weights
        weight_OI = weights[self.weight]
        lengths_O = np.empty(len(weight_OI), np.float32)
        for first in range(0, len(weight_OI), _DORA_ROWS):
            rows = slice(first, first + _DORA_ROWS)
            merged_oI = np.empty(weight_OI[rows].shape, np.float32)
            low_oR = np.ascontiguousarray(weights[self.lora_b][rows])
            operators().matmul(low_oR, weights[self.lora_a], merged_oI)
            merged_oI *= np.float32(self.adapter.scale)
            merged_oI += upcast_if_needed(weight_OI[rows], np.empty(merged_oI.shape, np.float32))
            lengths_O[rows] = np.sqrt(np.einsum("oi,oi->o", merged_oI, merged_oI))
        return lengths_O

    def _before_magnitude(self, call: SublayerCall, grad_nO: np.ndarray, tile: Tile) -> np.ndarray:
        """Returns the gradient of the product before DoRA multiplies it, in the dtype of `grad_nO`."""
        factor_O = self._factors(call)
        if factor_O is None:
            return grad_nO
        scaled_nO = tile.take(grad_nO.shape[1])
        np.multiply(tile.to_float32(grad_nO), factor_O, out=scaled_nO)
        return tile.cast(scaled_nO, grad_nO.dtype)

    def apply_lora_a(self, call: SublayerCall, x_nI: np.ndarray, tile: Tile) -> np.ndarray:
        """Returns scale * A dropout(x)^T, [R, n], and saves it for the gradient of B; only for an adapted matrix."""
        low_Rn = self._low_rank(call.weights[self.lora_a], self._dropped(call, x_nI, tile), tile)
        if self.lora_a in call.saved:
            self._saved_low(call)[:, tile.rows] = low_Rn
        return low_Rn

    def _low_rank(self, factor_RI: np.ndarray, x_nI: np.ndarray, tile: Tile) -> np.ndarray:
        """Returns scale * factor x^T in the dtype of x, [R, n].

        A product with few rows takes half of the time of one with few columns.
        """
        assert self.adapter is not None
        low_Rn = tile.take_array(self.adapter.rank, tile.size)
        operators().matmul(factor_RI, x_nI.T, low_Rn)
        np.multiply(low_Rn, np.float32(self.adapter.scale), out=low_Rn)
        return downcast_if_needed(low_Rn, tile.take_array(*low_Rn.shape, dtype=x_nI.dtype))

    def _saved_low(self, call: SublayerCall) -> np.ndarray:
        """Returns the array that `apply_lora_a` saves, [R, N]."""
        assert self.adapter is not None
        return call.saved[self.lora_a].reshape(self.adapter.rank, -1)

    def backward(
        self, call: SublayerCall, grad_nO: np.ndarray, into_nI: np.ndarray | None, tile: Tile, *,
        accumulate: bool = False,
    ) -> np.ndarray | None:  # fmt: skip
        """Writes the gradient of x to `into_nI`, or with `accumulate` adds it to a float32 array.

        Args:
            grad_nO: Gradient of y in the dtype of the matrix.
            into_nI: None: the gradient of x is not needed.

        Returns:
            The gradient of A x^T of the adapter, [R, n], for `add_adapter_gradients`; None without an adapter.
        """
        weights = call.weights
        low_Rn = None
        grad_nO = self._before_magnitude(call, grad_nO, tile)
        if self.adapter is not None:
            if self.lora_b not in call.working:
                call.working[self.lora_b] = np.ascontiguousarray(weights[self.lora_b].T)
            low_Rn = self._low_rank(call.working[self.lora_b], grad_nO, tile)
        if into_nI is None:
            return low_Rn
        wide_nI = into_nI
        if self.adapter is not None and into_nI.dtype != np.float32:
            wide_nI = tile.take(into_nI.shape[1])
        operators().matmul(grad_nO, weights[self.weight], wide_nI, accumulate)
        dropout = self._dropout(call)
        if low_Rn is not None and dropout is not None:
            adapter_grad_nI = tile.take(into_nI.shape[1])
            operators().matmul(low_Rn.T, weights[self.lora_a], adapter_grad_nI)
            adapter_grad_nI *= dropout.rows(self.name, tile.rows, into_nI.shape[1])
            wide_nI += adapter_grad_nI
        elif low_Rn is not None:
            operators().matmul(low_Rn.T, weights[self.lora_a], wide_nI, True)
        if wide_nI is not into_nI:
            downcast_if_needed(wide_nI, into_nI)
        return low_Rn

    def backward_rows(
        self, call: SublayerCall, grad_NO: np.ndarray, x_NI: np.ndarray, out_NI: np.ndarray, scratch: Scratch
    ) -> None:
        """Writes the gradient of all rows of x and adds those of the weights, for a matrix without an adapter.

        `grad_NO` and x are float32.
        """
        factor_NO = narrow_like(grad_NO, call.weights[self.weight].dtype)
        input_NI = narrow_like(x_NI, call.weights[self.weight].dtype)

        def compute(tile: Tile) -> None:
            """Keeps the inputs and the gradients of a tile for the weight's gradient, and computes that of x."""
            downcast_if_needed(x_NI[tile.rows], input_NI[tile.rows])
            factor_nO = downcast_if_needed(grad_NO[tile.rows], factor_NO[tile.rows])
            self.backward(call, factor_nO, out_NI[tile.rows], tile)

        scratch.run(len(x_NI), compute)
        self.add_gradients(call, factor_NO, input_NI)

    def add_adapter_gradients(
        self, call: SublayerCall, low_Rn: np.ndarray | None, grad_nO: np.ndarray, x_nI: np.ndarray | None, tile: Tile
    ) -> None:
        """Adds the contribution of a tile to the gradients of the adapter, while x is in the cache.

        Args:
            low_Rn: The result of `backward`.
            x_nI: None where A is not trained.
        """
        if self.adapter is None:
            return
        if self.adapter.has_magnitude and call.gradients.needs(self.magnitude):
            assert x_nI is not None
            self._add_magnitude_gradient(call, grad_nO, x_nI, tile)
        grad_nO = self._before_magnitude(call, grad_nO, tile)
        if call.gradients.needs(self.lora_a):
            assert x_nI is not None and low_Rn is not None
            grad_a_RI = np.empty((self.adapter.rank, x_nI.shape[1]), np.float32)
            operators().matmul(low_Rn, self._dropped(call, x_nI, tile), grad_a_RI)
            call.gradients.add_tile(self.lora_a, tile, grad_a_RI)
        if call.gradients.needs(self.lora_b):
            grad_b_RO = np.empty((self.adapter.rank, grad_nO.shape[1]), np.float32)
            operators().matmul(self._saved_low(call)[:, tile.rows], grad_nO, grad_b_RO)
            call.gradients.add_tile(self.lora_b, tile, grad_b_RO.T)

    def _add_magnitude_gradient(
        self, call: SublayerCall, grad_nO: np.ndarray, x_nI: np.ndarray, tile: Tile
    ) -> None:
        """Adds the contribution of a tile: the gradient of y times y without b, which is computed again, over m."""
        factor_O = self._factors(call)
        weights = call.weights
        product_nO = tile.take(grad_nO.shape[1])
        operators().matmul(x_nI, weights[self.weight].T, product_nO)
        low_nR = self._saved_low(call)[:, tile.rows].T
        operators().matmul(low_nR, weights[self.lora_b].T, product_nO, True)
        product_nO *= tile.to_float32(grad_nO)
        gradient_O = product_nO.sum(0) * (factor_O / weights[self.magnitude])
        call.gradients.add_tile(self.magnitude, tile, gradient_O)

    def add_gradients(
        self, call: SublayerCall, grad_NO: np.ndarray, x_NI: np.ndarray | None, unrounded_NO: np.ndarray | None = None
    ) -> None:
        """Adds the gradients of the matrix and the bias.

        Args:
            grad_NO: Gradient of y in the dtype of the matrix, as x.
            x_NI: None where the matrix is not trained.
            unrounded_NO: Gradient of y before it was rounded, for the bias; by default `grad_NO`.
        """
        call.gradients.add(self.weight, grad_NO, x_NI)
        if unrounded_NO is None:
            unrounded_NO = grad_NO
        call.gradients.add_bias(self.bias, unrounded_NO)

    def _dropout(self, call: SublayerCall) -> LayerDropout | None:
        """Returns the dropout of the adapter's input; None where nothing is dropped."""
        if self.adapter is None:
            return None
        return call.dropout_of(self.adapter.dropout)

    def _dropped(self, call: SublayerCall, x_nI: np.ndarray, tile: Tile) -> np.ndarray:
        dropout = self._dropout(call)
        if dropout is None:
            return x_nI
        dropped_nI = dropout.rows(self.name, tile.rows, x_nI.shape[1])
        dropped_nI *= tile.to_float32(x_nI)
        return tile.cast(dropped_nI, x_nI.dtype)


def allocate(arrays: Iterable[SavedArray], rows: Mapping[str, int], dtype: type) -> dict[str, np.ndarray]:
    """Returns an uninitialised array for each description, by name.

    Args:
        rows: The number of rows of each kind.
        dtype: Dtype of the products, which narrow arrays have.
    """
    dtypes = {True: dtype, False: np.float32}
    return {array.name: empty(rows[array.rows], array.width, dtype=dtypes[array.narrow]) for array in arrays}


class SequenceParallelComm(Protocol):
    """The collectives of tensor-parallel ranks between the residual stream and a sublayer (`trainer.parallel.tensor`).
    """

    @property
    def sequence_parallel(self) -> bool:
        """Whether ranks shard the rows of the residual stream (sequence parallelism)."""

    def gathered_rows(self, rows: int) -> int:
        """Returns how many rows `gather_tokens` returns for `rows` rows."""

    def gather_tokens(self, local_nD: np.ndarray) -> np.ndarray:
        """Returns the rows of all ranks, [N, D], from this rank's rows of the residual stream, [n, D]."""

    def reduce_partial(self, partial_ND: np.ndarray) -> np.ndarray:
        """Returns this rank's rows [n, D] of the sum over the ranks; overwrites `partial_ND`."""


class NormedInput:
    """The norm before a sublayer, and the gather of its rows with sequence parallelism.

    Args:
        norm: None: the sublayer takes x itself.
        adds: Whether x is the residual stream, to which the sublayer adds; False for shared experts.
    """

    def __init__(
        self, norm: CpuRmsNorm | None, norm_name: str, scratch: Scratch, tensor: SequenceParallelComm | None = None, *,
        adds: bool = True,
    ) -> None:  # fmt: skip
        self.norm = norm
        self.adds = adds
        self.norm_name = norm_name
        self.norm_bias = norm_bias(norm_name)
        self.scratch = scratch
        self.tensor = tensor
        self.gathers = tensor is not None and tensor.sequence_parallel

    def begin_forward(self, call: SublayerCall, x_ND: np.ndarray, dtype: type) -> int:
        """Gathers the normed rows of all ranks. Returns how many rows the sublayer computes."""
        if self.tensor is None or not self.gathers:
            return len(x_ND)
        y_nD = empty(*x_ND.shape, dtype=dtype)

        def compute(tile: Tile) -> None:
            y_nD[tile.rows] = self._normed(call, x_ND, tile, dtype)

        self.scratch.run(len(x_ND), compute)
        call.working["normed"] = self.tensor.gather_tokens(y_nD)
        if call.save:
            call.saved["normed"] = call.working["normed"]
        return len(call.working["normed"])

    def forward(self, call: SublayerCall, x_ND: np.ndarray, tile: Tile, dtype: type) -> np.ndarray:
        """Returns the normed rows of a tile, in the dtype of the products."""
        if self.gathers:
            return call.working["normed"][tile.rows]
        return self._normed(call, x_ND, tile, dtype)

    def _normed(self, call: SublayerCall, x_ND: np.ndarray, tile: Tile, dtype: type) -> np.ndarray:
        x_nD = x_ND[tile.rows]
        if self.norm is None:
            return tile.cast(x_nD, dtype)
        scale_n = self.norm.scales(x_nD)
        if "scale" in call.saved:
            call.saved["scale"][tile.rows, 0] = scale_n
        y_nD = tile.take(x_nD.shape[1], dtype)
        self.norm.write(x_nD, call.weights[self.norm_name], scale_n, y_nD, tile, call.weights.get(self.norm_bias))
        return y_nD

    def begin_backward(
        self, call: SublayerCall, x_ND: np.ndarray, out_ND: np.ndarray, dtype: type, linears: Sequence[CpuLinear]
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Returns two arrays [N, D] for a backward pass: for the sublayer's input, and for the gradient of that input.

        The input is None unless a matrix of `linears` is trained. Its gradient is `out_ND`, the gradient of x, unless
        ranks have to sum it; None if it is not needed.
        """
        if self.gathers:
            normed_ND = call.saved["normed"]
            return normed_ND, empty(*normed_ND.shape)
        into_ND: np.ndarray | None = out_ND
        if self.tensor is not None:
            into_ND = empty(*x_ND.shape)
        of_norm = call.gradients.needs(self.norm_name, self.norm_bias)
        if self.tensor is None and not call.input_gradient and not of_norm:
            into_ND = None
        if not call.gradients.needs(*(linear.weight for linear in linears)):
            return None, into_ND
        if self.norm is None and dtype == np.float32:
            return x_ND, into_ND
        return empty(*x_ND.shape, dtype=dtype), into_ND

    def recompute_input(
        self, call: SublayerCall, x_ND: np.ndarray, y_ND: np.ndarray | None, tile: Tile, dtype: type,
        linears: Sequence[CpuLinear],
    ) -> np.ndarray | None:  # fmt: skip
        """Returns a tile of the sublayer's input, recomputed, in `y_ND` if given; None if no gradient needs it."""
        if y_ND is not None:
            y_nD = y_ND[tile.rows]
        elif call.gradients.needs(*(name for linear in linears for name in (linear.lora_a, linear.magnitude))):
            y_nD = tile.take(x_ND.shape[1], dtype)
        else:
            return None
        if not self.gathers and y_ND is not x_ND:
            x_nD = x_ND[tile.rows]
            if self.norm is None:
                store(x_nD, y_nD)
            else:
                scale_n = call.saved["scale"][tile.rows, 0]
                bias_D = call.weights.get(self.norm_bias)
                self.norm.write(x_nD, call.weights[self.norm_name], scale_n, y_nD, tile, bias_D)
        return y_nD

    def backward(
        self, call: SublayerCall, x_ND: np.ndarray, grad_ND: np.ndarray, tile: Tile, out_ND: np.ndarray
    ) -> None:
        """Turns a tile of `out_ND`, the gradient of the sublayer's input, into the gradient of x.

        Adds the gradient of the residual stream. With tensor parallelism `end_backward` does so for all rows.
        """
        if self.tensor is None:
            self._input_gradient(call, x_ND, grad_ND, tile, out_ND)

    def end_backward(
        self, call: SublayerCall, x_ND: np.ndarray, grad_ND: np.ndarray, into_ND: np.ndarray | None,
        out_ND: np.ndarray,
    ) -> None:  # fmt: skip
        """Sums the gradients `into_ND` of tensor-parallel ranks, and writes the gradient of x to `out_ND`."""
        if self.tensor is None:
            return
        assert into_ND is not None  # with tensor parallelism `begin_backward` allocates it
        sums_nD = self.tensor.reduce_partial(into_ND)

        def compute(tile: Tile) -> None:
            """Takes the summed gradients of a tile back through the norm."""
            out_ND[tile.rows] = sums_nD[tile.rows]
            self._input_gradient(call, x_ND, grad_ND, tile, out_ND)

        self.scratch.run(len(x_ND), compute)

    def _input_gradient(
        self, call: SublayerCall, x_ND: np.ndarray, grad_ND: np.ndarray, tile: Tile, out_ND: np.ndarray
    ) -> None:
        out_nD = out_ND[tile.rows]
        if self.norm is not None:
            self.norm.backward(call, self.norm_name, x_ND[tile.rows], out_nD, tile, call.saved["scale"][tile.rows, 0])
        if self.adds:
            out_nD += grad_ND[tile.rows]


class SublayerOutput:
    """The last matrix of a sublayer and the way to the residual stream: x + scale * dropout(norm(W y)).

    Norm, dropout and scale are optional. Tensor-parallel ranks sum W y first, and then add the bias.

    Args:
        norm_name: Name of the weight of the norm, if `spec` has one.
        site: Name of the dropout mask.
        adds: Add the result to x; otherwise (shared experts) return W y.
    """

    def __init__(
        self, linear: CpuLinear, spec: AttentionSpec | MlpSpec, scratch: Scratch,
        tensor: SequenceParallelComm | None = None, *, norm_name: str, site: str, adds: bool = True,
    ) -> None:  # fmt: skip
        self.linear = linear
        self.scratch = scratch
        self.tensor = tensor
        self.norm = None
        if spec.post_norm:
            self.norm = CpuRmsNorm(spec.norm.rms)
        self.norm_name = norm_name
        self.rate = spec.output_dropout
        self.scale = np.float32(spec.output_scale)
        self.site = site
        self.adds = adds

    def begin_forward(self, call: SublayerCall, x_ND: np.ndarray, rows: int) -> None:
        """Allocates the partial sums of a tensor-parallel rank, for `rows` rows."""
        if self.tensor is not None and self._computes(call):
            call.working["partial"] = empty(rows, x_ND.shape[1])

    def forward(self, call: SublayerCall, x_ND: np.ndarray, y_nI: np.ndarray, out_ND: np.ndarray, tile: Tile) -> None:
        """Computes the rows of a tile from y, which is in the dtype of the products."""
        if not self._computes(call):
            if self.linear.adapter is not None and call.save:
                self.linear.apply_lora_a(call, y_nI, tile)
            return
        if self.tensor is not None:
            self.linear.forward(call, y_nI, call.working["partial"][tile.rows], tile, adds_bias=False)
            return
        out_nD = out_ND[tile.rows]
        if not self._changes(call):
            if self.adds:
                out_nD[...] = x_ND[tile.rows]
            self.linear.forward(call, y_nI, out_nD, tile, accumulate=self.adds)
            return
        if "output" in call.saved:
            added_nD = call.saved["output"][tile.rows]
        else:
            added_nD = tile.take(out_nD.shape[1])
        self.linear.forward(call, y_nI, added_nD, tile)
        self._add(call, x_ND[tile.rows], added_nD, out_nD, tile)

    def end_forward(self, call: SublayerCall, x_ND: np.ndarray, out_ND: np.ndarray) -> None:
        """Adds up the results of tensor-parallel ranks."""
        if self.tensor is None or not self._computes(call):
            return
        sum_nD = self.tensor.reduce_partial(call.working.pop("partial"))
        bias_D = call.weights.get(self.linear.bias)
        if bias_D is not None:
            sum_nD += bias_D
        if not self._changes(call):
            if self.adds:
                np.add(x_ND, sum_nD, out=out_ND)
            else:
                out_ND[...] = sum_nD
            return
        if "output" in call.saved:
            call.saved["output"][...] = sum_nD

        def compute(tile: Tile) -> None:
            self._add(call, x_ND[tile.rows], sum_nD[tile.rows], out_ND[tile.rows], tile)

        self.scratch.run(len(x_ND), compute)

    def _add(
        self, call: SublayerCall, x_nD: np.ndarray, added_nD: np.ndarray, out_nD: np.ndarray, tile: Tile
    ) -> None:
        if self.norm is not None:
            added_nD = self.norm.apply(added_nD, call.weights[self.norm_name], tile)
        add_to_stream(x_nD, added_nD, out_nD, tile, self.site, call.dropout_of(self.rate), self.scale)

    def begin_backward(
        self, call: SublayerCall, grad_ND: np.ndarray, dtype: type
    ) -> OutputGradient:
        """Returns the gradient of W y from `grad_ND`, the gradient of the residual stream after the sublayer."""
        local_ND = grad_ND
        if self._changes(call):
            local_ND = empty(*grad_ND.shape)
            self.scratch.run(len(grad_ND), lambda tile: self._gradient(call, grad_ND, local_ND, tile))
        every_ND = local_ND
        if self.tensor is not None:
            every_ND = self.tensor.gather_tokens(local_ND)
        return OutputGradient(local_ND, every_ND, narrow_like(every_ND, dtype))

    def _gradient(self, call: SublayerCall, grad_ND: np.ndarray, out_ND: np.ndarray, tile: Tile) -> None:
        out_nD = out_ND[tile.rows]
        dropout = call.dropout_of(self.rate)
        if dropout is not None:
            np.multiply(grad_ND[tile.rows], dropout.rows(self.site, tile.rows, out_nD.shape[1]), out=out_nD)
        else:
            out_nD[...] = grad_ND[tile.rows]
        if self.scale != 1:
            out_nD *= self.scale
        if self.norm is not None:
            self.norm.backward(call, self.norm_name, call.saved["output"][tile.rows], out_nD, tile)

    def backward(
        self, call: SublayerCall, grad: OutputGradient, into_nI: np.ndarray, tile: Tile
    ) -> np.ndarray | None:
        """Writes the gradient of a tile of y, and returns the result of `CpuLinear.backward`."""
        factor_nD = downcast_if_needed(grad.every_ND[tile.rows], grad.factor_ND[tile.rows])
        return self.linear.backward(call, factor_nD, into_nI, tile)

    def end_backward(self, call: SublayerCall, grad: OutputGradient, y_NI: np.ndarray | None) -> None:
        """Adds the gradients of the matrix and its bias."""
        self.linear.add_gradients(call, grad.factor_ND, y_NI, grad.local_ND)

    def _changes(self, call: SublayerCall) -> bool:
        """Whether W y is normed, dropped or scaled before it is added."""
        return self.norm is not None or self.scale != 1 or call.dropout_of(self.rate) is not None

    def _computes(self, call: SublayerCall) -> bool:
        """Whether the next sublayer, or the gradient of the norm, needs the result of the product."""
        return call.compute_output or (self.norm is not None and call.save)


def add_to_stream(
    x_nD: np.ndarray, added_nD: np.ndarray, out_nD: np.ndarray, tile: Tile, site: str, dropout: LayerDropout | None,
    scale: np.float32,
) -> None:  # fmt: skip
    """Writes x + scale * dropout(added) for the rows of a tile; may overwrite `added_nD`."""
    if dropout is not None:
        mask_nD = dropout.rows(site, tile.rows, added_nD.shape[1])
        mask_nD *= added_nD
        added_nD = mask_nD
    if scale != 1:
        added_nD *= scale
    np.add(x_nD, added_nD, out=out_nD)


class OutputGradient(NamedTuple):
    """The gradient of W y, the result of a sublayer's last matrix.

    Attributes:
        local_ND: For the rows of the residual stream that the rank has.
        every_ND: For all rows that the rank computes.
        factor_ND: `every_ND` in the dtype of the products, filled tile by tile.
    """

    local_ND: np.ndarray
    every_ND: np.ndarray
    factor_ND: np.ndarray
