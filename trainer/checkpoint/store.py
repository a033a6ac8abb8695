"""Checkpoints on disk: a folder a step, complete or not there at all.

    checkpoints/step-00000100/model.safetensors      the weights, by their names
                             /optimizer.safetensors  the optimizer's state
                             /state.json             step, epoch, position in the data, random numbers ...
                             /COMPLETE               written last: without it nobody reads the folder

A save writes a temporary folder, flushes it to the disk, renames it and only then adds the marker: a machine that dies
at any moment leaves the previous checkpoint the newest complete one. Removing goes the other way round: the marker
first. A save begins by clearing what such a death left behind. One process writes to a folder at a time.

"Newest" means saved last, by a number in the marker that grows with every save. It is not the highest step: who resumes
from step 100 of a training that had reached 500 wants 150 next, not 500.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from trainer.checkpoint.arrays import save_arrays
from trainer.errors import RunError, UserError

MARKER = "COMPLETE"
_STATE = "state.json"
_REPLACED = ".replaced"  # end of the name of a checkpoint whose step is being saved again
_UNFINISHED = ".tmp-"  # start of the name of a temporary folder or file
_STEP_FOLDER = re.compile(r"step-(\d{8,})(\.replaced)?")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_SAVABLE_DTYPES = frozenset(
    "float64 float32 float16 int64 uint64 int32 uint32 int16 uint16 int8 uint8 bool complex64".split()
)

Tensors = dict[str, np.ndarray]
OnStage = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read.

    Attributes:
        path: Its folder.
        step: Optimizer steps done when it was saved.
        tensors: The arrays by part and name: ``{"model": {...}, "optimizer": {...}}``.
        state: What else the run remembers.
    """

    path: Path
    step: int
    tensors: dict[str, Tensors]
    state: dict


@dataclass(frozen=True)
class _Marker:
    """What the marker says: which step, which save of the folder, and how long each file is."""

    step: int
    save_number: int
    file_bytes: dict[str, int]


def folder_name(step: int) -> str:
    """The folder of a step: ``step-00000100``."""
    return f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of ``folder``, the one saved last at the end. No folder, no checkpoints."""
    found = []
    for path in _step_folders(folder):
        marker = _read_marker(path)
        if marker is not None:
            found.append((marker.save_number, path))
    return [path for _, path in sorted(found)]


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint of ``folder`` that was saved last, or None."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def find_checkpoint(path: Path, *, key: str = "load_checkpoint") -> Path:
    """The checkpoint that a user means by ``path``.

    Args:
        path: A checkpoint, a folder of checkpoints, or the output folder that has them in ``checkpoints``; of several,
            the one saved last.
        key: The setting that ``path`` comes from, for messages.

    Raises:
        UserError: There is none. (Whether the one that ``path`` names is complete, reading it tells.)
    """
    try:
        if not path.exists():
            raise UserError("there is no such checkpoint", key=key, value=str(path), fix="check the path")
        if _STEP_FOLDER.fullmatch(path.name) or (path / _STATE).exists():
            return path
        newest = newest_complete(path) or newest_complete(path / "checkpoints")
    except OSError as error:
        raise UserError(f"checkpoints cannot be read there: {error.strerror}", key=key, value=str(path),
                        fix="make the folder readable") from error
    if newest is not None:
        return newest
    raise UserError("the folder holds no complete checkpoint", key=key, value=str(path),
                    fix="name a folder such as output/checkpoints or output/checkpoints/step-00000100")


def prepare_folder(folder: Path) -> None:
    """Makes sure, before a run starts, that checkpoints can be written to ``folder``.

    Raises:
        UserError: It cannot be made, is a file or is not writable.
    """
    probe = folder / f"{_UNFINISHED}probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    except OSError as error:
        raise UserError(f"checkpoints cannot be written there: {error.strerror}", key="output_dir", value=str(folder),
                        fix="choose a folder you may write to") from error


def put_aside(folder: Path) -> Path | None:
    """Renames a folder with complete checkpoints to the first free ``checkpoints-1``, ``checkpoints-2`` ...

    A fresh training that saved among those of an earlier one would prune them, and a resume could take the wrong one.
    """
    if newest_complete(folder) is None:
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, np.ndarray]],
    state: Mapping[str, object],
    keep_max: int,
    on_stage: OnStage | None = None,
    documents: Mapping[str, Mapping[str, object]] | None = None,
) -> Path:
    """Saves a checkpoint and removes the oldest ones beyond ``keep_max``.

    Args:
        folder: Holds the checkpoints; made if missing.
        step: Optimizer steps done.
        tensors: Arrays by part and name, for example ``{"model": {...}, "optimizer": {...}}``. Each part becomes a
            file. Any layout in memory, any dtype of safetensors.
        state: What else the run remembers; must go through JSON.
        keep_max: Complete checkpoints to keep; 0 keeps all.
        on_stage: Told the name of each stage when it is reached: for tests that stop a save there.
        documents: Further JSON files by name, for other programs that read the folder.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: The disk is full or does not let us write. Earlier checkpoints are untouched, nothing half is left.
        TypeError: An array's dtype has no place in safetensors.
    """
    stage = on_stage or (lambda name: None)
    unfinished = folder / f"{_UNFINISHED}{folder_name(step)}"
    _check_dtypes(tensors)
    texts = {name: json.dumps(content, indent=1) for name, content in {**(documents or {}), _STATE: state}.items()}
    needed_bytes = sum(array.nbytes for part in tensors.values() for array in part.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder)
        stage("cleared")
        _check_space(folder, needed_bytes)
        file_bytes = _write_files(unfinished, tensors, texts, stage)
        path = _move_in_place(folder, unfinished, step, file_bytes, stage)
    except OSError as error:
        with contextlib.suppress(OSError):
            _clear_leftovers(folder)
        raise _write_failure(folder, error, needed_bytes) from error
    stage("complete")
    _remove_folder(path.with_name(path.name + _REPLACED), stage)
    _prune(folder, keep_max, stage)
    stage("done")
    return path


def read_checkpoint(path: Path, parts: Iterable[str] | None = None) -> Checkpoint:
    """Reads a complete checkpoint.

    Args:
        path: The checkpoint's folder.
        parts: Which parts to read, for example ``("model",)``; all when None.

    Raises:
        UserError: It is missing, incomplete, damaged, unreadable, or lacks a part.
    """
    if not path.is_dir():
        raise UserError("there is no such checkpoint", key="checkpoint", value=str(path), fix="check the path")
    marker = _read_marker(path)
    if marker is None:
        raise UserError(f"the checkpoint is incomplete: it has no readable {MARKER} file, so its save was interrupted",
                        key="checkpoint", value=str(path), fix=_use_another(path))
    state = _read_state(path, marker)
    names = [name.removesuffix(".safetensors") for name in marker.file_bytes if name.endswith(".safetensors")]
    wanted = names if parts is None else list(parts)
    for part in wanted:
        if part not in names:
            raise UserError(f"the checkpoint has no part '{part}', only {', '.join(names)}", key="checkpoint",
                            value=str(path), fix="use a checkpoint of a training run")
    return Checkpoint(path, marker.step, {part: _read_part(path, part, marker) for part in wanted}, state)


def _step_folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_marker(path: Path) -> _Marker | None:
    try:
        content = json.loads((path / MARKER).read_text(encoding="utf-8"))
        return _Marker(int(content["step"]), int(content["save_number"]), dict(content["file_bytes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_dtypes(tensors: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    for part, arrays in tensors.items():
        for name, array in arrays.items():
            if array.dtype.name not in _SAVABLE_DTYPES:
                raise TypeError(f"{part}: {name} has dtype {array.dtype}, which safetensors cannot hold")


def _check_space(folder: Path, needed_bytes: int) -> None:
    """Ends a save before it writes half of what has no room."""
    if shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_files(
    unfinished: Path, tensors: Mapping[str, Mapping[str, np.ndarray]], texts: Mapping[str, str], stage: OnStage
) -> dict[str, int]:
    """Writes the temporary folder and flushes it to the disk; returns the length of each file."""
    unfinished.mkdir()
    stage("made temporary folder")
    for part, arrays in tensors.items():
        save_arrays(unfinished / f"{part}.safetensors", arrays)
        stage(f"wrote {part}")
    for name, text in texts.items():
        (unfinished / name).write_text(text, encoding="utf-8")
    stage("wrote state")
    file_bytes = {}
    for path in sorted(unfinished.iterdir()):
        _flush_to_disk(path)
        file_bytes[path.name] = path.stat().st_size
        stage(f"flushed {path.name}")
    _flush_to_disk(unfinished)
    return file_bytes


def _move_in_place(folder: Path, unfinished: Path, step: int, file_bytes: dict[str, int], stage: OnStage) -> Path:
    """Renames the temporary folder and marks it complete."""
    path = folder / folder_name(step)
    newest = newest_complete(folder)
    newest_marker = _read_marker(newest) if newest else None
    if path.exists():  # the same step saved again: its older save stays complete, under another name, until the end
        path.rename(path.with_name(path.name + _REPLACED))
        stage("moved older save away")
    unfinished.rename(path)
    _flush_to_disk(folder)
    stage("renamed")
    marker = {
        "step": step,
        "save_number": newest_marker.save_number + 1 if newest_marker else 1,
        "file_bytes": file_bytes,
    }
    unmarked = path / f"{_UNFINISHED}{MARKER}"
    unmarked.write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    stage("wrote marker's content")
    _flush_to_disk(unmarked)
    unmarked.rename(path / MARKER)
    _flush_to_disk(path)
    return path


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear_leftovers(folder: Path) -> None:
    """Removes what an interrupted save or removal left; gives back its name to a save that was being replaced."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)
    for path in _step_folders(folder):
        # Not `_read_marker(path) is None`: a marker that cannot be read just now is no reason to remove a checkpoint.
        if not (path / MARKER).exists():
            shutil.rmtree(path)
    for path in folder.glob(f"step-*{_REPLACED}"):
        original = path.with_name(path.name.removesuffix(_REPLACED))
        if original.exists():
            _remove_folder(path, lambda name: None)
        else:
            path.rename(original)


def _prune(folder: Path, keep_max: int, stage: OnStage) -> None:
    if keep_max < 1:
        return
    for path in complete_checkpoints(folder)[:-keep_max]:
        _remove_folder(path, stage)


def _remove_folder(path: Path, stage: OnStage) -> None:
    """Removes a checkpoint, its marker first. What cannot be removed is no reason to end a training: it stays."""
    with contextlib.suppress(OSError):
        (path / MARKER).unlink()
        stage("unmarked an old checkpoint")
        shutil.rmtree(path)


def _write_failure(folder: Path, error: OSError, needed_bytes: int) -> RunError:
    reason = error.strerror or str(error)
    fix = "make the folder writable or choose another output_dir, then resume"
    if error.errno in _FULL_DISK:
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free_bytes = shutil.disk_usage(existing).free
        reason = f"{reason}: it needs {needed_bytes:,} bytes and {free_bytes:,} are free"
        fix = "free space, lower keep_checkpoint_max or choose another output_dir, then resume"
    rule = f"a checkpoint cannot be written: {reason}; earlier checkpoints are untouched"
    return RunError(rule, key="checkpoint folder", value=str(folder), fix=fix)


def _read_state(path: Path, marker: _Marker) -> dict:
    _check_length(path, _STATE, marker)
    try:
        return json.loads((path / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{_STATE} cannot be read ({error})") from error


def _read_part(path: Path, part: str, marker: _Marker) -> Tensors:
    name = f"{part}.safetensors"
    _check_length(path, name, marker)
    try:
        return safetensors.numpy.load_file(path / name)
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(path, f"{name} cannot be read ({error})") from error


def _check_length(path: Path, name: str, marker: _Marker) -> None:
    try:
        actual_bytes = (path / name).stat().st_size
    except OSError as error:
        raise _damaged(path, f"{name} is missing or out of reach ({error.strerror})") from error
    expected_bytes = marker.file_bytes.get(name)
    if actual_bytes != expected_bytes:
        raise _damaged(path, f"{name} has {actual_bytes:,} bytes, not the {expected_bytes:,} that were saved")


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"the checkpoint is damaged: {what}", key="checkpoint", value=str(path), fix=_use_another(path))


def _use_another(path: Path) -> str:
    others = [other for other in complete_checkpoints(path.parent) if other != path]
    return f"use {others[-1]}" if others else "use another checkpoint or start anew"
