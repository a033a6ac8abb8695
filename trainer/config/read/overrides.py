"""Overrides from the command line: ``--options a.b=c``, named flags and ``--a.b.0.c value``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from trainer.config.checks.problem import ConfigError
from trainer.config.location import SourceLocation
from trainer.config.read.nodes import Entry, Items, Node, Scalar, Table, children, expanded, is_null, own_node, plain
from trainer.config.read.relocate import canonical_key, fields_at
from trainer.config.read.yaml_reader import MAX_LEVELS, MAX_VALUES, TooLarge, check_size, parse_value
from trainer.config.schema.fields import Section, Shape, aliases_of, fields_by_yaml_name, scalar_kinds, shape_of
from trainer.config.schema.root import Config
from trainer.errors import UserError, shorten_repr

_AFTER_FILE = 1_000_000
_LONGEST_KEY = 1000


@dataclass(frozen=True)
class Override:
    """One value from the command line.

    Args:
        key: Dotted key; lists are addressed by index: ``callbacks.0.save_checkpoint_steps``.
        text: The value as typed, parsed as YAML: ``1e-4``, ``True``, ``None``, ``[0.9, 0.95]``.
        source: How messages call it: ``flag --seed``, ``--options``.
        only_if_present: Left out when the section that would hold it is absent.
        texts: Taken as they are instead of parsing ``text``: one is a string, several are a list.
    """

    key: str
    text: str
    source: str = "--options"
    only_if_present: bool = False
    texts: tuple[str, ...] = ()


def apply_overrides(root: Table, overrides: Sequence[Override]) -> tuple[list[ConfigError], list[str]]:
    """Sets every override in the tree, in order, so that the last one wins.

    Returns:
        What is wrong with them (lists without such an index, values where a section is needed), and notes.

    Raises:
        TooLarge: The values of all overrides are too many, or those of the tree with them: the list of an override can
            stand in the place of many aliases.
    """
    problems: list[ConfigError] = []
    notes: list[str] = []
    most = MAX_VALUES
    for number, override in enumerate(overrides):
        place = SourceLocation(_AFTER_FILE + number, override.source)
        try:
            _check_key(override, place)
            value = _parsed(override, place, most)
            most -= expanded(value.node)[0]
            notes += _apply(root, override, place, value)
            if not isinstance(value.node, Scalar):
                check_size(*expanded(root), place)
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
    keys = canonical_key(override.key).split(".")
    if override.only_if_present:
        entries = root.entries()
        if keys[0] not in entries or is_null(entries[keys[0]].node):
            return []
    if is_null(value.node) and not override.texts and _removed(root, keys):
        return []
    entry = Entry(root)
    shape = Shape((Config,), is_list=False, nullable=False)
    written: list[str] = []
    for depth, key in enumerate(keys):
        node = own_node(entry)
        path = ".".join(keys[:depth])
        if is_null(node):
            node = entry.node = Items() if shape.is_list else Table()
        if isinstance(node, Items):
            count = len(node.entries)
            if not key.isdecimal() or int(key) >= count:
                if not count:
                    valid = "the list is empty"
                else:
                    if count == 1:
                        valid = "only index 0"
                    else:
                        valid = f"0 to {count - 1}"
                rule = f"{path} is a list without item {key!r} (valid: {valid})"
                fix = "give the whole list as [...]"
                raise UserError(rule, where=place.text, key=override.key, fix=f"use a valid index, or {fix}")
            entry = node.entries[int(key)]
        elif isinstance(node, Table):
            key, entry, shape = _key(node, key, shape.kinds, place)
        else:
            rule = f"is a value ({plain(node)!r}), it has no key {key}"
            raise UserError(rule, where=place.text, key=path, fix=f"set {path} itself")
        written.append(key)
    return _set(root, ".".join(written), entry, value)


def _removed(root: Table, keys: list[str]) -> bool:
    """Removes a key of the file, under any of its names, for a null; False where null is a value or no key is there."""
    fields = fields_at(".".join(keys))
    if any(shape_of(field).nullable for field in fields):
        return False  # a later message can name the flag
    entry = Entry(root)
    for key in keys[:-1]:
        below = own_node(entry)
        if isinstance(below, Table):
            entries = below.own
        else:
            entries = dict(children(below))
        if key not in entries:
            return False
        entry = entries[key]
    table = own_node(entry)
    names = {keys[-1], *(name for field in fields for name in aliases_of(field))}
    found = [name for name in names if isinstance(table, Table) and name in table.own]
    for name in found:
        del table.own[name]
    return bool(found)


def _parsed(override: Override, place: SourceLocation, most: int) -> Entry:
    """The value: as YAML, or as the string it is where the key can only hold strings."""
    if override.texts:
        entries = [Entry(Scalar(text), place) for text in override.texts]
        if len(entries) == 1:
            return entries[0]
        return Entry(Items(entries), place)
    value = parse_value(override.text, place, override.key, most)
    kinds = {kind for field in fields_at(override.key) for kind in scalar_kinds(field)}
    is_text = isinstance(value.node, Scalar) and isinstance(value.node.value, (bool, int, float))
    if str in kinds <= {str, list} and is_text:
        return Entry(Scalar(override.text), place)
    return value


def is_boolean(key: str) -> bool:
    """True when a dotted key is True or False, or one of a few words, and nothing else."""
    return {kind for field in fields_at(key) for kind in scalar_kinds(field, listed=False)} == {bool}


def _key(node: Table, key: str, kinds: tuple[type[Section], ...], place: SourceLocation) -> tuple[str, Entry, Shape]:
    """The name that the file uses for a key, and its entry, made when absent."""
    names = [key]
    shape = Shape((), is_list=False, nullable=True)
    absent = Scalar(None)
    for main, field in (item for kind in kinds for item in fields_by_yaml_name(kind).items()):
        if key in (main, *aliases_of(field)):
            names += [main, *aliases_of(field)]
            shape = shape_of(field)
            absent = _default_list(field)
    entries = node.entries()
    present = [name for name in dict.fromkeys(names) if name in entries]
    for name in present[1:]:
        node.own.pop(name, None)
    name = key
    if present:
        name = present[0]
    if name not in node.own:
        if present:
            node.own[name] = entries[name]
        else:
            node.own[name] = Entry(absent, place)
    return name, node.own[name], shape


def _default_list(field: FieldInfo) -> Items | Scalar:
    """What an index counts in where the file has no such list: the default, for example of ``optimizer.betas``."""
    if field.is_required():
        default = None
    else:
        default = field.get_default(call_default_factory=True)
    if isinstance(default, list) and default:
        return Items([Entry(Scalar(value)) for value in default])
    return Scalar(None)


def _set(root: Table, key: str, entry: Entry, value: Entry) -> list[str]:
    """Replaces an entry's value; where the entry is the anchor, its aliases follow.

    Returns:
        Notes about aliases that followed.
    """
    old = entry.node
    if entry.is_alias:
        uses = []
    else:
        uses = [(path, other) for path, other in _uses(root, "") if other.node is old]
    entry.node = value.node
    entry.place = value.place
    entry.is_alias = False
    for _, other in uses:
        other.node = value.node
        other.place = value.place
    followers = [path for path, _ in uses if path != key]
    if followers:
        return [f"{value.place.text}: {key} is anchored, {', '.join(followers)} follows"]
    return []


def _uses(node: Node, path: str) -> Iterator[tuple[str, Entry]]:
    """Every entry below a node with its dotted path; a node that is used twice is visited twice."""
    for name, entry in children(node):
        yield f"{path}{name}", entry
        yield from _uses(entry.node, f"{path}{name}.")
