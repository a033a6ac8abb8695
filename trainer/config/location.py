"""The location of a value of a configuration: file and line, or flag."""

from __future__ import annotations

from typing import NamedTuple


class SourceLocation(NamedTuple):
    """A location as text, and its order: lines of the file first, then overrides."""

    order: int
    text: str


NO_LOCATION = SourceLocation(0, "")
