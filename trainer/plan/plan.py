"""The plan of a run, computed once and without MindSpore; `render` shows it, and the run reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import config_notes
from trainer.config.checks.parallel import (
    parallel_degrees,
    shard_threshold_bytes,
    sharding_ranks,
    shards_optimizer,
    zero_level,
)
from trainer.config.checks.qk_clip import logit_notes
from trainer.config.note import Note
from trainer.config.patterns import read_pattern
from trainer.config.recompute import Part, recomputed_parts
from trainer.data.batches.step_sizes import StepSizes
from trainer.device.doctor import installed_version, version_notes
from trainer.device.resolve import device_notes
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import has_name, is_buffer
from trainer.models.spec.shapes import all_shapes
from trainer.ops.host_library import find_onednn
from trainer.ops.precision import PartDtype
from trainer.ops.select import KernelChoice, dtype_notes, on_arrays, part_dtypes, precision_of, select_kernels
from trainer.optim.freeze import freeze_notes, trained_shapes
from trainer.optim.groups import ParameterGroup, matching_parameters, parameter_groups, unmatched_decay_rules
from trainer.optim.schedules import build_schedule, first_full_step
from trainer.parallel.world import World
from trainer.plan.ascend import sample_notes
from trainer.plan.division import ShardingPlan, sharding_plan
from trainer.plan.experts import experts_plan, inactive_weights
from trainer.plan.flops import flops_per_sequence
from trainer.plan.memory import memory_notes
from trainer.plan.pipeline import PipelinePlan, pipeline_plan
from trainer.plan.traffic import TrafficPlan, traffic_plan

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data.batches.blend import SourceShare
    from trainer.data.batches.loader import EvalBatches, Progress, TrainingBatches
    from trainer.data.batches.packing import PackingReport
    from trainer.plan.backend import ExecutionMode

# What the numbers of each update rule are called in the configuration.
_OPTIMIZER_KEYS = {
    "AdamW": ("betas", "eps", "weight_decay"),
    "PmaAdamW": ("fused_algo", "ema_alpha", "interleave_step", "fused_num", "betas", "eps", "weight_decay"),
    "SGD": ("momentum", "nesterov", "weight_decay"),
    "Muon": (
        "momentum", "nesterov", "ns_steps", "matched_adamw_rms", "qk_clip_enabled", "betas", "eps", "weight_decay",
    ),
}
_SHOWN_IF_SET = (
    "ns_coefficients", "ns_eps", "adamw_include", "weight_decay_include", "weight_decay_exclude", "loraplus_lr_ratio",
    "ema_decay",
)  # fmt: skip


@dataclass(frozen=True)
class ParameterGroupPlan:
    """A parameter group of the optimizer."""

    name: str
    weight_decay: float
    tensors: int
    weights: int
    lr_ratio: float = 1.0


@dataclass(frozen=True)
class TeacherPlan:
    """The teacher of a distillation.

    Attributes:
        weights: Number of its weights.
        dtype: How its matrices are held in memory.
    """

    folder: str
    weights: int
    dtype: str


NO_WEIGHTS = ParameterGroupPlan("frozen", 0.0, 0, 0)


@dataclass(frozen=True)
class ModelPlan:
    """The model. All counts are 0 if its sizes are in a folder that is not on this machine.

    Attributes:
        weights: Number of trained weights.
        active_weights: Number of weights that compute one token; fewer than all only with experts.
        groups: Parameter groups of the optimizer; empty if nothing is trained.
        recomputed: For each layer, what its backward pass recomputes; see `recomputed_parts`.
    """

    weights: int = 0
    active_weights: int = 0
    frozen: ParameterGroupPlan = NO_WEIGHTS
    groups: tuple[ParameterGroupPlan, ...] = ()
    kernels: tuple[KernelChoice, ...] = ()
    dtypes: dict[str, PartDtype] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    recomputed: tuple[Part, ...] = ()
    teacher: TeacherPlan | None = None


@dataclass(frozen=True)
class DataPlan:
    """The data of a training or evaluation.

    Attributes:
        rows: Sequences (or images) of an epoch; 0 if the data is not on this machine.
        eval_rows: Sequences of an evaluation; None without evaluation.
        packing: What packing did; None if nothing is packed.
        sources: The data sources of a blend; empty for a single source.
        labels: What a row has labels for: tokens, or images.
        batches: The opened data.
    """

    rows: int
    eval_rows: int | None
    packing: PackingReport | None
    sources: tuple[SourceShare, ...]
    labels: str
    batches: TrainingBatches | EvalBatches | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StepsPlan:
    """The optimizer steps. A count that is not known without the data is 0.

    Attributes:
        batch_rows: Rows of a micro-batch on a rank.
        micro_batches, rows_per_step, tokens_per_step: Of a step with the full global batch.
        steps_per_epoch: Steps of an epoch without a ramp-up.
        flops_per_row: Model FLOPs of a row, see `trainer.plan.flops`.
        total_steps: Steps of the learning-rate schedule.
        last_step: The step after which this run ends.
        schedule: The type of the learning-rate schedule.
        learning_rates: (step from 1, rate) at some steps.
        optimizer: The optimizer's type and settings, by their keys.
        sharing: How ranks shard the optimizer state; None if each rank has all of it.
    """

    batch_rows: int
    micro_batches: int
    sizes: StepSizes
    rows_per_step: int
    tokens_per_step: int
    flops_per_row: float
    steps_per_epoch: int
    epochs: int
    total_steps: int
    last_step: int
    schedule: str
    learning_rates: tuple[tuple[int, float], ...]
    optimizer: dict[str, Any]
    sharing: OptimizerSharding | None


@dataclass(frozen=True)
class OptimizerSharding:
    """How ranks shard the optimizer state.

    Attributes:
        level: `optimizer_level` of the configuration.
        least_bytes: Parameters of fewer bytes are not sharded.
    """

    ranks: int
    level: str
    least_bytes: int


@dataclass(frozen=True)
class Resumption:
    """Where a run continues: a checkpoint, its step, and the position from 0 in the data."""

    checkpoint: str
    step: int
    epoch: int
    batch: int


@dataclass(frozen=True)
class Plan:
    """Everything `plan` says, as values; `trainer.plan.render` has the words.

    Attributes:
        host_ranks: Number of ranks on this host.
        degrees: The parallel degrees above 1.
        memory_bytes: Memory of a rank, by part and in total; empty if it is not known.
    """

    run_mode: str
    device: str
    ranks: int
    host_ranks: int
    degrees: dict[str, int]
    execution: str
    output_dir: str
    resumes: Resumption | None
    model: ModelPlan
    data: DataPlan
    steps: StepsPlan
    memory_bytes: dict[str, int]
    division: ShardingPlan | None
    traffic: TrafficPlan | None  # of a step
    pipeline: PipelinePlan | None
    notes: tuple[str, ...]
    config: Config = field(repr=False)
    backend: ExecutionMode = field(repr=False)


def plan_run(
    config: Config, world: World, backend: ExecutionMode, device: str, memory_bytes: Mapping[str, int],
    progress: Progress, opens_data: bool = True,
) -> Plan:  # fmt: skip
    """Computes what a run of this checked configuration will do, and opens its data.

    Args:
        memory_bytes: The result of `memory_estimate`.
        opens_data: False leaves the data closed; then all counts of steps are 0.

    Raises:
        UserError: The data cannot be read, or has fewer sequences than a batch.
        RunError: The token cache cannot be written.
    """
    degrees = parallel_degrees(config, world)
    notes = _notes(config, world, backend, device, memory_bytes)
    data = None
    if opens_data:
        data = _open_data(config, backend, progress, notes)
    traffic = None
    pipeline = None
    if config.trains:
        traffic = traffic_plan(config, world, device)
        pipeline = pipeline_plan(config, degrees.pipeline_stage)
    return Plan(
        run_mode=config.run_mode,
        device=device,
        ranks=world.size,
        host_ranks=world.local_size,
        degrees={name: size for name, size in degrees._asdict().items() if size > 1},
        execution=backend.execution(device),
        output_dir=str(Path(config.output_dir).expanduser()),
        resumes=None,
        model=_model_plan(config, world, device),
        data=_data_plan(config, data),
        steps=_steps_plan(config, world, backend, data),
        memory_bytes=dict(memory_bytes),
        division=sharding_plan(config, world),
        traffic=traffic,
        pipeline=pipeline,
        notes=tuple(notes),
        config=config,
        backend=backend,
    )


def _model_plan(config: Config, world: World, device: str) -> ModelPlan:
    settings = config.network
    precision = precision_of(config, device, world)
    kernels = select_kernels(settings, device, precision)
    every = all_shapes(settings)
    inactive = inactive_weights(model_spec(config.decoder))
    shapes = every
    groups: tuple[ParameterGroup, ...] = ()
    recomputed: tuple[Part, ...] = ()
    if config.trains:
        shapes = trained_shapes(config)
        groups = parameter_groups(shapes, config.optimizer)
        # Of the layers that have a backward pass: from the first trained one on.
        first = max(model_spec(config.decoder).first_reached(shapes), 0)
        recomputed = tuple(part if layer >= first else "" for layer, part in enumerate(recomputed_parts(config)))
    return ModelPlan(
        weights=sum(math.prod(shape) for shape in shapes.values()),
        active_weights=sum(map(math.prod, every.values())) - inactive,
        frozen=_group("frozen", 0.0, {n: s for n, s in every.items() if n not in shapes and not is_buffer(n)}),
        groups=tuple(
            replace(_group(g.name, g.weight_decay, {name: shapes[name] for name in g.parameters}), lr_ratio=g.lr_ratio)
            for g in groups
        ),
        kernels=kernels,
        dtypes=part_dtypes(settings, precision, kernels),
        experts=experts_plan(config),
        recomputed=recomputed,
        teacher=_teacher_plan(config),
    )


def _teacher_plan(config: Config) -> TeacherPlan | None:
    loss = config.distillation
    if loss is None or config.teacher is None:
        return None
    weights = sum(math.prod(shape) for shape in all_shapes(config.teacher.decoder).values())
    return TeacherPlan(loss.teacher or "", weights, loss.teacher_dtype or "float32")


def _data_plan(config: Config, data: TrainingBatches | EvalBatches | None) -> DataPlan:
    labels = config.network.labels_text
    if data is None:
        return DataPlan(rows=0, eval_rows=None, packing=None, sources=(), labels=labels)
    from trainer.data.batches.loader import TrainingBatches

    rows = 0
    evaluation: Any = data
    if isinstance(data, TrainingBatches):
        rows = data.dataset.num_sequences
        evaluation = data.evaluation
    return DataPlan(
        rows=rows,
        eval_rows=_eval_rows(evaluation),
        packing=data.dataset.packing,
        sources=getattr(data.dataset, "shares", ()),
        labels=labels,
        batches=data,
    )


def _steps_plan(
    config: Config, world: World, backend: ExecutionMode, data: TrainingBatches | EvalBatches | None
) -> StepsPlan:
    batch = backend.data_config.runner_config
    batches_per_epoch = 0
    if config.trains and data is not None:
        batches_per_epoch = data.loader.batches_per_epoch
    sizes = StepSizes(
        batches_per_epoch=batches_per_epoch,
        micro_batches=batch.gradient_accumulation_steps,
        rows=batch.batch_size * backend.data_ranks[1],
        rampup=batch.rampup_batch_size,
    )
    rows = sizes.rows * sizes.micro_batches
    epochs, total, last = _run_length(config, sizes)
    sharing = None
    if config.trains and shards_optimizer(config, world):
        degrees = parallel_degrees(config, world)
        ranks = sharding_ranks(config, degrees) * degrees.context_parallel
        sharing = OptimizerSharding(ranks, zero_level(config), shard_threshold_bytes(config))
    optimizer = config.optimizer
    keys = ["type", *_OPTIMIZER_KEYS[optimizer.type]]
    keys += [key for key in _SHOWN_IF_SET if config.source.where(f"optimizer.{key}")]
    if "ns_steps" in keys and len(optimizer.newton_schulz) != optimizer.ns_steps:
        keys.remove("ns_steps")
    if optimizer.type == "PmaAdamW" and optimizer.fused_algo == "sma":
        keys.remove("ema_alpha")
    learning_rates: tuple[tuple[int, float], ...] = ()
    if total:
        learning_rates = _learning_rates(config, total, last)
    return StepsPlan(
        batch_rows=config.runner_config.batch_size,
        micro_batches=sizes.micro_batches,
        sizes=sizes,
        rows_per_step=rows,
        tokens_per_step=rows * config.network.labels_per_sequence,
        flops_per_row=flops_per_sequence(config),
        steps_per_epoch=-(-batches_per_epoch // sizes.micro_batches),
        epochs=epochs,
        total_steps=total,
        last_step=last,
        schedule=config.lr_schedule.type,
        learning_rates=learning_rates,
        optimizer={key: getattr(optimizer, key) for key in keys},
        sharing=sharing,
    )


def _run_length(config: Config, sizes: StepSizes) -> tuple[int, int, int]:
    """Returns the number of epochs, the steps of the schedule, and the last step of the run; 0 steps without data."""
    runner = config.runner_config
    epochs = runner.epochs
    if not sizes.batches_per_epoch:
        return epochs, 0, 0
    if runner.max_steps:
        epochs = -(-sizes.batches_of(runner.max_steps) // sizes.batches_per_epoch)
    total = runner.max_steps or sizes.steps_until(epochs * sizes.batches_per_epoch)
    return epochs, total, min(total, runner.stop_step or total)


def _open_data(
    config: Config, backend: ExecutionMode, progress: Progress, notes: list[str]
) -> TrainingBatches | EvalBatches | None:
    """Returns the opened data of a training or evaluation."""
    if config.run_mode in ("predict", "chat") or config.tasks:
        return None
    from trainer.data.batches.loader import eval_batches, training_batches
    from trainer.data.teacher import check_teacher_tokenizer

    notes += check_teacher_tokenizer(config)
    if not config.trains:
        return eval_batches(backend.data_config, backend.data_ranks, progress, notes.append)
    return training_batches(backend.data_config, backend.data_ranks, progress, notes.append)


def _notes(
    config: Config, world: World, backend: ExecutionMode, device: str, memory_bytes: Mapping[str, int]
) -> list[str]:
    notes = [*backend.notes(), *device_notes(config, device), *sample_notes(config, world, device)]
    notes += [*dtype_notes(config, precision_of(config, device, world), device), *freeze_notes(config)]
    notes += _unmatched_pattern_notes(config)
    if config.trains:
        for key, rule in _unmatched_rules(config):
            notes.append(Note(f"{key} {rule!r} ({config.source.where(key)}) matches no trained parameter", "ignored"))
    if config.trains and not on_arrays(config, device, world):
        notes += logit_notes(config)
    if on_arrays(config, device, world) and find_onednn().library is None:
        notes.append(f"{find_onednn().text}: NumPy computes the layers, which takes longer")
    notes += version_notes(installed_version("mindspore"))
    if device == "CPU":
        notes += memory_notes(memory_bytes["total"], ranks=world.local_size)
    return config_notes(config, world, device, notes)


def _unmatched_rules(config: Config) -> Iterator[tuple[str, str]]:
    """Yields key and text of each rule about names that matches no trained parameter."""
    names = list(trained_shapes(config))
    yield from unmatched_decay_rules(names, config.optimizer)
    norms = config.runner_wrapper.local_norm
    if isinstance(norms, list):
        yield from (("runner_wrapper.local_norm", rule) for rule in norms if not matching_parameters(names, [rule]))


def _unmatched_pattern_notes(config: Config) -> Iterator[Note]:
    """Yields a note for each pattern of `monitor_config.target` that matches no trained parameter.

    It is not an error, because a small copy of a model has fewer layers.
    """
    section = config.monitor_config
    key = "monitor_config.target"
    destinations = section.destinations("local_norm_format") | section.destinations("optimizer_state_format")
    if not config.trains or not destinations or not section.target:
        return
    names = list(trained_shapes(config))
    matched: set[str] = set()
    for number, text in enumerate(section.patterns):
        matches = {name for name in names if has_name(read_pattern(text), name)}
        matched |= matches
        if not matches:
            near = ", ".join(get_close_matches(text, names, n=3, cutoff=0.0))
            where = config.source.where(f"{key}.{number}") or config.source.where(key)
            place = where and f" ({where})"
            yield Note(f"{key} {text!r}{place} matches no trained parameter; the nearest names are {near}", "ignored")
    if section.invert and len(matched) == len(names):
        yield Note(f"{key} matches every trained parameter, and invert leaves none to record", "ignored")


def _group(name: str, weight_decay: float, shapes: Mapping[str, tuple[int, ...]]) -> ParameterGroupPlan:
    return ParameterGroupPlan(name, weight_decay, len(shapes), sum(math.prod(shape) for shape in shapes.values()))


def _eval_rows(data: EvalBatches | None) -> int | None:
    """Returns the sequences that an evaluation reads: all of them, or `max_batches` batches on every rank."""
    if data is None:
        return None
    every = data.dataset.num_sequences
    return min(every, (data.max_batches or 0) * data.loader.global_batch_size or every)


def _learning_rates(config: Config, total: int, last: int) -> tuple[tuple[int, float], ...]:
    section = config.lr_schedule
    schedule = build_schedule(section, total, where=config.source.where)
    # A short warm-up reaches the highest rate long before a tenth of the run.
    parts = (min(1 + first_full_step(section, total), total), total // 10, total // 4, total // 2, 3 * total // 4)
    steps = sorted({1, last, total, *(max(1, step) for step in parts)})
    return tuple((step, schedule(step - 1)) for step in steps)
