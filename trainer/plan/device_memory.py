"""Memory that one rank of a job takes on an Ascend: an estimate from its degrees of parallelism, by part.

Weights, gradients and optimizer state are counted exactly, as MindSpore's semi-automatic mode shards them: matrices by
model_parallel, experts by expert_parallel too, layers by stage, and with enable_parallel_optimizer weights and
optimizer state by data_parallel and context_parallel. Activations are those that `trainer.plan.memory` counts for a
token, without attention scores where flash attention is used, for the micro-batches that a stage has under way
(Narayanan et al. 2021, 1F1B).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from trainer.config.checks.parallel import degrees_of, shard_threshold_bytes
from trainer.config.recompute import recomputed_parts
from trainer.config.stages import stage_layers
from trainer.models.shapes import EMBEDDING, all_shapes, is_buffer
from trainer.optim.freeze import trained_shapes
from trainer.optim.groups import parameter_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainer.config import Config, ModelConfig
    from trainer.parallel.mesh import Degrees
    from trainer.parallel.world import World

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FLOAT32_BYTES = 4


def stage_memory(
    config: Config,
    world: World,
    trains: bool,
    states: dict[str, int],
    sublayers: Callable[[ModelConfig, int], dict[str, int]],
) -> dict[str, int]:
    """Bytes on a rank of the stage that needs most, by part and in total.

    Args:
        states: Arrays of a weight's size that each update rule keeps.
        sublayers: Float32 values that each sublayer of a layer, and the whole "block", keep for a token.
    """
    stages = range(degrees_of(config, world).pipeline_stage)
    every = [_stage(config, world, trains, states, sublayers, stage) for stage in stages]
    return max(every, key=lambda parts: parts["total"])


def fixed_bytes(parts: dict[str, int]) -> int:
    """The part of the memory that is certain."""
    return sum(parts.get(name, 0) for name in ("weights", "gradients", "optimizer state"))


def _stage(
    config: Config,
    world: World,
    trains: bool,
    states: dict[str, int],
    sublayers: Callable[[ModelConfig, int], dict[str, int]],
    stage: int,
) -> dict[str, int]:
    degrees, settings = degrees_of(config, world), config.decoder
    stages = degrees.pipeline_stage
    layers = stage_layers(config)[stage] if stages > 1 else list(range(settings.num_layers))
    if stage == stages - 1:
        layers = [*layers, *range(settings.num_layers, settings.num_layers + settings.mtp_depth)]
    held, own = all_shapes(settings), set(layers)
    names = [name for name in held if _is_of_stage(name, own, stage == 0, stage == stages - 1)]
    least = shard_threshold_bytes(config)

    def size(name: str, shared: bool) -> int:
        parts = _parts(held[name], degrees)
        whole = math.prod(held[name]) * _FLOAT32_BYTES // parts
        # Ranks that share a sequence have the same weights, as ranks with other data have.
        copies = min(degrees.data_parallel * degrees.context_parallel, degrees.ranks // degrees.pipeline_stage // parts)
        shared = shared and config.parallel.enable_parallel_optimizer and whole >= least
        return -(-whole // copies) if shared else whole

    parts = {"weights": sum(size(name, shared=trains) for name in names)}
    if trains:
        trained = {name: shape for name, shape in trained_shapes(config).items() if name in set(names)}
        groups = parameter_groups(trained, config.optimizer.weight_decay, config.optimizer.type)
        parts["gradients"] = sum(size(name, shared=False) for name in trained if not is_buffer(name))
        parts["optimizer state"] = sum(
            states[group.rule] * size(name, shared=True) for group in groups for name in group.parameters
        )
        parts["activations"] = _activations(config, degrees, layers, stage, sublayers)
    return parts | {"total": sum(parts.values())}


def _is_of_stage(name: str, layers: set[int], first: bool, last: bool) -> bool:
    found = _LAYER.match(name)
    if found:
        return int(found[1]) in layers
    return first if name == EMBEDDING else last


def _parts(shape: tuple[int, ...], degrees: Degrees) -> int:
    """Into how many parts a parameter is cut by the other degrees than data_parallel."""
    if len(shape) == 1:
        return 1
    return degrees.expert_parallel if len(shape) == 3 else degrees.model_parallel


def _activations(
    config: Config,
    degrees: Degrees,
    layers: Iterable[int],
    stage: int,
    sublayers: Callable[[ModelConfig, int], dict[str, int]],
) -> int:
    """Bytes of all micro-batches that the stage has under way; half precision but for residuals and norms."""
    settings, stages = config.decoder, degrees.pipeline_stage
    tokens = config.runner_config.batch_size * settings.seq_length // degrees.context_parallel
    again = recomputed_parts(config) + ("",) * settings.mtp_depth
    scores = settings.num_heads * settings.seq_length * 3 // 4 if settings.use_flash_attention else 0
    kept = working = 0
    for layer in layers:
        part, sizes = again[layer], sublayers(settings, layer)
        sizes = sizes | {name: sizes[name] - scores for name in ("attention", "block")}
        kept += sizes["block"] - (sizes[part] if part else 0) + (settings.hidden_size if part else 0)
        working = max(working, sizes[part] if part else 0)
    # Under 1F1B a stage has as many micro-batches under way as there are stages from it to the last.
    under_way = min(stages - stage, config.parallel_config.micro_batch_num) if stages > 1 else 1
    share = degrees.model_parallel
    half = 5 / 8 if settings.compute_dtype in ("bfloat16", "float16") else 1
    values = (kept * under_way + working) * half
    logits = 3 * settings.vocab_size if stage == stages - 1 else 0
    return int(tokens * (values + logits) / share) * _FLOAT32_BYTES
