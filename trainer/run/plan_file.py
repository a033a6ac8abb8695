"""Plans a file that may be for another machine: finds its job, all of its errors at once, and its missing data."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.checks.parallel import (
    fit_problems,
    parallel_degrees,
    parallel_problems,
    resolve_for_job,
)
from trainer.config.checks.preferences import loss_problems
from trainer.config.checks.problem import (
    ConfigError,
    problem,
    raise_problems,
    rename_keys,
    separate_errors,
)
from trainer.config.checks.rules import NO_EVALUATION_DATA, rule_problems, run_problems
from trainer.config.device_defaults import apply_device_defaults
from trainer.config.location import SourceLocation
from trainer.config.note import Note
from trainer.config.schema.data import EVAL, TRAIN
from trainer.device.doctor import available_memory_bytes
from trainer.device.resolve import planned_device, plans_elsewhere
from trainer.errors import UserError, value_text
from trainer.ops.select import on_arrays
from trainer.parallel.world import SINGLE_PROCESS, World, world_of
from trainer.plan.device.memory import DEVICE_BYTES, device_limit_bytes, fixed_bytes
from trainer.plan.memory import memory_estimate
from trainer.plan.plan import ModelPlan, Plan, plan_run
from trainer.plan.search.hardware import device_rates
from trainer.plan.search.render import yaml_difference
from trainer.plan.search.search import LayoutSearch
from trainer.run.prepare import BuildProgress, prepare_run, select_execution_mode

if TYPE_CHECKING:
    from trainer.config import Config

_MODEL = "model.model_config"
_LIMIT = "context.max_device_memory"
_GIB = 1 << 30
_MOST_DOUBLINGS = 14
"""Of the ranks of a file that needs more memory, in search of the fewest."""
_RANKS_OF_FIX = 128
"""Ranks on which other degrees are looked for if the ones of the file need too much memory, or four times its ranks."""
_DATA_SECTIONS = frozenset(("model", "model_config", TRAIN, EVAL))
"""An error in one of these sections prevents a check of the data."""
_MEMORY_SECTIONS = frozenset((
    "model", "model_config", "moe_config", "parallel", "parallel_config", "use_parallel", "context", "parallelism",
    "lora_config", "recompute", "recompute_config", "freeze",
))  # fmt: skip
"""An error in one of these sections, as the file names them, prevents an estimate of the memory."""


def world_from_degrees(config: Config, world: World) -> World:
    """Returns the job of a plan: that of the flags or the environment, else the smallest job with the file's degrees.
    """
    sharding = config.parallel.parallel_optimizer_config.optimizer_weight_shard_size
    if not config.parallel.enable_parallel_optimizer:
        sharding = 1
    if config.use_parallel is None and sharding > 1:
        config = config.model_copy(update={"use_parallel": True})
    if world != SINGLE_PROCESS or not config.use_parallel or not config.trains:
        return world
    degrees = parallel_degrees(config, world)
    if config.parallel_config.data_parallel is None:  # experts and shards need a minimum
        experts = degrees.expert_parallel
        minimum = experts // math.gcd(experts, degrees.context_parallel * degrees.model_parallel)
        degrees = degrees._replace(data_parallel=math.lcm(minimum, max(1, sharding)))
    return world_of(degrees.ranks)


def fewest_ranks(config: Config, world: World) -> tuple[World, list[Note]]:
    """Returns the job of `world_from_degrees`, or a larger one if only that has enough memory, and a note that says so.
    """
    job = world_from_degrees(config, world)
    if world != SINGLE_PROCESS or not config.trains or config.parallel_config.data_parallel is not None:
        return job, []
    job, why = _job_with_memory(config, job)
    if job.size == 1:
        return job, []
    return job, [Note(f"planned for {job.size} ranks, {why}; --ranks plans for another number", "parallel")]


def _job_with_memory(config: Config, job: World) -> tuple[World, str]:
    """Returns the smallest job with enough memory, and in what respect it is; the same job if none has.

    A job with too little for the estimated activations alone is the result if no other one has enough.
    """
    fallback = job, "the fewest that the degrees need"
    limit_bytes = device_limit_bytes(config)
    if limit_bytes is None or not config.parallel.enable_parallel_optimizer or config.use_parallel is False:
        return fallback
    if not plans_elsewhere(config) or _broken_rules(resolve_for_job(config, job), job):
        return fallback
    for doubling in range(_MOST_DOUBLINGS):
        larger = world_of(job.size << doubling)
        changed = apply_device_defaults(resolve_for_job(config, larger), planned_device(config))
        if _broken_rules(changed, larger):
            continue
        memory_bytes = _memory(changed, larger)
        is_possible = fixed_bytes(memory_bytes) <= limit_bytes
        if is_possible and doubling == 0:
            return fallback
        if memory_bytes["total"] <= limit_bytes:
            return larger, "the fewest whose memory fits"
        if is_possible and fallback[0] == job:
            fallback = larger, "the fewest whose weights, gradients and optimizer state fit"
    return fallback


def plan_file(
    config: Config, world: World, known_errors: list[ConfigError], opens_data: bool = True, checks_memory: bool = True
) -> Plan:
    """Plans a configuration, also one for an Ascend on a machine without an Ascend.

    There it checks data, weights and the model folder only if they are on this machine; notes name the others.

    Args:
        known_errors: The errors that loading the configuration found. They are raised together with all others.
        opens_data: False for a plan that reads no data, and so takes no time and does not know the number of steps.
        checks_memory: Whether a rank must fit into `max_device_memory`.

    Raises:
        UserError: The run could not start on its machine. The error names all problems.
    """
    config = resolve_for_job(config, world)
    with contextlib.suppress(UserError):  # `check_device` below reports a missing device
        config = apply_device_defaults(config, planned_device(config))
    backend = select_execution_mode(config, world)
    elsewhere = plans_elsewhere(config) or not opens_data
    problems = [*known_errors, *(_with_plan_fix(error) for error in run_problems(config, world))]
    backend_problems = backend.problems()
    degree_problems = fit_problems(config, world)
    degree_rules = {each.error.rule for each in degree_problems}
    not_implemented: list[ConfigError] = []
    missing_paths: list[ConfigError] = []
    if elsewhere:
        not_implemented = [each for each in backend_problems if each.error.rule not in degree_rules]
        missing_paths = [each for each in problems if each.is_absent]
    model = config.source.name(_MODEL)
    problems = [*_without_explained(problems, known_errors, model), *backend_problems]
    if not_implemented:  # then the backend has not checked the degrees
        problems += degree_problems

    def collect(check: Callable[[], Any]) -> None:
        """Runs a check, and collects its error instead of raising it."""
        try:
            check()
        except UserError as error:
            problems.append(_with_place(config, error))

    collect(lambda: backend.check_device(planned_device(config)))
    errors = [each for each in problems if each not in not_implemented and each not in missing_paths]
    sections = _sections_read(config)
    missing: dict[str, str] = {}
    if elsewhere:
        missing = missing_data(config, sections)
    has_sizes = not any(each.error.key == model for each in missing_paths)
    memory_notes: list[Note] = []
    try:
        raise_problems(errors)
        if not elsewhere:
            return prepare_run(config, world).plan
        device = planned_device(config)
        raise_problems(loss_problems(config, world, on_arrays(config, device, world)))
        if not has_sizes:
            config = _with_equal_stages(config)
        memory_bytes = _memory(config, world)
        plan = plan_run(config, world, backend, device, memory_bytes, BuildProgress(), opens_data and not missing)
        if opens_data:
            for section in missing:
                _check_data(config, section, is_missing=True)
        if has_sizes and checks_memory:
            memory_notes = _memory_notes(config, world, memory_bytes)
    except UserError as error:
        problems = errors or [_with_place(config, each) for each in separate_errors(error)]
        broken = {each.error.key.partition(".")[0] for each in errors}
        if opens_data and not broken & _DATA_SECTIONS:
            for section in sections:
                collect(partial(_check_data, backend.data_config, section, section in missing))
        if elsewhere and has_sizes and checks_memory and not broken & _MEMORY_SECTIONS:
            collect(lambda: _memory_notes(config, world, _memory(config, world)))
        raise_problems(list({str(each.error): each for each in problems}.values()))
    paths = {each.error.key: each.error.value for each in missing_paths if each.error.key != model}
    paths |= {f"{name}.data_loader": path or "(no path is written)" for name, path in missing.items()}
    notes = _notes_elsewhere(not_implemented, paths)
    if not has_sizes:
        return _without_sizes(config, plan, notes)
    added = [Note(config.source.name_keys(note), note.kind) for note in (*notes, *memory_notes)]
    return replace(plan, notes=(*plan.notes, *added))


def _sections_read(config: Config) -> list[str]:
    """Returns the data set sections that the run reads."""
    evaluates = config.run_mode == "eval" and not config.tasks
    reads = {TRAIN: config.trains, EVAL: evaluates or (config.trains and config.do_eval)}
    return [name for name in reads if reads[name] and getattr(config, name) is not None]


def _without_explained(
    problems: list[ConfigError], known_errors: Sequence[ConfigError], model: str
) -> list[ConfigError]:
    """Leaves out that sizes of the model or evaluation data are missing, if a known error may be why.

    Args:
        model: The name of the section that has the sizes.
    """
    keys = [each.error.key for each in known_errors]
    if "train_dataset.held_out" in keys:
        problems = [each for each in problems if each.error.rule != NO_EVALUATION_DATA]
    if "model" in keys:  # it is no section
        return [each for each in problems if each.error.key != model]
    if any(key.startswith("model.") for key in keys):
        return [each for each in problems if each.error.key != model or each.is_absent]
    return problems


def _check_data(config: Config, section: str, is_missing: bool) -> None:
    """Opens the data of a section without tokenizing text. Of missing data it checks the tokenizer, if that is here.

    Raises a UserError if the data has another form, or tokens beyond the model's vocabulary.
    """
    dataset = getattr(config, section)
    if is_missing and not (dataset.tokenizer.path and _dataset_exists(dataset.tokenizer.path)):
        return
    from trainer.data.datasets import build_eval_dataset, build_train_dataset, check_tokenizer
    from trainer.data.source.find import find_sources

    if is_missing or dataset.data_loader.reads_text:
        check_tokenizer(config, section)
        if not is_missing:
            find_sources(config, section)
    elif section == TRAIN:
        build_train_dataset(config)
    else:
        build_eval_dataset(config)


def _with_place(config: Config, error: UserError) -> ConfigError:
    """Returns an error with its place in the file."""
    line = re.search(r":(\d+)$", error.where)
    order = config.source.place(error.key).order or 0
    if not order and line:
        order = int(line[1])
    if type(error) is UserError:
        error = error.with_location(error.where, config.source.name(error.key))
    return rename_keys(ConfigError(SourceLocation(order, error.where), error), config.source)


def _notes_elsewhere(not_implemented: Sequence[ConfigError], missing: Mapping[str, object]) -> list[Note]:
    """Returns notes about what this machine does not tell of a run on another one; `missing` are paths by their keys.
    """
    notes = []
    if not_implemented:
        texts = [str(each.error).splitlines()[0].removeprefix(f"{each.error.where}: ") for each in not_implemented]
        rules = "; ".join(text.rstrip(".") for text in texts)
        notes.append(Note(f"not supported on Ascend: {rules}", "parallel"))
    if missing:
        names = ", ".join(f"{key} {path}" for key, path in missing.items())
        notes.append(Note(f"not checked, because it is not on this machine: {names}", "parallel"))
    return notes


def missing_data(config: Config, sections: Iterable[str]) -> dict[str, str]:
    """Returns the data sets of these sections that are not on this machine: section -> path, empty without a path."""
    missing = {}
    for name in sections:
        loader = getattr(config, name).data_loader
        # Files first: an HFDataLoader's path may be the name of their format.
        keys = ("dataset_dir", "dataset_files", "data_files", "path", "config")
        values = loader.model_dump(include=set(keys))
        paths = _paths([values[key] for key in keys if key in values])
        paths += [item.path for item in getattr(loader, "sources", ())]
        if loader.reads_images:
            from trainer.data.source.images import PATH_VARIABLE

            paths.append(os.environ.get(PATH_VARIABLE, ""))
        if loader.type != "SyntheticDataset" and not any(_dataset_exists(path) for path in paths if path):
            missing[name] = next(filter(None, paths), "")
    return missing


def _paths(value: Any) -> list[str]:
    """Returns all strings in a loader's values that may be paths."""
    if isinstance(value, dict):
        return [path for key, item in value.items() if key != "split" for path in _paths(item)]
    if isinstance(value, list):
        return [path for item in value for path in _paths(item)]
    if isinstance(value, str) and not re.fullmatch(r"[\d., ]*", value):
        return [value]
    return []


def _dataset_exists(path: str) -> bool:
    """Returns whether a path is a file, a folder, or the prefix of Megatron-LM's .bin and .idx files."""
    expanded = Path(path).expanduser()
    return path == "stdlib" or expanded.exists() or expanded.with_name(f"{expanded.name}.idx").exists()


def _with_equal_stages(config: Config) -> Config:
    """Returns the configuration without offset, whose layers are those of a model that is not on this machine."""
    model = config.model.model_copy(update={"settings": config.decoder.model_copy(update={"offset": 0})})
    return config.model_copy(update={"model": model})


def _without_sizes(config: Config, plan: Plan, notes: list[Note]) -> Plan:
    """Returns the plan without what depends on the sizes of the model, which are not on this machine."""
    reason = "the model sizes are in pretrained_model_dir, which is not on this machine"
    if not config.pretrained_model_dir:
        reason = "the model sizes are not in the file; a run needs them, or --model FOLDER with a config.json"
    text = f"weights and memory are unknown: {reason}"
    return replace(
        plan, model=ModelPlan(kernels=plan.model.kernels, dtypes=plan.model.dtypes), pipeline=None, memory_bytes={},
        steps=replace(plan.steps, tokens_per_step=0, flops_per_row=0.0),
        notes=(*plan.notes, *notes, Note(text, "parallel")),
    )  # fmt: skip


def _with_plan_fix(problem: ConfigError) -> ConfigError:
    """Returns an error of a run with the fix for a plan."""
    error = problem.error
    if error.key != "use_parallel":
        return problem
    fix = "leave --ranks out, or add --use_parallel true"
    return problem._replace(error=UserError(error.rule, where=error.where, key=error.key, value=error.value, fix=fix))


def _memory(config: Config, world: World) -> dict[str, int]:
    return memory_estimate(config, config.trains, planned_device(config), world)


def _memory_notes(config: Config, world: World, memory_bytes: Mapping[str, int]) -> list[Note]:
    """Returns a note if a rank probably needs more than max_device_memory.

    Raises a UserError if weights, gradients and optimizer state, whose size is certain, already need more.
    """
    limit_bytes = device_limit_bytes(config)
    if limit_bytes is None:
        return []
    fixed = fixed_bytes(memory_bytes)
    total = memory_bytes["total"]
    if fixed > limit_bytes:
        rule = f"a rank needs {fixed / _GIB:.1f} GiB for weights, gradients and optimizer state"
        raise problem(config, _LIMIT, rule, _memory_fix(config, world, limit_bytes)).error
    if total > limit_bytes:
        limit = config.context.max_device_memory
        text = f"{_LIMIT} {limit}: a rank needs about {total / _GIB:.1f} GiB with the estimated activations"
        return [Note(text, "parallel")]
    return []


def _memory_fix(config: Config, world: World, limit_bytes: float) -> str:
    """Returns settings with which a rank has enough memory, on as few ranks and with as few changes as possible."""
    if not (config.trains and config.is_decoder):
        return "use a smaller model or devices with more memory"
    device = planned_device(config)
    alone = _memory(config.model_copy(update={"use_parallel": False}), SINGLE_PROCESS)
    sharded_bytes = alone["weights"] + alone.get("optimizer state", 0)  # at best each rank has an equal share
    rules = partial(_new_problems, device=device, known=_rule_names(layout_rules(config, world, device)))
    parallel = config.model_copy(update={"use_parallel": True})
    fewest = world_from_degrees(parallel, world).size
    sizes = [fewest << doubling for doubling in range(_MOST_DOUBLINGS)]
    for job in [world_of(size) for size in sizes if size <= max(_RANKS_OF_FIX, 4 * fewest)]:
        if sharded_bytes / job.size > limit_bytes:
            continue
        search = LayoutSearch(parallel, job, job, device, limit_bytes, device_rates(config, job, device), rules)
        nearest = search.nearest()
        if nearest is not None:
            settings = _settings_text(config, search.changed_config(parallel, nearest.layout))
            needed = f"{nearest.memory_bytes / _GIB:.1f} GiB with the estimated activations"
            return f"for example {settings}: each of {job.size} ranks then needs {needed}"
    return f"use a smaller model or devices with more memory: no degrees help with up to {job.size} ranks"


def _new_problems(config: Config, world: World, device: str, known: set[tuple[str, str]]) -> list[ConfigError]:
    """Returns the errors about the ranks of a job, in the schema of its file too, without those of known rules."""
    section = config.parallel_config
    if config.source.source_places and section.use_seq_parallel != (section.model_parallel > 1):
        return [problem(config, "parallel_config.use_seq_parallel", "is on with tensor parallelism alone", "switch it")]
    return [each for each in layout_rules(config, world, device) if not _rule_names([each]) <= known]


def _rule_names(problems: Iterable[ConfigError]) -> set[tuple[str, str]]:
    """Returns key and rule of each error."""
    return {(each.error.key, each.error.rule) for each in problems}


def _settings_text(config: Config, changed: Config) -> str:
    """Returns what to write in the file for the changes: ``set parallelism.tensor_parallel to 8``."""
    settings = {key: value for key, _, value in yaml_difference(config, changed)}
    within = {key for key in settings for section in settings if key.startswith(f"{section}.")}
    settings = {key: value for key, value in settings.items() if key not in within}
    if config.source.source_places:
        from trainer.config.pynative.reverse import source_statements

        before = source_statements(config)
        settings = {
            key: value_text(statement.value)
            for key, statement in source_statements(changed).items()
            if key.startswith(("parallelism.", "recompute."))
            and (key not in before or before[key].value != statement.value)
        }
    if not settings:
        return "start more ranks"
    return f"set {', '.join(f'{key} to {value}' for key, value in settings.items())}"


def _broken_rules(config: Config, world: World) -> set[tuple[str, str]]:
    """Returns key and rule of every error that prevents a job, apart from its memory."""
    problems = rule_problems(config)
    if not problems:
        problems = [*run_problems(config, world), *select_execution_mode(config, world).problems()]
    return _rule_names(problems)


def open_search(config: Config, world: World, device: str) -> LayoutSearch:
    """Returns the search for a layout of a file on the ranks of `world`; its global batch stays as it is.

    Raises:
        UserError: The file does not train a decoder, or the sizes of its model are not known.
    """
    if not (config.trains and config.is_decoder):
        rule = "only the training of a decoder has layouts to search for"
        raise UserError(rule, where="flag --search", key="--search", fix="leave it out")
    raise_problems([each for each in run_problems(config, world) if each.error.key == config.source.name(_MODEL)])
    limit_bytes = device_limit_bytes(config)
    if limit_bytes is None and device == "CPU":
        limit_bytes = available_memory_bytes() / world.local_size
    return LayoutSearch(
        config, world, world_from_degrees(config, SINGLE_PROCESS), device, limit_bytes or DEVICE_BYTES,
        device_rates(config, world, device), partial(layout_rules, device=device),
    )  # fmt: skip


def layout_rules(config: Config, world: World, device: str) -> list[ConfigError]:
    """Returns every error about the ranks of a job on a kind of device."""
    backend = select_execution_mode(config, world)
    problems = [*parallel_problems(config, world), *backend.problems()]
    problems += loss_problems(config, world, on_arrays(config, device, world))
    try:
        backend.check_device(device)
    except UserError as error:
        problems.append(_with_place(config, error))
    return problems
