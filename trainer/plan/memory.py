"""How much memory a run will take: an estimate of its peak, by part.

Weights, gradients and optimizer state are exact. Activations are counted, those of a CPU in `activations.py`. What
MindSpore takes beside them was measured on a CPU (2 to 12 layers of hidden sizes 64 to 1,024, 512 to 8,192 tokens a
micro-batch, vocabularies up to 32,768): there the estimate is within a tenth of the peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from trainer.config import Config
from trainer.config.checks.parallel import (
    micro_batches_per_step,
    parallel_degrees,
    shard_threshold_bytes,
    sharding_ranks,
    shards_optimizer,
    zero_level,
)
from trainer.config.schema.model import ModelConfig
from trainer.config.teacher import teacher_dtypes, teacher_run
from trainer.device.doctor import available_memory_bytes, total_memory_bytes
from trainer.errors import UserError
from trainer.models.spec.names import EMBEDDING, HEAD, LAYERS, SCORE, is_expert
from trainer.models.spec.shapes import base_dtypes, parameter_shapes
from trainer.models.spec.sublayers import attention_spec
from trainer.ops.select import on_arrays, precision_of
from trainer.optim.freeze import trained_shapes
from trainer.optim.groups import parameter_groups, state_names
from trainer.parallel.sharding import BUCKET_BYTES, FLOAT32_BYTES
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.plan.activations import ActivationMemory
from trainer.plan.device.memory import device_memory, fixed_bytes
from trainer.plan.device.model_facts import ModelFacts, model_facts
from trainer.plan.division import RankParams, micro_batch_tokens, rank_params_per_stage
from trainer.storage.base_dtypes import bytes_of

MAX_SAMPLED_TOKENS = 128
"""The default of `max_new_tokens` for text samples of a training, which waits for them."""
_ON_DEVICE = ("weights", "gradients", "optimizer state", "activations")
_IMPORT_BYTES = 416 << 20  # resident after `import mindspore`
_WORKSPACE_BYTES = 104 << 20  # what a run imports, threads and their scratch memory


def memory_estimate(
    config: Config, trains: bool, device: str, world: World = SINGLE_PROCESS, stage: int | None = None,
    facts: ModelFacts | None = None,
) -> dict[str, int]:  # fmt: skip
    """Returns the estimated peak of a rank's memory in bytes, by part and in total.

    On a CPU it is resident memory, on an Ascend device memory.

    Args:
        stage: The pipeline stage of the rank; None takes the stage that needs most.
        facts: The result of `model_facts`, for the estimates of many layouts; None computes them.
    """
    if device == "Ascend" and config.is_decoder:
        return device_memory(config, world, facts or model_facts(config, trains), stage)
    stages = rank_params_per_stage(config, world)
    if stage is not None:
        stages = [stages[stage]]
    estimates = (_host_memory(config, trains, device, world, params) for params in stages)
    largest = max(estimates, key=lambda parts: parts["total"])
    if device == "Ascend":  # of another model: MindSpore and its code are in the host's memory
        on_device = {name: largest[name] for name in _ON_DEVICE if name in largest}
        return on_device | {"total": sum(on_device.values())}
    return largest


def _host_memory(config: Config, trains: bool, device: str, world: World, params: RankParams) -> dict[str, int]:
    on_host = on_arrays(config, device, world)
    shard_bytes = _ShardBytes(config, world)
    weights = _bytes(params.shapes)
    if trains:
        weights = shard_bytes.weights(params.shapes)
    dtypes = {name: dtype for name, dtype in base_dtypes(config.network).items() if name in params.shapes}
    if dtypes:  # `preflight` refuses ranks that shard weights
        frozen = {name: params.shapes[name] for name in dtypes}
        weights += sum(bytes_of(math.prod(frozen[name]), dtype) for name, dtype in dtypes.items()) - _bytes(frozen)
    parts = {"MindSpore and Python": _IMPORT_BYTES}
    parts["workspaces"] = _WORKSPACE_BYTES
    parts["weights"] = weights
    if dtypes and _product_bytes(config, world) == FLOAT32_BYTES:  # `activations` have rounded copies
        parts["decompressed layer"] = _largest_unit({name: frozen[name] for name in frozen if name.startswith(LAYERS)})
    if trains and config.sample_prompt and device == "CPU":
        copies = 0
        if not dtypes:
            copies = _bytes(params.shapes) - weights + _merged_bytes(params)
        parts["text samples"] = copies + _sampling_bytes(config, params)
    if config.run_mode in ("predict", "chat") or config.tasks:
        parts["cache of a full context"] = _cache_bytes(config, device)
        if device == "CPU" and not dtypes and (copies := _merged_bytes(params)):
            parts["matrices merged with adapters"] = copies
    if config.run_mode == "eval" and on_host:
        parts["activations"] = ActivationMemory(config, world, params, _product_bytes(config, world)).evaluation_peak()
    if trains:
        degrees = parallel_degrees(config, world)
        trained = {name: params.shapes[name] for name in trained_shapes(config) if name in params.shapes}
        parts["gradients"] = shard_bytes.gradients(trained, min(2, micro_batches_per_step(config, degrees)))
        parts["optimizer state"] = shard_bytes.optimizer_state(trained)
        if on_host:
            if degrees.data_parallel * degrees.context_parallel > 1:
                parts["workspaces"] += _reduction_bytes(trained)
            activations = ActivationMemory(config, world, params, _product_bytes(config, world))
            parts["activations"] = activations.training_peak(_gradients_in_backward_pass(params, shard_bytes, trained))
        else:
            parts["activations"] = _operator_bytes(config, params, world)
    teacher = teacher_run(config)
    if teacher is not None and on_host and not parallel_degrees(config, world).shards_model:  # else it is refused
        _add_teacher(parts, config, teacher, world)
    return parts | {"total": sum(parts.values())}


def _add_teacher(parts: dict[str, int], config: Config, teacher: Config, world: World) -> None:
    """Adds the weights of a teacher and what it keeps for the head; its pass is over before the student's begins."""
    dtypes = teacher_dtypes(config)
    shapes = parameter_shapes(teacher.decoder)
    weights = sum(bytes_of(math.prod(shape), dtypes.get(name)) for name, shape in shapes.items())
    [params] = rank_params_per_stage(teacher, world)
    activations = ActivationMemory(teacher, world, params, _product_bytes(config, world))
    parts["teacher"] = weights + activations.taught_rows()
    parts["activations"] = max(parts["activations"], activations.evaluation_peak())


class _ShardBytes:
    """Bytes of a rank when data-parallel ranks shard every parameter above the threshold in equal parts."""

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.degrees = parallel_degrees(config, world)
        self.level = ""
        if shards_optimizer(config, world):
            self.level = zero_level(config)
        self.threshold_bytes = shard_threshold_bytes(config)

    def shard(self, name: str, shape: tuple[int, ...]) -> int:
        """Returns the bytes of the rank's shard of a parameter."""
        size = _bytes({name: shape})
        degrees = self.degrees
        ranks = sharding_ranks(self.config, degrees) * degrees.context_parallel
        if is_expert(name):
            ranks = ranks * degrees.model_parallel // degrees.expert_parallel
        if size < self.threshold_bytes or not self.level:
            return size
        return -(-size // ranks)

    def weights(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Returns the bytes of the weights, including those that level3 unshards at the same time."""
        if self.level != "level3":
            return _bytes(shapes)
        layers = {name: shape for name, shape in shapes.items() if name.startswith(LAYERS)}
        # The unit in use is unsharded, and so may be the next one, which is gathered ahead: one of them is a layer.
        unsharded = _largest_unit(shapes) + _largest_unit(layers)
        return sum(self.shard(name, shape) for name, shape in shapes.items()) + unsharded

    def gradients(self, shapes: Mapping[str, tuple[int, ...]], copies: int) -> int:
        """Returns the bytes of the gradients of trained parameters.

        Args:
            copies: 2 with gradient accumulation: the sums, and the gradients of one micro-batch.
        """
        if self.level in ("", "level1"):
            return _bytes(shapes) * copies
        return sum(self.shard(name, shape) for name, shape in shapes.items()) * copies + _largest_unit(shapes)

    def optimizer_state(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Returns the bytes of the optimizer's arrays for the trained parameters."""
        groups = parameter_groups(shapes, self.config.optimizer)
        arrays = state_names(self.config.optimizer)
        counts = {name: len(arrays[group.optimizer]) for group in groups for name in group.parameters}
        return sum(count * self.shard(name, shapes[name]) for name, count in counts.items())


def _reduction_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the bytes that CPUs need to sum gradients in place: a bucket of small ones, and what a rank receives."""
    sizes = [_bytes({name: shape}) for name, shape in shapes.items()]
    bucket = min(BUCKET_BYTES, sum(sizes))
    return bucket + max([bucket, *sizes])


def _largest_unit(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the bytes of the largest layer, embedding or head: ZeRO 3 unshards one of them at a time."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        unit = ".".join(name.split(".")[:3])
        sizes[unit] = sizes.get(unit, 0) + _bytes({name: shape})
    return max(sizes.values(), default=0)


def _gradients_in_backward_pass(
    params: RankParams, shard_bytes: _ShardBytes, trained: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Returns the bytes of the gradients that replace activations during the backward pass, by the names of their
    weights.

    They are the gradients of layers, and of an embedding that is not the head. Measurements showed that the gradients
    of experts do not reuse that memory.
    """
    if shard_bytes.level not in ("", "level1"):
        return {}
    names = [name for name in trained if name.startswith(LAYERS) and not is_expert(name)]
    if HEAD in params.shapes or SCORE in params.shapes:
        names.append(EMBEDDING)
    return {name: shard_bytes.gradients({name: trained[name]}, 1) for name in names if name in trained}


def _product_bytes(config: Config, world: World = SINGLE_PROCESS, device: str = "CPU") -> int:
    """Returns the bytes of one input element of the matrix products, by default of native layers."""
    if precision_of(config, device, world).compute.dtype == "float32":
        return FLOAT32_BYTES
    return 2


def _operator_bytes(config: Config, params: RankParams, world: World) -> int:
    """Returns a coarse upper estimate of the activations of a training whose operators run one by one."""
    settings = config.network
    if not isinstance(settings, ModelConfig):
        labels = config.runner_config.batch_size * settings.labels_per_sequence
        return 3 * settings.numbers_per_label * labels * FLOAT32_BYTES  # each layer: input, product, its gradient
    tokens = micro_batch_tokens(config, parallel_degrees(config, world))
    # Operators keep what they take, about twice what native layers keep, and scores and softmax of all heads.
    native = ActivationMemory(config, world, params, FLOAT32_BYTES).training_peak({})
    scores = len(params.passes) * settings.num_heads * settings.seq_length * tokens * FLOAT32_BYTES
    return 2 * (native + scores)


def _cache_bytes(config: Config, device: str) -> int:
    """Returns the bytes of the KV cache of a prediction: float32 on a CPU, else in the dtype of the products."""
    settings = config.decoder
    rows = 1
    if config.run_mode == "predict":
        rows = settings.batch_size
    if config.tasks:
        rows = config.runner_config.batch_size
    tokens = rows * (settings.max_decode_length or settings.seq_length)
    numbers = tokens * settings.num_layers * sum(attention_spec(settings).cache_widths)
    return numbers * _product_bytes(config, device=device)


def _sampling_bytes(config: Config, params: RankParams) -> int:
    """Returns the bytes of the KV cache for `sample_prompt` of a training."""
    settings = config.decoder
    prompts = config.sample_prompt or []
    if isinstance(prompts, str):
        prompts = [prompts]
    new = settings.max_new_tokens or MAX_SAMPLED_TOKENS
    # A token is a byte of the prompt or more.
    longest = max(len(prompt.encode()) for prompt in prompts)
    tokens = min(longest + new, settings.seq_length) * len(prompts)
    cached = tokens * len(params.passes) * sum(attention_spec(settings).cache_widths) // params.tensor
    return cached * FLOAT32_BYTES


def _merged_bytes(params: RankParams) -> int:
    """Returns the bytes of the merged copies of matrices with adapters, with which a CPU generates text."""
    adapted = {name.removesuffix(".lora_A.weight") for name in params.shapes if name.endswith(".lora_A.weight")}
    return _bytes({name: shape for name, shape in params.shapes.items() if name.removesuffix(".weight") in adapted})


def _bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values()) * FLOAT32_BYTES


def check_host_memory(config: Config, parts: Mapping[str, int], ranks: int = 1, total_bytes: int | None = None) -> None:
    """Checks that weights, gradients and optimizer state, which are exact, fit in the memory of this host.

    Args:
        parts: Bytes of a rank, as `memory_estimate` returns them.
        ranks: Number of ranks on this host.
        total_bytes: The memory of the host; None asks the system.

    Raises:
        UserError: They do not fit.
    """
    needed = fixed_bytes(parts) * ranks
    if total_bytes is None:
        total_bytes = total_memory_bytes()
    if needed <= total_bytes:
        return
    gib = 1 << 30
    who = f"of the {ranks} ranks of this host"
    if ranks == 1:
        who = "of the model"
    rule = (
        f"weights, gradients and optimizer state {who} alone take {needed / gib:,.1f} GiB of memory,"
        f" and this machine has {total_bytes / gib:,.1f} GiB"
    )
    fix = "reduce num_layers, hidden_size or vocab_size, or use a machine with more memory"
    raise UserError(rule, where=config.source.where("model"), key="model", fix=fix)


def memory_notes(rank_bytes: int, left_bytes: int | None = None, ranks: int = 1) -> Iterator[str]:
    """Yields a note if the ranks of this host will probably not fit in its memory.

    Args:
        left_bytes: The available memory; None asks the system.
    """
    if left_bytes is None:
        left_bytes = available_memory_bytes()
    needed_bytes = rank_bytes * ranks
    if needed_bytes > left_bytes:
        mib = 1 << 20
        who = f"the {ranks} ranks of this host need"
        if ranks == 1:
            who = "the run needs"
        yield (
            f"{who} about {needed_bytes / mib:,.0f} MiB of memory and {left_bytes / mib:,.0f} MiB are left:"
            " a smaller runner_config.batch_size with more micro-batches a step, or recompute_config.recompute,"
            " needs less"
        )
