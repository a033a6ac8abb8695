"""`plan --dryrun ascend`: a user's file on the dry Ascend backend, as one rank of its job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config import dump_config
from trainer.config.checks.parallel import parallel_degrees, resolve_for_job, runs_semi_auto
from trainer.config.checks.problem import raise_problems
from trainer.config.checks.rules import run_problems
from trainer.config.device_defaults import apply_device_defaults
from trainer.device.doctor import memory_left_bytes
from trainer.device.settings import SPEED_UP_KEY
from trainer.dryrun.process import Case, Collective, Measurement, run_cases
from trainer.errors import RunError, TrainerError, UserError
from trainer.monitors.formatting import size
from trainer.plan.division import rank_groups, ranks_text
from trainer.plan.memory import memory_estimate
from trainer.run.plan_file import plan_file

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.checks.problem import ConfigError
    from trainer.parallel.world import World
    from trainer.plan.render import Section

_GIB = 1 << 30
_HOST_BYTES = 3 * _GIB // 2  # MindSpore with its Ascend backend; weights and optimizer state are on the device alone
_GRAPH_LAYER_BYTES = 64 << 20  # of the one graph of semi-automatic mode, while MindSpore compiles it
_DEVICE_BYTES = 60 * _GIB  # what MindSpore takes of a device of 64 GB
_NAME = "ascend"
_STEP = "step"
_MODEL = "model.model_config"


class DryRun(NamedTuple):
    """What became of the rank of a job."""

    world: World
    measurement: Measurement
    planned_bytes: int | None  # device memory as the plan estimates it
    limit_bytes: int | None  # context.max_device_memory
    groups: Mapping[tuple[int, ...], str] = {}  # see `group_names`

    @property
    def exceeds_memory(self) -> bool:
        """Whether a device would run out of memory."""
        return self.measurement.peak_bytes > self.device_bytes

    @property
    def device_bytes(self) -> int:
        if self.limit_bytes is None:
            return _DEVICE_BYTES
        return self.limit_bytes

    def check(self) -> None:
        """Raises a RunError where a device would run out of memory."""
        if self.exceeds_memory:
            peak = size(self.measurement.peak_bytes)
            limit = size(self.device_bytes)
            rule = f"a device would run out of memory: this rank needs {peak} of {limit}"
            fix = "recompute more, use a smaller batch or more ranks, or a device with more memory"
            raise RunError(rule, key="context.max_device_memory", fix=fix)


def check_name(device: str) -> None:
    """Raises a UserError for a device that has no dry run."""
    if device.lower() != _NAME:
        rule = "there is a dry run for ascend alone"
        raise UserError(rule, where="flag --dryrun", key="--dryrun", value=device, fix=f"write --dryrun {_NAME}")


def as_rank(world: World, rank: int) -> World:
    """The world as another of its ranks sees it.

    Raises:
        UserError: It has no such rank.
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
    config: Config, world: World, told: list[ConfigError], tell: Callable[[str], None], steps: int = 2
) -> DryRun:
    """Runs steps of the training as one rank; data are made up and weights stay empty.

    Raises:
        UserError: The file could not start on an Ascend, its model's sizes are not here, or this machine lacks memory
            or a compiler.
        RunError: The stand-ins for CANN cannot be built.
    """
    plan = plan_file(config, world._replace(rank=0, local_rank=0), told, opens_data=False)
    raise_problems([one for one in run_problems(config, world) if one.error.key == config.source.name(_MODEL)])
    _check_memory(config, world, memory_left_bytes())
    tell("loading MindSpore's Ascend backend")
    case = Case(_text_without_files(config), steps=steps)
    found = run_cases({_NAME: case}, world.size, world.rank, lambda name, text: tell(text))
    limit = config.context.max_device_memory
    return DryRun(
        world,
        next(iter(found.values())),
        planned_bytes(config, world) if plan.memory_bytes else None,
        None if limit is None else int(float(limit.removesuffix("GB")) * _GIB),
        group_names(config, world),
    )


def planned_bytes(config: Config, world: World) -> int:
    """What the plan estimates of the device memory of this rank, as a part of its pipeline's stage."""
    config = apply_device_defaults(resolve_for_job(config, world), "Ascend")
    stages = parallel_degrees(config, world).pipeline_stage
    return memory_estimate(config, config.trains, "Ascend", world, world.rank * stages // world.size)["total"]


def audit_there(config: Config, world: World) -> dict[str, Any] | str:
    """What `tasks.audit` returns, or why the audit cannot be made on the Ascend backend.

    Of a job in explicit mode also the collectives that the rank calls in a step, as a dry run finds them.
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
    found = measured[_NAME]
    step = measured.get(_STEP)
    if found.failure is not None:
        return found.failure.message
    if step is None:
        return found.found
    return _with_collectives(found.found, config, world, step)


def _with_collectives(audit: dict[str, Any], config: Config, world: World, step: Measurement) -> dict[str, Any]:
    """An audit with those of a step of this rank."""
    names = ("collective", "group", "calls", "bytes")
    rows = collective_rows(step.collectives, group_names(config, world))
    values = audit["values"] | {"collectives": [dict(zip(names, row, strict=True)) for row in rows]}
    table = [names, *((*kind, str(calls), _bytes_text(sent)) for *kind, calls, sent in rows)]
    if step.failure is not None:
        table = [("", ""), ("the step failed", step.failure.message)]
    title = f"Collectives of rank {world.rank} of {world.size} in a step"
    *sections, limits, result = audit["sections"]
    return audit | {"values": values, "sections": [*sections, (title, table), limits, result]}


def group_names(config: Config, world: World) -> dict[tuple[int, ...], str]:
    """The ranks of each group of this rank -> the name of the group, as the plan has it."""
    degrees = parallel_degrees(config, world)
    if config.classifier is not None or degrees.ranks != world.size:
        return {}
    found = {tuple(range(world.size)): "all"}
    for name, ranks in rank_groups(config, world, world.rank).items():
        found.setdefault(tuple(ranks), name)
    return found


def collective_rows(
    collectives: Sequence[Collective], groups: Mapping[tuple[int, ...], str]
) -> list[tuple[str, str, int, int]]:
    """Of the collectives of a step: name, group, number of calls and bytes that this rank gives in all of them."""
    calls = Counter()
    sizes = Counter()
    for each in collectives:
        name = groups.get(each.ranks, "")
        kind = each.name, f"{name}: {ranks_text(each.ranks)}" if name else ranks_text(each.ranks)
        calls[kind] += 1
        sizes[kind] += each.bytes
    return [(*kind, count, sizes[kind]) for kind, count in calls.most_common()]


def _text_without_files(config: Config) -> str:
    """The configuration for a process in another folder: relative paths do not hold there, and files may be missing.

    What a model folder says is already in the configuration.
    """
    ascend = dict(config.context.ascend_config or {})
    if ascend.get(SPEED_UP_KEY):
        ascend[SPEED_UP_KEY] = str(Path(ascend[SPEED_UP_KEY]).expanduser().absolute())
        context = config.context.model_copy(update={"ascend_config": ascend})
        config = config.model_copy(update={"context": context})
    return dump_config(config.model_copy(update={"pretrained_model_dir": None}))


def _check_memory(config: Config, world: World, left_bytes: int) -> None:
    one_graph = config.classifier is None and runs_semi_auto(config, world)
    layers = 0
    if one_graph:
        layers = config.decoder.num_layers
    needed = _HOST_BYTES + layers * _GRAPH_LAYER_BYTES
    if needed > left_bytes:
        rule = f"a dry run takes about {size(needed)} of this machine's memory, of which {size(left_bytes)} are left"
        fix = "end other programs, or reduce model.model_config.num_layers"
        raise UserError(rule, where="flag --dryrun", key="--dryrun", value=_NAME, fix=fix)


def dry_run_dict(found: DryRun) -> dict[str, Any]:
    """For `--json`."""
    return {
        "ranks": found.world.size,
        "rank": found.world.rank,
        **asdict(found.measurement),
        "planned_bytes": found.planned_bytes,
        "max_device_memory_bytes": found.limit_bytes,
        "exceeds_memory": found.exceeds_memory,
    }


def dry_run_sections(found: DryRun) -> list[Section]:
    """For people: what failed, or what a step takes."""
    measured = found.measurement
    title = f"Dry run on an Ascend, rank {found.world.rank} of {found.world.size}"
    if measured.failure is not None:
        failure = measured.failure
        rows = [("failed", failure.message)]
        rows += [("operator", failure.operator)] if failure.operator else []
        rows += [("line", failure.where)] if failure.where else []
        return [(title, [("", ""), *rows])]
    rows = [("peak device memory", _memory_text(found)), ("host reads a step", _bytes_text(measured.host_bytes))]
    rows += [(f"  {where}", f"{count} x, {_bytes_text(read)}") for where, (count, read) in measured.host_reads.items()]
    kernels = ", ".join(f"{name} {count}" for name, count in measured.legacy.items())
    rows.append(("legacy kernels a step", kernels or "none"))
    collectives = collective_rows(measured.collectives, found.groups)
    rows.append(("collectives a step", f"{len(measured.collectives)}" if collectives else "none"))
    rows += [(f"  {name} over {group}", f"{count} x, {_bytes_text(sent)}") for name, group, count, sent in collectives]
    rows.append(("note", "nothing was computed: a dry run knows no numbers and no speed"))
    return [(title, [("", ""), *rows])]


def _memory_text(found: DryRun) -> str:
    text = size(found.measurement.peak_bytes)
    name = "max_device_memory"
    if found.limit_bytes is None:
        name = "a device's"
    text += f", {'ABOVE' if found.exceeds_memory else 'of'} {name} {size(found.device_bytes)}"
    if found.planned_bytes is None:
        return text
    rough = ""
    if found.planned_bytes < _GIB:
        rough = " (rough below 1 GiB)"
    return f"{text}; the plan estimates {size(found.planned_bytes)}{rough}"


def _bytes_text(number: int) -> str:
    if number >= 1 << 20:
        return size(number)
    return f"{number:,} bytes"
