"""The device mesh: from degrees of parallelism to groups of ranks. Pure Python.

The axes of the mesh, outermost first: **pipeline, data, context, tensor**. Neighbouring ranks, which are usually on the
same host, form tensor groups, which communicate most; pipeline stages, which communicate least, are farthest apart.
This is the order of Megatron-LM (`megatron/core/parallel_state.py`, ``order="tp-cp-ep-dp-pp"``, innermost first).

    rank = ((pipeline * DP + data) * CP + context) * TP + tensor

Expert parallelism adds no axis: MoE layers see the data, context and tensor axes as one of DP * CP * TP ranks and split
it into groups of EP neighbours, which together have each expert once. No rank shards an expert, as in MindSpore
Transformers, and in Megatron-LM with ``--expert-tensor-parallel-size 1``.

With 16 ranks of TP 2, CP 1, DP 4, PP 2 and EP 2:

    tp [0 1] [2 3] ... [14 15]      dp [0 2 4 6] [1 3 5 7] [8 10 12 14] [9 11 13 15]
    pp [0 8] [1 9] ... [7 15]       ep [0 1] [2 3] ... [14 15]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from trainer.errors import UserError

GroupKind = Literal["dp", "tp", "pp", "cp", "ep"]
GROUP_KINDS: tuple[GroupKind, ...] = get_args(GroupKind)

_CHOICES = 3  # number of valid settings that a message names


class Degrees(NamedTuple):
    """The parallel degrees: the size of each axis, named as in ``parallel_config``."""

    pipeline_stage: int = 1
    data_parallel: int = 1
    context_parallel: int = 1
    model_parallel: int = 1
    expert_parallel: int = 1

    @property
    def ranks(self) -> int:
        """Returns the number of ranks: the product of the degrees."""
        return self.pipeline_stage * self.data_parallel * self.context_parallel * self.model_parallel

    @property
    def shards_model(self) -> bool:
        """Returns whether ranks compute a model together; otherwise each is a replica with different batches."""
        return self.ranks > self.data_parallel or self.expert_parallel > 1

    @property
    def shards_layers(self) -> bool:
        """Returns whether ranks compute a layer together: they shard its matrices, experts or tokens."""
        return max(self.model_parallel, self.context_parallel, self.expert_parallel) > 1


class MeshCoordinate(NamedTuple):
    """The place of a rank on each axis of the mesh."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """The mesh of a job's ranks; made by `build_mesh`."""

    degrees: Degrees

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.degrees.ranks

    def _axis(self, kind: GroupKind) -> tuple[int, int]:
        """Returns the number of ranks of a group along this axis, and the distance between neighbours."""
        degrees = self.degrees
        tensor = degrees.model_parallel
        stage = degrees.data_parallel * degrees.context_parallel * tensor  # ranks of a pipeline stage
        axes = {
            "tp": (tensor, 1),
            "cp": (degrees.context_parallel, tensor),
            "ep": (degrees.expert_parallel, 1),
            "dp": (degrees.data_parallel, degrees.context_parallel * tensor),
            "pp": (degrees.pipeline_stage, stage),
        }
        return axes[kind]

    def groups(self, kind: GroupKind) -> list[range]:
        """Returns all groups of a kind: each rank is in exactly one; ranks ascend within a group."""
        size, stride = self._axis(kind)
        blocks = range(0, self.size, size * stride)
        return [
            range(first, first + size * stride, stride) for block in blocks for first in range(block, block + stride)
        ]

    def group_of(self, kind: GroupKind, rank: int) -> range:
        """Returns the group of a kind that contains a rank."""
        size, stride = self._axis(kind)
        first = rank - rank // stride % size * stride
        return range(first, first + size * stride, stride)

    def rank_at(self, coordinate: MeshCoordinate) -> int:
        """Returns the rank at a coordinate."""
        degrees = self.degrees
        replica = coordinate.pipeline * degrees.data_parallel + coordinate.data
        row = replica * degrees.context_parallel + coordinate.context
        return row * degrees.model_parallel + coordinate.tensor

    def coordinate_of(self, rank: int) -> MeshCoordinate:
        """Returns the coordinate of a rank."""
        rest, tensor = divmod(rank, self.degrees.model_parallel)
        rest, context = divmod(rest, self.degrees.context_parallel)
        pipeline, data = divmod(rest, self.degrees.data_parallel)
        return MeshCoordinate(pipeline, data, context, tensor)


def build_mesh(degrees: Degrees, ranks: int) -> Mesh:
    """Builds the mesh.

    Raises:
        UserError: The degrees do not fit the number of ranks; the fix names the nearest degrees that do.
    """
    mismatch = degree_mismatch(degrees, ranks)
    if mismatch is not None:
        fix = mismatch.fix("start {ranks}")
        raise UserError(mismatch.rule, key=mismatch.key, value=getattr(degrees, mismatch.key), fix=fix)
    return Mesh(degrees)


def group_ranks(
    mesh: Mesh, rank: int, kv_heads: int | None = None, ulysses: int = 1, sharding: int = 0
) -> dict[str, Sequence[int]]:
    """Returns the ranks, ascending, of each group of a rank: the fields of
    `trainer.parallel.process_groups.ProcessGroups` except the world.

    Args:
        kv_heads: Heads of keys and values of the model; None: at least as many as tensor-parallel ranks.
        ulysses: Neighbours of a context group that exchange heads; one of each such group is in a ring.
        sharding: Neighbours of a data-parallel group that shard optimizer state, gradients or weights; 0: all.
    """
    degrees = mesh.degrees
    tensor = degrees.model_parallel
    per_stage = mesh.size // degrees.pipeline_stage
    first = rank - rank % per_stage
    tensor_context = tensor * degrees.context_parallel
    stage = range(first, first + per_stage)
    stages = mesh.group_of("pp", rank)
    tp = mesh.group_of("tp", rank)
    cp = mesh.group_of("cp", rank)
    copies = tensor // min(tensor, kv_heads or tensor)
    first_copy = rank % tensor // copies * copies
    embedding = [rank]
    if rank in (stages[0], stages[-1]):
        embedding = sorted({stages[0], stages[-1]})
    dp_cp = stage[rank % tensor :: tensor]
    expert_dp = stage[(rank - first) % degrees.expert_parallel :: degrees.expert_parallel]
    replicas = degrees.data_parallel // (sharding or degrees.data_parallel)
    dp_shard, dp_replicas = _split_group(dp_cp, rank, replicas)
    expert_shard, expert_replicas = _split_group(expert_dp, rank, replicas)
    return {
        "tp": tp,
        "kv": tp[first_copy : first_copy + copies],
        "cp": cp,
        "ulysses": cp[cp.index(rank) // ulysses * ulysses :][:ulysses],
        "ring": cp[cp.index(rank) % ulysses :: ulysses],
        "tp_cp": range(rank - rank % tensor_context, rank - rank % tensor_context + tensor_context),
        "dp": mesh.group_of("dp", rank),
        "dp_cp": dp_cp,
        "dp_shard": dp_shard,
        "dp_replicas": dp_replicas,
        "stage": stage,
        "ep": mesh.group_of("ep", rank),
        "expert_dp": expert_dp,
        "expert_shard": expert_shard,
        "expert_replicas": expert_replicas,
        "pp": stages,
        "embedding": embedding,
    }


def _split_group(ranks: range, rank: int, blocks: int) -> tuple[range, range]:
    """Returns the block of neighbours with this rank, of equally large ones, and the ranks in its place in each."""
    size = len(ranks) // blocks
    index = ranks.index(rank)
    return ranks[index // size * size :][:size], ranks[index % size :: size]


class ModelReplicaRanks(NamedTuple):
    """The smallest set of ranks that have a complete model and whose groups include no other ranks.

    Attributes:
        number: Index of this set.
        replicas: Number of such sets in the job.
        ranks: Its ranks, ascending.
    """

    number: int
    replicas: int
    ranks: Sequence[int]


def model_replica(mesh: Mesh, rank: int) -> ModelReplicaRanks:
    """Returns the replica of the model that a rank belongs to; the ranks of a context group are in different ones."""
    degrees = mesh.degrees
    per_stage = mesh.size // degrees.pipeline_stage
    width = math.lcm(degrees.model_parallel, degrees.expert_parallel)
    number = rank % per_stage // width
    starts = range(number * width, mesh.size, per_stage)
    ranks = [start + place for start in starts for place in range(width)]
    return ModelReplicaRanks(number, per_stage // width, ranks)


class DegreeMismatch(NamedTuple):
    """Why degrees do not fit a number of ranks."""

    key: str  # the degree that the message names
    rule: str
    change: str  # degrees that would fit; empty where changing the allowed ones cannot help
    ranks: int  # number of ranks that would fit; 0 where no number does

    def fix(self, template: str) -> str:
        """Returns the fix: another number of ranks, for `{ranks}` in the template, or other degrees."""
        fixes = []
        if self.ranks:
            fixes.append(template.format(ranks=self.ranks))
        if self.change:
            fixes.append(self.change)
        return ", or ".join(fixes)


def degree_mismatch(
    degrees: Degrees, ranks: int, may_change: Collection[str] = Degrees._fields
) -> DegreeMismatch | None:
    """Returns why these degrees do not fit the number of ranks; None when they fit.

    Args:
        may_change: The degrees that the fix may change.
    """
    axes = {name: size for name, size in degrees._asdict().items() if name != "expert_parallel"}
    if degrees.ranks != ranks:
        used = {name: size for name, size in axes.items() if size > 1} or {"data_parallel": 1}
        product = " x ".join(f"{name} {size}" for name, size in used.items())
        rule = f"{product} needs {degrees.ranks} rank{'s' * (degrees.ranks > 1)}, but the job has {ranks}"
        choices = [
            " and ".join(f"{name} {new}" for name, new in choice._asdict().items() if new != getattr(degrees, name))
            for choice in nearest_degrees(degrees, ranks, may_change)
        ]
        change = ""
        if choices:
            change = f"set {'; or '.join(choices)}"
        if degrees.data_parallel > 1 or len(used) > 1:
            key = "data_parallel"
        else:
            key = next(iter(used))
        return DegreeMismatch(key, rule, change, degrees.ranks)
    product = degrees.data_parallel * degrees.context_parallel * degrees.model_parallel
    if product % degrees.expert_parallel:
        near = sorted(divisors(product), key=lambda size: (abs(math.log(size / degrees.expert_parallel)), size))[:2]
        tensor = ""
        if degrees.model_parallel > 1:
            tensor = " x model_parallel"
        rule = f"must divide data_parallel x context_parallel{tensor} = {product}, the ranks that share"
        rule += " a layer's experts"
        return DegreeMismatch("expert_parallel", rule, f"set it to {' or '.join(map(str, sorted(near)))}", 0)
    return None


def indivisible_degree(degrees: Degrees, ranks: int) -> tuple[str, int]:
    """Finds the first degree that does not divide the ranks, in the order pipeline, tensor, context, data.

    Returns:
        Its name, and the number of ranks left by the degrees before it.
    """
    for name in ("pipeline_stage", "model_parallel", "context_parallel"):
        if ranks % getattr(degrees, name):
            return name, ranks
        ranks //= getattr(degrees, name)
    return "data_parallel", ranks


def nearest_degrees(degrees: Degrees, ranks: int, may_change: Collection[str] = Degrees._fields) -> list[Degrees]:
    """Returns the degrees for `ranks` ranks that change least.

    Fewest changed degrees come first, then smallest factors, then changes of data_parallel.
    """
    fixed = {name: size for name, size in degrees._asdict().items() if name not in may_change}

    def distance(choice: Degrees) -> tuple[int, float, bool]:
        """Returns the sort key of a choice, smaller if it changes less."""
        pairs = list(zip(choice, degrees, strict=True))
        changed = sum(new != old for new, old in pairs)
        return changed, round(sum(abs(math.log(new / old)) for new, old in pairs), 9), pairs[1][0] == pairs[1][1]

    choices = (
        Degrees(pipeline, data, context, ranks // pipeline // data // context, degrees.expert_parallel)
        for pipeline in divisors(ranks)
        for data in divisors(ranks // pipeline)
        for context in divisors(ranks // pipeline // data)
    )
    allowed = (choice for choice in choices if all(getattr(choice, name) == size for name, size in fixed.items()))
    return sorted(allowed, key=distance)[:_CHOICES]


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]
