"""Converts a file from one schema into the other, and compares the plans of both files.

The comparison does not trust the tables that made the new file: it reads the file again as a run would.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import Config, Override, parse_config
from trainer.config.checks.model import decoder_problems
from trainer.config.checks.problem import NO_VALUE, ConfigError, problem, problem_at, raise_problems, value_of
from trainer.config.location import NO_LOCATION
from trainer.config.pynative import is_newer_schema
from trainer.config.pynative.table import ROWS
from trainer.config.pynative.translate import translate
from trainer.config.read.dump import dump_values, flatten, plain_values
from trainer.config.read.nodes import plain
from trainer.config.read.relocate import fields_at
from trainer.config.read.yaml_reader import parse_document
from trainer.config.schema.callbacks import LossMonitor
from trainer.config.schema.fields import fields_by_yaml_name, support_of
from trainer.config.schema.system import ParallelConfig
from trainer.convert.facts import PlanComparison, compare_plans
from trainer.convert.newer import NewerFile, different_keys, is_below, newer_file, newer_text
from trainer.data.batches.mindrecord import column_roles
from trainer.errors import UserError, shorten_repr
from trainer.parallel.world import SINGLE_PROCESS
from trainer.plan.plan import Plan
from trainer.run.plan_file import plan_file, world_from_degrees

NEWER = "2.0"
OLDER = "1.x"
_BUILT = ("Qwen3ForCausalLM", "DeepseekV3ForCausalLM")
"""The classes that MindSpore Transformers' PyNative trainer builds."""
_EXPLICIT = "the newer schema always means explicit mode"
_MEMORY = "it changes only the memory"
_UNRECORDED = "it changes what is recorded, not what is trained"
_WITHOUT_NUMBERS = {
    "parallel.parallel_mode": _EXPLICIT, "parallel.parallel_fallback": _EXPLICIT, "parallel.full_batch": _EXPLICIT,
    "parallel.comm_fusion": _EXPLICIT, "parallel.pipeline_config.pipeline_interleave": _EXPLICIT,
    "parallel_config.gradient_aggregation_group": _EXPLICIT, "recompute_config.select_comm_recompute": _EXPLICIT,
    "recompute_config.mp_comm_recompute": _EXPLICIT, "recompute_config.recompute_slice_activation": _EXPLICIT,
    "recompute_config.parallel_optimizer_comm_recompute": _EXPLICIT, "context.mode": "the newer schema has no mode 0",
    "context.max_device_memory": _MEMORY, "train_dataset.prefetch_size": _MEMORY,
    "parallel.parallel_optimizer_config.parallel_optimizer_threshold": _MEMORY, "tensorboard": _UNRECORDED,
    "profile": _UNRECORDED,
    "data_simplification": _UNRECORDED, "with_stack": _UNRECORDED, "monitor_config": _UNRECORDED,
    "trackers": _UNRECORDED, "report": _UNRECORDED, "report_interval": _UNRECORDED, "log_format": _UNRECORDED,
    "worker_log_dir": _UNRECORDED, "sample_prompt": _UNRECORDED, "runner_wrapper.local_norm": _UNRECORDED,
    "output_dir": _UNRECORDED,
    "train_dataset.cache_dir": "it changes only where token files are",
}  # fmt: skip
"""Keys, or sections, whose differences do not change a training -> why."""
_EVALUATION = (
    "eval_dataset", "eval_step_interval", "eval_epoch_interval", "train_dataset.batch_size",
    "train_dataset.max_batches",
)  # fmt: skip
"""Keys without effect in a run that does not evaluate."""
_OF_TEXT = tuple(
    f"train_dataset.{name}" for name in ("tokenizer", "chat_template", "train_on", "packing", "overlong", "held_out")
)
"""Keys without effect on data that is not text."""


class Difference(NamedTuple):
    """A key, or a fact of a training, that the other schema cannot say."""

    key: str
    before: Any
    after: Any
    refusal: str
    """Why the other schema refuses the value; empty if it has no place for it."""

    @property
    def text(self) -> str:
        """Returns what changes, for the user."""
        if self.refusal:
            return f"{self.key} {shorten_repr(self.before)} is left out: {self.refusal}"
        if self.before is NO_VALUE:
            return f"{self.key}: {self.after}"
        return f"{self.key} {shorten_repr(self.before)} becomes {self.new_value}"

    @property
    def new_value(self) -> str:
        """Returns what it would be in the new file."""
        if self.before is NO_VALUE:
            return self.after
        return shorten_repr(self.after)


class Conversion(NamedTuple):
    """A file in the other schema, and how it differs."""

    text: str
    before: Config
    after: Config
    comparisons: list[PlanComparison]
    changes: list[Difference]
    """What the new file cannot say; empty if both train the same."""
    notes: list[str]


def convert(path: str, text: str, schema: str, *, is_lossy: bool = False, steps: int | None = None) -> Conversion:
    """Converts the text of a file.

    Args:
        path: The file, for messages.
        schema: The schema to convert to, `NEWER` or `OLDER`.
        is_lossy: Whether to convert although the new file cannot say everything.
        steps: The optimizer steps of an older file, whose epochs count them only if the data is here.

    Raises:
        UserError: The file has errors, is in that schema already, or has keys that the other schema cannot say.
    """
    root, _ = parse_document(path, text)
    if is_newer_schema(root) == (schema == NEWER):
        rule = f"this file has the {schema} schema already: there is nothing to convert"
        other = {OLDER: NEWER, NEWER: OLDER}[schema]
        raise UserError(rule, where=path, fix=f"use it as it is, or write --to {other}")
    overrides = []
    if steps is not None and schema == NEWER:
        overrides.append(Override("runner_config.max_steps", str(steps), "flag --steps"))
    problems: list[ConfigError] = []
    config = parse_config(path, text, overrides, problems)
    if schema == NEWER:
        _check_kind(config)
    plan = _plan(config, problems)
    if schema == NEWER:
        conversion = _to_newer(path, config, plan)
    else:
        conversion = _to_older(path, text, config, plan)
    if not is_lossy:
        raise_problems([_error(config, difference) for difference in conversion.changes])
    return conversion


def older_text(path: str, text: str) -> tuple[str, list[str]]:
    """Returns the translation of a file of the newer schema, and notes about it."""
    root, notes = parse_document(path, text)
    translation = translate(path, root)
    sections = plain(translation.root)
    ordered = {key: sections[key] for key in fields_by_yaml_name(Config) if key in sections}
    lines = [f"The translation of {Path(path).name}, which `run_trainer.py convert` wrote."]
    return dump_values(ordered, _comment([*lines, *translation.notes[1:]])), notes + translation.notes


def _to_older(path: str, text: str, config: Config, plan: Plan) -> Conversion:
    written, notes = older_text(path, text)
    problems: list[ConfigError] = []
    after = parse_config(_other_name(path, OLDER), written, (), problems)
    comparisons = compare_plans(plan, _plan(after, problems), plan.config.runner_config.max_steps or 1)
    keys = different_keys(config, after)
    differences = _differences(config, comparisons, keys, {})
    comparisons.append(_other_keys(config, keys))
    return Conversion(written, config, after, comparisons, differences, notes)


def _to_newer(path: str, config: Config, plan: Plan) -> Conversion:
    steps = config.runner_config.max_steps or plan.steps.total_steps
    if not steps:
        rule = "the newer schema counts steps, and their number is not known without the data"
        raise problem(config, "runner_config.epochs", rule, "write runner_config.max_steps, or --steps").error
    stated = _restated(config, plan, steps)
    file = newer_file(stated, _other_name(path, NEWER))
    try:
        comparisons = compare_plans(plan, _plan(file.config, [], plan), steps)
    except UserError as error:
        rule = f"its training cannot be planned in the newer schema: {error}"
        raise UserError(rule, where=path, fix="use the older file, or change what the message says") from None
    covered = tuple(key for comparison in comparisons for key in comparison.keys)
    differences = _acting_differences(config, different_keys(stated, file.config), covered)
    noted = {key: why for key in differences if (why := _harmless(key))}
    refused = {place: each.error.rule for each, places in file.refused for place in places}
    acting = {key: values for key, values in differences.items() if key not in noted}
    changes = _differences(config, comparisons, acting, refused)
    comparisons.append(_other_keys(config, acting))
    notes = [f"{config.source.name(key)} {shorten_repr(differences[key][0])} becomes"
             f" {shorten_repr(differences[key][1])}: {why}" for key, why in noted.items()]
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, LossMonitor) and callback.per_print_times > 1:
            text = f"callbacks.{number}.per_print_times {callback.per_print_times} becomes 1: {_UNRECORDED}"
            notes.append(text)
    if config.model.arch.type not in _BUILT:
        classes = " and ".join(_BUILT)
        notes.append(f"{config.model.arch.type}: MindSpore Transformers' PyNative trainer builds only {classes}")
    comment = _comment([*_header(path, config, plan, file, steps), *(f"Changed: {each.text}" for each in changes)])
    written = newer_text(file.values, comment)
    return Conversion(written, config, file.config, comparisons, changes, notes)


def _plan(config: Config, problems: list[ConfigError], like: Plan | None = None) -> Plan:
    """Plans a file for the job of its degrees, or for that of another plan; reads data only to count steps."""
    world = world_from_degrees(config, SINGLE_PROCESS)
    if like is not None:
        world = like.backend.world
    opens_data = config.runner_config.max_steps is None
    return plan_file(config, world, problems, opens_data=opens_data, checks_memory=False)


def _check_kind(config: Config) -> None:
    if not config.trains:
        rule = "the newer schema describes trainings alone"
        raise problem(config, "run_mode", rule, "convert a file that trains").error
    raise_problems(decoder_problems(config, "convert"))


def _restated(config: Config, plan: Plan, steps: int) -> Config:
    """Returns the configuration with the keys that the newer schema has, instead of others that mean the same."""
    numbers = {"max_steps": steps, "epochs": 1, "gradient_accumulation_steps": 1,
               "global_batch_size": plan.steps.rows_per_step}  # fmt: skip
    if config.lr_schedule.total_steps == config.runner_config.stop_step:
        numbers |= {"max_steps": config.runner_config.stop_step, "stop_step": 0}
    runner = config.runner_config.model_copy(update=numbers)
    changes: dict[str, Any] = {"runner_config": runner, "run_mode": "train"}
    data = config.train_dataset
    columns = data.input_columns or []
    if column_roles(columns, data.construct_args_key or []) == column_roles(columns, []):
        changes["train_dataset"] = data.model_copy(update={"construct_args_key": None})
    changes["context"] = config.context.model_copy(update={"device_target": plan.device})
    if plan.ranks == 1:
        changes |= {"parallel_config": ParallelConfig(), "use_parallel": None}
    else:
        degrees = {"data_parallel": None, "micro_batch_num": 1}
        changes["parallel_config"] = config.parallel_config.model_copy(update=degrees)
    if config.lr_schedule.total_steps == numbers["max_steps"]:
        changes["lr_schedule"] = config.lr_schedule.model_copy(update={"total_steps": -1})
    return config.model_copy(update=changes)


def _acting_differences(
    config: Config, differences: dict[str, tuple[Any, Any]], covered: tuple[str, ...]
) -> dict[str, tuple[Any, Any]]:
    """Returns the differences of keys that act, except those whose effects the facts compare."""
    without_effect = (*covered, "callbacks", "model.model_config.architectures", "model.model_config.model_type")
    if not config.do_eval:
        without_effect += _EVALUATION
    loader = config.train_dataset.data_loader
    if not loader.reads_text:
        without_effect += _OF_TEXT
    if loader.type != "MindDataset":
        without_effect += ("train_dataset.input_columns", "train_dataset.construct_args_key")
    acting = [key for key in differences if not is_below(key, without_effect) and not _is_ignored(key)]
    return {key: differences[key] for key in acting}


def _is_ignored(key: str) -> bool:
    """Returns whether a key has no effect in this trainer."""
    parts = key.split(".")
    ends = range(1, len(parts) + 1)
    fields = [fields_at(".".join(parts[:end])) for end in ends]
    return any(known and all(support_of(field)[0] != "supported" for field in known) for known in fields)


def _harmless(key: str) -> str:
    """Returns why a difference of a key does not change a training; empty if it may."""
    if key.partition(".")[0].startswith(("profile", "mstx")):
        return _UNRECORDED
    return next((why for place, why in _WITHOUT_NUMBERS.items() if is_below(key, (place,))), "")


def _differences(
    config: Config, comparisons: list[PlanComparison], keys: dict[str, tuple[Any, Any]], refused: dict[str, str]
) -> list[Difference]:
    """Returns the keys and facts that the new file changes; facts that follow from such keys are left out."""
    differences = [Difference(key, *values, refused.get(key, "")) for key, values in keys.items()]
    for comparison in comparisons:
        if not comparison.is_equal and (comparison.keys or not keys):
            key = next((key for key in comparison.keys if config.source.where(key)), "")
            text = f"{comparison.after} ({comparison.name}), not {comparison.before}"
            differences.append(Difference(key or comparison.name, NO_VALUE, text, ""))
    return differences


def _other_keys(config: Config, different: dict[str, tuple[Any, Any]]) -> PlanComparison:
    """Returns the comparison of all keys, of which those with the same effect have been left out."""
    count = sum(1 for _ in flatten(plain_values(config)))
    names = ", ".join(map(config.source.name, different))
    return PlanComparison("other keys", f"{count} keys", f"without {names}", not different, ())


def _error(config: Config, difference: Difference) -> ConfigError:
    rule = f"the other schema cannot say it: there it would be {difference.new_value}"
    if difference.refusal:
        rule = f"the other schema refuses it: {difference.refusal}"
    source = config.source
    fix = "remove it, or add --lossy to convert without it"
    place = source.place(difference.key)
    if place == NO_LOCATION:
        place = place._replace(text=source.path)
    before = difference.before
    if before is NO_VALUE and source.where(difference.key):
        before = value_of(config, difference.key)
    return problem_at(place, source.name(difference.key), rule, fix, before)


def _header(path: str, config: Config, plan: Plan, file: NewerFile, steps: int) -> Iterator[str]:
    """Yields the lines at the top of a new file: where it comes from, and what its keys mean."""
    yield f"{Path(path).name} in the schema of MindSpore Transformers {NEWER}, written by `run_trainer.py convert`."
    runner = config.runner_config
    if file.config.runner_config.max_steps != steps:
        yield f"training.steps {runner.stop_step}: runner_config.stop_step, which is the schedule's total_steps"
    elif runner.max_steps is None:
        yield f"training.steps {steps}: runner_config.epochs {runner.epochs} with the data of this machine"
    batch = plan.steps
    ranks = batch.rows_per_step // (batch.batch_rows * batch.micro_batches)
    yield (
        f"training.global_batch_size {batch.rows_per_step}: batch_size {batch.batch_rows} x {batch.micro_batches}"
        f" micro-batches x data_parallel {ranks}; it is the same for any number of ranks"
    )
    if config.context.device_target is None:
        yield f"context.device_target {plan.device}: the device of this machine, the older file has none"
    notes = {row.old: row.note for row in ROWS if row.note}
    yield from (f"{key}: {notes[key].format(value)}" for key, value in file.values.items() if key in notes)
    if file.defaults:
        yield f"Keys that {Path(path).name} leaves out, because their defaults differ: {', '.join(file.defaults)}"


def _comment(lines: Iterable[str]) -> str:
    """Returns lines as a YAML comment."""
    texts = [textwrap.wrap(line, 117, break_long_words=False, subsequent_indent="  ") for line in lines]
    return "".join(f"# {line}\n" for wrapped in texts for line in wrapped)


def _other_name(path: str, schema: str) -> str:
    """Returns the name of a file in the other schema, for messages: ``a-2.0.yaml``."""
    return f"{Path(path).stem}-{schema}.yaml"
