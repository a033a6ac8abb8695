"""The JSON Schema of a configuration file, for editors that complete and check YAML."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from trainer.config.read.relocate import is_flat_moe_key
from trainer.config.schema.fields import Section, shape_of, yaml_names
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.root import Config


def json_schema() -> dict[str, Any]:
    """Describes every key, also under its other names and in its other places."""
    schema = Config.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    for kind in _all_sections():
        if kind is Config:
            described = schema
        else:
            described = definitions[kind.__name__]
        _allow_empty_sections(kind, described)
        _add_aliases(kind, described)
        if kind.type_aliases:
            names = described["properties"]["type"]
            if "enum" in names:
                known = names["enum"]
            else:
                known = [names.pop("const")]
            names["enum"] = [*known, *kind.type_aliases]
    _add_places(schema)
    for described in (schema, *definitions.values()):
        _drop_discriminators(described)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "run_trainer configuration",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def _all_sections() -> list[type[Section]]:
    found: list[type[Section]] = [Config]
    for kind in found:
        for field in kind.model_fields.values():
            found += [below for below in shape_of(field).kinds if below not in found]
    return found


def _allow_empty_sections(kind: type[Section], described: dict[str, Any]) -> None:
    """``section:`` with nothing below it is null in YAML, and means the defaults."""
    for name, field in kind.model_fields.items():
        shape = shape_of(field)
        key = field.alias or name
        if shape.kinds and not shape.nullable:
            inner = described["properties"][key]
            outer = {word: inner.pop(word) for word in ("description", "default", "title") if word in inner}
            described["properties"][key] = {"anyOf": [inner, {"type": "null"}], **outer}


def _add_aliases(kind: type[Section], described: dict[str, Any]) -> None:
    properties = described["properties"]
    for name, main in yaml_names(kind).items():
        if name not in properties:
            properties[name] = _renamed(properties[main], main)


def _renamed(described: dict[str, Any], main: str) -> dict[str, Any]:
    """The same rule under another name; without a default, which only the main name has."""
    copy = {key: value for key, value in deepcopy(described).items() if key != "default"}
    return {**copy, "description": f"Another name of {main}. {described.get('description', '')}".rstrip()}


def _add_places(schema: dict[str, Any]) -> None:
    """The other places of sections: see relocate.py."""
    definitions = schema["$defs"]
    top = schema["properties"]
    model = definitions[ModelConfig.__name__]["properties"]
    moe = definitions[MoEConfig.__name__]["properties"]
    for key in list(moe):
        if is_flat_moe_key(key):
            model[key] = _renamed(moe[key], f"moe_config.{key}")
    top["callback"] = _renamed(top["callbacks"], "callbacks")
    top["model_config"] = _renamed(definitions["ModelSection"]["properties"]["model_config"], "model.model_config")
    top["moe_config"] = _renamed(model["moe_config"], "model.model_config.moe_config")
    name = "parallel_optimizer_threshold"
    threshold = definitions["ParallelOptimizerConfig"]["properties"][name]
    definitions["ParallelSection"]["properties"][name] = _renamed(threshold, f"parallel_optimizer_config.{name}")
    dataset = {"anyOf": [{"$ref": "#/$defs/DatasetConfig"}, {"type": "null"}], "description": "The data set itself."}
    definitions["DatasetTask"]["properties"]["dataset_config"] = dataset


def _drop_discriminators(described: Any) -> None:
    """A discriminator demands its key, and ours has a default; ``oneOf`` with a constant ``type`` says the same."""
    if isinstance(described, dict) and "oneOf" in described:
        described.pop("discriminator", None)
    if isinstance(described, dict):
        below = described.values()
    else:
        if isinstance(described, list):
            below = described
        else:
            below = ()
    for value in below:
        _drop_discriminators(value)
