"""Which shard of each parameter a rank has, over which ranks its gradient is summed, and which rank saves it.

Pure Python: the plan reads it, too. Tensor parallelism shards as Megatron-LM does (Shoeybi et al. 2019, section 3): q,
k, v, gate and up by their outputs, o and down by their inputs, embedding and head by the vocabulary. Where there are
fewer heads of keys and values than ranks, neighbouring ranks have the same head. Latent attention: the down-projections
are replicated on every rank; the per-head up-projections are sharded by heads. Expert parallelism shards the stacks of
experts; a rank has whole experts.

The gradient of a parameter that is replicated in a tensor group is either the same on all of its ranks, or a partial
sum on each rank, to be summed over the group. It is a partial sum where ranks compute with different heads or columns
(norms of queries and keys, one of the matrices of an adapter) or with different tokens. Tokens differ beside the
residual stream with sequence parallelism (Korthikanti et al. 2022, section 4.2). They always differ beside a router,
because the ranks of a tensor group shard the tokens for the experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from trainer.models.spec.build import model_spec
from trainer.models.spec.model import ModelSpec, ParameterSpec
from trainer.models.spec.names import EMBEDDING, MAPPING_IN, layer_prefix
from trainer.parallel.mesh import Degrees, MeshCoordinate
from trainer.parallel.sharding import Shard, ShardSpec, shard_range

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

SumGroup = Literal[
    "tp", "kv", "dp_cp", "dp_shard", "dp_replicas", "expert_dp", "expert_shard", "expert_replicas", "embedding"
]
"""Group of ranks over which a gradient is summed, in the order of the sums: a field of
`trainer.parallel.process_groups.ProcessGroups`."""
SUM_GROUPS: tuple[SumGroup, ...] = get_args(SumGroup)
SHARD_GROUPS: dict[SumGroup, tuple[SumGroup, SumGroup]] = {
    "dp_cp": ("dp_shard", "dp_replicas"), "expert_dp": ("expert_shard", "expert_replicas"),
}  # fmt: skip
"""The groups over which ZeRO shards a parameter -> with fewer shards than ranks: the group of the ranks that together
have all shards, and the group of the ranks with the same one (hybrid sharding)."""


class ParameterLayout(NamedTuple):
    """How one parameter is sharded.

    Attributes:
        shape: Global shape.
        shards: Number of shards, which differ by one row at most; 1: the ranks of its stages replicate the parameter.
        dimension: The sharded dimension.
        by: The mesh axis over which it is sharded. Neighbouring ranks have the same shard if there are fewer shards
            than ranks.
        sums: The groups over which its gradient is summed, one after the other. Empty for a buffer.
        stages: The pipeline stages that have it.
    """

    shape: tuple[int, ...]
    shards: int = 1
    dimension: int = 0
    by: Literal["tp", "ep"] = "tp"
    sums: tuple[SumGroup, ...] = ("dp_cp",)
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class ModelLayout:
    """How the parameters of a model are sharded over ranks; made by `model_layout`.

    Attributes:
        parameters: Layouts by the parameters' names, in forward order.
    """

    degrees: Degrees
    parameters: Mapping[str, ParameterLayout]

    def holds(self, name: str, coordinate: MeshCoordinate) -> bool:
        """Returns whether the stage of a rank has this parameter."""
        return coordinate.pipeline in self.parameters[name].stages

    def shard(self, name: str, coordinate: MeshCoordinate) -> Shard:
        """Returns the shard of a parameter that a rank of one of its stages has."""
        layout = self.parameters[name]
        shape = list(layout.shape)
        start = [0] * len(shape)
        if layout.shards > 1:
            rows = shard_range(shape[layout.dimension], self._shard_index(layout, coordinate), layout.shards)
            start[layout.dimension] = rows.start
            shape[layout.dimension] = rows.stop - rows.start
        return Shard(tuple(start), tuple(shape))

    def shard_spec(self, name: str, coordinate: MeshCoordinate) -> ShardSpec:
        """Returns the spec of the shard of a parameter that a rank has: global shape and shard."""
        return ShardSpec(self.parameters[name].shape, self.shard(name, coordinate))

    def local_shapes(self, coordinate: MeshCoordinate) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a rank's shards by the parameters' names, in forward order."""
        return {name: self.shard(name, coordinate).shape for name in self.parameters if self.holds(name, coordinate)}

    def is_first_holder(self, name: str, coordinate: MeshCoordinate, sharded: bool = False) -> bool:
        """Returns whether this rank is the first of the ranks with the same shard of a parameter.

        This rank counts the shard's gradient in norms and writes the shard to a checkpoint.

        Args:
            sharded: ZeRO shards the parameter further over the ranks that sum its gradient last (dp_cp or expert_dp):
                each of them counts and writes its range.
        """
        layout = self.parameters[name]
        if coordinate.pipeline != layout.stages[0]:
            return False
        if layout.by == "ep":
            return sharded or self._expert_rank(coordinate) < self.degrees.expert_parallel
        is_first_copy = coordinate.tensor % self._copies(layout) == 0
        return is_first_copy and (sharded or not (coordinate.data or coordinate.context))

    def _shard_index(self, layout: ParameterLayout, coordinate: MeshCoordinate) -> int:
        if layout.by == "ep":
            return self._expert_rank(coordinate) % self.degrees.expert_parallel
        return coordinate.tensor // self._copies(layout)

    def _copies(self, layout: ParameterLayout) -> int:
        """Returns how many ranks of a tensor group have the same shard."""
        return self.degrees.model_parallel // layout.shards

    def _expert_rank(self, coordinate: MeshCoordinate) -> int:
        """Returns the index of a rank in its stage: MoE layers see data, context and tensor axis as one."""
        degrees = self.degrees
        row = coordinate.data * degrees.context_parallel + coordinate.context
        return row * degrees.model_parallel + coordinate.tensor


def model_layout(
    settings: ModelConfig,
    degrees: Degrees,
    *,
    sequence_parallel: bool = False,
    stage_layers: Sequence[Sequence[int]] | None = None,
) -> ModelLayout:
    """Returns the layout of a decoder and its adapters; each degree must divide the sizes that it shards.

    Args:
        settings: The configuration of the unsharded model.
        sequence_parallel: The ranks of a tensor group shard the tokens of the residual stream (use_seq_parallel).
        stage_layers: The layers of each pipeline stage, without MTP modules, which are on the last stage; None: one
            stage.
    """
    spec = model_spec(settings)
    parameters = spec.parameters()
    stages = _stages_of(spec, parameters, stage_layers or [range(spec.num_layers)])
    kv_heads = spec.layers[0].attention.kv_heads
    layouts = {}
    for name, parameter in parameters.items():
        layout = parameter_layout(parameter, kv_heads, degrees, sequence_parallel)
        sums = layout.sums
        if parameter.role == "buffer":
            sums = ()
        elif len(stages[name]) > 1:
            sums = (*sums, "embedding")
        layouts[name] = layout._replace(sums=sums, stages=stages[name])
    return ModelLayout(degrees, layouts)


def parameter_layout(
    parameter: ParameterSpec, kv_heads: int, degrees: Degrees, sequence_parallel: bool
) -> ParameterLayout:
    """Returns how the degrees shard a parameter, and how its gradient is summed within a stage."""
    shape = parameter.shape
    tensor = degrees.model_parallel
    if parameter.sharding == "expert":
        return ParameterLayout(shape, degrees.expert_parallel, by="ep", sums=("expert_dp",))
    shards, dimension = parameter.tensor_shards(tensor, kv_heads)
    sums: tuple[SumGroup, ...] = ("dp_cp",)
    if parameter.sharding == "kv_column" and kv_heads < tensor:
        sums = ("kv", "dp_cp")
    elif tensor > 1 and (parameter.sharding == "partial" or (parameter.sharding == "replicated" and sequence_parallel)):
        sums = ("tp", "dp_cp")
    return ParameterLayout(shape, shards, dimension, sums=sums)


def _stages_of(
    spec: ModelSpec, names: Iterable[str], stage_layers: Sequence[Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Returns the pipeline stages that have each parameter."""
    stages = {name: end_stages(name, spec, len(stage_layers)) for name in names}
    for stage, layers in enumerate(stage_layers):
        prefixes = tuple(layer_prefix(layer) for layer in layers)
        stages |= {name: (stage,) for name in stages if name.startswith(prefixes)}
    return stages


def end_stages(name: str, spec: ModelSpec, count: int) -> tuple[int, ...]:
    """Returns which of `count` pipeline stages have a parameter outside of layers, or one of an MTP module."""
    last = count - 1
    if name == EMBEDDING:
        if last and (spec.mtp_modules or spec.tied):  # the modules look tokens up on the last stage
            return (0, last)
        return (0,)
    if name == MAPPING_IN:
        return (0,)
    return (last,)
