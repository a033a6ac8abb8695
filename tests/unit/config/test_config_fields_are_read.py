"""Every key of the schema acts: some code reads it, or it is declared ignored or not yet supported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import trainer
from trainer.config.schema.fields import Section, shape_of, support_of
from trainer.config.schema.root import Config

ROOT = Path(trainer.__file__).parent
COMPARED = "model.settings.moe_config.aux_loss_types"
"""The only key that a rule alone reads: it has one value."""


def sections() -> dict[type[Section], str]:
    """Returns all sections that can act, with the key that leads to them."""
    found: dict[type[Section], str] = {Config: ""}
    for kind in (queue := [Config]):
        for name, field in kind.model_fields.items():
            for below in shape_of(field).kinds:
                if below not in found and support_of(field)[0] == "supported" and below.support == "supported":
                    found[below] = f"{found[kind]}{name}."
                    queue.append(below)
    return found


def words(tree: ast.AST) -> Iterator[str]:
    """Yields the names, attributes and parts of dotted strings in code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from node.value.split(".")


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yields functions, methods and tables by name, except functions that return errors: rules make no key act."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in [*tree.body, *(method for kind in classes for method in kind.body)]:
        if isinstance(node, ast.FunctionDef) and not (node.returns and "ConfigError" in ast.unparse(node.returns)):
            yield node.name, node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


@cache
def read_words() -> frozenset[str]:
    """Returns the words of the program outside of the configuration, and of what it uses there, except for notes."""
    read: set[str] = set()
    unused: list[tuple[str, set[str]]] = []
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if "config" in path.relative_to(ROOT).parts:
            if path.name != "notes.py":
                unused += [(name, set(words(node))) for name, node in definitions(tree)]
        elif path.name != "flags.py":
            read |= set(words(tree))
    while used := [item for item in unused if item[0] in read]:
        unused = [item for item in unused if item not in used]
        read = read.union(*(found for _, found in used))
    return frozenset(read)


def acting_fields() -> list[str]:
    """Returns the keys that claim to act: ``section.field``."""
    fields = set()
    for kind, path in sections().items():
        for name, field in kind.model_fields.items():
            # "type" chooses a section and a section is read by its keys: neither acts by itself.
            if support_of(field)[0] == "supported" and name != "type" and not shape_of(field).kinds:
                fields.add(f"{path}{name}")
    return sorted(fields)


@pytest.mark.parametrize("field", acting_fields())
def test_every_field_is_read_or_declared_not_to_act(field):
    assert (field.split(".")[-1] in read_words()) == (field != COMPARED), f"nothing reads {field}"
