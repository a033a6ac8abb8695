"""Which part of each parameter a rank holds, over which ranks its gradient is summed, and who counts it. Pure Python.

Tensor parallelism cuts as Megatron-LM does (Shoeybi et al. 2019, section 3): q, k, v, gate and up by their outputs, o
and down by their inputs, embedding and head by the vocabulary. Where there are fewer heads of keys and values than
ranks, neighbouring ranks hold the same head. Of latent attention, what all heads share is whole on every rank; what
makes queries, keys and values of a head is cut by heads. Expert parallelism cuts the stacks of experts; an expert is
whole on its rank.

The gradient of a parameter that is whole on every rank of a tensor group is either the same on all of them, or each
rank has a part of it, to be summed over the group. A rank has a part where it computes with heads or columns of its own
(norms of queries and keys, one of the matrices of an adapter), or with token rows of its own: what is next to the
residual stream with sequence parallelism (Korthikanti et al. 2022, section 4.2), and what is next to a router always,
because the ranks of a tensor group share the tokens for the experts.
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
    from trainer.config import ModelConfig

SumGroup = Literal["tp", "kv", "dp_cp", "expert_dp", "embedding"]
"""Ranks over which a gradient is summed: those of a tensor group; those of it that hold the same key and value head;
all ranks of a stage with the same tensor coordinate; those of a stage with the same experts; the stages that hold the
embedding. They are fields of `trainer.parallel.process_groups.ProcessGroups`, in the order of the sums."""
SUM_GROUPS: tuple[SumGroup, ...] = get_args(SumGroup)


class ParameterLayout(NamedTuple):
    """How one parameter is divided.

    Attributes:
        shape: Of the whole.
        shards: Parts that it is cut into, which differ by one row at most; 1: every rank of its stages holds the whole.
        dimension: The one that is cut.
        by: The axis whose ranks hold the parts: part p is held by as many neighbours as the axis has ranks per part.
        sums: The groups over which its gradient is summed, one after the other. Empty for a buffer.
        stages: The pipeline stages that hold it.
    """

    shape: tuple[int, ...]
    shards: int = 1
    dimension: int = 0
    by: Literal["tp", "ep"] = "tp"
    sums: tuple[SumGroup, ...] = ("dp_cp",)
    stages: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class ModelLayout:
    """How the parameters of a model are divided among ranks; made by `model_layout`.

    Attributes:
        parameters: By name, in forward order.
    """

    degrees: Degrees
    parameters: Mapping[str, ParameterLayout]

    def holds(self, name: str, where: MeshCoordinate) -> bool:
        """Whether the stage of a rank has this parameter."""
        return where.pipeline in self.parameters[name].stages

    def shard(self, name: str, where: MeshCoordinate) -> Shard:
        """The part of a parameter that a rank of one of its stages holds."""
        one = self.parameters[name]
        shape = list(one.shape)
        start = [0] * len(one.shape)
        if one.shards > 1:
            own = shard_range(one.shape[one.dimension], self._part(one, where), one.shards)
            start[one.dimension] = own.start
            shape[one.dimension] = own.stop - own.start
        return Shard(tuple(start), tuple(shape))

    def shard_spec(self, name: str, where: MeshCoordinate) -> ShardSpec:
        """`shard`, as a part of the whole."""
        return ShardSpec(self.parameters[name].shape, self.shard(name, where))

    def local_shapes(self, where: MeshCoordinate) -> dict[str, tuple[int, ...]]:
        """Shapes of what a rank holds, in forward order."""
        held = (name for name, one in self.parameters.items() if where.pipeline in one.stages)
        return {name: self.shard(name, where).shape for name in held}

    def is_first_holder(self, name: str, where: MeshCoordinate, sharded: bool = False) -> bool:
        """Whether this rank is the first of those that hold this part: norms count its gradient, and it is the one that
        writes the part to a checkpoint.

        Args:
            sharded: The ranks over which the gradient is summed last (dp_cp or expert_dp) each hold a range of the part
                (ZeRO): each of them counts its own.
        """
        one = self.parameters[name]
        if where.pipeline != one.stages[0]:
            return False
        if one.by == "ep":
            return sharded or self._expert_rank(where) < self.degrees.expert_parallel
        return where.tensor % self._copies(one) == 0 and (sharded or not (where.data or where.context))

    def _part(self, one: ParameterLayout, where: MeshCoordinate) -> int:
        if one.by == "ep":
            return self._expert_rank(where) % self.degrees.expert_parallel
        return where.tensor // self._copies(one)

    def _copies(self, one: ParameterLayout) -> int:
        """Ranks of a tensor group that hold the same part."""
        return self.degrees.model_parallel // one.shards

    def _expert_rank(self, where: MeshCoordinate) -> int:
        """Number of a rank in its stage: layers with experts see data, context and tensor axis as one."""
        degrees = self.degrees
        return (where.data * degrees.context_parallel + where.context) * degrees.model_parallel + where.tensor


def model_layout(
    settings: ModelConfig,
    degrees: Degrees,
    *,
    sequence_parallel: bool = False,
    stage_layers: Sequence[Sequence[int]] | None = None,
) -> ModelLayout:
    """The layout of a decoder and its adapters; the degrees divide what they cut.

    Args:
        settings: Those of the whole model.
        sequence_parallel: The ranks of a tensor group share the token rows of the residual stream (use_seq_parallel).
        stage_layers: The layers of each pipeline stage, without multi-token prediction modules, which the last stage
            has; None: one stage.
    """
    spec = model_spec(settings)
    parameters = spec.parameters()
    stages = _stages_of(spec, parameters, stage_layers or [range(spec.num_layers)])
    kv_heads = spec.layers[0].attention.kv_heads
    layouts = {}
    for name, parameter in parameters.items():
        layout = _parameter_layout(parameter, kv_heads, degrees, sequence_parallel)
        sums = layout.sums
        if parameter.role == "buffer":
            sums = ()
        elif len(stages[name]) > 1:
            sums = (*sums, "embedding")
        layouts[name] = layout._replace(sums=sums, stages=stages[name])
    return ModelLayout(degrees, layouts)


def _parameter_layout(
    parameter: ParameterSpec, kv_heads: int, degrees: Degrees, sequence_parallel: bool
) -> ParameterLayout:
    """Returns how the degrees cut a parameter, and how its gradient is summed within a stage."""
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
    """Returns the pipeline stages that hold each parameter: by default the last one, which has final norm and head."""
    last = len(stage_layers) - 1
    found = dict.fromkeys(names, (last,))
    for stage, layers in enumerate(stage_layers):
        prefixes = tuple(layer_prefix(layer) for layer in layers)
        found |= {name: (stage,) for name in found if prefixes and name.startswith(prefixes)}
    # Multi-token prediction modules look tokens up on the last stage.
    shared = last and (spec.mtp_modules or spec.tied)
    if shared:
        found[EMBEDDING] = (0, last)
    else:
        found[EMBEDDING] = (0,)
    return found | {name: (0,) for name in found if name == MAPPING_IN}
