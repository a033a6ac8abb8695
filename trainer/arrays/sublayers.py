"""The two sublayers of a decoder layer, forward and backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Tensor

from trainer.arrays.memory import Scratch, as_narrow, as_wide, empty, host_threads, parts, store
from trainer.arrays.norms import ROWS, Entrance, RmsNorm, RowExchange, normed
from trainer.arrays.onednn import BFLOAT16, operators
from trainer.arrays.positions import Gradients, QueryBlock, Rotary, TokenPositions, Weights
from trainer.storage.bfloat16 import as_float32

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_FEWEST_ROWS, _PRODUCT = 64, 1 << 27  # of a matrix's gradient, and multiplications, that a thread takes at once
_SCORES = 1 << 19  # of the heads that a thread takes at once, for the longest block: fewer calls, and yet in its cache
_TASKS = 8  # of which the threads take one after the other, at least, where there are heads enough
_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"


class WeightGradients:
    """The gradients of matrices, grad^T x over all tokens, computed together at the end, and those of vectors."""

    def __init__(self, trained: Iterable[str]) -> None:
        self.trained, self.found, self.products = frozenset(trained), {}, []

    def add(self, name: str, grad_NO: np.ndarray, x_NI: np.ndarray) -> None:
        """For the matrix `name`; `x_NI` is what it multiplied, `grad_NO` the gradient of the result."""
        if name in self.trained:
            self.found[name], array = empty(grad_NO.shape[1], x_NI.shape[1])
            most = max(_FEWEST_ROWS, min(ROWS, _PRODUCT // x_NI.size))
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
    normed_ND: np.ndarray | None  # what ranks have entered with together


class HostAttention:
    """x + W_o attention(norm(x)): norm, projections, norms of the heads, rotary embedding, attention, residual."""

    def __init__(self, settings: ModelConfig, scratch: Scratch, exchange: RowExchange | None = None) -> None:
        self.heads, self.kv_heads, self.head_size = settings.num_heads, settings.kv_heads, settings.head_size
        self.groups = self.heads // self.kv_heads
        self.norm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)
        self.entrance = None if exchange is None else Entrance(self.norm, exchange)
        self.head_norm = RmsNorm(self.head_size, settings.rms_norm_eps) if settings.use_qk_norm else None
        self.rotary, self.scale, self.scratch = Rotary(settings), np.float32(self.head_size**-0.5), scratch

    def forward(
        self, x_ND: np.ndarray, weights: Weights, positions: TokenPositions, blocks: Sequence[Sequence[QueryBlock]],
        keeps: bool = True, adds: bool = True,
    ) -> tuple[Tensor, SavedAttention | None]:  # fmt: skip
        """The result, and what `backward` takes; without `keeps` None. Without `adds` nobody needs the result, which is
        not computed."""
        weights, entrance = self.rotary.paired(weights), self.entrance
        (result, out_ND), scale_N = empty(*x_ND.shape), np.empty(len(x_ND), np.float32)
        normed_ND = None if entrance is None else entrance.enter(x_ND, weights[_NORM], scale_N)
        rows, width, kv_width = len(positions.turn_N1h), self.heads * self.head_size, self.kv_heads * self.head_size
        added_ND = out_ND if entrance is None else empty(rows, x_ND.shape[1])[1]
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
            if normed_ND is None:
                scale_N[part] = self.norm.scales(x_ND[part])
                self.norm(x_ND[part], weights[_NORM], scale_N[part], y_nD)
                y = as_narrow(y_nD, y) if narrow else y_nD
            else:
                y = normed_ND[part]
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
            added_nD = added_ND[block.queries]
            if not adds:
                return
            if entrance is None:
                added_nD[...] = x_ND[block.queries]
                _project(weights, "self_attn.o_proj", heads_NC[block.queries], added_nD, accumulate=True)
            else:
                operators().matmul(heads_NC[block.queries], weights["self_attn.o_proj.weight"].T, added_nD)

        host_threads().run(parts(slice(0, rows), ROWS), enter)
        host_threads().run([block for sequence in blocks for block in sequence], attend)
        if entrance is not None and adds:
            entrance.leave(x_ND, added_ND, weights.get("self_attn.o_proj.bias"), out_ND)
        return result, SavedAttention(scale_N, q_NC, k_NK, v_NK, heads_NC, plain, normed_ND) if keeps else None

    def backward(
        self, x_ND: np.ndarray, weights: Weights, positions: TokenPositions, blocks: Sequence[Sequence[QueryBlock]],
        saved: SavedAttention, grad_ND: np.ndarray, trained: Iterable[str],
    ) -> tuple[Tensor, Gradients]:  # fmt: skip
        """The gradients of x and of the trained weights. `saved` is used up."""
        weights, entrance = self.rotary.paired(weights), self.entrance
        rows, width, kv_width = len(saved.q_NC), self.heads * self.head_size, self.kv_heads * self.head_size
        (result, out_ND), found = empty(*x_ND.shape), WeightGradients(trained)
        dtype = saved.q_NC.dtype
        narrow, size = dtype == BFLOAT16, x_ND.shape[1]
        grad_heads_NC = empty(rows, width, dtype=dtype)[1]
        # What comes from the residual stream, and goes to it: of all ranks' rows where they share the sublayer.
        every_ND = grad_ND if entrance is None else entrance.exchange.gather(grad_ND)
        y_ND, into_ND = saved.normed_ND, empty(rows, size)[1] if entrance is not None else out_ND
        if y_ND is None:
            y_ND = empty(rows, size, dtype=dtype)[1]
        grad_q_NC, grad_k_NK, grad_v_NK = (empty(rows, one)[1] for one in (width, kv_width, kv_width))
        # What products take of these gradients, and of that of the result.
        rounded, rounded_ND = (grad_q_NC, grad_k_NK, grad_v_NK), every_ND
        if narrow:
            rounded = tuple(empty(*array.shape, dtype=dtype)[1] for array in rounded)
            rounded_ND = empty(*grad_ND.shape, dtype=dtype)[1]
        of_norms: defaultdict[str, dict[int, np.ndarray]] = defaultdict(dict)

        def leave(part: slice, thread: int) -> None:
            grad = as_narrow(every_ND[part], rounded_ND[part])
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
            out_nD = into_ND[part]
            for place, (name, grad, array) in enumerate(zip("qkv", grads, rounded, strict=True)):
                factor = as_narrow(grad, array[part])
                operators().matmul(factor, weights[f"self_attn.{name}_proj.weight"], out_nD, place > 0)
            if entrance is not None:
                return
            of_norms[_NORM][part.start] = self.norm.gradient(
                x_ND[part], weights[_NORM], saved.scale_N[part], out_nD, work_nD
            )
            out_nD += grad_ND[part]
            normed(self.norm, x_ND[part], weights[_NORM], saved.scale_N[part], work_nD, y_ND[part])

        threads = host_threads()
        threads.run(parts(slice(0, rows), ROWS), leave)
        most = max(1, self.kv_heads * len(blocks) // _TASKS)
        tasks = ((sequence, heads) for sequence in blocks
                 for heads, group in self._head_parts(sequence, most) if not group)  # fmt: skip
        threads.run(tasks, attend)
        threads.run(parts(slice(0, rows), ROWS), enter)
        if entrance is not None:
            of_norms[_NORM] = entrance.gradient(x_ND, weights[_NORM], saved.scale_N, into_ND, grad_ND, out_ND)
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
    normed_ND: np.ndarray | None  # what ranks have entered with together


class HostMlp:
    """x + W_down (silu(W_gate norm(x)) * W_up norm(x)): norm, SwiGLU (Shazeer 2020, equation 5), residual.

    Args:
        width: F.
        norm: None: neither norm nor residual, as in shared experts.
        prefix: Of the names of the matrices.
    """

    def __init__(
        self, width: int, scratch: Scratch, norm: RmsNorm | None = None, prefix: str = "mlp.",
        exchange: RowExchange | None = None,
    ) -> None:  # fmt: skip
        self.norm, self.scratch, self.width = norm, scratch, width
        self.entrance = None if exchange is None else Entrance(norm, exchange)
        self.gate, self.up, self.down = (f"{prefix}{name}_proj" for name in ("gate", "up", "down"))

    def forward(
        self, x_ND: np.ndarray, weights: Weights, keeps: bool = True, adds: bool = True
    ) -> tuple[Tensor, SavedMlp | None]:
        """As `HostAttention.forward`."""
        entrance, (result, out_ND), scale_N = self.entrance, empty(*x_ND.shape), np.empty(len(x_ND), np.float32)
        normed_ND = None if entrance is None else entrance.enter(x_ND, weights[_MLP_NORM], scale_N)
        rows, hidden = x_ND.shape if entrance is None else normed_ND.shape
        added_ND = out_ND if entrance is None else empty(rows, hidden)[1]
        dtype, width = weights[f"{self.down}.weight"].dtype, self.width
        kept, narrow = [empty(rows, width, dtype=dtype)[1] for _ in range(2)] if keeps else [], dtype == BFLOAT16

        def compute(part: slice, thread: int) -> None:
            y_nD, inner_nF, up_nF, y, *rounded = self.scratch.take(
                thread, part, hidden, width, width, narrow=(hidden * narrow, *(width * narrow,) * 3)
            )
            gate, up = rounded[:2] if narrow else (inner_nF, up_nF)
            if keeps:
                gate, up = (array[part] for array in kept)
            if entrance is not None:
                y_nD = normed_ND[part]
            elif self.norm is None:
                y_nD = x_ND[part]
            else:
                scale_N[part] = self.norm.scales(x_ND[part])
                self.norm(x_ND[part], weights[_MLP_NORM], scale_N[part], y_nD)
                out_ND[part] = x_ND[part]
            y = as_narrow(y_nD, y) if narrow else y_nD
            _project(weights, self.gate, y, gate)
            _project(weights, self.up, y, up)
            if not adds:
                return
            operators().silu(as_wide(gate, inner_nF), inner_nF)
            operators().multiply(inner_nF, up, inner_nF)
            inner = as_narrow(inner_nF, rounded[2]) if narrow else inner_nF
            if entrance is None:
                _project(weights, self.down, inner, out_ND[part], accumulate=self.norm is not None)
            else:
                operators().matmul(inner, weights[f"{self.down}.weight"].T, added_ND[part])

        host_threads().run(parts(slice(0, rows), ROWS), compute)
        if entrance is not None and adds:
            entrance.leave(x_ND, added_ND, weights.get(f"{self.down}.bias"), out_ND)
        return result, SavedMlp(scale_N, *kept, normed_ND) if keeps else None

    def backward(
        self, x_ND: np.ndarray, weights: Weights, saved: SavedMlp, grad_ND: np.ndarray, trained: Iterable[str]
    ) -> tuple[Tensor, Gradients]:
        """As `HostAttention.backward`."""
        entrance, (result, out_ND), found = self.entrance, empty(*x_ND.shape), WeightGradients(trained)
        (rows, width), hidden, dtype = saved.gate_NF.shape, x_ND.shape[1], saved.gate_NF.dtype
        every_ND = grad_ND if entrance is None else entrance.exchange.gather(grad_ND)
        narrow, rounded_ND = dtype == BFLOAT16, every_ND
        inner_NF, y_ND, into_ND = empty(rows, width, dtype=dtype)[1], x_ND, out_ND
        if entrance is not None:
            y_ND, into_ND = saved.normed_ND, empty(rows, hidden)[1]
        elif narrow or self.norm is not None:
            y_ND = empty(rows, hidden, dtype=dtype)[1]
        if narrow:
            rounded_ND = empty(rows, hidden, dtype=dtype)[1]
        of_norm: dict[int, np.ndarray] = {}

        def compute(part: slice, thread: int) -> None:
            run = operators()
            grad_inner, silu, *more, work = self.scratch.take(
                thread, part, width, width, *(narrow * width,) * 2, narrow * hidden
            )
            gate, up, inner, out, y = (array[part] for array in (saved.gate_NF, saved.up_NF, inner_NF, into_ND, y_ND))
            wide_gate, wide_inner = more if narrow else (gate, inner)
            run.matmul(as_narrow(every_ND[part], rounded_ND[part]), weights[f"{self.down}.weight"], grad_inner)
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
            if entrance is not None:
                return
            if self.norm is not None:
                x, weight_D, scale_n = x_ND[part], weights[_MLP_NORM], saved.scale_N[part]
                work = work if narrow else y
                of_norm[part.start] = self.norm.gradient(x, weight_D, scale_n, out, work)
                out += grad_ND[part]
                normed(self.norm, x, weight_D, scale_n, work, y)
            else:
                as_narrow(x_ND[part], y)

        host_threads().run(parts(slice(0, rows), ROWS), compute)
        if entrance is not None:
            of_norm = entrance.gradient(x_ND, weights[_MLP_NORM], saved.scale_N, into_ND, grad_ND, out_ND)
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


def _masked_scores(q: np.ndarray, k: np.ndarray, block: QueryBlock, out: np.ndarray) -> None:
    """Of queries with all keys of the block; those that a query does not see are far below all others."""
    operators().matmul(q, k.swapaxes(1, 2), out)
    if block.bias_QM.size:
        out[..., block.masked :] += block.bias_QM
