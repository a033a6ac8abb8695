"""The plan as tables, for `plan` and for plan.txt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, get_args

from trainer.config.checks.adapters import adapters_text
from trainer.config.note import NoteKind
from trainer.config.recompute import recompute_text
from trainer.config.schema.runner import LossScaleSection
from trainer.errors import value_text
from trainer.models.spec.sublayers import attention_spec
from trainer.tables import Rows, Section, sections_text

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.data.batches.blend import SourceShare
    from trainer.data.batches.packing import RecordWeights
    from trainer.plan.division import RankShards, ShardingPlan
    from trainer.plan.pipeline import PipelinePlan
    from trainer.plan.plan import DataPlan, ModelPlan, OptimizerSharding, Plan, StepsPlan, TeacherPlan
    from trainer.plan.traffic import TrafficPlan

_LOCATION = re.compile(r"\(([^()\s]+\.ya?ml):(\d+)\)")
_IGNORED = re.compile(r"ignored: (.*\)): ")
_MOST_ROWS = 16
_KINDS = get_args(NoteKind)  # the most important first


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Returns the plan as plain values, for `plan --json`."""
    nothing: Any = None  # configuration and opened data are not copied
    values = asdict(replace(plan, config=nothing, backend=nothing, data=replace(plan.data, batches=None)))
    del values["config"], values["backend"], values["data"]["batches"]
    return values


def plan_text(plan: Plan) -> str:
    """Returns the complete plan as plain text, for plan.txt."""
    return sections_text(plan_sections(plan, verbose=True))


def plan_sections(plan: Plan, verbose: bool) -> list[Section]:
    """Returns the sections of the plan, the most important first: notes, then model, steps and memory.

    `verbose` adds kernels, dtypes, parameter groups, learning rates, parts of the memory and reasons of ignored keys.
    """
    sections: list[Section] = []
    if plan.notes:
        sections.append(_notes(plan.notes, verbose))
    sections.append(("run", _run_rows(plan)))
    sections.append(("model", _model_rows(plan, verbose)))
    if plan.division is not None:
        sections += sharding_sections(plan.division, plan.pipeline)
    if plan.traffic is not None and plan.traffic.sent:
        sections.append(_traffic(plan.traffic))
    if plan.pipeline is not None:
        sections.append(("pipeline", _pipeline_rows(plan.pipeline)))
    if plan.model.experts:
        sections.append(("experts", [("", ""), *plan.model.experts.items()]))
    if plan.config.trains:
        sections.append(("steps", _step_rows(plan)))
    if plan.data.eval_rows is not None:
        rows: Rows = [("", ""), ("data", format_count(plan.data.eval_rows, _unit(plan.data)))]
        if plan.run_mode == "eval":
            rows += _packing_rows(plan.data)
        sections.append(("evaluation", rows))
    if verbose:
        sections += _details(plan)
    if plan.memory_bytes:
        sections.append(_memory(plan, verbose))
    return sections


def _notes(notes: tuple[str, ...], verbose: bool) -> Section:
    """Returns the notes by importance. If all name the same file, its name is in the title."""
    ordered = sorted(notes, key=lambda note: _KINDS.index(getattr(note, "kind", "results")))
    paths = {path for note in ordered for path, _ in _LOCATION.findall(note)}
    title = "notes"
    if len(paths) == 1:
        title = f"notes (lines are those of {paths.pop()})"
        ordered = [_LOCATION.sub(r"(line \2)", note) for note in ordered]
    if not verbose:
        ignored = [match[1] for note in ordered if (match := _IGNORED.match(note))]
        ordered = [note for note in ordered if not _IGNORED.match(note)]
        if ignored:
            keys = ", ".join(ignored)
            ordered.append(f"{format_count(keys.count(', ') + 1, 'keys')} ignored (--verbose says why): {keys}")
    return title, [("",), *((f"- {note}",) for note in ordered)]


def _run_rows(plan: Plan) -> Rows:
    rows: Rows = [("", ""), ("mode", plan.run_mode), ("device", plan.device)]
    if plan.ranks > 1:
        hosts = ""
        if plan.host_ranks != plan.ranks:
            hosts = f", {plan.host_ranks} of them on this host"
        degrees = plan.config.source.name_keys(", ".join(f"{name} {size}" for name, size in plan.degrees.items()))
        rows.append(("ranks", f"{plan.ranks}{hosts}: {degrees}"))
    rows += [("execution", plan.execution), ("output_dir", plan.output_dir)]
    if plan.resumes is not None:
        batch = f"epoch {plan.resumes.epoch + 1}, micro-batch {plan.resumes.batch + 1}"
        left = f"continues with step {plan.resumes.step + 1} ({batch})"
        if plan.resumes.step >= plan.steps.last_step:
            left = "no step is left"
        rows.append(("resumes", f"{plan.resumes.checkpoint}: step {plan.resumes.step} is done, {left}"))
    return rows


def _model_rows(plan: Plan, verbose: bool) -> Rows:
    model = plan.model
    settings = plan.config.decoder
    rows: Rows = [("", ""), ("weights", _weights(model))]
    parts: dict[str, str] = {}
    if model.weights + model.frozen.weights:  # otherwise its sizes are not known
        parts = {"attention": _attention(settings), "adapters": adapters_text(settings)}
        if plan.config.trains:
            parts["dropout"] = _dropout(settings)
    parts["recompute"] = recompute_text(model.recomputed)
    if model.teacher is not None:
        parts["teacher"] = _teacher(model.teacher, plan.config)
    rows += [(name, text) for name, text in parts.items() if text]
    if verbose:
        return rows
    if model.kernels and plan.device != "CPU":  # a CPU has no fused kernels
        rows.append(("kernels", _kernel_text(model)))
    parts_by_dtype: dict[str, list[str]] = {}
    for part, dtype in model.dtypes.items():
        parts_by_dtype.setdefault(dtype.dtype, []).append(part)
    dtypes = f"{next(iter(parts_by_dtype))} for all"
    if len(parts_by_dtype) > 1:
        dtypes = "; ".join(f"{dtype}: {', '.join(names)}" for dtype, names in parts_by_dtype.items())
    return [*rows, ("dtypes", dtypes)]


def _kernel_text(model: ModelPlan) -> str:
    fused = [choice.kernel for choice in model.kernels if choice.fused]
    others = [choice.kernel for choice in model.kernels if not choice.fused]
    if not fused:
        return "reference for all"
    if not others:
        return f"fused: {' '.join(fused)}"
    return f"fused: {' '.join(fused)}; reference: {' '.join(others)}"


def sharding_sections(plan: ShardingPlan, pipeline: PipelinePlan | None) -> list[Section]:
    """Returns tables of the groups of ranks and of their shards of the model."""
    groups: Rows = [("group", "ranks", "groups", "first", "last")]
    groups += [(each.name, str(each.size), f"{each.number:,}", each.first, each.last) for each in plan.groups]
    sections: list[Section] = [(f"groups of ranks ({plan.order})", groups)]
    if pipeline is not None:
        header = ("stage", "ranks", "layers", "and", "weights", "work", "in flight")
        stages: Rows = []
        for stage, load in zip(plan.stages, pipeline.stages, strict=True):
            weights = f"{stage.weights / 1e6:,.1f}"
            names = "; ".join(stage.layers), ", ".join(stage.ends)
            stages.append((str(stage.stage), stage.ranks, *names, weights, f"{load.share:.0%}", str(load.in_flight)))
        lines = [line for row in _shortened(stages) for line in _stage_lines(row)]
        sections.append(("stages of the pipeline (weights of a rank, in millions)", [header, *lines]))
    for axis, name, title in (
        ("tensor", "tp", "tensor group"), ("context", "cp", "context group"), ("experts", "ep", "expert group"),
    ):  # fmt: skip
        shards: tuple[RankShards, ...] = getattr(plan, axis)
        if shards:
            rows: Rows = [(str(each.rank), each.ranks, *each.parts.values()) for each in shards]
            sections.append((title, [(name, "ranks", *shards[0].parts), *_shortened(rows)]))
    return sections


def _traffic(traffic: TrafficPlan) -> Section:
    """Returns a table of the bytes sent, with a row for each group and purpose."""
    calls: dict[tuple[str, str], list[str]] = {}
    sent: dict[tuple[str, str], int] = {}
    for volume in traffic.sent:
        key = volume.group, volume.what
        calls.setdefault(key, []).append(f"{volume.calls:,} {volume.collective}")
        sent[key] = sent.get(key, 0) + volume.bytes
    rows = [(*key, ", ".join(calls[key]), _mib(size)) for key, size in sent.items()]
    title = "communication of a rank in a step"
    if len(traffic.stage_bytes) > 1:
        title = f"communication of a rank of stage {traffic.stage} in a step"
    total = ("all", "", "", _mib(sum(sent.values())))
    return title, [("group", "what", "collectives", "MiB"), *rows, total]


def _mib(size: int) -> str:
    if size >= 100 << 20:
        return f"{size / (1 << 20):,.0f}"
    return f"{size / (1 << 20):.3g}"


def _shortened(rows: Rows) -> Rows:
    """Returns the rows without those in the middle, if there are many."""
    if len(rows) <= _MOST_ROWS:
        return rows
    return [*rows[: _MOST_ROWS - 2], ("...",) + ("",) * (len(rows[0]) - 1), rows[-1]]


def _stage_lines(row: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the lines of a stage, several if it has many chunks or parts, so that the table fits 80 columns."""
    stage, ranks, layers, ends, *numbers = row
    cells = zip_longest(_pairs(layers, "; "), _pairs(ends, ", "), fillvalue="")
    yield (stage, ranks, *next(cells), *numbers)
    for further in cells:
        yield ("", "", *further, *("" for _ in numbers))


def _pairs(cell: str, separator: str) -> list[str]:
    """Splits a cell into lines of two parts."""
    parts = cell.split(separator)
    return [separator.join(parts[first : first + 2]) for first in range(0, len(parts), 2)]


def _pipeline_rows(pipeline: PipelinePlan) -> Rows:
    kind = "1F1B"
    parts = ""
    estimated = "estimated"
    if pipeline.chunks > 1:
        kind = "interleaved 1F1B"
        parts = f", {pipeline.chunks} chunks of layers each"
    if pipeline.scheduler == "gpipe":
        kind = "GPipe"
    if pipeline.scheduler not in ("1f1b", "gpipe"):
        kind = f"{pipeline.scheduler} of MindSpore"
        estimated = "estimated for 1F1B"
    even = f"{pipeline.even_bubble_share:.1%} if all stages took the same time"
    return [
        ("", ""),
        ("schedule", f"{kind}, {len(pipeline.stages)} stages{parts}, {pipeline.micro_batches} micro-batches"),
        ("bubble", f"stages wait {pipeline.bubble_share:.1%} of a step, {estimated}; {even}"),
    ]


def _unit(data: DataPlan) -> str:
    if data.labels == "tokens":
        return "sequences"
    return data.labels


def _steps(steps: StepsPlan) -> str:
    """Returns the number of steps in words, and where this run ends if that is earlier."""
    ends = ""
    if steps.last_step != steps.total_steps:
        ends = f"; this run ends after step {steps.last_step}"
    if steps.sizes.rampup is not None:
        return f"{steps.total_steps:,}; an epoch has {steps.steps_per_epoch:,} with the full batch{ends}"
    if steps.total_steps == steps.steps_per_epoch * steps.epochs:
        return f"{steps.steps_per_epoch:,} an epoch x {steps.epochs} = {steps.total_steps:,}{ends}"
    return f"{steps.total_steps:,}; an epoch has {steps.steps_per_epoch:,}{ends}"


def _rampup_text(steps: StepsPlan, data: DataPlan) -> str:
    """Returns in words how the global batch grows, and what it has read when it is full."""
    assert steps.sizes.rampup is not None
    start, increment, _ = steps.sizes.rampup
    text = f"from {format_count(start, _unit(data))} by {increment} to {steps.rows_per_step:,}"
    if not steps.sizes.batches_per_epoch:
        return text
    first = steps.sizes.first_full_step()
    rows = steps.sizes.batches_of(first) * steps.sizes.rows
    labels = rows * steps.tokens_per_step // steps.rows_per_step
    read = f"after {format_count(rows, _unit(data))}, {format_count(labels, data.labels)}"
    return f"{text}, full from step {first + 1:,} on, {read}"


def _step_rows(plan: Plan) -> Rows:
    steps = plan.steps
    data = plan.data
    unit = _unit(data)
    batch = format_count(steps.batch_rows, unit)
    step = f"1 micro-batch of {batch}"
    if steps.micro_batches > 1:
        step = f"{steps.micro_batches} micro-batches of {batch}"
    if plan.ranks > 1:
        step += f" on each rank: {format_count(steps.rows_per_step, unit)}"
    if steps.tokens_per_step:
        step += f", {format_count(steps.tokens_per_step, data.labels)}"
    if steps.flops_per_row:
        step += f", {_operations(steps.flops_per_row * steps.rows_per_step)}"
    size = "not known, it is not on this machine"
    if data.rows:
        size = f"{format_count(data.rows, unit)} an epoch"
    rows: Rows = [("", ""), ("data", size), *_packing_rows(data), ("optimizer step", step)]
    if steps.sizes.rampup is not None:
        rows.append(("batch ramp-up", _rampup_text(steps, data)))
    if data.rows:
        rows.append(("steps", _steps(steps)))
    rows.append(("optimizer", ", ".join(_setting_text(name, value) for name, value in steps.optimizer.items())))
    if steps.sharing is not None:
        rows.append(("optimizer state", _sharing_text(steps.sharing)))
    config = plan.config
    rows += [("clipping", _clipping(config)), ("loss scale", _loss_scale(config))]
    texts = {"skipped": _skipping(config), "checkpoints": _saving(config), "early stop": _early_stop(config)}
    rows += [(name, text) for name, text in texts.items() if text]
    rows.append(("schedule", steps.schedule))
    if steps.learning_rates:
        highest = max(rate for _, rate in steps.learning_rates)
        first = steps.learning_rates[0][0]
        chosen = {first, steps.last_step, next(n for n, r in steps.learning_rates if r == highest)}
        rates = ", ".join(f"{rate:.3e} at step {step:,}" for step, rate in steps.learning_rates if step in chosen)
        rows.append(("learning rate", rates))
    return rows


def _sharing_text(sharing: OptimizerSharding) -> str:
    more = {"level2": ", and of the gradients", "level3": ", and of the gradients and weights"}.get(sharing.level, "")
    shards = f"1/{sharing.ranks} on each rank{more}"
    if not sharing.least_bytes:
        return shards
    return f"{shards}; parameters below {sharing.least_bytes >> 10} KiB whole on all"


def _attention(settings: ModelConfig) -> str:
    attention = attention_spec(settings)
    latent = attention.latent
    if latent is None:
        return ""
    queries = ""
    if latent.query_rank:
        queries = f"queries from {latent.query_rank:,} numbers, "
    cached = f"prediction caches {sum(attention.cache_widths):,} numbers a token and layer"
    return f"multi-head latent: {queries}keys and values from {latent.key_value_rank:,}; {cached}"


def _teacher(teacher: TeacherPlan, config: Config) -> str:
    loss = config.distillation
    assert loss is not None, "only a distillation has a teacher"
    weights = f"{teacher.weights:,} weights, matrices in {teacher.dtype}"
    return f"{teacher.folder}: {weights}; alpha {loss.alpha:g}, temperature {loss.temperature:g}"


def _dropout(settings: ModelConfig) -> str:
    attention = attention_spec(settings)
    rates = {"attention weights": attention.dropout, "outputs of sublayers": attention.output_dropout}
    return ", ".join(f"{rate:g} of {name}" for name, rate in rates.items() if rate)


def _clipping(config: Config) -> str:
    wrapper = config.runner_wrapper
    if not wrapper.use_clip_grad:
        return "off"
    if wrapper.clip_type == "value":
        return f"each element to at most {wrapper.clip_value:g}"
    norm = "global norm"
    if wrapper.clip_by_group:
        norm = "norm of each group"
    return f"{norm} at most {wrapper.max_grad_norm:g}"


def _loss_scale(config: Config) -> str:
    sense = config.runner_wrapper.scale_sense
    if not isinstance(sense, LossScaleSection):
        if sense == 1:
            return "off"
        return f"fixed, {sense:g}"
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
    every = "at"
    if saver.save_checkpoint_steps:
        every = f"every {saver.save_checkpoint_steps} steps and at"
    best = ""
    if saver.keep_best == 1:
        best = " and the best by eval loss"
    elif saver.keep_best:
        best = f" and the best {saver.keep_best} by eval loss"
    return f"{every} the end; the newest {saver.keep_checkpoint_max}{best} are kept"


def _early_stop(config: Config) -> str:
    section = config.early_stop
    if section is None:
        return ""
    text = "after the first evaluation without a lower eval loss"
    if section.patience > 1:
        text = f"after {section.patience} evaluations in a row without a lower eval loss"
    if section.min_delta:
        text += f" by more than {section.min_delta:g}"
    return text


def _operations(number: float) -> str:
    """Formats a number of operations, for example 12.3 GFLOP."""
    power = min(max(math.floor(math.log10(max(number, 1.0) * 1.0005) / 3), 0), 6)
    return f"{number / 1000**power:.3g} {' kMGTPE'[power].strip()}FLOP"


def _packing_rows(data: DataPlan) -> Rows:
    report = data.packing
    if report is None:
        return data_source_rows(data.sources)
    unit = "documents" if report.packing == "cut" else "samples"
    parts = [f"{report.packing}: {format_count(report.samples, unit)} in {format_count(report.sequences, 'sequences')}"]
    if report.padding or report.packing != "cut":
        parts.append(f"{report.padding:.1%} padding")
    if report.truncated:
        parts.append(f"{report.truncated:,} truncated")
    if report.dropped:
        parts.append(f"{report.dropped:,} dropped")
    if report.bad_records:
        parts.append(f"{format_count(report.bad_records, 'bad records')} skipped")
    return [("packing", ", ".join(parts)), *record_weight_rows(report.weights), *data_source_rows(data.sources)]


def data_source_rows(shares: Sequence[SourceShare]) -> Rows:
    """Returns a row for each source of a blend: its weight, sequences and passes in an epoch."""
    rows: Rows = []
    for share in shares:
        weight = ""
        if share.weight is not None:
            weight = f"weight {share.weight:g}, "
        passes = f"{share.epoch_passes:.2f} passes over its {share.sequences:,}"
        sequences = format_count(share.epoch_sequences, "sequences")
        rows.append(("source", f"{share.name}: {weight}{sequences} an epoch, {passes}"))
    return rows


def record_weight_rows(weights: RecordWeights | None) -> Rows:
    """Returns a row with the weights of records; none if records have no weights."""
    if weights is None:
        return []
    zeros = f"{weights.zeros:,} of {format_count(weights.records, 'records')} have 0"
    return [("record weights", f"{weights.least:g} to {weights.most:g}, mean {weights.mean:.4g}; {zeros}")]


def format_count(number: int, plural: str) -> str:
    """Formats a number with its noun, which is passed in the plural."""
    if number != 1:
        return f"{number:,} {plural}"
    if plural.endswith("sses"):
        return f"1 {plural.removesuffix('es')}"
    return f"1 {plural.removesuffix('s')}"


def _weights(model: ModelPlan) -> str:
    every = model.weights + model.frozen.weights
    if not every:
        return "not known"
    active = ""
    if model.active_weights < every:
        active = f"; {model.active_weights:,} active per token"
    if not model.frozen.tensors:
        return f"{every:,}{active}"
    return f"{every:,}: {model.weights:,} trained, {model.frozen.weights:,} frozen{active}"


def _setting_text(name: str, value: Any) -> str:
    """Formats a setting of the optimizer, for example `betas 0.9 0.95`; of its type only the value."""
    values = [value]
    if isinstance(value, list) and not any(isinstance(one, list) for one in value):
        values = value
    text = " ".join(map(_number_text, values))
    if name == "type":
        return text
    return f"{name} {text}"


def _number_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value_text(value)


def _details(plan: Plan) -> list[Section]:
    """Returns the tables that --verbose adds."""
    sections: list[Section] = []
    if plan.model.kernels:
        kernels = [(c.kernel, c.asked, c.chosen, c.why) for c in plan.model.kernels]
        sections.append(("kernels", [("kernel", "asked for", "chosen", "why"), *kernels]))
    if plan.model.groups:
        head = ["group", "weight decay", "tensors", "weights"]
        groups = [[g.name, f"{g.weight_decay:g}", str(g.tensors), f"{g.weights:,}"] for g in plan.model.groups]
        if plan.model.frozen.tensors:
            groups.append(["frozen", "-", str(plan.model.frozen.tensors), f"{plan.model.frozen.weights:,}"])
        if any(group.lr_ratio != 1 for group in plan.model.groups):
            head.append("learning rate")
            for row, group in zip(groups, (*plan.model.groups, plan.model.frozen), strict=False):
                row.append(f"times {group.lr_ratio:g}")
        sections.append(("parameters", [tuple(head), *map(tuple, groups)]))
    dtypes = [(part, *dtype) for part, dtype in plan.model.dtypes.items()]
    sections.append(("dtypes", [("part", "dtype", "why"), *dtypes]))
    if plan.steps.learning_rates:
        rates = [(str(step), f"{rate:.3e}") for step, rate in plan.steps.learning_rates]
        sections.append(("schedule", [("step", "learning rate"), *rates]))
    return sections


def _memory(plan: Plan, verbose: bool) -> Section:
    parts = {part.replace(", ", " and "): f"{size / (1 << 20):,.0f}" for part, size in plan.memory_bytes.items()}
    sums = {"total": parts.pop("total")}
    if plan.ranks > 1 and plan.device == "CPU":  # other devices have memory of their own
        host_bytes = plan.memory_bytes["total"] * plan.host_ranks
        sums[f"{plan.host_ranks} ranks of this host"] = f"{host_bytes / (1 << 20):,.0f}"
    title = "memory, estimated"
    if plan.ranks > 1:
        title = "memory of a rank, estimated"
    if verbose:
        return title, [("part", "MiB"), *parts.items(), *sums.items()]
    listed = ", ".join(f"{part} {size}" for part, size in parts.items())
    return title, [("", ""), *((name, f"{size} MiB") for name, size in sums.items()), ("parts, MiB", listed)]
