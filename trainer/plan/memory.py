"""How much memory a run will take: an estimate of its peak, by part.

Weights, gradients and optimizer state are exact. Activations are counted: what the kernels and the operators between
them keep for the backward pass. What MindSpore takes beside them was measured on a CPU (2 to 12 layers of 64 to 256
numbers, 512 to 8,192 tokens a micro-batch, vocabularies up to 32,768): there the estimate is within a tenth of the
peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from trainer.config.checks.parallel import (
    degrees_of,
    micro_batches,
    shard_threshold_bytes,
    shards_optimizer,
    sharing_level,
)
from trainer.config.recompute import recomputed_parts
from trainer.device.doctor import memory_left_bytes, most_memory_bytes
from trainer.errors import UserError
from trainer.models.spec.adapters import layer_targets
from trainer.models.spec.names import EMBEDDING, is_expert, layer_prefix, sublayer_of
from trainer.models.spec.shapes import attention_shapes, mlp_shapes
from trainer.ops.precision import resolve_precision
from trainer.ops.select import on_arrays, precision_of
from trainer.optim.freeze import first_trained_layer, frozen_names, trained_shapes
from trainer.optim.groups import STATE_NAMES, parameter_groups
from trainer.parallel.layout import local_settings
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.plan.device_memory import device_memory, fixed_bytes
from trainer.plan.division import Held, held_parts
from trainer.plan.host_memory import head_bytes, layer_bytes, sublayer_bytes

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig

MOST_SAMPLED_TOKENS = 128
"""Tokens of a text sampled by a training where `max_new_tokens` does not say it: the training waits for it."""
_FLOAT32_BYTES = 4
_ON_DEVICE = ("weights", "gradients", "optimizer state", "activations")
_IMPORT_BYTES = 416 << 20  # resident after `import mindspore`
_WORKSPACE_BYTES = 72 << 20  # what a run imports, threads and their scratch memory
_COMPILED_BYTES = 128 << 20  # code of the compiled blocks, workspaces of the kernels, threads
_SECOND_BLOCK_BYTES = 96 << 20  # dense layers beside layers with experts: two blocks are compiled
_HALF_KEEPS = 5  # eighths of a block's activations with half precision: residuals and norms stay float32
_FRAGMENTATION = 4  # a quarter of the activations: blocks of the allocator that are held and not full; where ranks
# divide matrices or layers, none was seen
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


def _host_memory(config: Config, trains: bool, device: str, world: World, held: Held) -> dict[str, int]:
    settings, network, on_host = config.decoder, config.network, on_arrays(config, device, world)
    own_bytes = _OwnBytes(config, world)
    weights = own_bytes.weights(held.shapes) if trains else _bytes(held.shapes)
    parts = {"MindSpore and Python": _IMPORT_BYTES}
    parts |= {"workspaces": _WORKSPACE_BYTES} if on_host else {"compiled code, workspaces": _COMPILED_BYTES}
    parts["weights"] = weights
    if trains and config.sample_prompt and device == "CPU":
        parts["text samples"] = _sampling_bytes(config, world, held, weights)
    if config.run_mode in ("predict", "chat"):
        parts["cache of a full context"] = _cache_bytes(config, device)
        copies = _rounded_bytes(config, world, held) if device == "CPU" else 0
        parts |= {"rounded copies of weights": copies} if copies else {}
    if config.run_mode == "eval" and on_host:
        tokens, layers = config.runner_config.batch_size * settings.seq_length, range(settings.num_layers)
        narrow = _product_bytes(config, world)
        passing = max((sublayer_bytes(settings, layer, narrow)["attention"].kept for layer in layers), default=0)
        parts["activations"] = head_bytes(settings, tokens, narrow) + tokens * passing
    if trains:
        shared = degrees_of(config, world).context_parallel  # each of so many ranks has a part of a sequence
        labels = config.runner_config.batch_size * network.labels_per_sequence // shared
        copies = 1 if micro_batches(config, degrees_of(config, world)) == 1 else 2
        trained = {name: held.shapes[name] for name in trained_shapes(config) if name in held.shapes}
        parts["gradients"] = own_bytes.gradients(trained, copies)
        parts["optimizer state"] = own_bytes.optimizer_state(trained)
        if on_host:
            if degrees_of(config, world).data_parallel > 1:  # a copy of the gradients that are summed, as was measured
                summed = {name: shape for name, shape in trained.items() if not is_expert(name)}
                parts["workspaces"] += own_bytes.gradients(summed, 1)
            parts["activations"] = _host_activations(config, labels, held, own_bytes, trained)
            return parts | {"total": sum(parts.values())}
        parts["activations"] = labels * _activations_of_label(config, device, held) * _FLOAT32_BYTES
        if held.tensor == 1 and len(held.passes) == settings.num_layers + settings.mtp_depth:
            parts["compiled code, workspaces"] += parts["activations"] // _FRAGMENTATION
        if len({settings.is_moe_layer(layer) for layer in range(settings.num_layers)}) == 2:
            parts["compiled code, workspaces"] += _SECOND_BLOCK_BYTES
    return parts | {"total": sum(parts.values())}


class _OwnBytes:
    """What a rank has of what enable_parallel_optimizer divides: equal parts of every parameter above the threshold."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world, self.degrees = config, world, degrees_of(config, world)
        self.level = sharing_level(config) if shards_optimizer(config, world) else ""
        self.least = shard_threshold_bytes(config)

    def part(self, name: str, shape: tuple[int, ...]) -> int:
        """Bytes of the rank's range of a parameter."""
        size, degrees = _bytes({name: shape}), self.degrees
        ranks = degrees.data_parallel * degrees.context_parallel
        if is_expert(name):
            ranks = ranks * degrees.model_parallel // degrees.expert_parallel
        return size if size < self.least or not self.level else -(-size // ranks)

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
        arrays = {name: _OPTIMIZER_STATES[group.rule] for group in groups for name in group.parameters}
        return sum(number * self.part(name, shapes[name]) for name, number in arrays.items())


def _largest_unit(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of the largest layer, or of the embedding or head: what is whole at once where the rest is divided."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        unit = ".".join(name.split(".")[:3])
        sizes[unit] = sizes.get(unit, 0) + _bytes({name: shape})
    return max(sizes.values(), default=0)


def _host_activations(
    config: Config, tokens: int, held: Held, own_bytes: _OwnBytes, trained: Mapping[str, tuple[int, ...]]
) -> int:
    """Bytes of a micro-batch beside all gradients, at the peak, where layers are computed on arrays."""
    settings, depth = local_settings(config.decoder, held.tensor), config.decoder.mtp_depth
    narrow = _product_bytes(config, own_bytes.world)
    first, again = first_trained_layer(config, frozen_names(config)), recomputed_parts(config)
    again += again[-1:] * depth  # multi-token prediction modules recompute what the last layer recomputes
    layers = {layer: layer_bytes(settings, layer, again[layer], narrow) for layer in held.passes if layer >= first}
    working = max((each.working for each in layers.values()), default=0) * tokens
    kept = sum(each.kept * held.passes[layer] for layer, each in layers.items()) * tokens
    head = head_bytes(settings, tokens, narrow)
    if held.tensor > 1:
        shared = _shared_sublayer_bytes(settings, held.tensor, config.parallel_config.use_seq_parallel)
        kept += sum(held.passes[layer] for layer in layers) * shared * tokens
        # The head of a part of the vocabulary is compiled: logits, probabilities and their gradients, as was measured.
        head = (4 * settings.vocab_size + 12 * settings.hidden_size) * tokens * _FLOAT32_BYTES
    # Recomputed experts: as much as their weights was measured.
    redone = tuple(layer_prefix(layer) for layer in layers if again[layer] in ("block", "mlp"))
    kept += _bytes({name: shape for name, shape in held.shapes.items() if is_expert(name) and name.startswith(redone)})
    if own_bytes.degrees.expert_parallel > 1:  # the rows that are sent, received and returned
        sent = sum(held.passes[layer] for layer in layers if settings.is_moe_layer(layer))
        kept += sent * 3 * settings.experts.num_experts_chosen * settings.hidden_size * tokens * _FLOAT32_BYTES
    if not held.has_head:
        return kept + working
    # What enters the block of each module, and the gradients of its head, which add up later.
    kept += depth * (8 * tokens + settings.vocab_size) * settings.hidden_size * _FLOAT32_BYTES
    # Gradients of dense layers take the place of what these kept: the peak is at the beginning of the backward pass or,
    # with little to keep, at its end.
    whole = tuple(layer_prefix(layer) for layer in layers if not again[layer])
    later = {name: shape for name, shape in trained.items() if name.startswith(whole) and not is_expert(name)}
    later_bytes = own_bytes.gradients(later, 1) if own_bytes.level in ("", "level1") else 0
    beginning = kept + max(head, working) - later_bytes
    end = max((each.kept for each in layers.values()), default=0) * tokens + working
    return max(beginning, end)


def _shared_sublayer_bytes(settings: ModelConfig, tensor: int, shares_rows: bool) -> int:
    """Of a token, what both sublayers of a layer keep besides where ranks compute them together: what they have entered
    with; and what the sums leave in the allocator, as was measured, unless a rank has its own rows of them."""
    values = 2 * settings.hidden_size
    return (values - values * (tensor - 1) // tensor if shares_rows else 2 * values) * _FLOAT32_BYTES


def _product_bytes(config: Config, world: World) -> int:
    """Of a number that products of whole layers on arrays take."""
    return 2 if precision_of(config, "CPU", world).compute.dtype == "bfloat16" else _FLOAT32_BYTES


def _activations_of_label(config: Config, device: str, held: Held) -> int:
    """Float32 values kept for each label between forward and backward pass, at the peak."""
    if config.classifier is not None:
        return 3 * sum(config.classifier.sizes)  # each layer: input, product and its gradient
    settings = local_settings(config.decoder, held.tensor)
    half = resolve_precision(settings, config.amp_level, device).compute.dtype != "float32"
    kept, working, both = 0, 0, 0
    first = first_trained_layer(config, frozen_names(config))
    again = recomputed_parts(config) + ("",) * settings.mtp_depth
    for layer in range(first, len(again)):
        if layer not in held.passes:
            continue
        part, sublayers = again[layer], _activations_of_sublayers(settings, layer)
        # A recomputed part keeps its input alone, and exists as a whole while its own backward pass runs.
        remains = sublayers["block"] - sublayers[part] if part else sublayers["block"]
        of_pass = (remains * _HALF_KEEPS // 8 if half else remains) + (settings.hidden_size if part else 0)
        kept += of_pass * held.passes[layer]
        working = max(working, sublayers[part] if part else 0)
        # During its backward pass a block's arrays exist in half precision and in float32.
        both = max(both, sublayers["block"] if half else 0)
    if not held.has_head:
        return kept + working + both + 4 * _scores(settings)
    # Multi-token prediction modules: what enters their block, and logits and probabilities of their own.
    kept += settings.mtp_depth * (7 * settings.hidden_size + 2 * settings.vocab_size)
    # Once: the head's logits, probabilities and their gradient, and what the attention's backward pass works on.
    return kept + working + both + 3 * settings.vocab_size + 4 * _scores(settings)


def _activations_of_sublayers(settings: ModelConfig, layer: int) -> dict[str, int]:
    """Float32 values that each sublayer of a layer, and the whole block, keep for a token."""
    hidden, scores = settings.hidden_size, _scores(settings)
    # Residuals and norms; queries, keys, values and the result; the probabilities. Dropout keeps its masks.
    attention = 4 * hidden + _heads(settings) + scores
    masks = settings.num_heads * settings.seq_length + scores  # the whole mask, and its part in each half
    attention += hidden * bool(settings.hidden_dropout) + masks * bool(settings.attention_dropout)
    # Residuals and norms again; gate, up and their product.
    experts = settings.is_moe_layer(layer)
    width = 3 * settings.ffn_size if not experts else _activations_of_experts(settings)
    found = {"attention": attention, "mlp": (4 + bool(settings.hidden_dropout)) * hidden + width}
    for name in layer_targets(settings, layer) if settings.pet_config and layer < settings.num_layers else ():
        # The product with A; what dropout leaves of the input, and its mask.
        width = (attention_shapes(settings) | mlp_shapes(settings))[f"{name}.weight"][1]
        dropped = 2 * width * bool(settings.pet_config.lora_dropout)
        found[sublayer_of(name)] += settings.pet_config.lora_rank + dropped
    return found | {"block": sum(found.values())}


def _heads(settings: ModelConfig) -> int:
    """Queries, keys, values and the attention's result, each before and after its change of layout."""
    queries, keys = settings.num_heads * settings.head_size, settings.kv_heads * settings.head_size
    if not settings.multi_latent_attention:
        return 6 * queries + 4 * keys
    # The latent vectors are kept before and after their norms; what is cut and joined needs no second copy.
    latent = 2 * ((settings.q_lora_rank or 0) + settings.kv_lora_rank + settings.qk_rope_head_dim)
    return latent + 3 * queries + 2 * keys + 3 * settings.num_heads * settings.value_size


def _cache_bytes(config: Config, device: str) -> int:
    """What prediction keeps of the tokens of a batch, in the dtype of the matrix products."""
    settings = config.decoder
    rows = settings.batch_size if config.run_mode == "predict" else 1
    tokens = rows * (settings.max_decode_length or settings.seq_length)
    dtype = resolve_precision(settings, config.amp_level, device).compute.dtype
    return tokens * settings.num_layers * sum(settings.cache_widths) * (_FLOAT32_BYTES if dtype == "float32" else 2)


def _sampling_bytes(config: Config, world: World, held: Held, own_bytes: int) -> int:
    """What `sample_prompt` adds to a training: weights that ranks share are whole then, rounded copies, and a cache.

    Args:
        own_bytes: Of the weights that the rank has between two samples.
    """
    settings, given = config.decoder, config.sample_prompt
    new = settings.max_new_tokens or MOST_SAMPLED_TOKENS
    # A token is a byte of the prompt or more.
    longest = max(len(prompt.encode()) for prompt in ([given] if isinstance(given, str) else given))
    tokens = min(longest + new, settings.seq_length) * (1 if isinstance(given, str) else len(given))
    cached = tokens * len(held.passes) * sum(settings.cache_widths) // held.tensor
    whole = _bytes(held.shapes) - own_bytes
    return whole + _rounded_bytes(config, world, held) + cached * _FLOAT32_BYTES


def _rounded_bytes(config: Config, world: World, held: Held) -> int:
    """With half precision a CPU generates text with matrices that are rounded to copies in float32, see
    `trainer.models.generate.HostParts`."""
    settings, precision = config.decoder, precision_of(config, "CPU", world)
    if precision.compute.dtype == "float32":
        return 0
    # Rows of the embedding are read where they are, unless it is the head, too; experts where products round.
    return _bytes({name: shape for name, shape in held.shapes.items()
                   if len(shape) == 2 and (name != EMBEDDING or settings.tie_word_embeddings)
                   or len(shape) == 3 and not precision.by})  # fmt: skip


def _activations_of_experts(settings: ModelConfig) -> int:
    """Router scores; input, gate and up of each chosen expert; the shared expert."""
    moe, hidden = settings.experts, settings.hidden_size
    rows = moe.num_experts_chosen * (hidden + 2 * settings.expert_size)
    return 6 * moe.expert_num + rows + 3 * settings.shared_expert_size + hidden * bool(settings.shared_expert_size)


def _scores(settings: ModelConfig) -> int:
    """Attention scores of a token in all heads: the first half of the queries meets half of the keys."""
    return settings.num_heads * settings.seq_length * 3 // 4


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
    needed, most = fixed_bytes(parts) * ranks, most_memory_bytes() if most_bytes is None else most_bytes
    if needed <= most:
        return
    gib = 1 << 30
    who = "of the model" if ranks == 1 else f"of the {ranks} ranks of this host"
    rule = (
        f"weights, gradients and optimizer state {who} alone take {needed / gib:,.1f} GiB of memory,"
        f" and this machine has {most / gib:,.1f} GiB"
    )
    fix = "reduce num_layers, hidden_size or vocab_size, or use a machine with more memory"
    raise UserError(rule, where=config.source.where("model"), key="model", fix=fix)


def memory_notices(rank_bytes: int, left_bytes: int | None = None, ranks: int = 1) -> Iterator[str]:
    """Says when `ranks` ranks on this host will probably not fit in `left_bytes` (None: what is available now)."""
    left_bytes = memory_left_bytes() if left_bytes is None else left_bytes
    total_bytes = rank_bytes * ranks
    if total_bytes > left_bytes:
        mib = 1 << 20
        who = "the run needs" if ranks == 1 else f"the {ranks} ranks of this host need"
        yield (
            f"{who} about {total_bytes / mib:,.0f} MiB of memory and {left_bytes / mib:,.0f} MiB are left:"
            " a smaller runner_config.batch_size with more gradient_accumulation_steps, or recompute_config.recompute,"
            " needs less"
        )
