"""Translates a tree of the newer schema. Every value keeps its line, so that later messages name it."""

from __future__ import annotations

from functools import cache
from typing import Any

from trainer.config.checks.problem import ConfigError, nearest, one_of, problem_at, unknown_key
from trainer.config.checks.unsupported import UnsupportedKey, ignored_texts, is_neutral
from trainer.config.checks.validation import unquoted
from trainer.config.location import SourceLocation
from trainer.config.note import Note
from trainer.config.pynative.table import ROWS, rows_without_effect
from trainer.config.pynative.translation import Translation
from trainer.config.read.nodes import Table, children, is_null, plain
from trainer.config.read.relocate import fields_at
from trainer.config.read.rows import Row
from trainer.config.schema.fields import aliases_of, yaml_names
from trainer.config.schema.optimizer import OptimizerConfig
from trainer.config.schema.root import Config, ModelSection

_KINDS = {
    "int": "an integer", "float": "a number", "bool": "true or false", "str": "a string", "list": "a list",
    "dict": "a section",
}  # fmt: skip


def is_pynative_key(key: str) -> bool:
    """Returns whether a dotted key of the command line belongs to the newer schema: ``training.steps``.

    The type of the optimizer, which both schemas have, is one: it says what its other keys mean in the file.
    """
    first, _, rest = key.partition(".")
    if key == "optimizer.type":
        return True
    if first in ("model", "recompute"):
        return bool(rest) and rest.split(".")[0] not in yaml_names(ModelSection)
    keys, sections = _keys()
    return key.startswith("train_dataset.dataloader") or (first in keys | sections and first not in yaml_names(Config))


@cache
def _keys() -> tuple[frozenset[str], frozenset[str]]:
    """Returns the keys of the newer schema, and its sections."""
    keys = frozenset(row.old for row in (*ROWS, *rows_without_effect()))
    sections = frozenset(key[:at] for key in keys for at, letter in enumerate(key) if letter == ".")
    sections -= {row.old for row in ROWS if row.kind == "dict"}
    return keys - sections, sections


def translate(name: str, root: Table) -> Translation:
    """Translates a file, which messages call `name`; the result has its problems."""
    work = Translation(name)
    _read(work, root, "")
    rows = [row for row in ROWS if row.old in _keys()[0]]
    for row in rows:
        work.values[row.old] = _checked(work, row)
    kind = work.values["optimizer.type"]
    if isinstance(kind, str):
        work.values["optimizer.type"] = OptimizerConfig.type_aliases.get(kind, kind)
    for row in rows:
        _apply(work, row)
    _note_unused(work)
    says = f"{name}: a file of MindSpore Transformers' newer schema: taken as its translation (`convert` writes it)"
    work.notes.insert(0, Note(says, "parallel"))
    return work


def _apply(work: Translation, row: Row) -> None:
    """Sets the target key of a row, if it applies."""
    is_in_section = not row.kind and row.old in work.entries
    is_wrong = row.old in work.wrong
    if is_in_section or is_wrong or not row.applies(lambda key: work.values.get(key, key in work.entries)):
        return
    value = work.values[row.old]
    if row.apply is not None:
        row.apply(work, row)
    elif row.new and value is not None:
        if row.transform is not None:
            value = row.transform.forward(value)
        if row.choices:
            value = row.choices[value]
        if value is not ...:
            work.set_key(row.new, value, row.old)
        if row.note:
            work.notes.append(Note(f"{row.old}: {row.note.format(value)}", "parallel"))


def _checked(work: Translation, row: Row) -> Any:
    """Returns the value of a source key, or its default if the file lacks it or has a value of another type."""
    if row.old not in work.entries:
        return row.default
    value = plain(work.entries[row.old].node)
    if isinstance(value, str) and row.choices:
        value = value.lower()
    if (row.accepts(value) and value in (row.choices or [value])) or (value is None and row.default is None):
        return value
    if row.choices:
        work.problem(row.old, f"must be {one_of(list(row.choices))}", f"write {next(iter(row.choices))}")
    else:
        texts = one_of([_KINDS[name] for name in row.kind.split("|")])
        work.problem(row.old, f"must be {texts}", _type_fix(row, value, texts))
    work.wrong.add(row.old)
    del work.entries[row.old]
    return row.default


def _type_fix(row: Row, value: Any, texts: str) -> str:
    """Returns what to write instead of a value of another type."""
    kinds = row.kind.split("|")
    if isinstance(value, str) and (bare := unquoted(value)) and {"int", "float", "bool"} & {*kinds}:
        return f"write {bare} without quotes"
    if kinds == ["str"] and row.old.startswith("lora_config.") and isinstance(value, list) and value:
        return f"write '{'|'.join(map(str, value))}', one regular expression"
    if row.kind == "dict":
        return f"write {row.old.rpartition('.')[2]}: and its keys indented below"
    if row.kind == "list":
        return "write a list, each item of which starts with '- '"
    fix = f"write {texts}"
    if isinstance(value, float) and value.is_integer() and row.kind == "int":
        fix = f"write {int(value)}"
    elif row.default not in (None, "", [], {}):
        fix += f", or leave it out: the default is {row.default}"
    return fix


def _note_unused(work: Translation) -> None:
    """Adds notes about keys without effect, and problems for those that would change the results."""
    ignored = []
    for row in rows_without_effect():
        if row.old not in work.entries:
            continue
        value = plain(work.entries[row.old].node)
        if is_neutral(value, row.default):
            continue
        if row.is_refused:
            work.problem(row.old, row.reason, "leave it out")
        else:
            ignored.append((UnsupportedKey(row.old, value, "ignored", row.reason), work.place(row.old).text, row.old))
    work.notes += [Note(text, "ignored") for text in ignored_texts(ignored)]


def _read(work: Translation, table: Table, path: str) -> None:
    """Collects the known keys in a section of the file; unknown ones become problems."""
    keys, sections = _keys()
    for name, entry in table.entries().items():
        key = f"{path}{name}"
        if key in sections and isinstance(entry.node, Table):
            work.entries[key] = entry
            _read(work, entry.node, f"{key}.")
        elif key in sections and not is_null(entry.node):
            fix = f"write {name}: and its keys indented below"
            work.problems.append(problem_at(entry.place, key, "must be a section", fix, plain(entry.node)))
        elif key in keys:
            work.entries[key] = entry
            for below, nested in children(entry.node):
                if f"{key}.{below}" in keys and not is_null(nested.node):
                    work.entries[f"{key}.{below}"] = nested
        elif key not in sections:
            work.problems.append(_unknown(path, name, entry.place))


def _unknown(path: str, name: str, place: SourceLocation) -> ConfigError:
    keys = sorted(_keys()[0])
    known = dict.fromkeys(key[len(path) :].split(".")[0] for key in keys if key.startswith(path))
    acting = dict.fromkeys(row.old[len(path) :].split(".")[0] for row in ROWS if row.old.startswith(path))
    homes = [f"write it in its section: {key}" for key in keys if key.endswith(f".{name}")]
    guess = nearest(name, list(known))
    if renamed := _older_names().get(name):
        homes.append(f"this schema has {renamed} for it")
    return unknown_key(place, path.rstrip("."), name, guess, next(iter(homes), ""), list(acting or known))


@cache
def _older_names() -> dict[str, str]:
    """Returns the names of keys in this trainer's schema, where they differ -> the keys of the newer schema."""
    names = {}
    for row in reversed([row for row in ROWS if row.new]):
        for place in (row.new, *(alias for field in fields_at(row.new) for alias in aliases_of(field))):
            names[place.rpartition(".")[2]] = row.old
    return {name: key for name, key in names.items() if name != key.rpartition(".")[2]}
