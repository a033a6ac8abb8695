"""Kernels of prediction on a CPU, in NumPy: the weights are read where MindSpore holds them.

A new token is little arithmetic in many operators, over one more cached position each time. MindSpore 2.10 takes tens
of microseconds to start an operator or a compiled function, keeps memory at each operator that is called alone, and
compiles a function anew for each shape. NumPy does none of these.

All arrays are float32. A part that computes in half precision has its inputs and results rounded to that dtype, as the
kernels of `cpu/kernels.py`.

Legend: as in cpu/kernels.py; B sequences, Q new tokens of each, S cached ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.arrays.memory import expert_rows, host_threads, take_tokens
from trainer.arrays.moe.router import chosen_gates, sigmoid
from trainer.arrays.onednn import operators
from trainer.ops.precision import FLOAT32, Precision
from trainer.ops.routing import Routing, RoutingRule, route
from trainer.storage.bfloat16 import as_bfloat16, as_float32

if TYPE_CHECKING:
    from trainer.config.schema.moe import MoEConfig
    from trainer.parallel.host_group import HostGroup

_SHARED_WORK = 1 << 22  # multiplications from which threads share a product
_ALIGNED = 64  # columns: a thread begins at a multiple of this

Function = Callable[..., np.ndarray]


def rounding(dtype: str) -> Function:
    """Rounds an array to the numbers of a dtype."""
    if dtype == "bfloat16":
        return lambda x: as_float32(as_bfloat16(x))
    return (lambda x: x) if dtype == "float32" else (lambda x: x.astype(dtype).astype(np.float32))


def product(x_NI: np.ndarray, weight_OI: np.ndarray) -> np.ndarray:
    """x weight^T. Threads share a large one by its columns.

    For one row NumPy's library takes half of oneDNN's time, for eight rows twice as long.
    """
    size, threads = len(weight_OI), host_threads()
    out_NO = np.empty((len(x_NI), size), np.float32)

    def multiply(columns: slice, thread: int) -> None:
        if len(x_NI) == 1:
            np.matmul(x_NI, weight_OI[columns].T, out=out_NO[:, columns])
        else:
            operators().matmul(x_NI, weight_OI[columns].T, out_NO[:, columns])

    if threads.threads == 1 or x_NI.size * size < _SHARED_WORK:
        multiply(slice(None), 0)
    else:
        width = -(-size // (threads.threads * _ALIGNED)) * _ALIGNED
        threads.run((slice(first, first + width) for first in range(0, size, width)), multiply)
    return out_NO


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf: silu is 0
        return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis; overwrites x."""
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(-1, keepdims=True)
    return x


@dataclass(frozen=True)
class HostKernels:
    """Functions of arrays in the place of the cells that `KernelSet` makes, with the same arguments."""

    precision: Precision = FLOAT32

    def __post_init__(self) -> None:
        host_threads()  # they limit the threads of NumPy's own library, which would poll between two products

    @property
    def rounded(self) -> Function:
        """Rounds to the dtype of matrix products, which is that of what flows between kernels."""
        return rounding(self.precision.compute.dtype)

    def part(self, kernel: Function, dtype: str, first: bool = False) -> Function:
        """A kernel in a dtype of its own; with `first` only its first input is rounded."""
        inside, outside = rounding(dtype), self.rounded
        if dtype == self.precision.compute.dtype == "float32":
            return kernel
        if first:
            return lambda x, *others: outside(inside(kernel(inside(x), *others)))
        return lambda *inputs: outside(inside(kernel(*map(inside, inputs))))

    def linear(self) -> Function:
        """The weights are rounded already."""
        if self.precision.compute.dtype == "float32":
            return product
        rounded = self.rounded
        return lambda x_NI, weight_OI: rounded(product(rounded(x_NI), weight_OI))

    def summed_linear(self, group: HostGroup) -> Function:
        """Of a rank that has some of a matrix's columns and of the numbers that they multiply; a bias is added to the
        sum."""
        linear, rounded = self.linear(), self.rounded

        def summed(x_NI: np.ndarray, weight_OI: np.ndarray, bias_O: np.ndarray | None = None) -> np.ndarray:
            y_NO = rounded(group.all_reduce(linear(x_NI, weight_OI)))
            return y_NO if bias_O is None else rounded(y_NO + rounded(bias_O))

        return summed

    def linear_bias(self) -> Function:
        linear, rounded = self.linear(), self.rounded
        return lambda x_NI, weight_OI, bias_O: rounded(linear(x_NI, weight_OI) + rounded(bias_O))

    def rms_norm(self, size: int, eps: float) -> Function:
        def norm(x_ND: np.ndarray, weight_D: np.ndarray) -> np.ndarray:
            mean_N = np.einsum("nd,nd->n", x_ND, x_ND) / np.float32(size)
            return x_ND * (1 / np.sqrt(mean_N + np.float32(eps)))[:, None] * weight_D

        return self.part(norm, self.precision.norm.dtype)

    def head_norm(self, size: int, eps: float) -> Function:
        norm = self.rms_norm(size, eps)
        return lambda x_NC, weight_d: norm(x_NC.reshape(-1, size), weight_d).reshape(x_NC.shape)

    def rotary(self, head_size: int, rotated_size: int | None = None, interleaved: bool = False) -> Function:
        half = (rotated_size or head_size) // 2
        first, second = slice(half), slice(half, 2 * half)
        if interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)

        def turn(x_NC: np.ndarray, cos_N1d: np.ndarray, sin_N1d: np.ndarray) -> np.ndarray:
            x = x_NC.reshape(len(x_NC), -1, head_size)
            out = x * cos_N1d
            out[..., first] -= x[..., second] * sin_N1d[..., first]
            out[..., second] += x[..., first] * sin_N1d[..., second]
            return out.reshape(x_NC.shape)

        return self.part(turn, self.precision.rotary.dtype, first=True)

    def rotary_tables(self, cos_Nd: np.ndarray, sin_Nd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tables that `rotary` takes, for any number of heads: [N, 1, d]."""
        rounded = rounding(self.precision.rotary.dtype)
        return rounded(cos_Nd)[:, None], rounded(sin_Nd)[:, None]

    def swiglu(self) -> Function:
        return self.part(lambda gate_NF, up_NF: silu(gate_NF) * up_NF, self.precision.compute.dtype)

    def split_heads(self, heads: int, first: int) -> Callable:
        def split(x_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            rows, x = len(x_NC), x_NC.reshape(len(x_NC), heads, -1)
            return x[..., :first].reshape(rows, -1), x[..., first:].reshape(rows, -1)

        return split

    def join_heads(self, heads: int, *, shared: bool = False) -> Function:
        def join(x_NA: np.ndarray, y_NB: np.ndarray) -> np.ndarray:
            rows = len(x_NA)
            y = np.repeat(y_NB[:, None], heads, axis=1) if shared else y_NB.reshape(rows, heads, -1)
            return np.concatenate((x_NA.reshape(rows, heads, -1), y), -1).reshape(rows, -1)

        return join

    def attention(self, *sizes: int, **options: Any) -> None:
        """Attention without a cache is not for prediction."""

    def attention_options(self, settings: Any, window: int | None) -> dict[str, Any]:
        return {}

    def dropout(self, rate: float) -> None:
        """Nothing is dropped in prediction."""

    def cached_mask(self, allowed_BQS: np.ndarray, heads: int, kv_heads: int) -> np.ndarray | None:
        """Is added to the scores, [B, 1, Q*G, S], 0 where allowed; None where everything is."""
        if allowed_BQS.all():
            return None
        bias_BQS = np.where(allowed_BQS, np.float32(0), np.finfo(np.float32).min)
        return np.repeat(bias_BQS, heads // kv_heads, axis=1)[:, None]

    def cached_attention(
        self, q_BQC: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, heads: int, kv_heads: int,
        scale: float | None = None,
    ) -> np.ndarray:  # fmt: skip
        """As `cached_attention` of cpu/kernels.py; keys and values [B, K, S, d], or of one head [B, S, d].

        Threads share a large one by sequences and heads.
        """
        rows, queries, width = q_BQC.shape
        group, rounded, rounded_softmax = heads // kv_heads, self.rounded, rounding(self.precision.softmax.dtype)
        scale = np.float32((width // heads) ** -0.5 if scale is None else scale)
        q = rounded(q_BQC * scale).reshape(rows, queries, kv_heads, group, -1)
        q = q.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, queries * group, -1)
        # Views of the cache where it is float32.
        k, v = ((x if x.ndim == 4 else x[:, None]).astype(np.float32, copy=False) for x in (k, v))

        def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
            scores = rounded_softmax(rounded(q @ k.swapaxes(-1, -2)))
            if mask is not None:
                scores += mask
            return rounded(rounded(rounded_softmax(softmax(scores))) @ v)

        threads = host_threads()
        if threads.threads == 1 or q.size * k.shape[2] < _SHARED_WORK:
            out = attend(q, k, v, mask)
        else:
            out = np.empty((*q.shape[:3], v.shape[-1]), np.float32)

            def attend_one(place: tuple[int, int], thread: int) -> None:
                out[place] = attend(q[place], k[place], v[place], None if mask is None else mask[place[0], 0])

            threads.run(np.ndindex(rows, kv_heads), attend_one)
        out = out.reshape(rows, kv_heads, queries, -1).transpose(0, 2, 1, 3)
        return out.reshape(rows, queries, -1)

    def router(self, moe: MoEConfig, rule: RoutingRule) -> Callable[..., tuple[np.ndarray, Routing]]:
        """(y_ND, router_ED, bias_E or None) -> gates_Nk, routing."""
        factor = np.float32(moe.routed_scaling_factor)

        def choose(y_ND: np.ndarray, router_ED: np.ndarray, bias_E: np.ndarray | None) -> tuple[np.ndarray, Routing]:
            logits_NE = product(y_ND, router_ED)
            scores_NE = sigmoid(logits_NE) if moe.score_function == "sigmoid" else softmax(logits_NE)
            routing = route(rule, scores_NE, bias_E)
            return chosen_gates(scores_NE, routing.experts_Nk, moe)[0] * factor, routing

        return choose

    def experts(
        self, y_ND: np.ndarray, gates_Nk: np.ndarray, gate_EFD: np.ndarray, up_EFD: np.ndarray, down_EDF: np.ndarray,
        routing: Routing,
    ) -> np.ndarray:  # fmt: skip
        """The sum of the outputs of each token's experts, weighted by their gates, [N, D]."""
        rows_RD = np.zeros((len(routing.token_R), y_ND.shape[1]), np.float32)
        of_experts = replace(self, precision=FLOAT32) if self.precision.by else self  # as in training
        linear, swiglu = of_experts.linear(), of_experts.swiglu()
        for expert, rows in expert_rows(routing.counts_E):
            x_rD = np.empty_like(rows_RD[rows])
            take_tokens(y_ND, routing.token_R[rows], x_rD)
            inner_rF = swiglu(linear(x_rD, gate_EFD[expert]), linear(x_rD, up_EFD[expert]))
            rows_RD[rows] = linear(inner_rF, down_EDF[expert])
        return of_experts.rounded((rows_RD[routing.row_Nk] * gates_Nk[..., None]).sum(1))

    def expert_biases(self, gates_Nk: np.ndarray, experts_Nk: np.ndarray, bias_ED: np.ndarray) -> np.ndarray:
        """The sum of each token's biases times their gates, [N, D]."""
        return self.rounded((bias_ED[experts_Nk] * gates_Nk[..., None]).sum(1))

    def shared_gate(self, out_ND: np.ndarray, y_ND: np.ndarray, weight_1D: np.ndarray) -> np.ndarray:
        """out sigmoid(y weight^T)."""
        return self.rounded(out_ND * self.rounded(sigmoid(product(y_ND, weight_1D))))
