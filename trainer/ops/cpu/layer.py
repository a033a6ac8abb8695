"""Attention and feed-forward layer of a decoder on arrays, forward and backward, for float32.

A thread takes some hundred rows through all that a layer does with them, while they are in its cache: norm, products,
rotary embedding, SwiGLU, residual. Attention goes in blocks of queries: the scores of a block, [heads, queries, keys],
are the most that ever exists, and keys that no query of a block sees are left out. The backward pass computes them
again. Nothing is compiled, for any shape.

Sums over tokens are products over all of them, cut along the rows of the result, and sums over blocks stay in one
thread: the bits are the same for any number of threads.

Legend: N tokens (B sequences x T), D hidden, H query heads, K key/value heads, G = H / K, d head size, C = H * d,
F feed-forward; n rows of a part, Q queries and S keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from mindspore import Tensor

from trainer.ops.cpu.arrays import Scratch, empty, host_threads, parts
from trainer.ops.cpu.onednn import operators

if TYPE_CHECKING:
    from trainer.config import ModelConfig

Weights: TypeAlias = Mapping[str, np.ndarray]
"""Those of a block, by their names in it."""
Gradients: TypeAlias = dict[str, Tensor]
"""Of the weights that are trained."""

_ROWS = 256  # that a thread takes at once: products of fewer are slower
_QUERIES = 128  # of a block: half of what is computed on the diagonal is masked
_KEYS = 64  # a block's keys begin at a multiple of this: softmax is compiled for each number of keys
_SCORES = 1 << 17  # of the heads that a thread takes at once, for the longest block: they stay in its cache
_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"


class QueryBlock(NamedTuple):
    """Queries of one sequence that follow each other, and the keys that some of them see, as rows of the batch."""

    queries: slice
    keys: slice
    masked: int
    """The key, counted from the first, from which `bias_QM` is added to the scores."""
    bias_QM: np.ndarray
    """0 where the query sees the key."""


@dataclass(frozen=True)
class TokenPositions:
    """Where the tokens of a batch stand.

    Attributes:
        cos_N1h, sin_N1h: Of the rotary embedding, for one number of each pair, [N, 1, rotated size / 2].
        blocks: The query blocks of each sequence, and those for layers with a sliding window.
    """

    cos_N1h: np.ndarray
    sin_N1h: np.ndarray
    blocks: tuple[tuple[QueryBlock, ...], ...]
    window_blocks: tuple[tuple[QueryBlock, ...], ...] | None = None


def query_blocks(segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[tuple[QueryBlock, ...], ...]:
    """Blocks of each sequence: causal, within a document, and with `window` within so many tokens."""
    length = segment_ids_BT.shape[1]
    return tuple(
        tuple(_block(segments_T, row * length, queries, window) for queries in parts(slice(0, length), _QUERIES))
        for row, segments_T in enumerate(segment_ids_BT)
    )


def _block(segments_T: np.ndarray, start: int, queries: slice, window: int | None) -> QueryBlock:
    query_Q1, key_1S = np.arange(queries.start, queries.stop)[:, None], np.arange(queries.stop)[None]
    sees_QS = (segments_T[queries, None] == segments_T[None, : queries.stop]) & (key_1S <= query_Q1)
    if window is not None:
        sees_QS &= key_1S > query_Q1 - window
    first = int(sees_QS.any(0).argmax()) // _KEYS * _KEYS
    sees_QS = sees_QS[:, first:]
    everywhere_S = sees_QS.all(0)
    masked = 0 if not everywhere_S[0] else len(everywhere_S) if everywhere_S.all() else int(everywhere_S.argmin())
    bias_QM = np.where(sees_QS[:, masked:], np.float32(0), np.finfo(np.float32).min)
    own = slice(start + queries.start, start + queries.stop)
    return QueryBlock(own, slice(start + first, start + queries.stop), masked, bias_QM)


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, size: int, eps: float) -> None:
        self.size, self.eps = np.float32(size), np.float32(eps)

    def scales(self, x_nD: np.ndarray) -> np.ndarray:
        """1 / sqrt(...) of each row, [n]."""
        return 1 / np.sqrt(np.einsum("nd,nd->n", x_nD, x_nD) / self.size + self.eps)

    def __call__(self, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, out_nD: np.ndarray) -> None:
        np.multiply(x_nD, scale_n[:, None], out=out_nD)
        out_nD *= weight_D

    def gradient(
        self, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, grad_nD: np.ndarray, work_nD: np.ndarray
    ) -> np.ndarray:
        """Replaces `grad_nD` by the gradient of x, overwrites `work_nD`, and returns the weight's gradient, [D]."""
        np.multiply(grad_nD, x_nD, out=work_nD)
        of_weight_D = scale_n @ work_nD
        # The direct part, less its projection on x: mean(grad * weight * x) scale^3.
        projected_n = (work_nD @ weight_D) * (scale_n * scale_n * scale_n / self.size)
        grad_nD *= weight_D
        grad_nD *= scale_n[:, None]
        np.multiply(x_nD, projected_n[:, None], out=work_nD)
        grad_nD -= work_nD
        return of_weight_D


class Rotary:
    """The rotation of every pair of a head's first numbers (Su et al. 2021, equation 34): numbers i and i + half, or
    with `interleaved` neighbours."""

    def __init__(self, settings: ModelConfig) -> None:
        self.head_size, half = settings.head_size, settings.rotary_size // 2
        self.first, self.second = slice(half), slice(half, 2 * half)
        if settings.rope_interleave:
            self.first, self.second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)

    def half_tables(self, cos_Nd: np.ndarray, sin_Nd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those for `turn`: both numbers of a pair have the same angle."""
        return (np.ascontiguousarray(table[:, None, self.first]) for table in (cos_Nd, sin_Nd))

    def turn(self, x_nC: np.ndarray, cos_n1h: np.ndarray, sin_n1h: np.ndarray, back: bool = False) -> None:
        """In place; `back` turns the other way, which is the gradient."""
        x = x_nC.reshape(len(x_nC), -1, self.head_size)
        first, second = x[..., self.first], x[..., self.second]
        by_first, by_second = first * sin_n1h, second * sin_n1h
        first *= cos_n1h
        second *= cos_n1h
        if back:
            first += by_second
            second -= by_first
        else:
            first -= by_second
            second += by_first


class WeightGradients:
    """The gradients of matrices, grad^T x over all tokens, computed together at the end, and those of vectors."""

    def __init__(self, trained: Iterable[str]) -> None:
        self.trained, self.found, self.products = frozenset(trained), {}, []

    def add(self, name: str, grad_NO: np.ndarray, x_NI: np.ndarray) -> None:
        """For the matrix `name`; `x_NI` is what it multiplied, `grad_NO` the gradient of the result."""
        if name in self.trained:
            self.found[name], array = empty(grad_NO.shape[1], x_NI.shape[1])
            self.products += [(grad_NO[:, rows], x_NI, array[rows]) for rows in parts(slice(0, len(array)), _ROWS)]

    def add_bias(self, name: str, grad_NO: np.ndarray) -> None:
        if name in self.trained:
            self.found[name], array = empty(grad_NO.shape[1])
            np.sum(grad_NO, 0, out=array)

    def add_parts(self, name: str, of_parts: Mapping[int, np.ndarray]) -> None:
        """For the vector `name`; `of_parts` has the sums over parts of the tokens by their first rows."""
        if name in self.trained:
            self.found[name], array = empty(*next(iter(of_parts.values())).shape)
            np.sum([of_parts[first] for first in sorted(of_parts)], 0, out=array)

    def compute(self) -> Gradients:
        def multiply(product: tuple[np.ndarray, np.ndarray, np.ndarray], thread: int) -> None:
            grad_NO, x_NI, out_OI = product
            operators().matmul(grad_NO.T, x_NI, out_OI)

        host_threads().run(self.products, multiply)
        return self.found


class SavedAttention(NamedTuple):
    """What the backward pass of `HostAttention` needs beside its input and weights."""

    scale_N: np.ndarray  # of the norm
    q_NC: np.ndarray  # turned and scaled
    k_NK: np.ndarray  # turned
    v_NK: np.ndarray
    heads_NC: np.ndarray  # results of the heads
    plain: tuple[np.ndarray, np.ndarray] | None  # queries and keys before the norm of each head, where there is one


class HostAttention:
    """x + W_o attention(norm(x)): norm, projections, norms of the heads, rotary embedding, attention, residual."""

    def __init__(self, settings: ModelConfig, scratch: Scratch) -> None:
        self.heads, self.kv_heads, self.head_size = settings.num_heads, settings.kv_heads, settings.head_size
        self.groups = self.heads // self.kv_heads
        self.norm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)
        self.head_norm = RmsNorm(self.head_size, settings.rms_norm_eps) if settings.use_qk_norm else None
        self.rotary, self.scale, self.scratch = Rotary(settings), np.float32(self.head_size**-0.5), scratch

    def forward(
        self, x_ND: np.ndarray, weights: Weights, positions: TokenPositions, blocks: Iterable[Iterable[QueryBlock]],
        keeps: bool = True,
    ) -> tuple[Tensor, SavedAttention | None]:  # fmt: skip
        """The result, and what `backward` takes; without `keeps` None."""
        rows, width, kv_width = len(x_ND), self.heads * self.head_size, self.kv_heads * self.head_size
        (result, out_ND), scale_N = empty(*x_ND.shape), np.empty(rows, np.float32)
        q_NC, k_NK, v_NK = (empty(rows, size)[1] for size in (width, kv_width, kv_width))
        # Without `keeps` each array takes the place of the one before it.
        heads_NC, plain = empty(rows, width)[1] if keeps else q_NC, None
        if self.head_norm is not None:
            plain = (empty(rows, width)[1], empty(rows, kv_width)[1]) if keeps else (q_NC, k_NK)
        before = (q_NC, k_NK, v_NK) if plain is None else (*plain, v_NK)

        def enter(part: slice, thread: int) -> None:
            (y_nD,) = self.scratch.take(thread, part, x_ND.shape[1])
            scale_N[part] = self.norm.scales(x_ND[part])
            self.norm(x_ND[part], weights[_NORM], scale_N[part], y_nD)
            for name, array in zip("qkv", before, strict=True):
                _project(weights, f"self_attn.{name}_proj", y_nD, array[part])
            if plain is not None:
                self._norm_heads(plain, (q_NC, k_NK), weights, part)
            for array in (q_NC, k_NK):
                self.rotary.turn(array[part], positions.cos_N1h[part], positions.sin_N1h[part])
            q_NC[part] *= self.scale

        def attend(block: QueryBlock, thread: int) -> None:
            for heads, group in self._head_parts([block]):
                q, out = (self._queries(array, block, heads, group) for array in (q_NC, heads_NC))
                k, v = (self._keys(array, block, heads) for array in (k_NK, v_NK))
                (scores,) = self._scores(thread, q, k, 1)
                _probabilities(q, k, block, scores)
                operators().matmul(scores, v, out)
            out_nD = out_ND[block.queries]
            out_nD[...] = x_ND[block.queries]
            _project(weights, "self_attn.o_proj", heads_NC[block.queries], out_nD, accumulate=True)

        host_threads().run(parts(slice(0, rows), _ROWS), enter)
        host_threads().run([block for sequence in blocks for block in sequence], attend)
        return result, SavedAttention(scale_N, q_NC, k_NK, v_NK, heads_NC, plain) if keeps else None

    def backward(
        self, x_ND: np.ndarray, weights: Weights, positions: TokenPositions, blocks: Iterable[Iterable[QueryBlock]],
        saved: SavedAttention, grad_ND: np.ndarray, trained: Iterable[str],
    ) -> tuple[Tensor, Gradients]:  # fmt: skip
        """The gradients of x and of the trained weights. `saved` is used up."""
        rows, width, kv_width = len(x_ND), self.heads * self.head_size, self.kv_heads * self.head_size
        (result, out_ND), found = empty(*x_ND.shape), WeightGradients(trained)
        grad_heads_NC, grad_q_NC, grad_k_NK, grad_v_NK, y_ND = (
            empty(rows, size)[1] for size in (width, width, kv_width, kv_width, x_ND.shape[1])
        )
        names = [_NORM] if saved.plain is None else [_NORM, *(f"self_attn.{name}_norm.weight" for name in "qk")]
        of_norms: dict[str, dict[int, np.ndarray]] = {name: {} for name in names}

        def leave(part: slice, thread: int) -> None:
            operators().matmul(grad_ND[part], weights["self_attn.o_proj.weight"], grad_heads_NC[part])

        def attend(task: tuple[Sequence[QueryBlock], slice], thread: int) -> None:
            sequence, heads = task
            whole = slice(sequence[0].queries.start, sequence[-1].queries.stop)
            for array in (grad_k_NK, grad_v_NK):
                self._keys(array, sequence[0]._replace(keys=whole), heads)[...] = 0
            for block in sequence:
                keys = [self._keys(array, block, heads) for array in (saved.k_NK, saved.v_NK, grad_k_NK, grad_v_NK)]
                for group in range(self.groups):
                    queries = (self._queries(array, block, heads, group)
                               for array in (saved.q_NC, grad_heads_NC, grad_q_NC))  # fmt: skip
                    self._block_gradients(block, *queries, *keys, thread)

        def enter(part: slice, thread: int) -> None:
            (work_nD,) = self.scratch.take(thread, part, x_ND.shape[1])
            grads = grad_q_NC[part], grad_k_NK[part], grad_v_NK[part]
            grads[0][...] *= self.scale
            for array in grads[:2]:
                self.rotary.turn(array, positions.cos_N1h[part], positions.sin_N1h[part], back=True)
            if saved.plain is not None:
                for name, grad, plain in zip("qk", grads, saved.plain, strict=False):
                    key = f"self_attn.{name}_norm.weight"
                    of_norms[key][part.start] = self._head_norm_gradient(plain[part], weights[key], grad)
            out_nD = out_ND[part]
            for place, (name, grad) in enumerate(zip("qkv", grads, strict=True)):
                operators().matmul(grad, weights[f"self_attn.{name}_proj.weight"], out_nD, place > 0)
            of_norms[_NORM][part.start] = self.norm.gradient(
                x_ND[part], weights[_NORM], saved.scale_N[part], out_nD, work_nD
            )
            out_nD += grad_ND[part]
            self.norm(x_ND[part], weights[_NORM], saved.scale_N[part], y_ND[part])

        threads = host_threads()
        threads.run(parts(slice(0, rows), _ROWS), leave)
        tasks = ((sequence, heads) for sequence in blocks for heads, group in self._head_parts(sequence) if not group)
        threads.run(tasks, attend)
        threads.run(parts(slice(0, rows), _ROWS), enter)
        for name, of_parts in of_norms.items():
            found.add_parts(name, of_parts)
        outputs = ("q", grad_q_NC, y_ND), ("k", grad_k_NK, y_ND), ("v", grad_v_NK, y_ND), ("o", grad_ND, saved.heads_NC)
        for name, grad, x in outputs:
            found.add(f"self_attn.{name}_proj.weight", grad, x)
            found.add_bias(f"self_attn.{name}_proj.bias", grad)
        return result, found.compute()

    def _block_gradients(
        self, block: QueryBlock, q: np.ndarray, grad: np.ndarray, grad_q: np.ndarray, k: np.ndarray, v: np.ndarray,
        grad_k: np.ndarray, grad_v: np.ndarray, thread: int,
    ) -> None:  # fmt: skip
        """Of the queries of a block; those of its keys and values are added to what is there."""
        scores, grad_scores = self._scores(thread, q, k, 2)
        run = operators()
        _probabilities(q, k, block, scores)
        run.matmul(grad, v.swapaxes(1, 2), grad_scores)
        run.matmul(scores.swapaxes(1, 2), grad, grad_v, True)
        run.softmax_gradient(scores, grad_scores, grad_scores)
        run.matmul(grad_scores, k, grad_q)
        run.matmul(grad_scores.swapaxes(1, 2), q, grad_k, True)

    def _scores(self, thread: int, q: np.ndarray, k: np.ndarray, number: int) -> list[np.ndarray]:
        """Scratch for the scores of some heads, [heads, Q, S]."""
        taken = self.scratch.take(thread, slice(0, len(q) * q.shape[1]), *(k.shape[1],) * number)
        return [array.reshape(len(q), q.shape[1], -1) for array in taken]

    def _head_parts(self, blocks: Iterable[QueryBlock]) -> Iterator[tuple[slice, int]]:
        """Key/value heads, so many at once that the scores of any of the blocks stay in the cache, and each of the
        query heads that share their keys."""
        scores = max((each.queries.stop - each.queries.start) * (each.keys.stop - each.keys.start) for each in blocks)
        for heads in parts(slice(0, self.kv_heads), max(1, _SCORES // (2 * scores))):
            for group in range(self.groups):
                yield heads, group

    def _queries(self, array_NC: np.ndarray, block: QueryBlock, heads: slice, group: int) -> np.ndarray:
        """A view of the block's queries, [heads, Q, d]: one query head of each key/value head."""
        rows = block.queries.stop - block.queries.start
        by_head = array_NC[block.queries].reshape(rows, self.kv_heads, self.groups, self.head_size)
        return by_head[:, heads, group].transpose(1, 0, 2)

    def _keys(self, array_NK: np.ndarray, block: QueryBlock, heads: slice) -> np.ndarray:
        """A view of the block's keys or values, [heads, S, d]."""
        rows = block.keys.stop - block.keys.start
        return array_NK[block.keys].reshape(rows, self.kv_heads, self.head_size)[:, heads].transpose(1, 0, 2)

    def _norm_heads(
        self, plain: Sequence[np.ndarray], normed: Sequence[np.ndarray], weights: Weights, part: slice
    ) -> None:
        for name, x_NC, out_NC in zip("qk", plain, normed, strict=True):
            x, out = (array[part].reshape(-1, self.head_size) for array in (x_NC, out_NC))
            self.head_norm(x, weights[f"self_attn.{name}_norm.weight"], self.head_norm.scales(x), out)

    def _head_norm_gradient(self, x_nC: np.ndarray, weight_d: np.ndarray, grad_nC: np.ndarray) -> np.ndarray:
        """Replaces the gradient of normed heads by that of x, and returns the weight's."""
        x, grad = x_nC.reshape(-1, self.head_size), grad_nC.reshape(-1, self.head_size)
        return self.head_norm.gradient(x, weight_d, self.head_norm.scales(x), grad, np.empty_like(x))


class SavedMlp(NamedTuple):
    """What the backward pass of `HostMlp` needs beside its input and weights."""

    scale_N: np.ndarray  # of the norm
    gate_NF: np.ndarray
    up_NF: np.ndarray


class HostMlp:
    """x + W_down (silu(W_gate norm(x)) * W_up norm(x)): norm, SwiGLU (Shazeer 2020, equation 5), residual.

    Args:
        width: F.
        norm: None: neither norm nor residual, as in shared experts.
        prefix: Of the names of the matrices.
    """

    def __init__(self, width: int, scratch: Scratch, norm: RmsNorm | None = None, prefix: str = "mlp.") -> None:
        self.norm, self.scratch, self.width = norm, scratch, width
        self.gate, self.up, self.down = (f"{prefix}{name}_proj" for name in ("gate", "up", "down"))

    def forward(self, x_ND: np.ndarray, weights: Weights, keeps: bool = True) -> tuple[Tensor, SavedMlp | None]:
        """As `HostAttention.forward`."""
        rows, hidden = x_ND.shape
        (result, out_ND), scale_N = empty(rows, hidden), np.empty(rows, np.float32)
        kept = [empty(rows, self.width)[1] for _ in range(2)] if keeps else []

        def compute(part: slice, thread: int) -> None:
            y_nD, inner_nF, up_nF = self.scratch.take(thread, part, hidden, self.width, self.width)
            gate_nF, up_nF = (array[part] for array in kept) if keeps else (inner_nF, up_nF)
            if self.norm is None:
                y_nD = x_ND[part]
            else:
                scale_N[part] = self.norm.scales(x_ND[part])
                self.norm(x_ND[part], weights[_MLP_NORM], scale_N[part], y_nD)
                out_ND[part] = x_ND[part]
            _project(weights, self.gate, y_nD, gate_nF)
            _project(weights, self.up, y_nD, up_nF)
            operators().silu(gate_nF, inner_nF)
            inner_nF *= up_nF
            _project(weights, self.down, inner_nF, out_ND[part], accumulate=self.norm is not None)

        host_threads().run(parts(slice(0, rows), _ROWS), compute)
        return result, SavedMlp(scale_N, *kept) if keeps else None

    def backward(
        self, x_ND: np.ndarray, weights: Weights, saved: SavedMlp, grad_ND: np.ndarray, trained: Iterable[str]
    ) -> tuple[Tensor, Gradients]:
        """As `HostAttention.backward`."""
        rows, hidden = x_ND.shape
        (result, out_ND), found = empty(rows, hidden), WeightGradients(trained)
        inner_NF, y_ND = empty(rows, self.width)[1], x_ND if self.norm is None else empty(rows, hidden)[1]
        of_norm: dict[int, np.ndarray] = {}

        def compute(part: slice, thread: int) -> None:
            run = operators()
            grad_inner, silu = self.scratch.take(thread, part, self.width, self.width)
            gate, up, inner, out, y = (array[part] for array in (saved.gate_NF, saved.up_NF, inner_NF, out_ND, y_ND))
            run.matmul(grad_ND[part], weights[f"{self.down}.weight"], grad_inner)
            run.silu(gate, silu)
            np.multiply(silu, up, out=inner)
            silu *= grad_inner
            grad_inner *= up
            run.silu_gradient(gate, grad_inner, gate)
            up[...] = silu  # from here on both hold their gradients
            run.matmul(gate, weights[f"{self.gate}.weight"], out)
            run.matmul(up, weights[f"{self.up}.weight"], out, True)
            if self.norm is not None:
                of_norm[part.start] = self.norm.gradient(x_ND[part], weights[_MLP_NORM], saved.scale_N[part], out, y)
                out += grad_ND[part]
                self.norm(x_ND[part], weights[_MLP_NORM], saved.scale_N[part], y)

        host_threads().run(parts(slice(0, rows), _ROWS), compute)
        if self.norm is not None:
            found.add_parts(_MLP_NORM, of_norm)
        outputs = (self.gate, saved.gate_NF, y_ND), (self.up, saved.up_NF, y_ND), (self.down, grad_ND, inner_NF)
        for name, grad, x in outputs:
            found.add(f"{name}.weight", grad, x)
            found.add_bias(f"{name}.bias", grad)
        return result, found.compute()


def _project(weights: Weights, name: str, x_nI: np.ndarray, out_nO: np.ndarray, accumulate: bool = False) -> None:
    """out = x W^T + b, or with `accumulate` added to `out`."""
    operators().matmul(x_nI, weights[f"{name}.weight"].T, out_nO, accumulate)
    if (bias_O := weights.get(f"{name}.bias")) is not None:
        out_nO += bias_O


def _probabilities(q: np.ndarray, k: np.ndarray, block: QueryBlock, out: np.ndarray) -> None:
    operators().matmul(q, k.swapaxes(1, 2), out)
    if block.bias_QM.size:
        out[..., block.masked :] += block.bias_QM
    operators().softmax(out, out)
