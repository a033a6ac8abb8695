"""Regular expressions that a user writes, matched in a time that grows with the states times the length of a name.

Python's `re` goes back and tries again: ``(a+)+b`` takes 2^n steps on n letters. Here an expression is read by Python's
parser and becomes an automaton, whose states after each character are one set (Thompson, "Regular expression search
algorithm", 1968). The step from one set to the next is remembered, as names share most of their characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

_Items: TypeAlias = tuple[tuple[Any, Any], ...]
_LONGEST = 1000  # characters of an expression
_LEVELS = 64  # of groups within groups
_STATES = 2000  # with every {2,5} written out
_STEPS = 1 << 14  # that an automaton remembers
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda one: one.isalnum() or one == "_",
}
_CHARACTERS: dict[str, Callable[[Any], list[tuple[Any, Any]]]] = {
    "IN": list,
    "LITERAL": lambda code: [("LITERAL", code)],
    "NOT_LITERAL": lambda code: [("NEGATE", None), ("LITERAL", code)],
    "ANY": lambda _: [("NEGATE", None), ("LITERAL", ord("\n"))],
}
"""A part that is one character, as a class: what to leave out (NEGATE), single ones, ranges and categories."""


class PatternError(ValueError):
    """Why an expression cannot be used, as the end of a sentence."""


class Pattern:
    """An expression that has been read."""

    def __init__(self, parts: Any) -> None:
        ignores_case = bool(parts.state.flags & re.IGNORECASE)
        self._automaton = _Automaton(parts, ignores_case, _Budget())

    def fullmatch(self, text: str) -> bool:
        """Whether the expression matches the whole text, as ``re.fullmatch``."""
        return bool(self._automaton.ends(text, everywhere=False) >> len(text))

    def search(self, text: str) -> bool:
        """Whether it matches a part of the text, as ``re.search``."""
        return bool(self._automaton.ends(text, everywhere=True))


@lru_cache(maxsize=64)
def read_pattern(text: str) -> Pattern:
    """Reads an expression.

    Raises:
        PatternError: It is none, is too long, too deep or too large, or has what needs going back: references to groups
            and atomic groups.
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
        raise PatternError(f"it has more than {_LEVELS} levels of groups") from None
    return Pattern(parts)


@lru_cache(maxsize=1 << 16)
def matches_whole(pattern: str, text: str) -> bool:
    """Whether an expression, which `read_pattern` takes, matches a whole name."""
    return read_pattern(pattern).fullmatch(text)


class _Budget:
    """The states that an expression may still have, those of its assertions included, and the levels."""

    def __init__(self) -> None:
        self.states, self.level = _STATES, 0

    def take(self) -> None:
        self.states -= 1
        if self.states < 0:
            raise PatternError(f"it has more than {_STATES} states, with every repeat written out")


class _Automaton:
    """States with edges that take a character, and free edges, some of which ask where in the text they are.

    A set of states, and one of positions, is an integer with a bit for each; position n is before character n. An
    automaton that is `backward` reads from the end of the text to its beginning.
    """

    def __init__(self, parts: Any, ignores_case: bool, budget: _Budget, backward: bool = False) -> None:
        self.backward, self.budget = backward, budget
        self.free: list[list[tuple[int, int]]] = []  # per state: to which, under which conditions (a set)
        self.taking: list[tuple[_Items, bool, int] | None] = []  # per state: class, whether case counts not, to which
        self.conditions: list[Callable[[str], int]] = []  # from the text to the positions where it holds
        self.numbers: dict[str, int] = {}  # of the conditions that have a name
        self.closures: dict[tuple[int, int], int] = {}
        self.moves: dict[tuple[int, str], int] = {}
        self.accepted = self._sequence(parts, self._state(), ignores_case)

    def _state(self) -> int:
        self.budget.take()
        self.free.append([])
        self.taking.append(None)
        return len(self.free) - 1

    def _sequence(self, parts: Any, start: int, ignores_case: bool) -> int:
        """Adds the parts, one after the other, from a state; returns the state where they end."""
        self.budget.level += 1
        if self.budget.level > _LEVELS:
            raise PatternError(f"it has more than {_LEVELS} levels of groups")
        for kind, value in reversed(parts) if self.backward else parts:
            start = self._part(str(kind), value, start, ignores_case)
        self.budget.level -= 1
        return start

    def _part(self, kind: str, value: Any, start: int, ignores_case: bool) -> int:
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(value, start, ignores_case)
        if kind == "SUBPATTERN":
            _, added, removed, parts = value
            ignores_case = (ignores_case or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE
            return self._sequence(parts, start, ignores_case)
        end = self._state()
        if kind in _CHARACTERS:
            self.taking[start] = (tuple(_CHARACTERS[kind](value)), ignores_case, end)
        elif kind == "BRANCH":
            for parts in value[1]:
                first = self._state()
                self.free[start].append((first, 0))
                self.free[self._sequence(parts, first, ignores_case)].append((end, 0))
        elif kind == "AT":
            self.free[start].append((end, 1 << self._place(str(value))))
        elif kind in ("ASSERT", "ASSERT_NOT"):
            self.free[start].append((end, 1 << self._assertion(*value, kind == "ASSERT", ignores_case)))
        else:
            what = kind.lower().replace("_", " ").replace("groupref", "reference to a group")
            raise PatternError(f"it has a part that is not supported here: {what}")
        return end

    def _repeat(self, value: tuple[int, int, Any], start: int, ignores_case: bool) -> int:
        least, most, parts = value
        for _ in range(least):
            start = self._sequence(parts, self._after(start), ignores_case)
        end = self._state()
        if str(most) == "MAXREPEAT":
            again = self._after(start)
            self.free[again].append((end, 0))
            self.free[self._sequence(parts, self._after(again), ignores_case)].append((again, 0))
            return end
        for _ in range(most - least):
            self.free[start].append((end, 0))
            start = self._sequence(parts, self._after(start), ignores_case)
        self.free[start].append((end, 0))
        return end

    def _after(self, state: int) -> int:
        """A new state, which a free edge leads to."""
        new = self._state()
        self.free[state].append((new, 0))
        return new

    def _place(self, name: str) -> int:
        if name not in self.numbers:
            self.numbers[name] = len(self.conditions)
            self.conditions.append(lambda text: _places(name, text))
        return self.numbers[name]

    def _assertion(self, direction: int, parts: Any, is_wanted: bool, ignores_case: bool) -> int:
        """What follows is matched from the end of the text on, so that one pass answers for every position."""
        least, most = parts.getwidth()
        if direction < 0 and least != most:
            raise PatternError("it is not a regular expression: look-behind requires fixed-width pattern")
        inner = _Automaton(parts, ignores_case, self.budget, backward=direction > 0)

        def holds(text: str) -> int:
            found = inner.ends(text, everywhere=True)
            return found if is_wanted else ~found

        self.conditions.append(holds)
        return len(self.conditions) - 1

    def ends(self, text: str, everywhere: bool) -> int:
        """The positions where a match ends that begins everywhere, or where reading begins."""
        order = range(len(text), -1, -1) if self.backward else range(len(text) + 1)
        conditions = [condition(text) for condition in self.conditions]
        states, found, holding = 1, 0, 0
        for at in order:
            if conditions:
                holding = sum((one >> at & 1) << number for number, one in enumerate(conditions))
            key = (states | everywhere, holding)
            states = self.closures[key] if key in self.closures else self._closure(*key)
            if states >> self.accepted & 1:
                found |= 1 << at
            if not states or at == order[-1]:
                break
            step = (states, text[at - 1] if self.backward else text[at])
            states = self.moves[step] if step in self.moves else self._move(*step)
        return found

    def _closure(self, states: int, holding: int) -> int:
        """The states, and those that free edges lead to while these conditions hold."""
        todo, closed = _bits(states), states
        while todo:
            for to, conditions in self.free[todo.pop()]:
                if not closed >> to & 1 and conditions & holding == conditions:
                    closed |= 1 << to
                    todo.append(to)
        return _remembered(self.closures, (states, holding), closed)

    def _move(self, states: int, character: str) -> int:
        """The states that these lead to with a character."""
        edges = [self.taking[state] for state in _bits(states)]
        reached = {edge[2] for edge in edges if edge is not None and _fits(character, edge[0], edge[1])}
        return _remembered(self.moves, (states, character), sum(1 << state for state in reached))


def _remembered(steps: dict[Any, int], key: Any, states: int) -> int:
    if len(steps) >= _STEPS:
        steps.clear()
    steps[key] = states
    return states


def _bits(number: int) -> list[int]:
    return [at for at, one in enumerate(reversed(f"{number:b}")) if one == "1"]


def _places(name: str, text: str) -> int:
    """The positions where an anchor holds."""
    if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return 1
    if name in ("AT_END", "AT_END_STRING"):
        return 1 << len(text)
    words = [False, *map(_CATEGORIES["CATEGORY_WORD"], text), False]
    edges = sum(1 << at for at in range(len(text) + 1) if words[at] != words[at + 1])
    return edges if name == "AT_BOUNDARY" else ~edges


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
