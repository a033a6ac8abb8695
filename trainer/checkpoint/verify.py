"""Checks checkpoints and token caches on disk, without MindSpore.

Everything is checked for which no configuration is needed: checksums, JSON, the consistency of names, dtypes and
shapes, and every number. Only a run can check whether a checkpoint fits a model and its data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.checkpoint.adapters import ADAPTER_CONFIG, PART, PREFIX
from trainer.checkpoint.json_models import AdapterDescription, read_run_state
from trainer.checkpoint.store import (
    OPTIMIZER,
    STATE,
    Checkpoint,
    check_checkpoint,
    complete_checkpoints,
    first_of,
    is_step_folder,
    resolve_best_link,
)
from trainer.checkpoint.weights import is_finite
from trainer.data.tokens.token_file import DamagedTokenFile, checked_token_file, is_token_file
from trainer.errors import UserError
from trainer.input_files import read_bytes
from trainer.monitors import formatting
from trainer.storage.json_files import JsonError, parse_json
from trainer.storage.marker import MARKER


class VerifyResult(NamedTuple):
    """The result of checking one folder, which is damaged (`problem`), interrupted, or else intact.

    Attributes:
        problem: What is damaged; empty if nothing is.
        note: What an intact folder contains, or why an interrupted one is no checkpoint.
        is_interrupted: A kill or a failure has left the folder of a save or a removal, which runs ignore.
    """

    path: Path
    problem: str = ""
    note: str = ""
    has_checksums: bool = True
    is_checkpoint: bool = True
    is_interrupted: bool = False

    @property
    def status(self) -> str:
        """Returns ``damaged``, ``interrupted`` or ``ok``."""
        if self.problem:
            return "damaged"
        if self.is_interrupted:
            return "interrupted"
        return "ok"


def verify(path: Path) -> list[VerifyResult]:
    """Checks a checkpoint, a token cache, or a folder of them, two levels deep.

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
        results = [_check(each) for each in _folders(path)]
    except OSError as error:
        fix = "make it readable"
        raise UserError(f"cannot be read: {error.strerror}", key="verify", value=str(path), fix=fix) from None
    if not results:
        fix = "name a checkpoint, a folder of checkpoints, an output folder or a token cache"
        raise UserError("contains no checkpoint or token cache", key="verify", value=str(path), fix=fix)
    if len(results) == 1 and results[0].is_interrupted and results[0].path == path:  # it was named: no run ignores it
        return [results[0]._replace(problem=results[0].note, is_interrupted=False)]
    return results


def result_lines(results: list[VerifyResult]) -> Iterator[str]:
    """Yields a line for each folder, and a summary line."""
    for result in results:
        remark = ""
        if not result.has_checksums:
            remark = "; saved without checksums: only lengths were checked"
        yield f"{result.status:<12}{result.path}: {result.problem or result.note}{remark}"
    statuses = [result.status for result in results]
    damaged = statuses.count("damaged")
    text = f"{len(results) - statuses.count('interrupted')} checked, {damaged or 'none'} damaged"
    if damaged:
        intact = {result.path for result in results if result.is_checkpoint and result.status == "ok"}
        newest = list(_newest_of_each_folder(intact))
        if len(newest) == 1:
            text += f"; the newest intact checkpoint is {newest[0]}"
        elif newest:
            text += f"; the newest intact checkpoint of each folder: {', '.join(map(str, newest))}"
    yield text


def _newest_of_each_folder(intact: set[Path]) -> Iterator[Path]:
    """Yields the checkpoint that was saved last in each folder of checkpoints that has an intact one."""
    for folder in sorted({path.parent for path in intact}):
        yield from [path for path in complete_checkpoints(folder) if path in intact][-1:]


def _folders(path: Path) -> Iterator[Path]:
    """Yields the folders to check: `path` itself, or folders below it."""
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
    """Returns whether a folder is a token cache, or looks like a checkpoint, complete or not."""
    if is_step_folder(path) or (path / MARKER).exists() or is_token_file(path):
        return True
    return (path / STATE).exists() and any(path.glob("*.safetensors"))  # the launcher too has a state.json


def _check(path: Path) -> VerifyResult:
    if is_token_file(path):
        try:
            token_cache = checked_token_file(path, every_page=True)
        except DamagedTokenFile as error:
            return VerifyResult(path, f"{error}; remove it, and the next run builds it again", is_checkpoint=False)
        note = f"{token_cache.meta.num_tokens:,} tokens of {token_cache.meta.source}"
        return VerifyResult(path, "", note, is_checkpoint=False)
    why = "a save or a removal was interrupted"
    if (path / MARKER).exists():
        try:
            result = _check_complete(path)
        except UserError as error:
            result = VerifyResult(path, error.rule.removeprefix("the checkpoint is damaged: "))
        except OSError as error:
            result = VerifyResult(path, f"{error.filename or path} cannot be read ({error.strerror})")
        if not result.problem or (path / MARKER).exists():
            return result
        why = "it was removed meanwhile"
    return VerifyResult(path, "", f"it has no {MARKER} file: {why}", is_interrupted=True)


def _check_complete(path: Path) -> VerifyResult:
    """Checks a complete checkpoint; raises a UserError if it is damaged, an OSError if it is removed meanwhile."""
    checkpoint = check_checkpoint(path)
    step = read_run_state(checkpoint).position.step
    if problem := _description_problem(path) or _optimizer_problem(checkpoint):
        return VerifyResult(path, problem)
    if wrong := [name for arrays in checkpoint.tensors.values() for name in arrays if not is_finite(arrays[name])]:
        return VerifyResult(path, f"{first_of(wrong)} has NaN or infinity")
    files = [each for each in path.iterdir() if each.is_file()]
    size = sum(each.stat().st_size for each in files)
    return VerifyResult(path, "", f"step {step}, {len(files)} files, {formatting.size(size)}", checkpoint.has_checksums)


def _description_problem(path: Path) -> str:
    """Returns what is wrong with adapter_config.json; empty if it is right, or there are no adapters."""
    try:
        parse_json(read_bytes(path / ADAPTER_CONFIG), AdapterDescription, ADAPTER_CONFIG)
    except FileNotFoundError:
        if (path / f"{PART}.safetensors").exists():
            return f"{ADAPTER_CONFIG} is missing"
        return ""
    except JsonError as error:
        return str(error)
    return ""


def _optimizer_problem(checkpoint: Checkpoint) -> str:
    """Returns the problem of the first array of the optimizer that does not fit its weight; empty if all fit.

    Weights that have another name on disk than in the optimizer's state, such as experts, are not compared.
    """
    states = checkpoint.tensors.get(OPTIMIZER)
    if states is None:
        return ""
    shapes = {name.removeprefix(PREFIX): arrays.about(name)[1]
              for part, arrays in checkpoint.tensors.items() if part != OPTIMIZER for name in arrays}  # fmt: skip
    for name in states:
        dtype, shape = states.about(name)
        expected = shapes.get(name.partition(".")[2], shape)
        if dtype != "F32":
            return f"the optimizer's state has {name} in {dtype}, not F32"
        if shape not in (expected, (math.prod(expected),)):  # flat where data-parallel ranks shard it (ZeRO)
            return f"the optimizer's state has {name} of shape {list(shape)}, and the weight has {list(expected)}"
    return ""
