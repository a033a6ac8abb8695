"""Writes a configuration as the shortest file of the newer schema that is read as the same configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainer.config import Config, parse_config
from trainer.config.checks.problem import ConfigError, raise_problems
from trainer.config.pynative.reverse import Statement, source_statements
from trainer.config.pynative.table import ROWS
from trainer.config.read.dump import dump_values, flatten, plain_values
from trainer.config.read.nodes import look_up

_ALWAYS = ("model.architectures", "lr_scheduler.type", "train_dataset.dataloader.type")
"""Keys that every file has."""
_FIRST = (".type", ".architectures", ".mode")
"""Keys at the beginning of their sections."""


class NewerFile(NamedTuple):
    """A file of the newer schema."""

    values: dict[str, Any]
    """Its keys with their values."""
    config: Config
    """What reading it gives."""
    defaults: list[str]
    """Its keys that the older file does not have: their defaults differ."""
    refused: list[tuple[ConfigError, tuple[str, ...]]]
    """The errors of keys whose values the newer schema does not allow, with their places in the configuration."""


def newer_file(config: Config, name: str) -> NewerFile:
    """Finds the file whose reading, under this name, is most like the configuration.

    It has the keys that are set there, and those whose defaults in the newer schema are others.

    Raises:
        UserError: It would have errors that no key of the configuration causes.
    """
    every = source_statements(config)
    chosen = {key: one.value for key, one in every.items() if _is_set(one, config) or key in _ALWAYS}
    refused: list[tuple[ConfigError, tuple[str, ...]]] = []
    while True:
        problems: list[ConfigError] = []
        after = parse_config(name, newer_text(chosen, ""), (), problems)
        differing = different_keys(config, after).keys()
        open_keys = {key: one for key, one in every.items() if key not in chosen and one.value != one.default}
        if missing := {key: one.value for key, one in open_keys.items() if differing & {*one.places}}:
            chosen |= missing
            continue
        wrong = [each for each in problems if each.error.key in chosen]
        if not wrong:
            raise_problems(problems)
            break
        for each in wrong:
            if each.error.key in chosen:
                del chosen[each.error.key]
                refused.append((each, every.pop(each.error.key).places))
    counted = ("training.steps", "training.global_batch_size", *_ALWAYS)
    defaults = [key for key in chosen if key not in counted and every[key].places and not _is_set(every[key], config)]
    return NewerFile(chosen, after, defaults, refused)


def newer_text(values: dict[str, Any], comment: str) -> str:
    """Returns the text of a file with these keys: sections in the order of the table, in each its type first."""
    order = list(dict.fromkeys(row.old.partition(".")[0] for row in ROWS))

    def rank(key: str) -> tuple[int, bool]:
        """Returns the position of a key's section, and whether it follows the section's type."""
        return order.index(key.partition(".")[0]), not key.endswith(_FIRST)

    nested: dict[str, Any] = {}
    for key in sorted(values, key=rank):
        section = nested
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = values[key]
    return dump_values(nested, comment)


def _is_set(statement: Statement, config: Config) -> bool:
    """Returns whether the older file sets a key to another value than the default of the newer schema."""
    if statement.value == statement.default:
        return False
    return not statement.places or any(is_below(key, statement.places) for key in config.source.positions)


def is_below(key: str, places: tuple[str, ...]) -> bool:
    """Returns whether a dotted key is one of these places or below one."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


def different_keys(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the keys whose values differ between two configurations, with both values."""
    values = plain_values(first)
    others = plain_values(second)
    flat = dict(flatten(values))
    other_flat = dict(flatten(others))
    different = [key for key in dict.fromkeys((*flat, *other_flat)) if flat.get(key) != other_flat.get(key)]
    # What is a section on one side and a plain value on the other is one difference.
    sections = tuple(f"{key}." for key in different)
    kept = [key for key in different if not key.startswith(sections)]
    return {key: (flat.get(key, look_up(values, key)), other_flat.get(key, look_up(others, key))) for key in kept}
