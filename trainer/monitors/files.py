"""Writes small files of a run completely or not at all; a failed write is an error with a fix."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import RunError, UserError


def make_folder(folder: Path, where: str = "") -> None:
    """Creates `output_dir`. `where` is the location of the setting, for the error message.

    Raises:
        UserError: The folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"the folder cannot be created: {error.strerror}"
        fix = "choose a folder that you may write to"
        raise UserError(rule, where=where, key="output_dir", value=str(folder), fix=fix) from error


@contextlib.contextmanager
def atomic_file(path: Path, *, flushed: bool = False) -> Iterator[Path]:
    """Yields where to write a file, which takes the place of an older one when the block ends, or else disappears.

    Args:
        flushed: Whether to flush the file to the disk before it is in its place.

    Raises:
        OSError: It cannot be written.
    """
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)  # of an interrupted write
    try:
        yield unfinished
        if flushed:
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file completely or not at all.

    Raises:
        RunError: The disk is full or cannot be written.
    """
    try:
        with atomic_file(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_failure(path, error) from error


def write_failure(path: Path, error: OSError, what: str = "the file", key: str = "") -> RunError:
    """Returns the error for a file of a run that cannot be written."""
    rule = f"{what} cannot be written: {error.strerror or error}"
    fix = "free space or choose another output_dir"
    return RunError(rule, key=key or path.name, value=str(path), fix=fix)


@contextlib.contextmanager
def lock_folder(folder: Path, where: str = "") -> Iterator[None]:
    """Locks `output_dir` for this process while the block lasts; creates the folder, but no lock file.

    Raises:
        UserError: Another run writes there, or the folder cannot be created.
    """
    make_folder(folder, where)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = "another run writes there"
            fix = "give this run another --output_dir, or end the other one first"
            raise UserError(rule, where=where, key="output_dir", value=str(folder), fix=fix) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
