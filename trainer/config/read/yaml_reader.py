"""Reads a YAML file into a tree: YAML 1.2 scalars, no key with two values, every error with its line.

It differs from plain YAML 1.2 in two points, for text copied from documentation: a line of only ``...`` is left out
(with a note, unless it ends the file), and ``None`` is ``null``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

import yaml
from yaml import events
from yaml.composer import ComposerError
from yaml.error import Mark
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from trainer.config.location import SourceLocation
from trainer.config.note import Note
from trainer.config.read.nodes import Entry, Items, Node, Scalar, Table, expanded_size, is_null
from trainer.errors import UserError, shorten_repr, working_directory
from trainer.input_files import missing_path_fix, read_bytes

_TAG = "tag:yaml.org,2002:"
# The largest files of MindSpore Transformers have 300 values in 6 levels.
MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_LEVELS = 64
_ELLIPSIS = re.compile(r"^[ \t]*\.\.\.[ \t]*$")
_PATTERNS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),  # PyYAML looks an empty scalar up under the letter ""
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
)


class ScalarResolver(BaseResolver):
    """Scalars of YAML 1.2's core schema: ``1e-4`` is a number, ``on`` and ``yes`` are strings, ``0o17`` is octal."""


for _name, _pattern, _letters in _PATTERNS:
    ScalarResolver.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), [*_letters])

_LONGEST_PART = 100
"""Characters of each part of a dotted key in a location, of which there is one for each value."""
_LONGEST_INTEGER = 100
"""Characters, leading zeros included; Python takes quadratic time to read an integer."""


class _OutOfRange(ValueError):
    """A number that is too large for any key; its text is the rule."""


def _integer(text: str) -> int:
    if len(text) < _LONGEST_INTEGER:
        base = 10
        if text[:2] in ("0o", "0x"):
            base = 0
        value = int(text, base)
        if -(1 << 63) <= value < 1 << 63:
            return value
    raise _OutOfRange("must be an integer of at most 64 bits")


def _float(text: str) -> float:
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if math.isinf(value) and "inf" not in text.lower():
        raise _OutOfRange("must be a number within the range of 64-bit floats")
    return value


_SMALLER = "write a smaller number, or quote it if it is a text"
_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "str": str,
    _TAG + "int": _integer,
    _TAG + "float": _float,
    _TAG + "bool": lambda text: text.lower() == "true",
    _TAG + "null": lambda text: None,
}


def checked_text(value: Any, place: SourceLocation) -> Any:
    """Returns the value, after checking that a string can be written to files, paths and terminals.

    Raises:
        UserError: It has a zero byte or half a character (a lone surrogate); escapes in quotes can write them.
    """
    if not isinstance(value, str):
        return value
    wrong = next((letter for letter in value if letter == "\0" or "\ud800" <= letter <= "\udfff"), "")
    if wrong:
        raise UserError(f"a text with the character U+{ord(wrong):04X}", where=place.text, fix="remove the character")
    return value


class TooLarge(UserError):
    """A configuration has too many values or levels."""


def check_size(values: int, levels: int, place: SourceLocation, most: int = MAX_VALUES) -> None:
    """Checks the size of a configuration, in which aliases are counted as if they were written out.

    Raises:
        TooLarge: There are more than `most` values, or more than `MAX_LEVELS` levels.
    """
    if levels > MAX_LEVELS:
        rule = f"more than {MAX_LEVELS} levels of lists and sections, counting those of aliases"
        raise TooLarge(rule, where=place.text, fix="check the brackets and the indentation")
    if values > most:
        rule = f"more than {MAX_VALUES} keys and values, counting those of aliases"
        raise TooLarge(rule, where=place.text, fix="write fewer, and no aliases of aliases")


class _Composer(Reader, Scanner, Parser, ScalarResolver):
    """Composes the tree from PyYAML's events; an anchor and its aliases are one node.

    It limits values and levels as they are written. The caller limits them with aliases written out: `expanded_size`.

    Args:
        name: The name of the file in messages.
        text: The YAML text.
        place: One location for all values, if the text is the value of a flag.
        most: The largest number of values.
    """

    def __init__(self, name: str, text: str, place: SourceLocation | None = None, most: int = MAX_VALUES) -> None:
        Reader.__init__(self, text)
        for base in (Scanner, Parser, ScalarResolver):
            base.__init__(self)
        self.file = name
        self.place = place
        self.most = most
        self.anchors: dict[str, Node | None] = {}
        self.values = 0
        self.level = 0
        self.keys: list[str] = []
        """The parts of the dotted key that is being read."""
        if place is not None:
            self.keys.append(place.key)
        self.text_lines: set[int] = set()
        """Lines (from 0) inside quoted and block scalars, where ``...`` is text."""
        self.notes: list[str] = []

    def documents(self) -> list[Entry]:
        """Reads all documents and returns their roots."""
        roots = []
        self.get_event()
        while not self.check_event(events.StreamEndEvent):
            self.get_event()
            self.anchors = {}
            roots.append(self._entry())
            self.get_event()
        return roots

    def _place_of(self, event: events.Event, key: str = "") -> SourceLocation:
        """Returns the location of an event; `key` is the last part of the dotted key that begins with it."""
        parts = [*self.keys, key[:_LONGEST_PART]]
        dotted = ".".join(filter(None, parts))
        if self.place is not None:
            return self.place._replace(key=dotted)
        assert event.start_mark is not None, "the parser gives every event its position"
        line = event.start_mark.line + 1
        return SourceLocation(line, f"{self.file}:{line}", dotted)

    def _entry(self, place: SourceLocation | None = None) -> Entry:
        """Reads the next value; ``place`` is the location of its key."""
        event = self.get_event()
        place = place or self._place_of(event)
        if isinstance(event, events.AliasEvent):
            return Entry(self._anchored(event, place), place, is_alias=True)
        if event.anchor in self.anchors:
            raise ComposerError(None, None, f"found duplicate anchor {event.anchor!r}", event.start_mark)
        if event.anchor is not None:
            self.anchors[event.anchor] = None  # until it is complete
        self.values += 1
        check_size(self.values, self.level, place, self.most)
        self.level += 1
        node = self._node(event, place)
        self.level -= 1
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return Entry(node, place)

    def _node(self, event: events.NodeEvent, place: SourceLocation) -> Node:
        if isinstance(event, events.ScalarEvent):
            return self._scalar(event, place)
        assert isinstance(event, events.CollectionStartEvent), "other events start no value"
        if event.tag is not None:
            rule = f"the tag {event.tag.replace(_TAG, '!!')} is not supported on a list or mapping"
            raise UserError(rule, where=place.text, fix="remove the tag")
        if not isinstance(event, events.SequenceStartEvent):
            return self._table()
        items = Items()
        while not self.check_event(events.SequenceEndEvent):
            self.keys.append(str(len(items.entries)))
            items.entries.append(self._entry())
            self.keys.pop()
        self.get_event()
        return items

    def _anchored(self, event: events.AliasEvent, place: SourceLocation) -> Node:
        if event.anchor not in self.anchors:
            assert isinstance(event.start_mark, Mark), "the parser gives every event its position"
            raise ComposerError(None, None, f"found undefined alias {event.anchor!r}", event.start_mark)
        node = self.anchors[event.anchor]
        if node is None:
            rule = "an anchor refers to itself"
            raise UserError(rule, where=place.text, fix="remove the alias inside its own anchor")
        return node

    def _scalar(self, event: events.ScalarEvent, place: SourceLocation) -> Scalar:
        if event.style:
            assert event.start_mark is not None and event.end_mark is not None, "the parser gives positions"
            self.text_lines |= set(range(event.start_mark.line + 1, event.end_mark.line + 1))
        tag = event.tag
        if tag in (None, "!"):
            tag = self.resolve(yaml.ScalarNode, event.value, event.implicit)
        rule = f"the tag {tag.replace(_TAG, '!!')} is not supported"
        if tag in _SCALARS:
            try:
                return Scalar(checked_text(_SCALARS[tag](event.value), place))
            except _OutOfRange as error:
                key = ".".join(self.keys)
                raise UserError(str(error), where=place.text, key=key, value=event.value, fix=_SMALLER) from None
            except ValueError:
                rule = f"{shorten_repr(event.value)} is not of the type its tag says"
        raise UserError(rule, where=place.text, fix="remove the tag")

    def _table(self) -> Table:
        table = Table()
        while not self.check_event(events.MappingEndEvent):
            event = self.peek_event()
            place = self._place_of(event, getattr(event, "value", ""))
            if isinstance(event, events.ScalarEvent) and event.value == "<<" and event.implicit[0]:
                self.get_event()
                table.bases.extend(self._bases(place))
                continue
            node = self._entry().node
            key = "a list or mapping"
            if isinstance(node, Scalar):
                key = node.value
            if not isinstance(node, Scalar) or not isinstance(key, str):
                raise UserError(f"a key must be a name, found {key}", where=place.text, fix="write name: value")
            self.keys.append(key[:_LONGEST_PART])
            entry = self._entry(place)
            self.keys.pop()
            if key in table.explicit:
                self._check_repeated(key, table.explicit[key], entry)
            table.explicit[key] = entry
        self.get_event()
        return table

    def _check_repeated(self, key: str, first: Entry, second: Entry) -> None:
        """Notes a key that a section has twice with the same plain value; any other repetition is an error."""
        where = second.place.text
        values = [entry.node.value for entry in (first, second) if isinstance(entry.node, Scalar)]
        if len(values) < 2 or repr(values[0]) != repr(values[1]):
            rule = f"the key {key!r} stands here and at {first.place.text}; a section may have it once"
            raise UserError(rule, where=where, key=key, fix="remove one of the two")
        text = f"{second.place.key or key} stands at {first.place.text} and at {where}, with the same value"
        self.notes.append(Note(text, "ignored"))

    def _bases(self, place: SourceLocation) -> list[Table]:
        node = self._entry(place).node
        nodes = [node]
        if isinstance(node, Items):
            nodes = [entry.node for entry in node.entries]
        tables = [node for node in nodes if isinstance(node, Table)]
        if len(tables) < len(nodes):
            fix = "anchor a section: base: &base"
            raise UserError("<< must refer to a mapping", where=place.text, key="<<", fix=fix)
        return tables


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
    start = error.context_mark
    if start is not None and mark is not None and start.line < mark.line:
        text += f", in the part that begins on line {start.line + 1}"
    fix = next((fix for part, fix in _FIXES if part in text or part in (error.context or "")), "correct the YAML there")
    where = name
    if mark is not None:
        where = f"{name}:{mark.line + 1}"
    return UserError(f"not valid YAML: {text}", where=where, fix=fix)


def _compose(
    name: str, text: str, place: SourceLocation | None = None, most: int = MAX_VALUES
) -> tuple[list[Entry], _Composer]:
    """Reads all documents; returns their roots, and the composer with notes and the lines inside strings."""
    composer = None
    try:
        composer = _Composer(name, text, place, most)
        return composer.documents(), composer
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(name, error) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"the character U+{error.character:04X} is not text", where=f"{name}:{line}",
                        fix="remove it, or give a YAML text file") from None
    except (ValueError, OverflowError) as error:  # PyYAML passes an escape such as \\UFFFFFFFF to chr
        where = name
        if composer is not None:
            where = f"{name}:{composer.line + 1}"
        raise UserError(f"not valid YAML: {error}", where=where, fix="correct the escape in the quoted text") from None


def _without_ellipses(name: str, text: str) -> tuple[list[Entry], list[str]]:
    """Composes the text without its lines of only ``...``; returns the roots, and notes."""
    lines = text.split("\n")
    ellipses = {number for number, line in enumerate(lines) if _ELLIPSIS.match(line)}
    while True:
        remaining = ("" if number in ellipses else line for number, line in enumerate(lines))
        roots, composer = _compose(name, "\n".join(remaining))
        if not composer.text_lines & ellipses:
            break
        ellipses -= composer.text_lines
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    left_out = [str(number + 1) for number in sorted(ellipses) if number != last or lines[number][0] in " \t"]
    if left_out:
        composer.notes.insert(0, f"{name}: left out the lines of only '...' ({', '.join(left_out)})")
    return roots, composer.notes


def read_text(path: str) -> str:
    """Reads a configuration file; line ends become ``\\n``.

    Raises:
        UserError: The file is missing, a directory, unreadable or not text.
    """
    example = "give a YAML file: --config configs/quickstart.yaml"
    try:
        content = read_bytes(path, MAX_BYTES)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        fix = "correct the path"
        if not os.path.isabs(path):
            fix += f": it is relative to {working_directory()}"
        fix = missing_path_fix(path, fix)
        raise UserError("the configuration file does not exist", where=path, fix=fix) from None
    except IsADirectoryError:
        raise UserError("the configuration file is a directory", where=path, fix=example) from None
    except OSError as error:
        rule = f"the configuration file cannot be read: {error.strerror or error}"
        raise UserError(rule, where=path, fix="make it readable, or give another file") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise UserError(f"byte 0x{byte:02x} is not UTF-8 text", where=f"{path}:{line}",
                        fix="save the file as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError("the file is binary, not text", where=f"{path}:{line}", fix=example)
    return text.replace("\r\n", "\n")


def parse_document(name: str, text: str) -> tuple[Table, list[str]]:
    """Parses the text of a configuration file, which messages call ``name``.

    Returns:
        The tree, and notes about lines that were left out and about repeated keys.

    Raises:
        UserError: The text is empty, not YAML, has a key with two values, or is not one mapping.
    """
    roots, notes = _without_ellipses(name, text)
    if len(roots) > 1:
        where = roots[1].place.text
        raise UserError("a second document starts here", where=where, fix="keep one document, remove its '---'")
    if not roots or is_null(roots[0].node):
        raise UserError("the file is empty", where=f"{name}:1", fix="write sections such as model: and train_dataset:")
    root = roots[0].node
    if not isinstance(root, Table):
        kind = "a single value"
        if isinstance(root, Items):
            kind = "a list"
        where = roots[0].place.text
        raise UserError(f"the file holds {kind}, not sections", where=where, fix="write section: and key: value")
    check_size(*expanded_size(root), roots[0].place)
    return root, notes


def parse_value(text: str, place: SourceLocation, key: str, most: int = MAX_VALUES) -> Entry:
    """Parses the value of a flag: a YAML scalar, ``[a, b]`` or ``{a: b}``; any other text is a string.

    Raises:
        UserError: The text begins a list or mapping that is not valid, or has more than `most` values.
    """
    if not text.lstrip().startswith(("[", "{", '"', "'")):
        tag = ScalarResolver().resolve(yaml.ScalarNode, text.strip(), (True, False))
        if tag not in _SCALARS or tag == _TAG + "str":
            return Entry(Scalar(text), place)
        try:
            return Entry(Scalar(_SCALARS[tag](text.strip())), place)
        except _OutOfRange as error:
            raise UserError(str(error), where=place.text, key=key, value=text, fix=_SMALLER) from None
    try:
        return _compose(place.text, text, place, most)[0][0]
    except TooLarge as error:
        raise error.with_location(place.text, key) from None
    except UserError:
        raise UserError("is not a valid list, mapping or quoted text", where=place.text, key=key, value=text,
                        fix="write [a, b] or {a: b}") from None
