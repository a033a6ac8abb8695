"""A file of the newer schema while it is translated: what it has, and the tree in our schema that it becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config.checks.problem import NO_VALUE, ConfigError, problem_at
from trainer.config.location import SourceLocation
from trainer.config.read.nodes import Entry, Items, Node, Scalar, Table, is_null, plain, tree
from trainer.config.read.relocate import parent
from trainer.errors import UserError

_MODEL = "model.model_config"
_SOURCE_SECTION = {
    f"{_MODEL}.moe_config": "model",
    f"{_MODEL}.pet_config": "lora_config",
    _MODEL: "model",
    "lr_schedule": "lr_scheduler",
    "train_dataset.data_loader": "train_dataset.dataloader",
    "train_dataset.input_columns": "train_dataset.dataloader.column_names",
}
"""Section here -> where its keys stand there."""


@dataclass
class Translation:
    """The tree in our schema, and what was met on the way."""

    root: Table = field(default_factory=Table)
    source_keys: dict[str, str] = field(default_factory=dict)
    """Our keys -> the keys they were translated from, for values that are computed."""
    problems: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def with_source_names(self, problem: ConfigError) -> ConfigError:
        """A problem under the file's name for its key; a flag keeps its own name."""
        where = problem.place.text
        error = problem.error
        is_ours = where.startswith(("flag ", "--")) and not where.endswith(f"--{self.source_name(error.key)}")
        if not where or is_ours:
            return problem
        ours = "|".join(rf"\b{section}\b" for section in _SOURCE_SECTION)
        rule, fix = (re.sub(ours, lambda found: _SOURCE_SECTION[found[0]], text) for text in (error.rule, error.fix))
        if error.value is None:
            given = {}
        else:
            given = {"value": error.value}
        key = self.source_name(error.key)
        return problem._replace(error=UserError(rule, where=error.where, key=key, fix=fix, **given))

    def written(self, names: Mapping[str, str], positions: Mapping[str, SourceLocation]) -> dict[str, str]:
        """The names that the file has for our keys; `names` are those that are not the main ones."""
        keys = {key: names.get(key, key) for key, place in positions.items()}
        flags = ("flag ", "--")
        return {key: name if positions[key].text.startswith(flags) else self.source_name(name)
                for key, name in keys.items()}  # fmt: skip

    def source_name(self, key: str) -> str:
        """A key of ours as the file writes it."""
        if key in self.source_keys:
            return self.source_keys[key]
        parent, _, number = key.rpartition(".")
        if number.isdecimal() and parent in self.source_keys:
            return f"{self.source_keys[parent]}.{number}"
        for ours, theirs in _SOURCE_SECTION.items():
            if f"{key}.".startswith(f"{ours}."):
                return theirs + key[len(ours) :]
        return key


@dataclass
class TranslationState:
    """A file that is being translated."""

    name: str
    translation: Translation
    entries: dict[str, Entry] = field(default_factory=dict)
    """What the file has, by the keys and sections of the table."""
    values: dict[str, Any] = field(default_factory=dict)
    """The values of all keys of the table's rows, defaults included."""

    def place(self, key: str) -> SourceLocation:
        """Returns where a key there was written; the file as a whole for a default."""
        if key in self.entries:
            return self.entries[key].place
        return SourceLocation(0, f"{self.name} ({key} by default)")

    def node(self, key: str) -> Node:
        """Returns what the file has at a key there; an empty section where it has nothing."""
        if key in self.entries:
            return self.entries[key].node
        return Table()

    def table(self, key: str) -> Table:
        """Returns a section there, to be changed: a copy."""
        node = self.node(key)
        if isinstance(node, Table):
            return Table(dict(node.entries()))
        return Table()

    def problem(
        self, key: str, rule: str, fix: str, *, place: SourceLocation | None = None, has_value: bool = True
    ) -> None:
        """Adds a mistake in a key there, with its value where the file has one."""
        value = NO_VALUE
        if has_value and key in self.entries:
            value = plain(self.entries[key].node)
        self.translation.problems.append(problem_at(place or self.place(key), key, rule, fix, value))

    def set_key(self, key: str, value: Any, source: str, *, place: SourceLocation | None = None) -> None:
        """Sets a key of ours, to a node or a plain value, with the place of a key there."""
        place = place or self.place(source)
        table = parent(self.translation.root, key, place)
        if isinstance(value, Scalar | Items | Table):
            node = value
        else:
            node = tree(value, place)
        table.explicit[key.rpartition(".")[2]] = Entry(node, place)
        if not isinstance(value, Table):
            self.translation.source_keys[key] = source

    def set_default(self, table: Table, key: str, value: Any, source: str) -> None:
        """Adds to a section what MindSpore Transformers takes for a key that the file leaves out."""
        if key not in table.explicit or is_null(table.explicit[key].node):
            place = self.place(source)
            table.explicit[key] = Entry(tree(value, place), place)
