"""The error for a file with sections of both schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer.config.pynative.table import ROWS, SOURCE_PLACES
from trainer.config.read.nodes import Entry, Node, children
from trainer.config.read.relocate import canonical_key
from trainer.errors import UserError

_SHOWN = 3
"""The largest number of keys for which the message names those of the other schema."""


def mixed_schemas_error(newer: Mapping[str, Entry], older: Mapping[str, Entry]) -> UserError:
    """Returns the error for sections of both schemas: it names those of the schema that has fewer of them."""
    if len(older) <= len(newer):
        minority = older
        schema = "1.x"
        other = "2.0"
        converter = "`run_trainer.py convert FILE --to 2.0` translates a whole file of 1.x"
        names = SOURCE_PLACES
    else:
        minority = newer
        schema = "2.0"
        other = "1.x"
        converter = "without these `run_trainer.py convert FILE --to 2.0` writes the file in 2.0"
        names = {row.old: row.new for row in ROWS if row.new}
    entries = sorted(minority.items(), key=lambda item: item[1].place.order)
    keys = [key for name, entry in entries for key in _keys(name, entry.node)]
    known = {key: place for key in keys if (place := names.get(canonical_key(key)))}
    examples = [f"{place} for {key}" for key, place in list(known.items())[:_SHOWN]]
    fix = f"remove these, or write them as in {other}"
    if examples:
        fix += f" ({', '.join(examples)})"
    lines = [f"{name} (line {entry.place.text.rpartition(':')[2]})" for name, entry in entries]
    rule = f"the file mixes the schemas 1.x and 2.0; of {schema} it has {', '.join(lines)}"
    first, entry = entries[0]
    return UserError(rule, where=entry.place.text, key=first, fix=f"{fix}; {converter}")


def _keys(name: str, node: Node) -> Iterator[str]:
    """Yields the dotted keys of the values in a section."""
    below = children(node)
    if not below:
        yield name
    for part, entry in below:
        yield from _keys(f"{name}.{part}", entry.node)
