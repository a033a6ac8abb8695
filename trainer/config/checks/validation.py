"""Turns pydantic's findings into messages with file, line, key, value, rule and fix."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trainer.config.checks.problem import NOWHERE, Problem, SourceLocation, nearest, one_of
from trainer.config.schema.fields import Section, fields_by_yaml_name, meanings_of, shape_of
from trainer.config.schema.root import Config
from trainer.errors import UserError

_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "True or False",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
    "model_attributes_type": "a section",
    "none_required": "null",
    "finite_number": "a finite number",
}


def validate(
    data: dict[str, Any], positions: dict[str, SourceLocation], written: dict[str, str], *, told: bool = False
) -> tuple[Config | None, list[Problem]]:
    """Validates plain values against the schema.

    Args:
        data: The values.
        positions: Where each key stands.
        written: Keys that were written under another name.
        told: Problems have been found before: a section that they left nothing of is not reported again.
    """
    try:
        return Config.model_validate(data), []
    except ValidationError as error:
        findings: dict[tuple[str, ...], list[Any]] = {}
        for item in error.errors(include_url=False):
            if told and item["type"] == "union_tag_not_found" and not item["input"]:
                continue
            path = _path(item["loc"], data, absent=item["type"] == "missing")
            findings.setdefault(path, []).append(item)
        # Of a union's members only the problems of the nearest one are told: those that lie deepest.
        deepest = [path for path in findings if not any(_is_within(other, path) for other in findings)]
        return None, [_problem(path, findings[path], positions, written) for path in deepest]


def _is_within(path: tuple[str, ...], section: tuple[str, ...]) -> bool:
    return len(path) > len(section) and path[: len(section)] == section


def _path(location: tuple[int | str, ...], data: Any, absent: bool) -> tuple[str, ...]:
    """The keys of pydantic's location: it also names the members of unions, which no file has.

    `absent`: the last of them is a key that is missing.
    """
    path: list[str] = []
    for number, part in enumerate(location):
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not absent or not isinstance(data, dict) or number < len(location) - 1:
            continue
        path.append(str(part))
    return tuple(path)


def _place(path: tuple[str, ...], positions: dict[str, SourceLocation]) -> SourceLocation:
    """Where a key stands, or the nearest section around it."""
    for length in range(len(path), 0, -1):
        key = ".".join(path[:length])
        if key in positions:
            return positions[key]
    return NOWHERE


def _problem(
    path: tuple[str, ...], items: list[Any], positions: dict[str, SourceLocation], written: dict[str, str]
) -> Problem:
    place, key = _place(path, positions), ".".join(path)
    key = written[key] if key in written else key
    first = items[0]
    if first["type"] == "missing":
        return Problem(
            place, UserError("this key is required", where=place.text, key=key, fix=f"add {path[-1]}: to it")
        )
    value = first["input"]
    rule = _rule(items, path)
    return Problem(place, UserError(rule, where=place.text, key=key, value=value, fix=_fix(path, items, value)))


def _rule(items: list[Any], path: tuple[str, ...]) -> str:
    field = _declaration(path)
    meanings = meanings_of(field) if field is not None else {}
    if meanings:
        return f"must be {one_of([f'{value} ({word})' for value, word in meanings.items()])}"
    kinds = [_KINDS[item["type"]] for item in items if item["type"] in _KINDS]
    literals = [name for item in items if item["type"] == "literal_error" for name in _expected(item)]
    if literals:
        return f"must be {one_of(literals + kinds)}"
    bounds = [text for item in items for text in [_bound(item)] if text]
    if bounds:
        return f"must be {' and '.join(bounds)}"
    if kinds:
        return f"must be {one_of(list(dict.fromkeys(kinds)))}"
    return items[0]["msg"][0].lower() + items[0]["msg"][1:]


def _bound(item: Any) -> str:
    context = item["ctx"] if "ctx" in item else {}
    match item["type"]:
        case "greater_than":
            return f"greater than {context['gt']}"
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "less_than":
            return f"less than {context['lt']}"
        case "less_than_equal":
            return f"at most {context['le']}"
        case "too_short":
            return f"a list of at least {context['min_length']} values"
        case "too_long":
            return f"a list of at most {context['max_length']} values"
        case "string_too_short":
            return "a string that is not empty"
    return ""


def _expected(item: Any) -> list[str]:
    """The values of a literal, from pydantic's text: ``'a', 'b' or 'c'``."""
    text = item["ctx"]["expected"].replace(" or ", ", ")
    return [part.strip().strip("'") for part in text.split(",")]


def _fix(path: tuple[str, ...], items: list[Any], value: Any) -> str:
    types = {item["type"] for item in items}
    if "literal_error" in types and isinstance(value, str):
        names = [name for item in items if item["type"] == "literal_error" for name in _expected(item)]
        guess = nearest(value, names)
        if guess or len(names) == 1:
            return f"write {guess or names[0]}"
        return f"write one of {one_of(names)}"
    if isinstance(value, str) and types & {"int_type", "float_type", "bool_type"}:
        bare = value.strip().replace("_", "")
        if bare.replace(".", "", 1).lstrip("+-").isdigit() or bare.lower() in ("true", "false"):
            return f"write {bare} without quotes"
        if "bool_type" in types and bare.lower() in ("yes", "no", "on", "off", "y", "n"):
            return f"write {bare.lower() in ('yes', 'on', 'y')}"
    description = describe(path)
    return description if description else "correct the value"


def describe(path: tuple[str, ...]) -> str:
    """The documentation of a key, for the fix of a message."""
    field = _declaration(path)
    if field is None:
        return describe(path[:-1]) if path else ""
    name = next(part for part in reversed(path) if not part.isdecimal())
    return f"{name}: {field.description}".rstrip(".")


def _declaration(path: tuple[str, ...]) -> FieldInfo | None:
    """The declaration of a key; None when there is none of this name."""
    kinds: tuple[type[Section], ...] = (Config,)
    field = None
    for part in path:
        if not part.isdecimal():
            known = (fields_by_yaml_name(kind) for kind in kinds)
            field = next((fields[part] for fields in known if part in fields), None)
            if field is None:
                return None
            kinds = shape_of(field).kinds
    return field
