"""Draws the dropout masks of the rows and heads that a thread computes, with the bits of
`trainer.ops.dropout.dropout_mask`, and the noise of embeddings (NEFTune).

A mask is a sequence of random numbers from a counter, of which any piece can be drawn without the others: no array ever
holds a full mask. Philox gives eight 32-bit numbers for each count.

Legend: N tokens of the micro-batch, B sequences of T tokens, H query heads, K key/value heads, G = H / K.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.arrays.memory import host_threads, row_blocks
from trainer.ops.dropout import DropoutKey, draw_mask_bits, keep_threshold

if TYPE_CHECKING:
    from trainer.ops.dropout import LocalHeads


_NOISE_ROWS = 64  # that a thread draws at once


class DropoutSite(NamedTuple):
    """One place of a layer with dropout.

    Attributes:
        number: Names the mask.
        width: Columns of the mask.
        columns: The columns of the mask that the rank has.
        rows: The rows of the mask that the rank has; None: all.
    """

    number: int
    rate: float
    width: int
    columns: slice = slice(None)
    rows: np.ndarray | None = None


class LayerDropout:
    """Draws the masks of one layer for one micro-batch.

    Args:
        sites: By name: "attention_output", "mlp_output", and the names of matrices for the inputs of their adapters.
        probabilities: Number of the mask of the attention probabilities, and their rate.
        heads: The heads of this rank; None: all.
    """

    def __init__(
        self, key: DropoutKey, sites: Mapping[str, DropoutSite], probabilities: tuple[int, float] = (0, 0.0),
        heads: LocalHeads | None = None,
    ) -> None:  # fmt: skip
        self.key = key
        self.sites = sites
        self.attention_site, self.attention_rate = probabilities
        self.heads = heads
        self.stored_bits: dict[tuple[int, ...], np.ndarray] = {}

    def rows(self, name: str, rows: slice, width: int) -> np.ndarray:
        """Returns the factors of some rows of this rank at a site, float32 [n, width]: 0 or 1 / (1 - rate)."""
        site = self.sites[name]
        mask_nI = np.empty((rows.stop - rows.start, width), np.float32)
        for part, bits in _draw_rows(self.key, site, rows):
            survives = bits[:, site.columns] >= keep_threshold(site.rate)
            _write_factors(survives, site.rate, mask_nI[part])
        return mask_nI

    def probabilities(
        self, sequence: int, queries: slice, heads: slice, kv_heads: int, groups: int, keys: slice, length: int,
        store: bool,
    ) -> np.ndarray:  # fmt: skip
        """Returns the factors of attention probabilities, float32 [key/value heads, groups, Q, S].

        Args:
            sequence: Number of the sequence in the micro-batch.
            queries, keys: Positions in the sequence.
            heads: Key/value heads of this rank.
            kv_heads, groups: How many key/value heads the rank has, and query heads for each of them.
            length: T.
            store: Store a bit of each number for the next call for these probabilities: to draw them again would take
                ten times as long.
        """
        first_kv_head = 0
        first_query = 0
        all_kv_heads = kv_heads
        all_groups = groups
        if self.heads is not None:
            all_kv_heads = self.heads.kv_heads
            all_groups = self.heads.heads // self.heads.kv_heads
            first_kv_head, first_query = divmod(self.heads.number * self.heads.local_heads, all_groups)
        count = queries.stop - queries.start
        # The mask is [B * K, T * G, T].
        row = all_groups * length
        factors = np.empty((heads.stop - heads.start, groups, count, keys.stop - keys.start), np.float32)
        for place, head in enumerate(range(heads.start, heads.stop)):
            mask_id = sequence, head, queries.start, queries.stop, keys.start, keys.stop
            if mask_id in self.stored_bits:
                survives = np.unpackbits(self.stored_bits.pop(mask_id), -1, factors.shape[-1]).view(bool)
                _write_factors(survives, self.attention_rate, factors[place])
                continue
            first = ((sequence * all_kv_heads + first_kv_head + head) * length + queries.start) * row
            bits = draw_mask_bits(self.key, self.attention_site, first, count * row).reshape(count, all_groups, length)
            seen = bits[:, first_query : first_query + groups, keys]
            survives = seen.transpose(1, 0, 2) >= keep_threshold(self.attention_rate)
            if store:
                self.stored_bits[mask_id] = np.packbits(survives, -1)
            _write_factors(survives, self.attention_rate, factors[place])
        return factors


def draw_noise(key: DropoutKey, site: DropoutSite, limits_M: np.ndarray) -> np.ndarray:
    """Returns uniform noise on the rows of this rank, float32 [N, width]: in +-limit of each row.

    Args:
        site: Its rows are those of the rank; None: all M.
        limits_M: The limits of all rows of the micro-batch on all ranks, [M].
    """
    limits_N = limits_M
    if site.rows is not None:
        limits_N = limits_M[site.rows]
    noise_NE = np.empty((len(limits_N), site.width), np.float32)

    def draw(rows: slice, thread: int) -> None:
        """Draws the noise of some rows."""
        for part, bits in _draw_rows(key, site, rows):
            out_nE = noise_NE[rows][part]
            # The upper 24 bits as a number in [-1, 1).
            np.multiply(bits >> np.uint32(8), np.float32(2**-23), out=out_nE, casting="unsafe")
            out_nE -= 1
            out_nE *= limits_N[rows][part, None]

    host_threads().run(row_blocks(slice(0, len(limits_N)), _NOISE_ROWS), draw)
    return noise_NE


def _write_factors(survives: np.ndarray, rate: float, out: np.ndarray) -> None:
    """Writes 1 / (1 - rate) where a number survives, else 0."""
    np.multiply(survives, np.float32(1 / (1 - rate)), out=out)


def _draw_rows(key: DropoutKey, site: DropoutSite, rows: slice) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields some of these rows of the rank, counted from the first, with their random numbers, uint32 [n, width].

    They are neighbours in the mask.
    """
    if site.rows is None:
        row_n = np.arange(rows.start, rows.stop)
    else:
        row_n = site.rows[rows]
    starts = [0, *(np.flatnonzero(np.diff(row_n) != 1) + 1).tolist(), len(row_n)]
    for start, stop in itertools.pairwise(starts):
        count = stop - start
        bits = draw_mask_bits(key, site.number, int(row_n[start]) * site.width, count * site.width)
        yield slice(start, stop), bits.reshape(count, -1)
