"""The command `plan`: what a run would do, its audit and dry run, and the search for its layout."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from trainer.cli.loading import ConfigFile, Json, Options, gc_disabled, load_file
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_RUN_FAILED, UserError
from trainer.input_files import user_path

if TYPE_CHECKING:
    from trainer.cli.flags import Arguments
    from trainer.config import Config
    from trainer.config.checks.problem import ConfigError
    from trainer.parallel.world import World

planning = typer.Typer()


@planning.command("plan")
def _plan(
    context: typer.Context,
    config: ConfigFile = None,
    options: Options = None,
    json_: Json = False,
    verbose: Annotated[bool, Option("--verbose", help="All kernels, dtypes, groups and reasons.")] = False,
    audit: Annotated[
        str | None, Option(help="ascend: look for fused operators in the graph.", metavar="NAME", show_default=False)
    ] = None,
    dryrun: Annotated[
        str | None, Option(help="ascend: try a step on MindSpore's backend for it.", metavar="NAME", show_default=False)
    ] = None,
    rank: Annotated[int, Option(help="--dryrun, --audit: as this rank.", metavar="INT")] = 0,
    ranks: Annotated[int | None, Option(help="Ranks of the job.", metavar="INT")] = None,
    local_ranks: Annotated[int | None, Option("--local_ranks", help="Ranks on one host.", metavar="INT")] = None,
    schedule: Annotated[
        Path | None, Option(help="Draw the pipeline's schedule: as text, and as a PNG file.", metavar="FILE")
    ] = None,
    search: Annotated[bool, Option("--search", help="Find the fastest layout on --ranks.")] = False,
    max_device_memory: Annotated[
        str | None, Option("--max_device_memory", help="The key context.max_device_memory.", metavar="SIZE")
    ] = None,
    write: Annotated[Path | None, Option(help="--search: write the file with the best layout.", metavar="FILE")] = None,
    force: Annotated[bool, Option("--force", help="--write: replace a file that is there.")] = False,
    check: Annotated[int, Option(help="--search: dry-run so many of the best layouts.", metavar="INT")] = 0,
    measured: Annotated[
        Path | None, Option(help="--search: step times of runs, which correct the rates.", metavar="FILE")
    ] = None,
) -> int:
    """Shows what a run would do. Does not load MindSpore, except for --audit, --dryrun and --check.

    The search estimates memory and time of every layout on so many ranks, and shows the fastest that fit.

    The audit builds the graph of a training step for Ascend, without one, and looks for its fused operators. The dry
    run runs steps on MindSpore's Ascend backend, without one and as any rank of the job, and measures device memory,
    reads by the host and collectives (g++ is needed).
    """
    from trainer.parallel.world import SINGLE_PROCESS, planned_world

    world = planned_world(ranks, local_ranks)
    if rank and dryrun is None and audit is None:
        rule = "chooses the rank of a dry run or an audit"
        fix = f"write --ranks {rank} for so many ranks"
        raise UserError(rule, where="flag --rank", key="--rank", value=rank, fix=fix)
    if max_device_memory is not None:
        from trainer.config import Override

        flag = "flag --max_device_memory"
        context.obj.overrides.append(Override("context.max_device_memory", max_device_memory, flag))
    if search:
        from trainer.cli.searching import search_layouts

        takes_ranks_of_file = ranks is None and local_ranks is None and world == SINGLE_PROCESS
        return search_layouts(context.obj, world, json_, write, force, check, measured, takes_ranks_of_file)
    values = {"--write": write, "--check": check or None, "--measured": measured, "--force": force or None}
    for flag, value in values.items():
        if value is not None:
            raise UserError("belongs to the search for a layout", where=f"flag {flag}", fix="add --search")
    if dryrun is not None:
        return _dry_run(context.obj, dryrun, json_, world, rank)
    if audit is not None:
        return _audit(load_file(context.obj), audit, json_, world, rank)
    return _print_plan(context.obj, world, json_, verbose, schedule)


def _print_plan(arguments: Arguments, world: World, json_: bool, verbose: bool, schedule: Path | None) -> int:
    """Plans the file, and prints the plan or its pipeline's schedule; returns an exit code."""
    with gc_disabled():
        from trainer.config.checks.problem import ConfigErrors
        from trainer.plan.render import plan_dict, plan_sections
        from trainer.run.plan_file import fewest_ranks, plan_file
        from trainer.tables import print_sections

        problems: list[ConfigError] = []
        loaded = load_file(arguments, problems)
        try:
            job, notes = fewest_ranks(loaded, world)
            plan = plan_file(loaded, job, problems)
            plan = dataclasses.replace(plan, notes=(*plan.notes, *notes))
        except ConfigErrors as errors:
            if verbose:
                raise errors.full from None
            raise
    if schedule is not None:
        from trainer.plan.pipeline import draw_schedule

        print(draw_schedule(loaded, plan.pipeline, user_path(schedule, "flag --schedule")))
    elif json_:
        print(json.dumps(plan_dict(plan), indent=1))
    else:
        print_sections(plan_sections(plan, verbose))
    return EXIT_OK


def _audit(config: Config, device: str, json_: bool, world: World, rank: int) -> int:
    """Audits the graph; returns exit code 1 if a fused operator that the configuration requests is missing."""
    if device.lower() != "ascend":
        rule = "there is an audit for ascend alone"
        raise UserError(rule, where="flag --audit", key="--audit", value=device, fix="write --audit ascend")
    from trainer.config.checks.model import decoder_problems
    from trainer.config.checks.problem import raise_problems
    from trainer.dryrun.report import audit_on_backend, select_rank
    from trainer.run.plan_file import world_from_degrees
    from trainer.tables import print_sections

    raise_problems(decoder_problems(config, "audit"))
    world = select_rank(world_from_degrees(config, world), rank)
    audit: Any = audit_on_backend(config, world)
    if isinstance(audit, str):  # in this process, whose front end compiles for a CPU: bad input is reported there
        from trainer.audit.report import audit_ascend, audit_dict, audit_sections

        here = audit_ascend(config, world=world)
        print(f"note: these graphs were not compiled for an Ascend: {audit.splitlines()[0]}", file=sys.stderr)
        audit = {"values": audit_dict(here), "sections": audit_sections(here), "missing": here.missing}
    if json_:
        print(json.dumps(audit["values"], indent=1))
    else:
        print_sections(audit["sections"])
    if audit["missing"]:
        return EXIT_RUN_FAILED
    return EXIT_OK


def _dry_run(arguments: Arguments, device: str, json_: bool, world: World, rank: int) -> int:
    """Does a dry run; returns exit code 1 if a step fails or takes more memory than the device has."""
    from trainer.config import Override
    from trainer.dryrun.report import check_name, dry_run, dry_run_dict, dry_run_sections, select_rank
    from trainer.run.plan_file import world_from_degrees
    from trainer.tables import print_sections

    check_name(device)
    problems: list[ConfigError] = []
    arguments.overrides.append(Override("context.device_target", "Ascend", "flag --dryrun"))
    config = load_file(arguments, problems)
    world = select_rank(world_from_degrees(config, world), rank)
    result = dry_run(config, world, problems, functools.partial(print, file=sys.stderr, flush=True))
    if json_:
        print(json.dumps(dry_run_dict(result), indent=1))
    else:
        print_sections(dry_run_sections(result))
    failure = result.measurement.failure
    if failure is not None:
        if failure.is_user_error:
            return EXIT_BAD_INPUT
        return EXIT_RUN_FAILED
    result.check()
    return EXIT_OK
