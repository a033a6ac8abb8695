"""The estimated time of an optimizer step, from operations, bytes and rates.

The time of a pipeline is `closed_form_time` of `trainer.plan.pipeline`: to simulate the schedules of all layouts would
take too long. That of a file's sequence pipeline is simulated. Each of its slices is a pass with collectives and
overhead of its own.

Overlap is that of explicit mode: activations are sent, and weights of level3 gathered, while the stage computes; all
other collectives are waited for. Communication among and within nodes is that of hierarchical collectives, in which
each rank of a node sends its part to the other nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.config import Config
from trainer.config.checks.parallel import micro_batches_per_step, parallel_degrees, sharding_ranks, zero_level
from trainer.config.stages import training_schedule
from trainer.models.spec.model import ParameterSpec
from trainer.models.spec.names import layer_prefix
from trainer.ops.precision import resolve_precision
from trainer.parallel.layout import ModelLayout, end_stages, parameter_layout
from trainer.parallel.mesh import Degrees, Mesh
from trainer.parallel.schedule import (
    SEQUENCE_PIPELINES,
    Action,
    Cost,
    keys_of_slice,
    one_forward_one_backward,
    simulate,
)
from trainer.parallel.sharding import bytes_sent
from trainer.parallel.world import World
from trainer.plan.device.layers import kept_of_layer
from trainer.plan.device.model_facts import ModelFacts
from trainer.plan.division import fullest_rank, micro_batch_tokens, rank_groups
from trainer.plan.flops import Products, decoder_products
from trainer.plan.pipeline import closed_form_time
from trainer.plan.search.hardware import Rates
from trainer.plan.traffic import LayerPasses, MessageSizes, end_calls, layer_calls
from trainer.plan.weight_traffic import Call, JobInfo, loss_floats_per_token, weight_calls

CLASSES = ("products", "experts", "attention", "memory", "layer_overhead", "node", "network")
"""What the time of a step is spent on: operators by class, bytes of memory, overhead, and links."""
_TIMES_MOVED = 3  # a saved number is written, read in the backward pass, and its gradient is written
_PREFETCHED = "weights for their use"


class Seconds(NamedTuple):
    """Seconds by class, in the order of `CLASSES`, and the bytes that are sent.

    Attributes:
        sending: Of the messages among stages, beside the computation.
        prefetching: Of the gathers of weights, beside the computation.
    """

    classes: tuple[float, ...] = (0.0,) * len(CLASSES)
    sending: float = 0.0
    prefetching: float = 0.0
    bytes: float = 0.0

    @property
    def waited(self) -> float:
        """Returns the seconds of what nothing overlaps."""
        return sum(self.classes)


@dataclass(frozen=True)
class StepTime:
    """The estimate of a step.

    Attributes:
        seconds: The time of a step.
        waiting: Of these, the seconds in which a stage waits for another one, mean over the stages.
        classes: The seconds of the slowest stage with its waiting, by the names of `CLASSES`.
        sent_bytes: What the busiest rank sends.
    """

    seconds: float
    waiting: float
    classes: Mapping[str, float]
    sent_bytes: float


class PassesTime(NamedTuple):
    """The time of all forward and backward passes of a step.

    Attributes:
        waiting: Of the seconds, those in which a stage waits for another one, mean over the stages.
        classes: The seconds of the slowest stage with its waiting, in the order of `CLASSES`.
        sent: Bytes that a rank of each stage sends for them.
    """

    seconds: float
    waiting: float
    classes: tuple[float, ...]
    sent: list[float]


class _Link(NamedTuple):
    """A group of ranks: its size, the index of a rank, and the share of its bytes that stay in a node."""

    size: int
    position: int
    share_in_node: float
    share_all_to_all: float


class StepEstimator:
    """Estimates the steps of many layouts of one model on one kind of device.

    Args:
        config: A configuration of the model; layouts differ in degrees, offsets, sharding and recomputation alone.
    """

    def __init__(self, config: Config, device: str, facts: ModelFacts, rates: Rates) -> None:
        self.device = device
        self.facts = facts
        self.rates = rates
        self.half = resolve_precision(config.decoder, config.amp_level, device).compute.dtype != "float32"
        layers, self.ends = decoder_products(config)
        kinds: dict[object, tuple[Products, ...]] = {}
        self.products = [kinds.setdefault(tuple(each), tuple(each)) for each in layers]
        # Layers that compute and keep the same have one number.
        numbers: dict[object, int] = {}
        self.kinds = []
        for layer, products in enumerate(self.products):
            key = (id(products), id(facts.layers[layer]), id(facts.spec.layers[layer]), layer >= facts.first)
            self.kinds.append(numbers.setdefault(key, layer))
        self.results: dict[object, Seconds] = {}

    def estimate(self, config: Config, world: World, memory: Mapping[str, int]) -> StepTime:
        """Returns the estimate for a job.

        Args:
            config: A configuration of the same model for the job.
            memory: Bytes of its fullest rank, by part.
        """
        degrees = parallel_degrees(config, world)
        passes = self.passes(config, world)
        links = self._links(config, world, degrees)
        of_weights = []
        known: dict[object, Seconds] = {}
        for stage, layers in enumerate(self._stage_kinds(config, degrees)):
            key = frozenset(Counter(kind for kind, _ in layers).items()), *self._ends_of(degrees, stage)
            if key not in known:
                known[key] = self._stage_weights(config, world, degrees, links[stage], stage, layers)
            of_weights.append(known[key])
        prefetching = max(each.prefetching for each in of_weights)
        after = max((each for each in of_weights), key=lambda each: each.waited)
        moved = 2 * memory.get("weights", 0) + memory.get("gradients", 0) + 2 * memory.get("optimizer state", 0)
        update = moved / self.rates.memory
        exposed = max(0.0, prefetching - passes.seconds)
        classes = [each + more for each, more in zip(passes.classes, after.classes, strict=True)]
        classes[CLASSES.index("memory")] += update
        classes[CLASSES.index("network")] += exposed
        sent = max(one + more.bytes for one, more in zip(passes.sent, of_weights, strict=True))
        seconds = passes.seconds + exposed + after.waited + update
        return StepTime(seconds, passes.waiting, dict(zip(CLASSES, classes, strict=True)), sent)

    def passes(self, config: Config, world: World) -> PassesTime:
        """Returns the time of the forward and backward passes of a step, less than which no step takes."""
        degrees = parallel_degrees(config, world)
        number = micro_batches_per_step(config, degrees) * config.parallel.pipeline_config.slices
        stages = degrees.pipeline_stage
        links = self._links(config, world, degrees)
        known: dict[object, Seconds] = {}
        passes = []
        for stage, layers in enumerate(self._stage_kinds(config, degrees)):
            key = layers, *self._ends_of(degrees, stage)
            if key not in known:
                known[key] = self._stage_pass(config, world, degrees, links[stage], stage, layers)
            passes.append(known[key])
        times = [each.waited for each in passes]
        slowest = max(range(stages), key=lambda stage: times[stage])
        chunks = config.decoder.pp_interleave_num
        computed = _pipeline_time(config, degrees, passes, number)
        # Messages show before the first pass of the last stage, and after its last one.
        computed += 2 * (stages - 1) * max(each.sending for each in passes) / chunks
        factor = computed / times[slowest]
        classes = tuple(each * factor for each in passes[slowest].classes)
        waiting = computed - number * sum(times) / stages
        return PassesTime(computed, waiting, classes, [number * each.bytes for each in passes])

    def _stage_kinds(self, config: Config, degrees: Degrees) -> list[tuple[tuple[int, str], ...]]:
        """Returns for each stage the kind of each of its layers, and the part that its backward pass recomputes."""
        facts = self.facts
        again = facts.recomputed(config)
        stages = degrees.pipeline_stage
        settings = config.decoder
        key = ("stage kinds", stages, settings.pp_interleave_num, str(settings.offset), again)

        def compute() -> list[tuple[tuple[int, str], ...]]:
            """Looks the kinds of all layers up."""
            rows = [[layer for chunk in stage for layer in chunk] for stage in facts.chunks(config, degrees)]
            rows[-1] += facts.spec.module_layers
            return [tuple((self.kinds[layer], again[layer]) for layer in row) for row in rows]

        return facts.once(key, compute)

    def _ends_of(self, degrees: Degrees, stage: int) -> tuple[bool, bool]:
        """Returns whether a stage has the embedding, and whether it has the head."""
        return stage == 0, stage == degrees.pipeline_stage - 1

    def _links(self, config: Config, world: World, degrees: Degrees) -> list[dict[str, _Link]]:
        """Returns for each stage the groups of its fullest rank."""
        sharding = sharding_ranks(config, degrees)
        key = ("links", degrees, sharding, self.rates.ranks_per_node)
        return self.facts.once(key, lambda: [
            self._stage_links(config, world, degrees, stage) for stage in range(degrees.pipeline_stage)
        ])  # fmt: skip

    def _stage_links(self, config: Config, world: World, degrees: Degrees, stage: int) -> dict[str, _Link]:
        rank = Mesh(degrees).rank_at(fullest_rank(degrees, stage))
        links = {}
        for name, ranks in rank_groups(config, world, rank).items():
            size = len(ranks)
            near = 0
            if size > 1:
                node = rank // self.rates.ranks_per_node
                near = sum(other // self.rates.ranks_per_node == node for other in ranks)
            share = 1.0
            to_all = 1.0
            if 0 < near < size:
                share = (near - 1) / near / ((size - 1) / size)
                to_all = (near - 1) / (size - 1)
            links[name] = _Link(size, ranks.index(rank), share, to_all)
        return links

    def _sum(self, parts: Iterable[tuple[Seconds, int]]) -> Seconds:
        """Adds up parts, each so many times."""
        classes = [0.0] * len(CLASSES)
        sending = 0.0
        prefetching = 0.0
        sent = 0.0
        for each, times in parts:
            for index, value in enumerate(each.classes):
                classes[index] += value * times
            sending += each.sending * times
            prefetching += each.prefetching * times
            sent += each.bytes * times
        return Seconds(tuple(classes), sending, prefetching, sent)

    def _calls(self, calls: Iterable[Call], links: Mapping[str, _Link]) -> Seconds:
        """Returns the time of collectives."""
        rates = self.rates
        times = {"node": 0.0, "network": 0.0, "send": 0.0, "prefetch": 0.0}
        total = 0.0
        for call in calls:
            link = links[call.group]
            if not call.times or link.size == 1:
                continue
            sent = bytes_sent(
                call.kind, call.input_bytes, link.size, link.position, on_host=self.device == "CPU",
                item=call.item_bytes,
            )  # fmt: skip
            total += sent * call.times
            share = link.share_in_node
            if call.kind == "all_to_all":
                share = link.share_all_to_all
            within = call.times * sent * share / rates.node
            beyond = call.times * sent * (1 - share) / rates.network
            if share < 1:
                beyond += call.times * rates.network_latency
            else:
                within += call.times * rates.node_latency
            if call.kind == "send":
                times["send"] += within + beyond
            elif call.what == _PREFETCHED:
                times["prefetch"] += within + beyond
            else:
                times["node"] += within
                times["network"] += beyond
        classes = (*(0.0,) * (len(CLASSES) - 2), times["node"], times["network"])
        return Seconds(classes, times["send"], times["prefetch"], total)

    def _stage_pass(
        self, config: Config, world: World, degrees: Degrees, links: Mapping[str, _Link], stage: int,
        layers: Sequence[tuple[int, str]],
    ) -> Seconds:  # fmt: skip
        """Returns the time of the forward and backward pass of a micro-batch, or of a slice of it, through a stage."""
        key = (
            degrees.context_parallel, degrees.model_parallel, degrees.expert_parallel,
            config.parallel_config.use_seq_parallel, micro_batch_tokens(config, degrees),
        )  # fmt: skip
        parts = []
        for (kind, part), times in Counter(layers).items():
            of_layer = ("layer", kind, part, key)
            parts.append((self._once(of_layer, self._layer, config, world, degrees, links, kind, part), times))
        ends = ("ends", *self._ends_of(degrees, stage), degrees, config.decoder.pp_interleave_num, key)
        parts.append((self._once(ends, self._ends, config, world, degrees, links, stage), 1))
        return self._sum(parts)

    def _once(self, key: object, compute: Callable[..., Seconds], *arguments: Any) -> Seconds:
        if key not in self.results:
            self.results[key] = compute(*arguments)
        return self.results[key]

    def _layer(
        self, config: Config, world: World, degrees: Degrees, links: Mapping[str, _Link], layer: int, part: str
    ) -> Seconds:
        """Returns the time of a layer: operators, bytes of memory, overhead, and collectives."""
        rates = self.rates
        reached = layer >= self.facts.first
        tensor = degrees.model_parallel
        tokens = micro_batch_tokens(config, degrees)
        operations = dict.fromkeys(("products", "experts", "attention"), 0.0)
        for each in self.products[layer]:
            again = reached and part in ("block", each.sublayer)
            operations[each.operator] += each.flops + each.forward * again
        seconds = [
            operations[name] * tokens / tensor / rate
            for name, rate in (("products", rates.products), ("experts", rates.experts), ("attention", rates.attention))
        ]
        rows = 1
        if config.parallel_config.use_seq_parallel:
            rows = tensor
        spec = self.facts.once(("local", tensor), lambda: self.facts.spec.local(tensor)).layers[layer]
        kept = kept_of_layer(config.decoder, spec, self.half, rows, degrees)
        moved = tokens * (_TIMES_MOVED * kept["block"] + kept.get(part, 0))
        passes = 1 + 2 * reached + bool(part)
        local = (*seconds, moved / rates.memory, passes * rates.layer_overhead, 0.0, 0.0)
        sizes = MessageSizes.from_config(config, world, self.device)
        compiled = sizes.on_host or config.context.mode == 0
        calls = layer_calls(config, degrees, self.facts.spec.layers[layer], sizes, LayerPasses(reached, part, compiled))
        return self._sum([(Seconds(local), 1), (self._calls(calls, links), 1)])

    def _ends(self, config: Config, world: World, degrees: Degrees, links: Mapping[str, _Link], stage: int) -> Seconds:
        """Returns the time of embedding and head, and of messages to other stages."""
        job = self._job(config, {}, degrees)
        sizes = MessageSizes.from_config(config, world, self.device)
        where = fullest_rank(degrees, stage)
        operations = 0.0
        moved = 0
        if stage == degrees.pipeline_stage - 1:
            operations = sum(each.flops for each in self.ends)
            moved = 16 * self.facts.spec.vocabulary // degrees.model_parallel  # logits, softmax and their gradient
        tokens = micro_batch_tokens(config, degrees)
        products = operations * tokens / degrees.model_parallel / self.rates.products
        local = Seconds((products, 0.0, 0.0, moved * tokens / self.rates.memory, 0.0, 0.0, 0.0))
        calls = end_calls(job, sizes, self.facts.chunks(config, degrees), where)
        return self._sum([(local, 1), (self._calls(calls, links), 1)])

    def _stage_weights(
        self, config: Config, world: World, degrees: Degrees, links: Mapping[str, _Link], stage: int,
        layers: Sequence[tuple[int, str]],
    ) -> Seconds:  # fmt: skip
        """Returns the time of what a step sends for weights and gradients of a stage."""
        stages = degrees.pipeline_stage
        section = config.parallel
        level = ""
        if section.enable_parallel_optimizer:
            level = zero_level(config)
        number = 1
        if level > "level1":
            number = micro_batches_per_step(config, degrees)
        # With stages a device sums gradients once a step; it does not matter how many stages there are.
        alike = degrees._replace(pipeline_stage=min(stages, 2))
        key = alike, config.parallel_config.use_seq_parallel, level, number
        parts = []
        for kind, times in Counter(kind for kind, _ in layers).items():
            of_layer = ("weights", kind, key)
            parts.append((self._once(of_layer, self._weights, config, world, degrees, links, stage, kind), times))
        of_ends = ("end weights", *self._ends_of(degrees, stage), stages, key)
        parts.append((self._once(of_ends, self._weights, config, world, degrees, links, stage, None), 1))
        return self._sum(parts)

    def _weights(
        self, config: Config, world: World, degrees: Degrees, links: Mapping[str, _Link], stage: int, layer: int | None
    ) -> Seconds:
        """Returns the time of what a step sends for a layer; None: for what a stage has outside of layers."""
        facts = self.facts
        if layer is None:
            names = [name for name in facts.ends if stage in end_stages(name, facts.spec, degrees.pipeline_stage)]
            parameters = {name: facts.ends[name].parameters[0].spec for name in names}
        else:
            parameters = {layer_prefix(layer) + each.spec.name: each.spec for each in facts.layers[layer].parameters}
        job = self._job(config, parameters, degrees)
        coordinate = fullest_rank(degrees, stage)
        calls = weight_calls(config, world, coordinate, job, on_host=self.device == "CPU")
        return self._calls(calls, links)

    def _job(self, config: Config, parameters: Mapping[str, ParameterSpec], degrees: Degrees) -> JobInfo:
        """Returns the facts of a job with some of the parameters."""
        spec = self.facts.spec
        rows = config.parallel_config.use_seq_parallel
        heads = spec.layers[0].attention.kv_heads
        stages = degrees.pipeline_stage
        layouts = {}
        for name, parameter in parameters.items():
            one = parameter_layout(parameter, heads, degrees, rows)
            if name in self.facts.ends:
                places = end_stages(name, spec, stages)
                if len(places) > 1:
                    one = one._replace(sums=(*one.sums, "embedding"))
                one = one._replace(stages=places)
            else:
                one = one._replace(stages=tuple(range(stages)))
            if parameter.role == "buffer":
                one = one._replace(sums=())
            layouts[name] = one
        trained = frozenset(self.facts.trained)
        floats = loss_floats_per_token(config)
        return JobInfo(spec, ModelLayout(degrees, layouts), trained, (), self.facts.first, floats)


def _pipeline_time(config: Config, degrees: Degrees, passes: Sequence[Seconds], number: int) -> float:
    """Returns the time of a step from that of a pass through each stage.

    A sequence pipeline is simulated, unless it is 1F1B.

    Args:
        number: Passes of a step through each chunk.
    """
    chunks = config.decoder.pp_interleave_num
    stages = degrees.pipeline_stage
    order = config.parallel.pipeline_config
    times = [each.waited for each in passes]
    if stages == 1 or order.pipeline_scheduler not in SEQUENCE_PIPELINES:
        return closed_form_time(times, number, chunks)
    schedule = training_schedule(config, stages, micro_batches_per_step(config, degrees))
    if schedule == one_forward_one_backward(stages, number, chunks):
        return closed_form_time(times, number, chunks)
    attention = [each.classes[CLASSES.index("attention")] for each in passes]

    def cost(stage: int, action: Action) -> Cost:
        """Returns the time of a slice, of which attention takes as long as it has keys."""
        more = keys_of_slice(action.slice_number, order.slices) - 1
        time = (times[stage] + more * attention[stage]) / chunks
        return Cost(time / 3, time * 2 / 3)

    return simulate(schedule, cost).end
