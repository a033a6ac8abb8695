"""flash_attention_score with context parallelism on an Ascend: several ranks share the tokens of each sequence.

The ranks gather keys and values, and each computes attention for its own queries (Grattafiori et al. 2024, Llama 3,
section 3.3.2). A ring would need the gradient of the operator's log-sum-exp outputs, which MindSpore 2.10 does not
compute. With grouped heads, keys and values are small beside the queries, and one gather needs no order among sends and
receives. Each rank has the tokens that it would have in a ring (`ContextShard`).

Legend: N tokens of this rank, B sequences of T tokens, R ranks; h tokens of one of a rank's two chunks of a sequence; C
columns of all heads of a token, K columns of keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate import SliceExt

from trainer.data.batches.context import ContextShard

_FULL_MASK = 0
_CAUSAL_LOWER_RIGHT = 3
"""Values of sparse_mode: the whole mask is passed; a compressed causal mask, whose last query is at the last key."""


class GatheredAttention(nn.Cell):
    """(q_NC, k_NK, v_NK, mask, late_mask, None for dropout) -> [N, C]; values are as wide as keys.

    The masks are those of the queries of this rank's first and second chunk of a sequence.

    Args:
        length: T.
        rate, window: Are ignored: there is no dropout, and the masks contain the window.
        shard: The tokens of this rank.
        gather: Makes a differentiable cell that gathers a tensor of each rank, [n, ...] -> [R n, ...] (`AllGather`).
    """

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype: mstype.Type = mstype.bfloat16,
        softmax_dtype: mstype.Type = mstype.float32, scale: float | None = None, *, length: int, rate: float = 0.0,
        window: int | None = None, shard: ContextShard, gather: Callable[[], Callable[[Tensor], Tensor]],
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.dtype = dtype
        self.gather = gather()
        self.scale = head_size**-0.5 if scale is None else scale
        self.rank = shard.rank
        self.ranks = shard.ranks
        self.local_length = length // shard.ranks
        self.half = self.local_length // 2
        # Rank r sends chunks r and 2 R - 1 - r of each sequence; they arrive at the places 2 r and 2 r + 1.
        chunks = range(2 * self.ranks)
        order = [2 * chunk if chunk < self.ranks else 4 * self.ranks - 1 - 2 * chunk for chunk in chunks]
        self.order = Tensor(np.array(order, np.int32))
        self.slice = SliceExt()

    def construct(
        self, q_NC: Tensor, k_NK: Tensor, v_NK: Tensor, mask: Tensor, late_mask: Tensor, dropout: None
    ) -> Tensor:
        """Gathers keys and values of all ranks, and attends with this rank's two chunks of queries."""
        width = k_NK.shape[1]
        kv = self.gather(ops.concat((k_NK.astype(self.dtype), v_NK.astype(self.dtype)), -1))
        # The result is [B, T, 2 K] in the order of the sequence.
        kv = mint.transpose(kv.reshape(self.ranks, -1, 2, self.half * 2 * width), 0, 1)
        kv = mint.index_select(kv.reshape(kv.shape[0], 2 * self.ranks, -1), 1, self.order)
        kv = kv.reshape(kv.shape[0], -1, 2 * width)
        q = q_NC.reshape(-1, self.local_length, q_NC.shape[1]).astype(self.dtype)
        early = self.copy_slice(q, 1, 0, self.half)
        late = self.copy_slice(q, 1, self.half, self.local_length)
        early = self.attend(early, self.copy_slice(kv, 1, 0, (self.rank + 1) * self.half), mask)
        late = self.attend(late, self.copy_slice(kv, 1, 0, (2 * self.ranks - self.rank) * self.half), late_mask)
        return ops.concat((early, late), 1).reshape(q_NC.shape).astype(q_NC.dtype)

    def copy_slice(self, x: Tensor, axis: int, begin: int, end: int) -> Tensor:
        """Copies a slice of x with an operator whose gradient is not a legacy kernel."""
        return self.slice(x, axis, begin, end, 1)

    def attend(self, q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        """Returns attention of the queries [B, h, C] over keys and values [B, s, 2 K], [B, h, C]."""
        width = kv.shape[2] // 2
        return ops.flash_attention_score(
            q, self.copy_slice(kv, 2, 0, width), self.copy_slice(kv, 2, width, 2 * width), self.heads, attn_mask=mask,
            scalar_value=self.scale, input_layout="BSH",
            sparse_mode=_CAUSAL_LOWER_RIGHT if mask.ndim == 2 else _FULL_MASK,
        )  # fmt: skip
