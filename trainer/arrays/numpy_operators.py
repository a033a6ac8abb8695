"""Functions of float32 arrays that layers call, in NumPy: matrix products and functions of rows.

oneDNN (`onednn.py`) and a small compiled library (`compiled/`) compute most of them faster, with the same results
within rounding. `operators.py` chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.storage.bfloat16 import as_bfloat16, as_float32

if TYPE_CHECKING:
    from trainer.arrays.compiled.attention import CompiledAttention
    from trainer.config.schema.model import Activation

BFLOAT16 = np.uint16
"""The dtype of arrays that hold elements in bfloat16."""
_GELU_ROOT = np.float32((8 / np.pi) ** 0.5)
_GELU_CUBE = np.float32(0.044715)
_GELU_NUMBERS = 1 << 16  # at once: fewer have more calls, more leave the cache


class AdamWNumbers(NamedTuple):
    """Numbers of an update of AdamW; `rowwise.c` has the same fields.

    Attributes:
        scale: Factor on the gradient.
        rate, eps: Of the step, with the bias corrections.
        new_first, new_second: Weights of the gradient and of its square in the moments.
        beta2: Weight of the second moment before.
        keep: Factor on the weight, for weight decay.
    """

    scale: float
    rate: float
    eps: float
    new_first: float
    beta2: float
    new_second: float
    keep: float


class NumpyOperators:
    """Functions of float32 arrays for one thread; most write to their last array. Subclasses compute them faster.

    The arrays of `silu`, `silu_gradient` and the gated activations are contiguous.
    """

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
        """Writes a b to `out`, or with `accumulate` adds it: [M, K] times [K, N], or [P, M, K] times [P, K, N].

        a and b may have the same narrow dtype; then `out` may have it, too, unless it accumulates.
        """
        if a.dtype != np.float32:
            a = _widened(a)
            b = _widened(b)
        if accumulate:
            out += np.matmul(a, b)
        elif out.dtype != np.float32:
            self.cast(np.matmul(a, b), out)
        else:
            np.matmul(a, b, out=out)

    def cast(self, x: np.ndarray, out: np.ndarray) -> None:
        """Writes x in the dtype of `out`: from float32 to a narrow dtype or back."""
        if x.dtype == np.float32 and out.dtype == BFLOAT16:
            out[...] = as_bfloat16(x)
        else:
            out[...] = _widened(x)

    def softmax(self, x: np.ndarray, out: np.ndarray) -> None:
        """Writes the softmax of x over the last axis; `out` may be x, or bfloat16."""
        wide = out
        if out.dtype != x.dtype:
            wide = np.empty_like(x)
        np.subtract(x, x.max(-1, keepdims=True), out=wide)
        np.exp(wide, out=wide)
        wide /= wide.sum(-1, keepdims=True)
        if wide is not out:
            self.cast(wide, out)

    def softmax_gradient(self, y: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        """Writes the gradient of a softmax with result y, y (grad - sum(grad y)); `out` may be `grad`, or bfloat16."""
        wide = out
        if out.dtype != grad.dtype:
            wide = np.empty_like(grad)
        np.subtract(grad, np.einsum("...i,...i->...", y, grad)[..., None], out=wide)
        wide *= y
        if wide is not out:
            self.cast(wide, out)

    def silu(self, x: np.ndarray, out: np.ndarray) -> None:
        """Writes x / (1 + exp(-x)); `out` may be x."""
        np.divide(x, 1 + np.exp(-x), out=out)  # exp(-x) = inf: silu is 0

    def silu_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        """Writes grad (s + x s (1 - s)), the gradient of `silu`, with s = 1 / (1 + exp(-x)); `out` may be grad or x."""
        sigmoid = 1 / (1 + np.exp(-x))
        np.multiply(grad, sigmoid * (1 + x * (1 - sigmoid)), out=out)

    def rms_scales(self, x: np.ndarray, eps: np.float32, centers: bool = False) -> np.ndarray:
        """Returns 1 / sqrt(mean(x^2) + eps) of each row of [n, D], [n] (Zhang and Sennrich 2019, equation 4).

        With `centers` x is taken without the mean of its row, in `rms_norm` and `rms_norm_gradient` as well.
        """
        x = _centered(x, centers)
        return 1 / np.sqrt(np.einsum("nd,nd->n", x, x) / np.float32(x.shape[1]) + eps)

    def rms_norm(
        self, x: np.ndarray, weight: np.ndarray, scale: np.ndarray, out: np.ndarray, centers: bool = False
    ) -> None:
        """Writes x scale weight for the rows of [n, D], with weight [D] and the result of `rms_scales`."""
        np.multiply(_centered(x, centers), scale[:, None], out=out)
        out *= weight

    def rms_norm_gradient(
        self, x: np.ndarray, weight: np.ndarray, scale: np.ndarray, grad: np.ndarray, work: np.ndarray,
        centers: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Replaces `grad`, the gradient of `rms_norm`, by that of x, and returns the gradient of the weight, [D].

        `work` has the shape of x and may be overwritten.
        """
        x = _centered(x, centers)
        np.multiply(grad, x, out=work)
        weight_grad = scale @ work
        # The direct part minus its projection on x: mean(grad * weight * x) scale^3.
        projected = (work @ weight) * (scale * scale * scale / np.float32(x.shape[1]))
        grad *= weight
        grad *= scale[:, None]
        np.multiply(x, projected[:, None], out=work)
        grad -= work
        if centers:
            grad -= grad.mean(1, keepdims=True)
        return weight_grad

    def gated(
        self, gate: np.ndarray, up: np.ndarray | None, out: np.ndarray, activation: Activation = "silu"
    ) -> None:
        """Writes activation(gate) * up (Shazeer 2020, equation 5), or activation(gate); `out` may be gate."""
        self._activate(gate, out, activation)
        if up is not None:
            np.multiply(out, up, out=out)

    def gated_gradient(
        self, gate: np.ndarray, up: np.ndarray | None, grad: np.ndarray, result: np.ndarray | None, work: np.ndarray,
        activation: Activation = "silu",
    ) -> None:  # fmt: skip
        """Replaces gate and up by their gradients, from `grad`, that of the result of `gated`.

        `result`, if given, receives that result. `work` has the shape of gate and may be overwritten.
        """
        if up is None:
            if result is not None:
                self._activate(gate, result, activation)
            self._activation_gradient(gate, grad, gate, activation)
            return
        self._activate(gate, work, activation)
        if result is not None:
            np.multiply(work, up, out=result)
        np.multiply(grad, up, out=up)
        self._activation_gradient(gate, up, gate, activation)
        np.multiply(grad, work, out=up)

    def weighted_gated_gradient(
        self, gate: np.ndarray, up: np.ndarray, grad: np.ndarray, result: np.ndarray, work: np.ndarray,
        weight: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Does what `gated_gradient` does for silu(gate) * up * weight, with a weight for each row, [n].

        `result` receives silu(gate) * up * weight. Returns the gradients of the weights, [n]. All are contiguous.
        """
        self.gated_gradient(gate, up, grad, result, work)
        weight_grad = np.einsum("rf,rf->r", result, grad)
        for array in (result, gate, up):
            array *= weight[:, None]
        return weight_grad

    def add_to_blocks(self, x: np.ndarray, added: np.ndarray) -> None:
        """Adds a contiguous matrix [n, m] to each matrix of x [P, n, m], whose rows are dense."""
        x += added

    def sum_rows(self, x: np.ndarray, rows: np.ndarray, factors: np.ndarray | None, out: np.ndarray) -> None:
        """Writes the sum of some rows of x for each token, multiplied by its factors if there are any.

        Args:
            x: Float32 and contiguous, as `out`, [n, D].
            rows: The numbers of the rows, [n, k].
            factors: [n, k].
        """
        out[...] = 0
        for choice in range(rows.shape[1]):
            row = x[rows[:, choice]]
            if factors is not None:
                row *= factors[:, choice : choice + 1]
            out += row

    def fused_attention(self, q: np.ndarray) -> CompiledAttention | None:
        """Returns the functions that compute all of attention for a block of such queries; None: there are none."""
        return None

    def shares(self, x: np.ndarray) -> bool:
        """Whether `few_rows_product` and an `attend` without a cap use several threads for so few rows [..., n, I]."""
        return False

    def few_rows_product(
        self, x: np.ndarray, weight: np.ndarray, out: np.ndarray, accumulate: bool = False, threads: int = 1
    ) -> None:
        """Writes x W^T to `out` [n, O], or with `accumulate` adds it; x is [n, I] and the weight [O, I].

        NumPy's library takes half of oneDNN's time for one row, but twice its time for eight rows.
        """
        if len(x) > 1 or x.dtype != np.float32:
            self.matmul(x, weight.T, out, accumulate)
        elif accumulate:
            out += np.matmul(x, weight.T)
        else:
            np.matmul(x, weight.T, out=out)

    def attend(
        self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None, cap: float | None,
        sinks: np.ndarray | None, out: np.ndarray, threads: int = 1,
    ) -> None:  # fmt: skip
        """Writes softmax(scores + mask) v to `out` [B, K, R, v], for R queries of each head of each sequence.

        Args:
            q: [B, K, R, d], contiguous as `out`.
            keys, values: [B, K, S, d] and [B, K, S, v].
            mask: [B, 1, R, S].
            cap: The cap of the scores q k^T.
            sinks: [K, R], contiguous: scores that take part in the softmax and have no value.
            threads: How many may compute, see `shares`.
        """
        scores = q @ keys.swapaxes(-1, -2)
        if cap is not None:
            soft_cap(scores, cap)
        if mask is not None:
            scores += mask
        np.matmul(_softmax_with_sinks(scores, sinks), values, out=out)

    def rotate_halves(self, x: np.ndarray, rotation: np.ndarray) -> None:
        """Rotates elements i and i + d / 2 in the rows of [n, heads, d] by rotations cos + i sin, [n, 1, d / 2]."""
        half = x.shape[-1] // 2
        first = x[..., :half]
        second = x[..., half:]
        rotated = first * rotation.real - second * rotation.imag
        second *= rotation.real
        second += first * rotation.imag
        first[...] = rotated

    def adamw(
        self, weight: np.ndarray, first: np.ndarray, second: np.ndarray, gradient: np.ndarray, numbers: AdamWNumbers,
        work: np.ndarray,
    ) -> None:  # fmt: skip
        """Adds the scaled gradient to both moments; then w = keep w - rate first / (sqrt(second) + eps).

        All arrays are contiguous, [size]; `work` [2, at least size] is overwritten.
        """
        x, scaled = (array[: weight.size] for array in work)
        if numbers.scale != 1.0:
            gradient = np.multiply(gradient, np.float32(numbers.scale), out=scaled)
        np.subtract(gradient, first, out=x)
        np.multiply(x, np.float32(numbers.new_first), out=x)
        np.add(first, x, out=first)
        np.multiply(gradient, gradient, out=x)
        np.multiply(x, np.float32(numbers.new_second), out=x)
        np.multiply(second, np.float32(numbers.beta2), out=second)
        np.add(second, x, out=second)
        np.sqrt(second, out=x)
        np.add(x, np.float32(numbers.eps), out=x)
        np.divide(first, x, out=x)
        np.multiply(x, np.float32(numbers.rate), out=x)
        if numbers.keep != 1.0:
            np.multiply(weight, np.float32(numbers.keep), out=weight)
        np.subtract(weight, x, out=weight)

    def rotate(self, x: np.ndarray, rotation: np.ndarray) -> None:
        """Multiplies neighbours in the rows of [n, heads, d], taken as complex numbers, by rotations [n, 1, d / 2]."""
        numbers = x.view(np.complex64)
        numbers *= rotation

    def _activate(self, x: np.ndarray, out: np.ndarray, activation: Activation) -> None:
        if activation == "gelu_pytorch_tanh":
            self._gelu(x, out)
        elif activation == "relu2":
            np.square(np.maximum(x, 0, out=out), out=out)
        else:
            self.silu(x, out)

    def _activation_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray, activation: Activation) -> None:
        """Writes grad times the derivative of the activation; `out` may be grad or x."""
        if activation == "gelu_pytorch_tanh":
            self._gelu_gradient(x, grad, out)
        elif activation == "relu2":
            np.multiply(grad, 2 * np.maximum(x, 0), out=out)
        else:
            self.silu_gradient(x, grad, out)

    def _gelu(self, x: np.ndarray, out: np.ndarray) -> None:
        """Writes x (1 + tanh(y)) / 2 with y = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016, section 2).

        (1 + tanh(y)) / 2 is sigmoid(2 y), and 2 y is x times a divisor d above 0: the result is silu(2 y) / d. oneDNN
        computes SiLU 20 times as fast as tanh. Both arrays are contiguous; `out` may be x.
        """
        numbers = x.reshape(-1)
        results = out.reshape(-1)
        for first in range(0, numbers.size, _GELU_NUMBERS):
            part = slice(first, first + _GELU_NUMBERS)
            inner, divisor, _ = _gelu_inner(numbers[part])
            self.silu(inner, inner)
            np.divide(inner, divisor, out=results[part])

    def _gelu_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        """Writes grad times the derivative of `_gelu`; `out` may be grad or x. All arrays are contiguous."""
        numbers = x.reshape(-1)
        grads = grad.reshape(-1)
        results = out.reshape(-1)
        for first in range(0, numbers.size, _GELU_NUMBERS):
            part = slice(first, first + _GELU_NUMBERS)
            # The derivative of silu(z) / d is (silu'(z) z' - silu(z) d' / d) / d.
            inner, divisor, square = _gelu_inner(numbers[part])
            slope = np.empty_like(inner)
            self.silu_gradient(inner, grads[part], slope)
            self.silu(inner, inner)
            inner *= grads[part]
            inner *= numbers[part]
            inner *= 2 * _GELU_ROOT * _GELU_CUBE
            inner /= divisor
            square *= 3 * _GELU_ROOT
            square += _GELU_ROOT
            slope *= square
            slope -= inner
            np.divide(slope, divisor, out=results[part])


NUMPY_OPERATORS = NumpyOperators()


def _widened(x: np.ndarray) -> np.ndarray:
    if x.dtype == BFLOAT16:
        return as_float32(x)
    return x.astype(np.float32, copy=False)


def _centered(x: np.ndarray, centers: bool) -> np.ndarray:
    """Returns rows without their means, or as they are."""
    if centers:
        return x - x.mean(1, keepdims=True)
    return x


def _gelu_inner(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns 2 y, 2 y / x, and 0.044715 x^2."""
    square = x * x
    square *= _GELU_CUBE
    divisor = square * _GELU_ROOT
    divisor += _GELU_ROOT
    return divisor * x, divisor, square


def _softmax_with_sinks(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Replaces scores [..., R, S] by their softmax, in which the sinks [..., R] take part, and returns it."""
    largest = scores.max(-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks[..., None])
    scores -= largest
    np.exp(scores, out=scores)
    total = scores.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[..., None] - largest)
    scores /= total
    return scores


def soft_cap(x: np.ndarray, cap: float, slope: np.ndarray | None = None) -> None:
    """Replaces x by cap * tanh(x / cap); writes the derivative, 1 - tanh(x / cap)^2, to `slope`."""
    x /= np.float32(cap)
    np.tanh(x, out=x)
    if slope is not None:
        np.multiply(x, x, out=slope)
        np.subtract(np.float32(1), slope, out=slope)
    x *= np.float32(cap)
