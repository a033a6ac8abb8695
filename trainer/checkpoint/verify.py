"""Checks checkpoints and token files on disk, without MindSpore.

Everything that needs no configuration is checked: checksums, JSON, names, dtypes and shapes among each other, and every
number. Whether a checkpoint fits a model and its data only a run with their configuration can say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint.adapters import CONFIG_FILE, PART, PREFIX
from trainer.checkpoint.documents import AdapterDescription, read_run_state
from trainer.checkpoint.state import OPTIMIZER
from trainer.checkpoint.store import (
    STATE,
    Checkpoint,
    check_checkpoint,
    is_step_folder,
    newest_complete,
    resolve_best_link,
    step_folders,
)
from trainer.checkpoint.weights import first_of, is_finite
from trainer.data.tokens.token_file import DamagedTokenFile, checked_token_file, is_token_file
from trainer.errors import UserError
from trainer.input_files import read_bytes
from trainer.monitors import formatting
from trainer.storage.json_files import JsonError, parse_json
from trainer.storage.marker import MARKER


class VerifyResult(NamedTuple):
    """What was found in one folder."""

    path: Path
    problem: str = ""  # what is wrong; empty where it is whole
    note: str = ""  # what it is
    has_checksums: bool = True
    is_checkpoint: bool = True
    is_interrupted: bool = False  # by a kill or a failure: runs ignore it


def verify(path: Path) -> list[VerifyResult]:
    """Checks what `path` is, or holds: a checkpoint, a token file, or a folder of them, two levels deep.

    Raises:
        UserError: There is neither, or it cannot be read.
    """
    try:
        path = resolve_best_link(path)
        if not path.is_dir():
            rule = "is not a folder"
            if not path.exists():
                rule = "there is no such folder"
            raise UserError(rule, key="verify", value=str(path), fix="name a checkpoint, a folder of them or a cache")
        found = [_check(each) for each in _folders(path)]
    except OSError as error:
        fix = "make it readable"
        raise UserError(f"cannot be read: {error.strerror}", key="verify", value=str(path), fix=fix) from None
    if not found:
        fix = "name a checkpoint, a folder of checkpoints, an output folder or a token cache"
        raise UserError("contains no checkpoint or token cache", key="verify", value=str(path), fix=fix)
    if len(found) == 1 and found[0].is_interrupted and found[0].path == path:
        return [found[0]._replace(problem=found[0].note, is_interrupted=False)]
    return found


def result_lines(found: list[VerifyResult]) -> Iterator[str]:
    """A line for each folder, and one for all."""
    for one in found:
        if one.is_interrupted:
            word = "interrupted"
        else:
            word = "ok"
            if one.problem:
                word = "damaged"
        unsure = "; saved without checksums: only lengths were checked"
        if one.has_checksums:
            unsure = ""
        yield f"{word:<12}{one.path}: {one.problem or one.note}{unsure}"
    damaged = sum(bool(one.problem) for one in found)
    text = f"{sum(not one.is_interrupted for one in found)} checked, {damaged or 'none'} damaged"
    if damaged:
        whole = {one.path for one in found if one.is_checkpoint and not one.problem and not one.is_interrupted}
        newest = _newest(whole)
        text += f"; the newest intact checkpoint is {newest}" if newest else ""
    yield text


def result_dict(one: VerifyResult) -> dict[str, Any]:
    return one._asdict() | {"path": str(one.path)}


def _newest(whole: set[Path]) -> Path | None:
    """The one of them that was saved last; of several folders of checkpoints that of the first."""
    for folder in sorted({path.parent for path in whole}):
        others = {path for path in step_folders(folder) if path not in whole}
        found = newest_complete(folder, without=others)
        if found is not None:
            return found
    return None


def _folders(path: Path) -> Iterator[Path]:
    """The folders to check, `path` itself or below it."""
    if _is_checked(path):
        yield path
        return
    for child in _children(path):
        if _is_checked(child):
            yield child
        else:
            yield from filter(_is_checked, _children(child))


def _children(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.is_dir() and not each.is_symlink())
    except FileNotFoundError:  # removed since its parent was read
        return []


def _is_checked(path: Path) -> bool:
    if is_step_folder(path) or (path / MARKER).exists() or is_token_file(path):
        return True
    return (path / STATE).exists() and any(path.glob("*.safetensors"))  # the launcher too has a state.json


def _check(path: Path) -> VerifyResult:
    if is_token_file(path):
        try:
            found = checked_token_file(path, every_page=True)
        except DamagedTokenFile as error:
            return VerifyResult(path, f"{error}; remove it, and the next run builds it again", is_checkpoint=False)
        note = f"{found.meta.num_tokens:,} tokens of {found.meta.source}"
        return VerifyResult(path, "", note, is_checkpoint=False)
    was_complete = (path / MARKER).exists()
    try:
        found = None
        if was_complete:
            found = _check_complete(path)
    except (UserError, OSError) as error:
        if isinstance(error, UserError):
            rule = error.rule
        else:
            rule = f"{error.filename} cannot be read ({error.strerror})"
        found = VerifyResult(path, rule.removeprefix("the checkpoint is damaged: "))
    if found is not None and (not found.problem or (path / MARKER).exists()):
        return found
    why = "a save or a removal was interrupted"
    if was_complete:
        why = "it was removed meanwhile"
    return VerifyResult(path, "", f"it has no {MARKER} file: {why}", is_interrupted=True)


def _check_complete(path: Path) -> VerifyResult:
    """Raises a UserError where it is damaged, and an OSError where it is removed meanwhile."""
    checkpoint = check_checkpoint(path)
    step = read_run_state(checkpoint).position.step
    if problem := _description_problem(path) or _optimizer_problem(checkpoint):
        return VerifyResult(path, problem)
    if wrong := list(_not_finite(checkpoint.tensors.values())):
        return VerifyResult(path, f"{first_of(wrong)} has NaN or infinity")
    files = [each for each in path.iterdir() if each.is_file()]
    size = sum(each.stat().st_size for each in files)
    return VerifyResult(path, "", f"step {step}, {len(files)} files, {formatting.size(size)}", checkpoint.has_checksums)


def _description_problem(path: Path) -> str:
    """What is wrong with the description of adapters; empty where it is right, or there are none."""
    try:
        parse_json(read_bytes(path / CONFIG_FILE), AdapterDescription, CONFIG_FILE)
    except FileNotFoundError:
        if (path / f"{PART}.safetensors").exists():
            return f"{CONFIG_FILE} is missing"
        return ""
    except JsonError as error:
        return str(error)
    return ""


def _optimizer_problem(found: Checkpoint) -> str:
    """The first array of the optimizer that does not fit the weight of its name; empty where all fit.

    Weights that have another name on disk than in the optimizer's state, such as experts, are not compared.
    """
    weights = {name.removeprefix(PREFIX): arrays.about(name)[1]
               for part, arrays in found.tensors.items() if part != OPTIMIZER for name in arrays}  # fmt: skip
    arrays = found.tensors.get(OPTIMIZER, {})
    for name in arrays:
        dtype, shape = arrays.about(name)
        expected = weights.get(name.partition(".")[2], shape)
        if dtype != "F32":
            return f"the optimizer's state has {name} in {dtype}, not F32"
        if shape not in (expected, (math.prod(expected),)):  # what ranks have shared is flat
            return f"the optimizer's state has {name} of shape {list(shape)}, and the weight has {list(expected)}"
    return ""


def _not_finite(parts: Iterable) -> Iterator[str]:
    for arrays in parts:
        yield from (name for name in arrays if not is_finite(arrays[name]))
