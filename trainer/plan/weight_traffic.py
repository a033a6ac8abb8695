"""The collectives of a step for weights and their gradients: sums, gathers of sharded weights, and updates."""

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
_SUMS = "sums of gradients"


class Call(NamedTuple):
    """`times` calls of one collective, each with `input_bytes` of this rank."""

    group: str
    what: str
    kind: Collective
    input_bytes: int
    times: int
    item_bytes: int = FLOAT32_BYTES  # bytes of a number


def loss_floats_per_token(config: Config) -> int:
    """Returns how many floats of each token tensor-parallel ranks exchange for the loss.

    They are the largest logit, the sum of exponents and the label's logit. Terms of the loss need the sum of logits.
    """
    return 3 + config.decoder.has_loss_terms


class JobInfo(NamedTuple):
    """The facts that all ranks share."""

    spec: ModelSpec
    layout: ModelLayout
    trained: frozenset[str]
    recomputed: Sequence[str]  # what of each layer the backward pass recomputes
    first: int  # layer with a backward pass; -1: gradients reach the embedding; see `ModelSpec.first_reached`
    loss_floats_per_token: int  # that tensor-parallel ranks exchange

    @classmethod
    def from_config(cls, config: Config, world: World) -> JobInfo:
        """Collects the facts of a job."""
        spec = model_spec(config.decoder)
        layout = model_layout_for(config, world)
        trained = frozenset(trained_shapes(config))
        first = spec.first_reached(trained)
        return cls(spec, layout, trained, recomputed_parts(config), first, loss_floats_per_token(config))


def weight_calls(
    config: Config, world: World, coordinate: MeshCoordinate, job: JobInfo, *, on_host: bool
) -> Iterator[Call]:
    """Yields the calls of a step for the weights of a rank and their gradients.

    Args:
        on_host: Whether the job runs on CPUs, where gradients are summed after the backward pass.
    """
    layout = job.layout
    degrees = parallel_degrees(config, world)
    micro_batches = micro_batches_per_step(config, degrees)
    sizes = {}
    for name in layout.parameters:
        if layout.holds(name, coordinate) and not is_buffer(name):
            sizes[name] = math.prod(layout.shard(name, coordinate).shape)
    trained = {name: size for name, size in sizes.items() if name in job.trained}
    zero = ZeroShards.from_config(config, world, layout, coordinate, sizes)
    if on_host:
        yield from _sums_on_host(trained, zero, micro_batches)
    elif zero.level > "level1" and degrees.pipeline_stage == 1:
        yield from _sums_on_device(trained, zero, micro_batches)
    else:
        yield from _sums_on_device(trained, zero, 1)
    if zero.level == "level3":
        yield from _gathered_weights(job, zero, coordinate, micro_batches)
    yield from _update_calls(config, zero, trained)


@dataclass
class _Gradient:
    """The elements of a gradient on this rank, as `buckets` takes it, and those in the rank's shard."""

    size: int
    shard_size: int


class ZeroShards(NamedTuple):
    """The shards of parameters among ranks with the same part of the model.

    Attributes:
        layout: How ranks share the parameters of all stages.
        level: The result of `zero_level`; empty without sharding.
        sizes: Elements of this rank's shard, by the names of the sharded parameters.
        has_replicas: Whether other data-parallel ranks have the same shards.
    """

    layout: ModelLayout
    level: str
    sizes: dict[str, int]
    has_replicas: bool = False

    @classmethod
    def from_config(
        cls, config: Config, world: World, layout: ModelLayout, coordinate: MeshCoordinate, sizes: Mapping[str, int]
    ) -> ZeroShards:
        """Computes the shards of the rank at a mesh coordinate from the local sizes of its parameters."""
        if not shards_optimizer(config, world):
            return cls(layout, "", {})
        degrees = layout.degrees
        least = shard_threshold_bytes(config)
        shard_sizes = {}
        sharding = sharding_ranks(config, degrees)
        replicas = sharding * degrees.context_parallel
        replica = coordinate.data % sharding * degrees.context_parallel + coordinate.context
        for name, size in sizes.items():
            group = replicas
            position = replica
            if is_expert(name):
                group = replicas * degrees.model_parallel // degrees.expert_parallel
                position = (replica * degrees.model_parallel + coordinate.tensor) // degrees.expert_parallel
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


def _sums_on_device(trained: Mapping[str, int], zero: ZeroShards, times: int) -> Iterator[Call]:
    """Yields the sums of gradients during the backward pass, bucket by bucket over one group after the other.

    Args:
        trained: Sizes on this rank of the trained parameters.
        times: Sums of each gradient in a step.
    """
    alike: dict[tuple[tuple[SumGroup, ...], str], list[_Gradient]] = {}
    for name, size in trained.items():
        scatters_over = ""
        if name in zero.sizes:
            scatters_over = zero.group(name)
        key = tuple(zero.sums(name)), scatters_over
        alike.setdefault(key, []).append(_Gradient(size, zero.sizes.get(name, size)))
    for (groups, scatters_over), gradients in alike.items():
        for bucket in buckets(gradients, BUCKET_BYTES):
            size = sum(each.size for each in bucket)
            for group in groups:
                if group == scatters_over:
                    yield Call(group, _SUMS, "reduce_scatter", size * FLOAT32_BYTES, times)
                    size = sum(each.shard_size for each in bucket)
                else:
                    yield Call(group, _SUMS, "all_reduce", size * FLOAT32_BYTES, times)


def _sums_on_host(trained: Mapping[str, int], zero: ZeroShards, micro_batches: int) -> Iterator[Call]:
    """Yields the sums of gradients on CPUs: one by one in each micro-batch those of which a rank keeps its shard, and
    bucket by bucket after the last micro-batch the others.

    Args:
        trained: Sizes on this rank of the trained parameters.
    """
    scattered: Collection[str] = ()
    if zero.level > "level1":
        scattered = trained.keys() & zero.sizes.keys()
    for name in trained:
        if name not in scattered:
            continue
        size = trained[name]
        for group in zero.sums(name):
            if group == zero.group(name):
                yield Call(group, _SUMS, "reduce_scatter", size * FLOAT32_BYTES, micro_batches)
                size = zero.sizes[name]
            elif group != "embedding":
                yield Call(group, _SUMS, "all_reduce", size * FLOAT32_BYTES, micro_batches)
    for group in SUM_GROUPS:
        gradients = []
        for name, size in trained.items():
            if group not in zero.sums(name):
                continue
            if name not in scattered:
                gradients.append(_Gradient(size, size))
            elif group == "embedding":
                gradients.append(_Gradient(zero.sizes[name], zero.sizes[name]))
        for bucket in buckets(gradients, BUCKET_BYTES):
            yield Call(group, _SUMS, "all_reduce", sum(each.size for each in bucket) * FLOAT32_BYTES, 1)


def _update_calls(config: Config, zero: ZeroShards, trained: Mapping[str, int]) -> Iterator[Call]:
    """Yields the gathers of updated weights, and of the directions of matrices that Muon updates."""
    shapes = {name: zero.layout.parameters[name].shape for name in trained}
    update_groups = parameter_groups(shapes, config.optimizer)
    by_muon = {name for each in update_groups if each.optimizer == "Muon" for name in each.parameters}
    for name in trained:
        one = zero.layout.parameters[name]
        if name in by_muon and name in zero.sizes:
            yield Call(zero.group(name), "Muon", "all_gather", zero.sizes[name] * FLOAT32_BYTES, 1)
        if name in by_muon and one.by == "tp" and one.shards > 1:
            yield Call("tp", "Muon", "all_gather", trained[name] * FLOAT32_BYTES, 1)
    if zero.level not in ("level1", "level2"):
        return
    for group in SUM_GROUPS:
        names = [name for name in trained if zero.group(name) == group and name not in by_muon]
        updated = sum(zero.sizes.get(name, 0) for name in names)
        yield Call(group, "updated weights", "all_gather", updated * FLOAT32_BYTES, bool(updated))


def _gathered_weights(job: JobInfo, zero: ZeroShards, coordinate: MeshCoordinate, micro_batches: int) -> Iterator[Call]:
    """Yields the gathers of sharded weights before their forward and backward passes."""
    spec = job.spec
    is_last = coordinate.pipeline == zero.layout.degrees.pipeline_stage - 1
    modules = spec.mtp_modules * is_last
    lookups = (coordinate.pipeline == 0) + modules
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
    for name, size in zero.sizes.items():
        times = uses.get(name)
        if times is None:
            layer = int(name.split(".")[2])
            times = 1 + (layer >= job.first)
            if name.endswith(_MODULE_NORM) and layer < last_module:
                times *= 2
        gathers = times * micro_batches
        yield Call(zero.group(name), "weights for their use", "all_gather", size * FLOAT32_BYTES, gathers)
