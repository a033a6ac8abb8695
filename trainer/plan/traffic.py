"""How many bytes a rank sends to others in an optimizer step of explicit mode, by group and purpose.

Counted as the code calls the collectives: of each micro-batch forward, backward, and once more forward what is
recomputed; of each step the sums of gradients and the gathers of shared state. On a CPU each number is that of the
bytes that go to other processes. On a device it is what a ring sends. How many rows the experts exchange is known only
in the run: theirs is the mean of an even routing. Not counted: the losses, token counts and norms of a step, some
hundred bytes for each other rank, and evaluations.

Legend: N tokens of a micro-batch on a rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.config import Config
from trainer.config.checks.degrees import ulysses_degree
from trainer.config.checks.parallel import micro_batches_per_step, parallel_degrees, runs_semi_auto
from trainer.config.schema.moe import MoEConfig
from trainer.models.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from trainer.models.spec.names import EMBEDDING, MAPPING_IN
from trainer.models.spec.saved import logit_rows
from trainer.models.spec.sublayers import attention_spec
from trainer.ops.select import precision_of
from trainer.parallel.mesh import Degrees, Mesh, MeshCoordinate
from trainer.parallel.sharding import FLOAT32_BYTES, Collective, bytes_sent
from trainer.parallel.world import World
from trainer.plan.division import fullest_rank, micro_batch_tokens, pipeline_layers, rank_groups
from trainer.plan.weight_traffic import Call, JobInfo, weight_calls

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


def traffic_plan(config: Config, world: World, device: str) -> TrafficPlan | None:
    """Returns the communication volume of the busiest rank.

    Returns None for a single process, and in semi-automatic mode, in which MindSpore decides what is sent.
    """
    if world.size == 1 or runs_semi_auto(config, world) or not config.is_decoder:
        return None
    job = JobInfo.from_config(config, world)
    degrees = parallel_degrees(config, world)
    volumes = []
    for stage in range(degrees.pipeline_stage):
        volumes.append(rank_traffic(config, world, device, fullest_rank(degrees, stage), job))
    totals = [sum(volume.bytes for volume in of_stage) for of_stage in volumes]
    busiest = totals.index(max(totals))
    return TrafficPlan(busiest, volumes[busiest], tuple(totals))


def rank_traffic(
    config: Config, world: World, device: str, coordinate: MeshCoordinate, job: JobInfo | None = None
) -> tuple[CommVolume, ...]:
    """Returns what one rank sends in a step whose micro-batches all have loss tokens."""
    rank = Mesh(parallel_degrees(config, world)).rank_at(coordinate)
    groups = rank_groups(config, world, rank)
    volumes: dict[tuple[str, str, Collective], tuple[int, int]] = {}
    for call in _calls(config, world, device, coordinate, job or JobInfo.from_config(config, world)):
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


def _calls(config: Config, world: World, device: str, coordinate: MeshCoordinate, job: JobInfo) -> Iterator[Call]:
    degrees = parallel_degrees(config, world)
    number = micro_batches_per_step(config, degrees)
    for call in _micro_batch_calls(config, world, device, coordinate, job):
        yield call._replace(times=call.times * number)
    yield from weight_calls(config, world, coordinate, job, on_host=device == "CPU")


def _micro_batch_calls(
    config: Config, world: World, device: str, coordinate: MeshCoordinate, job: JobInfo
) -> Iterator[Call]:
    """Yields the calls of the passes of one micro-batch: all but those for gradients and weights."""
    degrees = parallel_degrees(config, world)
    stage_chunks = pipeline_layers(config, degrees)
    layers = [layer for chunk in stage_chunks[coordinate.pipeline] for layer in chunk]
    if coordinate.pipeline == degrees.pipeline_stage - 1:
        layers += job.spec.module_layers
    sizes = MessageSizes.from_config(config, world, device)
    for layer in layers:
        passes = LayerPasses(layer >= job.first, job.recomputed[layer], sizes.on_host or config.context.mode == 0)
        yield from layer_calls(config, degrees, job.spec.layers[layer], sizes, passes)
    yield from end_calls(job, sizes, stage_chunks, coordinate)


def layer_calls(
    config: Config, degrees: Degrees, layer: LayerSpec, sizes: MessageSizes, passes: LayerPasses
) -> Iterator[Call]:
    """Yields the calls of the passes of one micro-batch through a layer."""
    yield from _tensor_calls(layer, sizes, passes)
    yield from _context_calls(config, degrees, sizes, passes)
    if isinstance(layer.mlp, MoeSpec):
        yield from _expert_calls(config, layer.mlp, degrees, sizes, passes)


def end_calls(
    job: JobInfo, sizes: MessageSizes, stage_chunks: Sequence[Sequence[Sequence[int]]], coordinate: MeshCoordinate
) -> Iterator[Call]:
    """Yields the calls of the passes of one micro-batch outside of layers: of embedding and head, and among stages."""
    spec = job.spec
    is_last = coordinate.pipeline == len(stage_chunks) - 1
    modules = spec.mtp_modules * is_last
    lookups = (coordinate.pipeline == 0) + modules
    stream = sizes._replace(width=FLOAT32_BYTES, gradient_width=FLOAT32_BYTES)  # the residual stream
    scatters = not job.trained.isdisjoint((EMBEDDING, MAPPING_IN))
    if sizes.on_host:
        scatters = EMBEDDING in job.trained
    yield from _leave(stream, "embedding", spec.embedding, lookups, lookups * scatters)
    if is_last:
        head_sizes = sizes
        if sizes.on_host:
            head_sizes = stream
        yield from _head_calls(spec, head_sizes, 1 + modules, job.loss_floats_per_token)
    yield from _stage_calls(sizes, spec.hidden, stage_chunks, job.first, coordinate)


def _head_calls(spec: ModelSpec, sizes: MessageSizes, heads: int, numbers: int) -> Iterator[Call]:
    """Yields the calls of the head: the ranks exchange some numbers of each token, on a CPU in blocks of rows."""
    what = "head and loss"
    rows = sizes.tokens
    yield from _enter(sizes, what, spec.embedding, heads, heads)
    if sizes.on_host:
        rows = logit_rows(sizes.tokens, -(-spec.vocabulary // sizes.tensor))
    blocks, rest = divmod(sizes.tokens, rows)
    for size, times in ((rows, blocks), (rest, bool(rest))):
        yield Call("tp", what, "all_gather", numbers * size * FLOAT32_BYTES, heads * times)


class MessageSizes(NamedTuple):
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
    def from_config(cls, config: Config, world: World, device: str) -> MessageSizes:
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


class LayerPasses(NamedTuple):
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


def _enter(sizes: MessageSizes, what: str, columns: int, forward: int, backward: int) -> Iterator[Call]:
    """Yields the calls of `TensorParallel.column_parallel_input`, so many times forward and backward."""
    numbers = sizes.tokens * columns
    if sizes.shares_rows:
        yield Call("tp", what, "all_gather", numbers // sizes.tensor * sizes.width, forward, sizes.width)
    yield _sum_over_tensor(sizes, what, numbers, backward)


def _leave(sizes: MessageSizes, what: str, columns: int, forward: int, backward: int) -> Iterator[Call]:
    """Yields the calls of `TensorParallel.row_parallel_output`, so many times forward and backward."""
    numbers = sizes.tokens * columns
    width = sizes.gradient_width
    yield _sum_over_tensor(sizes, what, numbers, forward)
    if sizes.shares_rows:
        yield Call("tp", what, "all_gather", numbers // sizes.tensor * width, backward, width)


def _sum_over_tensor(sizes: MessageSizes, what: str, numbers: int, times: int) -> Call:
    kind: Collective = "all_reduce"
    if sizes.shares_rows:
        kind = "reduce_scatter"
    return Call("tp", what, kind, numbers * sizes.gradient_width, times, sizes.gradient_width)


def _tensor_calls(layer: LayerSpec, sizes: MessageSizes, passes: LayerPasses) -> Iterator[Call]:
    """Yields the tensor-parallel calls of a layer: one before the first matrices of a sublayer and one after the last.
    """
    sublayers = [("attention", layer.attention.gathered_width, layer.attention.post_norm)]
    is_alone = True  # attention, whose output the feed-forward layer does not take in the same graph
    if isinstance(layer.mlp, MlpSpec):
        is_alone = layer.mlp.is_parallel
        sublayers.append(("mlp", layer.mlp.hidden, layer.mlp.post_norm))
    for sublayer, width, has_norm in sublayers:
        again = passes.is_recomputed(sublayer)
        # No gradient needs the result of what is computed again, unless something else in the same graph does.
        goes_on = sublayer == "attention" and passes.part == "block" and not is_alone
        leaves_again = again and (goes_on or has_norm or not passes.compiled)
        yield from _enter(sizes, "layers", width, 1 + again, passes.backward)
        yield from _leave(sizes, "layers", layer.attention.hidden, 1 + leaves_again, passes.backward)


def _context_calls(config: Config, degrees: Degrees, sizes: MessageSizes, passes: LayerPasses) -> Iterator[Call]:
    """Yields the calls of context parallelism; see `trainer.arrays.attention.context`.

    The ranks of a ring gather keys and values; those of Ulysses attention exchange heads for tokens.
    """
    what = "keys and values"
    ranks = degrees.context_parallel
    attention = sizes.attention
    width = sizes.width
    gradient_width = sizes.gradient_width
    ulysses = 1
    if sizes.on_host:
        ulysses = min(ranks, ulysses_degree(config))
    ring_group = "cp"
    ulysses_group = "cp"
    if 1 < ulysses < ranks:
        ring_group = "ring"
        ulysses_group = "ulysses"
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
            yield Call(ulysses_group, what, "all_to_all", tokens * columns * width, forward, width)
            yield Call(ulysses_group, what, "all_to_all", tokens * columns * back, passes.backward, back)
    if ulysses == ranks:
        return
    messages = [keys + values]
    if sizes.on_host:  # a device sends both together
        messages = [keys, values]
    for columns in messages:
        yield Call(ring_group, what, "all_gather", tokens * columns * width, forward, width)
        gradient_bytes = ranks // ulysses * tokens * columns * gradient_width
        yield Call(ring_group, what, "reduce_scatter", gradient_bytes, passes.backward, gradient_width)


def _expert_calls(
    config: Config, mlp: MoeSpec, degrees: Degrees, sizes: MessageSizes, passes: LayerPasses
) -> Iterator[Call]:
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
        yield Call("tp", "rows of experts", "all_gather", local_tokens * hidden * FLOAT32_BYTES, passes.backward)
        yield Call("tp", "rows of experts", "all_gather", local_tokens * hidden * width, forward, width)
    if mlp.shared_width:
        sharded_rows = sizes._replace(shares_rows=True)
        yield from _enter(sharded_rows, "shared experts", hidden, forward, passes.backward)
        yield from _leave(sharded_rows, "shared experts", hidden, forward, passes.backward)
    chosen = mlp.chosen
    row = hidden * width
    if moe.moe_token_dispatcher_type == "allgather":
        what = "tokens of experts"
        ranks = degrees.expert_parallel
        choice_bytes = local_tokens * chosen * FLOAT32_BYTES
        yield Call("ep", what, "all_gather", choice_bytes, 2 * forward)  # experts, and gates
        yield Call("ep", what, "reduce_scatter", ranks * choice_bytes, passes.backward)
        yield Call("ep", what, "all_gather", local_tokens * row, forward + passes.backward, width)
        yield Call("ep", what, "reduce_scatter", ranks * local_tokens * row, forward + passes.backward, width)
        return
    group = degrees.model_parallel * degrees.context_parallel
    capacity = moe.capacity(local_tokens * group)
    expert_rows = chosen * local_tokens
    if capacity is not None:
        expert_rows = min(expert_rows, capacity * moe.expert_num // group)
    yield Call("ep", "counts of rows", "all_to_all", moe.expert_num * _COUNT_BYTES, forward, _COUNT_BYTES)
    yield Call("ep", EVEN_ROWS, "all_to_all", expert_rows * row, 2 * (forward + passes.backward), width)


def _router_calls(config: Config, moe: MoEConfig, degrees: Degrees, local_tokens: int, forward: int) -> Iterator[Call]:
    """Yields the calls of a router.

    The ranks of a micro-batch gather the load of each expert for the balance loss. With a capacity they gather the
    choices of each token, and its scores if tokens are dropped by score.
    """
    what = "choices of routers"
    if not moe.balances_step:
        size = config.runner_config.batch_size * moe.expert_num * _COUNT_BYTES
        yield Call("tp_cp", what, "all_gather", size, forward, _COUNT_BYTES)
    if moe.capacity(local_tokens * degrees.model_parallel * degrees.context_parallel) is not None:
        choices = local_tokens * moe.num_experts_chosen * FLOAT32_BYTES
        yield Call("tp_cp", what, "all_gather", choices, 1 + (moe.drop_policy == "probability"))


def _stage_calls(
    sizes: MessageSizes, hidden: int, stage_chunks: Sequence[Sequence[Sequence[int]]], first: int,
    coordinate: MeshCoordinate,
) -> Iterator[Call]:  # fmt: skip
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
    local_parts = [chunk * stages + coordinate.pipeline for chunk in range(chunks)]
    size = sizes.tokens * hidden * FLOAT32_BYTES
    if sizes.shares_rows:
        size //= sizes.tensor
    yield Call("pp", "activations", "send", size, sum(part < len(parts) - 1 for part in local_parts))
    yield Call("pp", "their gradients", "send", size, sum(part > trained for part in local_parts))
