"""Memory that one rank of a job takes on an Ascend: an estimate of its peak, by part, from what the code keeps.

Weights and optimizer state are exact. In semi-automatic mode MindSpore shards them: matrices by model_parallel, experts
by expert_parallel too, layers by stage, and with enable_parallel_optimizer weights and optimizer state by data_parallel
and context_parallel. In explicit mode a rank has what `trainer.parallel.layout` gives it.

Activations are counted array by array, in `explicit` for explicit mode and in `graph` for semi-automatic mode. In the
latter the peak is at the end of the forward pass, when all activations are kept, or at the end of the backward pass,
when all gradients are there; with several micro-batches gradients are there all the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.config import Config
from trainer.config.checks.parallel import (
    micro_batches_per_step,
    parallel_degrees,
    runs_semi_auto,
    shard_threshold_bytes,
    sharding_ranks,
    shards_optimizer,
    zero_level,
)
from trainer.config.recompute import comm_recompute_layers
from trainer.models.spec.model import ParameterSpec
from trainer.models.spec.names import EMBEDDING, HEAD, sublayer_of
from trainer.parallel.layout import ModelLayout, end_stages, parameter_layout
from trainer.parallel.mesh import Degrees
from trainer.parallel.sharding import FLOAT32_BYTES
from trainer.parallel.world import World
from trainer.plan.device.explicit import StageGradients, UnitGradients, explicit_memory
from trainer.plan.device.graph import GraphMatrices, graph_memory, stage_chunks, stage_passes
from trainer.plan.device.model_facts import ModelFacts, ParameterUnit, is_half
from trainer.plan.division import fullest_rank

DEVICE_BYTES = 60 << 30
"""The part of a 64 GB device that MindSpore uses, without `max_device_memory`."""
_GIB = 1 << 30  # MindSpore's GB


def device_limit_bytes(config: Config) -> int | None:
    """Returns max_device_memory in bytes; None without it, or where it is no size, which a run on an Ascend refuses."""
    try:
        return int(float((config.context.max_device_memory or "").removesuffix("GB")) * _GIB)
    except (ValueError, OverflowError):
        return None


def device_memory(config: Config, world: World, facts: ModelFacts, stage: int | None = None) -> dict[str, int]:
    """Returns the bytes of a rank by part and in total, for the stage that needs most, or for `stage`.

    Args:
        facts: The parameters of the model. Plans of several layouts of a model compute faster with the same facts.
    """
    degrees = parallel_degrees(config, world)
    stages: Sequence[int] = range(degrees.pipeline_stage)
    if stage is not None:
        stages = [stage]
    layout = _DeviceLayout.from_config(config, world, degrees)
    if stage is None and len(stages) > 2:
        stages = _stages_with_most(config, degrees, facts)
    estimates = (_stage_memory(config, degrees, facts, layout, number) for number in stages)
    return max(estimates, key=lambda parts: parts["total"])


def _stages_with_most(config: Config, degrees: Degrees, facts: ModelFacts) -> list[int]:
    """Returns the stages of which one needs most memory.

    Of the stages between the first and the last one that have equal layers, the first has most micro-batches in flight.
    """
    again = facts.recomputed(config)
    gathering = comm_recompute_layers(config)
    chunks = facts.chunks(config, degrees)
    last = degrees.pipeline_stage - 1
    firsts: dict[object, int] = {}
    for stage in range(1, last):
        kinds = [
            [(id(facts.layers[layer]), id(facts.spec.layers[layer]), again[layer], layer in gathering,
              layer < facts.first) for layer in chunk]
            for chunk in chunks[stage]
        ]  # fmt: skip
        firsts.setdefault(str(kinds), stage)
    return [0, *firsts.values(), last]


def fixed_bytes(parts: Mapping[str, int]) -> int:
    """Returns the bytes of weights, gradients and optimizer state, which are exact."""
    return sum(parts.get(name, 0) for name in ("weights", "gradients", "optimizer state"))


class _DeviceLayout(NamedTuple):
    """How the ranks of a stage shard parameters, gradients and optimizer state.

    Attributes:
        degrees: Those of a stage; in explicit mode its data-parallel ranks are those that shard.
        is_graph: Whether MindSpore shards (semi-automatic mode).
        threshold: Parameters of fewer bytes are not shared.
        weights, sums, state: What data-parallel ranks share.
    """

    degrees: Degrees
    is_graph: bool
    threshold: int
    weights: bool
    sums: bool
    state: bool

    @classmethod
    def from_config(cls, config: Config, world: World, degrees: Degrees) -> _DeviceLayout:
        """Reads the layout of a job."""
        is_graph = runs_semi_auto(config, world)
        of_stage = degrees._replace(pipeline_stage=1)
        if not is_graph:
            of_stage = of_stage._replace(data_parallel=sharding_ranks(config, degrees))
        weights = is_graph and config.trains and config.parallel.enable_parallel_optimizer
        state = weights or (not is_graph and shards_optimizer(config, world))
        # Ranks of explicit mode that share the state scatter the sums of the last micro-batch; a pipeline's sums are
        # whole until the end of the step.
        sums = state and (zero_level(config) != "level1" or micro_batches_per_step(config, degrees) == 1)
        if not is_graph and degrees.pipeline_stage > 1:
            sums = False
        return cls(of_stage, is_graph, shard_threshold_bytes(config), weights, sums, state)


class _UnitBytes(NamedTuple):
    """Bytes of the parameters of a unit on a rank; those of matrices in float32, not shared.

    Attributes:
        gradients, state: Of the trained parameters.
        matrices: By the sublayer.
        products: Of the matrices that are multiplied: all but the embedding.
        trained_products: Of these the trained ones.
        trained: Of all trained parameters, not shared.
        largest: Of the largest trained matrix.
        experts: Of experts that several ranks of a tensor group have, in float32 and not shared.
        expert_gradients: Of the trained ones of these.
        expert_sums: The rank's shard of these gradients.
    """

    weights: int
    gradients: int
    state: int
    matrices: dict[str, int]
    products: int
    trained_products: int
    trained: int
    largest: int
    experts: int
    expert_gradients: int
    expert_sums: int


def _unit_bytes(unit: ParameterUnit, layout: _DeviceLayout, kv_heads: int) -> _UnitBytes:
    """Computes the bytes of a unit in a layout."""
    degrees = layout.degrees
    sums: Counter[str] = Counter()
    matrices = {"attention": 0, "mlp": 0}
    largest = 0
    for parameter in unit.parameters:
        spec = parameter.spec
        shape = spec.shape
        if not layout.is_graph:
            where = fullest_rank(degrees, 0)
            one = ModelLayout(degrees, {spec.name: parameter_layout(spec, kv_heads, degrees, sequence_parallel=False)})
            shape = one.shard(spec.name, where).shape
        sizes = {}
        for shares in {False, layout.weights, layout.sums, layout.state}:
            threshold = None
            if shares:
                threshold = layout.threshold
            sizes[shares] = _local_bytes(spec, shape, degrees, layout.is_graph, threshold)
        unsharded = sizes[False]
        trained = unsharded * parameter.is_trained
        is_matrix = len(shape) > 1
        is_product = is_matrix and spec.name != EMBEDDING
        is_shared = _has_copies_in_tensor_group(shape, degrees)
        largest = max(largest, trained)
        if is_matrix:
            matrices[sublayer_of(spec.name)] += unsharded
        sums.update(
            weights=sizes[layout.weights], gradients=sizes[layout.sums] * parameter.is_trained,
            state=sizes[layout.state] * parameter.states, trained=trained, products=unsharded * is_product,
            trained_products=trained * is_product, experts=unsharded * is_shared, expert_gradients=trained * is_shared,
            expert_sums=sizes[layout.sums] * parameter.is_trained * is_shared,
        )  # fmt: skip
    return _UnitBytes(matrices=matrices, largest=largest, **sums)


def _stage_memory(
    config: Config, degrees: Degrees, facts: ModelFacts, layout: _DeviceLayout, stage: int
) -> dict[str, int]:
    """Returns the bytes of one rank of a stage, by part and in total."""
    trains = bool(facts.trained)
    layers = [layer for chunk in stage_chunks(config, degrees, facts, stage) for layer in chunk]
    ends = _stage_ends(facts, stage, degrees.pipeline_stage, layout.is_graph)
    kv_heads = facts.spec.layers[0].attention.kv_heads

    def bytes_of(unit: ParameterUnit) -> _UnitBytes:
        """Returns the bytes of a unit, which are computed once for all layouts that shard it equally."""
        return facts.once((unit, layout), lambda: _unit_bytes(unit, layout, kv_heads))

    units = [(bytes_of(unit), number) for unit, number in Counter(facts.layers[layer] for layer in layers).items()]
    of_ends = {name: bytes_of(facts.ends[name]) for name in ends}
    every = [*units, *((each, 1) for each in of_ends.values())]
    parts = {"weights": sum(each.weights * number for each, number in every)}
    half = is_half(config, facts)
    # A copy of each matrix in the dtype of the products; unsharded, even if ranks shard the weights.
    copies = 0
    if half:
        copies = sum(each.products * number for each, number in every) // 2
    if not trains:
        parts["weights in half precision"] = copies
        return parts | {"total": sum(parts.values())}
    adds_up = micro_batches_per_step(config, degrees) > 1
    parts["gradients"] = sum(each.gradients * number for each, number in every)
    if half and not layout.is_graph and not config.runner_wrapper.accumulate_allreduce_grads_in_fp32:
        parts["gradients"] -= sum(each.trained_products * number for each, number in every) // 2
    parts["optimizer state"] = sum(each.state * number for each, number in every)
    waiting = 0
    if layout.is_graph:
        shares = layout.weights and degrees.data_parallel * degrees.context_parallel > 1
        matrices = GraphMatrices(
            {layer: bytes_of(facts.layers[layer]).matrices for layer in layers},
            {name: sum(each.matrices.values()) for name, each in of_ends.items()},
        )
        graph = graph_memory(config, degrees, facts, stage, half, matrices, shares, adds_up)
        copies = graph.copies
        kept = graph.activations
        parts["masks and tables"] = graph.constants
        if layout.weights:
            of_layers = [bytes_of(facts.layers[layer]) for layer in layers]
            waiting, copies_change = _gathered_experts(config, degrees, facts, stage, of_layers, half)
            copies = max(copies + copies_change, 0)
    else:
        if half and facts.spec.mtp_modules and HEAD in of_ends:  # several heads cast it, each for itself
            copies -= of_ends[HEAD].products // 2
            of_ends[HEAD] = of_ends[HEAD]._replace(trained_products=0)
        distinct = {unit: _unit_gradients(config, bytes_of(unit), half) for unit in {facts.layers[n] for n in layers}}
        of_stage = StageGradients(
            {layer: distinct[facts.layers[layer]] for layer in layers},
            {name: _unit_gradients(config, each, half) for name, each in of_ends.items() if each.trained},
            parts["gradients"], layout.sums and zero_level(config) != "level1",
        )  # fmt: skip
        peak = explicit_memory(config, degrees, facts, stage, half, of_stage)
        parts["weights in half precision"] = copies
        parts["activations"] = max(peak - parts["gradients"], 0)
        return parts | {"total": sum(parts.values())}
    parts["weights in half precision"] = copies
    # Gradients take the place of activations, as the backward pass goes on.
    if adds_up:
        parts["activations"] = waiting + kept
    else:
        parts["activations"] = max(kept - parts["gradients"], waiting)
    return parts | {"total": sum(parts.values())}


def _gathered_experts(
    config: Config, degrees: Degrees, facts: ModelFacts, stage: int, layers: Sequence[_UnitBytes], half: bool
) -> tuple[int, int]:
    """Returns what lives at the peak of experts that the ranks of a tensor group share, as dry runs show it.

    They are the bytes of gradients that wait to be reduced, or of a gathered matrix, and how many bytes of copies there
    are more, or fewer, than one of each matrix.
    """
    is_level3 = zero_level(config) == "level3"
    remakes = not {"block", "mlp"}.isdisjoint(facts.recomputed(config))
    micro_batches = micro_batches_per_step(config, degrees)
    if micro_batches > 1 and is_level3:
        return max((each.expert_gradients for each in layers), default=0), 0
    experts = half * sum(each.experts for each in layers)
    if degrees.pipeline_stage > 1:
        # What is gathered stays in float32, and each micro-batch under way has copies if it does not make them again.
        passes = max(sum(counts) // len(counts) for counts, _ in stage_passes(config, degrees, facts, stage))
        return 0, experts + (not remakes) * (passes - 1) * experts // 2
    if micro_batches > 1:  # MindSpore makes the copies of all micro-batches when it has gathered a matrix
        return max((each.largest for each in layers if each.experts), default=0), (micro_batches - 1) * experts // 2
    if not is_level3 or remakes:
        # All gradients wait for the end of the backward pass, when the copies have been freed.
        waiting = sum(each.expert_gradients for each in layers)
        return waiting, -half * waiting // 2
    # The gradients of a layer wait until the backward pass of the layer before it; those of the last one do not.
    moments = []
    for number, layer in enumerate(layers):
        waiting = layer.expert_gradients - sum(each.expert_sums for each in layers[:number])
        if number + 2 < len(layers):
            waiting += layers[number + 1].expert_gradients
        moments.append((waiting, -half * sum(each.expert_gradients for each in layers[number:]) // 2))
    return max(moments, key=sum, default=(0, 0))


def _unit_gradients(config: Config, unit: _UnitBytes, half: bool) -> UnitGradients:
    """Returns the gradients of a unit in explicit mode: those of matrices with a copy in half precision are in this."""
    raw = unit.trained
    if half:
        raw -= unit.trained_products // 2
    summed = unit.trained
    if not config.runner_wrapper.accumulate_allreduce_grads_in_fp32:
        summed = raw
    return UnitGradients(raw, summed, unit.largest)


def _local_bytes(
    spec: ParameterSpec, shape: tuple[int, ...], degrees: Degrees, is_graph: bool, threshold: int | None
) -> int:
    """Returns the bytes of a rank's float32 shard; data-parallel ranks shard what has at least `threshold` bytes."""
    parts = 1
    if is_graph and len(shape) > 1:  # into so many shards tensor or expert parallelism cuts it
        parts = degrees.model_parallel
        if len(shape) == 3:
            parts = degrees.expert_parallel
    local_bytes = math.prod(shape) * FLOAT32_BYTES // parts
    if threshold is None or local_bytes < threshold:
        return local_bytes
    # Ranks that share a sequence have the same weights, as ranks with other data have.
    replicas = degrees.data_parallel * degrees.context_parallel
    if is_graph:
        copies = degrees.ranks // parts
        if _has_copies_in_tensor_group(shape, degrees):
            replicas = copies
        else:
            replicas = min(replicas, copies)
    elif spec.sharding == "expert":
        replicas = degrees.ranks // degrees.expert_parallel
    return -(-local_bytes // replicas)


def _stage_ends(facts: ModelFacts, stage: int, stages: int, is_graph: bool) -> list[str]:
    """Returns the parameters outside of layers that a stage has.

    In semi-automatic mode only the first stage has a tied embedding.
    """
    if not is_graph:
        return [name for name in facts.ends if stage in end_stages(name, facts.spec, stages)]
    is_last = stage == stages - 1
    return [name for name in facts.ends if (name == EMBEDDING and stage == 0) or (name != EMBEDDING and is_last)]


def _has_copies_in_tensor_group(shape: tuple[int, ...], degrees: Degrees) -> bool:
    """Returns whether a parameter is that of experts which several ranks of a tensor group have, in semi-automatic
    mode.

    MindSpore shares them among all ranks that have them, if these are as many as divide their number.
    """
    if len(shape) != 3:
        return False
    ranks = degrees.ranks // degrees.expert_parallel
    others = degrees.data_parallel * degrees.context_parallel
    return ranks > others and shape[0] // degrees.expert_parallel % ranks == 0
