"""Packs whole samples into sequences of one length: best-fit decreasing (Johnson, 1973, "Near-optimal bin packing").

Samples are placed from the longest to the shortest, each into the sequence whose free space it fills best. Samples of
one length are placed together, and sequences with the same free space are kept as ranges of numbers. So the time grows
with the number of different lengths, not with the number of samples.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np


class Packing(NamedTuple):
    """The samples of each sequence."""

    samples: np.ndarray  # int64 [samples], the numbers of the samples, one sequence after the other
    starts: np.ndarray  # int64 [sequences + 1], the index in `samples` at which each sequence begins, and the end


def pack_one_each(num_samples: int) -> Packing:
    """Puts each sample into a sequence of its own."""
    return Packing(np.arange(num_samples), np.arange(num_samples + 1))


def best_fit(lengths: np.ndarray, seq_length: int) -> Packing:
    """Packs samples of these lengths (integers [samples] from 1 to `seq_length`), deterministically.

    Sequences are in the order of their first sample; the samples of a sequence are in ascending order.
    """
    placements, num_sequences = _place(np.bincount(lengths, minlength=1), seq_length)
    runs = [np.repeat(np.arange(first, first + count), each) for first, count, each in placements]
    sequence_S = np.empty(len(lengths), np.int64)
    if runs:
        sequence_S[np.argsort(-lengths, kind="stable")] = np.concatenate(runs)
    first_sample = np.empty(num_sequences, np.int64)
    first_sample[sequence_S[::-1]] = np.arange(len(lengths))[::-1]  # where an index is repeated, the last value stays
    number = np.empty(num_sequences, np.int64)
    number[np.argsort(first_sample)] = np.arange(num_sequences)
    sequence_S = number[sequence_S]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(sequence_S, minlength=num_sequences))])
    return Packing(np.argsort(sequence_S, kind="stable"), starts)


def _place(counts: np.ndarray, seq_length: int) -> tuple[list[tuple[int, int, int]], int]:
    """Places `counts[length]` samples of each length, the longest first.

    Returns the placements in order, as (first sequence, how many sequences, samples placed in each), and how many
    sequences there are.
    """
    placements: list[tuple[int, int, int]] = []
    ranges: dict[int, list[tuple[int, int]]] = {}  # by free space: ranges of sequences (first, end)
    spaces: list[int] = []  # the keys of `ranges` in ascending order
    num_sequences = 0

    def keep(space: int, first: int, end: int) -> None:
        """Records that the sequences `first` to `end` have this much free space."""
        if first < end and space:
            if space not in ranges:
                ranges[space] = []
                insort(spaces, space)
            ranges[space].append((first, end))

    for length in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[length])
        while remaining:
            index = bisect_left(spaces, length)
            if index < len(spaces):
                space = spaces[index]
                first, end = ranges[space].pop()
                if not ranges[space]:
                    del ranges[space], spaces[index]
            else:
                space = seq_length
                first = num_sequences
                end = num_sequences = first - (-remaining // (space // length))
            per_sequence = space // length
            if full := min(remaining // per_sequence, end - first):
                placements.append((first, full, per_sequence))
                keep(space - per_sequence * length, first, first + full)
                first += full
                remaining -= full * per_sequence
            if first < end and remaining:  # fewer than `per_sequence`
                placements.append((first, 1, remaining))
                keep(space - remaining * length, first, first + 1)
                first += 1
                remaining = 0
            keep(space, first, end)
    return placements, num_sequences
