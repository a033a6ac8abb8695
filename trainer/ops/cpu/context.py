"""Attention over sequences whose tokens several ranks share (context parallelism), on CPUs.

`RingAttention` (Liu et al. 2023, Ring Attention with Blockwise Transformers): keys and values go round the ring of
ranks. A rank's queries meet one part of them after the other, and the softmax of each part is weighted with its share
of all probability. `UlyssesAttention` (Jacobs et al. 2023, DeepSpeed-Ulysses): an all-to-all gives each rank whole
sequences of some of the heads, another one gives the results back. Between the two there may be a ring (Fang and Zhao
2024, USP: A Unified Sequence Parallelism Approach).

Both are called like `Attention`. In a graph that computes a block again and its gradients, all their exchanges depend
on each other, one after the other.

Legend: R ranks, r this one; B sequences of T tokens, n = T / R of them on a rank, N = B * n; h = n / 2; H query heads,
K key/value heads, G = H / K, d and v widths of a key and a value; C = H * d, V = H * v, S keys of a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.data.batches.context import SequencePart
from trainer.ops.cpu.kernels import Attention, AttentionCore, cached_mask
from trainer.parallel.collectives import AllToAll, rotation
from trainer.parallel.host_group import HostGroup

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.dropout import DropoutKey, OwnHeads


def own_heads(settings: ModelConfig, ranks: int) -> ModelConfig:
    """Settings with the heads that one of so many ranks has in Ulysses attention."""
    heads, kv_heads = settings.num_heads // ranks, max(1, settings.kv_heads // ranks)
    return settings.model_copy(update={"num_heads": heads, "n_kv_heads": kv_heads, "head_dim": settings.head_size})


class RingMasks:
    """Makes the masks that `RingAttention` takes from the documents of all tokens of the sequences."""

    def __init__(self, settings: ModelConfig, part: SequencePart) -> None:
        self.heads, self.kv_heads, self.part = settings.num_heads, settings.kv_heads, part

    def __call__(self, segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[Tensor, Tensor]:
        """As `AttentionMasks`: for the first h tokens [B*K, h*G, (r+1)*h], for the last h [B*K, h*G, (2R-r)*h]."""
        early, late = self.part.allowed(segment_ids_BT, window)
        return cached_mask(early, self.heads, self.kv_heads), cached_mask(late, self.heads, self.kv_heads)

    def scores_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Shape of the probabilities of whole sequences, [B*K, T*G, T]."""
        return rows * self.kv_heads, length * (self.heads // self.kv_heads), length


def ring_part(whole: np.ndarray, part: SequencePart) -> np.ndarray:
    """The numbers of [B*K, T*G, T] that belong to a rank's probabilities, [B*K, h*G, (2R+1)*h]: for the keys of the
    first h tokens, then for those of the last h."""
    rows, _, length = whole.shape
    numbers = whole.reshape(rows, length, -1, length)
    parts = [
        numbers[:, tokens][..., keys].reshape(rows, -1, len(keys))
        for tokens, keys in zip(
            np.split(part.positions(length), 2), part.positions_of_keys(length), strict=True)
    ]  # fmt: skip
    return np.concatenate(parts, -1)


def draw_ring_mask(
    draw: Callable, part: SequencePart, key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, *own: OwnHeads
) -> Tensor:
    """A mask as `RingAttention` takes it: part of the one that one rank draws for whole sequences."""
    return Tensor(ring_part(draw(key, site, shape, rate, *own).asnumpy(), part))


class RingAttention(nn.Cell):
    """`Attention` of a rank's tokens, (q_NC, k_NK, v_NK, mask, late_mask, dropout) -> [N, V].

    `SequencePart` says which tokens; `RingMasks` makes the masks, `ring_part` the dropout mask.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype=mstype.float32, softmax_dtype=mstype.float32,
        value_size: int | None = None, scale: float | None = None, *, part: SequencePart, group: HostGroup,
        compiled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.plain = Attention(heads, kv_heads, head_size, dtype, softmax_dtype, value_size, scale)
        self.kv_heads, self.head_size, self.value_size = kv_heads, head_size, self.plain.value_size
        self.columns, self.scale = heads * self.value_size, self.plain.scale
        self.core = _RingCore(part, self.head_size, self.value_size, dtype, softmax_dtype, group, compiled)
        self.transpose, self.concat = P.Transpose(), P.Concat(-1)

    def construct(self, q_NC, k_NK, v_NK, mask, late_mask, dropout):
        rows = mask.shape[0] // self.kv_heads
        queries = self.plain.split_heads(q_NC * self.scale, rows, self.head_size)
        keys = self.plain.split_heads(k_NK, rows, self.head_size)
        values = self.plain.split_heads(v_NK, rows, self.value_size)
        # One tensor, so that each step is one exchange.
        out = self.core(queries, self.concat((keys, values)), mask, late_mask, dropout)[0]
        out = self.transpose(out.reshape(rows, self.kv_heads, -1, self.columns // self.kv_heads), (0, 2, 1, 3))
        return out.reshape(q_NC.shape[0], self.columns)


class _RingCore(nn.Cell):
    """(q [B*K, n*G, d], kv [B*K, n, d + v], masks, dropout) -> out [B*K, n*G, v], and what the backward pass needs:
    the keys and values of each step, then for each part its probabilities and their weights.

    With p_i the softmax of part i of a query's scores and l_i their log-sum-exp, its probabilities are w_i p_i, w being
    the softmax of l. So out = sum of w_i p_i v_i. The gradients of a part are those of `AttentionCore` for the
    gradient w_i dO of its result, because delta = rowsum(dO * O) is one for all parts.

    Backward, the gradients of keys and values go the other way round: each rank adds its own to those of the rank that
    had them after it.
    """

    def __init__(
        self, part: SequencePart, head_size: int, value_size: int, dtype: mstype.Type, softmax_dtype: mstype.Type,
        group: HostGroup, compiled: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank, self.ranks, self.head_size, self.value_size = part.rank, part.ranks, head_size, value_size
        self.core = AttentionCore(value_size, dtype, softmax_dtype)
        self.on, self.back = rotation(group, 1, compiled), rotation(group, -1, compiled)
        self.halves, self.slice, self.concat, self.join = P.Split(1, 2), P.Slice(), P.Concat(-1), P.Concat(1)
        self.matmul, self.softmax, self.log1p = P.MatMul(), P.Softmax(), P.Log1p()
        self.row_max, self.gather = P.ArgMaxWithValue(axis=1), P.GatherD()
        self.ones_1v = Tensor(np.ones((1, value_size), np.float32))
        # For each step its parts: whether they are of the last h queries, and whether of all n keys or the first h.
        steps = [((False, False), (True, True))]
        for step in range(1, part.ranks):
            steps.append(((False, False), (True, False)) if step <= part.rank else ((True, True),))
        self.steps = tuple(steps)

    def construct(self, q, kv, mask, late_mask, dropout):
        queries, masks = self.halves(q), (mask, late_mask)
        used, every_kv, all_p = [0, 0], (), ()
        outs, sums = [(), ()], [(), ()]
        for step in range(self.ranks):
            if step:
                kv = self.on(kv)
            every_kv += (kv,)
            for is_late, is_whole in self.steps[step]:
                half = 1 if is_late else 0
                k, v = self.keys_values(kv, is_whole)
                mask_of_part = self.columns(masks[half], used[half], k.shape[1])
                dropout_of_part = self.dropped(dropout, mask.shape[2] * half + used[half], k.shape[1])
                used[half] += k.shape[1]
                out, p, log_sum = self.part(queries[half], k, v, mask_of_part, dropout_of_part)
                outs[half] += (out,)
                sums[half] += (log_sum,)
                all_p += (p,)
        early, early_w = self.merged(outs[0], sums[0])
        late, late_w = self.merged(outs[1], sums[1])
        return (self.join((early, late)), early_w, late_w) + every_kv + all_p

    def bprop(self, q, kv, mask, late_mask, dropout, out, grads):
        queries, grad = self.halves(q), grads[0]
        grads_of_out, minus_delta = self.halves(grad), self.halves(self.core.minus_delta(out[0], grad))
        every_kv, all_p = out[3 : 3 + self.ranks], out[3 + self.ranks :]
        weights, used, number = (out[1], out[2]), [out[1].shape[1], out[2].shape[1]], len(all_p)
        ends = [mask.shape[2], late_mask.shape[2]]
        grad_q, grad_kv = [None, None], None
        for step in range(self.ranks - 1, -1, -1):
            if grad_kv is not None:
                grad_kv = self.back(grad_kv)
            for is_late, is_whole in self.steps[step][::-1]:
                half = 1 if is_late else 0
                k, v = self.keys_values(every_kv[step], is_whole)
                number, used[half], ends[half] = number - 1, used[half] - 1, ends[half] - k.shape[1]
                weight = self.slice(weights[half], (0, used[half]), (weights[half].shape[0], 1))
                of_q, of_k, of_v = self.core.gradients(
                    queries[half], k, v, all_p[number],
                    self.dropped(dropout, mask.shape[2] * half + ends[half], k.shape[1]),
                    self.weighted(grads_of_out[half], weight),
                    self.core.narrow(self.core.wide(minus_delta[half]) * weight.reshape(minus_delta[half].shape)),
                )  # fmt: skip
                of_kv = self.concat((of_k, of_v))
                if not is_whole:
                    of_kv = self.join((of_kv, ops.zeros(of_kv.shape, of_kv.dtype)))
                grad_q[half] = of_q if grad_q[half] is None else grad_q[half] + of_q
                grad_kv = of_kv if grad_kv is None else grad_kv + of_kv
        no_grad = ops.zeros(mask.shape, mask.dtype), ops.zeros(late_mask.shape, mask.dtype)
        grad_dropout = None if dropout is None else ops.zeros(dropout.shape, dropout.dtype)
        return self.join((grad_q[0], grad_q[1])), grad_kv, no_grad[0], no_grad[1], grad_dropout

    def part(self, q, k, v, mask, dropout):
        """Of some queries and keys: result, probabilities, and log-sum-exp of the scores, [B*K*h*G, 1]."""
        scores = self.core.rounded(self.core.wide(self.core.product_bt(q, k))) + mask
        p = self.softmax(scores)
        log_sum = self.log_sum_exp(scores.reshape(-1, k.shape[1]), p.reshape(-1, k.shape[1]))
        p = self.core.rounded(p)
        kept = p if dropout is None else p * dropout
        return self.core.product(self.core.narrow(kept), v), p, log_sum

    def log_sum_exp(self, scores_RS, p_RS):
        """As in `CrossEntropy`: the bits do not depend on threads."""
        index_R, max_R = self.row_max(scores_RS)
        p_R1 = self.gather(p_RS, 1, index_R.reshape(-1, 1).astype(mstype.int32))
        return max_R.reshape(-1, 1) + self.log1p((1 - p_R1) / p_R1)

    def merged(self, outs, log_sums):
        """The result of all parts, and the weight of each, [B*K*h*G, parts]."""
        weights = self.softmax(self.concat(log_sums))
        total = None
        for number in range(len(outs)):
            weight = self.slice(weights, (0, number), (weights.shape[0], 1))
            weighted = self.core.wide(outs[number]) * self.spread(weight, outs[number])
            total = weighted if total is None else total + weighted
        return self.core.narrow(total), weights

    def weighted(self, x, weight):
        return self.core.narrow(self.core.wide(x) * self.spread(weight, x))

    def spread(self, weight, x):
        """A factor for each row in all columns of x."""
        return self.matmul(weight, self.ones_1v).reshape(x.shape)

    def keys_values(self, kv, is_whole):
        kept = kv if is_whole else self.halves(kv)[0]
        rows, keys, _ = kept.shape
        k = self.slice(kept, (0, 0, 0), (rows, keys, self.head_size))
        return k, self.slice(kept, (0, 0, self.head_size), (rows, keys, self.value_size))

    def columns(self, x, first, number):
        return self.slice(x, (0, 0, first), (x.shape[0], x.shape[1], number))

    def dropped(self, dropout, first, number):
        return None if dropout is None else self.columns(dropout, first, number)


class UlyssesAttention(nn.Cell):
    """`Attention` of a rank's neighbouring tokens, called like it. The masks are those for all tokens of the ranks and
    the heads that the rank has in between; where there are fewer heads of keys and values than ranks, several have the
    same.

    Args:
        heads: A multiple of the ranks. Also `kv_heads`, or the ranks are one of it.
        attention: Makes what computes the heads of a rank over all tokens of the ranks: `Attention` where these are
            whole sequences, or `RingAttention`.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, value_size: int | None = None, scale: float | None = None, *,
        attention: Callable[..., nn.Cell], group: HostGroup, compiled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ranks, self.kv_heads, self.own_kv_heads = group.size, kv_heads, max(1, kv_heads // group.size)
        self.head_size, self.value_size = head_size, value_size or head_size
        self.own = attention(
            heads // self.ranks, self.own_kv_heads, head_size, value_size=self.value_size, scale=scale
        )
        self.widths = (
            heads // self.ranks * head_size, self.own_kv_heads * head_size, self.own_kv_heads * self.value_size,
        )  # fmt: skip
        self.there, self.back = AllToAll(group, compiled), _AfterForward(AllToAll(group, compiled))
        self.transpose, self.concat, self.repeat = P.Transpose(), P.Concat(-1), P.Tile()

    def construct(self, q_NC, k_NK, v_NK, mask, late_mask, dropout):
        tokens, rows = q_NC.shape[0], mask.shape[0] // self.own_kv_heads
        q = q_NC.reshape(tokens, self.ranks, -1)
        k, v = self.of_ranks(k_NK, self.head_size), self.of_ranks(v_NK, self.value_size)
        # One tensor, so that it is one exchange: [N, R, columns of a rank], those of a rank one below the other.
        x = self.transpose(self.concat((q, k, v)), (1, 0, 2))
        x = self.there(x.reshape(self.ranks * tokens, -1))
        # Now from each rank the columns of this one: [R, B, n, columns] -> sequences of R n tokens.
        x = self.transpose(x.reshape(self.ranks, rows, tokens // rows, -1), (1, 0, 2, 3))
        q, k, v = ops.split(x.reshape(self.ranks * tokens, -1), self.widths, 1)
        out = self.own(q, k, v, mask, late_mask, dropout)
        out = self.transpose(out.reshape(rows, self.ranks, tokens // rows, -1), (1, 0, 2, 3))
        out = self.back(out.reshape(self.ranks * tokens, -1))
        return self.transpose(out.reshape(self.ranks, tokens, -1), (1, 0, 2)).reshape(tokens, -1)

    def of_ranks(self, x_NK, size):
        """Keys or values of the heads of each rank, [N, R, columns]."""
        copies = self.ranks // math.gcd(self.ranks, self.kv_heads)
        if copies > 1:
            x = self.repeat(x_NK.reshape(x_NK.shape[0], self.kv_heads, 1, size), (1, 1, copies, 1))
            return x.reshape(x_NK.shape[0], self.ranks, size)
        return x_NK.reshape(x_NK.shape[0], self.ranks, -1)


class _AfterForward(nn.Cell):
    """An exchange that has ended before its backward pass begins. In a graph that computes a block again, its gradient
    is there from the beginning: the ranks could call the two in different orders."""

    def __init__(self, exchange: nn.Cell) -> None:
        super().__init__()
        self.forward, self.backward, self.depend = exchange.forward, exchange.backward, P.Depend()

    def construct(self, x):
        return self.forward(x)

    def bprop(self, x, out, grad):
        return (self.backward(self.depend(grad, out)),)
