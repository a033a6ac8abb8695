"""Memory that one rank of a job takes on an Ascend: an estimate of its peak, by part, from what the code keeps.

Weights and optimizer state are exact. In semi-automatic mode MindSpore shards them: matrices by model_parallel, experts
by expert_parallel too, layers by stage, and with enable_parallel_optimizer weights and optimizer state by data_parallel
and context_parallel. In explicit mode a rank has what `trainer.parallel.layout` gives it.

The peak is at the end of the forward pass, when all activations are kept, or at the end of the backward pass, when all
gradients are there; with several micro-batches gradients are there all the time. Activations are counted array by
array, those of semi-automatic mode in `graph_memory`.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

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
from trainer.config.stages import stage_layers
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from trainer.models.spec.names import EMBEDDING, is_buffer
from trainer.models.spec.shapes import all_shapes
from trainer.models.spec.sublayers import mlp_spec
from trainer.ops.precision import resolve_precision
from trainer.optim.freeze import trained_shapes
from trainer.optim.groups import parameter_groups, state_names
from trainer.plan.division import RankParams, micro_batch_tokens, rank_params_per_stage
from trainer.plan.graph_memory import graph_memory, is_flash, kept_scores

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.parallel.mesh import Degrees
    from trainer.parallel.world import World

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FLOAT32_BYTES = 4
_PIECE = 1 << 24  # logits that the loss of explicit mode computes at a time
_PIECE_BYTES = 8  # that its compiled functions hold for each of them: two arrays in float32
_FLASH_MASK_BYTES = 2048 * 2048


def device_memory(config: Config, world: World, trains: bool, stage: int | None = None) -> dict[str, int]:
    """Returns the bytes of a rank by part and in total, for the stage that needs most, or for `stage`."""
    degrees = parallel_degrees(config, world)
    stages: Sequence[int] = range(degrees.pipeline_stage)
    if stage is not None:
        stages = [stage]
    trained: dict[str, tuple[int, ...]] = {}
    if trains:
        trained = trained_shapes(config)
    params: list[RankParams | None] = [None] * degrees.pipeline_stage
    if not runs_semi_auto(config, world):
        params = [*rank_params_per_stage(config, world)]
    estimates = (_stage_memory(config, world, degrees, trained, number, params[number]) for number in stages)
    return max(estimates, key=lambda parts: parts["total"])


def fixed_bytes(parts: Mapping[str, int]) -> int:
    """Returns the bytes of weights, gradients and optimizer state, which are exact."""
    return sum(parts.get(name, 0) for name in ("weights", "gradients", "optimizer state"))


def _stage_memory(
    config: Config,
    world: World,
    degrees: Degrees,
    trained: dict[str, tuple[int, ...]],
    stage: int,
    params: RankParams | None,
) -> dict[str, int]:
    """Returns the bytes of one rank of a stage, by part and in total.

    Args:
        trained: The shapes of the trained parameters; empty if nothing is trained.
        params: The rank's parameters in explicit mode; None in semi-automatic mode.
    """
    is_graph = params is None
    sharding = degrees
    settings = config.decoder
    if params is None:
        shapes = all_shapes(settings)
        names = _semi_auto_names(config, stage, degrees.pipeline_stage)
    else:
        shapes = params.shapes
        names = list(shapes)
        sharding = degrees._replace(data_parallel=sharding_ranks(config, degrees))
    thresholds = {False: None, True: shard_threshold_bytes(config)}
    shares_weights = is_graph and bool(trained) and config.parallel.enable_parallel_optimizer
    shares_state = shares_weights or (not is_graph and shards_optimizer(config, world))

    def size(name: str, shared: bool) -> int:
        """Returns the bytes of a rank's shard of a parameter."""
        return _local_bytes(name, shapes[name], sharding, is_graph, thresholds[shared])

    parts = {"weights": sum(size(name, shares_weights) for name in names)}
    half = resolve_precision(settings, config.amp_level, "Ascend").compute.dtype != "float32"
    matrices = {name: size(name, False) for name in names if len(shapes[name]) > 1}
    # A copy of each matrix in the dtype of the products; unsharded, even if ranks shard the weights.
    copies = sum(bytes_ for name, bytes_ in matrices.items() if half and name != EMBEDDING) // 2
    if not trained:
        parts["weights in half precision"] = copies
        return parts | {"total": sum(parts.values())}
    local = {name: trained[name] for name in names if name in trained}
    groups = parameter_groups(local, config.optimizer)
    of_trained = [name for name in local if not is_buffer(name)]
    adds_up = micro_batches_per_step(config, degrees) > 1
    level = zero_level(config)
    shares_sums = shares_state and level != "level1" or shares_weights and not adds_up
    parts["gradients"] = sum(size(name, shares_sums) for name in of_trained)
    if half and not is_graph and not config.runner_wrapper.accumulate_allreduce_grads_in_fp32:
        parts["gradients"] -= sum(matrices.get(name, 0) for name in of_trained if name != EMBEDDING) // 2
    states = state_names(config.optimizer)
    parts["optimizer state"] = sum(
        len(states[group.optimizer]) * size(name, shares_state) for group in groups for name in group.parameters
    )
    waiting = 0
    if params is None:
        shares = shares_weights and degrees.data_parallel * degrees.context_parallel > 1
        graph = graph_memory(config, degrees, stage, half, matrices, shares, adds_up)
        copies = graph.copies
        kept = graph.activations
        parts["masks and tables"] = graph.constants
        if shares_weights:
            copied = [name for name in matrices if _has_copies_in_tensor_group(shapes[name], degrees)]
            unsharded = {name: matrices[name] for name in copied}
            waiting = _largest_layer(unsharded)
            if level != "level3" or not adds_up:
                # The gradients of all these wait for the end of the backward pass, when the copies have been freed.
                waiting += sum(unsharded.values())
                if not adds_up:
                    waiting -= sum(size(name, shares_sums) for name in unsharded)
                copies = max(copies - sum(unsharded.values()) // 2, 0)
    else:
        gradients = _layer_gradient_bytes(of_trained, matrices, half)
        kept = _activations(config, degrees, params, trained, half, gradients)
    parts["weights in half precision"] = copies
    # Gradients take the place of activations, as the backward pass goes on.
    if adds_up:
        parts["activations"] = waiting + kept
    else:
        parts["activations"] = max(kept - parts["gradients"], waiting)
    return parts | {"total": sum(parts.values())}


def _local_bytes(name: str, shape: tuple[int, ...], degrees: Degrees, is_graph: bool, threshold: int | None) -> int:
    """Returns the bytes of a rank's float32 shard; data-parallel ranks shard what has at least `threshold` bytes."""
    parts = 1
    if is_graph:
        parts = _parts(shape, degrees)
    local_bytes = math.prod(shape) * _FLOAT32_BYTES // parts
    if threshold is None or local_bytes < threshold:
        return local_bytes
    # Ranks that share a sequence have the same weights, as ranks with other data have.
    replicas = degrees.data_parallel * degrees.context_parallel
    ranks = degrees.ranks // degrees.pipeline_stage
    if is_graph:
        copies = ranks // parts
        if _has_copies_in_tensor_group(shape, degrees):
            replicas = copies
        else:
            replicas = min(replicas, copies)
    elif ".experts." in name:
        replicas = ranks // degrees.expert_parallel
    return -(-local_bytes // replicas)


def _layer_gradient_bytes(trained: Sequence[str], matrices: Mapping[str, int], half: bool) -> int:
    """Returns the bytes of the gradients of the largest layer, in half precision and in float32."""
    of_layers = {name: matrices.get(name, 0) for name in trained if _layer_of(name) is not None}
    return _largest_layer(of_layers) * (3 if half else 2) // 2


def _semi_auto_names(config: Config, stage: int, stages: int) -> list[str]:
    """Returns the parameters of a stage in semi-automatic mode, in which only the first stage has a tied embedding."""
    spec = model_spec(config.decoder)
    is_last = stage == stages - 1
    layers = set(range(spec.num_layers))
    if stages > 1:
        layers = set(stage_layers(config)[stage])
    if is_last:
        layers |= set(spec.module_layers)

    def belongs(name: str) -> bool:
        """Returns whether the stage has a parameter."""
        layer = _layer_of(name)
        if layer is not None:
            return layer in layers
        if name == EMBEDDING:
            return stage == 0
        return is_last

    return [name for name in spec.parameters() if belongs(name)]


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    if match:
        return int(match[1])
    return None


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
    ranks = degrees.ranks // degrees.pipeline_stage // degrees.expert_parallel
    others = degrees.data_parallel * degrees.context_parallel
    return ranks > others and shape[0] // degrees.expert_parallel % ranks == 0


def _largest_layer(sizes: Mapping[str, int]) -> int:
    layers: dict[int | None, int] = {}
    for name, size in sizes.items():
        layers[_layer_of(name)] = layers.get(_layer_of(name), 0) + size
    return max(layers.values(), default=0)


def _activations(
    config: Config, degrees: Degrees, params: RankParams, trained: Collection[str], half: bool, layer_gradients: int
) -> int:
    """Returns the bytes of activations at their peak in explicit mode.

    The peak is at the end of the forward pass, or while the backward pass recomputes a layer and its gradients appear.

    Args:
        trained: The trained parameters of all stages.
    """
    settings = config.decoder
    tokens = micro_batch_tokens(config, degrees)
    rows = 1
    if config.parallel_config.use_seq_parallel:
        rows = degrees.model_parallel
    spec = model_spec(settings).local(degrees.model_parallel)
    again = recomputed_parts(config)
    first = spec.first_reached(trained)
    kept = 0  # bytes of a token
    largest = 0  # of a layer that is not recomputed
    largest_recomputed = 0
    for layer, passes in params.passes.items():
        if layer < first:
            continue
        sizes = _kept_of_layer(settings, spec.layers[layer], half, rows, degrees.context_parallel)
        sizes["block"] = sum(sizes.values())
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
    if params.has_head:
        head += _head(spec, tokens, half)
    # While the last feed-forward layer computes its gradients, the head's arrays are freed; the pass before keeps its
    # constants, too.
    backward = 3 * constants
    if not settings.experts:
        gradient_bytes = 8
        if _widens(settings, half):
            gradient_bytes = 12
        backward += tokens * gradient_bytes * mlp_spec(settings).local(degrees.model_parallel).width
    # MindSpore keeps what a compiled block saved last.
    forward = tokens * (kept + largest) + max(head, backward)
    # With the head: what its compiled chunks computed last, and its gradient.
    if largest_recomputed:
        return max(forward, tokens * (kept + largest_recomputed) + layer_gradients + head)
    return forward


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


def _kept_of_layer(
    settings: ModelConfig, layer: LayerSpec, half: bool, rows: int = 1, sequence_ranks: int = 1
) -> dict[str, int]:
    """Returns the bytes that each sublayer of a layer saves for a token in explicit mode, where residuals are float32.

    It counts the results of both output projections, and queries and keys before and after their norm.

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
        return {"attention": attention, "mlp": streams + projected + gates * mlp.width}
    # Operator by operator: a token's rows before and after each operator that sorts, multiplies and adds up.
    rows = (mlp.chosen * 4 * (hidden + mlp.width) + hidden) * width
    rows += mlp.chosen * 12 * mlp.width * widens
    shared = 3 * mlp.shared_width * width + hidden * width * bool(mlp.shared_width)
    return {"attention": attention, "mlp": streams + 12 * mlp.experts + rows + shared}
