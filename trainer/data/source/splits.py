"""Finds which files of a folder belong to which split (train, validation, test) of a data set."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.data.source.files import unreadable_error
from trainer.errors import UserError
from trainer.input_files import read_bytes

_DICT = "dataset_dict.json"
_STATE = "state.json"
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words in a file's name by which Hugging Face datasets tells its split."""
_PREFERRED: dict[str, tuple[str, ...]] = {"train_dataset": ("train",), "eval_dataset": ("validation", "test")}
_SAVE_FIX = "save it anew with save_to_disk"


def saved_splits(root: Path, key: str, where: str) -> dict[str, list[Path]] | None:
    """Returns the files of each split in a folder of Hugging Face datasets' ``save_to_disk``; None for other folders.

    A single data set that does not name its split is under an empty name.

    Raises:
        UserError: The description of the data set cannot be read.
    """
    if (root / _DICT).is_file():
        names = _description(root / _DICT, "splits", key, where)["splits"]
        return {str(name): _saved_files(root / str(name), key, where)[1] for name in names}
    if not (root / _STATE).is_file():
        return None
    split, files = _saved_files(root, key, where)
    return {split: files}


def _saved_files(folder: Path, key: str, where: str) -> tuple[str, list[Path]]:
    """Returns the split of one saved data set, and its files in order."""
    path = folder / _STATE
    state = _description(path, "_data_files", key, where)
    if state.get("_indices_data_files"):
        rule = "it was saved with a list of chosen rows, which is not read"
        raise UserError(rule, where=str(path), fix="save it with flatten_indices() first")
    try:
        return str(state.get("_split") or ""), [folder / file["filename"] for file in state["_data_files"]]
    except (TypeError, KeyError):
        rule = "its _data_files must be a list of {filename}"
        raise UserError(rule, where=str(path), fix=_SAVE_FIX) from None


def _description(path: Path, field: str, key: str, where: str) -> dict[str, Any]:
    """Reads a JSON file that describes a data set: an object in which `field` is a list."""
    try:
        content = json.loads(read_bytes(path))
    except OSError as error:
        raise unreadable_error(path, error, key, where) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the file is not JSON ({error})", where=str(path), fix=_SAVE_FIX) from None
    if not isinstance(content, dict) or not isinstance(content.get(field), list) or not content[field]:
        rule = f"it does not describe a data set: it has no list {field}"
        raise UserError(rule, where=str(path), fix=_SAVE_FIX)
    return content


def named_splits(root: Path, paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Groups files by the split that their paths below `root` name; files without one are training data."""
    splits: dict[str, list[Path]] = {}
    for path in paths:
        splits.setdefault(split_of(path.relative_to(root)), []).append(path)
    return splits


def split_of(path: Path) -> str:
    """Returns the split that a word of the file's name tells, or else a word of its folders, from last to first."""
    for part in reversed(path.parts):
        words = set(re.split("[^a-z]+", part.lower()))
        for split, names in _WORDS.items():
            if words.intersection(names):
                return split
    return "train"


def choose_split(splits: dict[str, list[Path]], requested: str, section: str, key: str, where: str) -> str:
    """Returns the split that a section reads: `requested` if set, or the only one, or the section's usual one.

    Raises:
        UserError: The requested split does not exist, or there are several splits and none is the usual one.
    """
    names = list(splits)
    if names == [""] or (not requested and len(names) == 1):
        return names[0]
    candidates = _PREFERRED[section]
    if requested:
        candidates = (requested,)
    for name in candidates:
        if name in splits:
            return name
    rule = f"the folder has the split{'s' * (len(names) > 1)} {', '.join(names)}"
    if requested:
        rule += f", and not {requested}"
    else:
        rule += f", and none is the usual one for {section}"
    raise UserError(rule, where=where, key=key, fix=f"set {section}.data_loader.split to one of them")
