"""The JSON Schema of files of both schemas, for editors. A section of the newer one marks a file of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from trainer.config.pynative import MARKS
from trainer.config.pynative.table import ROWS, rows_without_effect
from trainer.config.read.json_schema import declaration, json_schema, properties_of
from trainer.config.read.rows import Row

OLDER = "Config"
NEWER = "NewerConfig"
_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "list": "array", "dict": "object"}
_DESCRIPTIONS = {
    "checkpoint.enable_save": "Save checkpoints while training; one is always saved at the end.",
    "checkpoint.save_max": "Checkpoints to keep, the newest ones.",
    "checkpoint.async_save": "Save while the training continues.",
    "checkpoint.save_interleaved_steps": "Optimizer steps between checkpoints.",
    "parallelism.reshard_after_forward_policy": "Whether gathered weights are freed after a layer's forward pass.",
    "recompute.mode": "Recompute nothing, whole layers (full_recompute_layer) or modules (select_module).",
    "lora_config": "Low-rank adapters: which modules have them, and their sizes.",
}
_SECTIONS = {
    "training": "Steps, batch sizes, seed and clipping.",
    "checkpoint": "Where checkpoints are saved and loaded.",
    "parallelism": "Degrees of parallelism: how ranks share the work.",
    "train_dataset": "The training data.",
    "monitor": "What is recorded beside the loss.",
    "profiler": "Profile of some steps.",
    "recompute": "Recomputation of activations in the backward pass.",
}
_EXPERTS = "model.model_config.moe_config"


def file_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of a file of either schema."""
    older = json_schema()
    dialect = older.pop("$schema")
    definitions = older.pop("$defs")
    root = {**older, "$defs": definitions}
    definitions = {OLDER: older, NEWER: _newer_schema(root), **definitions}
    return {
        "$schema": dialect,
        "title": older.pop("title"),
        "description": "A file of run_trainer, or of MindSpore Transformers 1.x or 2.0.",
        "if": {"anyOf": [_has_key(mark.split(".")) for mark in MARKS]},
        "then": {"$ref": f"#/$defs/{NEWER}"},
        "else": {"$ref": f"#/$defs/{OLDER}"},
        "$defs": {name: _without_titles(schema) for name, schema in definitions.items()},
    }


def _has_key(parts: list[str]) -> dict[str, Any]:
    """Returns a schema that a file with this nested key satisfies."""
    name, *rest = parts
    condition: dict[str, Any] = {"type": "object", "required": [name]}
    if rest:
        condition["properties"] = {name: _has_key(rest)}
    return condition


def _without_titles(schema: Any) -> Any:
    """Removes the titles that pydantic makes from the names of keys."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {}
    for word, rule in schema.items():
        if word == "properties":
            shown[word] = {key: _without_titles(value) for key, value in rule.items()}
        elif word in ("default", "enum"):
            shown[word] = rule
        elif word != "title" or not isinstance(rule, str):
            shown[word] = _without_titles(rule)
    return shown


def _newer_schema(root: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a newer file; `root` is the older schema, whose definitions it uses."""
    schema = _section("A file of MindSpore Transformers 2.0.")
    rows = [*ROWS, *rows_without_effect()]
    for row in sorted(rows, key=lambda row: row.old.count(".")):
        section = schema
        *path, name = row.old.split(".")
        for number, part in enumerate(path, start=1):
            description = _SECTIONS.get(part, f"Keys of {'.'.join(path[:number])}.")
            choices = section["properties"].setdefault(part, _nullable(_section(description)))["anyOf"]
            section = next(each for each in choices if each.get("type") == "object")
        known = section["properties"].get(name)
        if known is None or not row.reason:
            section["properties"][name] = _key_schema(row, root, known)
    return schema


def _section(description: str) -> dict[str, Any]:
    return {"type": "object", "description": description, "additionalProperties": False, "properties": {}}


def _nullable(section: dict[str, Any]) -> dict[str, Any]:
    """Allows null for a section, as in the older schema."""
    return {"anyOf": [section, {"type": "null"}], "description": section["description"]}


def _key_schema(row: Row, root: dict[str, Any], known: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the schema of a key; `known` is what an earlier row or the section here says of it."""
    if row.reason:
        return _without_effect(row)
    if row.kind == "dict":
        return _nullable(_merged_section(row, root))
    if row.old == "lora_config":
        return _nullable(_section(_DESCRIPTIONS[row.old]))
    target: dict[str, Any] = {}
    if row.new:
        target = deepcopy(declaration(root, row.new))
    described: dict[str, Any] = {}
    if row.old == "model.architectures":  # Hugging Face writes a list of one
        described = {"anyOf": [target, {"type": "array", "items": target}]}
    elif not row.kind:
        described = {**(known or {}), **target}
    elif known is not None:  # an earlier row of the same key
        return known
    elif row.choices:
        described["enum"] = list(row.choices)
    elif row.old == "recompute.mode":
        described["enum"] = ["None", "full", "select", None]
    elif row.old == "callbacks":
        described = target
    else:
        described = _typed(row, target)
    text = _DESCRIPTIONS.get(row.old) or re.sub(r"\s*Default\b.*$", "", target.get("description", ""))
    described["description"] = text or f"As {row.new}."
    described.pop("default", None)
    if row.default is not None:
        described["default"] = row.default
    return described


def _typed(row: Row, target: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema with the types of a row, and the bounds of the key here if its value is the same."""
    names = [_TYPES[kind] for kind in row.kind.split("|")]
    if row.default is None:
        names.append("null")
    described: dict[str, Any] = {"type": names[0]}
    if len(names) > 1:
        described = {"anyOf": [{"type": name} for name in names]}
    if row.transform is None and row.apply is None and len(names) == 1:
        described |= {word: bound for choice in (target, *target.get("anyOf", ())) for word, bound in choice.items()
                      if word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")}  # fmt: skip
    return described


def _without_effect(row: Row) -> dict[str, Any]:
    if row.is_refused:
        return {"enum": list(dict.fromkeys([row.default, None])), "description": f"No other value: {row.reason}."}
    described: dict[str, Any] = {"description": f"No effect here: {row.reason}."}
    if row.default is not None:
        described["default"] = row.default
    return described


def _merged_section(row: Row, root: dict[str, Any]) -> dict[str, Any]:
    """Returns a section with the keys of all kinds of the section here."""
    places = [row.new]
    if row.old == "model":
        places.append(_EXPERTS)
    choices: dict[str, list[dict[str, Any]]] = {}  # the different schemas of each key
    for properties in (each for place in places for each in properties_of(root, place)):
        for name, schema in properties.items():
            if schema not in choices.setdefault(name, []):
                choices[name].append(deepcopy(schema))
    merged = _section(re.sub(r"\s*Default\b.*$", "", declaration(root, row.new).get("description", "")))
    merged["properties"] = {name: _union(variants) for name, variants in choices.items()}
    return merged


def _union(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a schema that accepts what any of these does."""
    if len(choices) == 1:
        return choices[0]
    if all("const" in choice or "enum" in choice for choice in choices):
        values = [value for choice in choices for value in choice.get("enum") or [choice["const"]]]
        return {"enum": list(dict.fromkeys(values)), "description": choices[0].get("description", "")}
    return {"anyOf": choices, "description": choices[0].get("description", "")}
