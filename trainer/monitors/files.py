"""Small files of a run: whole or not there at all, and a failed write is an error with a fix."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.errors import RunError, UserError


def make_folder(folder: Path, where: str = "") -> None:
    """Makes the folder of a run.

    Args:
        folder: `output_dir`.
        where: Where that was set, for the message.

    Raises:
        UserError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder cannot be made: {error.strerror}",
            where=where, key="output_dir", value=str(folder), fix="choose a folder you may write to",
        ) from error  # fmt: skip


def write_text(path: Path, text: str) -> None:
    """Writes a file and moves it into place, so that an older one is replaced by a whole one or stays.

    Raises:
        RunError: The disk is full or does not let us write.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise write_failure(path, error) from error


def write_failure(path: Path, error: OSError) -> RunError:
    """The error for a file of a run that cannot be written."""
    return RunError(
        f"the file cannot be written: {error.strerror or error}",
        key=path.name, value=str(path), fix="free space or choose another output_dir",
    )  # fmt: skip
