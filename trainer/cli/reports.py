"""The commands that inspect finished and unfinished runs: compare, runs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from trainer.cli.loading import Json
from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, UserError
from trainer.input_files import user_path

if TYPE_CHECKING:
    from trainer.report.record import RunData

reports = typer.Typer()


@reports.command("compare")
def _compare(
    folders: Annotated[list[Path], Argument(metavar="RUN RUN...", help="Output folders of runs.")],
    loss: Annotated[float | None, Option(help="Also: the tokens to this loss.", show_default=False)] = None,
    exact: Annotated[bool, Option("--exact", help="Exit code 1 where a number differs.")] = False,
    output: Annotated[
        Path | None, Option(help="A folder for compare.png and compare.html; none by default.", metavar="DIR")
    ] = None,
    json_: Json = False,
) -> int:
    """Compares runs: figures, settings that differ, and the first step whose numbers differ from the first run's."""
    from trainer.report.compare import compare_runs, comparison_dict, comparison_tables
    from trainer.tables import print_fitting

    if len(folders) < 2:
        raise UserError("there is nothing to compare", key="RUN", fix="name two runs or more")
    comparison = compare_runs([user_path(folder, "argument RUN") for folder in folders])
    for folder, record in zip(folders, comparison.records, strict=True):
        if exact and not record.step and not record.metrics.evaluations:
            fix = "name runs that have done a step"
            raise UserError("metrics.jsonl has no step", where="argument RUN", value=str(folder), fix=fix)
    _print_notes(comparison.records)
    with contextlib.suppress(BrokenPipeError):  # whoever reads may go away: the exit code is the answer
        if json_:
            print(json.dumps(comparison_dict(comparison, loss), indent=1))
        else:
            print_fitting(comparison_tables(comparison, loss))
    if output is not None:
        from trainer.monitors.files import make_folder
        from trainer.report.compare_page import draw_comparison, write_comparison

        folder = user_path(output, "flag --output")
        make_folder(folder, "flag --output")
        draw_comparison(comparison, folder / "compare.png")
        write_comparison(comparison, folder / "compare.html", loss)
        if not json_:
            print(folder / "compare.html", folder / "compare.png", sep="\n")
    if exact and any(comparison.differences):
        return EXIT_RUN_FAILED
    return EXIT_OK


@reports.command("runs")
def _runs(
    folder: Annotated[Path, Argument(metavar="[DIR]", help="Where to look.")] = Path("output"), json_: Json = False
) -> int:
    """Lists the runs below a folder: state, step, loss, when and where; the newest last."""
    from trainer.report.runs import HEADER, LEFT_OUT_FIRST, find_runs, run_values, table_row
    from trainer.tables import print_fitting, sections_text

    runs = find_runs(user_path(folder, "argument DIR"))
    _print_notes(runs)
    if json_:
        print(json.dumps([{"run": run.name, **run_values(run)} for run in runs], indent=1))
    elif runs:
        table = ("runs", [HEADER, *map(table_row, runs)])
        if sys.stdout.isatty():
            print_fitting([table], LEFT_OUT_FIRST)
        else:
            print(*(line.strip() for line in sections_text([table]).splitlines()[1:]), sep="\n")
    else:
        print(f"no run below {folder}")
    return EXIT_OK


def _print_notes(records: Sequence[RunData]) -> None:
    """Prints what is damaged in the files of the runs, on stderr: programs may read the tables."""
    for note in (note for record in records for note in record.notes):
        print(f"note: {note}", file=sys.stderr)
