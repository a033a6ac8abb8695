"""Regular expressions that a user writes, matched in a time that no expression can make grow without bound.

Python's `re` goes back and tries again: ``(a+)+b`` takes 2^n steps on n letters. Here an expression is read by Python's
parser, and matching follows all ways at once (Thompson 1968): each part of the expression maps the set of positions
where it may begin to the set of those where it may end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

_Items: TypeAlias = tuple[tuple[Any, Any], ...]
_LONGEST = 1000  # characters of an expression
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda one: one.isalnum() or one == "_",
}


class PatternError(ValueError):
    """Why an expression cannot be used, as the end of a sentence."""


class Pattern(NamedTuple):
    """An expression that has been read."""

    parts: Any
    ignores_case: bool

    def fullmatch(self, text: str) -> bool:
        """Whether the expression matches the whole text, as ``re.fullmatch``."""
        return bool(_Match(text, self.ignores_case).sequence(self.parts, 1) >> len(text))

    def search(self, text: str) -> bool:
        """Whether it matches a part of the text, as ``re.search``."""
        return bool(_Match(text, self.ignores_case).sequence(self.parts, (2 << len(text)) - 1))


@lru_cache(maxsize=64)
def read_pattern(text: str) -> Pattern:
    """Reads an expression.

    Raises:
        PatternError: It is none, is too long, or has what needs going back: references to groups and atomic groups.
    """
    if len(text) > _LONGEST:
        raise PatternError(f"it is longer than {_LONGEST} characters")
    try:
        import re._parser as parser  # of Python from 3.11 on
    except ImportError:
        import sre_parse as parser
    try:
        parts = parser.parse(text)
    except (re.error, OverflowError) as error:
        raise PatternError(f"it is not a regular expression: {error}") from None
    except RecursionError:
        raise PatternError("its groups are nested too deep") from None
    return Pattern(_checked(parts), bool(parts.state.flags & re.IGNORECASE))


@lru_cache(maxsize=1 << 16)
def matches_whole(pattern: str, text: str) -> bool:
    """Whether an expression, which `read_pattern` takes, matches a whole name."""
    return read_pattern(pattern).fullmatch(text)


def _checked(parts: Any) -> Any:
    """The parts, with every character as a class: what to leave out (NEGATE), single ones, ranges and categories."""
    for number, (kind, value) in enumerate(parts):
        name = str(kind)
        if name in _CHARACTERS:
            parts[number] = ("IN", tuple(_CHARACTERS[name](value)))
        elif name not in _STEPS:
            what = name.lower().replace("_", " ").replace("groupref", "reference to a group")
            raise PatternError(f"it has a part that is not supported here: {what}")
        for below in _below(name, value):
            below.getwidth()  # which is remembered, and asks for the parts as the parser made them
            _checked(below)
    return parts


_CHARACTERS: dict[str, Callable[[Any], list[tuple[Any, Any]]]] = {
    "IN": list,
    "LITERAL": lambda code: [("LITERAL", code)],
    "NOT_LITERAL": lambda code: [("NEGATE", None), ("LITERAL", code)],
    "ANY": lambda _: [("NEGATE", None), ("LITERAL", ord("\n"))],
}


def _below(name: str, value: Any) -> list[Any]:
    """The parts within a part."""
    if name == "BRANCH":
        return value[1]
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        return [value[2]]
    if name == "SUBPATTERN":
        return [value[3]]
    return [value[1]] if name in ("ASSERT", "ASSERT_NOT") else []


class _Match:
    """The matching of one text. Bit n of a set of positions stands for the place before character n."""

    def __init__(self, text: str, ignores_case: bool) -> None:
        self.text, self.ignores_case = text, ignores_case
        self.characters: dict[tuple[_Items, bool], int] = {}
        self.repeated: dict[tuple[int, bool, int], int] = {}

    def sequence(self, parts: Any, starts: int) -> int:
        """Where the parts, one after the other, may end."""
        for kind, value in parts:
            if not starts:
                break
            starts = _STEPS[str(kind)](self, value, starts)
        return starts

    def _class(self, items: _Items, starts: int) -> int:
        """One character of a class."""
        key = (items, self.ignores_case)
        if key not in self.characters:
            self.characters[key] = sum(1 << at for at, one in enumerate(self.text) if _fits(one, *key))
        return (starts & self.characters[key]) << 1

    def _branch(self, value: tuple[None, list[Any]], starts: int) -> int:
        found = 0
        for parts in value[1]:
            found |= self.sequence(parts, starts)
        return found

    def _subpattern(self, value: tuple[Any, int, int, Any], starts: int) -> int:
        outside = self.ignores_case
        self.ignores_case = (outside or bool(value[1] & re.IGNORECASE)) and not value[2] & re.IGNORECASE
        ends = self.sequence(value[3], starts)
        self.ignores_case = outside
        return ends

    def _repeat(self, value: tuple[int, int, Any], starts: int) -> int:
        least, most, parts = value
        found = starts
        for _ in range(min(least, len(self.text) + 1)):  # further ones match nothing new, or the empty text
            found = self._once(parts, found)
        new = found
        for _ in range(min(most - least, len(self.text) + 1)):
            new = self._once(parts, new) & ~found
            if not new:
                break
            found |= new
        return found

    def _once(self, parts: Any, starts: int) -> int:
        """A repeated part, from each position only once: repeats in repeats would come to it again and again."""
        if len(parts) == 1 and str(parts[0][0]) == "IN":
            return self._class(parts[0][1], starts)
        ends = 0
        while starts:
            start = starts & -starts
            starts ^= start
            key = (id(parts), self.ignores_case, start)
            if key not in self.repeated:
                self.repeated[key] = self.sequence(parts, start)
            ends |= self.repeated[key]
        return ends

    def _at(self, kind: Any, starts: int) -> int:
        text, name = self.text, str(kind)
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return starts & 1
        if name in ("AT_END", "AT_END_STRING"):
            return starts & 1 << len(text)
        words = [False, *map(_CATEGORIES["CATEGORY_WORD"], text), False]
        edges = sum(1 << at for at in range(len(text) + 1) if words[at] != words[at + 1])
        return starts & (edges if name == "AT_BOUNDARY" else ~edges)

    def _assert(self, value: tuple[int, Any], starts: int, wanted: bool = True) -> int:
        direction, parts = value
        width = parts.getwidth()[0] if direction < 0 else 0
        found = 0
        for at in range(len(self.text) + 1):
            ends = self.sequence(parts, 1 << at - width) if starts >> at & 1 and at >= width else 0
            holds = bool(ends >> at & 1) if direction < 0 else bool(ends)
            if starts >> at & 1 and holds == wanted:
                found |= 1 << at
        return found

    def _assert_not(self, value: tuple[int, Any], starts: int) -> int:
        return self._assert(value, starts, wanted=False)


_STEPS: dict[str, Callable[[_Match, Any, int], int]] = {
    "IN": _Match._class, "BRANCH": _Match._branch, "SUBPATTERN": _Match._subpattern, "MAX_REPEAT": _Match._repeat,
    "MIN_REPEAT": _Match._repeat, "AT": _Match._at, "ASSERT": _Match._assert, "ASSERT_NOT": _Match._assert_not,
}  # fmt: skip


@lru_cache(maxsize=1 << 12)
def _fits(one: str, items: _Items, ignores_case: bool) -> bool:
    """Whether a class has a character, in either case where case does not count."""
    negated = str(items[0][0]) == "NEGATE"
    cases = (one.lower(), one.upper()) if ignores_case else (one,)
    return any(_is_in(case, items[negated:]) for case in cases) != negated


def _is_in(one: str, items: _Items) -> bool:
    for kind, value in items:
        name = str(kind)
        if name == "LITERAL":
            found = ord(one) == value
        elif name == "RANGE":
            found = value[0] <= ord(one) <= value[1]
        else:
            category = str(value)
            found = _CATEGORIES[category.replace("_NOT_", "_")](one) != ("_NOT_" in category)
        if found:
            return True
    return False
