"""The runs below a folder: what each is doing, how far it is, and where it is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.report.compare import ABSENT, loss_text, run_values
from trainer.report.record import RunData, is_run_folder, read_run

_LEVELS = 4  # of folders in folders that are looked at
HEADER = ("run", "state", "step", "loss", "eval loss", "began", "folder")
LEFT_OUT_FIRST = ("began", "folder", "eval loss")
"""What a narrow terminal can do without, in this order."""


def find_runs(folder: Path) -> list[RunData]:
    """The runs in a folder and below it, the newest last.

    Raises:
        UserError: There is no such folder.
    """
    if not folder.is_dir():
        rule = "is no folder"
        fix = "train first, or name the folder that holds the output folders of runs"
        raise UserError(rule, where="argument DIR", value=str(folder), fix=fix)
    found = [read_run(place) for place in _folders(folder, _LEVELS)]
    return sorted(found, key=lambda record: (record.began.timestamp() if record.began else record.updated, record.name))


def _folders(folder: Path, levels: int) -> Iterator[Path]:
    if is_run_folder(folder):
        yield folder
    with os.scandir(folder) as entries:
        below = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in below if levels else ():
        if name != "checkpoints" and os.access(folder / name, os.R_OK | os.X_OK):
            yield from _folders(folder / name, levels - 1)


def table_row(record: RunData) -> tuple[str, ...]:
    """The cells of a run, as `HEADER` names them."""
    found = run_values(record)
    if record.began:
        began = record.began.timestamp()
    else:
        began = record.updated
    return (
        record.name, record.state, f"{record.step}/{record.last_step}", loss_text(found["loss"]),
        loss_text(found["eval_loss"]), time.strftime("%Y-%m-%d %H:%M", time.localtime(began)) if began else ABSENT,
        str(record.folder),
    )  # fmt: skip


def run_dict(record: RunData) -> dict[str, Any]:
    """A run for programs."""
    return {"run": record.name, **run_values(record)}
