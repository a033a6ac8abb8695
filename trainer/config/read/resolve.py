"""Walks a tree along the schema: main names for aliases, a section for each ``type``, unknown keys are problems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from trainer.config.checks.problem import ConfigError, nearest, one_of, problem_at
from trainer.config.location import SourceLocation
from trainer.config.note import Note
from trainer.config.other_models import NOT_BUILT, effect_of, is_known_effect
from trainer.config.read.nodes import Entry, Items, Scalar, Table, is_null, plain
from trainer.config.read.relocate import disagreement, merge
from trainer.config.schema.fields import (
    Section,
    aliases_of,
    fields_by_yaml_name,
    scalar_kinds,
    shape_of,
    support_of,
    types_of,
    yaml_names,
)
from trainer.config.schema.root import Config
from trainer.errors import UserError

_SUGGESTED = 3
"""At most so many sections are named for a key that stands in the wrong place."""
_LISTED = 15
"""A section with at most so many keys has them listed when an unknown one resembles none."""
_GUESSED = 100
"""For so many unknown keys of a file the nearest name is sought, which takes milliseconds each."""
_ELSEWHERE = {
    "tensor_parallel": "model_parallel", "tensor_model_parallel_size": "model_parallel",
    "pipeline_parallel": "pipeline_stage", "pipeline_model_parallel_size": "pipeline_stage",
    "context_parallel_size": "context_parallel", "expert_model_parallel_size": "expert_parallel",
    "sequence_parallel": "use_seq_parallel",
}  # fmt: skip
"""What the newer schema, Megatron-LM and others call a key."""


_ABSENT = object()


@dataclass
class Resolved:
    """Plain values under their main names, and what was met on the way."""

    data: dict[str, Any] = field(default_factory=dict)
    positions: dict[str, SourceLocation] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    """Dotted keys as they were written, for those that were not under their main name."""
    problems: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def resolve(root: Table) -> Resolved:
    """Turns a tree into the values that the schema is then validated with."""
    resolved = Resolved()
    resolved.data = _section(root, Config, "", resolved)
    return resolved


def _section(table: Table, kind: type[Section], path: str, resolved: Resolved) -> dict[str, Any]:
    names = yaml_names(kind)
    chosen: dict[str, Entry] = {}
    for name, entry in table.entries().items():
        if name not in names and path == "model.model_config." and is_known_effect(name):
            if what := effect_of(name, plain(table)):
                rule = f"not yet supported: {what}"
                resolved.problems.append(problem_at(entry.place, f"{path}{name}", rule, NOT_BUILT, plain(entry.node)))
        elif name not in names:
            resolved.problems.append(_unknown(name, kind, path, entry.place, resolved))
        elif names[name] not in chosen:
            chosen[names[name]] = entry
            if name != names[name]:
                resolved.written[f"{path}{names[name]}"] = f"{path}{name}"
        else:
            chosen[names[name]] = _same(f"{path}{names[name]}", chosen[names[name]], entry, resolved)
    fields = fields_by_yaml_name(kind)
    data = {}
    for name, entry in chosen.items():
        resolved.positions[f"{path}{name}"] = entry.place
        value = _value(entry, fields[name], f"{path}{name}", resolved)
        if value is not _ABSENT:
            data[name] = value
    return data


def _same(key: str, first: Entry, second: Entry, resolved: Resolved) -> Entry:
    """One entry for two names of one key; a problem when they differ."""
    try:
        return Entry(merge(first, second, key), first.place)
    except UserError:
        resolved.problems.append(ConfigError(max(first.place, second.place), disagreement(key, first, second)))
        return first


def _unknown(name: str, kind: type[Section], path: str, place: SourceLocation, resolved: Resolved) -> ConfigError:
    is_one_of_many = len(resolved.problems) > _GUESSED
    if is_one_of_many:
        guess = ""
    else:
        guess = nearest(name, list(yaml_names(kind)))
    if (same := _ELSEWHERE.get(name)) in yaml_names(kind):
        guess = same
    homes = [home for home in sections_with(name) if f"{home}." != re.sub(r"\.\d+\.", ".N.", path)]
    if homes and guess.lower() != name.lower():
        fix = f"write it in its section: {in_sections(name, homes)}"
    elif path and name in yaml_names(Config):
        fix = f"write {name} at the top level"
    elif guess:
        fix = f"you probably mean {path}{guess}"
    else:
        known = [key for key, info in fields_by_yaml_name(kind).items() if support_of(info)[0] == "supported"]
        listed = f"the keys here are {', '.join(known)}"
        fix = f"remove it; {listed if len(known) <= _LISTED else '`run_trainer.py schema` lists all'}"
    rule = "unknown key at the top level"
    if path:
        rule = f"unknown key in {path.rstrip('.')}"
    return problem_at(place, f"{path}{name}", rule, fix)._replace(is_extra=not (homes or guess or is_one_of_many))


def sections_with(name: str) -> list[str]:
    """The few sections that have a key of this name: ``runner_config`` for ``epochs``; those where it acts first. An
    item of a list is ``callbacks.N``."""
    homes: dict[str, bool] = {}
    for path, info, _ in _keys_by_name().get(name, ()):
        homes[path] = homes.get(path, False) or support_of(info)[0] == "supported"
    acting = [path for path, acts in homes.items() if acts]
    # optimizer.learning_rate is only MindSpore Transformers' second place for the schedule's.
    if "lr_schedule" in acting and "optimizer" in acting:
        acting = ["lr_schedule"]
    return sorted(acting or homes, key=lambda path: path.count("."))[:_SUGGESTED]


def key_names() -> list[str]:
    """Returns every name of a key below the top level that acts."""
    keys = _keys_by_name().items()
    return [name for name, places in keys if any(support_of(info)[0] == "supported" for _, info, _ in places)]


def in_sections(name: str, homes: Sequence[str], prefix: str = "") -> str:
    """A key in each of these sections, in words: ``callbacks.N.keep_best``, and which item of the list N is."""
    text = one_of([f"{prefix}{home}.{name}" for home in homes])
    sections = [kind for path, _, kind in _keys_by_name()[name] if path in homes and ".N" in path]
    kinds = [types_of(kind)[0] for kind in sections if "type" in kind.model_fields and kind.support == "supported"]
    if kinds:
        return f"{text}, where N is the place of {one_of(kinds)} in the list, from 0"
    return text


@cache
def _keys_by_name() -> dict[str, list[tuple[str, FieldInfo, type[Section]]]]:
    """For each name of a key below the top level: where the sections with such a key are, its declaration there, and
    the section."""
    found: dict[str, list[tuple[str, FieldInfo, type[Section]]]] = {}

    def walk(kind: type[Section], path: tuple[str, ...]) -> None:
        for main, info in fields_by_yaml_name(kind).items():
            for name in (main, *aliases_of(info)) if path else ():
                found.setdefault(name, []).append((".".join(path), info, kind))
            shape = shape_of(info)
            for each in shape.kinds:
                walk(each, (*path, main, *(["N"] if shape.is_list else [])))

    walk(Config, ())
    found.pop("type", None)
    return found


def _value(entry: Entry, info: FieldInfo, path: str, resolved: Resolved) -> Any:
    """The value of a key; `_ABSENT` where its section is empty, or wrong, which is a problem then."""
    shape = shape_of(info)
    node = entry.node
    if not shape.kinds:
        if isinstance(node, Items):
            resolved.positions |= {f"{path}.{number}": item.place for number, item in enumerate(node.entries)}
        return plain(node)
    if is_null(node):
        if shape.nullable:
            return None
        return _ABSENT
    if shape.is_list and isinstance(node, Items):
        return [_item(item, shape.kinds, f"{path}.{number}", resolved) for number, item in enumerate(node.entries)]
    if isinstance(node, Table) and not shape.is_list:
        return _one(entry, node, shape.kinds, path, resolved)
    if shape.is_list:
        rule = "must be a list"
        fix = "start each item with '- '"
    elif any(not issubclass(kind, Section) for kind in scalar_kinds(info)):  # or a plain value, such as scale_sense
        return plain(node)
    else:
        rule = "must be a section"
        fix = f"write {path.split('.')[-1]}: and its keys indented below"
    resolved.problems.append(problem_at(entry.place, path, rule, fix, plain(node)))
    return _ABSENT


def _item(entry: Entry, kinds: tuple[type[Section], ...], path: str, resolved: Resolved) -> Any:
    resolved.positions[path] = entry.place
    if isinstance(entry.node, Table):
        value = _one(entry, entry.node, kinds, path, resolved)
        if value is _ABSENT:
            return {}
        return value
    fix = "write '- type: ...' and its keys below"
    resolved.problems.append(problem_at(entry.place, path, "must be a section", fix, plain(entry.node)))
    return {}


def _one(entry: Entry, table: Table, kinds: tuple[type[Section], ...], path: str, resolved: Resolved) -> Any:
    """Resolves a section of one or several kinds; the latter are told apart by ``type``."""
    entries = table.entries()
    if "type" in entries:
        place = entries["type"].place
        name = plain(entries["type"].node)
    else:
        place = entry.place
        name = kinds[0].default_type
    other_names = {other: main for kind in kinds for other, main in kind.type_aliases.items()}
    if isinstance(name, str) and name in other_names:
        text = f"{place.text}: {path}.type {name} is taken as {other_names[name]}"
        resolved.notes.append(Note(text, "ignored"))
        name = other_names[name]
        table = Table({**entries, "type": Entry(Scalar(name), place)})
    if len(kinds) == 1:
        return _section(table, kinds[0], f"{path}.", resolved)
    by_type = {name: kind for kind in kinds for name in types_of(kind)}
    if isinstance(name, str) and name in by_type:
        return {"type": name, **_section(table, by_type[name], f"{path}.", resolved)}
    guess = nearest(str(name or ""), list(by_type))
    fix = "write one of these"
    if guess:
        fix = f"you probably mean {guess}"
    if name:
        rule = f"unknown type, which must be {one_of(list(by_type))}"
        resolved.problems.append(problem_at(place, f"{path}.type", rule, fix, name))
    else:
        rule = f"the key type is missing, which must be {one_of(list(by_type))}"
        resolved.problems.append(problem_at(entry.place, path, rule, fix))
    return _ABSENT
