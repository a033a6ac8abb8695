"""The groups of each rank, by the mesh: members agree, and each has its meaning."""

from __future__ import annotations

import pytest

from trainer.parallel.mesh import Degrees, build_mesh, group_ranks, model_replica
from trainer.parallel.process_groups import process_groups

MESHES = [
    Degrees(pipeline_stage=pipeline, data_parallel=data, context_parallel=context, model_parallel=tensor,
            expert_parallel=expert)
    for pipeline, data, context, tensor, expert in (
        (1, 1, 1, 1, 1), (1, 4, 1, 1, 2), (2, 2, 1, 2, 4), (4, 1, 2, 2, 2), (2, 2, 2, 4, 8), (3, 1, 1, 1, 1)
    )
]  # fmt: skip


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
def test_members_of_a_group_agree(degrees: Degrees, kv_heads: int | None) -> None:
    mesh = build_mesh(degrees, degrees.ranks)
    every = [group_ranks(mesh, rank, kv_heads) for rank in range(mesh.size)]
    for rank, groups in enumerate(every):
        for kind, members in groups.items():
            assert rank in members and list(members) == sorted(members)
            assert all(list(every[other][kind]) == list(members) for other in members)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_what_the_members_of_a_group_have_in_common(degrees: Degrees) -> None:
    mesh = build_mesh(degrees, degrees.ranks)
    expert_of = {rank: mesh.group_of("ep", rank).index(rank) for rank in range(mesh.size)}
    for rank in range(mesh.size):
        own, groups = mesh.coordinate_of(rank), group_ranks(mesh, rank, 1)
        others = {kind: [mesh.coordinate_of(each) for each in ranks] for kind, ranks in groups.items()}
        assert len(groups["stage"]) * degrees.pipeline_stage == mesh.size
        assert all(each.pipeline == own.pipeline for each in others["stage"])
        assert len(groups["dp_cp"]) == degrees.data_parallel * degrees.context_parallel
        assert all(each[0::3] == own[0::3] for each in others["dp_cp"])  # pipeline and tensor coordinate
        assert groups["kv"] == groups["tp"]  # one head: all have it
        assert len(groups["expert_dp"]) * degrees.expert_parallel == len(groups["stage"])
        assert {expert_of[each] for each in groups["expert_dp"]} == {expert_of[rank]}
        ends = {0, degrees.pipeline_stage - 1}
        expected = sorted(ends) if own.pipeline in ends else [own.pipeline]
        assert [each.pipeline for each in others["embedding"]] == expected


def test_pairs_of_ranks_share_a_head_of_keys_and_values() -> None:
    mesh = build_mesh(Degrees(model_parallel=4), 4)
    assert [list(group_ranks(mesh, rank, 2)["kv"]) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


class Counted:
    """A group that counts how many are made of it."""

    def __init__(self, ranks: range, rank: int) -> None:
        self.ranks, self.rank, self.size, self.made = ranks, rank, len(ranks), []

    def new_subgroup(self, ranks: range, name: str) -> tuple[int, ...]:
        self.made.append(name)
        return tuple(ranks)


def test_kinds_with_the_same_ranks_share_a_group_and_none_is_of_one_rank() -> None:
    world = Counted(range(4), 1)
    groups = process_groups(world, build_mesh(Degrees(data_parallel=2, model_parallel=2, expert_parallel=2), 4))
    assert groups.tp is groups.ep and groups.tp == (0, 1) and groups.dp is groups.dp_cp and groups.dp == (1, 3)
    assert groups.stage is world and groups.pp is groups.cp is groups.kv is None
    assert len(world.made) == len(set(world.made)) == 2


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_ranks_of_a_copy_need_no_others(degrees: Degrees) -> None:
    mesh = build_mesh(degrees, degrees.ranks)
    copies = [model_replica(mesh, rank) for rank in range(mesh.size)]
    assert {copy.number for copy in copies} == set(range(copies[0].replicas))
    for rank, copy in enumerate(copies):
        assert rank in copy.ranks and all(copies[other] == copy for other in copy.ranks)
        groups = group_ranks(mesh, rank)
        assert set(copy.ranks) >= {*groups["tp"], *groups["ep"], *groups["pp"]}
