"""Rules across sections: what a configuration says against itself."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.checks.model import model_problems
from trainer.config.checks.moe import callback_problems, moe_problems
from trainer.config.checks.problem import Problem, problem
from trainer.config.schema.root import Config
from trainer.config.schema.runner import LossScaleSection

LARGEST_FLOAT32 = 3.4028234663852886e38

_ONE = "remove one of the two"


def rule_problems(config: Config) -> list[Problem]:
    """Everything that the sections say against each other."""
    rules = (model_problems, moe_problems, callback_problems, _schedule, _training)
    return [found for rule in rules for found in rule(config)]


def _schedule(config: Config) -> Iterator[Problem]:
    schedule, key, where = config.lr_schedule, "lr_schedule", config.source.where
    total, names = schedule.total_steps, type(schedule).model_fields
    if total == 0:
        yield problem(config, f"{key}.total_steps", "must be at least 1, or -1", "write -1 for all steps of the run")
    for part in ("warmup", "decay", "decay_start"):
        steps = getattr(schedule, f"{part}_steps", None)
        ratio = getattr(schedule, f"{part}_ratio", None)
        if ratio is not None and steps:
            rule = f"says the same as {part}_ratio = {ratio} ({where(f'{key}.{part}_ratio')})"
            yield problem(config, f"{key}.{part}_steps", rule, _ONE)
        if steps is not None and total > 0 and steps > total:
            rule = f"must be at most the schedule's total_steps ({total})"
            fix = f"lower {part}_steps or raise {key}.total_steps"
            yield problem(config, f"{key}.{part}_steps", rule, fix)
    name = "learning_rate" if "learning_rate" in names else "base_lr"
    if config.optimizer.learning_rate not in (None, getattr(schedule, name)):
        rule = f"disagrees with {key}.{name} = {getattr(schedule, name)} ({where(f'{key}.{name}')})"
        fix = f"{_ONE}, or give both one value: --learning_rate X --optimizer.learning_rate X"
        yield problem(config, "optimizer.learning_rate", rule, fix)


def _training(config: Config) -> Iterator[Problem]:
    for section in ("train_dataset", "eval_dataset"):
        dataset = getattr(config, section)
        if dataset is not None and dataset.tokenizer.type == "bytes" and dataset.tokenizer.path:
            fix = f"set {section}.tokenizer.type to huggingface, or remove the path"
            yield problem(config, f"{section}.tokenizer.path", "the byte tokenizer reads no file", fix)
    scale, key = config.runner_wrapper.scale_sense, "runner_wrapper.scale_sense"
    if isinstance(scale, LossScaleSection):
        scale, key = scale.loss_scale_value, f"{key}.loss_scale_value"
    if scale > LARGEST_FLOAT32:
        rule = f"is beyond float32, in which the loss is multiplied: at most {LARGEST_FLOAT32:.3g}"
        yield problem(config, key, rule, "write a smaller one: 65536 is a usual start")
