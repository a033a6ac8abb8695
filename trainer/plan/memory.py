"""How much memory a run will take: an estimate of its peak, by part.

Weights, gradients and optimizer state are exact. Activations are counted, those of a CPU in `activations.py`. What
MindSpore takes beside them was measured on a CPU (2 to 12 layers of 64 to 1,024 numbers, 512 to 8,192 tokens a
micro-batch, vocabularies up to 32,768): there the estimate is within a tenth of the peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from trainer.config.checks.parallel import (
    micro_batches_per_step,
    parallel_degrees,
    shard_threshold_bytes,
    shards_optimizer,
    zero_level,
)
from trainer.device.doctor import memory_left_bytes, most_memory_bytes
from trainer.errors import UserError
from trainer.models.spec.names import EMBEDDING, HEAD, is_expert
from trainer.models.spec.sublayers import attention_spec
from trainer.ops.select import on_arrays, precision_of
from trainer.optim.freeze import trained_shapes
from trainer.optim.groups import STATE_NAMES, parameter_groups
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.plan.activations import ActivationMemory
from trainer.plan.device_memory import device_memory, fixed_bytes
from trainer.plan.division import RankParams, held_parts, micro_batch_tokens

if TYPE_CHECKING:
    from trainer.config import Config

MOST_SAMPLED_TOKENS = 128
"""Tokens of a text sampled by a training where `max_new_tokens` does not say it: the training waits for it."""
_FLOAT32_BYTES = 4
_ON_DEVICE = ("weights", "gradients", "optimizer state", "activations")
_IMPORT_BYTES = 416 << 20  # resident after `import mindspore`
_WORKSPACE_BYTES = 104 << 20  # what a run imports, threads and their scratch memory
_OPTIMIZER_STATES = {rule: len(names) for rule, names in STATE_NAMES.items()}  # arrays of a weight's size


def memory_estimate(
    config: Config, trains: bool, device: str, world: World = SINGLE_PROCESS, stage: int | None = None
) -> dict[str, int]:
    """Estimated peak of resident memory of a rank in bytes, by part and in total; on an Ascend of device memory.

    Args:
        stage: Of a pipeline; None: the one that needs most.
    """
    if device == "Ascend" and config.classifier is None:
        return device_memory(config, world, trains, _OPTIMIZER_STATES, stage)
    held = held_parts(config, world)
    every = (_host_memory(config, trains, device, world, one) for one in (held if stage is None else [held[stage]]))
    found = max(every, key=lambda parts: parts["total"])
    if device == "Ascend":  # of a classifier: MindSpore and its code are in the host's memory
        kept = {name: found[name] for name in _ON_DEVICE if name in found}
        return kept | {"total": sum(kept.values())}
    return found


def _host_memory(config: Config, trains: bool, device: str, world: World, held: RankParams) -> dict[str, int]:
    on_host = on_arrays(config, device, world)
    own_bytes = _ShardBytes(config, world)
    if trains:
        weights = own_bytes.weights(held.shapes)
    else:
        weights = _bytes(held.shapes)
    parts = {"MindSpore and Python": _IMPORT_BYTES}
    parts["workspaces"] = _WORKSPACE_BYTES
    parts["weights"] = weights
    if trains and config.sample_prompt and device == "CPU":
        parts["text samples"] = _sampling_bytes(config, held, weights)
    if config.run_mode in ("predict", "chat"):
        parts["cache of a full context"] = _cache_bytes(config, device)
        copies = 0
        if device == "CPU":
            copies = _merged_bytes(held)
        parts |= {"matrices merged with adapters": copies} if copies else {}
    if config.run_mode == "eval" and on_host:
        parts["activations"] = ActivationMemory(config, world, held, _product_bytes(config, world)).evaluation_peak()
    if trains:
        degrees = parallel_degrees(config, world)
        copies = 2
        if micro_batches_per_step(config, degrees) == 1:
            copies = 1
        trained = {name: held.shapes[name] for name in trained_shapes(config) if name in held.shapes}
        parts["gradients"] = own_bytes.gradients(trained, copies)
        parts["optimizer state"] = own_bytes.optimizer_state(trained)
        if on_host:
            if degrees.data_parallel * degrees.context_parallel > 1:  # a copy of what is summed, as was measured
                summed = {name: shape for name, shape in trained.items() if not is_expert(name)}
                parts["workspaces"] += own_bytes.gradients(summed, 1)
            activations = ActivationMemory(config, world, held, _product_bytes(config, world))
            parts["activations"] = activations.training_peak(_coming_gradients(held, own_bytes, trained))
        else:
            parts["activations"] = _operator_bytes(config, held, world)
    return parts | {"total": sum(parts.values())}


class _ShardBytes:
    """What a rank has of what enable_parallel_optimizer divides: equal parts of every parameter above the threshold."""

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.degrees = parallel_degrees(config, world)
        if shards_optimizer(config, world):
            self.level = zero_level(config)
        else:
            self.level = ""
        self.least = shard_threshold_bytes(config)

    def part(self, name: str, shape: tuple[int, ...]) -> int:
        """Bytes of the rank's range of a parameter."""
        size = _bytes({name: shape})
        degrees = self.degrees
        ranks = degrees.data_parallel * degrees.context_parallel
        if is_expert(name):
            ranks = ranks * degrees.model_parallel // degrees.expert_parallel
        if size < self.least or not self.level:
            return size
        return -(-size // ranks)

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        if self.level != "level3":
            return _bytes(shapes)
        layers = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.")}
        # What is used is whole, and what is used next, which may be under way: one of the two is a layer.
        whole = _largest_unit(shapes) + _largest_unit(layers)
        return sum(self.part(name, shape) for name, shape in shapes.items()) + whole

    def gradients(self, shapes: Mapping[str, tuple[int, ...]], copies: int) -> int:
        """Of trained parameters; `copies` 2: sums over micro-batches, and the gradients of one of them."""
        if self.level in ("", "level1"):
            return _bytes(shapes) * copies
        return sum(self.part(name, shape) for name, shape in shapes.items()) * copies + _largest_unit(shapes)

    def optimizer_state(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        groups = parameter_groups(shapes, self.config.optimizer.weight_decay, self.config.optimizer.type)
        arrays = {name: _OPTIMIZER_STATES[group.optimizer] for group in groups for name in group.parameters}
        return sum(number * self.part(name, shapes[name]) for name, number in arrays.items())


def _largest_unit(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of the largest layer, or of the embedding or head: what is whole at once where the rest is divided."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        unit = ".".join(name.split(".")[:3])
        sizes[unit] = sizes.get(unit, 0) + _bytes({name: shape})
    return max(sizes.values(), default=0)


def _coming_gradients(
    held: RankParams, own_bytes: _ShardBytes, trained: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Bytes of the gradients that take the place of activations as the backward pass goes on, by the names of their
    weights: those of layers, and of an embedding that is not the head. Those of experts find no room there, as was
    measured."""
    if own_bytes.level not in ("", "level1"):
        return {}
    names = [name for name in trained if name.startswith("model.layers.") and not is_expert(name)]
    if HEAD in held.shapes:
        names.append(EMBEDDING)
    return {name: own_bytes.gradients({name: trained[name]}, 1) for name in names if name in trained}


def _product_bytes(config: Config, world: World) -> int:
    """Of a number that products of whole layers on arrays take."""
    if precision_of(config, "CPU", world).compute.dtype == "float32":
        return _FLOAT32_BYTES
    return 2


def _operator_bytes(config: Config, held: RankParams, world: World) -> int:
    """A coarse upper estimate of the activations of a training whose operators run one by one."""
    if config.classifier is not None:
        labels = config.runner_config.batch_size * config.network.labels_per_sequence
        return 3 * sum(config.classifier.sizes) * labels * _FLOAT32_BYTES  # each layer: input, product, its gradient
    settings = config.decoder
    tokens = micro_batch_tokens(config, parallel_degrees(config, world))
    # Operators keep what they take, about twice what native layers keep, and scores and softmax of all heads.
    native = ActivationMemory(config, world, held, _FLOAT32_BYTES).training_peak({})
    scores = len(held.passes) * settings.num_heads * settings.seq_length * tokens * _FLOAT32_BYTES
    return 2 * (native + scores)


def _cache_bytes(config: Config, device: str) -> int:
    """What prediction keeps of the tokens of a batch: float32 on a CPU, elsewhere in the dtype of the products."""
    settings = config.decoder
    rows = 1
    if config.run_mode == "predict":
        rows = settings.batch_size
    tokens = rows * (settings.max_decode_length or settings.seq_length)
    dtype = precision_of(config, device).compute.dtype
    numbers = tokens * settings.num_layers * sum(attention_spec(settings).cache_widths)
    return numbers * (_FLOAT32_BYTES if dtype == "float32" else 2)


def _sampling_bytes(config: Config, held: RankParams, own_bytes: int) -> int:
    """What `sample_prompt` adds to a training: weights that ranks share are whole then, merged copies, and a cache.

    Args:
        own_bytes: Of the weights that the rank has between two samples.
    """
    settings = config.decoder
    given = config.sample_prompt
    new = settings.max_new_tokens or MOST_SAMPLED_TOKENS
    # A token is a byte of the prompt or more.
    longest = max(len(prompt.encode()) for prompt in ([given] if isinstance(given, str) else given))
    tokens = min(longest + new, settings.seq_length) * (1 if isinstance(given, str) else len(given))
    cached = tokens * len(held.passes) * sum(attention_spec(settings).cache_widths) // held.tensor
    whole = _bytes(held.shapes) - own_bytes
    return whole + _merged_bytes(held) + cached * _FLOAT32_BYTES


def _merged_bytes(held: RankParams) -> int:
    """A CPU generates text with copies of the matrices that have adapters, see `trainer.models.generate`."""
    adapted = {name.removesuffix(".lora_A.weight") for name in held.shapes if name.endswith(".lora_A.weight")}
    return _bytes({name: shape for name, shape in held.shapes.items() if name.removesuffix(".weight") in adapted})


def _bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values()) * _FLOAT32_BYTES


def check_memory(config: Config, parts: Mapping[str, int], ranks: int = 1, most_bytes: int | None = None) -> None:
    """Refuses a run whose weights, gradients and optimizer state alone, which are exact, exceed all memory there is.

    Args:
        parts: Of a rank, as `memory_estimate` returns them.
        ranks: On this host.
        most_bytes: What the host can give; None: as it says.

    Raises:
        UserError: They do.
    """
    needed = fixed_bytes(parts) * ranks
    most = most_bytes
    if most_bytes is None:
        most = most_memory_bytes()
    if needed <= most:
        return
    gib = 1 << 30
    if ranks == 1:
        who = "of the model"
    else:
        who = f"of the {ranks} ranks of this host"
    rule = (
        f"weights, gradients and optimizer state {who} alone take {needed / gib:,.1f} GiB of memory,"
        f" and this machine has {most / gib:,.1f} GiB"
    )
    fix = "reduce num_layers, hidden_size or vocab_size, or use a machine with more memory"
    raise UserError(rule, where=config.source.where("model"), key="model", fix=fix)


def memory_notes(rank_bytes: int, left_bytes: int | None = None, ranks: int = 1) -> Iterator[str]:
    """Says when `ranks` ranks on this host will probably not fit in `left_bytes` (None: what is available now)."""
    if left_bytes is None:
        left_bytes = memory_left_bytes()
    total_bytes = rank_bytes * ranks
    if total_bytes > left_bytes:
        mib = 1 << 20
        if ranks == 1:
            who = "the run needs"
        else:
            who = f"the {ranks} ranks of this host need"
        yield (
            f"{who} about {total_bytes / mib:,.0f} MiB of memory and {left_bytes / mib:,.0f} MiB are left:"
            " a smaller runner_config.batch_size with more gradient_accumulation_steps, or recompute_config.recompute,"
            " needs less"
        )
