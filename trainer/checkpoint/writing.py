"""Writes a checkpoint so that it is either complete or ignored.

A save writes a temporary folder, flushes it to disk, renames it and then adds the marker: if the machine dies at any
moment, the previous checkpoint is still the newest complete one. A removal deletes the marker first. Every save begins
by removing what an interrupted save has left.

Ranks save together: rank 0 makes the folder, every rank writes its shards, rank 0 completes the folder. After each
stage the ranks exchange whether it succeeded, so that a disk that fails on one rank ends the save on all ranks with the
same error, and no rank waits forever.

The files are those that a single rank would write. A file that one rank has completely is written in order, and its
checksum is computed on the way. Into any other file each rank writes its numbers at their places; then one rank reads
the file for the checksum.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trainer.checkpoint import store
from trainer.checkpoint.store import BEST, ENDING, REPLACED, STATE, UNFINISHED, step_folder_name
from trainer.errors import RunError
from trainer.parallel.communicator import Communicator
from trainer.parallel.sharding import ShardedArray, full_shard_spec
from trainer.storage.checksums import checksum_of_bytes, checksum_of_file, flush_to_disk
from trainer.storage.marker import MARKER, marker_content
from trainer.storage.tensor_file import (
    CODES,
    ShardedTensors,
    TensorInfos,
    array_infos,
    create_tensor_file,
    order_shards,
    write_shards,
    write_tensors,
)

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

OnStage = Callable[[str], None]


class StageWork(NamedTuple):
    """What every rank does in a stage of a save; the result must be valid JSON."""

    do: Callable[[], Any]
    takes_long: bool = False


class StageFailure(NamedTuple):
    """Why a rank's work failed, the fix, and for a full disk its free bytes."""

    reason: str
    fix: str
    free_bytes: int | None = None


class StageResult(NamedTuple):
    """The result of a rank's work, or its failure."""

    result: Any
    failure: StageFailure | None = None


_Written: TypeAlias = tuple[int, str]
"""Bytes and checksum of a file of the checkpoint."""

Stages: TypeAlias = Generator[StageWork, list[StageResult], Path]
"""The stages of a save: yields work, is sent its results on all ranks, and returns the folder.

The work does not communicate, so a thread may do it while the ranks train.
"""


def write_checkpoint(folder: Path, *arguments: Any, communicator: Communicator | None = None, **options: Any) -> Path:
    """Saves a checkpoint, see `checkpoint_stages` for arguments and errors.

    All ranks must call this.
    """
    communicator = communicator or Communicator()
    options |= {"rank": communicator.rank, "ranks": communicator.size}
    return run_stages(checkpoint_stages(folder, *arguments, **options), folder, communicator)


def run_stages(stages: Stages, folder: Path, communicator: Communicator) -> Path:
    """Runs all stages of a save and returns the checkpoint's folder; all ranks must call this."""
    try:
        work = next(stages)
        while True:
            work = stages.send(gather_results(run_catching_disk_errors(work, folder), communicator))
    except StopIteration as end:
        return end.value


def run_catching_disk_errors(work: StageWork, folder: Path) -> StageResult:
    """Runs the work of a stage; if the disk fails, the result contains the failure."""
    try:
        return StageResult(work.do())
    except OSError as error:
        return StageResult(None, _failure(folder, error))


def gather_results(done: StageResult, communicator: Communicator) -> list[StageResult]:
    """Gathers the results of a stage from all ranks."""
    results = (json.loads(data) for data in communicator.gather_bytes(json.dumps(done).encode()))
    return [StageResult(result, failure and StageFailure(*failure)) for result, failure in results]


class FileShards(NamedTuple):
    """A rank's shards of the tensors of a file.

    Attributes:
        entries: All tensors of the file, the same on all ranks.
        pieces: The shards that the rank writes, by the tensors' names. Each number is in one piece of one rank.
    """

    entries: TensorInfos
    pieces: ShardedTensors


def unsharded_file(arrays: Mapping[str, np.ndarray]) -> FileShards:
    """Returns the content of a file that one rank has completely.

    Raises:
        TypeError: safetensors does not support an array's dtype.
    """
    for name, array in arrays.items():
        if array.dtype.name not in CODES:
            raise TypeError(f"{name} has dtype {array.dtype}, which safetensors does not support")
    pieces = {name: [ShardedArray(full_shard_spec(array.shape), array)] for name, array in arrays.items()}
    return FileShards(array_infos(arrays), pieces)


def checkpoint_stages(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, np.ndarray] | FileShards], state: Mapping[str, object],
    keep_max: int, on_stage: OnStage | None = None,
    other_files: Mapping[str, Mapping[str, object] | bytes] = MappingProxyType({}), rank: int = 0, ranks: int = 1,
    best_steps: Sequence[int] = (),
) -> Stages:  # fmt: skip
    """Saves a checkpoint, removes the oldest ones beyond ``keep_max`` and returns the folder.

    Args:
        folder: Holds the checkpoints; made if missing. All ranks must see the same folder.
        tensors: The local tensors of each file, for example ``{"model": {...}, "optimizer": {...}}``: unsharded arrays
            by name, of any memory layout and any dtype of safetensors, or shards of float32 arrays. A rank may leave
            out a file of which it has nothing.
        state: The rest of the run's state, which must be valid JSON; written by rank 0, as are `other_files`.
        keep_max: Complete checkpoints to keep; 0 keeps all.
        on_stage: Called with the name of each stage that is reached, for tests that stop a save there.
        other_files: More files by name, for other programs that read the folder: JSON, or bytes as they are.
        best_steps: Steps whose checkpoints are kept in any case; ``best`` will point to the first.

    Raises:
        RunError: The disk is full or cannot be written, on this or on another rank. Earlier checkpoints are unchanged,
            and nothing incomplete is left.
        TypeError: safetensors does not support an array's dtype.
    """
    stage = on_stage or (lambda name: None)
    is_first_rank = rank == 0
    path = folder / step_folder_name(step)
    shards = {
        part: arrays if isinstance(arrays, FileShards) else unsharded_file(arrays) for part, arrays in tensors.items()
    }
    files = {name: _as_bytes(content) for name, content in {**other_files, STATE: state}.items()}
    other_bytes = sum(len(content) for content in other_files.values() if isinstance(content, bytes))
    results = [result for result, _ in (yield StageWork(lambda: (_local_bytes(shards), other_bytes)))]
    writers = _writers([local_bytes for local_bytes, _ in results])
    needed_bytes = sum(others + sum(nbytes for nbytes, _ in sizes.values()) for sizes, others in results)
    shared = [part for part, ranks_of_part in writers.items() if len(ranks_of_part) > 1]

    results_of_ranks = partial(_results_of_ranks, rank=rank, ranks=ranks, folder=folder, needed_bytes=needed_bytes)

    begin: Callable[[], str] = str  # the other ranks make no folder
    if is_first_rank:
        begin = partial(_begin, path, {part: shards[part] for part in shared}, needed_bytes, stage)
    unfinished = folder / results_of_ranks((yield StageWork(begin)))[0]
    local = {part: one for part, one in shards.items() if rank in writers[part]}
    write = partial(_write_files, unfinished, local, shared, files if is_first_rank else {}, stage)

    def read_back() -> dict[str, _Written]:
        """Computes the checksums of files that several ranks wrote; the ranks share the files."""
        names = [f"{part}{ENDING}" for number, part in enumerate(shared) if number % ranks == rank]
        return {name: _read_back(unfinished / name) for name in names}

    files_of_ranks = results_of_ranks((yield StageWork(write, takes_long=True)))
    if shared:
        files_of_ranks += results_of_ranks((yield StageWork(read_back, takes_long=True)))
    written = dict(sorted(item for files_of_rank in files_of_ranks for item in files_of_rank.items()))

    def complete() -> None:
        """Moves the folder in place, marks it complete and removes older checkpoints (rank 0)."""
        if not is_first_rank:
            return
        flush_to_disk(unfinished)
        _move_in_place(unfinished, path, step, written, stage)
        # Before older checkpoints are removed: whatever happens, it points to one that is there.
        _point_to_best(folder, step_folder_name(best_steps[0]) if best_steps else "", stage)
        stage("complete")
        _remove_folder(path.with_name(path.name + REPLACED), stage)
        _remove_older(folder, keep_max, best_steps, stage)
        stage("done")

    results_of_ranks((yield StageWork(complete, takes_long=True)))
    return path


def _begin(path: Path, shared: Mapping[str, FileShards], needed_bytes: int, stage: OnStage) -> str:
    """Makes the folder of a save, with the files that several ranks will write, and returns its unique name."""
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    flush_to_disk(folder.parent)
    _clear_leftovers(folder)
    stage("cleared")
    _check_space(folder, needed_bytes)
    unfinished = folder / f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}"
    unfinished.mkdir()
    for part, shards in shared.items():
        create_tensor_file(unfinished / f"{part}{ENDING}", shards.entries)
    stage("made temporary folder")
    return unfinished.name


def _as_bytes(content: Mapping[str, object] | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    return json.dumps(content, indent=1).encode()


def _remove_older(folder: Path, keep_max: int, best_steps: Sequence[int], stage: OnStage) -> None:
    """Leaves the newest `keep_max` checkpoints, or all for 0, and the best ones."""
    if keep_max == 0:
        return
    best = {step_folder_name(each) for each in best_steps}
    for old in store.complete_checkpoints(folder)[:-keep_max]:
        if old.name not in best:
            _remove_folder(old, stage)


def _local_bytes(shards: Mapping[str, FileShards]) -> dict[str, tuple[int, int]]:
    """Returns the bytes that this rank writes of each part, and the bytes of the part on all ranks."""
    return {
        part: (sum(piece.array.nbytes for pieces_of_tensor in pieces.values() for piece in pieces_of_tensor),
               sum(entry.nbytes for entry in entries.values()))
        for part, (entries, pieces) in shards.items()
    }  # fmt: skip


def _writers(sizes_of_ranks: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Returns the ranks that write each part, from `_local_bytes` of all ranks."""
    writers = {}
    for part in dict.fromkeys(part for sizes in sizes_of_ranks for part in sizes):
        named = {rank: sizes[part] for rank, sizes in enumerate(sizes_of_ranks) if part in sizes}
        expected = next(iter(named.values()))[1]
        nbytes = sum(nbytes for nbytes, _ in named.values())
        assert nbytes == expected, f"the ranks have {nbytes:,} of {expected:,} bytes of '{part}'"
        writers[part] = [rank for rank, (nbytes, _) in named.items() if nbytes] or [min(named)]
    return writers


def _results_of_ranks(every: list[StageResult], rank: int, ranks: int, folder: Path, needed_bytes: int) -> list[Any]:
    """Returns the result of each rank; if a rank has failed, removes the incomplete save and raises a RunError."""
    failures = [(number, failure) for number, (_, failure) in enumerate(every) if failure is not None]
    if not failures:
        return [result for result, _ in every]
    if rank == 0:  # no rank is writing any more
        with contextlib.suppress(OSError):
            _clear_leftovers(folder)
    number, (reason, fix, free_bytes) = failures[0]
    who = ""
    if ranks > 1:
        who = f" by rank {number}"
    if free_bytes is not None:
        reason += f": it needs {needed_bytes:,} bytes and {free_bytes:,} are free"
    rule = f"a checkpoint cannot be written{who}: {reason}; earlier checkpoints are untouched"
    raise RunError(rule, key="checkpoint folder", value=str(folder), fix=fix)


def _check_space(folder: Path, needed_bytes: int) -> None:
    """Raises OSError if the disk has too little space for the save, before anything is written."""
    if shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_files(
    unfinished: Path, parts: Mapping[str, FileShards], shared: Sequence[str], files: Mapping[str, bytes],
    stage: OnStage,
) -> dict[str, _Written]:  # fmt: skip
    """Writes this rank's shards and other files and flushes them to disk.

    Returns size and checksum of each file that this rank has all of; several ranks write those of the parts `shared`.
    """
    if not unfinished.is_dir():
        raise OSError(errno.ENOENT, "the folder that rank 0 made is not there; all hosts must see one output_dir")
    checksums = {}
    for part, (entries, pieces) in parts.items():
        path = unfinished / f"{part}{ENDING}"
        if part in shared:
            write_shards(path, entries, pieces)
            stage(f"wrote pieces of {part}")
            flush_to_disk(path)
        else:
            checksums[path.name] = write_tensors(path, entries, order_shards(entries, pieces))
            stage(f"wrote {part}")
    for name, content in files.items():
        (unfinished / name).write_bytes(content)
        checksums[name] = checksum_of_bytes(content)
    stage("wrote state")
    written = {}
    for name in sorted(checksums):
        flush_to_disk(unfinished / name)
        written[name] = ((unfinished / name).stat().st_size, checksums[name])
        stage(f"flushed {name}")
    return written


def _read_back(path: Path) -> _Written:
    """Returns size and checksum of a file that several ranks have written."""
    return (path.stat().st_size, checksum_of_file(path))


def _move_in_place(unfinished: Path, path: Path, step: int, written: Mapping[str, _Written], stage: OnStage) -> None:
    """Renames the temporary folder and marks it complete."""
    folder = path.parent
    earlier = store.read_markers(store.step_folders(folder))
    if os.path.lexists(path):  # saved before: the older save stays complete under another name until the end
        path.rename(path.with_name(path.name + REPLACED))
        stage("moved older save away")
    unfinished.rename(path)
    flush_to_disk(folder)
    stage("renamed")
    marker = {
        "step": step,
        "save_number": 1 + max((marker.save_number for _, marker in earlier), default=0),
        "file_bytes": {name: nbytes for name, (nbytes, _) in written.items()},
        "checksums": {name: checksum for name, (_, checksum) in written.items()},
    }
    unmarked = path / f"{UNFINISHED}{MARKER}"
    unmarked.write_bytes(marker_content(marker))
    stage("wrote marker's content")
    flush_to_disk(unmarked)
    unmarked.rename(path / MARKER)
    flush_to_disk(path)


def _point_to_best(folder: Path, name: str, stage: OnStage) -> None:
    """Makes `folder`/best point to the checkpoint `name`; removes it where there is none."""
    best = folder / BEST
    if not name or store.read_marker(folder / name) is None:
        if best.is_symlink() or best.is_file():
            best.unlink()
        return
    if store.resolve_best_link(best).name == name:
        return
    new = folder / f"{UNFINISHED}{BEST}"
    try:
        new.symlink_to(name)
    except OSError:  # a file system without links
        new.write_text(f"{name}\n", encoding="utf-8")
        flush_to_disk(new)
    stage("made best")
    new.replace(best)
    flush_to_disk(folder)


def _clear_leftovers(folder: Path) -> None:
    """Removes what an interrupted save or removal has left, and restores the name of a save that was being replaced."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path in store.step_folders(folder):
        # Not `read_marker(path) is None`: a marker that is unreadable for now must not remove a checkpoint.
        if not path.is_symlink() and not (path / MARKER).exists():
            shutil.rmtree(path)
    for path in folder.glob(f"step-*{REPLACED}"):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if original.exists():
            _remove_folder(path, lambda name: None)
        else:
            path.rename(original)


def _remove_folder(path: Path, stage: OnStage) -> None:
    """Removes a checkpoint, its marker first; of a link the link alone, never what it leads to.

    What cannot be removed stays: it must not end the run.
    """
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
            return
        (path / MARKER).unlink()
        flush_to_disk(path)  # else a machine that dies may keep the marker and lose the files
        stage("unmarked an old checkpoint")
        shutil.rmtree(path)


def _failure(folder: Path, error: OSError) -> StageFailure:
    reason = error.strerror or str(error)
    if error.errno not in _FULL_DISK:
        return StageFailure(reason, "make the folder writable or choose another output_dir, then resume")
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    fix = "free space, lower keep_checkpoint_max or choose another output_dir, then resume"
    return StageFailure(reason, fix, shutil.disk_usage(existing).free)
