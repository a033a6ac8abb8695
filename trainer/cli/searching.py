"""`plan --search`: finds the layout of a file, prints and writes it, and tries the best ones in a dry run."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.loading import gc_disabled, load_file
from trainer.errors import EXIT_OK, UserError
from trainer.input_files import require_new, user_path, write_output

if TYPE_CHECKING:
    from trainer.cli.flags import Arguments
    from trainer.config import Config
    from trainer.config.checks.problem import ConfigError
    from trainer.parallel.world import World
    from trainer.plan.search.search import Candidate, LayoutSearch


def search_layouts(
    arguments: Arguments, world: World, json_: bool, output: Path | None, force: bool, check: int,
    measured: Path | None, takes_ranks_of_file: bool,
) -> int:  # fmt: skip
    """Searches and prints the result; returns an exit code.

    Args:
        output: Where to write the file with the best layout.
        force: Whether to replace a file that is there.
        check: How many of the best layouts to try in a dry run.
        measured: The step times of runs.
        takes_ranks_of_file: Whether to search on the ranks that the file is written for.

    Raises:
        UserError: The file has errors, no layout fits, or a file cannot be read or written.
    """
    from trainer.config import dump_config
    from trainer.device.resolve import planned_device
    from trainer.plan.search.measured import corrected_rates, read_measurements
    from trainer.plan.search.render import BEST, LEFT_OUT_FIRST, result_dict, result_sections
    from trainer.plan.search.search import shown_candidates
    from trainer.run.plan_file import open_search, world_from_degrees
    from trainer.tables import print_fitting, print_sections

    if check < 0:
        fix = "write --check 3 for the best three"
        raise UserError("must be at least 0", where="flag --check", key="--check", value=check, fix=fix)
    write = None
    if output is not None:
        write = _writable(output, force)
    with gc_disabled():
        config = load_file(arguments)
        if takes_ranks_of_file:
            world = world_from_degrees(config, world)
        search = open_search(config, world, planned_device(config))
        corrections = None
        if measured is not None:
            measurements = read_measurements(user_path(measured, "flag --measured"))
            corrections = corrected_rates(search, measurements)
            search = dataclasses.replace(search, rates=corrections.rates)
        result = search.run()
    if not result.candidates:
        raise search.nothing_fits(result)
    if check:
        best = shown_candidates(result.candidates)
        for candidate in best[:check]:
            result.candidates[result.candidates.index(candidate)] = _dry_run(search, config, candidate)
    if write is not None:
        best = shown_candidates(result.candidates)[0]
        write_output(write, dump_config(search.changed_config(config, best.layout)), "--write")
    if json_:
        print(json.dumps(result_dict(search, result, config, corrections), indent=1))
    else:
        for section in result_sections(search, result, config, corrections):
            if section[0] == BEST:
                print_fitting([section], LEFT_OUT_FIRST)
            else:
                print_sections([section])
        if write is not None:
            if result.is_file_fastest:
                print("note: the layout of the file itself is estimated to be faster than the written one")
            print(f"written: {write}; `plan --ranks {world.size} --config {write}` shows what it does")
    return EXIT_OK


def _writable(file: Path, force: bool) -> Path:
    """Returns the path to write to, before the search takes its time.

    Raises:
        UserError: There is a file already, or no folder for it.
    """
    path = user_path(file, "flag --write")
    require_new(path, "--write", force)
    if not path.parent.is_dir():
        fix = "make its folder, or name another file"
        raise UserError("its folder does not exist", where="flag --write", key="--write", value=str(path), fix=fix)
    return path


def _dry_run(search: LayoutSearch, config: Config, candidate: Candidate) -> Candidate:
    """Returns a layout with the peak of a dry run of its fullest rank.

    Raises:
        UserError: This machine has no compiler, or too little memory for a dry run.
        RunError: The layout does not run.
    """
    from trainer.dryrun.report import dry_run
    from trainer.errors import RunError

    report_progress = functools.partial(print, file=sys.stderr, flush=True)
    report_progress(f"dry run of {candidate.layout.text}")
    written = search.changed_config(config, candidate.layout)
    problems: list[ConfigError] = []
    rank = search.fullest_rank(candidate)
    world = search.world._replace(rank=rank, local_rank=rank % search.world.local_size)
    result = dry_run(written, world, problems, report_progress)
    failure = result.measurement.failure
    if failure is not None:
        fix = "write the layout with --write, and look at it with plan --dryrun ascend"
        raise RunError(f"the dry run of {candidate.layout.text} failed: {failure.message}", key="--check", fix=fix)
    return dataclasses.replace(candidate, measured_bytes=result.measurement.peak_bytes)
