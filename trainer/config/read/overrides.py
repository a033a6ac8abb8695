"""Overrides from the command line: ``--options a.b=c``, named flags and ``--a.b.0.c value``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from trainer.config.checks.problem import Problem, SourceLocation
from trainer.config.read.nodes import Entry, Items, Node, Scalar, Table, children, is_null, own_node, plain
from trainer.config.read.relocate import canonical_keys
from trainer.config.read.yaml_reader import parse_value
from trainer.config.schema.fields import (
    Section,
    Shape,
    aliases_of,
    fields_by_yaml_name,
    scalar_kinds,
    shape_of,
    yaml_names,
)
from trainer.config.schema.root import Config
from trainer.errors import UserError

_AFTER_FILE = 1_000_000


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


def apply_overrides(root: Table, overrides: Sequence[Override]) -> tuple[list[Problem], list[str]]:
    """Sets every override in the tree, in order, so that the last one wins.

    Returns:
        What is wrong with them (lists without such an index, values where a section is needed), and notices.
    """
    problems: list[Problem] = []
    notices: list[str] = []
    for number, override in enumerate(overrides):
        place = SourceLocation(_AFTER_FILE + number, override.source)
        try:
            notices += _apply(root, override, place)
        except UserError as error:
            problems.append(Problem(place, error))
    return problems, notices


def _apply(root: Table, override: Override, place: SourceLocation) -> list[str]:
    keys = tuple(override.key.split("."))
    if not all(keys):
        raise UserError(
            "is not a dotted key",
            where=place.text,
            key=override.key,
            fix="write section.key, as in runner_config.epochs",
        )
    keys = canonical_keys(keys)
    value = _parsed(override, place, fields_at(keys))
    if override.only_if_present and not _has_section(root, keys[:1]):
        return []
    entry, shape = Entry(root), Shape((Config,), is_list=False, nullable=False)
    written: list[str] = []
    for depth, key in enumerate(keys):
        node = own_node(entry)
        if is_null(node):
            node = entry.node = Items() if shape.is_list else Table()
        if isinstance(node, Items):
            entry = _item(node, key, keys[: depth + 1], place, override)
            written.append(key)
        elif isinstance(node, Table):
            name, entry, shape = _key(node, key, shape.kinds, place)
            written.append(name)
        else:
            raise UserError(
                f"is a value ({plain(node)!r}), it has no key {key}",
                where=place.text,
                key=".".join(keys[:depth]),
                fix=f"set {'.'.join(keys[:depth])} itself",
            )
    return _set(root, ".".join(written), entry, value)


def _parsed(override: Override, place: SourceLocation, fields: list[FieldInfo]) -> Entry:
    """The value: as YAML, or as the string it is where the key can only hold strings."""
    if override.texts:
        entries = [Entry(Scalar(text), place) for text in override.texts]
        return entries[0] if len(entries) == 1 else Entry(Items(entries), place)
    value = parse_value(override.text, place, override.key)
    kinds = {kind for field in fields for kind in scalar_kinds(field)}
    is_text = isinstance(value.node, Scalar) and isinstance(value.node.value, (bool, int, float))
    return Entry(Scalar(override.text), place) if str in kinds <= {str, list} and is_text else value


def fields_at(keys: tuple[str, ...]) -> list[FieldInfo]:
    """The declarations of a key: none when it is unknown, several when sections of different types have it."""
    kinds: tuple[type[Section], ...] = (Config,)
    fields: list[FieldInfo] = []
    for key in canonical_keys(keys):
        if key.isdecimal():
            continue
        fields = [
            field
            for kind in kinds
            for main, field in fields_by_yaml_name(kind).items()
            if key in (main, *aliases_of(field))
        ]
        kinds = tuple(kind for field in fields for kind in shape_of(field).kinds)
    return fields


def is_boolean(key: str) -> bool:
    """True when a dotted key is True or False and nothing else."""
    return {kind for field in fields_at(tuple(key.split("."))) for kind in scalar_kinds(field)} == {bool}


def is_top_level(key: str) -> bool:
    """True for a key, or another name or place of one, at the top of a file."""
    return key in yaml_names(Config) or canonical_keys((key,)) != (key,)


def _has_section(root: Table, keys: tuple[str, ...]) -> bool:
    entries = root.entries()
    return keys[0] in entries and not is_null(entries[keys[0]].node)


def _item(node: Items, key: str, path: tuple[str, ...], place: SourceLocation, override: Override) -> Entry:
    count = len(node.entries)
    if not key.isdecimal() or int(key) >= count:
        valid = "the list is empty" if not count else "only index 0" if count == 1 else f"0 to {count - 1}"
        raise UserError(
            f"{'.'.join(path[:-1])} is a list without item {key!r} (valid: {valid})",
            where=place.text,
            key=override.key,
            fix="use a valid index, or give the whole list as [...]",
        )
    return node.entries[int(key)]


def _key(node: Table, key: str, kinds: tuple[type[Section], ...], place: SourceLocation) -> tuple[str, Entry, Shape]:
    """The name that the file uses for a key, and its entry, made when absent."""
    names, shape, absent = [key], Shape((), is_list=False, nullable=True), Scalar(None)
    for kind in kinds:
        for main, field in fields_by_yaml_name(kind).items():
            if key in (main, *aliases_of(field)):
                names += [main, *aliases_of(field)]
                shape, absent = shape_of(field), _default_list(field)
    entries = node.entries()
    present = [name for name in dict.fromkeys(names) if name in entries]
    for name in present[1:]:
        node.own.pop(name, None)
    name = present[0] if present else key
    if name not in node.own:
        node.own[name] = entries[name] if present else Entry(absent, place)
    return name, node.own[name], shape


def _default_list(field: FieldInfo) -> Items | Scalar:
    """What an index counts in where the file has no such list: the default, for example of ``optimizer.betas``."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return Items([Entry(Scalar(value)) for value in default]) if isinstance(default, list) and default else Scalar(None)


def _set(root: Table, key: str, entry: Entry, value: Entry) -> list[str]:
    """Replaces an entry's value; where the entry is the anchor, its aliases follow.

    Returns:
        Notices about aliases that followed.
    """
    old = entry.node
    places = [] if entry.is_alias else [(path, other) for path, other in _uses(root, "") if other.node is old]
    entry.node, entry.place, entry.is_alias = value.node, value.place, False
    for _, other in places:
        other.node, other.place = value.node, value.place
    followers = [path for path, _ in places if path != key]
    return [f"{value.place.text}: {key} is anchored, {', '.join(followers)} follows"] if followers else []


def _uses(node: Node, path: str) -> Iterator[tuple[str, Entry]]:
    """Every entry below a node with its dotted path; a node that is used twice is visited twice."""
    for name, entry in children(node):
        yield f"{path}{name}", entry
        yield from _uses(entry.node, f"{path}{name}.")
