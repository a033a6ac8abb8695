"""Memory that one rank of a job takes on an Ascend: an estimate of its peak, by part, from what the code keeps.

Weights and optimizer state are exact. In semi-automatic mode MindSpore shards them: matrices by model_parallel, experts
by expert_parallel too, layers by stage, and with enable_parallel_optimizer weights and optimizer state by data_parallel
and context_parallel. In explicit mode every rank has all weights.

The peak is at the end of the forward pass, when all activations are kept, or at the end of the backward pass, when all
gradients are there; with several micro-batches gradients are there all the time. Activations are counted array by
array. In a pipeline a stage keeps those of the micro-batches that it has under way (Narayanan et al. 2021, 1F1B).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from trainer.config.checks.parallel import degrees_of, runs_semi_auto, shard_threshold_bytes, shards_optimizer
from trainer.config.recompute import recomputed_parts
from trainer.config.stages import stage_layers
from trainer.models.shapes import EMBEDDING, all_shapes, is_buffer
from trainer.ops.precision import resolve_precision
from trainer.optim.freeze import first_trained_layer, frozen_names, trained_shapes
from trainer.optim.groups import parameter_groups
from trainer.parallel.mesh import Degrees

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.config import Config, ModelConfig
    from trainer.parallel.world import World

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FLOAT32_BYTES = 4
_PIECE = 1 << 24  # logits that the loss of explicit mode computes at a time
_PIECE_BYTES = 26  # that its compiled functions hold for each of them: six arrays in float32, one in half precision
_LOGIT_BYTES = 14  # of semi-automatic mode: three arrays in float32, one in half precision


class Kept(NamedTuple):
    """Bytes that a sublayer keeps for a token: what tensor-parallel ranks have each, and what they share."""

    whole: int
    shared: int

    def of_rank(self, model_parallel: int) -> int:
        return self.whole + self.shared // model_parallel


def device_memory(config: Config, world: World, trains: bool, states: dict[str, int]) -> dict[str, int]:
    """Bytes on a rank, of the stage that needs most, by part and in total.

    Args:
        states: Arrays of a weight's size that each update rule keeps.
    """
    if not runs_semi_auto(config, world):
        return _stage(config, world, Degrees(), trains, states, 0)
    degrees = degrees_of(config, world)
    every = [_stage(config, world, degrees, trains, states, stage) for stage in range(degrees.pipeline_stage)]
    return max(every, key=lambda parts: parts["total"])


def fixed_bytes(parts: dict[str, int]) -> int:
    """The part of the memory that is certain."""
    return sum(parts.get(name, 0) for name in ("weights", "gradients", "optimizer state"))


def _stage(
    config: Config, world: World, degrees: Degrees, trains: bool, states: dict[str, int], stage: int
) -> dict[str, int]:
    settings, stages = config.decoder, degrees.pipeline_stage
    is_graph = runs_semi_auto(config, world)
    layers = stage_layers(config)[stage] if stages > 1 else list(range(settings.num_layers))
    if stage == stages - 1:
        layers = [*layers, *range(settings.num_layers, settings.num_layers + settings.mtp_depth)]
    held, own = all_shapes(settings), set(layers)
    names = [name for name in held if _is_of_stage(name, own, stage == 0, stage == stages - 1)]
    least = shard_threshold_bytes(config)
    shares_weights = is_graph and trains and config.parallel.enable_parallel_optimizer
    shares_state = shares_weights or (not is_graph and shards_optimizer(config, world))

    def size(name: str, shared: bool) -> int:
        parts = _parts(held[name], degrees)
        whole = math.prod(held[name]) * _FLOAT32_BYTES // parts
        # Ranks that share a sequence have the same weights, as ranks with other data have.
        same = min(degrees.data_parallel * degrees.context_parallel, degrees.ranks // degrees.pipeline_stage // parts)
        return -(-whole // (same if is_graph else world.size)) if shared and whole >= least else whole

    parts = {"weights": sum(size(name, shares_weights) for name in names)}
    half = resolve_precision(settings, config.amp_level, "Ascend").compute.dtype != "float32"
    copied = [name for name in names if half and len(held[name]) > 1 and name != EMBEDDING]
    # A copy of each matrix in the dtype of the products; whole, also where ranks share the weights.
    parts["weights in half precision"] = sum(size(name, False) for name in copied) // 2
    if shares_weights and EMBEDDING in names:
        parts["weights in half precision"] += size(EMBEDDING, False)
    if not trains:
        return parts | {"total": sum(parts.values())}
    trained = {name: shape for name, shape in trained_shapes(config).items() if name in set(names)}
    groups = parameter_groups(trained, config.optimizer.weight_decay, config.optimizer.type)
    of_trained = [name for name in trained if not is_buffer(name)]
    micro_batches = config.parallel_config.micro_batch_num if stages > 1 else 1
    adds_up = max(config.runner_config.gradient_accumulation_steps, micro_batches) > 1
    parts["gradients"] = sum(size(name, shares_weights and not adds_up) for name in of_trained)
    parts["optimizer state"] = sum(
        states[group.rule] * size(name, shares_state) for group in groups for name in group.parameters
    )
    under_way = min(stages - stage, micro_batches)
    # While a layer is computed again: its gradients in half precision and in float32, and where ranks share the
    # weights, these as they are gathered.
    sizes = {layer: sum(size(name, False) for name in of_trained if _layer_of(name) == layer) for layer in own}
    of_layer = max(sizes.values(), default=0)
    of_layer = of_layer * (3 if half else 2) // 2 + of_layer * shares_weights
    kept = _activations(config, degrees, layers, stage, under_way, half, is_graph, of_layer)
    # Gradients take the place of activations, as the backward pass goes on.
    parts["activations"] = kept if adds_up else max(kept - parts["gradients"], 0)
    return parts | {"total": sum(parts.values())}


def _is_of_stage(name: str, layers: set[int], first: bool, last: bool) -> bool:
    layer = _layer_of(name)
    if layer is not None:
        return layer in layers
    return first if name == EMBEDDING else last


def _layer_of(name: str) -> int | None:
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def _parts(shape: tuple[int, ...], degrees: Degrees) -> int:
    """Into how many parts a parameter is cut by the other degrees than data_parallel."""
    if len(shape) == 1:
        return 1
    return degrees.expert_parallel if len(shape) == 3 else degrees.model_parallel


def _activations(
    config: Config,
    degrees: Degrees,
    layers: Sequence[int],
    stage: int,
    under_way: int,
    half: bool,
    is_graph: bool,
    gradients_of_layer: int,
) -> int:
    """Bytes of the micro-batches that the stage has under way: at the end of the forward pass, or while the backward
    pass computes a layer again, whose gradients come then."""
    settings, share = config.decoder, degrees.model_parallel
    tokens = config.runner_config.batch_size * settings.seq_length // degrees.context_parallel
    again = recomputed_parts(config) + ("",) * settings.mtp_depth
    first = 0 if is_graph else first_trained_layer(config, frozen_names(config))
    kept = largest = again_largest = 0
    for layer in layers:
        if layer < first:
            continue
        sizes = {name: of.of_rank(share) for name, of in _kept_of_layer(settings, layer, half, is_graph).items()}
        sizes["block"] = sum(sizes.values())
        part = again[layer]
        kept += sizes["block"] - (sizes[part] - settings.hidden_size * _FLOAT32_BYTES if part else 0)
        largest = max(largest, 0 if is_graph or part else sizes["block"])
        again_largest = max(again_largest, sizes[part] if part else 0)
    is_last = stage == degrees.pipeline_stage - 1
    head = _head(settings, tokens, share, half, is_graph) if is_last else 0
    # In explicit mode MindSpore holds what a compiled block kept last.
    forward = tokens * (kept * under_way + largest) + head
    if not again_largest:
        return forward
    held = head if not is_graph else 0  # what the head's compiled pieces computed last, and its gradient
    return max(forward, tokens * (kept * under_way + again_largest) + gradients_of_layer + held)


def _head(settings: ModelConfig, tokens: int, share: int, half: bool, is_graph: bool) -> int:
    """Bytes of the head and its loss, when its gradients are there."""
    logits = tokens * settings.vocab_size
    stream = tokens * settings.hidden_size * (6 if half else 8)  # before and after the norm
    if is_graph:
        return stream + logits * _LOGIT_BYTES // share
    # The gradient of the matrix; that of a tied embedding is cast to float32.
    matrix = settings.vocab_size * settings.embedding_width * (2 if half else 4)
    matrices = (3 if settings.tie_word_embeddings and half else 1) * matrix
    return stream + min(logits, max(_PIECE, 128 * tokens)) * _PIECE_BYTES + matrices


def _kept_of_layer(settings: ModelConfig, layer: int, half: bool, is_graph: bool) -> dict[str, Kept]:
    """What each sublayer of a layer keeps for a token; residuals are float32.

    Explicit mode keeps the results of both output projections too, and of queries and keys what enters and leaves their
    norm; semi-automatic mode what enters it in float32.
    """
    width, hidden = 2 if half else 4, settings.hidden_size
    streams = (4 + width) * hidden  # residual stream and its norm
    queries, keys = settings.num_heads * settings.head_size, settings.kv_heads * settings.head_size
    values = settings.num_heads * settings.value_size
    if settings.multi_latent_attention:
        # Before and after their norms; queries, keys and values of all heads, cut, rotated and joined.
        latent = 2 * ((settings.q_lora_rank or 0) + settings.kv_lora_rank + settings.qk_rope_head_dim)
        heads = width * (latent + 5 * queries + 2 * values)
    else:
        normed = 4 if is_graph else 2 * width  # what enters the norm of a number of a head, and what leaves it
        heads = (width + normed * settings.use_qk_norm) * (queries + keys) + width * keys
    if settings.use_flash_attention and half:
        scores = settings.num_heads * 64  # largest score and sum of the softmax, eight times each
    else:
        scores = settings.num_heads * settings.seq_length * 4 * (2 if is_graph else 1)
    of_projection = 0 if is_graph else width * hidden
    attention = Kept(streams + of_projection, heads + width * values + scores)
    if not settings.is_moe_layer(layer):
        return {"attention": attention, "mlp": Kept(streams + of_projection, 3 * width * settings.ffn_size)}
    moe = settings.experts
    # Operator by operator: a token's rows before and after each operator that sorts, multiplies and adds up.
    rows = (moe.num_experts_chosen * 4 * (hidden + settings.expert_size) + hidden) * width
    shared = 3 * settings.shared_expert_size * width + hidden * width * bool(settings.shared_expert_size)
    return {"attention": attention, "mlp": Kept(streams + 12 * moe.expert_num + rows, shared)}
