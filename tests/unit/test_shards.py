"""Ranges of optimizer state, and the buckets and chunks in which arrays travel."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.parallel.sharding import OptimizerShard, buckets, chunks, range_of_rank


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("numbers", [8, 9, 1000, 4097])
def test_ranges_of_all_ranks_cover_the_whole_and_have_equal_length(numbers: int, ranks: int) -> None:
    ranges = [range_of_rank(numbers, rank, ranks) for rank in range(ranks)]
    assert [number for each in ranges for number in range(numbers)[each]] == list(range(numbers))
    lengths = [each.stop - each.start for each in ranges]
    assert max(lengths) - min(lengths) <= 1


def test_small_parameters_stay_whole() -> None:
    shard = OptimizerShard(1, 4, threshold_bytes=64 << 10)
    assert shard.divides(16 << 10) and not shard.divides((16 << 10) - 1)
    assert shard.own_range(16 << 10) == slice(4096, 8192)
    assert not OptimizerShard(0, 4).divides(3) and OptimizerShard(0, 4).divides(4)  # every rank gets at least one


def test_buckets_hold_what_fits_in_order() -> None:
    arrays = [np.zeros(size) for size in (3, 4, 100, 5, 5, 1)]
    assert [[array.size for array in bucket] for bucket in buckets(arrays, 40)] == [[3, 4], [100], [5, 5], [1]]
    assert list(buckets([], 40)) == []


@pytest.mark.parametrize("length", [1, 4, 7, 100])
def test_chunks_carry_every_number_once_and_in_order(length: int) -> None:
    ranges = [slice(2, 9), slice(0, 3), slice(5, 30)]
    total = sum(each.stop - each.start for each in ranges)
    cut = chunks(ranges, length, -(-total // length) + 1)
    assert cut[-1] == []
    for number, pieces in enumerate(cut[:-1]):
        filled = [at for piece in pieces for at in range(piece.target.start, piece.target.stop)]
        assert filled == list(range(min(length, total - number * length)))
    for array, each in enumerate(ranges):
        pieces = [piece for chunk in cut for piece in chunk if piece.array == array]
        found = [at for piece in pieces for at in range(piece.source.start, piece.source.stop)]
        assert found == list(range(each.start, each.stop))
        assert all(p.target.stop - p.target.start == p.source.stop - p.source.start for p in pieces)
