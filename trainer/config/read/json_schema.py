"""The JSON Schema of a configuration file, for editors that complete and check YAML."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from trainer.config.read.relocate import fields_at, rows_by_place
from trainer.config.schema.fields import Section, shape_of, yaml_names
from trainer.config.schema.root import Config


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a file, with the other names and places of keys.

    Returns:
        A schema of draft 2020-12, as a dictionary that can be written as JSON.
    """
    schema = Config.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    for section in _all_sections():
        section_schema = definitions.get(section.__name__, schema)  # of Config: the file
        _allow_empty_sections(section, section_schema)
        properties = section_schema["properties"]
        for name, main in yaml_names(section).items():
            properties.setdefault(name, _alias_schema(properties[main], main))
        if section.type_aliases:
            types = properties["type"]
            known = types.get("enum") or [types.pop("const")]
            types["enum"] = [*known, *section.type_aliases]
    for row in rows_by_place().values():  # the other places of keys, which `relocate` accepts
        path, _, name = row.old.rpartition(".")
        for properties in properties_of(schema, path):
            properties.setdefault(name, _alias_schema(declaration(schema, row.new), row.new))
    for section_schema in (schema, *definitions.values()):
        _drop_discriminators(section_schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "run_trainer configuration",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def _all_sections() -> list[type[Section]]:
    sections: list[type[Section]] = [Config]
    for section in sections:
        for field in section.model_fields.values():
            sections += [nested for nested in shape_of(field).kinds if nested not in sections]
    return sections


def _allow_empty_sections(section: type[Section], schema: dict[str, Any]) -> None:
    """Allows null for sections: in YAML, ``section:`` with nothing below it is null, and means the defaults."""
    for name, field in section.model_fields.items():
        shape = shape_of(field)
        key = field.alias or name
        if shape.kinds and not shape.nullable:
            inner = schema["properties"][key]
            outer = {word: inner.pop(word) for word in ("description", "default", "title") if word in inner}
            schema["properties"][key] = {"anyOf": [inner, {"type": "null"}], **outer}


def _alias_schema(schema: dict[str, Any], main: str) -> dict[str, Any]:
    """Returns the schema of a key for another name of it, without the default: only the main name has one."""
    copy = {key: value for key, value in deepcopy(schema).items() if key != "default"}
    return {**copy, "description": f"Another name of {main}. {schema.get('description', '')}".rstrip()}


def properties_of(schema: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """Returns the properties of each class of a section; those of the file for an empty key."""
    if not section:
        return [schema["properties"]]
    kinds = [kind for field in fields_at(section) for kind in shape_of(field).kinds]
    return [schema["$defs"][kind.__name__]["properties"] for kind in kinds]


def declaration(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns the schema of the key at a dotted place of a file."""
    section, _, name = key.rpartition(".")
    if name.isdecimal():
        return declaration(schema, section)["items"]
    return next(properties[name] for properties in properties_of(schema, section) if name in properties)


def _drop_discriminators(schema: Any) -> None:
    """Removes discriminators: they require the key ``type``, which has a default. ``oneOf`` suffices."""
    if isinstance(schema, list):
        for item in schema:
            _drop_discriminators(item)
    if isinstance(schema, dict):
        if "oneOf" in schema:
            schema.pop("discriminator", None)
        for item in schema.values():
            _drop_discriminators(item)
