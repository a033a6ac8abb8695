"""Reads checkpoints: one folder a step, which counts only when it is complete.

    checkpoints/step-00000100/model.safetensors      the weights, by their names
                             /optimizer.safetensors  the optimizer's state; of ranks that share it earlier versions
                                                     wrote a file each: optimizer-00003-of-00008.safetensors
                             /state.json             step, epoch, position in the data, settings ...
                             /COMPLETE               written last, with the length and checksum of every file:
                                                     a folder without it is ignored
    checkpoints/best                                 a link to the checkpoint with the lowest eval loss; where the file
                                                     system has no links, a text file with its name

`trainer.checkpoint.writing` says how a folder becomes complete.

"Newest" means saved last, by a number in the marker that grows with every save, not the highest step: after a run that
had reached step 500 is resumed from step 100, its newest checkpoint is step 150, not step 500.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from trainer.errors import UserError
from trainer.input_files import missing_path_fix, read_bytes
from trainer.parallel.sharding import Shard, ShardSpec
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.storage.interleaved_experts import QUANTIZED
from trainer.storage.json_files import JsonError, parse_json
from trainer.storage.marker import MARKER, Marker, check_saved, difference
from trainer.storage.tensor_file import BFLOAT16, LazyArray, TensorFile, concatenate_arrays, read_shard

STATE = "state.json"
OPTIMIZER = "optimizer"
"""The part with the optimizer's state."""
REPLACED = ".replaced"
"""Suffix of a checkpoint whose step is being saved again."""
BEST = "best"
UNFINISHED = ".tmp-"
"""Prefix of a temporary folder or file."""
ENDING = ".safetensors"
INDEX = "model.safetensors.index.json"
"""In a folder of Hugging Face: which file has which tensor."""

_FLOATS = ("F64", "F32", "F16", BFLOAT16)
_STEP_FOLDER = re.compile(r"step-(\d{8,})(\.replaced)?")
_OFFERED = re.compile(r"use (.+?), (the [^,()]+) \(--resume_training [^)]+\)")
MOST_OFFERED = 5
"""Checkpoints that the fix of an error names."""
_GENERAL_KEYS = ("", "checkpoint", "load_checkpoint")
"""The keys of errors whose readers do not know which setting names the file."""
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read.

    Attributes:
        step: Optimizer steps done when it was saved.
        tensors: The arrays by part and name: ``{"model": {...}, "optimizer": {...}}``. They are read when they are
            accessed; shards are concatenated to a flat array.
        state: The rest of the run's state.
        has_checksums: Whether its marker has checksums, which were compared.
    """

    path: Path
    step: int
    tensors: dict[str, StoredArrays]
    state: dict
    has_checksums: bool = True


def step_folder_name(step: int) -> str:
    """Returns the name of the folder of a step: ``step-00000100``."""
    return f"step-{step:08d}"


def shard_name(part: str, rank: int, ranks: int) -> str:
    """Returns the name of the file with a rank's shard of a part: ``optimizer-00003-of-00008`` for rank 2."""
    return f"{part}-{rank + 1:05d}-of-{ranks:05d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints of ``folder``, the one saved last at the end; empty if it is missing."""
    return [path for path, _ in read_markers(step_folders(folder))]


def read_markers(folders: Iterable[Path]) -> list[tuple[Path, Marker]]:
    """Returns those of some folders that are complete checkpoints, with their markers, in the order of their saves."""
    markers = [(path, marker) for path in folders if (marker := read_marker(path)) is not None]
    return sorted(markers, key=lambda each: (each[1].save_number, each[0]))


def newest_complete(folder: Path) -> Path | None:
    """Returns the complete checkpoint of ``folder`` that was saved last, or None."""
    return next(reversed(complete_checkpoints(folder)), None)


def find_checkpoint(path: Path) -> Path:
    """Finds the checkpoint that ``path`` names.

    Args:
        path: A checkpoint, ``checkpoints/best``, a folder of checkpoints, or the output folder that has them in
            ``checkpoints``; of several, the one saved last.

    Raises:
        UserError: There is none. (Whether a named checkpoint is complete is checked when it is read.)
    """
    try:
        path = resolve_best_link(path)
        if not path.exists():
            raise missing_checkpoint(path)
        if is_step_folder(path) or (path / STATE).exists():
            return path
        newest = _newest_readable(path) or _newest_readable(path / "checkpoints")
    except OSError as error:
        raise UserError(f"checkpoints cannot be read there: {error.strerror}", key="checkpoint", value=str(path),
                        fix="make the folder readable") from error
    if newest is not None:
        return newest
    if not path.is_dir():
        kind = "a pipe, a socket or a device"
        if path.is_file():
            kind = "a file"
        fix = "name a .safetensors file, or a folder such as output/checkpoints/step-00000100"
        raise UserError(f"is {kind}, not a checkpoint", key="checkpoint", value=str(path), fix=fix)
    rule = "the folder holds no complete checkpoint"
    fix = _offer(path)
    if renamed := [*_renamed(path / "checkpoints"), *_renamed(path)]:
        newest, marker = renamed[-1]
        rule = f"{rule} under the name of its step, but {newest}"
        fix = f"rename it to {step_folder_name(marker.step)}, or name it"
    raise UserError(rule, key="checkpoint", value=str(path), fix=fix)


def missing_checkpoint(path: Path, where: str = "") -> UserError:
    """Returns the error for a path of a checkpoint that does not exist; its fix names what is there."""
    fix = missing_path_fix(path, _offer(path.parent))
    return UserError("there is no such checkpoint", where=where, key="checkpoint", value=str(path), fix=fix)


def _offer(folder: Path) -> str:
    """Returns a fix that names checkpoints of a folder, those saved last, or folders of runs in it."""
    offered: list[Path] = []
    with contextlib.suppress(OSError):
        offered = complete_checkpoints(folder) or complete_checkpoints(folder / "checkpoints")
        runs = [run for run in folder.iterdir() if complete_checkpoints(run / "checkpoints")]
        offered = offered or sorted(runs, key=lambda run: (run / "checkpoints").stat().st_mtime_ns)
    if not offered:
        return "name a folder such as output/checkpoints/step-00000100"
    return f"name one that is there: {', '.join(map(str, offered[-MOST_OFFERED:]))}"


def _newest_readable(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint; raises a UserError if a marker is damaged or of another step.

    Only the marker tells when a checkpoint was saved, so that this one may be the newest: to ignore it silently could
    continue an abandoned run.
    """
    for path in sorted(step_folders(folder), reverse=True):
        if (path / MARKER).exists():
            _complete_marker(path)
    return newest_complete(folder)


def renamed_checkpoint_notes(checkpoint: Path) -> list[str]:
    """Returns a note for each complete checkpoint beside this one that was saved later, but was renamed."""
    chosen = read_marker(checkpoint)
    if chosen is None:
        return []
    return [
        f"{path} was saved after {checkpoint.name} and is ignored, because it was renamed: "
        f"rename it to {step_folder_name(marker.step)}, or name it: --resume_training {path.name}"
        for path, marker in _renamed(checkpoint.parent) if marker.save_number > chosen.save_number
    ]


def _renamed(folder: Path) -> list[tuple[Path, Marker]]:
    """Returns the complete checkpoints in a folder that have other names than a step's, with their markers."""
    try:
        paths = [path for path in folder.iterdir() if not is_step_folder(path) and not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return read_markers(sorted(paths))


def resolve_best_link(path: Path) -> Path:
    """Returns the checkpoint that a ``checkpoints/best`` points to; any other path as it is.

    Raises:
        OSError: It cannot be read.
    """
    if path.name != BEST:
        return path
    if path.is_symlink():
        name = os.readlink(path)
    elif path.is_file():
        name = path.read_text(encoding="utf-8", errors="replace").strip()
    else:
        return path
    if _STEP_FOLDER.fullmatch(name):
        return path.with_name(name)
    return path


def check_checkpoint_folder(folder: Path) -> None:
    """Checks, before a run starts, that checkpoints can be written to ``folder``.

    Raises:
        UserError: It cannot be made, is a file or is not writable.
    """
    probe = folder / f"{UNFINISHED}probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    except OSError as error:
        raise UserError(f"checkpoints cannot be written there: {error.strerror}", key="output_dir", value=str(folder),
                        fix="choose a folder you may write to") from error


def rename_old_checkpoints(folder: Path) -> Path | None:
    """Renames a folder with complete checkpoints to the first free ``checkpoints-1``, ``checkpoints-2`` ...

    A new run that saved into the same folder would prune them, and a resumed run could read the wrong one.
    """
    if newest_complete(folder) is None:
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def read_checkpoint(
    path: Path, parts: Iterable[str] | None = None, checksums: bool = True, world: World = SINGLE_PROCESS
) -> Checkpoint:
    """Reads a complete checkpoint, and checks the lengths and checksums of the files that it reads.

    Args:
        parts: Which parts to read, for example ``("model",)``; all when None.
        checksums: Whether to check them, for which the files are read.
        world: The ranks that all read it: the ranks of a host share the checks, see `difference`.

    Raises:
        UserError: It is missing, incomplete, damaged, unreadable, or lacks a part.
    """
    if not path.is_dir():
        raise missing_checkpoint(path)
    marker = _complete_marker(path)
    state = _read_state(path, marker)
    files = _files_of_parts(path, marker)
    tensors = {}
    has_checksums = marker.checksums is not None
    if not checksums:
        marker = marker.model_copy(update={"checksums": None})
    for part in files if parts is None else parts:
        if part not in files:
            raise UserError(f"the checkpoint has no part '{part}', only {', '.join(files)}", key="checkpoint",
                            value=str(path), fix="use a checkpoint of a training run")
        tensors[part] = StoredArrays(path, files[part], marker, world)
    return Checkpoint(path, marker.step, tensors, state, has_checksums)


def check_checkpoint(path: Path) -> Checkpoint:
    """Checks every file of a checkpoint, including files for other programs; arrays are read when accessed.

    Raises:
        UserError: It is incomplete or damaged.
    """
    checkpoint = read_checkpoint(path)
    marker = _complete_marker(path)
    for name in marker.file_bytes:
        if name != STATE and not name.endswith(ENDING):
            _check_file(path, name, marker)
    return checkpoint


def _complete_marker(path: Path) -> Marker:
    """Reads the marker of a checkpoint; raises a UserError if the checkpoint is incomplete."""
    try:
        marker: Marker = parse_json(read_bytes(path / MARKER), Marker, MARKER)
    except JsonError as error:
        raise damaged_checkpoint(path, str(error)) from error
    except OSError as error:
        why = error.strerror
        if isinstance(error, FileNotFoundError):
            why = "its save was interrupted"
        raise _incomplete(path, f"it has no readable {MARKER} file: {why}") from error
    named = _STEP_FOLDER.fullmatch(path.name)
    if named is not None and int(named[1]) != marker.step:
        fix = f"rename it to {step_folder_name(marker.step)}, or remove it; or {fallback_fix(path)}"
        rule = f"the checkpoint is damaged: {MARKER} says step {marker.step}, the folder's name {int(named[1])}"
        raise UserError(rule, key="checkpoint", value=str(path), fix=fix)
    return marker


def _files_of_parts(path: Path, marker: Marker) -> dict[str, list[str]]:
    """Returns the names of the files of each part, in the order of ranks, including missing ones."""
    files: dict[str, list[str]] = {}
    for name in marker.file_bytes:
        if not name.endswith(ENDING):
            continue
        stem = name.removesuffix(ENDING)
        part = stem
        names = [name]
        if shard := _SHARD.fullmatch(stem):
            part = shard[1]
            names = [shard_name(part, rank, int(shard[3])) + ENDING for rank in range(int(shard[3]))]
        if name not in names:
            raise damaged_checkpoint(path, f"{MARKER} names {name}: there is no such shard")
        if files.setdefault(part, names) != names:
            raise damaged_checkpoint(path, f"{name} and {files[part][0]} both contain '{part}'")
    return files


class StoredArrays(Mapping[str, np.ndarray]):
    """The arrays of a part, read from its files when they are accessed.

    An array in all files is sharded into consecutive ranges; an array only in the first file is not sharded.
    """

    def __init__(self, path: Path, names: list[str], marker: Marker, world: World = SINGLE_PROCESS) -> None:
        """Opens the files; raises UserError where one is missing or damaged."""
        self.path = path
        self.files = []
        for rank, name in enumerate(names):
            whose = ""
            if len(names) > 1:
                whose = f", the shard of rank {rank} of {len(names)}"
            _check_file(path, name, marker, whose, world)
            try:
                self.files.append(TensorFile(path / name))
            except (OSError, safetensors.SafetensorError) as error:
                raise damaged_checkpoint(path, f"{name} cannot be read ({error})") from error
        if any(file.entries.keys() - self.files[0].entries.keys() for file in self.files[1:]):
            raise damaged_checkpoint(path, "some ranks saved tensors that rank 0 did not")
        for name in self:
            self._files_with(name)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.array(name).read()

    def array(self, name: str) -> LazyArray:
        """Returns an array whose shards can be read; reading raises a UserError if the file is damaged."""
        parts = [file.tensor(name) for file in self._files_with(name)]
        _, shape = self.about(name)

        def read(part: ShardSpec) -> np.ndarray:
            """Reads a shard of the array from the files of the ranks that saved it."""
            try:
                if len(parts) == 1:
                    return parts[0].read(part)
                return _read_flat(parts, part)
            except (OSError, TypeError) as error:  # numpy lacks some dtypes
                raise damaged_checkpoint(self.path, f"{name} cannot be read ({error})") from error

        return LazyArray(shape, read)

    def arrays(self) -> dict[str, LazyArray]:
        """Returns all arrays by name."""
        return {name: self.array(name) for name in self}

    def about(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns dtype (as safetensors names it) and shape of an array, without reading it."""
        entries = [file.entries[name] for file in self._files_with(name)]
        (dtype, *others) = sorted({each.code for each in entries})
        if others:
            raise damaged_checkpoint(self.path, f"{name} has another dtype in the shards of some ranks")
        if len(entries) == 1:
            return dtype, entries[0].shape
        return dtype, (sum(math.prod(each.shape) for each in entries),)

    def _files_with(self, name: str) -> list[TensorFile]:
        files = [file for file in self.files if name in file.entries]
        if not files:
            raise KeyError(name)
        if len(files) not in (1, len(self.files)):
            raise damaged_checkpoint(self.path, f"{name} is in the shards of {len(files)} of {len(self.files)} ranks")
        return files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files[0].entries)

    def __len__(self) -> int:
        return len(self.files[0].entries)


def _read_flat(ranges: list[LazyArray], part: ShardSpec) -> np.ndarray:
    """Reads a shard of an array that is stored as consecutive ranges of any shape."""
    flat = concatenate_arrays([LazyArray((math.prod(each.shape),), each.read) for each in ranges])
    runs = (ShardSpec(flat.shape, Shard((at,), (count,))) for at, _, count in part.runs())
    return np.concatenate([read_shard(flat, run) for run in runs]).reshape(part.shape)


def step_folders(folder: Path) -> list[Path]:
    """Returns the folders with the names of checkpoints, in any order; empty if ``folder`` is missing."""
    try:
        return [path for path in folder.iterdir() if is_step_folder(path) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_step_folder(path: Path) -> bool:
    """Returns whether a folder has the name of a checkpoint."""
    return _STEP_FOLDER.fullmatch(path.name) is not None


def read_marker(path: Path) -> Marker | None:
    """Reads the marker; None if it is missing or damaged."""
    try:
        return parse_json(read_bytes(path / MARKER), Marker, MARKER)
    except (OSError, JsonError):
        return None


def _read_state(path: Path, marker: Marker) -> dict:
    _check_file(path, STATE, marker)
    try:
        content = read_bytes(path / STATE)
        return parse_json(content, dict[str, Any], STATE)
    except (OSError, JsonError) as error:
        raise damaged_checkpoint(path, f"{STATE} cannot be read ({error})") from error


def _check_file(path: Path, name: str, marker: Marker, whose: str = "", world: World = SINGLE_PROCESS) -> None:
    """Checks length and checksum of a file."""
    try:
        problem = difference(path / name, marker, world)
    except OSError as error:
        if whose and isinstance(error, FileNotFoundError):
            raise _incomplete(path, f"{name}{whose}, is missing") from error
        raise damaged_checkpoint(path, f"cannot open {name}: {error.strerror}") from error
    if name not in marker.file_bytes:
        raise _incomplete(path, f"{name}{whose}, is not listed in {MARKER}")
    if problem:
        raise damaged_checkpoint(path, problem)


def _incomplete(path: Path, why: str) -> UserError:
    return UserError(f"the checkpoint is incomplete: {why}", key="checkpoint", value=str(path), fix=fallback_fix(path))


def damaged_checkpoint(path: Path, what: str) -> UserError:
    """Makes the error for a checkpoint whose files are not as they were saved; its fix names another checkpoint."""
    return UserError(f"the checkpoint is damaged: {what}", key="checkpoint", value=str(path), fix=fallback_fix(path))


def fallback_fix(path: Path) -> str:
    """Returns a fix that names the complete checkpoint saved before this one, or else the one saved last.

    For a run that only loads weights, `errors_at` changes the flag in it.
    """
    marker = read_marker(path)
    others = [(other, its) for other, its in read_markers(step_folders(path.parent)) if other != path]
    if older := [other for other, its in others if marker is not None and its.save_number < marker.save_number]:
        return f"use {older[-1]}, the one saved before it (--resume_training {older[-1].name})"
    if not others:
        return "use another checkpoint or start a new run"
    newest, _ = others[-1]
    if marker is None and (path / MARKER).exists():
        return f"use {newest}, the newest intact one (--resume_training {newest.name}), or remove the damaged folder"
    return f"use {newest}"


@contextlib.contextmanager
def errors_at(where: str, key: str, replaces: bool = False) -> Iterator[None]:
    """Gives errors about a checkpoint or weights the location and key of the setting that names it.

    A fix that names another checkpoint names it with the flag of this key; an empty key is an argument without one.

    Args:
        replaces: Whether to replace the location of an error that has one.
    """
    try:
        yield
    except UserError as error:
        if (error.where and not replaces) or not (where or key):
            raise
        flag = ""
        if key:
            flag = f"--{key} "
        fix = error.fix
        if key != "resume_training":
            fix = _OFFERED.sub(rf"use {flag}\1, \2", fix)
        if error.key not in _GENERAL_KEYS:
            key = error.key
        raise error.with_location(where, key).replace_texts(error.rule, fix) from error


def first_of(names: list[str]) -> str:
    """Returns the first name, and how many more there are."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} (and {len(names) - 1} more)"


def read_safetensors(
    file: Path, *, numbers: bool = True, world: World = SINGLE_PROCESS, leave_out: Callable[[str], bool] | None = None
) -> dict[str, LazyArray]:
    """Opens the arrays of a file by name, except those to leave out.

    For `numbers` and `world` see `trainer.checkpoint.weights.read_weights`.

    Raises:
        UserError: The file cannot be read, or has tensors that are not floating-point.
    """

    def unreadable(error: Exception) -> UserError:
        fix = "name a checkpoint folder or a complete .safetensors file"
        rule = f"not a readable safetensors file ({getattr(error, 'strerror', None) or error})"
        return UserError(rule, value=str(file), fix=fix)

    try:
        if numbers:
            check_saved(file, world)
        tensors = TensorFile(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise unreadable(error) from error
    entries = {name: entry for name, entry in tensors.entries.items() if leave_out is None or not leave_out(name)}
    other = [
        f"{name} is {entry.code}" for name, entry in entries.items()
        if entry.code not in _FLOATS and not (entry.code == "U8" and name.endswith(QUANTIZED))
    ]  # fmt: skip
    if other:
        rule = f"weights must be floating-point numbers of 16 to 64 bits; {first_of(other)}"
        raise UserError(rule, value=str(file), fix="use a checkpoint that is not quantized")

    def read(name: str, part: ShardSpec) -> np.ndarray:
        """Reads a shard of a tensor as float32; raises UserError if the file cannot be read."""
        try:
            return tensors.tensor(name).read(part).astype(np.float32, copy=False)
        except OSError as error:
            raise unreadable(error) from error

    return {name: LazyArray(entry.shape, partial(read, name)) for name, entry in entries.items()}
