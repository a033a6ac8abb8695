"""Shards from MindSpore's parameter layouts, and whole arrays gathered from shards."""

from __future__ import annotations

import numpy as np
import pytest
from thread_ranks import ThreadRank, on_ranks

from trainer.errors import RunError
from trainer.parallel.communicator import check_same_values
from trainer.parallel.sharding import Shard
from trainer.semi_auto import shards
from trainer.semi_auto.shards import first_rank_per_shard, gather_arrays, parameter_shard

RANKS = 8


def layout(grid: list[int], axes: list, whole: list[int], group: str = "") -> tuple:
    """Returns a layout as MindSpore 2.10 does."""
    part = []
    for axis, size in zip(axes, whole, strict=True):
        dimensions = axis if isinstance(axis, list) else [axis]
        degrees = [grid[-1 - dimension] for dimension in dimensions if dimension >= 0]
        part.append(size // int(np.prod(degrees)))
    return grid, axes, part, 0, True, group, whole, part, False, False, 0, 0


@pytest.mark.parametrize(
    ("axes", "rank", "start", "shape"),
    [
        ([-1, -1], 5, (0, 0), (16, 12)),
        ([0, -1], 5, (8, 0), (8, 12)),  # the last dimension of the grid, tensor parallelism
        ([-1, 0], 4, (0, 0), (16, 6)),
        ([1, 0], 5, (8, 6), (4, 6)),  # 5 is row 2, column 1 of the grid
        ([[1, 0], -1], 5, (10, 0), (2, 12)),
    ],
)
def test_a_shard_from_a_layout(axes: list, rank: int, start: tuple, shape: tuple) -> None:
    found = parameter_shard(layout([4, 2], axes, [16, 12]), rank)
    assert found == Shard(start, shape)


def test_ranks_that_share_optimizer_state_shard_the_first_axis_once_more() -> None:
    assert parameter_shard(layout([4, 2], [0, -1], [16, 12], "4-1"), 5, (2, 4)) == Shard((12, 0), (2, 12))


def test_a_later_stage_has_a_grid_of_its_own() -> None:
    grid = layout([2, 2], [0], [6])
    assert parameter_shard(grid, 5) == parameter_shard(grid, 1) == Shard((3,), (3,))


def test_whole_arrays_from_the_shards_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PIECE_BYTES", 20)  # shards are sent in several pieces, of unequal number
    random = np.random.default_rng(2)
    wholes = {"a": random.standard_normal((16, 12), np.float32), "b": random.standard_normal(8, np.float32)}
    shapes = {"a": (16, 12), "b": (8,), "frozen": (3,)}
    of_rank = [{"a": parameter_shard(layout([4, 2], [1, 0], [16, 12]), rank)} for rank in range(RANKS)]
    for rank in range(4):  # of the first stage only, and twice
        of_rank[rank]["b"] = parameter_shard(layout([2, 2], [0], [8]), rank)
    holders = {name: first_rank_per_shard([each.get(name) for each in of_rank]) for name in shapes}
    assert list(holders["b"]) == [0, 1] and len(holders["a"]) == RANKS and holders["frozen"] == {}

    def gathered(communicator: ThreadRank) -> dict[str, np.ndarray]:
        parts = {name: own.of(wholes[name]) for name, own in of_rank[communicator.rank].items()}
        return gather_arrays({name: shapes[name] for name in wholes}, holders, parts, communicator)

    found, *others = on_ranks(RANKS, gathered)
    assert others == [{}] * (RANKS - 1) and set(found) == set(wholes)
    for name, whole in wholes.items():
        np.testing.assert_array_equal(found[name], whole)


def test_ranks_with_different_values_are_named() -> None:
    def checked(values: list[dict[str, int]]) -> list[RunError | None]:
        return on_ranks(RANKS, lambda rank: check_same_values(values[rank.rank], "weights", rank))

    alike = [{"a": 1} if rank < 4 else {"b": 2} for rank in range(RANKS)]
    assert checked(alike) == [None] * RANKS
    for error in checked([*alike[:5], {"b": 3}, *alike[6:]]):
        assert isinstance(error, RunError) and "the weights of rank 5 differ" in str(error)
