"""Sketches: the deviation of two tensors from them, of whole tensors and of shards, also from a file read in chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tolerances import FLOAT64_SUMS, SEVERAL_OPERATORS

from trainer.parallel.sharding import Shard, ShardSpec, shard_range
from trainer.storage.bfloat16 import as_bfloat16
from trainer.trace import sketch
from trainer.trace.sketch import Place, deviation, join_summaries, place_of_shard, row_ranges, summarize, whole_place

ROWS, COLUMNS = 60, 44
PLACE = whole_place((ROWS, COLUMNS))
# 512 sums of random signs estimate a squared norm with a relative deviation of sqrt(2 / 512), its root with half of it.
OFF_BY = 5 * (2 / sketch.SKETCH_SIZE) ** 0.5 / 2


def draw(seed: int, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
def test_sketches_give_the_norm_of_the_difference(size: float) -> None:
    right = draw(1).astype(np.float64)
    other = right + size * draw(2)
    exact = np.linalg.norm(other.astype(np.float32) - right.astype(np.float32)) / np.linalg.norm(other)
    measured = deviation(*(summarize(each.astype(np.float32), PLACE) for each in (right, other)))
    assert measured == pytest.approx(exact, rel=OFF_BY)


@pytest.mark.parametrize("columns", [False, True])
def test_shards_add_up_to_the_tensor(columns: bool) -> None:
    array = draw(3)
    parts = []
    for rank in range(4):
        part = shard_range(COLUMNS if columns else ROWS, rank, 4)
        if columns:
            place = Place((ROWS, COLUMNS), ((0, ROWS),), (part.start, part.stop))
            parts.append(summarize(array[:, part], place))
        else:
            parts.append(summarize(array[part], Place((ROWS, COLUMNS), ((part.start, part.stop),), (0, COLUMNS))))
    joined, alone = join_summaries(parts), summarize(array, PLACE)
    # The same numbers, summed in float64 in another order.
    np.testing.assert_allclose(joined.sketch, alone.sketch, atol=FLOAT64_SUMS * alone.norm)
    assert joined.norm == pytest.approx(alone.norm, rel=FLOAT64_SUMS)
    assert (joined.largest, joined.smallest, joined.size) == (alone.largest, alone.smallest, alone.size)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_cells_of_a_shard_show_its_deviation_alone(ranks: int) -> None:
    right, other = draw(4), draw(4)
    part = shard_range(COLUMNS, ranks - 1, ranks)
    other[:, part] *= 1.5
    whole = summarize(right, PLACE)
    for rank in range(ranks):
        part = shard_range(COLUMNS, rank, ranks)
        place = Place((ROWS, COLUMNS), ((0, ROWS),), (part.start, part.stop))
        measured = deviation(whole, summarize(other[:, part], place), place.covered_cells())
        if rank == ranks - 1:
            off_by = 2 * OFF_BY * ranks**0.5
            assert measured == pytest.approx(1 / 3, rel=off_by)
        else:
            assert measured == 0


def test_a_file_is_summarized_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = draw(5)
    at_once = summarize(array, PLACE)
    monkeypatch.setattr(sketch, "_CHUNK", 3 * COLUMNS)
    np.save(tmp_path / "a.npy", array)
    read = np.lib.format.open_memmap(tmp_path / "a.npy", "r")
    in_chunks = summarize(read, PLACE)
    assert in_chunks.checksum == at_once.checksum
    assert deviation(at_once, in_chunks) == 0
    np.testing.assert_allclose(in_chunks.sketch, at_once.sketch, atol=FLOAT64_SUMS * at_once.norm)


def test_bfloat16_and_numbers_that_are_not_finite() -> None:
    array = draw(6)
    right = summarize(array, PLACE)
    measured = deviation(right, summarize(as_bfloat16(array), PLACE))
    assert 2.0**-11 < measured < 2.0**-8
    array[3, 4] = np.inf
    assert deviation(right, summarize(array, PLACE)) == np.inf


def test_without_sketches_the_statistics_are_compared() -> None:
    right = summarize(draw(7), PLACE)
    larger = summarize(1.1 * draw(7), PLACE)
    bare = sketch.Summary(larger.size, larger.largest, larger.smallest, larger.mean, larger.norm)
    assert deviation(right, bare) == pytest.approx(0.1 / 1.1, rel=SEVERAL_OPERATORS)


def test_places_of_shards_and_rows() -> None:
    assert row_ranges(np.array([0, 1, 2, 7, 8])) == ((0, 3), (7, 9))
    experts = ShardSpec((8, 6, 5), Shard((2, 0, 0), (2, 6, 5)))
    assert place_of_shard(experts) == Place((48, 5), ((12, 24),), (0, 5))
    columns = ShardSpec((6, 8), Shard((0, 4), (6, 4)))
    assert place_of_shard(columns) == Place((6, 8), ((0, 6),), (4, 8))
    assert place_of_shard(ShardSpec((9,), Shard((3,), (3,)))) == Place((9, 1), ((3, 6),), (0, 1))
    assert place_of_shard(ShardSpec((), Shard((), ()))).is_whole
