"""Compares the plan of a file with that of its old version: weights, memory, tokens, ranks, schedule."""

from __future__ import annotations

from typing import NamedTuple

from trainer.ci.files import TrainingFile
from trainer.config import Config, parse_config
from trainer.config.checks.problem import ConfigError
from trainer.config.read.yaml_reader import read_text
from trainer.errors import TrainerError
from trainer.monitors.formatting import size
from trainer.parallel.world import SINGLE_PROCESS
from trainer.plan.plan import Plan


class PlanRow(NamedTuple):
    """A fact of a plan, now and in the old version; the latter is empty if there is none."""

    name: str
    now: str
    before: str = ""

    @property
    def is_changed(self) -> bool:
        """Returns whether the old version has another value."""
        return bool(self.before) and self.before != self.now


class FilePlan(NamedTuple):
    """The plan of a file: its facts, or why there is none."""

    rows: list[PlanRow]
    problem: str = ""
    old_problem: str = ""


def plan_with_changes(file: TrainingFile) -> FilePlan:
    """Plans a file and its old version, without reading data."""
    try:
        now = _facts(str(file.path), read_text(str(file.path)))
    except TrainerError as error:
        return FilePlan([], str(error))
    before: dict[str, str] = {}
    old_problem = ""
    if file.old_text is not None:
        try:
            before = _facts(str(file.path), file.old_text)
        except TrainerError as error:
            old_problem = str(error).splitlines()[0]
    return FilePlan([PlanRow(name, text, before.get(name, "")) for name, text in now.items()], "", old_problem)


def _facts(name: str, text: str) -> dict[str, str]:
    """Returns the facts of the plan of a text, in words."""
    from trainer.run.plan_file import plan_file, world_from_degrees

    problems: list[ConfigError] = []
    config = parse_config(name, text, [], problems)
    world = world_from_degrees(config, SINGLE_PROCESS)
    plan = plan_file(config, world, problems, opens_data=False, checks_memory=False)
    return {
        "weights": f"{plan.model.weights:,}",
        "memory of a rank": _memory(plan),
        "tokens of a step": f"{plan.steps.tokens_per_step:,} in {plan.steps.rows_per_step:,} sequences",
        "steps": _steps(plan.config),
        "ranks": _ranks(plan),
        "schedule": _schedule(plan),
        "optimizer": ", ".join(f"{key} {value}" for key, value in plan.steps.optimizer.items()),
        "data": plan.config.train_dataset.data_loader.type,
    }


def _memory(plan: Plan) -> str:
    if not plan.memory_bytes:
        return "unknown"
    return f"{size(plan.memory_bytes['total'])}, estimated for {plan.device}"


def _steps(config: Config) -> str:
    runner = config.runner_config
    text = f"{runner.epochs:,} epochs"
    if runner.max_steps:
        text = f"{runner.max_steps:,}"
    if runner.stop_step:
        text += f", ends after step {runner.stop_step:,}"
    return text


def _ranks(plan: Plan) -> str:
    degrees = ", ".join(f"{name} {degree}" for name, degree in plan.degrees.items() if degree > 1)
    if not degrees:
        return f"{plan.ranks}"
    return f"{plan.ranks}: {degrees}"


def _schedule(plan: Plan) -> str:
    values = plan.config.lr_schedule.model_dump(exclude_none=True)
    rest = ", ".join(f"{name} {value}" for name, value in values.items() if name != "type")
    text = f"{values['type']}, {rest}"
    if plan.pipeline is not None:
        text += f"; pipeline {plan.config.parallel.pipeline_config.pipeline_scheduler}"
    return text
