"""What a run will do, computed without MindSpore: printed by `plan`, kept as plan.txt, and testable.

Memory is an estimate of the peak: weights, gradients and optimizer state exactly, activations by counting what the
backward pass keeps, and what importing MindSpore costs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from trainer.config import check_runnable, config_notices
from trainer.data import estimate_rows
from trainer.device import resolve_device
from trainer.models.shapes import parameter_shapes
from trainer.ops.select import KernelChoice, select_kernels
from trainer.optim.groups import parameter_groups
from trainer.optim.schedules import build_schedule

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig

_FLOAT32_BYTES = 4
_IMPORT_BYTES = 416 << 20  # resident after `import mindspore`
_OPTIMIZER_STATES = {"AdamW": 2, "SGD": 1}


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer."""

    name: str
    weight_decay: float
    tensors: int
    weights: int


@dataclass(frozen=True)
class Plan:
    """Everything `plan` says.

    Attributes:
        run_mode, device, execution: What runs, where, and whether blocks are compiled.
        kernels: For each kernel: asked for, chosen, why.
        groups: Parameter groups with their decay and sizes.
        weights: Number of trained weights.
        dtypes: Dtype of each part as it will be on the device.
        rows, rows_exact: Rows of an epoch; False where text must be tokenized first to know.
        batch_rows, micro_batches, tokens_per_step: Rows of a micro-batch, micro-batches of a step, positions of a
            full step.
        steps_per_epoch, epochs, total_steps, last_step: Optimizer steps; `last_step` is where this run ends.
        learning_rates: (step, rate) at a few telling steps; steps count from 1 as in the log.
        memory_bytes: Estimated peak by part, and their total.
        eval_rows: Rows of an evaluation, None without.
        notices: What the user should know.
    """

    run_mode: str
    device: str
    execution: str
    kernels: tuple[KernelChoice, ...]
    groups: tuple[Group, ...]
    weights: int
    dtypes: dict[str, str]
    rows: int
    rows_exact: bool
    batch_rows: int
    micro_batches: int
    tokens_per_step: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    last_step: int
    learning_rates: tuple[tuple[int, float], ...]
    memory_bytes: dict[str, int]
    eval_rows: int | None
    notices: tuple[str, ...]


def build_plan(config: Config) -> Plan:
    """Works out what a run of this configuration will do.

    Raises:
        UserError: The run could not start.
    """
    check_runnable(config)
    device, settings, runner = resolve_device(config), config.decoder, config.runner_config
    shapes = parameter_shapes(settings)
    trains = config.run_mode in ("train", "finetune")
    estimate = estimate_rows(config) if trains else None
    rows = estimate.rows if estimate else 0
    batches = rows // runner.batch_size if config.train_dataset.drop_remainder else -(-rows // runner.batch_size)
    steps = -(-batches // runner.gradient_accumulation_steps)
    total = steps * runner.epochs
    last = min(total, runner.stop_step or total)
    groups = parameter_groups(shapes, config.optimizer.weight_decay)
    return Plan(
        run_mode=config.run_mode,
        device=device,
        execution="blocks compiled once, run layer by layer" if config.context.mode == 0 else "operator by operator",
        kernels=select_kernels(settings, device),
        groups=tuple(
            Group(g.name, g.weight_decay, len(g.parameters), sum(math.prod(shapes[n]) for n in g.parameters))
            for g in groups
        ),
        weights=sum(math.prod(shape) for shape in shapes.values()),
        dtypes=part_dtypes(settings, device),
        rows=rows,
        rows_exact=estimate.exact if estimate else True,
        batch_rows=runner.batch_size,
        micro_batches=runner.gradient_accumulation_steps,
        tokens_per_step=runner.batch_size * settings.seq_length * runner.gradient_accumulation_steps,
        steps_per_epoch=steps,
        epochs=runner.epochs,
        total_steps=total,
        last_step=last,
        learning_rates=_learning_rates(config, total, last) if trains and total else (),
        memory_bytes=memory_estimate(config, trains),
        eval_rows=estimate.eval_rows if estimate else None,
        notices=tuple(config_notices(config)),
    )


def part_dtypes(settings: ModelConfig, device: str) -> dict[str, str]:
    """Dtype of each part on the device; `bfloat16` becomes float32 where there are no kernels for it."""
    asked = {
        "parameters": settings.param_init_type,
        "matrix products": settings.compute_dtype,
        "norms": settings.layernorm_compute_type,
        "softmax": settings.softmax_compute_type,
        "rotary tables": settings.rotary_dtype,
    }
    return {
        part: "float32" if dtype == "float32" else f"float32 (asked: {dtype}; {_fallback_reason(dtype, device)})"
        for part, dtype in asked.items()
    } | {"loss, gradients, optimizer state": "float32"}


def _fallback_reason(dtype: str, device: str) -> str:
    if dtype == "bfloat16" and device == "CPU":
        return "a CPU has no bfloat16 kernels"
    return "mixed precision is not built yet"


def memory_estimate(config: Config, trains: bool) -> dict[str, int]:
    """Estimated peak resident memory in bytes, by part; activations are what the kernels keep for the backward pass."""
    settings = config.decoder
    weights = sum(math.prod(shape) for shape in parameter_shapes(settings).values()) * _FLOAT32_BYTES
    parts = {"MindSpore and Python": _IMPORT_BYTES, "weights": weights}
    if trains:
        tokens = config.runner_config.batch_size * settings.seq_length
        copies = 1 if config.runner_config.gradient_accumulation_steps == 1 else 2
        heads, keys = (n * settings.head_size for n in (settings.num_heads, settings.kv_heads))
        # Per token and layer: two norms, q, k, v before and after rotation, attention output, gate, up, their
        # product, residuals.
        row = 6 * settings.hidden_size + 3 * heads + 3 * keys + 3 * settings.ffn_size
        scores = settings.num_heads * settings.seq_length
        activations = tokens * (settings.num_layers * (row + scores) + 3 * settings.vocab_size + 4 * scores)
        parts["gradients"] = weights * copies
        parts["optimizer state"] = weights * _OPTIMIZER_STATES[config.optimizer.type]
        parts["activations"] = activations * _FLOAT32_BYTES
    return parts | {"total": sum(parts.values())}


def _learning_rates(config: Config, total: int, last: int) -> tuple[tuple[int, float], ...]:
    schedule = build_schedule(config.lr_schedule, total, where=config.source.where)
    parts = (total // 10, total // 4, total // 2, 3 * total // 4)
    steps = sorted({1, last, total, *(max(1, step) for step in parts)})
    return tuple((step, schedule(step - 1)) for step in steps)


def plan_dict(plan: Plan) -> dict:
    """The plan as plain values, for `plan --json`."""
    return asdict(plan)


def plan_sections(plan: Plan) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The plan as titled tables of text rows, the first row of each being its header."""
    sections = [("run", _run_rows(plan)), ("kernels", [("kernel", "asked for", "chosen", "why")])]
    sections[1][1].extend((c.kernel, c.asked, c.chosen, c.why) for c in plan.kernels)
    groups = [("group", "weight decay", "tensors", "weights")]
    groups += [(g.name, f"{g.weight_decay:g}", str(g.tensors), f"{g.weights:,}") for g in plan.groups]
    sections.append(("parameters", groups))
    sections.append(("dtypes", [("part", "dtype"), *plan.dtypes.items()]))
    if plan.learning_rates:
        rates = [("step", "learning rate"), *((str(step), f"{rate:.3e}") for step, rate in plan.learning_rates)]
        sections.append(("schedule", rates))
    memory = [("part", "MiB"), *((part, f"{size / (1 << 20):,.0f}") for part, size in plan.memory_bytes.items())]
    sections.append(("memory, estimated", memory))
    if plan.notices:
        sections.append(("notes", [("",), *((notice,) for notice in plan.notices)]))
    return sections


def _run_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", ""), ("mode", plan.run_mode), ("device", plan.device)]
    rows += [("execution", plan.execution), ("weights", f"{plan.weights:,}")]
    if plan.run_mode in ("train", "finetune"):
        about = "" if plan.rows_exact else "about "
        step = f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''} of {plan.batch_rows} rows"
        ends = "" if plan.last_step == plan.total_steps else f"; this run ends after step {plan.last_step}"
        rows += [
            ("data", f"{about}{plan.rows:,} rows an epoch"),
            ("optimizer step", f"{step}, {plan.tokens_per_step:,} tokens"),
            ("steps", f"{about}{plan.steps_per_epoch:,} an epoch x {plan.epochs} = {about}{plan.total_steps:,}{ends}"),
        ]
    if plan.eval_rows is not None:
        rows.append(("evaluation", f"{plan.eval_rows:,} rows"))
    return rows


def plan_text(plan: Plan) -> str:
    """The plan as aligned plain text."""
    lines = []
    for title, rows in plan_sections(plan):
        lines.append(title.upper())
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            if line:
                lines.append(f"  {line}")
        lines.append("")
    return "\n".join(lines)
