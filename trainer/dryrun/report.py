"""`plan --dryrun ascend`: runs a user's file on MindSpore's Ascend backend in a dry run, as one rank of its job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import Config, dump_config
from trainer.config.checks.parallel import parallel_degrees, resolve_for_job, runs_semi_auto
from trainer.config.checks.problem import ConfigError, problem, raise_problems
from trainer.config.checks.rules import run_problems
from trainer.config.device_defaults import apply_device_defaults
from trainer.device.doctor import available_memory_bytes
from trainer.device.settings import SPEED_UP_KEY
from trainer.dryrun.process import Case, Collective, Measurement, run_cases
from trainer.errors import RunError, TrainerError, UserError
from trainer.monitors.formatting import size
from trainer.parallel.world import World
from trainer.plan.device.memory import DEVICE_BYTES, device_limit_bytes
from trainer.plan.division import rank_groups, ranks_text
from trainer.plan.memory import memory_estimate
from trainer.run.plan_file import plan_file
from trainer.tables import Section

_GIB = 1 << 30
_HOST_BYTES = 3 * _GIB // 2  # MindSpore with its Ascend backend; weights and optimizer state are on the device
_GRAPH_LAYER_BYTES = 64 << 20  # per layer, while MindSpore compiles the graph of semi-automatic mode
_NAME = "ascend"
_STEP = "step"
_MODEL = "model.model_config"


class DryRun(NamedTuple):
    """The result of a dry run of one rank."""

    world: World
    measurement: Measurement
    planned_bytes: int | None  # the plan's estimate of device memory
    limit_bytes: int | None  # context.max_device_memory
    groups: Mapping[tuple[int, ...], str] = {}  # see `group_names`

    @property
    def exceeds_memory(self) -> bool:
        """Returns whether a device would run out of memory."""
        return self.measurement.peak_bytes > self.device_bytes

    @property
    def device_bytes(self) -> int:
        """Returns the memory that MindSpore may use on a device."""
        return self.limit_bytes or DEVICE_BYTES

    def check(self) -> None:
        """Raises a RunError if a device would run out of memory."""
        if self.exceeds_memory:
            peak = size(self.measurement.peak_bytes)
            limit = size(self.device_bytes)
            rule = f"a device would run out of memory: this rank needs {peak} of {limit}"
            fix = "recompute more, use a smaller batch or more ranks, or a device with more memory"
            raise RunError(rule, key="context.max_device_memory", fix=fix)


def check_name(device: str) -> None:
    """Raises a UserError for a device that has no dry run."""
    if device.lower() != _NAME:
        rule = "only ascend has a dry run"
        raise UserError(rule, where="flag --dryrun", key="--dryrun", value=device, fix=f"write --dryrun {_NAME}")


def select_rank(world: World, rank: int) -> World:
    """Returns the world with another rank as this process's rank.

    Raises:
        UserError: The world has no such rank.
    """
    if not 0 <= rank < world.size:
        last = world.size - 1
        rule = "a job of one rank has rank 0"
        if last:
            rule = f"a job of {world.size} ranks has the ranks 0 to {last}"
        fix = f"write --rank {last} or less, or set the number with --ranks"
        raise UserError(rule, where="flag --rank", key="--rank", value=rank, fix=fix)
    return world._replace(rank=rank, local_rank=rank % world.local_size)


def dry_run(
    config: Config, world: World, problems: list[ConfigError], tell: Callable[[str], None], steps: int = 2
) -> DryRun:
    """Runs steps of the training as one rank, with random data and without values of weights.

    Args:
        problems: Takes problems that do not prevent the dry run; see `plan_file`.
        tell: Takes a line about the progress.

    Raises:
        UserError: The file could not start on an Ascend or does not train, the sizes of its model are unknown, or this
            machine lacks memory or a compiler.
        RunError: The stubs of CANN's libraries cannot be built.
    """
    if not config.trains:
        fix = "add --run_mode train, or leave --dryrun out"
        raise problem(config, "run_mode", "a dry run does steps of a training", fix).error
    plan = plan_file(config, world._replace(rank=0, local_rank=0), problems, opens_data=False)
    model_key = config.source.name(_MODEL)
    raise_problems([each for each in run_problems(config, world) if each.error.key == model_key])
    _check_memory(config, world, available_memory_bytes())
    tell("loading MindSpore's Ascend backend")
    case = Case(_text_without_files(config), steps=steps)
    [measurement] = run_cases({_NAME: case}, world.size, world.rank, lambda name, text: tell(text)).values()
    estimate = None
    if plan.memory_bytes:
        estimate = planned_bytes(config, world)
    return DryRun(world, measurement, estimate, device_limit_bytes(config), group_names(config, world))


def planned_bytes(config: Config, world: World) -> int:
    """Returns the plan's estimate of the device memory of this rank, for its pipeline stage."""
    return planned_parts(config, world)["total"]


def planned_parts(config: Config, world: World) -> dict[str, int]:
    """Returns the estimate of `planned_bytes` in bytes, by part and in total."""
    config = apply_device_defaults(resolve_for_job(config, world), "Ascend")
    stages = parallel_degrees(config, world).pipeline_stage
    return memory_estimate(config, config.trains, "Ascend", world, world.rank * stages // world.size)


def audit_on_backend(config: Config, world: World) -> dict[str, Any] | str:
    """Returns the result of `tasks.audit`, or the reason why the audit cannot be made on the Ascend backend.

    For a job in explicit mode, the result also has the collectives that the rank calls in a step of a dry run.
    """
    text = _text_without_files(config)
    cases = {_NAME: Case(text, task="trainer.dryrun.tasks:audit")}
    if world.size > 1 and not runs_semi_auto(config, world):
        cases[_STEP] = Case(text)
    try:
        measured = run_cases(cases, world.size, world.rank)
    except TrainerError as error:
        return error.rule
    except OSError as error:  # the folder of the libraries cannot be written
        return str(error)
    audit = measured[_NAME]
    step = measured.get(_STEP)
    if audit.failure is not None:
        return audit.failure.message
    if step is None:
        return audit.found
    return _with_collectives(audit.found, config, world, step)


def _with_collectives(audit: dict[str, Any], config: Config, world: World, step: Measurement) -> dict[str, Any]:
    """Adds the collectives of a step of this rank to an audit."""
    names = ("collective", "group", "calls", "bytes")
    rows = collective_rows(step.collectives, group_names(config, world))
    values = audit["values"] | {"collectives": [dict(zip(names, row, strict=True)) for row in rows]}
    table: list[tuple[str, ...]] = [names]
    table += [(name, group, str(calls), _bytes_text(sent)) for name, group, calls, sent in rows]
    if step.failure is not None:
        table = [("", ""), ("the step failed", step.failure.message)]
    title = f"Collectives of rank {world.rank} of {world.size} in a step"
    *sections, limits, result = audit["sections"]
    return audit | {"values": values, "sections": [*sections, (title, table), limits, result]}


def group_names(config: Config, world: World) -> dict[tuple[int, ...], str]:
    """Returns for the ranks of each group of this rank the name of the group in the plan."""
    degrees = parallel_degrees(config, world)
    if degrees.ranks != world.size:
        return {}
    names = {tuple(range(world.size)): "all"}
    for name, ranks in rank_groups(config, world, world.rank).items():
        names.setdefault(tuple(ranks), name)
    return names


def collective_rows(
    collectives: Sequence[Collective], groups: Mapping[tuple[int, ...], str]
) -> list[tuple[str, str, int, int]]:
    """Returns a row for each kind of collective: name, group, number of calls, and bytes that this rank sends."""
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for each in collectives:
        group = ranks_text(each.ranks)
        if each.ranks in groups:
            group = f"{groups[each.ranks]}: {group}"
        calls[each.name, group] += 1
        sizes[each.name, group] += each.bytes
    return [(name, group, count, sizes[name, group]) for (name, group), count in calls.most_common()]


def _text_without_files(config: Config) -> str:
    """Returns the configuration as text for a process in another folder, without relative paths and missing files.

    The values of a model folder are already in the configuration.
    """
    ascend = dict(config.context.ascend_config or {})
    if ascend.get(SPEED_UP_KEY):
        ascend[SPEED_UP_KEY] = str(Path(ascend[SPEED_UP_KEY]).expanduser().absolute())
        context = config.context.model_copy(update={"ascend_config": ascend})
        config = config.model_copy(update={"context": context})
    return dump_config(config.model_copy(update={"pretrained_model_dir": None}))


def _check_memory(config: Config, world: World, left_bytes: int) -> None:
    layers = 0
    if runs_semi_auto(config, world):
        layers = config.decoder.num_layers
    needed = _HOST_BYTES + layers * _GRAPH_LAYER_BYTES
    if needed > left_bytes:
        rule = f"a dry run needs about {size(needed)} of memory, but this machine has {size(left_bytes)} left"
        fix = "end other programs, or reduce model.model_config.num_layers"
        raise UserError(rule, where="flag --dryrun", key="--dryrun", value=_NAME, fix=fix)


def dry_run_dict(result: DryRun) -> dict[str, Any]:
    """Returns the result for `--json`."""
    return {
        "ranks": result.world.size,
        "rank": result.world.rank,
        **asdict(result.measurement),
        "planned_bytes": result.planned_bytes,
        "max_device_memory_bytes": result.limit_bytes,
        "exceeds_memory": result.exceeds_memory,
    }


def dry_run_sections(result: DryRun) -> list[Section]:
    """Returns the tables that `plan` prints: the failure, or memory, reads, kernels and collectives of a step."""
    measured = result.measurement
    title = f"Dry run on an Ascend, rank {result.world.rank} of {result.world.size}"
    if measured.failure is not None:
        failure = measured.failure
        rows = [("failed", failure.message)]
        if failure.operator:
            rows.append(("operator", failure.operator))
        if failure.where:
            rows.append(("line", failure.where))
        return [(title, [("", ""), *rows])]
    rows = [("peak device memory", _memory_text(result)), ("host reads a step", _bytes_text(measured.host_bytes))]
    rows += [(f"  {where}", f"{count} x, {_bytes_text(read)}") for where, (count, read) in measured.host_reads.items()]
    kernels = ", ".join(f"{name} {count}" for name, count in measured.legacy.items())
    rows.append(("legacy kernels a step", kernels or "none"))
    collectives = collective_rows(measured.collectives, result.groups)
    rows.append(("collectives a step", str(len(measured.collectives) or "none")))
    rows += [(f"  {name} over {group}", f"{count} x, {_bytes_text(sent)}") for name, group, count, sent in collectives]
    rows.append(("note", "a dry run computes no values and measures no time"))
    return [(title, [("", ""), *rows])]


def _memory_text(result: DryRun) -> str:
    name = "max_device_memory"
    if result.limit_bytes is None:
        name = "a device's"
    relation = "of"
    if result.exceeds_memory:
        relation = "ABOVE"
    text = f"{size(result.measurement.peak_bytes)}, {relation} {name} {size(result.device_bytes)}"
    if result.planned_bytes is None:
        return text
    rough = ""
    if result.planned_bytes < _GIB:
        rough = " (rough below 1 GiB)"
    return f"{text}; the plan estimates {size(result.planned_bytes)}{rough}"


def _bytes_text(number: int) -> str:
    if number >= 1 << 20:
        return size(number)
    return f"{number:,} bytes"
