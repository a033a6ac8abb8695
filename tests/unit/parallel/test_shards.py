"""Ranges of optimizer state, and the buckets in which arrays travel."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.parallel.sharding import OptimizerShard, buckets, shard_range


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("numbers", [8, 9, 1000, 4097])
def test_ranges_of_all_ranks_cover_the_whole_and_have_equal_length(numbers: int, ranks: int) -> None:
    ranges = [shard_range(numbers, rank, ranks) for rank in range(ranks)]
    assert [number for each in ranges for number in range(numbers)[each]] == list(range(numbers))
    lengths = [each.stop - each.start for each in ranges]
    assert max(lengths) - min(lengths) <= 1


def test_small_parameters_stay_whole() -> None:
    shard = OptimizerShard(1, 4, threshold_bytes=64 << 10)
    assert shard.is_sharded(16 << 10) and not shard.is_sharded((16 << 10) - 1)
    assert shard.local_range(16 << 10) == slice(4096, 8192)
    assert not OptimizerShard(0, 4).is_sharded(3) and OptimizerShard(0, 4).is_sharded(4)  # every rank gets at least one


def test_buckets_hold_what_fits_in_order() -> None:
    arrays = [np.zeros(size) for size in (3, 4, 100, 5, 5, 1)]
    assert [[array.size for array in bucket] for bucket in buckets(arrays, 40)] == [[3, 4], [100], [5, 5], [1]]
    assert list(buckets([], 40)) == []
