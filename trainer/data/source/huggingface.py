"""Reads the keys of an HFDataLoader: the arguments of Hugging Face's ``load_dataset``, for local files."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.checks.problem import data_error, nearest, one_of
from trainer.config.schema.data import HuggingFaceLoader
from trainer.errors import UserError, working_directory

if TYPE_CHECKING:
    from trainer.config import Config

_BUILDERS = ("json", "parquet", "arrow")
"""Values of `path` that name a format instead of a folder."""
_OTHER_BUILDERS = ("csv", "text", "xml", "webdataset", "imagefolder", "audiofolder")
_STEPS = {
    "take": "n, a whole number above 0",
    "rename_column": "original_column_name and new_column_name",
    "AlpacaInstructDataHandler": "",
    "PackingHandler": "a pack_strategy, which is pack or truncate",
}
"""The steps of processing that are applied, or done in any case, with what each needs."""
_RENAMED = ("original_column_name", "new_column_name")
_DOWNLOAD = "download it (hf download --repo-type dataset NAME --local-dir FOLDER), and set path to the folder"


class Request(NamedTuple):
    """The files that an HFDataLoader reads, and how."""

    name: str  # as the user wrote it, for messages
    key: str  # the key that names it
    paths: list[str]  # files, or one folder
    columns: dict[str, str]
    limit: int | None  # the most records to read; None for all
    notes: tuple[str, ...] = ()  # sentences about keys that have another effect here


def read_request(config: Config, section: str) -> Request:
    """Reads the keys of a section's HFDataLoader.

    Raises:
        UserError: They name no local files, or request processing that is not supported.
    """
    loader = getattr(config, section).data_loader
    columns, limit, notes = _read_handlers(config, section, loader)
    name, key, paths = _find_paths(config, section, loader)
    return Request(name, key, paths, columns, limit, notes)


def _find_paths(config: Config, section: str, loader: HuggingFaceLoader) -> tuple[str, str, list[str]]:
    """Returns the name that the user wrote, its key, and the files or the folder."""
    prefix = f"{section}.data_loader"
    if loader.dataset_dir:
        return loader.dataset_dir, f"{prefix}.dataset_dir", [loader.dataset_dir]
    key = f"{prefix}.path"
    if loader.path in _OTHER_BUILDERS:
        fix = "convert the data to JSON lines or parquet, or use TextDataset for plain text"
        raise data_error(config, key, f"{loader.path} files cannot be read", fix)
    if loader.data_files is not None:
        return str(loader.data_files), f"{prefix}.data_files", _data_files(config, section)
    if not loader.path or (loader.path in _BUILDERS and not loader.data_dir):
        fix = "set path to a folder or a file, or data_files to the files"
        raise data_error(config, key, f"{loader.type} needs a file or a folder", fix)
    name = loader.path
    if loader.data_dir:
        name = os.path.join(loader.path, loader.data_dir)
        if loader.path in _BUILDERS:
            name = loader.data_dir
    if not os.path.exists(os.path.expanduser(name)):
        rule = "there is no such file or folder, and nothing is downloaded while a run starts"
        raise data_error(config, key, rule, _DOWNLOAD)
    return name, key, [name]


def _data_files(config: Config, section: str) -> list[str]:
    """Returns the files of `data_files`: a name, a list of names, or either for each split; names may be patterns."""
    loader = getattr(config, section).data_loader
    key = f"{section}.data_loader.data_files"
    names = loader.data_files
    if isinstance(names, dict):
        usual = "test"
        if section == "train_dataset":
            usual = "train"
        elif "validation" in names:
            usual = "validation"
        split = loader.split or usual
        if split not in names:
            rule = f"it names no files for the split {split}"
            raise data_error(config, key, rule, f"set {section}.data_loader.split")
        names = names[split]
    folder = loader.data_dir or ""
    if not folder and loader.path not in _BUILDERS:
        folder = loader.path
        if folder and not os.path.isdir(os.path.expanduser(folder)) and (guess := nearest(folder, _BUILDERS)):
            rule = f"is neither a folder nor a format, {one_of(_BUILDERS)}"
            raise data_error(config, f"{section}.data_loader.path", rule, f"you probably mean {guess}")
    if isinstance(names, str):
        names = [names]
    paths: list[str] = []
    for name in names:
        path = os.path.join(folder, name)
        matches = [path]
        if glob.has_magic(path):
            matches = sorted(glob.glob(os.path.expanduser(path), recursive=True))
        if not matches:
            fix = f"correct it; relative paths start at {working_directory()}"
            raise data_error(config, key, f"no file matches {name}", fix)
        paths.extend(matches)
    return paths


def _read_handlers(
    config: Config, section: str, loader: HuggingFaceLoader
) -> tuple[dict[str, str], int | None, tuple[str, ...]]:
    """Combines the handlers, which are steps of processing in order, to columns, a limit and notes."""
    columns: dict[str, str] = {ours: theirs for ours, theirs in loader.columns.items()}
    limit: int | None = None
    notes = []
    for number, (kind, handler) in enumerate(handler_steps(loader.handler)):
        key = f"{section}.data_loader.handler.{number}"
        where = config.source.where(key) or config.source.where(f"{section}.data_loader.handler")
        if kind == "take" and isinstance(handler.get("n"), int) and handler["n"] > 0:
            limit = min(limit or handler["n"], handler["n"])
        elif kind == "rename_column" and all(isinstance(handler.get(name), str) for name in _RENAMED):
            columns[handler["new_column_name"]] = handler["original_column_name"]
        elif kind == "AlpacaInstructDataHandler":
            _check_alpaca(config, section, handler, key, where)
            notes.append(f"{key} {kind}: instructions take the form in docs/data.md, not its wording.")
        elif kind != "PackingHandler" or handler.get("pack_strategy", "pack") not in ("pack", "truncate"):
            raise _step_error(kind, key, where)
        elif handler.get("pack_strategy") == "truncate" and getattr(config, section).packing != "cut":
            rule = "pack_strategy truncate cuts samples at the end of a sequence, and packing is not cut"
            raise UserError(rule, where=where, key=key, fix=f"set {section}.packing to cut, or pack_strategy to pack")
    return columns, limit, tuple(notes)


def _step_error(kind: str, key: str, where: str) -> UserError:
    """Returns the error for a step of processing that is not known, or lacks what it needs."""
    if kind in _STEPS:
        return UserError(f"needs {_STEPS[kind]}", where=where, key=key, value=kind, fix="complete the step")
    fix = "process the data set first (datasets' save_to_disk), and name the folder"
    if guess := nearest(kind, list(_STEPS)):
        fix = f"you probably mean {guess}; or {fix}"
    rule = f"is none of the steps that are known here: {one_of(list(_STEPS))}"
    return UserError(rule, where=where, key=key, value=kind, fix=fix)


def handler_steps(handlers: list[dict[str, Any]] | Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the kind and the keys of each step of an HFDataLoader's processing, in either form of the YAML."""
    if isinstance(handlers, list):
        return [(str(handler.get("type", "")), handler) for handler in handlers]
    return [(kind, handler or {}) for kind, handler in handlers.items()]


def _check_alpaca(config: Config, section: str, handler: dict[str, Any], key: str, where: str) -> None:
    """Refuses a handler's tokenizer if no section sets one."""
    tokenizer = handler.get("tokenizer") or {}
    folder = tokenizer
    if isinstance(tokenizer, dict):
        folder = tokenizer.get("pretrained_model_dir")
    types = {getattr(config, section).tokenizer.type, config.train_dataset.tokenizer.type}
    if folder and types == {"bytes"} and not config.pretrained_model_dir:
        rule = "the tokenizer of a handler is not read"
        fix = f"write train_dataset.tokenizer: {{type: huggingface, path: {folder}}}"
        raise UserError(rule, where=where, key=f"{key}.tokenizer", value=folder, fix=fix)
