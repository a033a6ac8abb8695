"""The plan of a file that may be for another machine: its job, all of its problems at once, and what is not here."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.checks.parallel import fit_problems, parallel_degrees, resolve_for_job, zero_level
from trainer.config.checks.problem import ConfigError, problem, raise_problems, value_of
from trainer.config.checks.rules import rule_problems, run_problems
from trainer.config.device_defaults import apply_device_defaults
from trainer.config.location import SourceLocation
from trainer.config.note import Note
from trainer.config.schema.data import EVAL, TRAIN
from trainer.device.resolve import planned_device, plans_elsewhere
from trainer.errors import UserError
from trainer.parallel.world import SINGLE_PROCESS, World, world_of
from trainer.plan.device_memory import fixed_bytes
from trainer.plan.memory import memory_estimate
from trainer.plan.plan import ModelPlan, Plan, plan_run
from trainer.run.prepare import BuildProgress, prepare_run, select_execution_mode

if TYPE_CHECKING:
    from trainer.config import Config

_MODEL = "model.model_config"
_LIMIT = "context.max_device_memory"
_SHARING = "parallel.enable_parallel_optimizer"
_LEVEL = "parallel.parallel_optimizer_config.optimizer_level"
_MOST_TIMES = 8
"""A fix has at most so many times the ranks of the file."""
_OF_DATA = frozenset(("model", TRAIN, EVAL))
_OF_MEMORY = frozenset(("model", "parallel", "parallel_config", "use_parallel", "context"))
"""Sections of the file whose mistakes leave the data, or the memory, unknown."""


def world_from_degrees(config: Config, world: World) -> World:
    """The job of a plan: that of the flags or the environment, else the smallest one that can train with the degrees of
    the file."""
    if world != SINGLE_PROCESS or not config.use_parallel or not config.trains:
        return world
    degrees = parallel_degrees(config, world)
    if config.parallel_config.data_parallel is None:  # as many as the experts need
        experts = degrees.expert_parallel
        least = experts // math.gcd(experts, degrees.context_parallel * degrees.model_parallel)
        degrees = degrees._replace(data_parallel=least)
    return world_of(degrees.ranks)


def plan_file(
    config: Config, world: World, told: list[ConfigError], opens_data: bool = True, checks_memory: bool = True
) -> Plan:
    """Plans a configuration whose own problems are `told`.

    A file for Ascend is planned on any machine: its data, weights and model folder are looked at where they are here.

    Args:
        opens_data: False for a plan that does not look at them, and so takes no time: of steps it knows nothing.
        checks_memory: Whether what a rank needs must be within `max_device_memory`.

    Raises:
        UserError: The run could not start on its machine; with all problems.
    """
    config = resolve_for_job(config, world)
    with contextlib.suppress(UserError):  # a device that is not there is told below
        config = apply_device_defaults(config, planned_device(config))
    backend = select_execution_mode(config, world)
    elsewhere = plans_elsewhere(config) or not opens_data
    problems = [*told, *map(_of_plan, run_problems(config, world))]
    backend_problems = backend.problems()
    misfits = fit_problems(config, world)
    rules = {one.error.rule for one in misfits}
    if elsewhere:
        unbuilt = [one for one in backend_problems if one.error.rule not in rules]
        absent = [one for one in problems if one.is_absent]
    else:
        unbuilt = []
        absent = []
    model = config.source.name(_MODEL)
    if any(one.error.key.startswith("model.") for one in told):  # sizes that are missing may be those
        problems = [one for one in problems if one.error.key != model or one.is_absent]
    problems += [*backend_problems, *(misfits if unbuilt else ())]  # the backend looks at one of the two

    def collect(check: Callable[[], Any]) -> None:
        try:
            check()
        except UserError as error:
            problems.append(_located(config, error))

    collect(lambda: backend.check_device(planned_device(config)))
    wrong = [one for one in problems if one not in unbuilt and one not in absent]
    sections = _sections_read(config)
    if elsewhere:
        away = missing_data(config, sections)
    else:
        away = {}
    has_sizes = not any(one.error.key == model for one in absent)
    try:
        raise_problems(wrong)
        if not elsewhere:
            return prepare_run(config, world).plan
        device = planned_device(config)
        memory_bytes = _memory(config, world)
        plan = plan_run(config, world, backend, device, memory_bytes, BuildProgress(), opens_data and not away)
        for section in away if opens_data else ():
            _check_data(config, section, is_away=True)
        if has_sizes and checks_memory:
            of_memory = _memory_notes(config, world, memory_bytes)
        else:
            of_memory = []
    except UserError as error:
        problems = wrong or [_located(config, error)]
        broken = {one.error.key.partition(".")[0] for one in wrong}
        if opens_data and not broken & _OF_DATA:
            for section in sections:
                collect(partial(_check_data, backend.data_config, section, section in away))
        if elsewhere and has_sizes and checks_memory and not broken & _OF_MEMORY:
            collect(lambda: _memory_notes(config, world, _memory(config, world)))
        raise_problems(list({str(one.error): one for one in problems}.values()))
    missing = [f"{name}.data_loader {path or '(no path is written)'}" for name, path in away.items()]
    if unbuilt:
        notes = [_unbuilt_note(unbuilt)]
    else:
        notes = []
    names = [f"{one.error.key} {one.error.value}" for one in absent if one.error.key != model] + missing
    if names:
        notes.append(Note(f"not on this machine, and so not looked at: {', '.join(names)}", "parallel"))
    if not has_sizes:
        return _without_sizes(config, plan, notes)
    return replace(plan, notes=(*plan.notes, *notes, *of_memory))


def _check_data(config: Config, section: str, is_away: bool) -> None:
    """Opens the data of a section, without making tokens of text; elsewhere the tokenizer alone, if that is here.

    Raises:
        UserError: They cannot be read in this form, or have tokens beyond the model's vocabulary.
    """
    wanted = getattr(config, section)
    if is_away and not (wanted.tokenizer.path and _dataset_exists(wanted.tokenizer.path)):
        return
    from trainer.data.datasets import build_eval_dataset, build_train_dataset, check_tokenizer
    from trainer.data.source.find import find_sources

    if not is_away and not wanted.data_loader.reads_text:
        build = build_eval_dataset
        if section == TRAIN:
            build = build_train_dataset
        build(config)
    else:
        check_tokenizer(config, section)
        if not is_away:
            find_sources(config, section)


def _located(config: Config, error: UserError) -> ConfigError:
    line = re.search(r":(\d+)$", error.where)
    place = config.source.place(error.key)
    named = error
    if type(error) is UserError:
        named = error.with_location(error.where, config.source.name(error.key))
    return ConfigError(SourceLocation(place.order or int(line[1] if line else 0), error.where), named)


def _unbuilt_note(problems: list[ConfigError]) -> Note:
    parts = [str(one.error).splitlines()[0].removeprefix(f"{one.error.where}: ").rstrip(".") for one in problems]
    return Note(f"a run on Ascend does not start: {'; '.join(parts)}", "parallel")


def missing_data(config: Config, sections: Iterable[str]) -> dict[str, str]:
    """The data sets of these sections that are not here, by section, with the path that is written; empty for none."""
    found = {}
    for name in sections:
        loader = getattr(config, name).data_loader
        # Files first: an HFDataLoader's path may be the name of their format.
        keys = ("dataset_dir", "dataset_files", "data_files", "path", "config")
        values = loader.model_dump(include=set(keys))
        paths = _paths([values[key] for key in keys if key in values])
        paths += [item.path for item in getattr(loader, "sources", ())]
        if loader.type == "MnistDataset":
            from trainer.data.source.mnist import PATH_VARIABLE

            paths.append(os.environ.get(PATH_VARIABLE, ""))
        if loader.type != "SyntheticDataset" and not any(_dataset_exists(path) for path in paths if path):
            found[name] = next(filter(None, paths), "")
    return found


def _sections_read(config: Config) -> list[str]:
    trains = config.trains
    sections = {TRAIN: trains, EVAL: config.run_mode == "eval" or (trains and config.do_eval)}
    return [name for name, reads in sections.items() if reads and getattr(config, name) is not None]


def _paths(value: Any) -> list[str]:
    """All strings in a loader's values that may be paths."""
    if isinstance(value, dict):
        return [path for key, below in value.items() if key != "split" for path in _paths(below)]
    if isinstance(value, list):
        return [path for below in value for path in _paths(below)]
    if isinstance(value, str) and not re.fullmatch(r"[\d., ]*", value):
        return [value]
    return []


def _dataset_exists(path: str) -> bool:
    """Whether a data set is at a path: a file, a folder, or Megatron-LM's two files of this beginning."""
    given = Path(path).expanduser()
    return path == "stdlib" or given.exists() or given.with_name(f"{given.name}.idx").exists()


def _without_sizes(config: Config, plan: Plan, notes: list[str]) -> Plan:
    """Nothing that depends on the model, whose sizes are in a folder elsewhere, or in none that the file names."""
    where = "are in pretrained_model_dir"
    if not config.pretrained_model_dir:
        where = "are not in the file: a run needs them, or --model FOLDER with a config.json"
    text = f"{_MODEL}: the sizes of the model {where}; weights and memory are not planned"
    return replace(
        plan, model=ModelPlan(kernels=plan.model.kernels, dtypes=plan.model.dtypes), pipeline=None, memory_bytes={},
        steps=replace(plan.steps, tokens_per_step=0, flops_per_row=0.0),
        notes=(*plan.notes, *notes, Note(text, "parallel")),
    )  # fmt: skip


def _of_plan(found: ConfigError) -> ConfigError:
    """A problem of a run, with the fix that a plan has."""
    if found.error.key != "use_parallel":
        return found
    error = found.error
    fix = "leave --ranks out, or add --use_parallel True"
    return found._replace(error=UserError(error.rule, where=error.where, key=error.key, value=error.value, fix=fix))


def _memory(config: Config, world: World) -> dict[str, int]:
    return memory_estimate(config, config.trains, planned_device(config), world)


def _memory_notes(config: Config, world: World, memory_bytes: Mapping[str, int]) -> list[str]:
    """Says where a rank's memory is probably above max_device_memory.

    Raises:
        UserError: Weights, gradients and optimizer state alone are, whose size is certain.
    """
    limit = config.context.max_device_memory
    if limit is None:
        return []
    gib = 1 << 30
    most = float(limit.removesuffix("GB"))
    fixed = fixed_bytes(memory_bytes) / gib
    total = memory_bytes["total"] / gib
    if fixed > most:
        rule = f"weights, gradients and optimizer state of a rank alone take {fixed:.1f} GiB"
        raise problem(config, _LIMIT, rule, _memory_fix(config, world, most * gib)).error
    if total > most:
        text = f"{_LIMIT} {limit}: a rank needs about {total:.1f} GiB, activations (estimated) included"
        return [Note(text, "parallel")]
    return []


def _memory_fix(config: Config, world: World, most_bytes: float) -> str:
    """Settings with which a rank has room for the model: the fewest ranks, then the fewest changes."""
    before = _mistakes(config, world)
    enough = ""
    for ranks, changes in _divisions(config, world):
        changed = _with_settings(config, changes)
        job = world_of(ranks)
        if _mistakes(changed, job) - before:
            continue
        memory_bytes = _memory(changed, job)
        if fixed_bytes(memory_bytes) > most_bytes:
            continue
        settings = ", ".join(f"{config.source.name(key)} to {value}" for key, value in changes.items())
        has = f"{memory_bytes['total'] / (1 << 30):.1f} GiB with the activations (estimated)"
        fix = f"for example set {settings}: a rank of {ranks} needs {has}"
        if memory_bytes["total"] <= most_bytes:
            return fix
        enough = enough or fix
    none = f"no degrees were found that help, with up to {_MOST_TIMES} times as many ranks"
    return enough or f"use a smaller model or devices with more memory: {none}"


def _divisions(config: Config, world: World) -> list[tuple[int, dict[str, Any]]]:
    """Numbers of ranks, and settings that divide the model further; whether these work together is not looked at."""
    degrees = parallel_degrees(_with_settings(config, {"use_parallel": True}), world)
    experts = config.decoder.experts
    shares = config.parallel.enable_parallel_optimizer
    level = zero_level(config)
    levels: list[dict[str, Any]] = [{}]
    levels += [{_SHARING: True, _LEVEL: each} for each in ("level1", "level2", "level3") if not shares or each > level]
    groups = [degrees.expert_parallel]
    if experts is not None:
        larger = range(groups[0] + 1, experts.expert_num + 1)
        groups += [size for size in larger if experts.expert_num % size == 0]
    found = []
    for stages, tensor, group, sharing in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), groups, levels):
        if stages * tensor > _MOST_TIMES:
            continue
        wanted = {
            "use_parallel": True, "parallel_config.pipeline_stage": degrees.pipeline_stage * stages,
            "parallel_config.model_parallel": degrees.model_parallel * tensor,
            "parallel_config.expert_parallel": group, **sharing,
        }  # fmt: skip
        changes = {key: value for key, value in wanted.items() if value_of(config, key) != value}
        if changes:
            found.append((degrees.ranks * stages * tensor, changes))
    return sorted(found, key=lambda each: (each[0], len(each[1])))


def _with_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with other values of these dotted keys."""
    for key, value in changes.items():
        *sections, name = key.split(".")
        holders = [config]
        for section in sections:
            holders.append(getattr(holders[-1], section))
        for holder, own in zip(reversed(holders), [name, *reversed(sections)], strict=True):
            value = holder.model_copy(update={own: value})
        config = value
    return config


def _mistakes(config: Config, world: World) -> set[tuple[str, str]]:
    """Keys and rules of what keeps a job from running, whatever its memory."""
    found = rule_problems(config) or run_problems(config, world) + list(select_execution_mode(config, world).problems())
    return {(one.error.key, one.error.rule) for one in found}
