"""Attention and feed-forward layer of a decoder on arrays, forward and backward.

A thread takes some hundred rows through all that a layer does with them, while they are in its cache: norm, products,
rotary embedding, SwiGLU, residual. Attention goes in blocks of queries: the scores of a block, [heads, queries, keys],
are the most that ever exists, and keys that no query of a block sees are left out. The backward pass computes them
again. Nothing is compiled, for any shape.

Sums over tokens are products over all of them, cut along the rows of the result, and sums over blocks stay in one
thread: the bits are the same for any number of threads.

Matrices in bfloat16 make all products those of numbers in bfloat16, summed in float32, as PyTorch's autocast and the
fused operators of an Ascend do: what a product takes, and what is kept for the backward pass, is rounded once. Between
two products all is float32: norms, rotary embedding, scores, softmax, SwiGLU. So are the residual stream, to which a
product adds its sums without rounding them, and the gradients of queries, keys and weights, which are sums.

Legend: N tokens (B sequences x T), D hidden, H query heads, K key/value heads, G = H / K, d head size, C = H * d,
F feed-forward; n rows of a part, Q queries and S keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from mindspore import Tensor

from trainer.ops.cpu.arrays import Scratch, as_narrow, as_wide, empty, host_threads, parts, store
from trainer.ops.cpu.onednn import BFLOAT16, operators
from trainer.storage.bfloat16 import as_float32

if TYPE_CHECKING:
    from trainer.config import ModelConfig

Weights: TypeAlias = Mapping[str, np.ndarray]
"""Those of a block, by their names in it."""
Gradients: TypeAlias = dict[str, Tensor]
"""Of the weights that are trained."""

_ROWS = 256  # that a thread takes at once: products of fewer are slower
_FEWEST_ROWS, _PRODUCT = 64, 1 << 27  # of a matrix's gradient, and multiplications, that a thread takes at once
_QUERIES = 128  # of a block: half of what is computed on the diagonal is masked
_KEYS = 64  # a block's keys begin at a multiple of this: softmax is compiled for each number of keys
_SCORES = 1 << 19  # of the heads that a thread takes at once, for the longest block: fewer calls, and yet in its cache
_TASKS = 8  # of which the threads take one after the other, at least, where there are heads enough
_CACHE_LINE = 16  # numbers
_TURNED = "self_attn.q_", "self_attn.k_"  # names of what makes queries and keys begin so
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
        turn_N1h: Of the rotary embedding: cos + i sin of the angle of each pair, complex, [N, 1, rotated size / 2].
        blocks: The query blocks of each sequence, and those for layers with a sliding window.
    """

    turn_N1h: np.ndarray
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
    masked -= masked % _CACHE_LINE  # an addition that begins there takes a third of the time
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
    with `rope_interleave` neighbours.

    Neighbours are turned as one complex number, which takes a tenth of the time. So queries and keys of the other kind
    of models are computed in another order, `paired`: a score is a sum over all numbers of a head, in any order.
    """

    def __init__(self, settings: ModelConfig) -> None:
        self.head_size, self.half, self.order_d = settings.head_size, settings.rotary_size // 2, None
        self.first = slice(0, 2 * self.half, 2) if settings.rope_interleave else slice(self.half)
        if not settings.rope_interleave:
            order_d = np.arange(self.head_size)
            order_d[: 2 * self.half] = order_d[: 2 * self.half].reshape(2, -1).T.reshape(-1)
            self.order_d = order_d

    def table(self, cos_Nd: np.ndarray, sin_Nd: np.ndarray) -> np.ndarray:
        """What `turn` multiplies with; both numbers of a pair have the same angle."""
        return (cos_Nd + 1j * sin_Nd)[:, None, self.first].astype(np.complex64)

    def turn(self, x_nC: np.ndarray, turn_n1h: np.ndarray, back: bool = False) -> None:
        """In place; `back` turns the other way, which is the gradient."""
        pairs = x_nC.reshape(len(x_nC), -1, self.head_size)[..., : 2 * self.half].view(np.complex64)
        pairs *= turn_n1h.conj() if back else turn_n1h

    def paired(self, weights: Weights) -> Weights:
        """The weights that make queries and keys with both numbers of a pair beside each other."""
        if self.order_d is None:
            return weights
        return {**weights, **{name: self._by_head(weights[name])[:, self.order_d].reshape(weights[name].shape)
                              for name in weights if name.startswith(_TURNED)}}  # fmt: skip

    def unpaired(self, gradients: Gradients) -> Gradients:
        """The gradients of those weights, in the order of the model."""
        for name in gradients if self.order_d is not None else ():
            if name.startswith(_TURNED):
                by_head = self._by_head(gradients[name].asnumpy())
                by_head[:, self.order_d] = by_head.copy()
        return gradients

    def _by_head(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, self.head_size, *array.shape[1:])


class WeightGradients:
    """The gradients of matrices, grad^T x over all tokens, computed together at the end, and those of vectors."""

    def __init__(self, trained: Iterable[str]) -> None:
        self.trained, self.found, self.products = frozenset(trained), {}, []

    def add(self, name: str, grad_NO: np.ndarray, x_NI: np.ndarray) -> None:
        """For the matrix `name`; `x_NI` is what it multiplied, `grad_NO` the gradient of the result."""
        if name in self.trained:
            self.found[name], array = empty(grad_NO.shape[1], x_NI.shape[1])
            most = max(_FEWEST_ROWS, min(_ROWS, _PRODUCT // x_NI.size))
            self.products += [(grad_NO[:, rows], x_NI, array[rows]) for rows in parts(slice(0, len(array)), most)]

    def add_bias(self, name: str, grad_NO: np.ndarray) -> None:
        if name in self.trained:
            self.found[name], array = empty(grad_NO.shape[1])
            np.sum(grad_NO if grad_NO.dtype == np.float32 else as_float32(grad_NO), 0, out=array)

    def add_parts(self, name: str, of_parts: Mapping[int, np.ndarray]) -> None:
        """For the vector `name`; `of_parts` has the sums over parts of the tokens by their first rows."""
        if name in self.trained:
            self.found[name], array = empty(*next(iter(of_parts.values())).shape)
            np.sum([of_parts[first] for first in sorted(of_parts)], 0, out=array)

    def compute(self) -> Gradients:
        def multiply(product: tuple[np.ndarray, np.ndarray, np.ndarray], thread: int) -> None:
            grad_NO, x_NI, out_OI = product
            operators().matmul(grad_NO.T, x_NI, out_OI)

        # The largest first: at the end no thread waits long for another one.
        host_threads().run(sorted(self.products, key=lambda product: -product[2].size), multiply)
        return self.found


class SavedAttention(NamedTuple):
    """What the backward pass of `HostAttention` needs beside its input and weights."""

    scale_N: np.ndarray  # of the norm
    q_NC: np.ndarray  # turned and scaled, in the order of `Rotary.paired`, like k_NK and plain
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
        self, x_ND: np.ndarray, weights: Weights, positions: TokenPositions, blocks: Sequence[Sequence[QueryBlock]],
        keeps: bool = True,
    ) -> tuple[Tensor, SavedAttention | None]:  # fmt: skip
        """The result, and what `backward` takes; without `keeps` None."""
        weights = self.rotary.paired(weights)
        rows, width, kv_width = len(x_ND), self.heads * self.head_size, self.kv_heads * self.head_size
        (result, out_ND), scale_N = empty(*x_ND.shape), np.empty(rows, np.float32)
        dtype = weights["self_attn.o_proj.weight"].dtype
        q_NC, k_NK, v_NK = (empty(rows, size, dtype=dtype)[1] for size in (width, kv_width, kv_width))
        # Without `keeps` each array takes the place of the one before it.
        heads_NC, plain = empty(rows, width, dtype=dtype)[1] if keeps else q_NC, None
        if self.head_norm is not None:
            plain = tuple(empty(*array.shape, dtype=dtype)[1] for array in (q_NC, k_NK)) if keeps else (q_NC, k_NK)
        before = plain or (None, None)

        def enter(part: slice, thread: int) -> None:
            size, narrow = x_ND.shape[1], dtype == BFLOAT16
            y_nD, *wide, y = self.scratch.take(
                thread, part, size, narrow * width, narrow * kv_width, narrow=(narrow * size,)
            )
            scale_N[part] = self.norm.scales(x_ND[part])
            self.norm(x_ND[part], weights[_NORM], scale_N[part], y_nD)
            y = as_narrow(y_nD, y) if narrow else y_nD
            for name, array, plain_NC, work in zip("qk", (q_NC, k_NK), before, wide, strict=True):
                turned = work if narrow else array[part]
                if plain_NC is None:
                    _project(weights, f"self_attn.{name}_proj", y, turned)
                else:
                    _project(weights, f"self_attn.{name}_proj", y, plain_NC[part])
                    self._norm_heads(as_wide(plain_NC[part], work), weights[f"self_attn.{name}_norm.weight"], turned)
                self.rotary.turn(turned, positions.turn_N1h[part])
                if name == "q":
                    turned *= self.scale
                as_narrow(turned, array[part])
            _project(weights, "self_attn.v_proj", y, v_NK[part])

        def attend(block: QueryBlock, thread: int) -> None:
            for heads, group in self._head_parts([block]):
                q, out = (self._queries(array, block, heads, group) for array in (q_NC, heads_NC))
                k, v = (self._keys(array, block, heads) for array in (k_NK, v_NK))
                scores, *narrow = self._scores(thread, q, k, 1)
                _masked_scores(q, k, block, scores)
                probabilities = narrow[0] if narrow else scores
                operators().softmax(scores, probabilities)
                operators().matmul(probabilities, v, out)
            out_nD = out_ND[block.queries]
            out_nD[...] = x_ND[block.queries]
            _project(weights, "self_attn.o_proj", heads_NC[block.queries], out_nD, accumulate=True)

        host_threads().run(parts(slice(0, rows), _ROWS), enter)
        host_threads().run([block for sequence in blocks for block in sequence], attend)
        return result, SavedAttention(scale_N, q_NC, k_NK, v_NK, heads_NC, plain) if keeps else None

    def backward(
        self, x_ND: np.ndarray, weights: Weights, positions: TokenPositions, blocks: Sequence[Sequence[QueryBlock]],
        saved: SavedAttention, grad_ND: np.ndarray, trained: Iterable[str],
    ) -> tuple[Tensor, Gradients]:  # fmt: skip
        """The gradients of x and of the trained weights. `saved` is used up."""
        weights = self.rotary.paired(weights)
        rows, width, kv_width = len(x_ND), self.heads * self.head_size, self.kv_heads * self.head_size
        (result, out_ND), found = empty(*x_ND.shape), WeightGradients(trained)
        dtype = saved.q_NC.dtype
        narrow, size = dtype == BFLOAT16, x_ND.shape[1]
        grad_heads_NC, y_ND = (empty(rows, one, dtype=dtype)[1] for one in (width, size))
        grad_q_NC, grad_k_NK, grad_v_NK = (empty(rows, one)[1] for one in (width, kv_width, kv_width))
        # What products take of these gradients, and of that of the result.
        rounded, rounded_ND = (grad_q_NC, grad_k_NK, grad_v_NK), grad_ND
        if narrow:
            rounded = tuple(empty(*array.shape, dtype=dtype)[1] for array in rounded)
            rounded_ND = empty(*grad_ND.shape, dtype=dtype)[1]
        names = [_NORM] if saved.plain is None else [_NORM, *(f"self_attn.{name}_norm.weight" for name in "qk")]
        of_norms: dict[str, dict[int, np.ndarray]] = {name: {} for name in names}

        def leave(part: slice, thread: int) -> None:
            grad = as_narrow(grad_ND[part], rounded_ND[part])
            operators().matmul(grad, weights["self_attn.o_proj.weight"], grad_heads_NC[part])

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
            work_nD, work_nC = self.scratch.take(thread, part, size, narrow * width)
            grads = grad_q_NC[part], grad_k_NK[part], grad_v_NK[part]
            grads[0][...] *= self.scale
            for array in grads[:2]:
                self.rotary.turn(array, positions.turn_N1h[part], back=True)
            if saved.plain is not None:
                for name, grad, plain in zip("qk", grads, saved.plain, strict=False):
                    key = f"self_attn.{name}_norm.weight"
                    x = as_wide(plain[part], work_nC[:, : plain.shape[1]])
                    of_norms[key][part.start] = self._head_norm_gradient(x, weights[key], grad)
            out_nD = out_ND[part]
            for place, (name, grad, array) in enumerate(zip("qkv", grads, rounded, strict=True)):
                factor = as_narrow(grad, array[part])
                operators().matmul(factor, weights[f"self_attn.{name}_proj.weight"], out_nD, place > 0)
            of_norms[_NORM][part.start] = self.norm.gradient(
                x_ND[part], weights[_NORM], saved.scale_N[part], out_nD, work_nD
            )
            out_nD += grad_ND[part]
            _normed(self.norm, x_ND[part], weights[_NORM], saved.scale_N[part], work_nD, y_ND[part])

        threads = host_threads()
        threads.run(parts(slice(0, rows), _ROWS), leave)
        most = max(1, self.kv_heads * len(blocks) // _TASKS)
        tasks = ((sequence, heads) for sequence in blocks
                 for heads, group in self._head_parts(sequence, most) if not group)  # fmt: skip
        threads.run(tasks, attend)
        threads.run(parts(slice(0, rows), _ROWS), enter)
        for name, of_parts in of_norms.items():
            found.add_parts(name, of_parts)
        sums = grad_q_NC, grad_k_NK, grad_v_NK, grad_ND
        factors = zip((*rounded, rounded_ND), (y_ND, y_ND, y_ND, saved.heads_NC), strict=True)
        for name, grad, (factor, x) in zip("qkvo", sums, factors, strict=True):
            found.add(f"self_attn.{name}_proj.weight", factor, x)
            found.add_bias(f"self_attn.{name}_proj.bias", grad)
        return result, self.rotary.unpaired(found.compute())

    def _block_gradients(
        self, block: QueryBlock, q: np.ndarray, grad: np.ndarray, grad_q: np.ndarray, k: np.ndarray, v: np.ndarray,
        grad_k: np.ndarray, grad_v: np.ndarray, thread: int,
    ) -> None:  # fmt: skip
        """Of the queries of a block; those of its keys and values are added to what is there."""
        probabilities, grad_scores, *narrow = self._scores(thread, q, k, 2)
        # What products take of both.
        factor, grad_factor = narrow or (probabilities, grad_scores)
        run = operators()
        _masked_scores(q, k, block, probabilities)
        run.softmax(probabilities, probabilities)
        run.matmul(grad, v.swapaxes(1, 2), grad_scores)
        as_narrow(probabilities, factor)
        run.matmul(factor.swapaxes(1, 2), grad, grad_v, True)
        run.softmax_gradient(probabilities, grad_scores, grad_factor)
        run.matmul(grad_factor, k, grad_q)
        run.matmul(grad_factor.swapaxes(1, 2), q, grad_k, True)

    def _scores(self, thread: int, q: np.ndarray, k: np.ndarray, number: int) -> list[np.ndarray]:
        """Scratch for the scores of some heads, [heads, Q, S]: so many arrays, and where q is bfloat16 as many more of
        that."""
        shape, widths = (len(q), *q.shape[1:2], k.shape[1]), (k.shape[1],) * number
        narrow = widths if q.dtype == BFLOAT16 else ()
        taken = self.scratch.take(thread, slice(0, shape[0] * shape[1]), *widths, narrow=narrow)
        return [array.reshape(shape) for array in taken]

    def _head_parts(self, blocks: Iterable[QueryBlock], most: int | None = None) -> Iterator[tuple[slice, int]]:
        """Key/value heads, so many at once (and at most `most`) that the scores of any of the blocks stay in the cache,
        and each of the query heads that share their keys."""
        scores = max((each.queries.stop - each.queries.start) * (each.keys.stop - each.keys.start) for each in blocks)
        for heads in parts(slice(0, self.kv_heads), min(max(1, _SCORES // (2 * scores)), most or self.kv_heads)):
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

    def _norm_heads(self, x_nC: np.ndarray, weight_d: np.ndarray, out_nC: np.ndarray) -> None:
        x, out = (array.reshape(-1, self.head_size) for array in (x_nC, out_nC))
        self.head_norm(x, weight_d, self.head_norm.scales(x), out)

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
        dtype, width = weights[f"{self.down}.weight"].dtype, self.width
        kept, narrow = [empty(rows, width, dtype=dtype)[1] for _ in range(2)] if keeps else [], dtype == BFLOAT16

        def compute(part: slice, thread: int) -> None:
            y_nD, inner_nF, up_nF, y, *rounded = self.scratch.take(
                thread, part, hidden, width, width, narrow=(hidden * narrow, *(width * narrow,) * 3)
            )
            gate, up = rounded[:2] if narrow else (inner_nF, up_nF)
            if keeps:
                gate, up = (array[part] for array in kept)
            if self.norm is None:
                y_nD = x_ND[part]
            else:
                scale_N[part] = self.norm.scales(x_ND[part])
                self.norm(x_ND[part], weights[_MLP_NORM], scale_N[part], y_nD)
                out_ND[part] = x_ND[part]
            y = as_narrow(y_nD, y) if narrow else y_nD
            _project(weights, self.gate, y, gate)
            _project(weights, self.up, y, up)
            operators().silu(as_wide(gate, inner_nF), inner_nF)
            operators().multiply(inner_nF, up, inner_nF)
            inner = as_narrow(inner_nF, rounded[2]) if narrow else inner_nF
            _project(weights, self.down, inner, out_ND[part], accumulate=self.norm is not None)

        host_threads().run(parts(slice(0, rows), _ROWS), compute)
        return result, SavedMlp(scale_N, *kept) if keeps else None

    def backward(
        self, x_ND: np.ndarray, weights: Weights, saved: SavedMlp, grad_ND: np.ndarray, trained: Iterable[str]
    ) -> tuple[Tensor, Gradients]:
        """As `HostAttention.backward`."""
        rows, hidden = x_ND.shape
        (result, out_ND), found = empty(rows, hidden), WeightGradients(trained)
        dtype, width, rounded_ND = saved.gate_NF.dtype, self.width, grad_ND
        narrow = dtype == BFLOAT16
        inner_NF, y_ND = empty(rows, width, dtype=dtype)[1], x_ND
        if narrow or self.norm is not None:
            y_ND = empty(rows, hidden, dtype=dtype)[1]
        if narrow:
            rounded_ND = empty(rows, hidden, dtype=dtype)[1]
        of_norm: dict[int, np.ndarray] = {}

        def compute(part: slice, thread: int) -> None:
            run = operators()
            grad_inner, silu, *more, work = self.scratch.take(
                thread, part, width, width, *(narrow * width,) * 2, narrow * hidden
            )
            gate, up, inner, out, y = (array[part] for array in (saved.gate_NF, saved.up_NF, inner_NF, out_ND, y_ND))
            wide_gate, wide_inner = more if narrow else (gate, inner)
            run.matmul(as_narrow(grad_ND[part], rounded_ND[part]), weights[f"{self.down}.weight"], grad_inner)
            as_wide(gate, wide_gate)
            run.silu(wide_gate, silu)
            run.multiply(silu, up, wide_inner)
            as_narrow(wide_inner, inner)
            silu *= grad_inner
            run.multiply(grad_inner, up, grad_inner)
            run.silu_gradient(wide_gate, grad_inner, wide_gate)
            as_narrow(wide_gate, gate)
            store(silu, up)  # from here on both hold their gradients
            run.matmul(gate, weights[f"{self.gate}.weight"], out)
            run.matmul(up, weights[f"{self.up}.weight"], out, True)
            if self.norm is not None:
                x, weight_D, scale_n = x_ND[part], weights[_MLP_NORM], saved.scale_N[part]
                work = work if narrow else y
                of_norm[part.start] = self.norm.gradient(x, weight_D, scale_n, out, work)
                out += grad_ND[part]
                _normed(self.norm, x, weight_D, scale_n, work, y)
            else:
                as_narrow(x_ND[part], y)

        host_threads().run(parts(slice(0, rows), _ROWS), compute)
        if self.norm is not None:
            found.add_parts(_MLP_NORM, of_norm)
        gradients = (self.gate, saved.gate_NF), (self.up, saved.up_NF), (self.down, grad_ND)
        for name, grad in gradients:
            found.add_bias(f"{name}.bias", grad)
        for (name, grad), x in zip((*gradients[:2], (self.down, rounded_ND)), (y_ND, y_ND, inner_NF), strict=True):
            found.add(f"{name}.weight", grad, x)
        return result, found.compute()


def _project(weights: Weights, name: str, x_nI: np.ndarray, out_nO: np.ndarray, accumulate: bool = False) -> None:
    """out = x W^T + b, or with `accumulate` added to `out`."""
    bias_O = weights.get(f"{name}.bias")
    wide = np.empty(out_nO.shape, np.float32) if bias_O is not None and out_nO.dtype == BFLOAT16 else out_nO
    operators().matmul(x_nI, weights[f"{name}.weight"].T, wide, accumulate)
    if bias_O is not None:
        wide += bias_O
        as_narrow(wide, out_nO)


def _normed(
    norm: RmsNorm, x_nD: np.ndarray, weight_D: np.ndarray, scale_n: np.ndarray, work_nD: np.ndarray, out_nD: np.ndarray
) -> None:
    """The normed rows in the dtype of `out`; `work`, which is float32, is overwritten."""
    wide_nD = work_nD if out_nD.dtype == BFLOAT16 else out_nD
    norm(x_nD, weight_D, scale_n, wide_nD)
    as_narrow(wide_nD, out_nD)


def _masked_scores(q: np.ndarray, k: np.ndarray, block: QueryBlock, out: np.ndarray) -> None:
    """Of queries with all keys of the block; those that a query does not see are far below all others."""
    operators().matmul(q, k.swapaxes(1, 2), out)
    if block.bias_QM.size:
        out[..., block.masked :] += block.bias_QM
