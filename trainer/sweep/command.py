"""The command `sweep`: prepares all runs, does them, and compares them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from trainer.cli.flags import Arguments
from trainer.errors import UserError
from trainer.report.compare import compare_runs, comparison_tables
from trainer.report.compare_page import draw_comparison, write_comparison
from trainer.report.record import is_run_folder
from trainer.sweep.run import jobs_for, prepare_sweep, run_sweep
from trainer.tables import print_fitting


def sweep(arguments: Arguments, grids: Sequence[str], jobs: int | None) -> int:
    """Trains every combination and returns the exit code of `run_sweep`.

    Raises:
        UserError: The grid or a setting is wrong, or the runs cannot share the device; no run was started.
    """
    if arguments.config is None:
        raise UserError("a sweep needs its YAML file", key="--config", fix="write --config configs/quickstart.yaml")
    runs, root, device, run_bytes = prepare_sweep(arguments, grids)
    at_a_time = jobs_for(jobs, len(runs), device, run_bytes)
    report_progress = functools.partial(print, flush=True)
    done = sum(run.is_done for run in runs)
    text = f"{len(runs)} runs in {root}, {at_a_time} at a time"
    if done:
        text += f", {done} of them finished already"
    report_progress(text)
    code = run_sweep(runs, at_a_time, report_progress)
    folders = [run.folder for run in runs if is_run_folder(run.folder)]
    if len(folders) > 1:
        comparison = compare_runs(folders, with_differences=False)  # no two runs have the same settings
        print_fitting(comparison_tables(comparison))
        draw_comparison(comparison, root / "compare.png")
        write_comparison(comparison, root / "compare.html")
        report_progress(f"{root / 'compare.html'}\n{root / 'compare.png'}")
    return code
