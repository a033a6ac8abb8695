"""Finds the runs below a folder, and describes each in a row: its state, step and losses."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import UserError
from trainer.report.compare import ABSENT, cell_text, run_values
from trainer.report.record import RunData, is_run_folder, read_run

_MAX_DEPTH = 4  # levels of folders that are searched
HEADER = ("run", "state", "step", "loss", "eval loss", "started", "folder")
LEFT_OUT_FIRST = ("started", "folder", "eval loss")
"""The columns that a narrow terminal leaves out, in this order."""


def find_runs(folder: Path) -> list[RunData]:
    """Returns the runs in a folder and below it, the newest last.

    Raises:
        UserError: The path is not a folder.
    """
    if not folder.is_dir():
        rule = "is not a folder"
        fix = "train first, or name the folder that holds the output folders of runs"
        raise UserError(rule, where="argument DIR", value=str(folder), fix=fix)
    runs = [read_run(run_folder) for run_folder in _run_folders(folder, _MAX_DEPTH)]
    return sorted(runs, key=lambda record: (_start_timestamp(record), record.name))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_run_folder(folder):
        yield folder
    if depth == 0:
        return
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in names:
        if name != "checkpoints" and os.access(folder / name, os.R_OK | os.X_OK):
            yield from _run_folders(folder / name, depth - 1)


def _start_timestamp(record: RunData) -> float:
    """Returns the Unix time of a run's first start; of an older run folder the time of its last step."""
    if record.start_time:
        return record.start_time.timestamp()
    return record.updated


def table_row(record: RunData) -> tuple[str, ...]:
    """Returns the cells of a run in the order of `HEADER`."""
    values = run_values(record)
    timestamp = _start_timestamp(record)
    start_text = ABSENT
    if timestamp:
        start_text = time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp))
    return (
        record.name, record.state, f"{record.step}/{record.last_step}", cell_text(values["loss"]),
        cell_text(values["eval_loss"]), start_text, str(record.folder),
    )  # fmt: skip
