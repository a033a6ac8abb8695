"""Where a value of a configuration was written."""

from __future__ import annotations

from typing import NamedTuple


class SourceLocation(NamedTuple):
    """Where something is written, and in which order it is read: lines of the file first, then overrides."""

    order: int
    text: str


NO_LOCATION = SourceLocation(0, "")
