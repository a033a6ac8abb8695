"""Tiles: some hundred rows of a batch, which a thread takes through norms, products and SwiGLU within its cache.

Products take numbers in the dtype of the matrices: float32, bfloat16 (uint16 arrays) or float16. Other operations are
in float32. The gradients of weights, which are sums over tokens, are computed at the end over all rows
(`WeightGradients`), divided along the rows of the result: the bits are the same for any number of threads.

Legend: N tokens, n rows of a tile, D hidden, I/O in and out features, F feed-forward, R rank of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trainer.arrays.memory import downcast_if_needed, empty, host_threads, row_blocks, upcast_if_needed
from trainer.arrays.operators import operators
from trainer.models.spec.names import norm_bias

if TYPE_CHECKING:
    from trainer.arrays.dropout import LayerDropout
    from trainer.config.schema.model import Activation
    from trainer.models.spec.model import NormSpec

Arrays: TypeAlias = Mapping[str, np.ndarray]
Gradients: TypeAlias = "dict[str, np.ndarray]"
"""Gradients of the trained weights of a sublayer, by their names in it."""

ROWS = 256  # of a tile: products of fewer are slower
_MIN_GRADIENT_ROWS = 64  # rows of a matrix's gradient that a thread takes at once
_ALIGNED = 16  # float32 elements in a cache line
_SMALL = 1 << 12  # elements that NumPy allocates faster than a block finds space for them
_SHARED_WORK = 1 << 22  # multiplications from which threads share the product of a tile
_SHARED_MATRIX = 1 << 21  # elements of a matrix from which threads share its product with any rows
_SHARED_COLUMNS = 64  # a thread begins at a multiple of this


class Scratch:
    """Memory of each thread, which each tile reuses.

    Args:
        shares_products: Whether threads share the products of a tile by their columns: in a prediction there are too
            few rows for several tiles.
        part: Memory for one pass of a part, which all of its threads use; None: such arrays are in the arena.
    """

    def __init__(self, shares_products: bool = False, part: ReusedMemory | None = None) -> None:
        self.threads: dict[int, ReusedMemory] = {}
        self.shares_products = shares_products
        self.part = part

    def tile(self, rows: slice, thread: int) -> Tile:
        """Returns a tile. It reuses the memory of the earlier tiles of this thread."""
        memory = self.threads.get(thread)
        if memory is None:
            memory = self.threads[thread] = ReusedMemory()
        memory.reset()
        return Tile(rows, memory, self.shares_products)

    def begin_part(self) -> None:
        """Frees all arrays of `take_for_part`: another part begins."""
        if self.part is not None:
            self.part.reset()

    def take_for_part(self, *shape: int, dtype: type = np.float32) -> np.ndarray:
        """Returns an uninitialised large array for the pass of a part.

        With memory of its own for that, large arrays that come and go leave no gaps between the arrays that a backward
        pass needs.
        """
        if self.part is None:
            return empty(*shape, dtype=dtype)
        return self.part.take(shape, dtype)

    def run(self, rows: int, compute: Callable[[Tile], None]) -> None:
        """Calls compute(tile) in several threads for tiles that together cover `rows` rows."""
        host_threads().run(row_blocks(slice(0, rows), ROWS), lambda block, thread: compute(self.tile(block, thread)))


class ReusedMemory:
    """One block of memory, which grows after a tile or part that needed more, or for its first array."""

    __slots__ = ("block", "used")

    def __init__(self) -> None:
        self.block = np.empty(0, np.float32)
        self.used = 0

    def reset(self) -> None:
        """Frees all arrays."""
        if self.used > self.block.size:
            self.block = np.empty(self.used, np.float32)
        self.used = 0

    def take(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Returns an uninitialised array, from the block if it is not small and the block has space."""
        size = math.prod(shape)
        if size <= _SMALL:
            return np.empty(shape, dtype)
        if dtype == np.float32:
            words = size
        else:
            words = -(-size // 2)
        start = self.used
        self.used += -(-words // _ALIGNED) * _ALIGNED
        if self.used > self.block.size:
            if start:
                return np.empty(shape, dtype)
            self.block = np.empty(self.used, np.float32)
        array = self.block[start : start + words]
        if dtype != np.float32:
            array = array.view(dtype)[:size]
        return array.reshape(shape)


class Tile:
    """Some rows of a batch that one thread computes, and scratch memory for them."""

    __slots__ = ("memory", "rows", "shares_products", "size")

    def __init__(self, rows: slice, memory: ReusedMemory, shares_products: bool) -> None:
        self.rows = rows
        self.size = rows.stop - rows.start
        self.memory = memory
        self.shares_products = shares_products

    def take(self, width: int, dtype: type = np.float32) -> np.ndarray:
        """Returns an uninitialised array [n, width], valid until the thread's next tile."""
        return self.memory.take((self.size, width), dtype)

    def take_array(self, *shape: int, dtype: type = np.float32) -> np.ndarray:
        """Returns an uninitialised array of any shape, valid until the thread's next tile."""
        return self.memory.take(shape, dtype)

    def project(
        self, x_nI: np.ndarray, weight_OI: np.ndarray, out_nO: np.ndarray, accumulate: bool = False
    ) -> None:
        """Writes x W^T to `out_nO`, or with `accumulate` adds it."""
        if self.shares_products:
            shared_product(x_nI, weight_OI, out_nO, accumulate)
        else:
            operators().matmul(x_nI, weight_OI.T, out_nO, accumulate)

    def cast(self, x_nI: np.ndarray, dtype: type) -> np.ndarray:
        """Returns x in `dtype`: x itself if it has this dtype, otherwise a rounded copy."""
        if x_nI.dtype == dtype:
            return x_nI
        return downcast_if_needed(x_nI, self.take(x_nI.shape[1], dtype))

    def float32_like(self, x_nI: np.ndarray) -> np.ndarray:
        """Returns x if it is float32, otherwise an uninitialised float32 array of its shape."""
        if x_nI.dtype == np.float32:
            return x_nI
        return self.take(x_nI.shape[1])

    def to_float32(self, x_nI: np.ndarray) -> np.ndarray:
        """Returns x in float32: x itself if it is float32, otherwise a copy."""
        return upcast_if_needed(x_nI, self.float32_like(x_nI))


def shared_product(
    x_nI: np.ndarray, weight_OI: np.ndarray, out_nO: np.ndarray, accumulate: bool = False
) -> None:
    """Writes x W^T to `out_nO`, or with `accumulate` adds it; threads share the columns of a large result."""
    threads = host_threads()
    free = threads.free()
    run = operators()
    size = len(weight_OI)
    is_small = x_nI.size * size < _SHARED_WORK and weight_OI.size < _SHARED_MATRIX
    if free == 1 or is_small or run.shares(x_nI):
        run.few_rows_product(x_nI, weight_OI, out_nO, accumulate, free)
        return

    def multiply(columns: slice, thread: int) -> None:
        operators().few_rows_product(x_nI, weight_OI[columns], out_nO[:, columns], accumulate)

    width = -(-size // (threads.threads * _SHARED_COLUMNS)) * _SHARED_COLUMNS
    threads.run((slice(first, first + width) for first in range(0, size, width)), multiply)


class CpuRmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, equation 4).

    If `spec.centers` it takes x without the mean of the row: LayerNorm (Ba et al. 2016, section 3), which adds a bias
    if the model has one. Offsets of weights are in `weight` already.
    """

    def __init__(self, spec: NormSpec) -> None:
        self.eps = np.float32(spec.eps)
        self.centers = spec.centers

    def scales(self, x_nD: np.ndarray) -> np.ndarray:
        """Returns the factor of each row, [n]."""
        return operators().rms_scales(x_nD, self.eps, self.centers)

    def __call__(
        self, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, out_nD: np.ndarray,
        bias_D: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        operators().rms_norm(x_nD, weight_D, scale_n, out_nD, self.centers)
        if bias_D is not None:
            out_nD += bias_D

    def write(
        self, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, out_nD: np.ndarray, tile: Tile,
        bias_D: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Writes y for the rows of a tile of float32 rows, rounded to the dtype of `out_nD`."""
        wide_nD = tile.float32_like(out_nD)
        self(x_nD, weight_D, scale_n, wide_nD, bias_D)
        downcast_if_needed(wide_nD, out_nD)

    def apply(self, x_nD: np.ndarray, weight_D: np.ndarray, tile: Tile) -> np.ndarray:
        """Returns y for the rows of a tile, in the dtype of x."""
        wide_nD = tile.to_float32(x_nD)
        y_nD = tile.take(x_nD.shape[1], x_nD.dtype.type)
        self.write(wide_nD, weight_D, self.scales(wide_nD), y_nD, tile)
        return y_nD

    def backward(
        self, call: SublayerCall, name: str, x_nD: np.ndarray, grad_nD: np.ndarray, tile: Tile,
        scale_n: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Replaces `grad_nD`, the gradient of a tile of y, by that of x; adds those of weight `name` and its bias."""
        if call.gradients.needs(norm_bias(name)):
            call.gradients.add_tile(norm_bias(name), tile, grad_nD.sum(0))
        wide_nD = tile.to_float32(x_nD)
        if scale_n is None:
            scale_n = self.scales(wide_nD)
        work_nD = tile.take(x_nD.shape[1])
        weight_grad_D = self.gradient(wide_nD, call.weights[name], scale_n, grad_nD, work_nD)
        call.gradients.add_tile(name, tile, weight_grad_D)

    def gradient(
        self, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, grad_nD: np.ndarray, work_nD: np.ndarray
    ) -> np.ndarray:
        """Replaces `grad_nD` by the gradient of x, overwrites `work_nD`, and returns the weight's gradient, [D]."""
        return operators().rms_norm_gradient(x_nD, weight_D, scale_n, grad_nD, work_nD, self.centers)


class SublayerCall:
    """One forward or backward pass of a part of a decoder.

    Attributes:
        weights: By their names in the part; matrices in the dtype of the products.
        saved: The arrays that the forward pass saves for the backward pass, by name; empty if it saves none.
        dropout: Draws the dropout masks of the layer; None: no dropout.
        save: Whether the forward pass fills `saved`.
        compute_output: Whether the forward pass computes its result; otherwise the result is undefined.
        input_gradient: Whether the backward pass computes the gradient of x; otherwise it is undefined.
        gradients: Takes the gradients of the trained weights in the backward pass.
        max_logits: Takes the largest attention logit of each head, [heads]; None: it is not measured.
        working: Arrays of this pass, by name.
    """

    def __init__(
        self, weights: Arrays, *, dropout: LayerDropout | None = None, save: bool = True, compute_output: bool = True,
        saved: dict[str, Any] | None = None, trained: Iterable[str] = (), input_gradient: bool = True,
        max_logits: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.weights = weights
        self.max_logits = max_logits
        self.dropout = dropout
        self.save = save
        self.compute_output = compute_output
        self.input_gradient = input_gradient
        self.saved: dict[str, Any] = saved or {}
        self.gradients = WeightGradients(trained)
        self.working: dict[str, np.ndarray] = {}

    def dropout_of(self, rate: float) -> LayerDropout | None:
        """Returns the dropout of a place with this rate; None where nothing is dropped."""
        if rate == 0:
            return None
        return self.dropout


class WeightGradients:
    """Gradients of the trained weights of one sublayer, [out, in] matrices and vectors.

    Attributes:
        totals: By name, the gradients of those weights that other parts have, too. A part may add to them in place.
    """

    def __init__(self, trained: Iterable[str]) -> None:
        self.trained = frozenset(trained)
        self.totals: Gradients = {}
        self.arrays: Gradients = {}
        self.products: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.tiles: dict[str, dict[int, np.ndarray]] = {}

    def needs(self, *names: str) -> bool:
        """Whether one of these weights is trained."""
        return not self.trained.isdisjoint(names)

    def add(self, name: str, grad_NO: np.ndarray, x_NI: np.ndarray | None) -> None:
        """Adds the gradient of the matrix `name`, from its input and the gradient of its result.

        `compute` computes it, if the matrix is trained; otherwise `x_NI` may be None.
        """
        if name in self.trained:
            assert x_NI is not None
            array = empty(grad_NO.shape[1], x_NI.shape[1])
            self.arrays[name] = array
            # Large equal blocks, an even number of them: without AVX-512 blocks of 64 rows take a fifth longer.
            blocks = 2 * -(-len(array) // (2 * ROWS))
            size = max(_MIN_GRADIENT_ROWS, -(-len(array) // (blocks * _ALIGNED)) * _ALIGNED)
            self.products += [(grad_NO[:, rows], x_NI, array[rows]) for rows in row_blocks(slice(0, len(array)), size)]

    def add_bias(self, name: str, grad_NO: np.ndarray) -> None:
        """Adds the gradient of the bias `name`, the sum of the rows, if the bias is trained."""
        if name in self.trained:
            self.arrays[name] = np.sum(upcast_if_needed(grad_NO, np.empty(grad_NO.shape, np.float32)), 0)

    def add_tile(self, name: str, tile: Tile, gradient: np.ndarray) -> None:
        """Adds the contribution of a tile to the gradient of a vector or small matrix. Several threads may call it."""
        if name in self.trained:
            self.tiles.setdefault(name, {})[tile.rows.start] = gradient

    def compute(self) -> Gradients:
        """Returns the gradients of all trained weights."""
        for name, by_row in self.tiles.items():
            self.arrays[name] = np.sum([by_row[first] for first in sorted(by_row)], 0)

        def multiply(product: tuple[np.ndarray, np.ndarray, np.ndarray], thread: int) -> None:
            """Computes the gradient of one matrix, grad_NO^T x_NI."""
            grad_NO, x_NI, out_OI = product
            operators().matmul(grad_NO.T, x_NI, out_OI)

        host_threads().run(self.products, multiply, lambda product: product[2].size)
        return self.arrays


def gated(
    gate_nF: np.ndarray, up_nF: np.ndarray | None, out_nF: np.ndarray, tile: Tile, activation: Activation
) -> None:
    """Writes activation(gate) * up in float32 to `out_nF`, which may be gate if gate is float32; no up is 1."""
    gate_nF = upcast_if_needed(gate_nF, out_nF)
    if up_nF is not None:
        up_nF = tile.to_float32(up_nF)
    operators().gated(gate_nF, up_nF, out_nF, activation)


def gated_gradient(
    gate_nF: np.ndarray, up_nF: np.ndarray | None, grad_nF: np.ndarray, inner_nF: np.ndarray | None, tile: Tile,
    activation: Activation = "silu",
) -> None:  # fmt: skip
    """Replaces gate and up by their gradients, from `grad_nF`, the gradient of the result of `gated`.

    `inner_nF`, if given, has the dtype of gate and up and receives that result, for the gradient of the next matrix.
    """
    width = gate_nF.shape[1]
    wide_gate_nF = tile.to_float32(gate_nF)
    wide_up_nF = up_nF
    if up_nF is not None:
        wide_up_nF = tile.to_float32(up_nF)
    wide_inner_nF = inner_nF
    if inner_nF is not None:
        wide_inner_nF = tile.float32_like(inner_nF)
    operators().gated_gradient(wide_gate_nF, wide_up_nF, grad_nF, wide_inner_nF, tile.take(width), activation)
    for wide_nF, narrow_nF in ((wide_gate_nF, gate_nF), (wide_up_nF, up_nF), (wide_inner_nF, inner_nF)):
        if wide_nF is not None and narrow_nF is not None:
            downcast_if_needed(wide_nF, narrow_nF)


def clamped_swiglu(gate_nF: np.ndarray, up_nF: np.ndarray, out_nF: np.ndarray, limit: float, alpha: float) -> None:
    """Writes (u + 1) g sigmoid(alpha g) to `out_nF`: g is gate up to the limit, u is up within it on both sides.

    All arrays are float32. The formula is that of gpt-oss (transformers, GptOssExperts).
    """
    gate = np.minimum(gate_nF, np.float32(limit))
    up = np.clip(up_nF, np.float32(-limit), np.float32(limit))
    up += 1
    up *= gate
    gate *= np.float32(-alpha)
    np.exp(gate, out=gate)
    gate += 1
    np.divide(up, gate, out=out_nF)


def clamped_swiglu_gradient(
    gate_nF: np.ndarray, up_nF: np.ndarray, grad_nF: np.ndarray, limit: float, alpha: float
) -> None:
    """Replaces gate and up by their gradients, from that of the result of `clamped_swiglu`."""
    gate = np.minimum(gate_nF, np.float32(limit))
    sigmoid = 1 / (1 + np.exp(gate * np.float32(-alpha)))
    up = np.clip(up_nF, np.float32(-limit), np.float32(limit)) + np.float32(1)
    slope = sigmoid * (1 + np.float32(alpha) * gate * (1 - sigmoid))
    is_open = gate_nF <= limit
    np.multiply(grad_nF, up * slope * is_open, out=gate_nF)
    is_open = np.abs(up_nF) <= limit
    np.multiply(grad_nF, gate * sigmoid * is_open, out=up_nF)
