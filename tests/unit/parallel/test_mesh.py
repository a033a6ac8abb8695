"""The device mesh: every combination of degrees up to 64 ranks, and the message about degrees that do not fit."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from trainer.errors import UserError
from trainer.parallel.mesh import GROUP_KINDS, Degrees, Mesh, build_mesh, degree_mismatch, nearest_degrees

MOST = 64
AXES = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def parallel_degrees(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    for pipeline in divisors(ranks):
        for data in divisors(ranks // pipeline):
            for context in divisors(ranks // pipeline // data):
                yield pipeline, data, context, ranks // pipeline // data // context


def meshes(ranks: int) -> Iterator[Mesh]:
    for pipeline, data, context, tensor in parallel_degrees(ranks):
        for expert in divisors(data * context * tensor):
            yield build_mesh(Degrees(pipeline, data, context, tensor, expert), ranks)


@pytest.mark.parametrize("ranks", range(1, MOST + 1))
def test_groups_of_every_kind_partition_the_ranks(ranks: int) -> None:
    for mesh in meshes(ranks):
        sizes = dict(zip(("pp", "dp", "cp", "tp", "ep"), mesh.degrees, strict=True))
        for kind in GROUP_KINDS:
            groups = mesh.groups(kind)
            assert {len(group) for group in groups} == {sizes[kind]}
            assert sorted(rank for group in groups for rank in group) == list(range(ranks))
            assert all(group == mesh.group_of(kind, rank) for group in groups for rank in group)


@pytest.mark.parametrize("ranks", [1, 2, 12, 24, 36, 60, 64])
def test_groups_are_orthogonal_and_follow_the_coordinates(ranks: int) -> None:
    """Ranks of a group differ in its own coordinate alone, so two groups of two kinds meet at most once."""
    for mesh in meshes(ranks):
        coordinates = [mesh.coordinate_of(rank) for rank in range(ranks)]
        assert [mesh.rank_at(where) for where in coordinates] == list(range(ranks))
        assert len(set(coordinates)) == ranks
        for kind, axis in AXES.items():
            for group in mesh.groups(kind):
                along = [getattr(coordinates[rank], axis) for rank in group]
                assert along == list(range(len(group)))
                assert len({coordinates[rank]._replace(**{axis: 0}) for rank in group}) == 1


@pytest.mark.parametrize("ranks", [1, 8, 24, 48, 64])
def test_the_mesh_is_the_documented_array(ranks: int) -> None:
    """Against numpy: pipeline outermost, then data, context, tensor; experts in runs along
    data x context x tensor."""
    for mesh in meshes(ranks):
        pipeline, data, context, tensor, expert = mesh.degrees
        grid = np.arange(ranks).reshape(pipeline, data, context, tensor)
        for number, kind in enumerate(("pp", "dp", "cp", "tp")):
            expected = np.moveaxis(grid, number, -1).reshape(-1, mesh.degrees[number])
            assert sorted(map(tuple, mesh.groups(kind))) == sorted(map(tuple, expected.tolist()))
        assert sorted(map(tuple, mesh.groups("ep"))) == sorted(map(tuple, grid.reshape(-1, expert).tolist()))


def test_the_example_of_megatron() -> None:
    """The 16 devices in the docstring of Megatron-LM's `initialize_model_parallel`: tensor 2, pipeline 4."""
    mesh = build_mesh(Degrees(pipeline_stage=4, data_parallel=2, model_parallel=2, expert_parallel=2), 16)
    assert [list(group) for group in mesh.groups("dp")][:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [list(group) for group in mesh.groups("tp")][:2] == [[0, 1], [2, 3]]
    assert [list(group) for group in mesh.groups("pp")] == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert mesh.groups("ep") == mesh.groups("tp")  # both of two neighbours


def test_sixteen_thousand_ranks_take_less_than_a_second() -> None:
    began = time.process_time()
    mesh = build_mesh(Degrees(16, 32, 4, 8, 64), 16_384)
    found = {kind: mesh.groups(kind) for kind in GROUP_KINDS}
    of_rank = [mesh.group_of("dp", rank) for rank in range(mesh.size)]
    assert time.process_time() - began < 1
    assert {kind: len(groups) for kind, groups in found.items()} == {
        "dp": 512, "tp": 2048, "pp": 1024, "cp": 4096, "ep": 256,
    }  # fmt: skip
    assert len(of_rank) == 16_384
    began = time.process_time()
    assert degree_mismatch(Degrees(16, 32, 4, 7), 16_384) is not None
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("degrees", "ranks", "parts"),
    [
        (Degrees(data_parallel=4), 8, ["data_parallel = 4", "data_parallel 4 needs 4 ranks", "has 8"]),
        (Degrees(data_parallel=4), 8, ["start 4, or set data_parallel 8"]),
        (Degrees(data_parallel=8), 1, ["needs 8 ranks, but the job has 1", "start 8, or set data_parallel 1"]),
        (Degrees(), 6, ["data_parallel = 1: data_parallel 1 needs 1 rank, but", "or set data_parallel 6"]),
        (Degrees(pipeline_stage=4), 6, ["pipeline_stage = 4", "pipeline_stage 6"]),
        (
            Degrees(data_parallel=2, model_parallel=2),
            8,
            ["data_parallel 2 x model_parallel 2 needs 4 ranks", "start 4, or set data_parallel 4; or model_"],
        ),
        (Degrees(data_parallel=6, expert_parallel=4), 6, ["expert_parallel = 4", "= 6, the ranks", "set it to 3 or 6"]),
        (Degrees(1, 2, 1, 4, 16), 8, ["expert_parallel = 16", "x model_parallel = 8, the ranks", "set it to 4 or 8"]),
    ],
)
def test_degrees_that_do_not_fit_name_the_nearest_that_fit(degrees: Degrees, ranks: int, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        build_mesh(degrees, ranks)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_the_fix_changes_allowed_degrees_only() -> None:
    assert nearest_degrees(Degrees(data_parallel=4), 8, may_change=("data_parallel",)) == [Degrees(data_parallel=8)]
    assert len(nearest_degrees(Degrees(data_parallel=4), 8)) == 3


@pytest.mark.parametrize("ranks", [1, 7, 12, 64, 1000])
def test_every_named_choice_fits(ranks: int) -> None:
    for wrong in (Degrees(2, 3, 1, 5), Degrees(1, 9, 2, 1), Degrees(3, 1, 1, 4)):
        choices = nearest_degrees(wrong, ranks)
        assert choices and len(set(choices)) == len(choices)
        assert all(degree_mismatch(choice, ranks) is None for choice in choices)
        changed = [sum(new != old for new, old in zip(choice, wrong, strict=True)) for choice in choices]
        assert changed == sorted(changed)
