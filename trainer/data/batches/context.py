"""Context parallelism: the tokens of each sequence on each rank. numpy only.

With causal attention a token at position p sees p + 1 keys, so ranks with neighbouring tokens would have unequal work.
Therefore a sequence is cut into 2 R equal chunks, and rank r of a ring has chunks r and 2 R - 1 - r, as in Megatron-LM
and Llama 3 (Grattafiori et al. 2024, section 3.3.2). Then all ranks have the same number of keys. With Ulysses
attention a rank attends over full sequences for some heads, and has neighbouring tokens before and after. If both are
used (Fang and Zhao 2024, USP), each group of U neighbouring ranks is one of the R / U members of a ring, and the ranks
of a group shard the tokens of their member.

Legend: B sequences of T tokens, R ranks, n = T / R tokens of a sequence on a rank, h = n / 2 tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainer.models.spec.visibility import visible_keys


class ContextShard(NamedTuple):
    """The tokens of each sequence on one context-parallel rank.

    Attributes:
        ulysses: U, the number of neighbouring ranks that exchange heads for tokens; with 1 all ranks form a ring.
    """

    rank: int
    ranks: int
    ulysses: int = 1

    @property
    def ring(self) -> ContextShard:
        """Returns the shard of the ring member that this rank belongs to."""
        return ContextShard(self.rank // self.ulysses, self.ranks // self.ulysses)

    def positions(self, length: int) -> np.ndarray:
        """Returns the positions of the rank's tokens in a sequence of T, ascending: int64 [n].

        T is a multiple of R and, if there is a ring, of 2 R / U.
        """
        return np.concatenate([np.arange(each.start, each.stop) for each in self.ranges(length)])

    def ranges(self, length: int) -> list[range]:
        """Returns the positions of the rank's tokens in a sequence of T, as one or two ranges."""
        member = self.ring
        chunks = [range(length)]
        if member.ranks > 1:
            half = length // (2 * member.ranks)
            numbers = (member.rank, 2 * member.ranks - 1 - member.rank)
            chunks = [range(number * half, (number + 1) * half) for number in numbers]
        local_length = length // self.ranks
        start = self.rank % self.ulysses * local_length
        ranges = []
        for chunk in chunks:
            ranges.append(chunk[max(0, start) : max(0, start + local_length)])
            start -= len(chunk)
        return [each for each in ranges if each]

    def rows(self, sequences: int, length: int) -> np.ndarray:
        """Returns the indices of the rank's tokens among the B * T tokens of a micro-batch: int64 [B * n]."""
        return np.add.outer(np.arange(sequences) * length, self.positions(length)).reshape(-1)

    def select_tokens(self, array_BT: np.ndarray) -> np.ndarray:
        """Selects the columns of the rank's tokens: [B, n]."""
        if self.ranks == 1:
            return array_BT
        return np.ascontiguousarray(array_BT[:, self.positions(array_BT.shape[1])])

    def visible_to_chunks(self, segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns which keys the two chunks of a rank of a ring see, among the keys up to the chunk's last token.

        Args:
            window: The sliding window in tokens; None: unlimited.

        Returns:
            bool [B, h, (r + 1) h] for the first h tokens, and bool [B, h, (2 R - r) h] for the last h tokens.
        """
        early, late = (
            visible_keys(tokens, np.arange(tokens[-1] + 1), window, segment_ids_BT)
            for tokens in np.split(self.positions(segment_ids_BT.shape[1]), 2)
        )
        return early, late
