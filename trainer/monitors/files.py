"""Small files of a run: whole or not there at all, and a failed write is an error with a fix."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
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


@contextlib.contextmanager
def claimed_folder(folder: Path, where: str = "") -> Iterator[None]:
    """Keeps a folder for this process as long as it lasts; made if missing. Leaves no file behind.

    Args:
        folder: What a run writes to.
        where: Where the path was set, for messages.

    Raises:
        UserError: Another run writes there, or it cannot be made.
    """
    make_folder(folder, where)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another run writes there",
                where=where,
                key="output_dir",
                value=str(folder),
                fix="give this run another --output_dir, or end the other one first",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
