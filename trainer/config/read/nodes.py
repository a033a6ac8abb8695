"""A YAML document as a tree with lines and anchors, so that an override of an anchor reaches its aliases.

A node is a value, a list or a mapping. An anchor and all its aliases are one node; an `Entry` is one place where it is
used. A change at the anchor changes all aliases. A change at an alias copies the node first, so that only that place
changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trainer.config.location import NO_LOCATION, SourceLocation


@dataclass(eq=False)
class Scalar:
    """A plain value: str, int, float, bool or None."""

    value: Any


@dataclass(eq=False)
class Entry:
    """One place of the document where a node is used."""

    node: Node
    place: SourceLocation = NO_LOCATION
    is_alias: bool = False

    def alias(self) -> Entry:
        """Returns an alias of this entry: at its line, but that line writes the key of another section."""
        return Entry(self.node, self.place._replace(key=""), is_alias=True)


@dataclass(eq=False)
class Items:
    """A list."""

    entries: list[Entry] = field(default_factory=list)


@dataclass(eq=False)
class Table:
    """A mapping with string keys. `bases` are the mappings of its merge keys (``<<``), of which the first wins.

    Its explicit entries win over those of all bases.
    """

    explicit: dict[str, Entry] = field(default_factory=dict)
    bases: list[Table] = field(default_factory=list)

    def entries(self) -> dict[str, Entry]:
        """Returns all entries by key; those of the bases are aliases."""
        merged: dict[str, Entry] = {}
        for base in reversed(self.bases):
            merged |= {key: entry.alias() for key, entry in base.entries().items()}
        return merged | self.explicit


Node: TypeAlias = Scalar | Items | Table


def children(node: Node) -> list[tuple[str, Entry]]:
    """Returns the entries of a mapping with their keys, or of a list with their numbers as text."""
    if isinstance(node, Table):
        return list(node.entries().items())
    if isinstance(node, Items):
        return [(str(number), entry) for number, entry in enumerate(node.entries)]
    return []


def expanded_size(node: Node, known: dict[int, tuple[int, int]] | None = None) -> tuple[int, int]:
    """Counts the values of a node, itself included, and its levels, as if aliases and bases were written out.

    Each node is visited once; `known` has the results by the ids of nodes.
    """
    if known is None:
        known = {}
    if id(node) not in known:
        nested: list[Node] = []
        if isinstance(node, Table):
            nested = [*(entry.node for entry in node.explicit.values()), *node.bases]
        elif isinstance(node, Items):
            nested = [entry.node for entry in node.entries]
        sizes = [expanded_size(child, known) for child in nested]
        known[id(node)] = 1 + sum(values for values, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
    return known[id(node)]


def writable_node(entry: Entry) -> Node:
    """Returns the entry's node for changes: for an alias a copy, whose children are aliases in turn."""
    node = entry.node
    if entry.is_alias:
        aliases = {key: child.alias() for key, child in children(node)}
        if isinstance(node, Scalar):
            entry.node = Scalar(node.value)
        elif isinstance(node, Items):
            entry.node = Items([*aliases.values()])
        else:
            entry.node = Table(aliases)
        entry.is_alias = False
    return entry.node


def plain(node: Node) -> Any:
    """Converts a node to Python values: dictionaries, lists and plain values."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Items):
        return [plain(entry.node) for entry in node.entries]
    return {key: plain(entry.node) for key, entry in node.entries().items()}


def tree(value: Any, place: SourceLocation = NO_LOCATION) -> Node:
    """Makes a node of Python values, the reverse of `plain`; `place` is where all of them are written."""
    if isinstance(value, dict):
        return Table({key: _tree_entry(below, place, key) for key, below in value.items()})
    if isinstance(value, list):
        return Items([_tree_entry(item, place, str(number)) for number, item in enumerate(value)])
    return Scalar(value)


def _tree_entry(value: Any, place: SourceLocation, name: str) -> Entry:
    below = place._replace(key=f"{place.key}.{name}".lstrip("."))
    return Entry(tree(value, below), below)


def is_null(node: Node) -> bool:
    """Returns whether a node is an empty value or ``null``."""
    return isinstance(node, Scalar) and node.value is None


def find_entry(root: Table, key: str) -> Entry | None:
    """Returns the entry at a dotted key; None if there is none. Items of lists have no such key."""
    entry = Entry(root)
    for part in key.split("."):
        if not isinstance(entry.node, Table):
            return None
        entries = entry.node.entries()
        if part not in entries:
            return None
        entry = entries[part]
    return entry


def look_up(sections: dict[str, Any], key: str) -> Any:
    """Returns the value of a dotted key in nested sections; None if there is none."""
    value: Any = sections
    for part in key.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value
