"""The state of a translation from the source, a file of the newer schema, to the target, a tree in this schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.config.checks.problem import NO_VALUE, ConfigError, problem_at
from trainer.config.location import SourceLocation
from trainer.config.read.nodes import Entry, Items, Node, Scalar, Table, plain, tree
from trainer.config.read.relocate import parent


@dataclass
class Translation:
    """A file that is being translated: its entries and values, and the target tree with problems and notes."""

    name: str
    root: Table = field(default_factory=Table)
    problems: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    """The entries of the file, by source key."""
    values: dict[str, Any] = field(default_factory=dict)
    """The values of all source keys with a row, including defaults."""
    wrong: set[str] = field(default_factory=set)
    """The source keys with values of another type: nothing is set for them."""

    def place(self, key: str) -> SourceLocation:
        """Returns the location of a source key; for a default, the file."""
        if key in self.entries:
            return self.entries[key].place
        return SourceLocation(0, f"{self.name} ({key} by default)", key)

    def node(self, key: str) -> Node:
        """Returns the node of a source key; an empty section if the file lacks it."""
        if key in self.entries:
            return self.entries[key].node
        return Table()

    def table(self, key: str) -> Table:
        """Returns a copy of a source section, for changes."""
        node = self.node(key)
        if isinstance(node, Table):
            return Table(dict(node.entries()))
        return Table()

    def problem(
        self, key: str, rule: str, fix: str, *, place: SourceLocation | None = None, has_value: bool = True
    ) -> None:
        """Adds a problem of a source key, with its value if the file has one."""
        value = NO_VALUE
        if has_value and key in self.entries:
            value = plain(self.entries[key].node)
        self.problems.append(problem_at(place or self.place(key), key, rule, fix, value))

    def set_key(self, key: str, value: Any, source: str, *, place: SourceLocation | None = None) -> None:
        """Sets a target key to a node or a plain value, with the location of the source key `source`."""
        place = place or self.place(source)
        table = parent(self.root, key, place)
        if isinstance(value, Scalar | Items | Table):
            node = value
        else:
            node = tree(value, place)
            if source in self.values and value is not self.values[source]:
                place = place._replace(value=self.values[source])
        table.explicit[key.rpartition(".")[2]] = Entry(node, place)
