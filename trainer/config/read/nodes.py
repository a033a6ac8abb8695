"""A YAML document as a tree that remembers lines and anchors, so that an override of an anchor reaches its aliases.

A node stands once for an anchor and all its aliases; an :class:`Entry` is one place where it is used. Changing the node
where the anchor is defined changes it everywhere; at an alias, the entry gets its own copy first, so that only that
place changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trainer.config.location import NO_LOCATION, SourceLocation


@dataclass(eq=False)
class Scalar:
    """A value without parts: str, int, float, bool or None."""

    value: Any


@dataclass(eq=False)
class Entry:
    """One place of the document that holds a node."""

    node: Node
    place: SourceLocation = NO_LOCATION
    is_alias: bool = False


@dataclass(eq=False)
class Items:
    """A list."""

    entries: list[Entry] = field(default_factory=list)


@dataclass(eq=False)
class Table:
    """A mapping with string keys. ``bases`` are what merge keys (``<<``) refer to; own entries win over them."""

    own: dict[str, Entry] = field(default_factory=dict)
    bases: list[Table] = field(default_factory=list)

    def entries(self) -> dict[str, Entry]:
        """All entries; those of the bases count as aliases."""
        merged: dict[str, Entry] = {}
        for base in reversed(self.bases):
            for key, entry in base.entries().items():
                merged[key] = Entry(entry.node, entry.place, is_alias=True)
        merged.update(self.own)
        return merged


Node: TypeAlias = Scalar | Items | Table


def children(node: Node) -> list[tuple[str, Entry]]:
    """What a node holds, with its key or number."""
    if isinstance(node, Table):
        return list(node.entries().items())
    if isinstance(node, Items):
        return [(str(number), entry) for number, entry in enumerate(node.entries)]
    return []


def expanded(node: Node, known: dict[int, tuple[int, int]] | None = None) -> tuple[int, int]:
    """Returns how many values a node has, itself included, and in how many levels, with aliases and bases written out.

    Each node is visited once, however often it is used.
    """
    if known is None:
        known = {}
    if id(node) not in known:
        if isinstance(node, Table):
            entries = node.own.values()
        else:
            if isinstance(node, Items):
                entries = node.entries
            else:
                entries = ()
        if isinstance(node, Table):
            bases = node.bases
        else:
            bases = []
        below = [expanded(one, known) for one in (*(entry.node for entry in entries), *bases)]
        known[id(node)] = 1 + sum(values for values, _ in below), 1 + max((levels for _, levels in below), default=0)
    return known[id(node)]


def own_node(entry: Entry) -> Node:
    """The entry's node, ready to be changed: a copy when the entry is an alias; what it holds stays shared."""
    node = entry.node
    if entry.is_alias:
        shared = {key: Entry(below.node, below.place, is_alias=True) for key, below in children(node)}
        if isinstance(node, Items):
            copy = Items([*shared.values()])
        else:
            copy = Table(shared)
        if isinstance(node, Scalar):
            entry.node = Scalar(node.value)
        else:
            entry.node = copy
        entry.is_alias = False
    return entry.node


def plain(node: Node) -> Any:
    """The node as Python values."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Items):
        return [plain(entry.node) for entry in node.entries]
    return {key: plain(entry.node) for key, entry in node.entries().items()}


def tree(value: Any, place: SourceLocation = NO_LOCATION) -> Node:
    """Makes a node of Python values, the reverse of `plain`; `place` is where all of them are written."""
    if isinstance(value, dict):
        return Table({key: Entry(tree(below, place), place) for key, below in value.items()})
    if isinstance(value, list):
        return Items([Entry(tree(item, place), place) for item in value])
    return Scalar(value)


def is_null(node: Node) -> bool:
    """True for an empty value or ``null``."""
    return isinstance(node, Scalar) and node.value is None
