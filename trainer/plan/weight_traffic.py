"""The collectives of a step for weights and their gradients: sums, gathers of shared weights, and updates."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.config import Config
from trainer.config.checks.parallel import (
    micro_batches_per_step,
    parallel_degrees,
    shard_threshold_bytes,
    sharding_ranks,
    shards_optimizer,
    zero_level,
)
from trainer.config.recompute import recomputed_parts
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import ModelSpec
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, MAPPING_IN, MAPPING_OUT, is_buffer, is_expert, norm_bias
from trainer.optim.freeze import trained_shapes
from trainer.optim.groups import parameter_groups
from trainer.parallel.layout import SHARD_GROUPS, SUM_GROUPS, ModelLayout, SumGroup
from trainer.parallel.mesh import MeshCoordinate
from trainer.parallel.sharding import BUCKET_BYTES, FLOAT32_BYTES, Collective, buckets, shard_range
from trainer.parallel.world import World
from trainer.plan.division import model_layout_for

_MODULE_NORM = "shared_head.norm.weight"


class Call(NamedTuple):
    """`times` calls of one collective, each with `input_bytes` of this rank."""

    group: str
    what: str
    kind: Collective
    input_bytes: int
    times: int
    item_bytes: int = FLOAT32_BYTES  # bytes of a number


def head_numbers(config: Config) -> int:
    """Returns how many numbers of each token tensor-parallel ranks exchange for the loss.

    They are the largest logit, the sum of exponents and the label's logit. Terms of the loss need the sum of logits.
    """
    return 3 + config.decoder.has_loss_terms


class JobInfo(NamedTuple):
    """The facts that all ranks share."""

    spec: ModelSpec
    layout: ModelLayout
    trained: frozenset[str]
    recomputed: Sequence[str]  # what of each layer the backward pass recomputes
    first: int  # of `ModelSpec.first_reached`
    head_numbers: int  # of `head_numbers`

    @classmethod
    def from_config(cls, config: Config, world: World) -> JobInfo:
        """Collects the facts of a job."""
        spec = model_spec(config.decoder)
        layout = model_layout_for(config, world)
        trained = frozenset(trained_shapes(config))
        return cls(spec, layout, trained, recomputed_parts(config), spec.first_reached(trained), head_numbers(config))


def weight_calls(config: Config, world: World, where: MeshCoordinate, job: JobInfo) -> Iterator[Call]:
    """Yields the calls of a step for the weights of a rank and their gradients."""
    layout = job.layout
    number = micro_batches_per_step(config, parallel_degrees(config, world))
    sizes = {}
    for name in layout.parameters:
        if layout.holds(name, where) and not is_buffer(name):
            sizes[name] = math.prod(layout.shard(name, where).shape)
    trained = {name: size for name, size in sizes.items() if name in job.trained}
    shared = ZeroShards.from_config(config, world, layout, where, sizes)
    scattered = {name for name in trained if name in shared.sizes and shared.level > "level1"}
    yield from _sums_of_gradients(layout, trained, shared, scattered, number)
    if shared.level == "level3":
        yield from _gathered_weights(job, shared, where, number)
    yield from _update_calls(config, layout, shared, trained)


@dataclass
class _Numbers:
    """An array of `size` numbers, as `buckets` takes it."""

    size: int


class ZeroShards(NamedTuple):
    """The shards of parameters among ranks with the same part of the model.

    Attributes:
        level: The result of `zero_level`; empty without sharding.
        sizes: Numbers in this rank's shard, by the names of the sharded parameters.
        has_replicas: Whether other data-parallel ranks have the same shards.
    """

    layout: ModelLayout
    level: str
    sizes: dict[str, int]
    has_replicas: bool = False

    @classmethod
    def from_config(
        cls, config: Config, world: World, layout: ModelLayout, where: MeshCoordinate, sizes: Mapping[str, int]
    ) -> ZeroShards:
        """Computes the shards of the rank at a mesh coordinate from the local sizes of its parameters."""
        if not shards_optimizer(config, world):
            return cls(layout, "", {})
        degrees = layout.degrees
        least = shard_threshold_bytes(config)
        shard_sizes = {}
        sharding = sharding_ranks(config, degrees)
        replicas = sharding * degrees.context_parallel
        replica = where.data % sharding * degrees.context_parallel + where.context
        for name, size in sizes.items():
            group = replicas
            position = replica
            if is_expert(name):
                group = replicas * degrees.model_parallel // degrees.expert_parallel
                position = (replica * degrees.model_parallel + where.tensor) // degrees.expert_parallel
            if 1 < group <= size and size * FLOAT32_BYTES >= least:
                shard = shard_range(size, position, group)
                shard_sizes[name] = shard.stop - shard.start
        return cls(layout, zero_level(config), shard_sizes, sharding < degrees.data_parallel)

    def group(self, name: str) -> str:
        """Returns the group whose ranks shard a parameter."""
        kind: SumGroup = "dp_cp"
        if is_expert(name):
            kind = "expert_dp"
        if self.has_replicas:
            return SHARD_GROUPS[kind][0]
        return kind

    def sums(self, name: str) -> Iterator[SumGroup]:
        """Yields the groups over which the gradient of a parameter is summed, one after the other."""
        for kind in self.layout.parameters[name].sums:
            if self.has_replicas and name in self.sizes:
                yield from SHARD_GROUPS.get(kind, (kind,))
            else:
                yield kind


def _sums_of_gradients(
    layout: ModelLayout, sizes: Mapping[str, int], shared: ZeroShards, scattered: Collection[str], times: int
) -> Iterator[Call]:
    """Yields the sums of gradients: bucket by bucket for each group, and `times` calls for each `scattered` gradient.
    """
    what = "sums of gradients"
    for name in sizes:
        if name in scattered:
            for kind in layout.parameters[name].sums:
                if kind in ("tp", "kv"):
                    yield Call(kind, what, "all_reduce", sizes[name] * FLOAT32_BYTES, times)
            yield Call(shared.group(name), what, "reduce_scatter", sizes[name] * FLOAT32_BYTES, times)
            for kind in shared.sums(name):
                if kind in ("dp_replicas", "expert_replicas"):
                    yield Call(kind, what, "all_reduce", shared.sizes[name] * FLOAT32_BYTES, times)
    for kind in SUM_GROUPS:
        gradients = []
        for name, size in sizes.items():
            if kind not in shared.sums(name):
                continue
            if name not in scattered:
                gradients.append(_Numbers(size))
            elif kind == "embedding":
                gradients.append(_Numbers(shared.sizes[name]))
        for bucket in buckets(gradients, BUCKET_BYTES):
            yield Call(kind, what, "all_reduce", sum(one.size for one in bucket) * FLOAT32_BYTES, 1)


def _update_calls(config: Config, layout: ModelLayout, shared: ZeroShards, sizes: Mapping[str, int]) -> Iterator[Call]:
    """Yields the gathers of updated weights, and of the directions of matrices that Muon updates."""
    shapes = {name: layout.parameters[name].shape for name in sizes}
    update_groups = parameter_groups(shapes, config.optimizer)
    by_muon = {name for each in update_groups if each.optimizer == "Muon" for name in each.parameters}
    for name in sizes:
        one = layout.parameters[name]
        if name in by_muon and name in shared.sizes:
            yield Call(shared.group(name), "Muon", "all_gather", shared.sizes[name] * FLOAT32_BYTES, 1)
        if name in by_muon and one.by == "tp" and one.shards > 1:
            yield Call("tp", "Muon", "all_gather", sizes[name] * FLOAT32_BYTES, 1)
    if shared.level not in ("level1", "level2"):
        return
    for group in SUM_GROUPS:
        names = [name for name in sizes if shared.group(name) == group and name not in by_muon]
        updated = sum(shared.sizes.get(name, 0) for name in names)
        yield Call(group, "updated weights", "all_gather", updated * FLOAT32_BYTES, bool(updated))


def _gathered_weights(job: JobInfo, shared: ZeroShards, where: MeshCoordinate, micro_batches: int) -> Iterator[Call]:
    """Yields the gathers of sharded weights before their forward and backward passes."""
    spec = job.spec
    is_last = where.pipeline == shared.layout.degrees.pipeline_stage - 1
    modules = spec.mtp_modules * is_last
    lookups = (where.pipeline == 0) + modules
    looks_up = not job.trained.isdisjoint((EMBEDDING, MAPPING_IN))
    heads = (1 + modules) * is_last
    last_module = spec.num_layers + modules - 1
    uses = {
        EMBEDDING: lookups,  # the gradient of a look-up needs no values
        MAPPING_IN: lookups * (1 + looks_up),
        MAPPING_OUT: 2 * heads,
        FINAL_NORM: 2 * (1 + (modules > 0)),  # of the head, and of what enters the first module
        norm_bias(FINAL_NORM): 2,
    }
    uses[spec.head] = uses.get(spec.head, 0) + 2 * heads
    for name, size in shared.sizes.items():
        times = uses.get(name)
        if times is None:
            layer = int(name.split(".")[2])
            times = 1 + (layer >= job.first)
            if name.endswith(_MODULE_NORM) and layer < last_module:
                times *= 2
        gathers = times * micro_batches
        yield Call(shared.group(name), "weights for their use", "all_gather", size * FLOAT32_BYTES, gathers)
