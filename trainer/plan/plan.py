"""What a run will do, computed once and without MindSpore; `render` shows it, and the run reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import config_notices
from trainer.config.checks.parallel import degrees_of, shard_threshold_bytes, shards_optimizer, sharing_level
from trainer.config.notice import Notice
from trainer.config.patterns import read_pattern
from trainer.config.recompute import recompute_text, recomputed_parts
from trainer.config.schema.runner import LossScaleSection
from trainer.device.resolve import device_notices
from trainer.models.spec.adapters import adapter_spec, layer_targets
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import is_buffer
from trainer.models.spec.shapes import adapted_projections, all_shapes
from trainer.models.spec.sublayers import attention_spec
from trainer.ops.host_library import find_onednn
from trainer.ops.precision import PartDtype
from trainer.ops.select import (
    KernelChoice,
    dtype_notices,
    on_arrays,
    part_dtypes,
    precision_of,
    select_kernels,
)
from trainer.optim.freeze import freeze_notices, trained_shapes
from trainer.optim.groups import parameter_groups
from trainer.optim.schedules import build_schedule, first_full_step
from trainer.parallel.world import World
from trainer.plan.division import Division, division
from trainer.plan.experts import experts_plan, inactive_weights
from trainer.plan.flops import flops_per_sequence
from trainer.plan.memory import memory_notices
from trainer.plan.pipeline import PipelinePlan, pipeline_plan
from trainer.plan.traffic import TrafficPlan, traffic_plan

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig
    from trainer.data.batches.blend import SourceShare
    from trainer.data.batches.loader import EvalBatches, Progress, TrainingBatches
    from trainer.data.batches.packing import PackingReport
    from trainer.plan.backend import TrainingBackend

# What the numbers of each update rule are called in the configuration.
_OPTIMIZER_KEYS = {
    "AdamW": ("betas", "eps", "weight_decay"),
    "SGD": ("momentum", "nesterov", "weight_decay"),
    "Muon": ("momentum", "nesterov", "ns_steps", "matched_adamw_rms", "betas", "eps", "weight_decay"),
}


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer."""

    name: str
    weight_decay: float
    tensors: int
    weights: int


@dataclass(frozen=True)
class Plan:
    """Everything `plan` says; the sentences among its values are empty where there is nothing to say."""

    run_mode: str
    device: str
    ranks: int
    host_ranks: int  # on this host
    layout: str  # the degrees of parallelism
    optimizer_sharing: str
    execution: str
    output_dir: str
    optimizer: dict[str, Any]
    clipping: str
    loss_scale: str
    skipping: str  # which steps update nothing
    saving: str  # which checkpoints are made and kept
    early_stop: str
    schedule: str
    kernels: tuple[KernelChoice, ...]
    groups: tuple[Group, ...]  # none where nothing is trained
    weights: int  # trained ones
    active_weights: int  # compute one token; fewer than all only with experts
    experts: dict[str, str]
    frozen: Group
    adapters: str
    recompute: str
    dtypes: dict[str, PartDtype]
    rows: int  # sequences (or images) of an epoch
    rows_exact: bool
    packing: PackingReport | None  # of the data that is trained or evaluated on; None where nothing is packed
    sources: tuple[SourceShare, ...]  # empty where there is one
    batch_rows: int  # of a micro-batch on a rank
    micro_batches: int
    rows_per_step: int  # of a full step, over all ranks
    tokens_per_step: int
    flops_per_row: float  # model FLOPs of a sequence or image, see `trainer.plan.flops`
    steps_per_epoch: int
    epochs: int
    total_steps: int
    last_step: int  # where this run ends
    learning_rates: tuple[tuple[int, float], ...]  # (step from 1, rate) at some steps
    memory_bytes: dict[str, int]  # of a rank, by part and in total
    host_memory_bytes: int
    eval_rows: int | None  # None without an evaluation
    notices: tuple[str, ...]
    labels: str = "tokens"  # what tokens_per_step counts: tokens, or images
    resumed: str = ""
    attention: str = ""  # multi-head latent attention in words; empty for another
    dropout: str = ""  # of a training; empty without
    division: Division | None = None  # of the model among the ranks
    traffic: TrafficPlan | None = None  # of a step
    pipeline: PipelinePlan | None = None
    backend: TrainingBackend | None = field(default=None, repr=False)
    data: TrainingBatches | EvalBatches | None = field(default=None, repr=False)


def plan_run(
    config: Config,
    world: World,
    backend: TrainingBackend,
    device: str,
    memory_bytes: Mapping[str, int],
    progress: Progress,
    opens_data: bool = True,
) -> Plan:
    """Works out what a run of this checked configuration will do, and opens its data; see `trainer.run.prepare`.

    `memory_bytes` are those of `memory_estimate`. Without data (`opens_data` False) the steps are not known, and 0
    stands for each count of them.

    Raises:
        UserError: The data cannot be read, or fills no batch.
        RunError: The token file cannot be written.
    """
    settings, runner, trains = config.network, config.runner_config, config.trains
    degrees, precision = degrees_of(config, world), precision_of(config, device, world)
    kernels = select_kernels(settings, device, precision)
    every = all_shapes(settings)
    inactive = 0 if config.classifier is not None else inactive_weights(model_spec(config.decoder))
    shapes = trained_shapes(config) if trains else every
    groups = parameter_groups(shapes, config.optimizer.weight_decay, config.optimizer.type) if trains else ()
    notices = _notices(config, world, backend, device, memory_bytes)
    read, ranks, reads = backend.data_config.runner_config, backend.data_ranks[1], trains and opens_data
    data, steps = _open_data(config, backend, progress, notices) if opens_data else (None, 0)
    epochs, total, last = _run_length(config, steps)
    step_rows = read.batch_size * ranks * read.gradient_accumulation_steps
    return Plan(
        run_mode=config.run_mode,
        device=device,
        ranks=world.size,
        host_ranks=world.local_size,
        layout=", ".join(f"{name} {size}" for name, size in degrees._asdict().items() if size > 1),
        optimizer_sharing=_optimizer_sharing(config, world) if trains else "",
        execution=backend.execution(device),
        output_dir=str(Path(config.output_dir).expanduser()),
        optimizer={name: getattr(config.optimizer, name) for name in ("type", *_OPTIMIZER_KEYS[config.optimizer.type])},
        clipping=_clipping(config),
        loss_scale=_loss_scale(config),
        skipping=_skipping(config),
        saving=_saving(config) if trains else "",
        early_stop=_early_stop(config) if trains else "",
        schedule=config.lr_schedule.type,
        kernels=kernels,
        groups=tuple(_group(g.name, g.weight_decay, {name: shapes[name] for name in g.parameters}) for g in groups),
        weights=sum(math.prod(shape) for shape in shapes.values()),
        active_weights=sum(map(math.prod, every.values())) - inactive,
        experts=experts_plan(config),
        frozen=_group("frozen", 0.0, {n: s for n, s in every.items() if n not in shapes and not is_buffer(n)}),
        adapters=_adapters(config.decoder),
        recompute=_recompute(config) if trains else "",
        dtypes=part_dtypes(settings, precision, kernels),
        rows=data.dataset.num_sequences if reads else 0,
        rows_exact=True,
        packing=data.dataset.packing if data is not None else None,
        sources=getattr(data.dataset, "shares", ()) if data is not None else (),
        batch_rows=runner.batch_size,
        micro_batches=read.gradient_accumulation_steps,
        rows_per_step=step_rows,
        tokens_per_step=step_rows * settings.labels_per_sequence,
        flops_per_row=flops_per_sequence(config),
        steps_per_epoch=steps,
        epochs=epochs,
        total_steps=total,
        last_step=last,
        learning_rates=_learning_rates(config, total, last) if total else (),
        memory_bytes=memory_bytes,
        host_memory_bytes=memory_bytes["total"] * world.local_size,
        eval_rows=_eval_rows(data.evaluation if reads else data),
        notices=tuple(notices),
        labels=settings.labels_text,
        attention=_attention(config.decoder),
        dropout=_dropout(config.decoder) if trains and config.classifier is None else "",
        division=division(config, world),
        traffic=traffic_plan(config, world, device) if trains else None,
        pipeline=pipeline_plan(config, degrees.pipeline_stage) if trains else None,
        backend=backend,
        data=data,
    )


def _run_length(config: Config, steps: int) -> tuple[int, int, int]:
    """Epochs, their steps, and the step at which the run ends, where an epoch has so many steps."""
    runner = config.runner_config
    epochs = -(-runner.max_steps // steps) if runner.max_steps and steps else runner.epochs
    total = min(runner.max_steps or steps * epochs, steps * epochs)
    return epochs, total, min(total, runner.stop_step or total)


def _recompute(config: Config) -> str:
    """Of the layers that have a backward pass: from the first trained one on."""
    first = max(model_spec(config.decoder).first_reached(trained_shapes(config)), 0)
    return recompute_text(("",) * first + recomputed_parts(config)[first:])


def _open_data(
    config: Config, backend: TrainingBackend, progress: Progress, notices: list[str]
) -> tuple[TrainingBatches | EvalBatches | None, int]:
    """The batches that are trained or evaluated on, and the steps of an epoch: 0 where nothing is trained."""
    if config.run_mode in ("predict", "chat"):
        return None, 0
    from trainer.data.batches.loader import eval_batches, optimizer_steps, training_batches

    if not config.trains:
        return eval_batches(backend.data_config, backend.data_ranks, progress, notices.append), 0
    data = training_batches(backend.data_config, backend.data_ranks, progress, notices.append)
    accumulated = backend.data_config.runner_config.gradient_accumulation_steps
    return data, optimizer_steps(data.loader.batches_per_epoch, accumulated)


def _notices(
    config: Config, world: World, backend: TrainingBackend, device: str, memory_bytes: Mapping[str, int]
) -> list[str]:
    notices = [*config_notices(config, world, device), *backend.notices(), *device_notices(config, device)]
    notices += [*dtype_notices(config, precision_of(config, device, world), device), *freeze_notices(config)]
    notices += _record_notices(config)
    if on_arrays(config, device, world) and find_onednn().library is None:
        notices.append(f"{find_onednn().text}: NumPy computes the layers, which takes longer")
    return notices + list(memory_notices(memory_bytes["total"], ranks=world.local_size) if device == "CPU" else ())


def _record_notices(config: Config) -> Iterator[Notice]:
    """Patterns of `monitor_config.target` that match nothing: a small copy of a model has fewer layers, so it is no
    mistake in the file."""
    section, key = config.monitor_config, "monitor_config.target"
    wanted = section.outlets("local_norm_format") | section.outlets("optimizer_state_format")
    if not config.trains or not wanted or not section.target:
        return
    names, matched = list(trained_shapes(config)), set()
    for number, text in enumerate(section.patterns):
        found = {name for name in names if read_pattern(text).search(name)}
        matched |= found
        if not found:
            near = ", ".join(get_close_matches(text, names, n=3, cutoff=0.0))
            where = config.source.where(f"{key}.{number}") or config.source.where(key)
            place = f" ({where})" if where else ""
            yield Notice(f"{key} {text!r}{place} matches no trained parameter; the nearest names are {near}", "ignored")
    if section.invert and len(matched) == len(names):
        yield Notice(f"{key} matches every trained parameter, and invert leaves none to record", "ignored")


def _group(name: str, weight_decay: float, shapes: Mapping[str, tuple[int, ...]]) -> Group:
    return Group(name, weight_decay, len(shapes), sum(math.prod(shape) for shape in shapes.values()))


def _optimizer_sharing(config: Config, world: World) -> str:
    if not shards_optimizer(config, world):
        return ""
    degrees, least, level = degrees_of(config, world), shard_threshold_bytes(config), sharing_level(config)
    more = {"level2": ", and of the gradients", "level3": ", and of the gradients and weights"}.get(level, "")
    shares = f"1/{degrees.data_parallel * degrees.context_parallel} on each rank{more}"
    return shares + (f"; parameters below {least >> 10} KiB whole on all" if least else "")


def _attention(settings: ModelConfig) -> str:
    attention = attention_spec(settings)
    latent = attention.latent
    if latent is None:
        return ""
    queries = f"queries from {latent.query_rank:,} numbers, " if latent.query_rank else ""
    cached = f"prediction caches {sum(attention.cache_widths):,} numbers a token and layer"
    return f"multi-head latent: {queries}keys and values from {latent.key_value_rank:,}; {cached}"


def _dropout(settings: ModelConfig) -> str:
    attention = attention_spec(settings)
    rates = {"attention weights": attention.dropout, "outputs of sublayers": attention.output_dropout}
    return ", ".join(f"{rate:g} of {name}" for name, rate in rates.items() if rate)


def _adapters(settings: ModelConfig) -> str:
    adapter = adapter_spec(settings)
    if adapter is None:
        return ""
    names = [name.split(".")[-1] for name in adapted_projections(settings)]
    layers = sum(bool(layer_targets(settings, layer)) for layer in range(settings.num_layers))
    where = "" if layers == settings.num_layers else f" of {layers} of {settings.num_layers} layers"
    dropout = f", dropout {adapter.dropout:g}" if adapter.dropout else ""
    return f"rank {adapter.rank}, times {adapter.scale:g}{dropout}, on {' '.join(names)}{where}"


def _clipping(config: Config) -> str:
    wrapper = config.runner_wrapper
    if not wrapper.use_clip_grad:
        return "off"
    if wrapper.clip_type == "value":
        return f"each element to at most {wrapper.clip_value:g}"
    return f"{'norm of each group' if wrapper.clip_by_group else 'global norm'} at most {wrapper.max_grad_norm:g}"


def _loss_scale(config: Config) -> str:
    sense = config.runner_wrapper.scale_sense
    if not isinstance(sense, LossScaleSection):
        return "off" if sense == 1 else f"fixed, {sense:g}"
    if sense.type == "FixedLossScaleUpdateCell":
        return f"fixed, {sense.loss_scale_value:g}"
    steps = f"x {sense.scale_factor} after {sense.scale_window} steps without overflow"
    return f"dynamic from {sense.loss_scale_value:g}, {steps}, / {sense.scale_factor} on overflow"


def _skipping(config: Config) -> str:
    wrapper = config.runner_wrapper
    if not wrapper.use_skip_data_by_global_norm:
        return ""
    count = wrapper.global_norm_spike_count_threshold
    return f"steps whose norm is above {wrapper.global_norm_spike_threshold:g}; {count} in a row end the run"


def _saving(config: Config) -> str:
    saver = config.checkpoint_monitor
    every = f"every {saver.save_checkpoint_steps} steps and at" if saver.save_checkpoint_steps else "at"
    best = ""
    if saver.keep_best:
        best = " and the best" if saver.keep_best == 1 else f" and the best {saver.keep_best}"
        best += " by eval loss"
    return f"{every} the end; the newest {saver.keep_checkpoint_max}{best} are kept"


def _early_stop(config: Config) -> str:
    section = config.early_stop
    if section is None:
        return ""
    least = f" by more than {section.min_delta:g}" if section.min_delta else ""
    count = f"{section.patience} evaluations in a row" if section.patience > 1 else "the first evaluation"
    return f"after {count} without a lower eval loss{least}"


def _eval_rows(data: EvalBatches | None) -> int | None:
    """Sequences that an evaluation reads: all there are, or those of `max_batches` on every rank."""
    if data is None:
        return None
    most = (data.max_batches or 0) * data.loader.global_batch_size
    return min(data.dataset.num_sequences, most) if most else data.dataset.num_sequences


def _learning_rates(config: Config, total: int, last: int) -> tuple[tuple[int, float], ...]:
    section = config.lr_schedule
    schedule = build_schedule(section, total, where=config.source.where)
    # A short warm-up reaches the highest rate long before a tenth of the run.
    parts = (min(1 + first_full_step(section, total), total), total // 10, total // 4, total // 2, 3 * total // 4)
    steps = sorted({1, last, total, *(max(1, step) for step in parts)})
    return tuple((step, schedule(step - 1)) for step in steps)
