"""Memory that one rank of a job takes on an Ascend: an estimate of its peak, by part, from what the code keeps.

Weights and optimizer state are exact. In semi-automatic mode MindSpore shards them: matrices by model_parallel, experts
by expert_parallel too, layers by stage, and with enable_parallel_optimizer weights and optimizer state by data_parallel
and context_parallel. In explicit mode a rank has what `trainer.parallel.layout` gives it.

The peak is at the end of the forward pass, when all activations are kept, or at the end of the backward pass, when all
gradients are there; with several micro-batches gradients are there all the time. Activations are counted array by
array, those of semi-automatic mode in `graph`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

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
from trainer.models.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, ParameterSpec
from trainer.models.spec.names import EMBEDDING, sublayer_of
from trainer.models.spec.sublayers import mlp_spec
from trainer.parallel.layout import ModelLayout, end_stages, parameter_layout
from trainer.plan.device.graph import GraphMatrices, graph_memory, is_flash, kept_scores
from trainer.plan.device.model_facts import ModelFacts, ParameterUnit, is_half
from trainer.plan.division import chunk_passes, fullest_rank, micro_batch_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.parallel.mesh import Degrees
    from trainer.parallel.world import World

DEVICE_BYTES = 60 << 30
"""The part of a 64 GB device that MindSpore uses, without `max_device_memory`."""
_FLOAT32_BYTES = 4
_PIECE = 1 << 24  # logits that the loss of explicit mode computes at a time
_PIECE_BYTES = 8  # that its compiled functions hold for each of them: two arrays in float32
_FLASH_MASK_BYTES = 2048 * 2048


def device_memory(
    config: Config, world: World, facts: ModelFacts, stage: int | None = None
) -> dict[str, int]:
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
    chunks = facts.chunks(config)
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
        sums = state and zero_level(config) != "level1" or weights and micro_batches_per_step(config, degrees) == 1
        return cls(of_stage, is_graph, shard_threshold_bytes(config), weights, sums, state)


class _UnitBytes(NamedTuple):
    """Bytes of the parameters of a unit on a rank; those of matrices in float32, not shared.

    Attributes:
        gradients, state: Of the trained parameters.
        matrices: By the sublayer.
        products: Of the matrices that are multiplied: all but the embedding.
        trained_products: Of these the trained ones.
        copied: Of experts that several ranks of a tensor group have.
        copied_gradients: The rank's shard of the gradients of these.
    """

    weights: int
    gradients: int
    state: int
    matrices: dict[str, int]
    products: int
    trained_products: int
    copied: int
    copied_gradients: int


def _unit_bytes(unit: ParameterUnit, layout: _DeviceLayout, kv_heads: int) -> _UnitBytes:
    """Computes the bytes of a unit in a layout."""
    degrees = layout.degrees
    weights = 0
    gradients = 0
    state = 0
    matrices = {"attention": 0, "mlp": 0}
    products = 0
    trained_products = 0
    copied = 0
    copied_gradients = 0
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
        weights += sizes[layout.weights]
        gradients += sizes[layout.sums] * parameter.is_trained
        state += sizes[layout.state] * parameter.states
        if len(shape) == 1:
            continue
        matrices[sublayer_of(spec.name)] += sizes[False]
        if spec.name != EMBEDDING:
            products += sizes[False]
            trained_products += sizes[False] * parameter.is_trained
        if _has_copies_in_tensor_group(shape, degrees):
            copied += sizes[False]
            copied_gradients += sizes[layout.sums]
    return _UnitBytes(weights, gradients, state, matrices, products, trained_products, copied, copied_gradients)


def _stage_memory(
    config: Config, degrees: Degrees, facts: ModelFacts, layout: _DeviceLayout, stage: int
) -> dict[str, int]:
    """Returns the bytes of one rank of a stage, by part and in total."""
    trains = bool(facts.trained)
    layers = _stage_layers(config, degrees, facts, stage)
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
            unsharded = sum(each.copied * number for each, number in units)
            waiting = max((each.copied for each, _ in units), default=0)
            if zero_level(config) != "level3" or not adds_up:
                # The gradients of all these wait for the end of the backward pass, when the copies have been freed.
                waiting += unsharded
                if not adds_up:
                    waiting -= sum(each.copied_gradients * number for each, number in units)
                copies = max(copies - unsharded // 2, 0)
    else:
        largest = max((each.trained_products for each, _ in units), default=0)
        # The gradients of the largest layer, in half precision and in float32.
        gradients = largest * (2 + half) // 2
        kept = _activations(config, degrees, facts, stage, half, gradients)
    parts["weights in half precision"] = copies
    # Gradients take the place of activations, as the backward pass goes on.
    if adds_up:
        parts["activations"] = waiting + kept
    else:
        parts["activations"] = max(kept - parts["gradients"], waiting)
    return parts | {"total": sum(parts.values())}


def _local_bytes(
    spec: ParameterSpec, shape: tuple[int, ...], degrees: Degrees, is_graph: bool, threshold: int | None
) -> int:
    """Returns the bytes of a rank's float32 shard; data-parallel ranks shard what has at least `threshold` bytes."""
    parts = 1
    if is_graph:
        parts = _parts(shape, degrees)
    local_bytes = math.prod(shape) * _FLOAT32_BYTES // parts
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


def _stage_layers(config: Config, degrees: Degrees, facts: ModelFacts, stage: int) -> list[int]:
    """Returns the layers of a stage; the last one has those of the multi-token prediction modules, too."""
    layers = list(range(facts.spec.num_layers))
    if degrees.pipeline_stage > 1:
        layers = [layer for chunk in facts.chunks(config)[stage] for layer in chunk]
    if stage == degrees.pipeline_stage - 1:
        layers += facts.spec.module_layers
    return layers


def _stage_ends(facts: ModelFacts, stage: int, stages: int, is_graph: bool) -> list[str]:
    """Returns the parameters outside of layers that a stage has.

    In semi-automatic mode only the first stage has a tied embedding.
    """
    if not is_graph:
        return [name for name in facts.ends if stage in end_stages(name, facts.spec, stages)]
    is_last = stage == stages - 1
    return [name for name in facts.ends if (name == EMBEDDING and stage == 0) or (name != EMBEDDING and is_last)]


def _parts(shape: tuple[int, ...], degrees: Degrees) -> int:
    """Returns into how many shards tensor or expert parallelism cuts a parameter."""
    if len(shape) == 1:
        return 1
    if len(shape) == 3:
        return degrees.expert_parallel
    return degrees.model_parallel


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


def _activations(
    config: Config, degrees: Degrees, facts: ModelFacts, stage: int, half: bool, layer_gradients: int
) -> int:
    """Returns the bytes of activations at their peak in explicit mode.

    The peak is at the end of the forward pass, or while the backward pass recomputes a layer and its gradients appear.
    """
    settings = config.decoder
    tensor = degrees.model_parallel
    tokens = micro_batch_tokens(config, degrees)
    rows = 1
    if config.parallel_config.use_seq_parallel:
        rows = tensor
    spec = facts.once(("local", tensor), lambda: facts.spec.local(tensor))
    again = facts.recomputed(config)

    def sizes_of(layer: LayerSpec) -> dict[str, int]:
        """Returns what a layer keeps for a token, which is computed once for all equal layers."""
        key = ("kept", id(layer), rows, degrees.context_parallel)  # `spec` lives as long as the facts
        return facts.once(key, lambda: kept_of_layer(settings, layer, half, rows, degrees.context_parallel))

    kept = 0  # bytes of a token
    largest = 0  # of a layer that is not recomputed
    largest_recomputed = 0
    for layer, passes in _stage_passes(config, degrees, facts, stage).items():
        if layer < facts.first:
            continue
        sizes = sizes_of(spec.layers[layer])
        part = again[layer]
        if part:
            freed = sizes[part] - settings.hidden_size * _FLOAT32_BYTES // rows
            kept += passes * (sizes["block"] - freed)
            largest_recomputed = max(largest_recomputed, sizes[part])
        else:
            kept += passes * sizes["block"]
            largest = max(largest, sizes["block"])
    constants = _constants(settings, spec.layers[0].attention, tokens, half)
    # The compiled forward and backward pass each keep the constants that they received last.
    head = 2 * constants
    if stage == degrees.pipeline_stage - 1:
        head += _head(spec, tokens, half)
    # While the last feed-forward layer computes its gradients, the head's arrays are freed; the pass before keeps its
    # constants, too.
    backward = 3 * constants
    if not settings.experts:
        gradient_bytes = 8
        if _widens(settings, half):
            gradient_bytes = 12
        width = facts.once(("width", tensor), lambda: mlp_spec(settings).local(tensor).width)
        backward += tokens * gradient_bytes * width
    # MindSpore keeps what a compiled block saved last.
    forward = tokens * (kept + largest) + max(head, backward)
    # With the head: what its compiled chunks computed last, and its gradient.
    if largest_recomputed:
        return max(forward, tokens * (kept + largest_recomputed) + layer_gradients + head)
    return forward


def _stage_passes(config: Config, degrees: Degrees, facts: ModelFacts, stage: int) -> dict[int, int]:
    """Returns for each layer of a stage the most forward passes that wait for their backward pass."""
    stages = degrees.pipeline_stage
    if stages == 1:
        return dict.fromkeys(range(len(facts.spec.layers)), 1)
    key = (
        "in flight", stages, config.decoder.pp_interleave_num, config.parallel_config.micro_batch_num,
        config.parallel.pipeline_config.pipeline_scheduler,
    )  # fmt: skip
    counts = facts.once(key, lambda: chunk_passes(config, stages))[stage]
    passes = {layer: counts[chunk] for chunk, layers in enumerate(facts.chunks(config)[stage]) for layer in layers}
    if stage == stages - 1:
        passes |= dict.fromkeys(facts.spec.module_layers, counts[-1])
    return passes


def _head(spec: ModelSpec, tokens: int, half: bool) -> int:
    """Returns the bytes of the head and its loss in explicit mode, once their gradients are computed."""
    logits = tokens * spec.vocabulary
    width = 4
    if half:
        width = 2
    stream = tokens * spec.hidden * (4 + width)  # before and after the norm
    matrices = spec.vocabulary * spec.embedding * width  # the gradient of the matrix
    if spec.tied and half:
        matrices *= 3  # and its cast to float32
    return stream + min(logits, max(_PIECE, 128 * tokens)) * _PIECE_BYTES + matrices


def _widens(settings: ModelConfig, half: bool) -> bool:
    """Returns whether SwiGLU keeps float32 copies of its inputs, as the reference kernel does in half precision."""
    return half and not settings.use_fused_swiglu


def _constants(settings: ModelConfig, attention: AttentionSpec, tokens: int, half: bool) -> int:
    """Returns the bytes of the position tables and masks of a block.

    Args:
        attention: The local attention of the rank.
    """
    if settings.use_fused_rope:
        heads = 2
    else:
        heads = attention.heads + attention.kv_heads
    tables = 8 * heads * attention.head_size
    if is_flash(settings, half):
        return tokens * tables + _FLASH_MASK_BYTES
    return tokens * (tables + 4 * settings.seq_length)


def kept_of_layer(
    settings: ModelConfig, layer: LayerSpec, half: bool, rows: int = 1, sequence_ranks: int = 1
) -> dict[str, int]:
    """Returns the bytes that each sublayer of a layer, and the block, saves for a token in explicit mode.

    Residuals are float32. It counts the results of both output projections, and queries and keys before and after
    their norm.

    Args:
        settings: Which kernels are used.
        rows: Number of ranks that share the rows of the residual stream.
        sequence_ranks: Number of ranks that share a sequence; each gathers keys and values of all its tokens.
    """
    width = 4
    if half:
        width = 2
    spec = layer.attention
    hidden = spec.hidden
    streams = (4 + width) * hidden // rows  # residual stream and its norm
    streams += width * hidden * (rows > 1)  # gathered
    queries = spec.heads * spec.head_size
    keys = spec.kv_heads * spec.head_size
    values = spec.heads * spec.value_size
    if spec.latent is not None:
        # Before and after their norms; queries, keys and values of all heads, cut, rotated and joined.
        heads = width * (2 * spec.latent.down_size + 5 * queries + 2 * values)
    else:
        heads = (width + 2 * width * spec.head_norm) * (queries + keys) + width * keys
    if is_flash(settings, half):
        scores = spec.heads * 64  # largest score and sum of the softmax, eight times each
    else:
        scores = kept_scores(spec, settings.seq_length, width)
    if sequence_ranks > 1:  # in the order of the sequence, up to the last token of either half of the rank's tokens
        scores += (2 * sequence_ranks + 1) * keys * width
    # What dropout leaves of the input of an adapter. Those of the feed-forward layer are not counted.
    heads += width * hidden * sum(adapter.dropout > 0 for adapter in spec.adapters.values())
    projected = width * hidden // rows
    attention = streams + projected + heads + width * values + scores
    widens = _widens(settings, half)
    mlp = layer.mlp
    if isinstance(mlp, MlpSpec):
        # Gate and up, in the dtype in which they are multiplied, and their product.
        gates = 3 * width
        if widens:
            gates = 2 * 4 + width
        if mlp.is_gelu:  # its result is kept for the gradient of the product, too
            gates = 3 * 4 + width
        of_mlp = streams + projected + gates * mlp.width
        return {"attention": attention, "mlp": of_mlp, "block": attention + of_mlp}
    # Operator by operator: a token's rows before and after each operator that sorts, multiplies and adds up.
    rows = (mlp.chosen * 4 * (hidden + mlp.width) + hidden) * width
    rows += mlp.chosen * 12 * mlp.width * widens
    shared = 3 * mlp.shared_width * width + hidden * width * bool(mlp.shared_width)
    of_mlp = streams + 12 * mlp.experts + rows + shared
    return {"attention": attention, "mlp": of_mlp, "block": attention + of_mlp}
