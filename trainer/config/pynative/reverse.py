"""States a configuration in the newer schema, with the rows of the table read backwards."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainer.config.pynative.table import ROWS, SOURCE_PLACES
from trainer.config.read.dump import plain_values
from trainer.config.read.nodes import look_up
from trainer.config.read.rows import Row
from trainer.config.schema.root import Config


class Statement(NamedTuple):
    """A key of the newer schema with its value, and its place here."""

    value: Any
    places: tuple[str, ...]
    """Its places here; none if the sections of this schema are arranged otherwise."""
    default: Any
    """The value if a file leaves the key out; None if that depends on other keys."""


def source_statements(config: Config) -> dict[str, Statement]:
    """Returns the keys of the newer schema that state this configuration.

    Rows without an inverse and keys without a place there are missing: whoever writes a file of these keys reads it
    again, and compares.
    """
    here = plain_values(config)
    values: dict[str, Statement] = {}
    for row in ROWS:
        value = _old_value(row, config, here)
        if value is not ...:
            places = tuple(other.new for other in ROWS if other.old == row.old and other.new)
            values[row.old] = Statement(value, places, row.default)

    def value_of(key: str) -> Any:
        """Returns the value of a key; for a section, whether the configuration states a key of it."""
        if key in values:
            return values[key].value
        return any(old.startswith(f"{key}.") for old in values)

    rows = {row.old: row for row in ROWS}
    stated = {old: statement for old, statement in values.items() if rows[old].applies(value_of)}
    last = {place: old for old, one in stated.items() for place in one.places}
    stated = {old: one for old, one in stated.items() if rows[old].inverse or old in last.values()}
    return stated | _copies(here, set(last))


def _old_value(row: Row, config: Config, here: dict[str, Any]) -> Any:
    """Returns the value of a row's old key; ``...`` if the configuration lacks it, or the row has no inverse."""
    if row.inverse is not None:
        return row.inverse(config)
    value = look_up(here, row.new)
    if row.kind == "dict" or value is None:
        return ...
    if row.transform is not None:
        if row.transform.backward is None:
            return ...
        return row.transform.backward(value)
    if isinstance(value, dict) or not row.accepts(value):
        return ...
    names = [name for name, meaning in row.choices.items() if meaning == value]
    return next(iter(names), value)


def _copies(here: dict[str, Any], stated: set[str]) -> dict[str, Statement]:
    """Returns the keys of sections that both schemas share, except those that have rows, whose places are `stated`."""
    sections = {row.new: row.old for row in ROWS if row.kind == "dict" and row.inverse is None}
    sections |= {place: old for place, old in SOURCE_PLACES.items() if place.endswith("moe_config")}
    copies = {}
    for section, old in sections.items():
        elsewhere = {row.new for row in ROWS if not row.old.startswith(f"{old}.")}
        values = look_up(here, section)
        if not isinstance(values, dict):
            continue
        for name, value in values.items():
            place = f"{section}.{name}"
            if place not in stated and place not in sections and place not in elsewhere:
                copies[f"{old}.{name}"] = Statement(value, (place,), None)
    return copies
