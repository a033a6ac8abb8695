"""Writes a checkpoint so that it is either complete or ignored.

A save writes a temporary folder, flushes it to disk, renames it and then adds the marker: if the machine dies at any
moment, the previous checkpoint is still the newest complete one. A removal deletes the marker first. Every save begins
by removing what an interrupted save has left.

Ranks save together: rank 0 makes the folder, every rank writes its own files, rank 0 completes the folder. After each
stage the ranks exchange whether it succeeded, so that a disk that fails on one rank ends the save on all ranks with the
same error, and no rank waits forever.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trainer.checkpoint import store
from trainer.checkpoint.store import BEST, REPLACED, STATE, UNFINISHED, folder_name
from trainer.checkpoint.tensor_file import CODES, save_arrays
from trainer.errors import RunError
from trainer.parallel.communicator import Communicator, SingleProcess
from trainer.storage.checksums import checksum_of_bytes
from trainer.storage.marker import MARKER, marker_content

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

OnStage = Callable[[str], None]


class Work(NamedTuple):
    """What every rank does in a stage of a save; the result must be valid JSON."""

    do: Callable[[], Any]
    takes_long: bool = False


class Failure(NamedTuple):
    """Why a rank's work has failed, the fix, and where the disk is full how many bytes it has left."""

    reason: str
    fix: str
    free_bytes: int | None = None


class Done(NamedTuple):
    """What a rank's work has given."""

    result: Any
    failure: Failure | None = None


Stages: TypeAlias = Generator[Work, list[Done], Path]
"""The stages of a save: yields work, is sent what it has given on every rank, and returns the folder.

Nothing else communicates, so the work may be done in a thread while the ranks train.
"""


def write_checkpoint(
    folder: Path, *arguments: Any, communicator: Communicator | None = None, **options: Any
) -> Path:
    """Does the stages of `checkpoint_stages`, whose other arguments these are, one after the other. All ranks must call
    it; errors are the same."""
    communicator = communicator or SingleProcess()
    stages = checkpoint_stages(folder, *arguments, rank=communicator.rank, ranks=communicator.size, **options)
    return do_stages(stages, folder, communicator)


def do_stages(stages: Stages, folder: Path, communicator: Communicator) -> Path:
    try:
        work = next(stages)
        while True:
            work = stages.send(exchange(attempt(work, folder), communicator))
    except StopIteration as end:
        return end.value


def attempt(work: Work, folder: Path) -> Done:
    """Does the work; a disk that fails is part of the result."""
    try:
        return Done(work.do())
    except OSError as error:
        return Done(None, _failure(folder, error))


def exchange(done: Done, communicator: Communicator) -> list[Done]:
    """What the work has given on every rank."""
    every = (json.loads(data) for data in communicator.gather_bytes(json.dumps(done).encode()))
    return [Done(result, failure and Failure(*failure)) for result, failure in every]


def checkpoint_stages(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, np.ndarray]],
    state: Mapping[str, object],
    keep_max: int,
    on_stage: OnStage | None = None,
    documents: Mapping[str, Mapping[str, object] | bytes] | None = None,
    rank: int = 0,
    ranks: int = 1,
    best_steps: Sequence[int] = (),
) -> Stages:
    """Saves a checkpoint, removes the oldest ones beyond ``keep_max`` and returns the folder.

    Args:
        folder: Holds the checkpoints; made if missing. All ranks must see the same folder.
        tensors: Arrays by part and name, for example ``{"model": {...}, "optimizer": {...}}``. Each part becomes a
            file. Any memory layout, any dtype of safetensors. Ranks other than 0 pass only their shards, under the
            names from `trainer.checkpoint.store.shard_name`.
        state: The rest of the run's state, which must be valid JSON; written by rank 0, as are `documents`.
        keep_max: Complete checkpoints to keep; 0 keeps all.
        on_stage: Called with the name of each stage that is reached, for tests that stop a save there.
        documents: More files by name, for other programs that read the folder: JSON, or bytes as they are.
        best_steps: Steps whose checkpoints are kept in any case; ``best`` will point to the first.

    Raises:
        RunError: The disk is full or cannot be written, on this or on another rank. Earlier checkpoints are unchanged,
            and nothing incomplete is left.
        TypeError: safetensors does not support an array's dtype.
    """
    stage, first = on_stage or (lambda name: None), rank == 0
    path, unfinished = folder / folder_name(step), folder / f"{UNFINISHED}{folder_name(step)}"
    for part, arrays in tensors.items():
        for name, array in arrays.items():
            if array.dtype.name not in CODES:
                raise TypeError(f"{part}: {name} has dtype {array.dtype}, which safetensors does not support")
    files = {
        name: content if isinstance(content, bytes) else json.dumps(content, indent=1).encode()
        for name, content in {**(documents or {}), STATE: state}.items()
    }
    own_bytes = sum(array.nbytes for part in tensors.values() for array in part.values())
    own_bytes += sum(len(content) for content in (documents or {}).values() if isinstance(content, bytes))
    needed_bytes = sum(size for size, _ in (yield Work(lambda: own_bytes)))

    def prepare() -> None:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            _clear_leftovers(folder)
            stage("cleared")
            _check_space(folder, needed_bytes)
            unfinished.mkdir()
            stage("made temporary folder")

    def write() -> dict[str, tuple[int, str]]:
        return _write_files(unfinished, tensors, files if first else {}, stage)

    def complete() -> None:
        if first:
            _flush_to_disk(unfinished)
            _move_in_place(folder, unfinished, step, written, stage)
            # Before older checkpoints are removed: whatever happens, it points to one that is there.
            _point_to_best(folder, folder_name(best_steps[0]) if best_steps else "", stage)
        stage("complete")
        if first:
            _remove_folder(path.with_name(path.name + REPLACED), stage)
            best = {folder_name(each) for each in best_steps}
            for old in store.complete_checkpoints(folder)[:-keep_max] if keep_max > 0 else ():
                if old.name not in best:
                    _remove_folder(old, stage)
        stage("done")

    def agreed(every: list[Done]) -> list[Any]:
        return _agreed(every, rank, ranks, folder, needed_bytes)

    agreed((yield Work(prepare)))
    of_ranks = agreed((yield Work(write, takes_long=True)))
    written = {name: tuple(found) for files_of_rank in of_ranks for name, found in files_of_rank.items()}
    agreed((yield Work(complete, takes_long=True)))
    return path


def _agreed(every: list[Done], rank: int, ranks: int, folder: Path, needed_bytes: int) -> list[Any]:
    """The result of each rank.

    Raises:
        RunError: Some rank has failed. The incomplete save has been removed.
    """
    failures = [(number, failure) for number, (_, failure) in enumerate(every) if failure is not None]
    if not failures:
        return [result for result, _ in every]
    if rank == 0:  # no rank is writing any more
        with contextlib.suppress(OSError):
            _clear_leftovers(folder)
    number, (reason, fix, free_bytes) = failures[0]
    who = f" by rank {number}" if ranks > 1 else ""
    if free_bytes is not None:
        reason += f": it needs {needed_bytes:,} bytes and {free_bytes:,} are free"
    rule = f"a checkpoint cannot be written{who}: {reason}; earlier checkpoints are untouched"
    raise RunError(rule, key="checkpoint folder", value=str(folder), fix=fix)


def _check_space(folder: Path, needed_bytes: int) -> None:
    """Fails early where the disk has no room for the whole save."""
    if shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_files(
    unfinished: Path, tensors: Mapping[str, Mapping[str, np.ndarray]], files: Mapping[str, bytes], stage: OnStage
) -> dict[str, tuple[int, str]]:
    """Writes this rank's files and flushes them to disk; returns length in bytes and checksum of each."""
    if not unfinished.is_dir():
        raise OSError(errno.ENOENT, "the folder that rank 0 made is not there; all hosts must see one output_dir")
    checksums = {}
    for part, arrays in tensors.items():
        path = unfinished / f"{part}.safetensors"
        checksums[path.name] = save_arrays(path, arrays)
        stage(f"wrote {part}")
    for name, content in files.items():
        (unfinished / name).write_bytes(content)
        checksums[name] = checksum_of_bytes(content)
    stage("wrote state")
    written = {}
    for name in sorted(checksums):
        _flush_to_disk(unfinished / name)
        written[name] = (unfinished / name).stat().st_size, checksums[name]
        stage(f"flushed {name}")
    return written


def _move_in_place(
    folder: Path, unfinished: Path, step: int, written: Mapping[str, tuple[int, str]], stage: OnStage
) -> None:
    """Renames the temporary folder and marks it complete."""
    path = folder / folder_name(step)
    newest = store.newest_complete(folder)
    newest_marker = store.read_marker(newest) if newest else None
    if path.exists():  # saved before: the older save stays complete under another name until the end
        path.rename(path.with_name(path.name + REPLACED))
        stage("moved older save away")
    unfinished.rename(path)
    _flush_to_disk(folder)
    stage("renamed")
    marker = {
        "step": step,
        "save_number": newest_marker.save_number + 1 if newest_marker else 1,
        "file_bytes": {name: size for name, (size, _) in written.items()},
        "checksums": {name: checksum for name, (_, checksum) in written.items()},
    }
    unmarked = path / f"{UNFINISHED}{MARKER}"
    unmarked.write_bytes(marker_content(marker))
    stage("wrote marker's content")
    _flush_to_disk(unmarked)
    unmarked.rename(path / MARKER)
    _flush_to_disk(path)


def _point_to_best(folder: Path, name: str, stage: OnStage) -> None:
    """Makes `folder`/best point to the checkpoint `name`; removes it where there is none."""
    best = folder / BEST
    if not name or store.read_marker(folder / name) is None:
        if best.is_symlink() or best.is_file():
            best.unlink()
        return
    if store.behind_link(best).name == name:
        return
    new = folder / f"{UNFINISHED}{BEST}"
    try:
        new.symlink_to(name)
    except OSError:  # a file system without links
        new.write_text(f"{name}\n", encoding="utf-8")
    stage("made best")
    new.replace(best)
    _flush_to_disk(folder)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear_leftovers(folder: Path) -> None:
    """Removes what an interrupted save or removal has left, and restores the name of a save that was being replaced."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path in store.step_folders(folder):
        # Not `read_marker(path) is None`: a marker that is unreadable for now must not remove a checkpoint.
        if not (path / MARKER).exists():
            shutil.rmtree(path)
    for path in folder.glob(f"step-*{REPLACED}"):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if original.exists():
            _remove_folder(path, lambda name: None)
        else:
            path.rename(original)


def _remove_folder(path: Path, stage: OnStage) -> None:
    """Removes a checkpoint, its marker first. What cannot be removed stays: it must not end the run."""
    with contextlib.suppress(OSError):
        (path / MARKER).unlink()
        stage("unmarked an old checkpoint")
        shutil.rmtree(path)


def _failure(folder: Path, error: OSError) -> Failure:
    reason = error.strerror or str(error)
    if error.errno not in _FULL_DISK:
        return Failure(reason, "make the folder writable or choose another output_dir, then resume")
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    fix = "free space, lower keep_checkpoint_max or choose another output_dir, then resume"
    return Failure(reason, fix, shutil.disk_usage(existing).free)
