"""Walks a tree along the schema: aliases get main names, ``type`` selects a section, unknown keys are problems."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from trainer.config.checks.problem import NO_VALUE, ConfigError, nearest, one_of, problem_at, unknown_key
from trainer.config.location import NO_LOCATION, SourceLocation
from trainer.config.note import Note
from trainer.config.other_models import DEEPSEEK_V4_KEYS, NOT_BUILT, effect_of, is_known_effect, parts_rule
from trainer.config.read.nodes import Entry, Items, Scalar, Table, is_null, look_up, plain
from trainer.config.read.relocate import fields_at, merge_entries
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
"""The largest number of sections that a message names for a key in the wrong section."""
_GUESSED = 100
"""The number of unknown keys for which the nearest name is searched, which takes milliseconds each."""
_ELSEWHERE = {
    "tensor_parallel": "model_parallel", "tensor_model_parallel_size": "model_parallel",
    "pipeline_parallel": "pipeline_stage", "pipeline_model_parallel_size": "pipeline_stage",
    "context_parallel_size": "context_parallel", "expert_model_parallel_size": "expert_parallel",
    "sequence_parallel": "use_seq_parallel", "lr": "learning_rate", "min_lr": "lr_end",
    "lr_warmup_steps": "warmup_steps", "num_train_epochs": "epochs", "train_iters": "max_steps",
    "micro_batch_size": "batch_size", "per_device_train_batch_size": "batch_size", "seq_len": "seq_length",
    "clip_grad": "max_grad_norm", "bf16": "compute_dtype",
}  # fmt: skip
"""Names of keys in the newer schema, Megatron-LM, Hugging Face and others -> their names here."""

_ABSENT = object()


@dataclass
class Resolved:
    """Plain values under their main names, with their locations, problems and notes."""

    data: dict[str, Any] = field(default_factory=dict)
    positions: dict[str, SourceLocation] = field(default_factory=dict)
    problems: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    foreign: list[_Path] = field(default_factory=list)
    """Keys of DeepSeek-V4 that are set."""
    places: Collection[str] = ()
    """See `resolve`."""

    def value(self, key: str) -> Any:
        """Returns the value of a dotted key; None if there is none."""
        return look_up(self.data, key)

    def section(self, key: str) -> dict[str, Any]:
        """Returns the values of a section; an empty dictionary if it is absent or not a section."""
        values = self.value(key)
        if isinstance(values, dict):
            return values
        return {}

    def name_in_file(self, key: str) -> str:
        """Returns the name of a key in its section of the file; empty if the file does not have it."""
        if key not in self.positions:
            return ""
        return self.positions[key].key.rpartition(".")[2]


@dataclass(frozen=True)
class _Path:
    """The path of a value: its dotted key here, and where the file writes it."""

    key: str
    place: SourceLocation
    is_in_alias: bool = False
    """Whether the value belongs to an alias: its node is written elsewhere, under another key."""

    def child(self, name: str, written_name: str, entry: Entry) -> _Path:
        """Returns the path of an entry of this section, whose key in the file is `written_name`."""
        place = entry.place
        if self.is_in_alias or (entry.is_alias and not place.key):
            place = place._replace(key=f"{self.place.key}.{written_name}".lstrip("."))
        return _Path(f"{self.key}.{name}".lstrip("."), place, self.is_in_alias or entry.is_alias)

    def problem(self, rule: str, fix: str, value: Any = NO_VALUE) -> ConfigError:
        """Makes the error for this value."""
        return problem_at(self.place, self.place.key or self.key, rule, fix, value)


def resolve(root: Table, places: Collection[str] = ()) -> Resolved:
    """Converts a tree into plain values, which are validated against the schema later.

    Args:
        places: The places here of the keys that the schema of the file has; empty: it has all keys.
    """
    resolved = Resolved(places=places)
    resolved.data = _section(root, Config, _Path("", NO_LOCATION), resolved)
    is_named = resolved.value("model.model_config.model_type") == "deepseek_v4"
    if resolved.foreign and (not is_named or resolved.value("model.arch.type")):  # otherwise an error names the family
        rule = parts_rule([path.place.key.rpartition(".")[2] for path in resolved.foreign])
        resolved.problems.append(resolved.foreign[0].problem(rule, NOT_BUILT))
    return resolved


def _section(table: Table, section: type[Section], path: _Path, resolved: Resolved) -> dict[str, Any]:
    names = yaml_names(section)
    chosen: dict[str, Entry] = {}
    paths: dict[str, _Path] = {}
    for name, entry in table.entries().items():
        below = path.child(names.get(name, name), name, entry)
        if name not in names and path.key == "model.model_config" and is_known_effect(name):
            if effect := effect_of(name, plain(table)):
                rule = f"not yet supported: {effect}"
                resolved.problems.append(below.problem(rule, NOT_BUILT, plain(entry.node)))
        elif name not in names and path.key == "model.model_config" and name in DEEPSEEK_V4_KEYS:
            if plain(entry.node) not in (None, False, 0):
                resolved.foreign.append(below)
        elif name not in names:
            resolved.problems.append(_unknown(name, section, path, below, resolved))
        elif names[name] not in chosen:
            chosen[names[name]] = entry
            paths[names[name]] = below
        else:
            chosen[names[name]] = _merged(below.key, chosen[names[name]], entry, resolved)
    fields = fields_by_yaml_name(section)
    data = {}
    for name, entry in chosen.items():
        resolved.positions[paths[name].key] = paths[name].place
        value = _value(entry, fields[name], paths[name], resolved)
        if value is not _ABSENT:
            data[name] = value
    return data


def _merged(key: str, first: Entry, second: Entry, resolved: Resolved) -> Entry:
    """Returns one entry for two names of a key, and adds a problem if they differ."""
    try:
        return Entry(merge_entries(first, second, key), first.place)
    except UserError as error:
        later = max(first.place, second.place, key=lambda place: place.order)
        resolved.problems.append(ConfigError(later, error))
        return first


def _unknown(name: str, section: type[Section], path: _Path, below: _Path, resolved: Resolved) -> ConfigError:
    """Returns the problem of an unknown key, with the key that was probably meant or the sections that have it."""
    names = yaml_names(section)
    ours = _ELSEWHERE.get(name, name)
    guess = ""
    if ours in names:
        guess = ours
    elif len(resolved.problems) <= _GUESSED:
        guess = nearest(name, list(names))
    elsewhere = [other for other in sections_with(ours) if other != re.sub(r"\.\d+(?=\.|$)", ".N", path.key)]
    if resolved.places:
        elsewhere = [other for other in elsewhere if _is_below(f"{other}.{ours}", resolved.places)]
    homes = ""
    if elsewhere and guess != ours:
        homes = f"write it in its section: {in_sections(ours, elsewhere)}"
    elif path.key and name in yaml_names(Config) and not resolved.places:
        homes = f"write {name} at the top level"
    elif "." in name and fields_at(below.key):
        homes = "write its section, and the rest of its name below"
    acting = [key for key, info in fields_by_yaml_name(section).items() if support_of(info)[0] == "supported"]
    written = below.place.key or below.key
    written_section, _, written_name = written.rpartition(".")
    if "." in name and written.endswith(name):  # a flag may have dots, a key of a file may not
        written_section = written.removesuffix(name).rstrip(".")
        written_name = name
    return unknown_key(below.place, written_section, written_name, guess, homes, acting)


def _is_below(key: str, places: Collection[str]) -> bool:
    """Returns whether a key is one of these places, or in a section among them, but not in an item of a list."""
    return ".N." not in key and any(f"{key}.".startswith(f"{place}.") for place in places)


def sections_with(name: str) -> list[str]:
    """Returns the sections that have a key of this name, at most three: ``runner_config`` for ``epochs``.

    Only sections where the key acts are returned, if there are any. An item of a list is ``callbacks.N``.
    """
    acts: dict[str, bool] = {}
    for path, info, _ in _keys_by_name().get(name, ()):
        acts[path] = acts.get(path, False) or support_of(info)[0] == "supported"
    acting = [path for path, is_supported in acts.items() if is_supported]
    # In MindSpore Transformers, optimizer.learning_rate is only another place of the schedule's learning rate.
    if "lr_schedule" in acting and "optimizer" in acting:
        acting = ["lr_schedule"]
    return sorted(acting or acts, key=lambda path: path.count("."))[:_SUGGESTED]


def key_names() -> list[str]:
    """Returns the names of all keys below the top level that act."""
    keys = _keys_by_name().items()
    return [name for name, places in keys if any(support_of(info)[0] == "supported" for _, info, _ in places)]


def in_sections(name: str, sections: Sequence[str], prefix: str = "") -> str:
    """Names a key in each of these sections, for a message: ``callbacks.N.keep_best``, and which item N is."""
    text = one_of([f"{prefix}{section}.{name}" for section in sections])
    items = [item for path, _, item in _keys_by_name()[name] if path in sections and ".N" in path]
    types = [types_of(item)[0] for item in items if "type" in item.model_fields and item.support == "supported"]
    if types:
        return f"{text}, where N is the place of {one_of(types)} in the list, from 0"
    return text


@cache
def _keys_by_name() -> dict[str, list[tuple[str, FieldInfo, type[Section]]]]:
    """Returns, for each name of a key below the top level, the paths of its sections, its declarations and sections."""
    keys: dict[str, list[tuple[str, FieldInfo, type[Section]]]] = {}

    def walk(section: type[Section], path: str) -> None:
        """Collects the keys of a section and of the sections in it."""
        for main, info in fields_by_yaml_name(section).items():
            if path:
                for name in (main, *aliases_of(info)):
                    keys.setdefault(name, []).append((path, info, section))
            shape = shape_of(info)
            below = f"{path}.{main}".lstrip(".")
            if shape.is_list:
                below += ".N"
            for nested in shape.kinds:
                walk(nested, below)

    walk(Config, "")
    keys.pop("type", None)
    return keys


def _value(entry: Entry, info: FieldInfo, path: _Path, resolved: Resolved) -> Any:
    """Returns the value of a key; `_ABSENT` for an empty section, or a wrong one, which is a problem then."""
    shape = shape_of(info)
    node = entry.node
    items: list[tuple[Entry, _Path]] = []
    if isinstance(node, Items):
        items = [(item, path.child(str(number), str(number), item)) for number, item in enumerate(node.entries)]
    if not shape.kinds:
        resolved.positions |= {below.key: below.place for _, below in items}
        return plain(node)
    if is_null(node):
        if shape.nullable:
            return None
        return _ABSENT
    if shape.is_list and isinstance(node, Items):
        return [_item(item, shape.kinds, below, resolved) for item, below in items]
    if isinstance(node, Table) and not shape.is_list:
        return _typed_section(node, shape.kinds, path, resolved)
    if shape.is_list:
        rule = "must be a list"
        fix = "start each item with '- '"
    elif any(not issubclass(kind, Section) for kind in scalar_kinds(info)):  # a plain value is allowed: scale_sense
        return plain(node)
    else:
        rule = "must be a section"
        fix = f"write {(path.place.key or path.key).split('.')[-1]}: and its keys indented below"
    resolved.problems.append(path.problem(rule, fix, plain(node)))
    return _ABSENT


def _item(entry: Entry, kinds: tuple[type[Section], ...], path: _Path, resolved: Resolved) -> Any:
    resolved.positions[path.key] = path.place
    if isinstance(entry.node, Table):
        value = _typed_section(entry.node, kinds, path, resolved)
        if value is _ABSENT:
            return {}
        return value
    fix = "write '- type: ...' and its keys below"
    resolved.problems.append(path.problem("must be a section", fix, plain(entry.node)))
    return {}


def _typed_section(table: Table, kinds: tuple[type[Section], ...], path: _Path, resolved: Resolved) -> Any:
    """Resolves a section; if there are several classes for it, its ``type`` selects one."""
    entries = table.entries()
    type_path = path
    name: Any = kinds[0].default_type
    if "type" in entries:
        type_path = path.child("type", "type", entries["type"])
        name = plain(entries["type"].node)
    other_names = {other: main for kind in kinds for other, main in kind.type_aliases.items()}
    if isinstance(name, str) and name in other_names:
        text = f"{type_path.place.text}: {type_path.place.key} {name} is taken as {other_names[name]}"
        resolved.notes.append(Note(text, "ignored"))
        name = other_names[name]
        table = Table({**entries, "type": Entry(Scalar(name), type_path.place)})
    if len(kinds) == 1:
        return _section(table, kinds[0], path, resolved)
    by_type = {name: kind for kind in kinds for name in types_of(kind)}
    if isinstance(name, str) and name in by_type:
        return {"type": name, **_section(table, by_type[name], path, resolved)}
    guess = nearest(str(name or ""), [*by_type, *other_names])
    fix = "write one of these"
    if guess:
        fix = f"you probably mean {guess}"
    if "type" in entries and name is not None:
        rule = f"unknown type, which must be {one_of(list(by_type))}"
        resolved.problems.append(type_path.problem(rule, fix, name))
    else:
        rule = f"the key type is missing; it must be {one_of(list(by_type))}"
        resolved.problems.append(path.problem(rule, fix))
    return _ABSENT
