"""Turns pydantic's errors into messages with file, line, key, value, rule and fix."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trainer.config.checks.problem import ConfigError, nearest, one_of, problem_at
from trainer.config.location import NO_LOCATION
from trainer.config.other_models import unsupported_features
from trainer.config.read.model_folder import CAUSAL
from trainer.config.read.relocate import fields_at
from trainer.config.schema.fields import default_text, fix_of, shape_of, types_of
from trainer.config.schema.root import Config, ConfigSource
from trainer.errors import shorten_repr, value_text

_KINDS = {
    "int_type": "an integer", "int_from_float": "an integer", "float_type": "a number", "bool_type": "true or false",
    "string_type": "a string", "list_type": "a list", "dict_type": "a section", "model_type": "a section",
    "model_attributes_type": "a section", "none_required": "null", "finite_number": "a finite number",
}  # fmt: skip
_DEFAULT = re.compile(r"Default .*$")
_BOUNDS = {
    "greater_than": ("greater than {gt}", "a number above {gt}"),
    "greater_than_equal": ("at least {ge}", "{ge} or more"),
    "less_than": ("less than {lt}", "a number below {lt}"),
    "less_than_equal": ("at most {le}", "{le} or less"),
    "too_short": ("a list of at least {min_length} values", "more values"),
    "too_long": ("a list of at most {max_length} values", "fewer values"),
    "string_too_short": ("a string that is not empty", "a text, or leave it out"),
    "string_too_long": ("a string of at most {max_length} characters", "a shorter one"),
}
"""Kinds of errors -> what the value must be, and what to write."""
_OPEN_BOUNDS = ("greater_than", "less_than")
"""The bounds that are themselves not allowed, so that an example helps."""
_REPEATED = 8
"""The fix repeats at most so many allowed values of the rule before it."""
_SMALL = 0.1
"""The distance of an example from a bound."""


def validate(
    data: dict[str, Any], source: ConfigSource, *, has_problems: bool = False
) -> tuple[Config | None, list[ConfigError]]:
    """Validates plain values against the schema.

    Args:
        data: The values under their main names; wrong ones are removed.
        source: The locations and names of the keys in the file.
        has_problems: Whether there are earlier problems. They may have emptied a section, which is then not reported.

    Returns:
        The configuration with defaults for wrong values (None if there is no valid one), and the problems.
    """
    try:
        return Config.model_validate(data), []
    except ValidationError as error:
        items_by_path: dict[tuple[str, ...], list[Any]] = {}
        for item in error.errors(include_url=False):
            if has_problems and item["type"] == "union_tag_not_found" and not item["input"]:
                continue
            path = _path(item["loc"], data, absent=item["type"] == "missing")
            items_by_path.setdefault(path, []).append(item)
        # Pydantic reports a value for every member of a union: the deepest problems are those of the nearest member.
        parents = {path[:length] for path in items_by_path for length in range(len(path))}
        deepest = [path for path in items_by_path if path not in parents]
        problems = [_problem(path, items_by_path[path], source) for path in deepest]
    for path in deepest:
        _remove(data, path)
    try:
        return Config.model_validate(data), problems
    except ValidationError:
        return None, problems


def _remove(data: dict[str, Any], path: tuple[str, ...]) -> None:
    """Removes a wrong value, the list that holds it, or the section that lacks a key."""
    parents = [data]
    for part in path:
        below = parents[-1].get(part)
        if not isinstance(below, dict):
            break
        parents.append(below)
    depth = len(parents) - 1
    if depth < len(path) and path[depth] in parents[-1]:
        del parents[-1][path[depth]]
    elif depth:
        del parents[-2][path[depth - 1]]


def _path(location: tuple[int | str, ...], data: Any, absent: bool) -> tuple[str, ...]:
    """Returns the keys of pydantic's location without the members of unions, which it also names.

    `absent` says that the last key is missing in the file.
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


def _problem(path: tuple[str, ...], items: list[Any], source: ConfigSource) -> ConfigError:
    key = ".".join(path)
    sections = (".".join(path[:length]) for length in range(len(path), 0, -1))
    place = next((source.place(section) for section in sections if section in source.positions), NO_LOCATION)
    name = source.name(key)
    if items[0]["type"] == "missing":
        return problem_at(place, name, "this key is required", f"add {path[-1]}: to it")
    value = items[0]["input"]
    if source.place(key).value is not ...:
        value = source.place(key).value
    return problem_at(place, name, _rule(items, path), _fix(path, items, value, source), value)


def _rule(items: list[Any], path: tuple[str, ...]) -> str:
    kinds = [_KINDS[item["type"]] for item in items if item["type"] in _KINDS]
    literals = _literals(items)
    if literals:
        return f"must be {one_of(literals + kinds)}"
    bounded = [item for item in items if item["type"] in _BOUNDS]
    bounds = [_BOUNDS[item["type"]][0].format(**item["ctx"]).removesuffix(".0") for item in bounded]
    if bounds:
        return f"must be {' and '.join(bounds)}"
    if kinds:
        return f"must be {one_of(list(dict.fromkeys(kinds)))}"
    if items[0]["type"] == "value_rule":
        return items[0]["msg"]
    field = _declaration(path)
    if field is not None:
        types = [name for section in shape_of(field).kinds for name in types_of(section)]
        if types:
            return f"needs a type, which must be {one_of(types)}"
    return "has a value that is not supported here"


def _literals(items: list[Any]) -> list[str]:
    """Returns the values of all literals, from pydantic's text: ``'a', 'b' or 'c'``."""
    expected = (item["ctx"]["expected"].replace(" or ", ", ") for item in items if item["type"] == "literal_error")
    return [part.strip().strip("'") for text in expected for part in text.split(",")]


def _fix(path: tuple[str, ...], items: list[Any], value: Any, source: ConfigSource) -> str:
    types = {item["type"] for item in items}
    names = _literals(items)
    field = _declaration(path)
    if names and field is not None and fix_of(field):
        return fix_of(field)
    if names and isinstance(value, str):
        if path[-2:] == ("arch", "type") and (unlike := unsupported_features(value)):
            return f"use another model; unlike in a Llama, {unlike}"
        guess = nearest(value.removesuffix(CAUSAL), [name.removesuffix(CAUSAL) for name in names])
        if guess:
            return f"write {guess}{CAUSAL * (guess not in names)}"
        if len(names) > _REPEATED:
            return "write one of these"
        if len(names) > 1:
            return f"write one of {one_of(names)}"
        return f"write {names[0]}"
    if isinstance(value, str) and types & {"int_type", "float_type", "bool_type"}:
        if bare := unquoted(value):
            return f"write {bare} without quotes"
        word = value.strip().lower()
        if "bool_type" in types and word in ("yes", "no", "on", "off", "y", "n"):
            return f"write {shorten_repr(word in ('yes', 'on', 'y'))}"
    default = source.source_defaults.get(source.name(".".join(path)), ...)
    text = describe(path, default) or "correct the value"
    if 0 < len(names) <= _REPEATED and not isinstance(value, str):
        return f"write {one_of(names)}; {text}"
    if field is not None and fix_of(field) and types <= _BOUNDS.keys():
        return fix_of(field)
    if bounded := [item for item in items if item["type"] in _BOUNDS]:
        return f"write {_allowed(field, bounded[0], default)}; {text}"
    kinds = [_KINDS.get(item["type"], "") for item in items]
    if kinds == ["a list"] and not isinstance(value, dict):
        example = [value]
        if field is not None and (usual := field.get_default(call_default_factory=True)):
            example = list(usual)
        return f"write a list, for example {value_text(example)}; {text}"
    if field is None or not set(kinds) <= {"an integer", "a number", "true or false", "a string"}:
        return text
    fix = f"write {one_of(list(dict.fromkeys(kinds)))}"
    if default is ...:
        default = field.default
    if isinstance(default, int | float | str) and default != "" and not isinstance(default, bool):
        fix += f", for example {default}"
    return f"{fix}; {text}"


def _allowed(field: FieldInfo | None, item: Any, default: Any) -> str:
    """Returns what to write in place of a value out of bounds, with an example where the bound is not one.

    Args:
        item: Pydantic's error.
        default: That of the file's schema; ``...``: that of the field.
    """
    kind = item["type"]
    allowed = _BOUNDS[kind][1].format(**item["ctx"]).replace(".0 ", " ").removesuffix(".0")
    if kind not in _OPEN_BOUNDS:
        return allowed
    if default is ... and field is not None:
        default = field.default
    if default is None:
        return f"{allowed}, or leave it out"
    if isinstance(default, int | float):
        example = default
    elif kind == "greater_than":
        example = item["ctx"]["gt"] + _SMALL
    else:
        example = item["ctx"]["lt"] - _SMALL
    return f"{allowed}, for example {example:g}"


def unquoted(text: str) -> str:
    """Returns the number or truth value that a string of the file holds; empty if it holds another text."""
    bare = text.strip().replace("_", "")
    if bare.replace(".", "", 1).lstrip("+-").isdigit() or bare.lower() in ("true", "false"):
        return bare
    return ""


def describe(path: tuple[str, ...], default: Any = ...) -> str:
    """Returns the documentation of a key, or of its section if the key is unknown, for the fix of a message.

    `default` is that of the file's schema; ``...``: the documentation has it.
    """
    field = _declaration(path)
    if field is None:
        if path:
            return describe(path[:-1])
        return ""
    name = next(part for part in reversed(path) if not part.isdecimal())
    description = field.description or ""
    if default is not ...:
        description = _DEFAULT.sub(f"Default {default_text(default)}", description)
    return f"{name}: {description}".rstrip(".")


def _declaration(path: tuple[str, ...]) -> FieldInfo | None:
    """Returns the declaration of a key; None for an unknown key."""
    return next(iter(fields_at(".".join(path))), None)
