"""Reads a YAML file into a tree of nodes: YAML 1.2 scalars, no duplicate keys, every mistake with its line.

Differences from plain YAML 1.2, both for people who paste from documentation: a line of only ``...`` is left out (with
a notice, unless it ends the file), and ``None`` is ``null``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from trainer.config.checks.problem import SourceLocation
from trainer.config.read.nodes import Entry, Items, Node, Scalar, Table
from trainer.errors import UserError

_TAG = "tag:yaml.org,2002:"
_MAX_VALUES = 100_000
_ELLIPSIS = re.compile(r"^[ \t]*\.\.\.[ \t]*$")


_PATTERNS: tuple[tuple[str, str, str], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|None|", "~nN"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
)


def _implicit_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table: first letter of a scalar -> tags to try (an empty scalar has the letter "")."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, pattern, letters in _PATTERNS:
        for letter in [*letters, ""] if name == "null" else letters:
            table.setdefault(letter, []).append((_TAG + name, re.compile(rf"^(?:{pattern})$")))
    return table


class ScalarResolver(BaseResolver):
    """Scalars of YAML 1.2's core schema: ``1e-4`` is a number, ``on`` and ``yes`` are strings, ``0o17`` is octal."""

    yaml_implicit_resolvers = _implicit_resolvers()


class _Composer(Reader, Scanner, Parser, Composer, ScalarResolver):
    """PyYAML's own parts, without the one that makes Python objects."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        ScalarResolver.__init__(self)


def _integer(text: str) -> int:
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text, 10)


def _floating(text: str) -> float:
    return float(
        text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf").lower().replace(".nan", "nan")
    )


_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "str": str,
    _TAG + "int": _integer,
    _TAG + "float": _floating,
    _TAG + "bool": lambda text: text.lower() == "true",
    _TAG + "null": lambda text: None,
    "!": str,
}


class _Builder:
    """Turns PyYAML's nodes into ours. One node of theirs that is used twice (an alias) stays one node."""

    def __init__(self, name: str, lines_from: int = 1) -> None:
        self.name = name
        self.lines_from = lines_from
        self.done: dict[int, Node] = {}
        self.open: set[int] = set()

    def place(self, mark: Any) -> SourceLocation:
        line = mark.line + self.lines_from
        return SourceLocation(line, f"{self.name}:{line}")

    def entry(self, node: yaml.Node, place: SourceLocation) -> Entry:
        """Builds the node that stands at a place; the second time it is met it is an alias."""
        if id(node) in self.open:
            raise UserError(
                "an anchor refers to itself", where=place.text, fix="remove the alias inside its own anchor"
            )
        if id(node) in self.done:
            return Entry(self.done[id(node)], place, is_alias=True)
        self.open.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            built: Node = self._scalar(node, place)
        elif isinstance(node, yaml.SequenceNode):
            built = Items([self.entry(item, self.place(item.start_mark)) for item in node.value])
        else:
            built = self._table(node)
        self.open.remove(id(node))
        self.done[id(node)] = built
        return Entry(built, place)

    def _scalar(self, node: yaml.ScalarNode, place: SourceLocation) -> Scalar:
        try:
            return Scalar(_SCALARS[node.tag](node.value))
        except KeyError:
            raise UserError(
                f"the tag {node.tag.replace(_TAG, '!!')} is not supported", where=place.text, fix="remove the tag"
            ) from None
        except ValueError:
            raise UserError(
                f"{node.value!r} is not of the type its tag says", where=place.text, fix="remove the tag"
            ) from None

    def _table(self, node: yaml.MappingNode) -> Table:
        table = Table()
        for key_node, value_node in node.value:
            place = self.place(key_node.start_mark)
            if key_node.tag == _TAG + "merge":
                table.bases.extend(self._bases(value_node, place))
                continue
            key = self._key(key_node, place)
            if key in table.own:
                raise UserError(
                    f"the key {key!r} stands here and at {table.own[key].place.text}; a section may have it once",
                    where=place.text,
                    key=key,
                    fix="remove one of the two",
                )
            table.own[key] = self.entry(value_node, place)
        return table

    def _key(self, node: yaml.Node, place: SourceLocation) -> str:
        if isinstance(node, yaml.ScalarNode) and node.tag in (_TAG + "str", "!"):
            return node.value
        shown = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        raise UserError(f"a key must be a name, found {shown}", where=place.text, fix="write name: value")

    def _bases(self, node: yaml.Node, place: SourceLocation) -> list[Table]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        tables = [self.entry(item, place).node for item in nodes]
        if not all(isinstance(table, Table) for table in tables):
            raise UserError(
                "<< must refer to a mapping", where=place.text, key="<<", fix="anchor a section: base: &base"
            )
        return [table for table in tables if isinstance(table, Table)]


_FIXES = (
    ("\\t", "use spaces instead of tabs"),
    ("undefined alias", "define the anchor above, as in key: &name value"),
    ("duplicate anchor", "give each anchor another name"),
    ("could not find expected ':'", "write key: value, with a space after the colon"),
    ("mapping values are not allowed", "check the indentation of this line, or quote a value that has a colon"),
    ("block end", "check the indentation of this line: keys of one section start in the same column"),
    ("quoted scalar", "close the quotation mark"),
    ("or ']'", "close the bracket"),
    ("or '}'", "close the brace"),
)


def _syntax_error(name: str, error: yaml.MarkedYAMLError) -> UserError:
    mark = error.problem_mark or error.context_mark
    text = error.problem or error.context or "not valid YAML"
    begun = error.context_mark
    if begun is not None and mark is not None and begun.line < mark.line:
        text += f", in what begins on line {begun.line + 1}"
    fix = next((fix for part, fix in _FIXES if part in text or part in (error.context or "")), "correct the YAML there")
    return UserError(f"not valid YAML: {text}", where=f"{name}:{mark.line + 1}" if mark else name, fix=fix)


def _documents(name: str, text: str) -> list[yaml.Node]:
    try:
        composer = _Composer(text)
        roots = []
        while composer.check_node():
            roots.append(composer.get_node())
        return roots
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(name, error) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(
            f"the character U+{error.character:04X} is not text",
            where=f"{name}:{line}",
            fix="remove it, or give a YAML text file",
        ) from None


def _text_lines(node: yaml.Node, seen: set[int]) -> set[int]:
    """Lines (from 0) inside quoted and block scalars: there ``...`` is text."""
    if id(node) in seen:
        return set()
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        return set(range(node.start_mark.line + 1, node.end_mark.line + 1)) if node.style else set()
    children = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    return set().union(*(_text_lines(child, seen) for child in children)) if children else set()


def _without_ellipses(name: str, text: str) -> tuple[list[yaml.Node], list[int]]:
    """Composes the text without its lines of only ``...``; returns the documents and the numbers of these lines."""
    lines = text.split("\n")
    dotted = [number for number, line in enumerate(lines) if _ELLIPSIS.match(line)]
    if not dotted:
        return _documents(name, text), []
    gone = set(dotted)
    roots = _documents(name, "\n".join("" if number in gone else line for number, line in enumerate(lines)))
    in_text = set().union(*(_text_lines(root, set()) for root in roots)) & gone if roots else set()
    if in_text:
        gone -= in_text
        roots = _documents(name, "\n".join("" if number in gone else line for number, line in enumerate(lines)))
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    return roots, [number + 1 for number in sorted(gone) if number != last or lines[number][0] in " \t"]


def read_text(path: str) -> str:
    """Reads a configuration file.

    Raises:
        UserError: The file is missing, a directory, unreadable or not text.
    """
    example = "give a YAML file: --config configs/quickstart.yaml"
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError("the configuration file does not exist", where=path, fix=example) from None
    except IsADirectoryError:
        raise UserError("the configuration file is a directory", where=path, fix=example) from None
    except OSError as error:
        raise UserError(
            f"the configuration file cannot be read: {error.strerror or error}", where=path, fix="make it readable"
        ) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"byte 0x{content[error.start]:02x} is not UTF-8 text", where=f"{path}:{line}", fix="save the file as UTF-8"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError("the file is binary, not text", where=f"{path}:{line}", fix=example)
    return text.replace("\r\n", "\n")


def parse_document(name: str, text: str) -> tuple[Table, list[str]]:
    """Parses the text of a configuration file.

    Args:
        name: What to call the file in messages.
        text: Its contents.

    Returns:
        The tree, and the notices about what was left out.

    Raises:
        UserError: The text is empty, not YAML, has duplicate keys, or is not one mapping.
    """
    roots, left_out = _without_ellipses(name, text)
    if len(roots) > 1:
        line = roots[1].start_mark.line + 1
        raise UserError(
            "a second document starts here", where=f"{name}:{line}", fix="keep one document, remove its '---'"
        )
    if not roots or (isinstance(roots[0], yaml.ScalarNode) and not roots[0].value):
        raise UserError("the file is empty", where=f"{name}:1", fix="write sections such as model: and train_dataset:")
    builder = _Builder(name)
    root = builder.entry(roots[0], builder.place(roots[0].start_mark))
    if not isinstance(root.node, Table):
        kind = "a list" if isinstance(root.node, Items) else "a single value"
        raise UserError(
            f"the file holds {kind}, not sections", where=root.place.text, fix="write section: and key: value"
        )
    _check_size(name, root.node)
    notices = []
    if left_out:
        numbers = ", ".join(str(number) for number in left_out)
        notices.append(f"{name}: left out the lines of only '...' ({numbers})")
    return root.node, notices


def _check_size(name: str, root: Node) -> None:
    """Refuses aliases of aliases that would grow without bound."""
    sizes: dict[int, int] = {}

    def size(node: Node) -> int:
        if id(node) not in sizes:
            entries = (
                node.entries if isinstance(node, Items) else node.entries().values() if isinstance(node, Table) else ()
            )
            sizes[id(node)] = 1 + sum(size(entry.node) for entry in entries)
        return sizes[id(node)]

    if size(root) > _MAX_VALUES:
        raise UserError(f"more than {_MAX_VALUES} values", where=f"{name}:1", fix="use fewer aliases of aliases")


def parse_value(text: str, place: SourceLocation, key: str) -> Entry:
    """Parses the text of a flag: a YAML scalar, ``[a, b]`` or ``{a: b}``; anything else is the text itself.

    Raises:
        UserError: The text starts a list or mapping which is not valid.
    """
    if not text.lstrip().startswith(("[", "{", '"', "'")):
        tag = ScalarResolver().resolve(yaml.ScalarNode, text.strip(), (True, False))
        return Entry(Scalar(_SCALARS[tag](text.strip()) if tag in _SCALARS and tag != _TAG + "str" else text), place)
    try:
        roots = _documents(place.text, text)
    except UserError:
        raise UserError(
            "is not a valid list, mapping or quoted text",
            where=place.text,
            key=key,
            value=text,
            fix="write [a, b] or {a: b}",
        ) from None
    builder = _Builder(place.text)
    entry = builder.entry(roots[0], place)
    _move(entry, place)
    return entry


def _move(entry: Entry, place: SourceLocation) -> None:
    """Makes all parts of a flag's value say the flag as their place."""
    entry.place = place
    children = (
        entry.node.entries
        if isinstance(entry.node, Items)
        else entry.node.own.values()
        if isinstance(entry.node, Table)
        else ()
    )
    for child in children:
        _move(child, place)
