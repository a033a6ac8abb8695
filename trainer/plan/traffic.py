"""How many bytes a rank sends to others in an optimizer step of explicit mode, by group and purpose.

Counted as the code calls the collectives: of each micro-batch forward, backward, and once more forward what is
recomputed; of each step the sums of gradients and the gathers of shared state. On a CPU each number is that of the
bytes that go to other processes. On a device it is what a ring sends. How many rows the experts exchange is known only
in the run: theirs is the mean of an even routing. Not counted: the losses, token counts and norms of a step, some
hundred bytes for each other rank, and evaluations.

Legend: N tokens of a micro-batch on a rank, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainer.config.checks.degrees import ulysses_degree
from trainer.config.checks.parallel import (
    micro_batches_per_step,
    parallel_degrees,
    runs_semi_auto,
    shard_threshold_bytes,
    sharding_ranks,
    shards_optimizer,
    zero_level,
)
from trainer.config.recompute import recomputed_parts
from trainer.config.stages import chunk_layers
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD, MAPPING_IN, MAPPING_OUT, is_buffer, is_expert
from trainer.models.spec.saved import logit_rows
from trainer.models.spec.sublayers import attention_spec
from trainer.ops.select import precision_of
from trainer.optim.freeze import trained_shapes
from trainer.optim.groups import parameter_groups
from trainer.parallel.layout import SHARD_GROUPS, SUM_GROUPS, ModelLayout, SumGroup
from trainer.parallel.mesh import Degrees, Mesh, MeshCoordinate
from trainer.parallel.sharding import BUCKET_BYTES, FLOAT32_BYTES, Collective, buckets, bytes_sent, shard_range
from trainer.plan.division import fullest_rank, micro_batch_tokens, model_layout_for, rank_groups

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.moe import MoEConfig
    from trainer.parallel.world import World

_MODULE_NORM = "shared_head.norm.weight"
EVEN_ROWS = "rows of experts, if routed evenly"
_COUNT_BYTES = 8  # of the number of rows for an expert


@dataclass(frozen=True)
class CommVolume:
    """The bytes that a rank sends for one purpose by one kind of collective.

    Attributes:
        group: The group's name in `trainer.parallel.process_groups.ProcessGroups`.
        what: The purpose.
        calls: Number of calls in a step.
        bytes: Bytes sent in a step.
    """

    group: str
    what: str
    collective: Collective
    calls: int
    bytes: int


@dataclass(frozen=True)
class TrafficPlan:
    """The communication volume of the rank that sends most.

    Attributes:
        stage: Its pipeline stage.
        sent: Its volumes by group, purpose and collective.
        stage_bytes: Total bytes of a rank of each stage.
    """

    stage: int
    sent: tuple[CommVolume, ...]
    stage_bytes: tuple[int, ...]


class _Call(NamedTuple):
    """`times` calls of one collective, each with `input_bytes` of this rank."""

    group: str
    what: str
    kind: Collective
    input_bytes: int
    times: int
    item_bytes: int = FLOAT32_BYTES  # bytes of a number


def traffic_plan(config: Config, world: World, device: str) -> TrafficPlan | None:
    """Returns the communication volume of the busiest rank.

    Returns None for a single process, and in semi-automatic mode, in which MindSpore decides what is sent.
    """
    if world.size == 1 or runs_semi_auto(config, world) or config.classifier is not None:
        return None
    job = _JobInfo.from_config(config, world)
    degrees = parallel_degrees(config, world)
    volumes = []
    for stage in range(degrees.pipeline_stage):
        volumes.append(rank_traffic(config, world, device, fullest_rank(degrees, stage), job))
    totals = [sum(volume.bytes for volume in of_stage) for of_stage in volumes]
    busiest = totals.index(max(totals))
    return TrafficPlan(busiest, volumes[busiest], tuple(totals))


class _JobInfo(NamedTuple):
    """The facts that all ranks share."""

    spec: ModelSpec
    layout: ModelLayout
    trained: frozenset[str]
    recomputed: Sequence[str]  # what of each layer the backward pass recomputes
    first: int  # of `ModelSpec.first_reached`

    @classmethod
    def from_config(cls, config: Config, world: World) -> _JobInfo:
        """Collects the facts of a job."""
        spec = model_spec(config.decoder)
        layout = model_layout_for(config, world)
        trained = frozenset(trained_shapes(config))
        return cls(spec, layout, trained, recomputed_parts(config), spec.first_reached(trained))


def rank_traffic(
    config: Config, world: World, device: str, where: MeshCoordinate, job: _JobInfo | None = None
) -> tuple[CommVolume, ...]:
    """Returns what one rank sends in a step whose micro-batches all have loss tokens."""
    rank = Mesh(parallel_degrees(config, world)).rank_at(where)
    groups = rank_groups(config, world, rank)
    volumes: dict[tuple[str, str, Collective], tuple[int, int]] = {}
    for call in _calls(config, world, device, where, job or _JobInfo.from_config(config, world)):
        ranks = groups[call.group]
        if not call.times or len(ranks) == 1:
            continue
        position = ranks.index(rank)
        sent = bytes_sent(
            call.kind, call.input_bytes, len(ranks), position, on_host=device == "CPU", item=call.item_bytes
        )
        key = call.group, call.what, call.kind
        calls, total = volumes.get(key, (0, 0))
        volumes[key] = calls + call.times, total + call.times * sent
    return tuple(CommVolume(*key, *values) for key, values in volumes.items())


def _calls(config: Config, world: World, device: str, where: MeshCoordinate, job: _JobInfo) -> Iterator[_Call]:
    layout = job.layout
    degrees = parallel_degrees(config, world)
    number = micro_batches_per_step(config, degrees)
    for call in _micro_batch_calls(config, world, device, where, job):
        yield call._replace(times=call.times * number)
    sizes = {}
    for name in layout.parameters:
        if layout.holds(name, where) and not is_buffer(name):
            sizes[name] = math.prod(layout.shard(name, where).shape)
    trained = {name: size for name, size in sizes.items() if name in job.trained}
    shared = _ZeroShards.from_config(config, world, layout, where, sizes)
    if shared.level > "level1":
        scattered = {name for name in trained if name in shared.sizes}
    else:
        scattered = set()
    yield from _sums_of_gradients(layout, trained, shared, scattered, number)
    if shared.level == "level3":
        yield from _gathered_weights(job, shared, where, number)
    yield from _update_calls(config, layout, shared, trained)


def _micro_batch_calls(
    config: Config, world: World, device: str, where: MeshCoordinate, job: _JobInfo
) -> Iterator[_Call]:
    """Yields the calls of the passes of one micro-batch: all but those for gradients and weights."""
    spec = job.spec
    degrees = parallel_degrees(config, world)
    stages = degrees.pipeline_stage
    is_last = where.pipeline == stages - 1
    if is_last:
        modules = spec.module_layers
    else:
        modules = range(0)
    if stages > 1:
        stage_chunks = chunk_layers(config)
    else:
        stage_chunks = [[list(range(spec.num_layers))]]
    sizes = _MessageSizes.from_config(config, world, device)
    looks_up = not job.trained.isdisjoint((EMBEDDING, MAPPING_IN))
    for layer in [*(layer for chunk in stage_chunks[where.pipeline] for layer in chunk), *modules]:
        part = job.recomputed[layer]
        passes = _Passes(layer >= job.first, part, sizes.on_host or config.context.mode == 0)
        yield from _tensor_calls(spec.layers[layer], sizes, passes)
        yield from _context_calls(config, degrees, sizes, passes)
        mlp = spec.layers[layer].mlp
        if isinstance(mlp, MoeSpec):
            yield from _expert_calls(config, mlp, degrees, sizes, passes)
    lookups = (where.pipeline == 0) + len(modules)
    stream = sizes._replace(width=FLOAT32_BYTES, gradient_width=FLOAT32_BYTES)  # the residual stream
    scatters = looks_up
    if sizes.on_host:
        scatters = EMBEDDING in job.trained
    yield from _leave(stream, "embedding", spec.embedding, lookups, lookups * scatters)
    if is_last:
        head_sizes = sizes
        if sizes.on_host:
            head_sizes = stream
        yield from _head_calls(spec, head_sizes, 1 + len(modules))
    yield from _stage_calls(sizes, spec.hidden, stage_chunks, job.first, where)


def _head_calls(spec: ModelSpec, sizes: _MessageSizes, heads: int) -> Iterator[_Call]:
    """Yields the calls of the head: the ranks exchange three numbers of each token, on a CPU in blocks of rows."""
    what = "head and loss"
    rows = sizes.tokens
    yield from _enter(sizes, what, spec.embedding, heads, heads)
    if sizes.on_host:
        rows = logit_rows(sizes.tokens, -(-spec.vocabulary // sizes.tensor))
    blocks, rest = divmod(sizes.tokens, rows)
    for size, times in ((rows, blocks), (rest, bool(rest))):
        yield _Call("tp", what, "all_gather", 3 * size * FLOAT32_BYTES, heads * times)


class _MessageSizes(NamedTuple):
    """The sizes on which the bytes of a rank's messages depend.

    Attributes:
        attention: The local attention of the rank.
        tokens: N.
        tensor: The tensor-parallel degree.
        shares_rows: Whether sequence parallelism shards the rows of the residual stream.
        width: Bytes of a number that products take.
        gradient_width: Bytes of a number that ranks sum, and of a gradient; on a CPU both are float32.
        on_host: Whether the device is a CPU.
    """

    attention: AttentionSpec
    tokens: int
    tensor: int
    shares_rows: bool
    width: int
    gradient_width: int
    on_host: bool

    @classmethod
    def from_config(cls, config: Config, world: World, device: str) -> _MessageSizes:
        """Computes the sizes of a job's messages on one kind of device."""
        degrees = parallel_degrees(config, world)
        on_host = device == "CPU"
        width = 2
        if precision_of(config, device, world).compute.dtype == "float32":
            width = FLOAT32_BYTES
        gradient_width = width
        if on_host:
            gradient_width = FLOAT32_BYTES
        return cls(
            attention=attention_spec(config.decoder).local(degrees.model_parallel),
            tokens=micro_batch_tokens(config, degrees),
            tensor=degrees.model_parallel,
            shares_rows=config.parallel_config.use_seq_parallel,
            width=width,
            gradient_width=gradient_width,
            on_host=on_host,
        )


class _Passes(NamedTuple):
    """How often a layer is computed.

    Attributes:
        backward: Whether it has a backward pass.
        part: What the backward pass recomputes: "block", a sublayer, or "".
        compiled: Whether it runs in a graph, which leaves out what no gradient needs.
    """

    backward: bool
    part: str
    compiled: bool

    def is_recomputed(self, sublayer: str) -> bool:
        """Returns whether the backward pass recomputes "attention" or "mlp"."""
        return self.backward and self.part in ("block", sublayer)


def _enter(sizes: _MessageSizes, what: str, columns: int, forward: int, backward: int) -> Iterator[_Call]:
    """Yields the calls of `TensorParallel.column_parallel_input`, so many times forward and backward."""
    numbers = sizes.tokens * columns
    if sizes.shares_rows:
        yield _Call("tp", what, "all_gather", numbers // sizes.tensor * sizes.width, forward, sizes.width)
    yield _sum_over_tensor(sizes, what, numbers, backward)


def _leave(sizes: _MessageSizes, what: str, columns: int, forward: int, backward: int) -> Iterator[_Call]:
    """Yields the calls of `TensorParallel.row_parallel_output`, so many times forward and backward."""
    numbers = sizes.tokens * columns
    width = sizes.gradient_width
    yield _sum_over_tensor(sizes, what, numbers, forward)
    if sizes.shares_rows:
        yield _Call("tp", what, "all_gather", numbers // sizes.tensor * width, backward, width)


def _sum_over_tensor(sizes: _MessageSizes, what: str, numbers: int, times: int) -> _Call:
    if sizes.shares_rows:
        kind: Collective = "reduce_scatter"
    else:
        kind = "all_reduce"
    return _Call("tp", what, kind, numbers * sizes.gradient_width, times, sizes.gradient_width)


def _tensor_calls(layer: LayerSpec, sizes: _MessageSizes, passes: _Passes) -> Iterator[_Call]:
    """Yields the tensor-parallel calls of a layer: one before the first matrices of a sublayer and one after the last.
    """
    sublayers = [("attention", layer.attention.gathered_width, layer.attention.post_norm)]
    if isinstance(layer.mlp, MlpSpec):
        sublayers.append(("mlp", layer.mlp.hidden, layer.mlp.post_norm))
    for sublayer, width, has_norm in sublayers:
        again = passes.is_recomputed(sublayer)
        # No gradient needs the result of what is computed again, unless something else in the same graph does.
        goes_on = sublayer == "attention" and passes.part == "block" and not layer.is_moe
        leaves_again = again and (goes_on or has_norm or not passes.compiled)
        yield from _enter(sizes, "layers", width, 1 + again, passes.backward)
        yield from _leave(sizes, "layers", layer.attention.hidden, 1 + leaves_again, passes.backward)


def _context_calls(config: Config, degrees: Degrees, sizes: _MessageSizes, passes: _Passes) -> Iterator[_Call]:
    """Yields the calls of context parallelism; see `trainer.arrays.attention.context`.

    The ranks of a ring gather keys and values; those of Ulysses attention exchange heads for tokens.
    """
    what = "keys and values"
    attention = sizes.attention
    ranks = degrees.context_parallel
    width = sizes.width
    gradient_width = sizes.gradient_width
    ulysses = 1
    if sizes.on_host:
        ulysses = min(ranks, ulysses_degree(config))
    if 1 < ulysses < ranks:
        by_ring = "ring"
        by_heads = "ulysses"
    else:
        by_ring = "cp"
        by_heads = "cp"
    tokens = ulysses * sizes.tokens
    forward = 1 + passes.is_recomputed("attention")
    kv_heads = max(1, attention.kv_heads // ulysses)
    keys = kv_heads * attention.head_size
    values = kv_heads * attention.value_size
    if ulysses > 1:
        heads = attention.heads // ulysses
        queries = heads * attention.head_size
        results = heads * attention.value_size
        # The gradient of the results is what products take next.
        for columns, back in ((queries, gradient_width), (keys, gradient_width), (values, gradient_width),
                              (results, width)):  # fmt: skip
            yield _Call(by_heads, what, "all_to_all", tokens * columns * width, forward, width)
            yield _Call(by_heads, what, "all_to_all", tokens * columns * back, passes.backward, back)
    if ulysses == ranks:
        return
    messages = [keys + values]
    if sizes.on_host:  # a device sends both together
        messages = [keys, values]
    for columns in messages:
        yield _Call(by_ring, what, "all_gather", tokens * columns * width, forward, width)
        gradient_bytes = ranks // ulysses * tokens * columns * gradient_width
        yield _Call(by_ring, what, "reduce_scatter", gradient_bytes, passes.backward, gradient_width)


def _expert_calls(
    config: Config, mlp: MoeSpec, degrees: Degrees, sizes: _MessageSizes, passes: _Passes
) -> Iterator[_Call]:
    """Yields the calls of an MoE layer; see `trainer.arrays.moe.dispatch` and `trainer.ops.dispatch`.

    The ranks of a tensor group share the tokens for the experts. On a CPU routed experts take and return float32.
    """
    moe = config.decoder.experts
    assert moe is not None  # the layer has experts
    hidden = mlp.hidden
    local_tokens = sizes.tokens // sizes.tensor
    forward = 1 + passes.is_recomputed("mlp")
    yield from _router_calls(config, moe, degrees, local_tokens, forward)
    width = sizes.gradient_width
    if not sizes.shares_rows:
        yield _Call("tp", "rows of experts", "all_gather", local_tokens * hidden * FLOAT32_BYTES, passes.backward)
        yield _Call("tp", "rows of experts", "all_gather", local_tokens * hidden * width, forward, width)
    if mlp.shared_width:
        by_rows = sizes._replace(shares_rows=True)
        yield from _enter(by_rows, "shared experts", hidden, forward, passes.backward)
        yield from _leave(by_rows, "shared experts", hidden, forward, passes.backward)
    chosen = mlp.chosen
    row = hidden * width
    if moe.moe_token_dispatcher_type == "allgather":
        what = "tokens of experts"
        ranks = degrees.expert_parallel
        choice_bytes = local_tokens * chosen * FLOAT32_BYTES
        yield _Call("ep", what, "all_gather", choice_bytes, 2 * forward)  # experts, and gates
        yield _Call("ep", what, "reduce_scatter", ranks * choice_bytes, passes.backward)
        yield _Call("ep", what, "all_gather", local_tokens * row, forward + passes.backward, width)
        yield _Call("ep", what, "reduce_scatter", ranks * local_tokens * row, forward + passes.backward, width)
        return
    group = degrees.model_parallel * degrees.context_parallel
    capacity = moe.capacity(local_tokens * group)
    expert_rows = chosen * local_tokens
    if capacity is not None:
        expert_rows = min(expert_rows, capacity * moe.expert_num // group)
    yield _Call("ep", "counts of rows", "all_to_all", moe.expert_num * _COUNT_BYTES, forward, _COUNT_BYTES)
    yield _Call("ep", EVEN_ROWS, "all_to_all", expert_rows * row, 2 * (forward + passes.backward), width)


def _router_calls(
    config: Config, moe: MoEConfig, degrees: Degrees, local_tokens: int, forward: int
) -> Iterator[_Call]:
    """Yields the calls of a router.

    The ranks of a micro-batch gather the load of each expert for the balance loss. With a capacity they gather the
    choices of each token, and its scores if tokens are dropped by score.
    """
    what = "choices of routers"
    if not moe.balances_step:
        size = config.runner_config.batch_size * moe.expert_num * _COUNT_BYTES
        yield _Call("tp_cp", what, "all_gather", size, forward, _COUNT_BYTES)
    if moe.capacity(local_tokens * degrees.model_parallel * degrees.context_parallel) is not None:
        choices = local_tokens * moe.num_experts_chosen * FLOAT32_BYTES
        yield _Call("tp_cp", what, "all_gather", choices, 1 + (moe.drop_policy == "probability"))


def _stage_calls(
    sizes: _MessageSizes,
    hidden: int,
    stage_chunks: Sequence[Sequence[Sequence[int]]],
    first: int,
    where: MeshCoordinate,
) -> Iterator[_Call]:
    """Yields the messages of a pipeline stage: activations to the next part of the model, gradients to the part before.

    Args:
        first: The result of `ModelSpec.first_reached`: the parts behind that layer send gradients.
    """
    stages = len(stage_chunks)
    chunks = len(stage_chunks[0])
    parts = [stage_chunks[part % stages][part // stages] for part in range(stages * chunks)]
    trained = 0
    if first >= 0:
        trained = next((number for number, layers in enumerate(parts) if first in layers), len(parts) - 1)
    local_parts = [chunk * stages + where.pipeline for chunk in range(chunks)]
    size = sizes.tokens * hidden * FLOAT32_BYTES
    if sizes.shares_rows:
        size //= sizes.tensor
    yield _Call("pp", "activations", "send", size, sum(part < len(parts) - 1 for part in local_parts))
    yield _Call("pp", "their gradients", "send", size, sum(part > trained for part in local_parts))


@dataclass
class _Numbers:
    """An array of `size` numbers, as `buckets` takes it."""

    size: int


class _ZeroShards(NamedTuple):
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
    ) -> _ZeroShards:
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
        if self.has_replicas:
            return SHARD_GROUPS[self._data_group(name)][0]
        return self._data_group(name)

    def sums(self, name: str) -> Iterator[SumGroup]:
        """Yields the groups over which the gradient of a parameter is summed, one after the other."""
        for kind in self.layout.parameters[name].sums:
            if self.has_replicas and name in self.sizes:
                yield from SHARD_GROUPS.get(kind, (kind,))
            else:
                yield kind

    def _data_group(self, name: str) -> SumGroup:
        if is_expert(name):
            return "expert_dp"
        return "dp_cp"


def _sums_of_gradients(
    layout: ModelLayout, sizes: Mapping[str, int], shared: _ZeroShards, scattered: Collection[str], times: int
) -> Iterator[_Call]:
    """Yields the sums of gradients: bucket by bucket for each group, and `times` calls for each `scattered` gradient.
    """
    what = "sums of gradients"
    for name in sizes:
        if name in scattered:
            for kind in layout.parameters[name].sums:
                if kind in ("tp", "kv"):
                    yield _Call(kind, what, "all_reduce", sizes[name] * FLOAT32_BYTES, times)
            yield _Call(shared.group(name), what, "reduce_scatter", sizes[name] * FLOAT32_BYTES, times)
            for kind in shared.sums(name):
                if kind in ("dp_replicas", "expert_replicas"):
                    yield _Call(kind, what, "all_reduce", shared.sizes[name] * FLOAT32_BYTES, times)
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
            yield _Call(kind, what, "all_reduce", sum(one.size for one in bucket) * FLOAT32_BYTES, 1)


def _update_calls(
    config: Config, layout: ModelLayout, shared: _ZeroShards, sizes: Mapping[str, int]
) -> Iterator[_Call]:
    """Yields the gathers of updated weights, and of the directions of matrices that Muon updates."""
    shapes = {name: layout.parameters[name].shape for name in sizes}
    update_groups = parameter_groups(shapes, config.optimizer)
    by_muon = {name for each in update_groups if each.optimizer == "Muon" for name in each.parameters}
    for name in sizes:
        one = layout.parameters[name]
        if name in by_muon and name in shared.sizes:
            yield _Call(shared.group(name), "Muon", "all_gather", shared.sizes[name] * FLOAT32_BYTES, 1)
        if name in by_muon and one.by == "tp" and one.shards > 1:
            yield _Call("tp", "Muon", "all_gather", sizes[name] * FLOAT32_BYTES, 1)
    if shared.level not in ("level1", "level2"):
        return
    for group in SUM_GROUPS:
        names = [name for name in sizes if shared.group(name) == group and name not in by_muon]
        updated = sum(shared.sizes.get(name, 0) for name in names)
        yield _Call(group, "updated weights", "all_gather", updated * FLOAT32_BYTES, bool(updated))


def _gathered_weights(
    job: _JobInfo, shared: _ZeroShards, where: MeshCoordinate, micro_batches: int
) -> Iterator[_Call]:
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
    }
    head = HEAD
    if spec.tied:
        head = EMBEDDING
    uses[head] = uses.get(head, 0) + 2 * heads
    for name, size in shared.sizes.items():
        times = uses.get(name)
        if times is None:
            layer = int(name.split(".")[2])
            times = 1 + (layer >= job.first)
            if name.endswith(_MODULE_NORM) and layer < last_module:
                times *= 2
        gathers = times * micro_batches
        yield _Call(shared.group(name), "weights for their use", "all_gather", size * FLOAT32_BYTES, gathers)
