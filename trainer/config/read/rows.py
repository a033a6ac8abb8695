"""The format of the tables that say where a key of another schema, or an older name, is in this schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Transform(NamedTuple):
    """A change of a value between two schemas; ``...`` as a result means that the key is left out."""

    forward: Callable[[Any], Any]
    backward: Callable[[Any], Any] | None = None
    """The inverse; None if the value here does not tell the old one."""


class Row(NamedTuple):
    """A key of another schema: its place there and here, and what becomes of its value."""

    old: str
    new: str = ""
    """The place here; empty if there is none."""
    kind: str = ""
    """The types of its value: int, float, bool, str, list, dict; null, too, if the default is None. Empty: any."""
    default: Any = None
    """The value if a file leaves the key out; None: the key is then not set here."""
    when: str = ""
    """The row applies only if this old key is true, has the value behind "=", or is a section of the file."""
    transform: Transform | None = None
    """The change of the value; None: it is the same in both schemas."""
    apply: Callable[[Any, Row], None] | None = None
    """Sets the key, and perhaps others, from several old keys; called even if the file lacks the key."""
    note: str = ""
    """What to tell the user if the key is set; ``{}`` stands for the value."""
    reason: str = ""
    """Why the key has no effect; for a refused key, what to do instead."""
    is_refused: bool = False
    """Whether another value than the default is an error, because it would change the results."""
    inverse: Callable[[Any], Any] | None = None
    """Computes the old value from a configuration, if `new` alone does not tell it; ``...`` as for a transform.

    A row with a transform or `apply`, but without any inverse, is read in one direction only: `convert` refuses its
    value unless another row says it.
    """
    keeps_null: bool = False
    """Whether null is a value of the key; elsewhere it means that the key is not set."""
    choices: Mapping[str, str] = {}
    """The words that are its values, which a file may write in upper case -> the values here."""

    def accepts(self, value: Any) -> bool:
        """Returns whether a value has one of the types of the key; a float may be written as an integer."""
        return not self.kind or type(value).__name__ in self.kind.replace("float", "int|float").split("|")

    def applies(self, value_of: Callable[[str], Any]) -> bool:
        """Returns whether the condition of the row holds, for a function that returns the value of an old key."""
        condition, _, expected = self.when.partition("=")
        if expected:
            return value_of(condition) == expected
        return not condition or bool(value_of(condition))


def reverse(rows: tuple[Row, ...]) -> dict[str, str]:
    """Returns the places of a table from here to there; of several rows with one place here, the first counts."""
    return {row.new: row.old for row in reversed(rows) if row.new}
