"""The origin of a value of a configuration: file and line, or flag, and the key there."""

from __future__ import annotations

from typing import Any, NamedTuple


class SourceLocation(NamedTuple):
    """Where a value comes from: file and line, or flag, and the key that is written there."""

    order: int
    """Lines of the file first, then overrides."""
    text: str
    key: str = ""
    """The dotted key as the file or the flag writes it; empty for a section that neither writes."""
    value: Any = ...
    """The written value, if the value of the configuration was computed from it; else ``...``."""


NO_LOCATION = SourceLocation(0, "")
