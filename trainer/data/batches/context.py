"""Context parallelism: which tokens of each sequence a rank has. numpy only.

With causal attention a token at position p meets p + 1 keys, so ranks with neighbouring tokens would have unequal work.
A sequence is therefore cut in 2 R equal chunks, of which rank r of a ring has chunks r and 2 R - 1 - r (Megatron-LM
and Llama 3 do so: Grattafiori et al. 2024, section 3.3.2): each rank meets the same number of keys. Ulysses attention
gives a rank whole sequences of some heads, and neighbouring tokens before and after. Where both are used (Fang and Zhao
2024, USP), groups of U neighbouring ranks are the R / U members of a ring, and the ranks of a group divide the tokens
of their member.

Legend: B sequences of T tokens, R ranks, n = T / R tokens of a sequence on a rank, h = n / 2 tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainer.models.spec.visibility import visible_keys


class ContextShard(NamedTuple):
    """The tokens of each sequence that one of the context-parallel ranks has.

    Attributes:
        ulysses: U, the neighbouring ranks that exchange heads for tokens; 1: the ranks are a ring.
    """

    rank: int
    ranks: int
    ulysses: int = 1

    @property
    def ring(self) -> ContextShard:
        """What the ranks that exchange heads with this one have together."""
        return ContextShard(self.rank // self.ulysses, self.ranks // self.ulysses)

    def positions(self, length: int) -> np.ndarray:
        """Positions of the rank's tokens in a sequence of T, ascending: int64 [n].

        T is a multiple of R and, where there is a ring, of 2 R / U.
        """
        return np.concatenate([np.arange(each.start, each.stop) for each in self.ranges(length)])

    def ranges(self, length: int) -> list[range]:
        """The same, as one or two ranges."""
        place, members, _ = self.ring
        chunks = [range(length)]
        if members > 1:
            half = length // (2 * members)
            chunks = [range(number * half, (number + 1) * half) for number in (place, 2 * members - 1 - place)]
        own = length // self.ranks
        start = self.rank % self.ulysses * own
        found = []
        for chunk in chunks:
            found.append(chunk[max(0, start) : max(0, start + own)])
            start -= len(chunk)
        return [each for each in found if each]

    def rows(self, sequences: int, length: int) -> np.ndarray:
        """Which of the B * T tokens of a micro-batch the rank has: int64 [B * n]."""
        return np.add.outer(np.arange(sequences) * length, self.positions(length)).reshape(-1)

    def of(self, whole_BT: np.ndarray) -> np.ndarray:
        """The rank's columns: [B, n]."""
        if self.ranks == 1:
            return whole_BT
        return np.ascontiguousarray(whole_BT[:, self.positions(whole_BT.shape[1])])

    def allowed(self, segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Which keys the first h and the last h tokens of a rank of a ring see, of those that come no later than the
        chunk's last token: bool [B, h, (r + 1) h] and [B, h, (2 R - r) h]."""
        early, late = (
            visible_keys(tokens, np.arange(tokens[-1] + 1), window, segment_ids_BT)
            for tokens in np.split(self.positions(segment_ids_BT.shape[1]), 2)
        )
        return early, late
