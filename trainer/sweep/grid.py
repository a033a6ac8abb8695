"""The settings of a sweep: ``--grid optimizer.eps=1e-8,1e-6 --grid seed=1,2`` are four runs.

A value is what a flag of a run takes: ``--grid optimizer.betas=[0.9,0.95],[0.9,0.99]`` has two.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import yaml

from trainer.cli.flags import split_arguments
from trainer.config.read.relocate import canonical_key
from trainer.errors import UserError

_MOST_RUNS = 1000
_LONGEST = 10_000
_LONGEST_NAME = 100
_WHERE = "flag --grid"
_SWEEP_FLAGS = ("config", "options", "output_dir", "resume_training", "run_mode")
_EXAMPLE = "write --grid optimizer.eps=1e-8,1e-6"


class Axis(NamedTuple):
    """A key and its values, as flags write them."""

    flag: str
    key: str  # under its own name and in its own place
    texts: tuple[str, ...]


class SweepPoint(NamedTuple):
    """One combination of values, which is one run of the sweep."""

    name: str  # of its folder
    flags: tuple[str, ...]


def read_axis(text: str) -> Axis:
    """Reads one ``--grid``.

    Raises:
        UserError: It has no key, an unknown one or one that is the sweep's, no value, or one of them twice.
    """
    flag, equals, listed = text.partition("=")
    flag = flag.strip().removeprefix("--")
    if not equals or not flag:
        raise UserError("is not key=value,value", where=_WHERE, value=text, fix=_EXAMPLE)
    if flag.replace("-", "_") in _SWEEP_FLAGS:
        fix = "choose another key; --output_dir is the folder of all runs"
        raise UserError("cannot be different in the runs of a sweep", where=_WHERE, key=flag, fix=fix)
    texts = _values(flag, listed)
    if len(set(texts)) < len(texts):
        twice = next(each for number, each in enumerate(texts) if each in texts[:number])
        raise UserError("is listed twice", where=_WHERE, key=flag, value=twice, fix="leave one out")
    overrides = split_arguments([f"--{flag}={texts[0]}"]).overrides  # an unknown flag is reported here
    return Axis(flag, canonical_key(overrides[0].key), texts)


def _values(flag: str, listed: str) -> tuple[str, ...]:
    """Returns the items of a list in YAML's flow style without its brackets, each as it is written."""
    text = f"[{listed}]"
    node = None
    try:
        if len(text) < _LONGEST:
            node = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        pass
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(text) or listed.rstrip().endswith(","):
        raise UserError("cannot be parsed as a list of values", where=_WHERE, key=flag, value=listed, fix=_EXAMPLE)
    texts = tuple(text[item.start_mark.index : item.end_mark.index].strip() for item in node.value)
    if not texts or not all(texts):
        raise UserError("has no value", where=_WHERE, key=flag, value=listed, fix=_EXAMPLE)
    return texts


def points(grids: Sequence[str], flag_keys: Sequence[str] = ()) -> list[SweepPoint]:
    """Returns every combination of the values; the values of the last key change first.

    Args:
        flag_keys: The keys that other flags set.

    Raises:
        UserError: A grid is wrong, a key occurs twice, there is no grid, or there are too many combinations.
    """
    axes = [read_axis(text) for text in grids]
    if not axes:
        raise UserError("a sweep needs a grid", key="--grid", fix=_EXAMPLE)
    for number, axis in enumerate(axes):
        if axis.key in [other.key for other in axes[:number]]:
            raise UserError("is given twice", where=_WHERE, key=axis.flag, fix="write all its values in one --grid")
        if axis.key in map(canonical_key, flag_keys):
            raise UserError("is given by a flag too", where=_WHERE, key=axis.flag, fix="leave one of the two out")
    runs = math.prod(len(axis.texts) for axis in axes)
    if runs > _MOST_RUNS:
        rule = f"the grid has {runs:,} combinations, and the limit is {_MOST_RUNS:,}"
        raise UserError(rule, where=_WHERE, fix="leave values out")
    short = [axis.flag.rpartition(".")[2] for axis in axes]
    labels = [last if short.count(last) == 1 else axis.flag for last, axis in zip(short, axes, strict=True)]
    combinations = []
    for texts in itertools.product(*(axis.texts for axis in axes)):
        name = point_folder_name(",".join(f"{label}={text}" for label, text in zip(labels, texts, strict=True)))
        flags = tuple(f"--{axis.flag}={text}" for axis, text in zip(axes, texts, strict=True))
        combinations.append(SweepPoint(name, flags))
    return combinations


def point_folder_name(name: str) -> str:
    """Returns a valid folder name for any file system that needs no quotes in a shell; different names stay different.
    """
    plain = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", name).rstrip("_")
    if plain == name and len(name) <= _LONGEST_NAME:
        return name
    return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
