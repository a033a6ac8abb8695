"""Applies overrides from the command line: ``--options a.b=c``, named flags and ``--a.b.0.c value``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from trainer.config.checks.problem import ConfigError
from trainer.config.location import SourceLocation
from trainer.config.read.nodes import (
    Entry,
    Items,
    Node,
    Scalar,
    Table,
    children,
    expanded_size,
    is_null,
    plain,
    writable_node,
)
from trainer.config.read.relocate import canonical_key, default_node, fields_at, remove_key
from trainer.config.read.yaml_reader import MAX_LEVELS, MAX_VALUES, TooLarge, check_size, parse_value
from trainer.config.schema.fields import (
    Section,
    Shape,
    aliases_of,
    fields_by_yaml_name,
    scalar_kinds,
    shape_of,
    types_of,
)
from trainer.config.schema.root import Config
from trainer.errors import UserError, shorten_repr

_OPTIONS = "--options"
_AFTER_FILE = 1_000_000  # the order of the first override among places: behind all lines of a file
_LONGEST_KEY = 1000


@dataclass(frozen=True)
class Override:
    """One value from the command line.

    Args:
        key: Dotted key; lists are addressed by index: ``callbacks.0.save_checkpoint_steps``.
        text: The value as typed, parsed as YAML: ``1e-4``, ``True``, ``None``, ``[0.9, 0.95]``.
        source: Its name in messages: ``flag --seed``, ``--options``.
        only_if_present: Whether it is ignored if the file has no such section.
        texts: Strings to use instead of parsing ``text``: one is a string, several are a list.
    """

    key: str
    text: str
    source: str = _OPTIONS
    only_if_present: bool = False
    texts: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """Returns one word of a command line with the same meaning."""
        text = self.text
        if self.texts:
            text = json.dumps(self.texts, ensure_ascii=False)  # YAML has no surrogate pairs
        if self.texts or self.source == _OPTIONS:
            return f"{_OPTIONS}={self.key}={text}"  # a flag of the same name may take its values as they are typed
        return f"--{self.key}={text}"


def apply_overrides(root: Table, overrides: Sequence[Override]) -> tuple[list[ConfigError], list[str]]:
    """Sets every override in the tree, in order, so that the last one wins.

    Returns:
        The errors (a list without such an index, a value instead of a section), and notes.

    Raises:
        TooLarge: The overrides, or the tree with them, have too many values: a list may replace many aliases.
    """
    problems: list[ConfigError] = []
    notes: list[str] = []
    remaining = MAX_VALUES
    for number, override in enumerate(overrides):
        place = SourceLocation(_AFTER_FILE + number, override.source, override.key)
        try:
            _check_key(override, place)
            value = _parse(override, place, remaining)
            remaining -= expanded_size(value.node)[0]
            notes += _apply(root, override, place, value)
            if not isinstance(value.node, Scalar):
                check_size(*expanded_size(root), place)
        except TooLarge:
            raise
        except UserError as error:
            problems.append(ConfigError(place, error))
    return problems, notes


def _check_key(override: Override, place: SourceLocation) -> None:
    if len(override.key) > _LONGEST_KEY or override.key.count(".") >= MAX_LEVELS:
        rule = f"is longer than a key of a file can be: {_LONGEST_KEY} characters in {MAX_LEVELS} levels"
        raise UserError(rule, where=place.text, key=shorten_repr(override.key), fix="correct the key")
    if not all(override.key.split(".")):
        fix = "write section.key, as in runner_config.epochs"
        raise UserError("is not a dotted key", where=place.text, key=override.key, fix=fix)


def _apply(root: Table, override: Override, place: SourceLocation, value: Entry) -> list[str]:
    """Sets one override in the tree, and makes the sections on its way that are absent; returns notes."""
    keys = canonical_key(override.key).split(".")
    if override.only_if_present:
        entries = root.entries()
        if keys[0] not in entries or is_null(entries[keys[0]].node):
            return []
    if is_null(value.node) and not override.texts and _remove(root, keys):
        return []
    entry = Entry(root)
    shape = Shape((Config,), is_list=False, nullable=False)
    path_keys: list[str] = []
    for depth, key in enumerate(keys):
        node = writable_node(entry)
        path = ".".join(keys[:depth])
        if is_null(node):
            if shape.is_list:
                node = Items()
            else:
                node = Table()
            entry.node = node
        if isinstance(node, Items):
            if not key.isdecimal() or int(key) >= len(node.entries):
                rule = f"{path} is a list without item {key!r} (valid: {_valid_indices(len(node.entries))})"
                fix = "use a valid index, or give the whole list as [...]"
                if not node.entries and (item := _first_item(shape, keys[depth + 1 :], override)):
                    fix = f"write the list, for example --{path} '[{item}]'"
                raise UserError(rule, where=place.text, key=override.key, fix=fix)
            key = str(int(key))
            entry = node.entries[int(key)]
        elif isinstance(node, Table):
            key, entry, shape = _child(node, key, shape.kinds, place)
        else:
            rule = f"is a value ({shorten_repr(plain(node))}), it has no key {key}"
            raise UserError(rule, where=place.text, key=path, fix=f"set {path} itself")
        path_keys.append(key)
    return _set(root, ".".join(path_keys), entry, value)


def _first_item(shape: Shape, keys: Sequence[str], override: Override) -> str:
    """Returns an item of a list that has the key of an override, as YAML; empty if no single type of item has it."""
    kinds = [kind for kind in shape.kinds if kind.support == "supported"]
    kinds = [kind for kind in kinds if len(keys) == 1 and keys[0] in fields_by_yaml_name(kind)]
    if len(kinds) != 1:
        return ""
    item = f"{keys[0]}: {override.text}"
    if "type" in kinds[0].model_fields:
        item = f"type: {types_of(kinds[0])[0]}, {item}"
    return f"{{{item}}}"


def _valid_indices(count: int) -> str:
    if count == 0:
        return "the list is empty"
    if count == 1:
        return "only index 0"
    return f"0 to {count - 1}"


def _remove(root: Table, keys: list[str]) -> bool:
    """Removes a key of the file, under any of its names, because an override sets it to null.

    Returns:
        Whether the key was removed: not if null is one of its values, or if the file has no such key.
    """
    fields = fields_at(".".join(keys))
    if any(shape_of(field).nullable for field in fields):
        return False  # a later message can name the flag
    entry = Entry(root)
    for key in keys[:-1]:
        section = writable_node(entry)
        entries = dict(children(section))
        if key not in entries:
            return False
        entry = entries[key]
        if isinstance(section, Table):
            section.explicit[key] = entry
    table = writable_node(entry)
    if not isinstance(table, Table):
        return False
    names = {keys[-1], *(name for field in fields for name in aliases_of(field))}
    present = [name for name in names if name in table.entries()]
    for name in present:
        remove_key(table, name)
    return bool(present)


def _parse(override: Override, place: SourceLocation, most: int) -> Entry:
    """Parses the value as YAML; for a key that can only be a string, a number stays the text that was typed."""
    if override.texts:
        entries = [Entry(Scalar(text), place) for text in override.texts]
        if len(entries) == 1:
            return entries[0]
        return Entry(Items(entries), place)
    fields = list(fields_at(override.key))
    kinds = {kind for field in fields for kind in scalar_kinds(field)}
    if not override.text and _needs_value(fields):
        return Entry(Scalar(""), place)  # null would remove the key of the file; a message names the flag and the rule
    value = parse_value(override.text, place, override.key, most)
    is_text = isinstance(value.node, Scalar) and isinstance(value.node.value, (bool, int, float))
    if str in kinds <= {str, list} and is_text:
        return Entry(Scalar(override.text), place)
    return value


def _needs_value(fields: Sequence[FieldInfo]) -> bool:
    """Returns whether no declaration of a key allows text, null, a list or a section: numbers, switches and names."""
    plain_kinds = {bool, int, float}
    allowed = {kind for field in fields for kind in scalar_kinds(field, listed=False)}
    has_values = any(scalar_kinds(field) for field in fields)
    return has_values and allowed <= plain_kinds and not any(shape_of(field).nullable for field in fields)


def is_boolean(key: str) -> bool:
    """Returns whether a dotted key can only be True or False, or one of a few words."""
    return {kind for field in fields_at(key) for kind in scalar_kinds(field, listed=False)} == {bool}


def _child(node: Table, key: str, kinds: tuple[type[Section], ...], place: SourceLocation) -> tuple[str, Entry, Shape]:
    """Returns the name that the file uses for a key, its entry (created if absent) and its shape."""
    names = [key]
    shape = Shape((), is_list=False, nullable=True)
    absent = Scalar(None)
    for main, field in (item for kind in kinds for item in fields_by_yaml_name(kind).items()):
        if key in (main, *aliases_of(field)):
            names += [main, *aliases_of(field)]
            shape = shape_of(field)
            absent = default_node(field)
    entries = node.entries()
    present = [name for name in dict.fromkeys(names) if name in entries]
    for name in present[1:]:
        node.explicit.pop(name, None)
    name = next(iter(present), key)
    entry = entries.get(name, Entry(absent, place._replace(key="")))
    return name, node.explicit.setdefault(name, entry), shape


def _set(root: Table, key: str, entry: Entry, value: Entry) -> list[str]:
    """Replaces an entry's value, and that of its aliases if it is an anchor; returns notes about these aliases."""
    old = entry.node
    if entry.is_alias:
        uses = []
    else:
        uses = [(path, other) for path, other in _uses(root, "") if other.node is old]
    entry.is_alias = False
    # Where a whole section has aliases, an entry has several paths: it gets the first, or that of the override.
    for path, other in [*reversed(uses), (key, entry)]:
        other.node = value.node
        other.place = value.place._replace(key=path)
    followers = [path for path, _ in uses if path != key]
    if followers:
        return [f"{value.place.text}: {key} is anchored, {', '.join(followers)} follows"]
    return []


def _uses(node: Node, path: str) -> Iterator[tuple[str, Entry]]:
    """Yields every entry below a node with its dotted path; a node that is used twice is visited twice."""
    for name, entry in children(node):
        yield f"{path}{name}", entry
        yield from _uses(entry.node, f"{path}{name}.")
