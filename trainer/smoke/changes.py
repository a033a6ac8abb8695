"""The changes that `smoke` makes to a file, as plain values; applying them gives the file that it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import Config
from trainer.config.checks.problem import value_of
from trainer.config.read.dump import SMALL_COPY, dump_values, plain_values
from trainer.smoke.degrees import SmokeLayout


class Setup(NamedTuple):
    """The conditions of a smoke run: its steps, ranks, device and data."""

    steps: int  # optimizer steps
    ranks: int  # processes
    folder: Path  # of all its files
    device: str  # that it runs on
    missing: dict[str, str]  # data set sections whose data is not here -> the path that is written, or empty
    large: frozenset[str] = frozenset()  # sections whose text takes long to tokenize
    layout: SmokeLayout = SmokeLayout()  # of the processes
    left_out: Mapping[str, str] = {}  # kinds of parallelism that the layout does not have -> why


class NewValue(NamedTuple):
    """A key and its value in the smoke run, which may be that of the file."""

    key: str  # dotted, under its main name
    after: Any
    why: str = ""  # empty if the user need not know, for example of where the run writes
    before: Any = ...  # what stands for the file's value in messages; ...: that of the key


class Change(NamedTuple):
    """A key that gets another value in the smoke run."""

    key: str
    before: Any
    after: Any
    why: str


def changes_from(config: Config, values: Iterable[NewValue]) -> Iterator[Change]:
    """Yields the changes of the keys that have another value in the file.

    A size of the model that is not in the file has a default value, which is shown as not set.
    """
    for key, after, why, before in values:
        if before is ...:
            before = value_of(config, key)
            if before == after and type(before) is type(after):
                continue
            if key.startswith("model.") and not config.source.where(key):
                before = None
        yield Change(key, before, after, why)


def smoke_text(config: Config, changes: Iterable[Change]) -> str:
    """Returns the YAML text of the configuration with the changes."""
    plain = copy.deepcopy(plain_values(config))
    for change in changes:
        _set(plain, change.key.split("."), change.after)
    return dump_values(plain, f"{SMALL_COPY}\n")


def _set(tree: Any, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        if isinstance(tree, list):
            tree = tree[int(part)]
            continue
        if not isinstance(tree.get(part), dict | list):
            tree[part] = {}
        tree = tree[part]
    if isinstance(tree, list):
        tree[int(path[-1]) :] = [value, *tree[int(path[-1]) + 1 :]]
    else:
        tree[path[-1]] = value
