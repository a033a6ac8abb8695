"""flash_attention_score over sequences whose tokens several ranks share (context parallelism), on an Ascend.

The ranks gather keys and values, and each computes the rows of its own queries (Grattafiori et al. 2024, Llama 3,
section 3.3.2). A ring would need the gradient of the operator's log-sum-exp outputs, which MindSpore 2.10 does not
compute. Keys and values are small beside the queries where heads share them, and one gather needs no order among sends
and receives. The tokens are those of a ring (`ContextShard`).

Legend: N tokens of this rank, B sequences of T tokens, R ranks; h tokens of a sequence, one of the two pieces that a
rank has; C columns of all heads of a token, K columns of keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate import SliceExt

from trainer.data.batches.context import ContextShard

_GIVEN = 0
_CAUSAL_AT_THE_END = 3
"""sparse_mode: the mask as it is given; compressed and causal, the last query being at the last key."""


class GatheredAttention(nn.Cell):
    """(q_NC, k_NK, v_NK, mask, late_mask, no dropout) -> [N, C]; values are as wide as keys.

    Args:
        length: T.
        window: A layer's, which its masks have.
        gather: Makes a cell [n, ...] of each rank -> [R n, ...], with a gradient (`AllGather`).
    """

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype=mstype.bfloat16, softmax_dtype=mstype.float32,
        scale: float | None = None, length: int | None = None, rate: float = 0.0, window: int | None = None, *,
        part: ContextShard, gather: Callable[[], Callable[[Tensor], Tensor]],
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.dtype = dtype
        self.gather = gather()
        self.scale = head_size**-0.5 if scale is None else scale
        self.rank = part.rank
        self.ranks = part.ranks
        self.own = length // part.ranks
        self.half = self.own // 2
        chunks = range(2 * self.ranks)
        order = [2 * chunk if chunk < self.ranks else 4 * self.ranks - 1 - 2 * chunk for chunk in chunks]
        self.order = Tensor(np.array(order, np.int32))
        self.slice = SliceExt()

    def construct(self, q_NC, k_NK, v_NK, mask, late_mask, dropout):
        width = k_NK.shape[1]
        kv = self.gather(ops.concat((k_NK.astype(self.dtype), v_NK.astype(self.dtype)), -1))
        # Chunk r of rank r and then chunk 2 R - 1 - r, for every rank -> [B, T, 2 K] in the order of the sequence.
        kv = mint.transpose(kv.reshape(self.ranks, -1, 2, self.half * 2 * width), 0, 1)
        kv = mint.index_select(kv.reshape(kv.shape[0], 2 * self.ranks, -1), 1, self.order)
        kv = kv.reshape(kv.shape[0], -1, 2 * width)
        q = q_NC.reshape(-1, self.own, q_NC.shape[1]).astype(self.dtype)
        early = self.part_of(q, 1, 0, self.half)
        late = self.part_of(q, 1, self.half, self.own)
        early = self.over(early, self.part_of(kv, 1, 0, (self.rank + 1) * self.half), mask)
        late = self.over(late, self.part_of(kv, 1, 0, (2 * self.ranks - self.rank) * self.half), late_mask)
        return ops.concat((early, late), 1).reshape(q_NC.shape).astype(q_NC.dtype)

    def part_of(self, x, axis, begin, end):
        """A copy, whose gradient is made by no legacy kernel."""
        return self.slice(x, axis, begin, end, 1)

    def over(self, q, kv, mask):
        width = kv.shape[2] // 2
        return ops.flash_attention_score(
            q, self.part_of(kv, 2, 0, width), self.part_of(kv, 2, width, 2 * width), self.heads, attn_mask=mask,
            scalar_value=self.scale, input_layout="BSH",
            sparse_mode=_CAUSAL_AT_THE_END if mask.ndim == 2 else _GIVEN,
        )  # fmt: skip
