"""The exchanges of context-parallel ranks, on arrays: keys and values, or heads for tokens.

Each rank has some tokens of each sequence (`trainer.data.batches.context`). The ranks of a ring gather the keys and
values of all tokens (Grattafiori et al. 2024, Llama 3, section 3.3.2), so that a rank's queries see the full sequence.
Ranks of Ulysses attention (Jacobs et al. 2023) exchange heads for tokens before and after attention. Both can be
combined (Fang and Zhao 2024, USP): then the members of a ring are Ulysses groups.

Legend: B sequences of T tokens, U ranks of Ulysses attention with n tokens of each sequence; C columns of all heads of
a token, c those of a rank's heads; K columns of keys.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainer.data.batches.context import ContextShard
    from trainer.parallel.host_group import CpuGroup


class ContextParallel:
    """The exchanges of one rank. The argument `sequences` of the methods is B.

    Args:
        shard: The rank's tokens of each sequence.
        ring: The ranks that gather keys and values; None: this rank alone.
        ulysses: The ranks that exchange heads for tokens; None: this rank alone.
    """

    def __init__(self, shard: ContextShard, ring: CpuGroup | None, ulysses: CpuGroup | None) -> None:
        self.shard = shard
        self.ring = ring
        self.ulysses = ulysses

    def local_heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Returns how many query heads and key/value heads attention has on this rank."""
        if self.ulysses is None:
            return heads, kv_heads
        return heads // self.ulysses.size, max(1, kv_heads // self.ulysses.size)

    def to_heads(self, x_NC: np.ndarray, heads: int, sequences: int) -> np.ndarray:
        """Exchanges heads for tokens: [B * n, C] -> [B * U * n, c]. With fewer heads than ranks, ranks share heads."""
        if self.ulysses is None:
            return x_NC
        ranks = self.ulysses.size
        tokens = len(x_NC)
        copies = ranks // math.gcd(ranks, heads)
        x_NUc = np.repeat(x_NC.reshape(tokens, heads, -1), copies, axis=1).reshape(tokens, ranks, -1)
        sent = [np.ascontiguousarray(x_NUc[:, rank]) for rank in range(ranks)]
        received_UNc = np.stack(self.ulysses.all_to_all(sent, [sent[0].shape] * ranks))
        by_sequence = received_UNc.reshape(ranks, sequences, tokens // sequences, -1).transpose(1, 0, 2, 3)
        return by_sequence.reshape(ranks * tokens, -1)

    def to_tokens(self, x_Mc: np.ndarray, heads: int, sequences: int) -> np.ndarray:
        """Exchanges tokens for heads, the reverse of `to_heads`. Sums the arrays of ranks that share heads."""
        if self.ulysses is None:
            return x_Mc
        ranks = self.ulysses.size
        rows, width = x_Mc.shape
        by_rank = x_Mc.reshape(sequences, ranks, -1, width).transpose(1, 0, 2, 3)
        sent = [rank_rows.reshape(rows // ranks, width) for rank_rows in by_rank]
        received_NUc = np.stack(self.ulysses.all_to_all(sent, [sent[0].shape] * ranks), axis=1)
        copies = ranks // math.gcd(ranks, heads)
        if copies > 1:
            received_NUc = received_NUc.reshape(rows // ranks, ranks // copies, copies, width).sum(2)
        return received_NUc.reshape(rows // ranks, -1)

    def gather_keys(self, x_NK: np.ndarray, out_TK: np.ndarray, sequences: int) -> None:
        """Writes the keys or values of all tokens to `out_TK`, [B * T, K]."""
        if self.ring is None:
            out_TK[...] = x_NK
            return
        for rank, rows in enumerate(self.ring.all_gather(x_NK)):
            out_TK[self._rows(rank, len(out_TK), sequences)] = rows

    def reduce_keys(self, grad_TK: np.ndarray, sequences: int) -> np.ndarray:
        """Sums the gradients of keys or values of all tokens over the ranks; returns those of this rank's tokens."""
        if self.ring is None:
            return grad_TK
        by_rank = [grad_TK[self._rows(rank, len(grad_TK), sequences)] for rank in range(self.ring.size)]
        return self.ring.reduce_scatter(np.concatenate(by_rank))

    def _rows(self, rank: int, rows: int, sequences: int) -> np.ndarray:
        """Returns which of the rows [B * T] a rank of the ring has."""
        return self.shard.ring._replace(rank=rank).rows(sequences, rows // sequences)
