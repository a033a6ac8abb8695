"""Who holds what: the groups of ranks, and what the ranks of a stage, a tensor group and others have of the model.

Nothing here counts ranks one by one, so that a job of many thousands of them is planned as fast as a small one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from trainer.config.checks.degrees import ulysses_degree
from trainer.config.checks.parallel import parallel_degrees, runs_semi_auto
from trainer.config.layer_ranges import layer_text
from trainer.config.stages import chunk_layers, stage_layers
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import MoeSpec
from trainer.models.spec.names import EMBEDDING, is_buffer
from trainer.models.spec.shapes import all_shapes
from trainer.models.spec.sublayers import attention_spec
from trainer.parallel.layout import ModelLayout, model_layout
from trainer.parallel.mesh import Degrees, Mesh, MeshCoordinate, group_ranks
from trainer.parallel.schedule import max_in_flight, one_forward_one_backward
from trainer.parallel.sharding import shard_range

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.parallel.world import World

_GROUPS = ("tp", "cp", "ulysses", "ring", "tp_cp", "dp", "dp_cp", "ep", "expert_dp", "pp", "embedding")
"""Named as in Megatron-Core's ProcessGroupCollection; see `trainer.parallel.process_groups.ProcessGroups`."""


@dataclass(frozen=True)
class GroupPlan:
    """The groups of one kind, each of `size` ranks."""

    name: str
    size: int
    number: int
    first: str
    last: str


@dataclass(frozen=True)
class StageShare:
    """What a stage of the pipeline holds.

    Attributes:
        layers: Of each of its chunks, as ranges.
        ends: Embedding, final norm, head and number of multi-token prediction modules, as far as it has them.
        weights: Of the rank of the stage that has most.
    """

    stage: int
    ranks: str
    layers: tuple[str, ...]
    ends: tuple[str, ...]
    weights: int


@dataclass(frozen=True)
class RankShare:
    """What the ranks with one coordinate of a group hold: by the name of what is divided, which part of it."""

    rank: int  # in the group
    ranks: str  # of the job, with this coordinate
    parts: dict[str, str]


@dataclass(frozen=True)
class Division:
    """Who holds what. Empty tuples: that axis divides nothing.

    Attributes:
        tensor, context, experts: By the rank in a tp, cp and ep group.
    """

    order: str
    groups: tuple[GroupPlan, ...]
    stages: tuple[StageShare, ...]
    tensor: tuple[RankShare, ...] = ()
    context: tuple[RankShare, ...] = ()
    experts: tuple[RankShare, ...] = ()


def division(config: Config, world: World) -> Division | None:
    """None where each rank has the whole model and batches of its own."""
    degrees = parallel_degrees(config, world)
    if not degrees.shards_model or config.classifier is not None:
        return None
    mesh = Mesh(degrees)
    layout = layout_of(config, world)
    return Division(
        "rank = ((pp x DP + dp) x CP + cp) x TP + tp",
        tuple(_groups(config, world, layout)),
        tuple(_stages(config, mesh, layout)),
        tuple(_of_group("tp", mesh, lambda rank: _tensor_parts(config, degrees, rank))),
        tuple(_of_group("cp", mesh, lambda rank: _context_parts(config, degrees, rank))),
        tuple(_of_group("ep", mesh, lambda rank: _expert_parts(config, degrees, rank))),
    )


def layout_of(config: Config, world: World) -> ModelLayout:
    """How the degrees of a job divide the parameters of the decoder."""
    degrees = parallel_degrees(config, world)
    stages = None
    if degrees.pipeline_stage > 1:
        stages = stage_layers(config)
    rows = config.parallel_config.use_seq_parallel
    layout = model_layout(config.decoder, degrees, sequence_parallel=rows, stage_layers=stages)
    if not runs_semi_auto(config, world):
        return layout
    # There the first stage alone holds the embedding, and hands on what the last one needs of it.
    one = layout.parameters[EMBEDDING]
    return replace(layout, parameters={**layout.parameters, EMBEDDING: one._replace(stages=(0,))})


def groups_of(config: Config, world: World, rank: int) -> dict[str, Sequence[int]]:
    """The ranks of each group that a rank is in: see `group_ranks`."""
    kv_heads = attention_spec(config.decoder).shared_kv_heads
    return group_ranks(Mesh(parallel_degrees(config, world)), rank, kv_heads, ulysses_degree(config))


def fullest_rank(degrees: Degrees, stage: int) -> MeshCoordinate:
    """Of a stage the rank that holds most: where a vocabulary does not divide evenly, the last of a tensor group."""
    return MeshCoordinate(stage, 0, 0, degrees.model_parallel - 1)


class RankParams(NamedTuple):
    """What a rank has of the model.

    Attributes:
        shapes: Its parameters.
        passes: For each layer of it how many forward passes wait for their backward pass at the most.
        has_head: Whether it computes the logits.
        tensor: How many ranks share its matrices.
    """

    shapes: dict[str, tuple[int, ...]]
    passes: dict[int, int]
    has_head: bool = True
    tensor: int = 1


def held_parts(config: Config, world: World) -> list[RankParams]:
    """Of the fullest rank of each stage of a pipeline; without one that of every rank."""
    spec = model_spec(config.decoder)
    degrees = parallel_degrees(config, world)
    if config.classifier is not None or runs_semi_auto(config, world):
        return [RankParams(all_shapes(config.network), dict.fromkeys(range(len(spec.layers)), 1))]
    stages = degrees.pipeline_stage
    layout = layout_of(config, world)
    found = []
    if stages > 1:
        rows = chunk_layers(config)
    else:
        rows = [[list(range(spec.num_layers))]]
    schedule = one_forward_one_backward(stages, min(config.parallel_config.micro_batch_num, 4 * stages), len(rows[0]))
    for stage, chunks in enumerate(rows):
        is_last = stage == stages - 1
        counts = [1 if stages == 1 else max_in_flight(schedule, stage, chunk) for chunk in range(len(chunks))]
        passes = {layer: counts[chunk] for chunk, layers in enumerate(chunks) for layer in layers}
        passes |= dict.fromkeys(spec.module_layers, counts[-1]) if is_last else {}
        shapes = layout.local_shapes(fullest_rank(degrees, stage))
        found.append(RankParams(shapes, passes, is_last, degrees.model_parallel))
    return found


def _groups(config: Config, world: World, layout: ModelLayout) -> list[GroupPlan]:
    """Of more than one rank; kinds with the same ranks have one entry."""
    degrees = layout.degrees
    if config.decoder.experts:
        unused = ()
    else:
        unused = ("tp_cp", "ep", "expert_dp")
    unused += () if 1 < ulysses_degree(config) < degrees.context_parallel else ("ulysses", "ring")
    unused += ("embedding",) if len(layout.parameters[EMBEDDING].stages) == 1 else ()
    found: dict[tuple[Sequence[int], Sequence[int]], GroupPlan] = {}
    for_first, for_last = (groups_of(config, world, rank) for rank in (0, degrees.ranks - 1))
    for name in (name for name in _GROUPS if name not in unused):
        first = for_first[name]
        last = for_last[name]
        if len(first) == 1:
            continue
        key = tuple(first), tuple(last)
        names = name
        if key in found:
            names = f"{found[key].name}, {name}"
        # The stages between the first and the last one have no embedding.
        number = degrees.ranks // (degrees.pipeline_stage if name == "embedding" else len(first))
        found[key] = GroupPlan(names, len(first), number, ranks_text(first), ranks_text(last))
    return list(found.values())


def _stages(config: Config, mesh: Mesh, layout: ModelLayout) -> list[StageShare]:
    spec = model_spec(config.decoder)
    stages = mesh.degrees.pipeline_stage
    if stages > 1:
        chunks = chunk_layers(config)
    else:
        chunks = [[list(range(spec.num_layers))]]
    per_stage = mesh.size // stages
    weights = [0] * stages
    for name, one in layout.parameters.items():
        if is_buffer(name):
            size = 0
        else:
            size = math.prod(layout.shard(name, fullest_rank(mesh.degrees, one.stages[0])).shape)
        for stage in one.stages:
            weights[stage] += size
    last = ["norm", "head"]
    if spec.mtp_modules:
        last.append(f"{spec.mtp_modules} MTP")
    found = []
    for stage, layers in enumerate(chunks):
        if stage in layout.parameters[EMBEDDING].stages:
            ends = ["embedding"]
        else:
            ends = []
        found.append(
            StageShare(
                stage,
                ranks_text(range(stage * per_stage, (stage + 1) * per_stage)),
                tuple(layer_text(chunk).split(" ", 1)[1] if chunk else "none" for chunk in layers),
                tuple([*ends, *(last if stage == stages - 1 else ())]),
                weights[stage],
            )
        )
    return found


def _of_group(kind: str, mesh: Mesh, parts_of: Callable[[int], dict[str, str]]) -> list[RankShare]:
    degrees = mesh.degrees
    size = mesh.size
    tensor = degrees.model_parallel
    number, width = {
        "tp": (tensor, 1), "cp": (degrees.context_parallel, tensor), "ep": (degrees.expert_parallel, 1),
    }[kind]  # fmt: skip
    if number == 1:
        return []
    blocks = [range(rank * width, size, number * width) for rank in range(number)]
    return [RankShare(rank, _blocks_text(block, width), parts_of(rank)) for rank, block in enumerate(blocks)]


def _tensor_parts(config: Config, degrees: Degrees, rank: int) -> dict[str, str]:
    spec = model_spec(config.decoder)
    tensor = degrees.model_parallel
    parts = {}
    attention = spec.layers[0].attention
    widths = {"columns": 0, "shared": 0}
    for layer in spec.layers:
        if isinstance(layer.mlp, MoeSpec):
            widths["shared"] = layer.mlp.shared_width
        else:
            widths["columns"] = layer.mlp.width

    def own(number: int) -> str:
        return _range_text(shard_range(number, rank, tensor))

    parts["heads"] = own(attention.heads)
    kv_heads = attention.shared_kv_heads
    if kv_heads is not None:
        copies = tensor // min(tensor, kv_heads)
        if copies == 1:
            parts["kv heads"] = own(kv_heads)
        else:
            parts["kv heads"] = f"{rank // copies} (on {copies} ranks)"
    parts |= {name: own(width) for name, width in widths.items() if width}
    parts["vocabulary"] = own(spec.vocabulary)
    if config.parallel_config.use_seq_parallel:
        parts["token rows"] = own(micro_batch_tokens(config, degrees))
    return parts


def _context_parts(config: Config, degrees: Degrees, rank: int) -> dict[str, str]:
    """Which tokens of a sequence."""
    from trainer.data.batches.context import ContextShard

    own = ContextShard(rank, degrees.context_parallel, ulysses_degree(config)).ranges(config.decoder.seq_length)
    return {"tokens": ", ".join(_range_text(slice(each.start, each.stop)) for each in own)}


def _expert_parts(config: Config, degrees: Degrees, rank: int) -> dict[str, str]:
    number = 0
    if config.decoder.experts:
        number = config.decoder.experts.expert_num
    return {"experts of a layer": _range_text(shard_range(number, rank, degrees.expert_parallel))}


def micro_batch_tokens(config: Config, degrees: Degrees) -> int:
    """Tokens of a micro-batch on one of the ranks that share its sequences."""
    return config.runner_config.batch_size * config.decoder.seq_length // degrees.context_parallel


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks at equal distances: ``3``, ``0-7``, ``0, 8``, ``0, 8 ... 56``."""
    if len(ranks) > 1 and ranks[1] == ranks[0] + 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"


def _blocks_text(starts: range, width: int) -> str:
    """Blocks of so many neighbouring ranks, at equal distances."""
    if width == 1:
        return ranks_text(starts)
    if len(starts) > 1 and starts.step == width:
        return ranks_text(range(starts[0], starts[-1] + width))
    texts = [ranks_text(range(start, start + width)) for start in (*starts[:2], *starts[2:][-1:])]
    if len(starts) <= 2:
        return ", ".join(texts)
    return f"{texts[0]}, {texts[1]} ... {texts[2]}"


def _range_text(part: slice) -> str:
    """``0-1023``: both ends count."""
    if part.stop <= part.start:
        return "none"
    if part.stop == part.start + 1:
        return str(part.start)
    return f"{part.start}-{part.stop - 1}"
