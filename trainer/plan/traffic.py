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
from trainer.parallel.layout import SUM_GROUPS, ModelLayout
from trainer.parallel.mesh import Degrees, Mesh, MeshCoordinate
from trainer.parallel.sharding import BUCKET_BYTES, FLOAT32_BYTES, Collective, buckets, bytes_sent, shard_range
from trainer.plan.division import fullest_rank, groups_of, layout_of, micro_batch_tokens

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.parallel.world import World

_MODULE_NORM = "shared_head.norm.weight"
EVEN_ROWS = "rows of experts, if routed evenly"
_COUNT_BYTES = 8  # of the number of rows for an expert


@dataclass(frozen=True)
class Traffic:
    """What a rank sends for one purpose by one kind of collective.

    Attributes:
        group: As `trainer.parallel.process_groups.ProcessGroups` names it.
        calls: In a step.
    """

    group: str
    what: str
    collective: Collective
    calls: int
    bytes: int


@dataclass(frozen=True)
class TrafficPlan:
    """That of the rank that sends most.

    Attributes:
        stage: Its pipeline stage.
        stage_bytes: Of a rank of each stage in all.
    """

    stage: int
    sent: tuple[Traffic, ...]
    stage_bytes: tuple[int, ...]


class _Call(NamedTuple):
    """`times` calls of a collective that a rank gives so many bytes each."""

    group: str
    what: str
    kind: Collective
    given: int
    times: int
    item: int = FLOAT32_BYTES  # bytes of a number


def traffic_plan(config: Config, world: World, device: str) -> TrafficPlan | None:
    """None where nothing travels, or MindSpore decides what does: in semi-automatic mode."""
    if world.size == 1 or runs_semi_auto(config, world) or config.classifier is not None:
        return None
    facts = _Facts.of(config, world)
    degrees = parallel_degrees(config, world)
    every = [rank_traffic(config, world, device, fullest_rank(degrees, stage), facts) for stage in
             range(degrees.pipeline_stage)]  # fmt: skip
    totals = [sum(one.bytes for one in found) for found in every]
    stage = totals.index(max(totals))
    return TrafficPlan(stage, every[stage], tuple(totals))


class _Facts(NamedTuple):
    """What all ranks have in common."""

    spec: ModelSpec
    layout: ModelLayout
    trained: frozenset[str]
    again: Sequence[str]  # what of each layer is computed again
    first: int  # of `ModelSpec.first_reached`

    @classmethod
    def of(cls, config: Config, world: World) -> _Facts:
        spec = model_spec(config.decoder)
        trained = frozenset(trained_shapes(config))
        return cls(spec, layout_of(config, world), trained, recomputed_parts(config), spec.first_reached(trained))


def rank_traffic(
    config: Config, world: World, device: str, where: MeshCoordinate, facts: _Facts | None = None
) -> tuple[Traffic, ...]:
    """What one rank sends in a step whose micro-batches all have tokens that count."""
    rank = Mesh(parallel_degrees(config, world)).rank_at(where)
    groups = groups_of(config, world, rank)
    found: dict[tuple[str, str, Collective], tuple[int, int]] = {}
    for call in _calls(config, world, device, where, facts or _Facts.of(config, world)):
        ranks = groups[call.group]
        if not call.times or len(ranks) == 1:
            continue
        place = ranks.index(rank)
        sent = bytes_sent(call.kind, call.given, len(ranks), place, on_host=device == "CPU", item=call.item)
        key = call.group, call.what, call.kind
        calls, total = found.get(key, (0, 0))
        found[key] = calls + call.times, total + call.times * sent
    return tuple(Traffic(*key, *values) for key, values in found.items())


def _calls(config: Config, world: World, device: str, where: MeshCoordinate, facts: _Facts) -> Iterator[_Call]:
    layout = facts.layout
    degrees = parallel_degrees(config, world)
    number = micro_batches_per_step(config, degrees)
    for call in _calls_of_micro_batch(config, world, device, where, facts):
        yield call._replace(times=call.times * number)
    held = [name for name in layout.parameters if layout.holds(name, where) and not is_buffer(name)]
    sizes = {name: math.prod(layout.shard(name, where).shape) for name in held}
    trained = {name: size for name, size in sizes.items() if name in facts.trained}
    shared = _Shared.of(config, world, layout, where, sizes)
    if shared.level > "level1":
        scattered = {name for name in trained if name in shared.ranges}
    else:
        scattered = set()
    yield from _sums_of_gradients(layout, trained, shared, scattered, number)
    if shared.level == "level3":
        yield from _gathered_weights(facts, shared, where, number)
    yield from _calls_of_update(config, layout, shared, trained)


def _calls_of_micro_batch(
    config: Config, world: World, device: str, where: MeshCoordinate, facts: _Facts
) -> Iterator[_Call]:
    """All but those of gradients and weights."""
    spec = facts.spec
    degrees = parallel_degrees(config, world)
    stages = degrees.pipeline_stage
    is_last = where.pipeline == stages - 1
    if is_last:
        modules = spec.module_layers
    else:
        modules = range(0)
    if stages > 1:
        every = chunk_layers(config)
    else:
        every = [[list(range(spec.num_layers))]]
    sizes = _Sizes.of(config, world, device, where)
    looks_up = not facts.trained.isdisjoint((EMBEDDING, MAPPING_IN))
    for layer in [*(layer for chunk in every[where.pipeline] for layer in chunk), *modules]:
        part = facts.again[min(layer, spec.num_layers - 1)]
        passes = _Passes(layer >= facts.first, part, sizes.on_host or config.context.mode == 0)
        yield from _tensor_calls(spec.layers[layer], sizes, passes)
        yield from _context_calls(config, degrees, sizes, passes)
        mlp = spec.layers[layer].mlp
        if isinstance(mlp, MoeSpec):
            yield from _expert_calls(config, mlp, degrees, sizes, passes)
    lookups = (where.pipeline == 0) + len(modules)
    stream = sizes._replace(width=FLOAT32_BYTES, gradient_width=FLOAT32_BYTES)  # the residual stream
    scatters = looks_up
    if sizes.on_host:
        scatters = EMBEDDING in facts.trained
    yield from _leave(stream, "embedding", spec.embedding, lookups, lookups * scatters)
    if is_last:
        yield from _head_calls(spec, stream if sizes.on_host else sizes, 1 + len(modules))
    yield from _stage_calls(sizes, spec.hidden, every, facts.first, where)


def _head_calls(spec: ModelSpec, sizes: _Sizes, heads: int) -> Iterator[_Call]:
    """The ranks exchange three numbers of each token; on a CPU of some rows after the others."""
    what = "head and loss"
    rows = sizes.tokens
    yield from _enter(sizes, what, spec.embedding, heads, heads)
    if sizes.on_host:
        rows = logit_rows(sizes.tokens, -(-spec.vocabulary // sizes.tensor))
    blocks, rest = divmod(sizes.tokens, rows)
    for size, times in ((rows, blocks), (rest, bool(rest))):
        yield _Call("tp", what, "all_gather", 3 * size * FLOAT32_BYTES, heads * times)


class _Sizes(NamedTuple):
    """What the sizes of a rank's messages depend on.

    Attributes:
        attention: That of the rank.
        tokens: N.
        tensor: Ranks of its tensor group.
        shares_rows: Whether these share the token rows of the residual stream.
        width: Bytes of a number that products take.
        gradient_width: Of a number that ranks sum, and of a gradient: on a CPU both are float32.
        on_host: On a CPU.
    """

    attention: AttentionSpec
    tokens: int
    tensor: int
    shares_rows: bool
    width: int
    gradient_width: int
    on_host: bool

    @classmethod
    def of(cls, config: Config, world: World, device: str, where: MeshCoordinate) -> _Sizes:
        degrees = parallel_degrees(config, world)
        on_host = device == "CPU"
        width = 2
        if precision_of(config, device, world).compute.dtype == "float32":
            width = FLOAT32_BYTES
        return cls(
            attention=attention_spec(config.decoder).local(degrees.model_parallel),
            tokens=micro_batch_tokens(config, degrees),
            tensor=degrees.model_parallel,
            shares_rows=config.parallel_config.use_seq_parallel,
            width=width,
            gradient_width=FLOAT32_BYTES if on_host else width,
            on_host=on_host,
        )


class _Passes(NamedTuple):
    """How often a layer is computed.

    Attributes:
        backward: Whether it has a backward pass.
        part: What of it is computed again: "block", a sublayer, or "".
        compiled: In a graph, which leaves out what no gradient needs.
    """

    backward: bool
    part: str
    compiled: bool

    def again(self, sublayer: str) -> bool:
        return self.backward and self.part in ("block", sublayer)


def _enter(sizes: _Sizes, what: str, columns: int, forward: int, backward: int) -> Iterator[_Call]:
    """See `TensorParallel.column_parallel_input`; of so many columns, so many times."""
    numbers = sizes.tokens * columns
    if sizes.shares_rows:
        yield _Call("tp", what, "all_gather", numbers // sizes.tensor * sizes.width, forward, sizes.width)
    yield _sum_over_tensor(sizes, what, numbers, backward)


def _leave(sizes: _Sizes, what: str, columns: int, forward: int, backward: int) -> Iterator[_Call]:
    """See `TensorParallel.row_parallel_output`."""
    numbers = sizes.tokens * columns
    width = sizes.gradient_width
    yield _sum_over_tensor(sizes, what, numbers, forward)
    if sizes.shares_rows:
        yield _Call("tp", what, "all_gather", numbers // sizes.tensor * width, backward, width)


def _sum_over_tensor(sizes: _Sizes, what: str, numbers: int, times: int) -> _Call:
    if sizes.shares_rows:
        kind: Collective = "reduce_scatter"
    else:
        kind = "all_reduce"
    return _Call("tp", what, kind, numbers * sizes.gradient_width, times, sizes.gradient_width)


def _tensor_calls(layer: LayerSpec, sizes: _Sizes, passes: _Passes) -> Iterator[_Call]:
    """A rank enters before the first matrices of a sublayer and leaves after the last one."""
    sublayers = [("attention", layer.attention.gathered_width, layer.attention.post_norm)]
    if isinstance(layer.mlp, MlpSpec):
        sublayers.append(("mlp", layer.mlp.hidden, layer.mlp.post_norm))
    for sublayer, width, has_norm in sublayers:
        again = passes.again(sublayer)
        # No gradient needs the result of what is computed again, unless something else in the same graph does.
        goes_on = sublayer == "attention" and passes.part == "block" and not layer.is_moe
        leaves_again = again and (goes_on or has_norm or not passes.compiled)
        yield from _enter(sizes, "layers", width, 1 + again, passes.backward)
        yield from _leave(sizes, "layers", layer.attention.hidden, 1 + leaves_again, passes.backward)


def _context_calls(config: Config, degrees: Degrees, sizes: _Sizes, passes: _Passes) -> Iterator[_Call]:
    """The ranks of a ring gather keys and values, those of Ulysses attention exchange heads for tokens: see
    `trainer.arrays.attention.context`."""
    what = "keys and values"
    own = sizes.attention
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
    forward = 1 + passes.again("attention")
    kv_heads = own.kv_heads
    keys, values = (max(1, kv_heads // ulysses) * size for size in (own.head_size, own.value_size))
    if ulysses > 1:
        queries, results = (own.heads // ulysses * size for size in (own.head_size, own.value_size))
        # The gradient of the results is what products take next.
        for columns, back in ((queries, gradient_width), (keys, gradient_width), (values, gradient_width),
                              (results, width)):  # fmt: skip
            yield _Call(by_heads, what, "all_to_all", tokens * columns * width, forward, width)
            yield _Call(by_heads, what, "all_to_all", tokens * columns * back, passes.backward, back)
    if ulysses == ranks:
        return
    # On a device both travel together.
    for columns in (keys, values) if sizes.on_host else (keys + values,):
        yield _Call(by_ring, what, "all_gather", tokens * columns * width, forward, width)
        given = ranks // ulysses * tokens * columns * gradient_width
        yield _Call(by_ring, what, "reduce_scatter", given, passes.backward, gradient_width)


def _expert_calls(
    config: Config, mlp: MoeSpec, degrees: Degrees, sizes: _Sizes, passes: _Passes
) -> Iterator[_Call]:
    """The ranks of a tensor group share the tokens for the experts; see `trainer.arrays.moe.dispatch` and
    `trainer.ops.dispatch` too. On a CPU routed experts take and give float32."""
    moe = config.decoder.experts
    hidden = mlp.hidden
    own = sizes.tokens // sizes.tensor
    forward = 1 + passes.again("mlp")
    yield from _router_calls(config, degrees, own, forward)
    width = sizes.gradient_width
    if not sizes.shares_rows:
        yield _Call("tp", "rows of experts", "all_gather", own * hidden * FLOAT32_BYTES, passes.backward)
        yield _Call("tp", "rows of experts", "all_gather", own * hidden * width, forward, width)
    if mlp.shared_width:
        rows = sizes._replace(shares_rows=True)
        yield from _enter(rows, "shared experts", hidden, forward, passes.backward)
        yield from _leave(rows, "shared experts", hidden, forward, passes.backward)
    chosen = mlp.chosen
    row = hidden * width
    if moe.moe_token_dispatcher_type == "allgather":
        what = "tokens of experts"
        ranks = degrees.expert_parallel
        yield _Call("ep", what, "all_gather", own * chosen * FLOAT32_BYTES, 2 * forward)  # experts, and gates
        yield _Call("ep", what, "reduce_scatter", ranks * own * chosen * FLOAT32_BYTES, passes.backward)
        yield _Call("ep", what, "all_gather", own * row, forward + passes.backward, width)
        yield _Call("ep", what, "reduce_scatter", ranks * own * row, forward + passes.backward, width)
        return
    group = degrees.model_parallel * degrees.context_parallel
    capacity = moe.capacity(own * group)
    if capacity is None:
        rows = chosen * own
    else:
        rows = min(chosen * own, capacity * moe.expert_num // group)
    yield _Call("ep", "counts of rows", "all_to_all", moe.expert_num * _COUNT_BYTES, forward, _COUNT_BYTES)
    yield _Call("ep", EVEN_ROWS, "all_to_all", rows * row, 2 * (forward + passes.backward), width)


def _router_calls(config: Config, degrees: Degrees, own: int, forward: int) -> Iterator[_Call]:
    """What the ranks of a micro-batch tell each other of their tokens: the load of each expert, for the balance loss;
    with a capacity the choices of each token, and where the best ones stay their scores."""
    moe = config.decoder.experts
    what = "choices of routers"
    if not moe.balances_step:
        size = config.runner_config.batch_size * moe.expert_num * _COUNT_BYTES
        yield _Call("tp_cp", what, "all_gather", size, forward, _COUNT_BYTES)
    if moe.capacity(own * degrees.model_parallel * degrees.context_parallel) is not None:
        choices = own * moe.num_experts_chosen * FLOAT32_BYTES
        yield _Call("tp_cp", what, "all_gather", choices, 1 + (moe.drop_policy == "probability"))


def _stage_calls(
    sizes: _Sizes, hidden: int, every: Sequence[Sequence[Sequence[int]]], first: int, where: MeshCoordinate
) -> Iterator[_Call]:
    """Activations to the next part of the model, gradients to the part before.

    Args:
        first: Of `ModelSpec.first_reached`: the parts after its own send gradients.
    """
    stages = len(every)
    chunks = len(every[0])
    parts = [every[part % stages][part // stages] for part in range(stages * chunks)]
    trained = 0
    if first >= 0:
        trained = next((number for number, layers in enumerate(parts) if first in layers), len(parts) - 1)
    own = [chunk * stages + where.pipeline for chunk in range(chunks)]
    size = sizes.tokens * hidden * FLOAT32_BYTES // (sizes.tensor if sizes.shares_rows else 1)
    yield _Call("pp", "activations", "send", size, sum(part < len(parts) - 1 for part in own))
    yield _Call("pp", "their gradients", "send", size, sum(part > trained for part in own))


class _Numbers(NamedTuple):
    size: int


class _Shared(NamedTuple):
    """What ranks with the same part of the model divide.

    Attributes:
        level: See `zero_level`; empty for nothing.
        ranges: By the name of a divided parameter how many of its numbers this rank has.
    """

    layout: ModelLayout
    level: str
    ranges: dict[str, int]

    @classmethod
    def of(
        cls, config: Config, world: World, layout: ModelLayout, where: MeshCoordinate, sizes: Mapping[str, int]
    ) -> _Shared:
        if not shards_optimizer(config, world):
            return cls(layout, "", {})
        degrees = layout.degrees
        least = shard_threshold_bytes(config)
        ranges = {}
        ranks = degrees.data_parallel * degrees.context_parallel
        place = where.data * degrees.context_parallel
        for name, size in sizes.items():
            group = ranks
            own = place + where.context
            if is_expert(name):
                group = ranks * degrees.model_parallel // degrees.expert_parallel
                own = (own * degrees.model_parallel + where.tensor) // degrees.expert_parallel
            if 1 < group <= size and size * FLOAT32_BYTES >= least:
                part = shard_range(size, own, group)
                ranges[name] = part.stop - part.start
        return cls(layout, zero_level(config), ranges)

    def kind(self, name: str) -> str:
        """The group that divides a parameter."""
        if is_expert(name):
            return "expert_dp"
        return "dp_cp"


def _sums_of_gradients(
    layout: ModelLayout, sizes: Mapping[str, int], shared: _Shared, scattered: Collection[str], times: int
) -> Iterator[_Call]:
    """In buckets, over one group after the other; the `scattered` ones so many times, each by itself."""
    what = "sums of gradients"
    for name in sizes:
        if name in scattered:
            for kind in layout.parameters[name].sums:
                if kind in ("tp", "kv"):
                    yield _Call(kind, what, "all_reduce", sizes[name] * FLOAT32_BYTES, times)
            yield _Call(shared.kind(name), what, "reduce_scatter", sizes[name] * FLOAT32_BYTES, times)
    for kind in SUM_GROUPS:
        own = []
        for name, size in sizes.items():
            if kind in layout.parameters[name].sums and (name not in scattered or kind == "embedding"):
                own.append(_Numbers(shared.ranges[name] if name in scattered else size))
        for bucket in buckets(own, BUCKET_BYTES):
            yield _Call(kind, what, "all_reduce", sum(one.size for one in bucket) * FLOAT32_BYTES, 1)


def _calls_of_update(
    config: Config, layout: ModelLayout, shared: _Shared, sizes: Mapping[str, int]
) -> Iterator[_Call]:
    """Updated weights for the other ranks; whole directions of the matrices that Muon updates."""
    shapes = {name: layout.parameters[name].shape for name in sizes}
    groups = parameter_groups(shapes, config.optimizer.weight_decay, config.optimizer.type)
    by_muon = {name for group in groups if group.optimizer == "Muon" for name in group.parameters}
    for name in sizes:
        one = layout.parameters[name]
        if name in by_muon and name in shared.ranges:
            yield _Call(shared.kind(name), "Muon", "all_gather", shared.ranges[name] * FLOAT32_BYTES, 1)
        if name in by_muon and one.by == "tp" and one.shards > 1:
            yield _Call("tp", "Muon", "all_gather", sizes[name] * FLOAT32_BYTES, 1)
    for kind in ("dp_cp", "expert_dp") if shared.level in ("level1", "level2") else ():
        own = sum(shared.ranges.get(name, 0) for name in sizes if shared.kind(name) == kind and name not in by_muon)
        yield _Call(kind, "updated weights", "all_gather", own * FLOAT32_BYTES, bool(own))


def _gathered_weights(
    facts: _Facts, shared: _Shared, where: MeshCoordinate, micro_batches: int
) -> Iterator[_Call]:
    """The weights of each part of the model, before its forward and its backward pass."""
    spec = facts.spec
    is_last = where.pipeline == shared.layout.degrees.pipeline_stage - 1
    modules = spec.mtp_modules * is_last
    lookups = (where.pipeline == 0) + modules
    looks_up = not facts.trained.isdisjoint((EMBEDDING, MAPPING_IN))
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
    for name, size in shared.ranges.items():
        times = uses.get(name)
        if times is None:
            layer = int(name.split(".")[2])
            times = 1 + (layer >= facts.first)
            times *= 2 if name.endswith(_MODULE_NORM) and layer < last_module else 1
        yield _Call(shared.kind(name), "weights for their use", "all_gather", size * FLOAT32_BYTES,
                    times * micro_batches)  # fmt: skip
