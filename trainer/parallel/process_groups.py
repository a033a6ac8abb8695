"""The process groups of one rank in the mesh, named as in Megatron-Core's ProcessGroupCollection."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainer.parallel.mesh import Mesh, group_ranks

if TYPE_CHECKING:
    from trainer.parallel.collectives import ProcessGroup


class ProcessGroups(NamedTuple):
    """The groups that this rank is in; None for a group of this rank alone.

    Attributes:
        world: All ranks of the job.
        tp: Tensor parallelism: the ranks that shard the layers' matrices.
        kv: The ranks of `tp` with the same head of keys and values, where there are fewer heads than ranks.
        cp: Context parallelism: the ranks that shard the tokens of each sequence.
        ulysses: The ranks of `cp` that exchange heads for tokens (Ulysses).
        ring: The ranks of `cp` whose keys and values go round to this rank (ring attention).
        tp_cp: `tp` and `cp` together: the ranks that shard the tokens of a micro-batch for the experts.
        dp: The ranks with other sequences and the same shard of the model.
        dp_cp: `dp` and `cp` together: all-reduces the gradients of all parameters but the experts.
        dp_shard: The neighbours of `dp_cp` that shard optimizer state, gradients or weights.
        dp_replicas: The ranks of `dp_cp` with the same shards.
        stage: All ranks of this pipeline stage.
        ep: The neighbours that together have all experts of a layer.
        expert_dp: The ranks of the stage with the same experts: all-reduces their gradients.
        expert_shard: The neighbours of `expert_dp` that shard optimizer state, gradients or weights of experts.
        expert_replicas: The ranks of `expert_dp` with the same shards.
        pp: One rank of each pipeline stage, in the order of stages.
        embedding: The ranks of `pp` with the embedding: the first and the last; None in the stages between them.
    """

    world: ProcessGroup
    tp: ProcessGroup | None = None
    kv: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None
    ring: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    dp_shard: ProcessGroup | None = None
    dp_replicas: ProcessGroup | None = None
    stage: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    expert_dp: ProcessGroup | None = None
    expert_shard: ProcessGroup | None = None
    expert_replicas: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    embedding: ProcessGroup | None = None


def process_groups(
    world: ProcessGroup, mesh: Mesh, kv_heads: int | None = None, ulysses: int = 1, sharding: int = 0
) -> ProcessGroups:
    """Makes the groups of this rank; all ranks of the job must call it. For the arguments see `group_ranks`."""
    # Kinds with the same ranks share a group: on a device each group takes memory.
    made: dict[tuple[int, ...], ProcessGroup] = {}
    groups: dict[str, ProcessGroup] = {}
    for kind, ranks in group_ranks(mesh, world.ranks[world.rank], kv_heads, ulysses, sharding).items():
        if len(ranks) == 1:
            continue
        if len(ranks) == world.size:
            groups[kind] = world
        else:
            key = tuple(ranks)
            made[key] = made.get(key) or world.new_subgroup(ranks, "-".join(["ranks", *map(str, ranks)]))
            groups[kind] = made[key]
    return ProcessGroups(world, **groups)
