"""Compares two configurations by facts of their plans; `convert` does so before and after it converts a file.

The schemas have different keys for the same training. A fact does not depend on them, and names the keys that matter
for it alone: `convert` compares the values of all other keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from trainer.config.recompute import recompute_text
from trainer.config.schema.fields import support_of
from trainer.config.stages import stage_layers
from trainer.models.spec.adapters import SECTION, adapter_spec
from trainer.models.spec.shapes import adapter_shapes, all_shapes
from trainer.optim.freeze import trained_shapes
from trainer.optim.schedules import build_schedule
from trainer.plan.plan import Plan

_RATES = 32
"""Learning rates are compared at so many steps from the first, for the warmup, and at so many over the run."""


class Fact(NamedTuple):
    """A property of a training that does not depend on the schema of its file.

    Attributes:
        value: What is compared.
        text: What the user sees of it.
        keys: The keys and sections that have no other effect than this fact.
    """

    name: str
    value: Any
    text: str
    keys: tuple[str, ...] = ()


class PlanComparison(NamedTuple):
    """A fact of two configurations."""

    name: str
    before: str
    after: str
    is_equal: bool
    keys: tuple[str, ...]

    @property
    def line(self) -> str:
        """Returns a line for the user."""
        if self.is_equal:
            return f"{self.name:<15} equal: {self.before}"
        return f"{self.name:<15} DIFFERS: {self.before} -> {self.after}"


def compare_plans(before: Plan, after: Plan, steps: int) -> list[PlanComparison]:
    """Compares two plans; `steps` is the number of steps of a run that does not give it."""
    pairs = zip(_facts(before, steps), _facts(after, steps), strict=True)
    return [
        PlanComparison(first.name, first.text, second.text, first.value == second.value, first.keys)
        for first, second in pairs
    ]


def _facts(plan: Plan, steps: int) -> Iterator[Fact]:
    config = plan.config
    shapes = all_shapes(config.network)
    weights = shapes, trained_shapes(config)
    yield Fact("weights", weights, f"{len(shapes)} tensors, {plan.model.weights:,} trained weights")
    yield _batch(plan)
    runner = config.runner_config
    total = runner.max_steps or steps
    last = min(total, runner.stop_step or total)
    keys = ("runner_config.stop_step", "runner_config.epochs", "runner_config.max_steps")
    yield Fact("steps", last, f"{last:,}", keys)
    yield _learning_rates(plan, total, last)
    yield _layout(plan)
    fields = type(config.optimizer).model_fields.items()
    acting = [name for name, field in fields if support_of(field)[0] == "supported" and name != "learning_rate"]
    settings = {name: getattr(config.optimizer, name) for name in acting}
    groups = [replace(group, weights=0) for group in plan.model.groups]  # the fact "weights" compares sizes
    numbers = ", ".join(f"{key} {value}" for key, value in plan.steps.optimizer.items() if key != "type")
    yield Fact("optimizer", (settings, groups), f"{config.optimizer.type}, {numbers}")
    ends = (".lora_A.weight", ".lora_embedding_A")
    ranks = {name: shape[0] for name, shape in adapter_shapes(config.network).items() if name.endswith(ends)}
    adapter = adapter_spec(config.decoder)
    text = "none"
    if adapter is not None:
        text = f"{len(ranks)} matrices, rank {adapter.rank}, times {adapter.scale:g}"
    keys = tuple(f"{SECTION}.{key}" for key in ("target_modules", "match", "exclude_layers"))
    yield Fact("adapters", (ranks, adapter), text, keys)
    text = recompute_text(plan.model.recomputed) or "none"
    yield Fact("recomputation", plan.model.recomputed, text, ("recompute", "recompute_config.recompute",
               "recompute_config.select_recompute", "recompute_config.select_recompute_exclude"))  # fmt: skip
    yield _checkpoints(plan)


def _batch(plan: Plan) -> Fact:
    steps = plan.steps
    values = (steps.batch_rows, steps.micro_batches, steps.rows_per_step, steps.tokens_per_step)
    text = (
        f"{steps.rows_per_step} sequences, {steps.tokens_per_step:,} tokens a step: {steps.micro_batches} micro-batches"
        f" of {steps.batch_rows} on each data-parallel rank"
    )
    keys = ("gradient_accumulation_steps", "global_batch_size")
    covered = (*(f"runner_config.{key}" for key in keys), "parallel_config.micro_batch_num")
    return Fact("batch", values, text, covered)


def _learning_rates(plan: Plan, total: int, last: int) -> Fact:
    section = plan.config.lr_schedule
    schedule = build_schedule(section, total, where=plan.config.source.where)
    compared = sorted({*range(min(last, _RATES)), *(last * part // _RATES for part in range(_RATES)), last - 1})
    rates = {step: schedule(step) for step in compared}
    shown = [1, compared[len(compared) // 2] + 1, last]
    values = ", ".join(f"{rates[step - 1]:.3e} at step {step:,}" for step in dict.fromkeys(shown))
    text = f"{section.type}, at {len(rates)} steps: {values}"
    return Fact("learning rate", rates, text, ("lr_schedule.total_steps", "optimizer.learning_rate"))


def _layout(plan: Plan) -> Fact:
    config = plan.config
    stages = []
    if plan.degrees.get("pipeline_stage", 1) > 1:
        stages = stage_layers(config)
    degrees = ", ".join(f"{name} {degree}" for name, degree in plan.degrees.items())
    text = f"{plan.ranks} ranks: {degrees}"
    if not degrees:
        text = f"{plan.ranks} rank"
    if stages:
        text += f", {'+'.join(str(len(layers)) for layers in stages)} layers"
    keys = ("use_parallel", "parallel_config.data_parallel", "model.model_config.offset")
    if plan.ranks == 1:
        keys += ("parallel", "parallel_config", "model.model_config.pp_interleave_num")
    return Fact("layout", (plan.ranks, plan.degrees, stages), text, keys)


def _checkpoints(plan: Plan) -> Fact:
    saver = plan.config.checkpoint_monitor
    text = "at the end"
    if saver.save_checkpoint_steps:
        text = f"every {saver.save_checkpoint_steps:,} steps, the newest {saver.keep_checkpoint_max}"
    if saver.keep_best:
        text += f", and the {saver.keep_best} best"
    if saver.async_save:
        text += ", while the training goes on"
    value = (saver.save_checkpoint_steps, saver.keep_checkpoint_max, saver.async_save, saver.keep_best)
    return Fact("checkpoints", value, text)
