"""Writes a configuration as YAML text that loads to an equal one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from trainer.config.families import FAMILIES
from trainer.config.read.yaml_reader import ScalarResolver
from trainer.config.schema.fields import Section, support_of
from trainer.config.schema.root import Config


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper with the scalars of `yaml_reader`: it quotes strings that the reader would take for numbers."""

    yaml_implicit_resolvers = ScalarResolver.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_list(self, data: Iterable[Any]) -> yaml.SequenceNode:
        """Represents a list of plain values in one line, and a list of sections with a dash for each."""
        items = list(data)
        is_flat = not any(isinstance(item, (list, dict)) for item in items)
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=is_flat)


_Dumper.add_representer(list, _Dumper.represent_list)


RESOLVED = "# The resolved configuration:"
"""The beginning of a run's config.yaml."""
SMALL_COPY = "# Made by `run_trainer.py smoke`: a small copy of the file, with other data."
"""The beginning of the configuration of a smoke run, which is complete, too."""


def dump_config(config: Config) -> str:
    """Writes the resolved configuration: every key that acts, and all others that differ from their defaults.

    Returns:
        YAML text; :func:`trainer.config.load_config` reads an equal configuration from it.
    """
    return dump_values(plain_values(config), f"{RESOLVED} every key that acts, and what else was set.\n")


def dump_values(plain: dict[str, Any], comment: str) -> str:
    """Writes plain values as YAML text below a comment."""
    text = yaml.dump(plain, Dumper=_Dumper, width=120, allow_unicode=True, sort_keys=False, default_flow_style=False)
    return comment + text


def plain_values(config: Config) -> dict[str, Any]:
    """Returns a configuration as plain values under the names that a file uses."""
    plain = _values(config)
    if config.runner_config.global_batch_size is not None:
        del plain["runner_config"]["gradient_accumulation_steps"]  # another job derives its own number
    if not config.is_decoder:
        del plain["model"]["model_config"]  # the defaults of decoders, without effect
        return plain
    family = FAMILIES[config.model.arch.type]
    settings = plain["model"]["model_config"]
    implied = [(settings, name) for name in (*family.model, *family.model_with_window)]
    implied += [(settings["moe_config"], name) for name in family.experts if "moe_config" in settings]
    for section, name in implied:
        section.setdefault(name, None)  # the file has null instead of the family's value
    return plain


def _values(section: Section) -> dict[str, Any]:
    """Returns a section as plain values under the names that a file uses, ``type`` first."""
    plain: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        written = _written(value)
        acts = support_of(field)[0] == "supported" and value is not None and written != {}
        if acts or value != field.get_default(call_default_factory=True):
            plain[field.alias or name] = written
    if "type" in plain:
        return {"type": plain["type"], **plain}
    return plain


def _written(value: Any) -> Any:
    if isinstance(value, Section):
        return _values(value)
    if isinstance(value, list):
        return [_written(item) for item in value]
    return value


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested tables and lists of tables with their dotted keys, as flags name them."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = list(enumerate(value))
    else:
        yield key, value
        return
    for name, item in items:
        yield from flatten(item, f"{key}.{name}".lstrip("."))
