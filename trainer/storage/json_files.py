"""Reads JSON that somebody else may have written: every value is checked by a pydantic model before it is used.

Deep nesting, numbers beyond all bounds, text that is not UTF-8 and values of the wrong type all end in a `JsonError`
that names the file and the field.
"""

from __future__ import annotations

import functools
import json
import reprlib
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A count that fits 64 bits."""

Checked = TypeVar("Checked")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonError(ValueError):
    """The content of a JSON file is not what it must be; the message names the file and the field."""


class StrictModel(BaseModel):
    """Base of the models: types are not converted, numbers are finite, unknown keys are errors."""

    # A validator is built when it is first needed: a process reads few kinds of documents.
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, defer_build=True)


class LenientModel(StrictModel):
    """Base of the models of files that other programs write: unknown keys are kept."""

    model_config = ConfigDict(extra="allow")


def parse_json(content: bytes, model: type[Checked] | Any, name: str) -> Checked:
    """Parses the content of the file `name` into `model`: a pydantic model or a type such as ``dict[str, Any]``.

    Raises:
        JsonError: The content is not JSON, or its fields or values do not fit the model.
    """
    try:
        # Infinity and NaN may stand where any value may; the models refuse them in numbers that are used.
        parsed = from_json(content.removeprefix(_BYTE_ORDER_MARK), allow_inf_nan=True)
        _refuse_repeated_keys(content, model)
    except ValueError as error:
        raise JsonError(f"{name} is not valid JSON: {error}") from None
    return check_json(parsed, model, name)


def _refuse_repeated_keys(content: bytes, model: Any) -> None:
    """Raises a ValueError if an object has a key twice; in files of other programs the last one counts."""
    if LenientModel in getattr(model, "__mro__", ()):
        return

    def check(pairs: list[tuple[str, None]]) -> None:
        if len(dict(pairs)) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"the key {_short(next(key for key in keys if keys.count(key) > 1))} stands twice")

    def ignore(text: str) -> None:
        """Skips a number: it is not needed here, and may be too long for Python."""

    text = content.removeprefix(_BYTE_ORDER_MARK).decode()
    json.loads(text, object_pairs_hook=check, parse_int=ignore, parse_float=ignore, parse_constant=ignore)


def check_json(parsed: Any, model: type[Checked] | Any, name: str) -> Checked:
    """Converts a parsed JSON value into `model`; `name` is the file, for the message.

    Raises:
        JsonError: The fields or values do not fit the model.
    """
    try:
        adapter: TypeAdapter[Checked] = _adapter(cast(Any, model))
        return adapter.validate_python(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        if first["loc"]:
            message = f"{'.'.join(map(str, first['loc']))}: {message}"
        if first["type"] not in ("missing", "value_error"):
            message += f", found {_short(first['input'])}"
        if error.error_count() > 1:
            message += f" (and {error.error_count() - 1} more problems)"
        raise JsonError(f"{name}: {message}") from None


@functools.cache
def _adapter(model: Any) -> TypeAdapter:
    return TypeAdapter(model)


def _short(value: Any) -> str:
    """Describes a value in a few words; Python refuses to print an integer of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (str, int, float)):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"
