"""The sharding of a model over ranks: the groups of ranks, and which layers, heads, tokens and experts a rank has.

Nothing here counts ranks one by one, so that a job of many thousands of them is planned as fast as a small one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.config import Config
from trainer.config.checks.degrees import ulysses_degree
from trainer.config.checks.parallel import parallel_degrees, runs_semi_auto, sharding_ranks
from trainer.config.layer_ranges import layer_text
from trainer.config.stages import chunk_layers, stage_layers, training_schedule
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import MoeSpec
from trainer.models.spec.names import EMBEDDING, is_buffer
from trainer.models.spec.shapes import all_shapes
from trainer.models.spec.sublayers import attention_spec
from trainer.parallel.layout import ModelLayout, model_layout
from trainer.parallel.mesh import Degrees, Mesh, MeshCoordinate, group_ranks
from trainer.parallel.schedule import max_in_flight, passes_in_flight
from trainer.parallel.sharding import shard_range
from trainer.parallel.world import World

_GROUPS = ("tp", "cp", "ulysses", "ring", "tp_cp", "dp", "dp_cp", "dp_shard", "dp_replicas", "ep", "expert_dp",
           "expert_shard", "expert_replicas", "pp", "embedding")  # fmt: skip
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
    """The layers and weights of one pipeline stage.

    Attributes:
        layers: The layers of each model chunk, as ranges.
        ends: Which of embedding, final norm, head and multi-token prediction modules the stage has.
        weights: Number of weights of the stage's rank with most weights.
    """

    stage: int
    ranks: str
    layers: tuple[str, ...]
    ends: tuple[str, ...]
    weights: int


@dataclass(frozen=True)
class RankShards:
    """The shards of the ranks with one position in a group, by the name of what is sharded, such as heads."""

    rank: int  # the position in the group
    ranks: str  # the ranks of the job with this position
    parts: dict[str, str]


@dataclass(frozen=True)
class ShardingPlan:
    """How the ranks of a job shard the model.

    Attributes:
        order: The formula of a rank's number.
        tensor, context, experts: Shards by position in a tp, cp and ep group; empty if that axis shards nothing.
    """

    order: str
    groups: tuple[GroupPlan, ...]
    stages: tuple[StageShare, ...]
    tensor: tuple[RankShards, ...] = ()
    context: tuple[RankShards, ...] = ()
    experts: tuple[RankShards, ...] = ()


def sharding_plan(config: Config, world: World) -> ShardingPlan | None:
    """Returns how the ranks shard the model, or None if each rank has all of it."""
    degrees = parallel_degrees(config, world)
    if not degrees.shards_model:
        return None
    mesh = Mesh(degrees)
    layout = model_layout_for(config, world)
    return ShardingPlan(
        "rank = ((pp x DP + dp) x CP + cp) x TP + tp",
        tuple(_groups(config, world, layout)),
        tuple(_stages(config, mesh, layout)),
        tuple(_group_shards("tp", mesh, lambda rank: _tensor_parts(config, degrees, rank))),
        tuple(_group_shards("cp", mesh, lambda rank: _context_parts(config, degrees, rank))),
        tuple(_group_shards("ep", mesh, lambda rank: _expert_parts(config, degrees, rank))),
    )


def pipeline_layers(config: Config, degrees: Degrees) -> list[list[list[int]]]:
    """Returns the layers of each model chunk, [stages][chunks][layers]; without a pipeline all are in one."""
    if degrees.pipeline_stage == 1:
        return [[list(range(config.decoder.num_layers))]]
    return chunk_layers(config)


def model_layout_for(config: Config, world: World) -> ModelLayout:
    """Returns how the parallel degrees of a job shard the parameters of the decoder."""
    degrees = parallel_degrees(config, world)
    stages = None
    if degrees.pipeline_stage > 1:
        stages = stage_layers(config)
    rows = config.parallel_config.use_seq_parallel
    layout = model_layout(config.decoder, degrees, sequence_parallel=rows, stage_layers=stages)
    if not runs_semi_auto(config, world):
        return layout
    # In semi-automatic mode only the first stage has the embedding; it sends the last stage what that needs of it.
    embedding = layout.parameters[EMBEDDING]
    return replace(layout, parameters={**layout.parameters, EMBEDDING: embedding._replace(stages=(0,))})


def rank_groups(config: Config, world: World, rank: int) -> dict[str, Sequence[int]]:
    """Returns the ranks of each group that a rank belongs to, as `group_ranks` does."""
    kv_heads = attention_spec(config.decoder).shared_kv_heads
    degrees = parallel_degrees(config, world)
    return group_ranks(Mesh(degrees), rank, kv_heads, ulysses_degree(config), sharding_ranks(config, degrees))


def fullest_rank(degrees: Degrees, stage: int) -> MeshCoordinate:
    """Returns the rank of a stage with most weights: the last of a tensor group, if the vocabulary does not divide
    evenly."""
    return MeshCoordinate(stage, 0, 0, degrees.model_parallel - 1)


class RankParams(NamedTuple):
    """The parameters and layers of one rank.

    Attributes:
        shapes: Shapes of its local parameters.
        passes: For each of its layers, the most forward passes that wait for their backward pass.
        has_head: Whether the rank computes the logits.
        tensor: The tensor-parallel degree.
    """

    shapes: dict[str, tuple[int, ...]]
    passes: dict[int, int]
    has_head: bool = True
    tensor: int = 1


def rank_params_per_stage(config: Config, world: World) -> list[RankParams]:
    """Returns the parameters of the rank with most weights, one entry for each pipeline stage."""
    spec = model_spec(config.decoder)
    degrees = parallel_degrees(config, world)
    if not config.is_decoder or runs_semi_auto(config, world):
        return [RankParams(all_shapes(config.network), dict.fromkeys(range(len(spec.layers)), 1))]
    stages = degrees.pipeline_stage
    layout = model_layout_for(config, world)
    counts = [[1]]
    if stages > 1:
        counts = chunk_passes(config, stages)
    params = []
    for stage, chunks in enumerate(pipeline_layers(config, degrees)):
        is_last = stage == stages - 1
        passes = {layer: counts[stage][chunk] for chunk, layers in enumerate(chunks) for layer in layers}
        if is_last:
            passes |= dict.fromkeys(spec.module_layers, counts[stage][-1])
        shapes = layout.local_shapes(fullest_rank(degrees, stage))
        params.append(RankParams(shapes, passes, is_last, degrees.model_parallel))
    return params


def chunk_passes(config: Config, stages: int) -> list[list[int]]:
    """Returns [stages][chunks] the most forward passes that wait for their backward pass."""
    schedule = training_schedule(config, stages, config.parallel_config.micro_batch_num, most=4 * stages)
    return [[max_in_flight(schedule, stage, chunk) for chunk in range(schedule.chunks)] for stage in range(stages)]


def passes_at_once(config: Config, stages: int) -> list[list[tuple[tuple[int, ...], int]]]:
    """Returns for each stage what passes of each of its chunks wait for their backward pass at the same time, and how
    many messages the stage has sent by then; see `passes_in_flight`."""
    micro_batches = config.parallel_config.micro_batch_num
    schedule = training_schedule(config, stages, micro_batches, most=4 * stages)
    scheduled = 1 + max(action.micro_batch for action in schedule.actions[0])
    last = stages - 1
    states = []
    for stage in range(stages):
        # The micro-batches that the schedule leaves out are those of its steady middle.
        ends = (stage == 0) + (stage == last)
        left_out = (micro_batches - scheduled) * (2 * schedule.chunks - ends)
        states.append([(counts, sent + left_out) for counts, sent in passes_in_flight(schedule, stage).items()])
    return states


def _groups(config: Config, world: World, layout: ModelLayout) -> list[GroupPlan]:
    """Lists the groups of more than one rank; kinds of groups with the same ranks have one entry."""
    degrees = layout.degrees
    unused: set[str] = set()
    if not config.decoder.experts:
        unused |= {"tp_cp", "ep", "expert_dp", "expert_shard", "expert_replicas"}
    if sharding_ranks(config, degrees) == degrees.data_parallel:
        unused |= {"dp_shard", "dp_replicas", "expert_shard", "expert_replicas"}
    if not 1 < ulysses_degree(config) < degrees.context_parallel:
        unused |= {"ulysses", "ring"}
    if len(layout.parameters[EMBEDDING].stages) == 1:
        unused.add("embedding")
    groups: dict[tuple[Sequence[int], Sequence[int]], GroupPlan] = {}
    groups_of_first = rank_groups(config, world, 0)
    groups_of_last = rank_groups(config, world, degrees.ranks - 1)
    for name in _GROUPS:
        if name in unused:
            continue
        first = groups_of_first[name]
        last = groups_of_last[name]
        if len(first) == 1:
            continue
        key = tuple(first), tuple(last)
        names = name
        if key in groups:
            names = f"{groups[key].name}, {name}"
        number = degrees.ranks // len(first)
        if name == "embedding":  # the stages between the first and the last one have none
            number = degrees.ranks // degrees.pipeline_stage
        groups[key] = GroupPlan(names, len(first), number, ranks_text(first), ranks_text(last))
    return list(groups.values())


def _stages(config: Config, mesh: Mesh, layout: ModelLayout) -> list[StageShare]:
    spec = model_spec(config.decoder)
    stages = mesh.degrees.pipeline_stage
    per_stage = mesh.size // stages
    weights = [0] * stages
    for name, parameter in layout.parameters.items():
        if is_buffer(name):
            continue
        size = math.prod(layout.shard(name, fullest_rank(mesh.degrees, parameter.stages[0])).shape)
        for stage in parameter.stages:
            weights[stage] += size
    plans = []
    for stage, layers in enumerate(pipeline_layers(config, mesh.degrees)):
        ends = []
        if stage in layout.parameters[EMBEDDING].stages:
            ends.append("embedding")
        if stage == stages - 1:
            ends += ["norm", "head"]
            if spec.mtp_modules:
                ends.append(f"{spec.mtp_modules} MTP")
        ranks = ranks_text(range(stage * per_stage, (stage + 1) * per_stage))
        plans.append(StageShare(stage, ranks, tuple(map(_chunk_text, layers)), tuple(ends), weights[stage]))
    return plans


def _chunk_text(layers: list[int]) -> str:
    if not layers:
        return "none"
    return layer_text(layers).split(" ", 1)[1]


def _group_shards(kind: str, mesh: Mesh, parts_of: Callable[[int], dict[str, str]]) -> list[RankShards]:
    _, _, context, tensor, expert = mesh.degrees
    number, width = {"tp": (tensor, 1), "cp": (context, tensor), "ep": (expert, 1)}[kind]
    if number == 1:
        return []
    blocks = [range(rank * width, mesh.size, number * width) for rank in range(number)]
    return [RankShards(rank, _blocks_text(block, width), parts_of(rank)) for rank, block in enumerate(blocks)]


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

    def local_range(number: int) -> str:
        return _range_text(shard_range(number, rank, tensor))

    parts["heads"] = local_range(attention.heads)
    kv_heads = attention.shared_kv_heads
    if kv_heads is not None:
        parts["kv heads"] = local_range(kv_heads)
        copies = tensor // min(tensor, kv_heads)
        if copies > 1:
            parts["kv heads"] = f"{rank // copies} (on {copies} ranks)"
    parts |= {name: local_range(width) for name, width in widths.items() if width}
    parts["vocabulary"] = local_range(spec.vocabulary)
    if config.parallel_config.use_seq_parallel:
        parts["token rows"] = local_range(micro_batch_tokens(config, degrees))
    return parts


def _context_parts(config: Config, degrees: Degrees, rank: int) -> dict[str, str]:
    """Returns which tokens of a sequence a rank has."""
    from trainer.data.batches.context import ContextShard

    shard = ContextShard(rank, degrees.context_parallel, ulysses_degree(config))
    ranges = shard.ranges(config.decoder.seq_length)
    return {"tokens": ", ".join(_range_text(slice(each.start, each.stop)) for each in ranges)}


def _expert_parts(config: Config, degrees: Degrees, rank: int) -> dict[str, str]:
    number = 0
    if config.decoder.experts:
        number = config.decoder.experts.expert_num
    return {"experts of a layer": _range_text(shard_range(number, rank, degrees.expert_parallel))}


def micro_batch_tokens(config: Config, degrees: Degrees) -> int:
    """Returns the tokens of a micro-batch, or of a slice of it, on one of the ranks that share its sequences."""
    tokens = config.runner_config.batch_size * config.decoder.seq_length // degrees.context_parallel
    return tokens // config.parallel.pipeline_config.slices


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats ranks at equal distances: ``3``, ``0-7``, ``0, 8``, ``0, 8 ... 56``."""
    if len(ranks) > 1 and ranks[1] == ranks[0] + 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"


def _blocks_text(starts: range, width: int) -> str:
    """Formats blocks of `width` neighbouring ranks at equal distances."""
    if width == 1:
        return ranks_text(starts)
    if len(starts) > 1 and starts.step == width:
        return ranks_text(range(starts[0], starts[-1] + width))
    texts = [ranks_text(range(start, start + width)) for start in (*starts[:2], *starts[2:][-1:])]
    if len(starts) <= 2:
        return ", ".join(texts)
    return f"{texts[0]}, {texts[1]} ... {texts[2]}"


def _range_text(part: slice) -> str:
    """Formats a range of numbers with both ends: ``0-1023``."""
    if part.stop <= part.start:
        return "none"
    if part.stop == part.start + 1:
        return str(part.start)
    return f"{part.start}-{part.stop - 1}"
