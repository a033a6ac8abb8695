"""Errors that a run reports as one message, without a traceback, and the exit codes.

A message has the location (file and line, or the flag), the key, the value, the rule that it breaks, and the fix, as
far as they are known.
"""

from __future__ import annotations

import json
import os
from typing import TypeVar

EXIT_OK = 0
EXIT_RUN_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_HANG = 124
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


def working_directory() -> str:
    """Returns the working directory for a message; it may have been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "the working directory, which has been removed"


# characters
_LONGEST_VALUE = 200
_LONGEST_PART = 2000
# levels of lists and mappings in a value
_DEEPEST = 16


def shorten_repr(value: object) -> str:
    """Returns a value as a YAML or JSON file writes it, for a message; a long one is cut in the middle."""
    return _shortened(_written(value, _DEEPEST), _LONGEST_VALUE)


def _written(value: object, levels: int) -> str:
    """Returns the ``repr`` of a value with null, true and false, which Python calls None, True and False."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (list, dict)) and value and not levels:
        return "..."
    if isinstance(value, list):
        return f"[{', '.join(_written(item, levels - 1) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{key!r}: {_written(item, levels - 1)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    return repr(value)


def value_text(value: object) -> str:
    """Returns a plain value in one line as a file has it: ``null``, ``true``, ``[1, 2]``, ``level1``."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {value_text(item)}' for key, item in value.items())}}}"
    return str(value)


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} ... {text[-longest // 4 :]}"


def _printable(text: str) -> str:
    """Escapes the control characters of a text, which a terminal would obey, except line ends and tabs."""
    text = _shortened(text, _LONGEST_PART)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text)


_Error = TypeVar("_Error", bound="TrainerError")


class TrainerError(Exception):
    """Base of the errors that the user sees as one message.

    Args:
        rule: What is wrong, or the rule that the value breaks, as a sentence without its full stop.
        where: Location of the value, for example ``configs/a.yaml:12`` or ``flag --seed``.
        key: The dotted key, for example ``runner_config.batch_size``.
        value: The wrong value, if there is one; the message has its ``repr``, shortened if it is long.
        fix: What to do, as a sentence without its full stop.
    """

    exit_code = EXIT_RUN_FAILED
    _ABSENT = object()

    def __init__(self, rule: str, *, where: str = "", key: str = "", value: object = _ABSENT, fix: str = "") -> None:
        self.rule = rule
        self.where = where
        self.key = key
        self.fix = fix
        self._value_or_absent = value
        self.value: object = None
        subject = _printable(key)
        if value is not self._ABSENT:
            self.value = value
            subject = f"{subject or 'value'} = {shorten_repr(value)}"
        message = ": ".join(part for part in (_printable(where), subject, _printable(rule)) if part) + "."
        if fix:
            message += f"\n  Fix: {_printable(fix)}."
        super().__init__(message)

    def with_location(self: _Error, where: str, key: str = "") -> _Error:
        """Returns a copy of the error with its location, and optionally its key, which only the caller knows."""
        return type(self)(self.rule, where=where, key=key or self.key, value=self._value_or_absent, fix=self.fix)

    def replace_texts(self: _Error, rule: str, fix: str) -> _Error:
        """Returns a copy of the error with another rule and fix."""
        return type(self)(rule, where=self.where, key=self.key, value=self._value_or_absent, fix=fix)


class UserError(TrainerError):
    """Bad input, found before the run starts: exit code 2."""

    exit_code = EXIT_BAD_INPUT


class RunError(TrainerError):
    """A failure during the run (a NaN loss, a full disk): exit code 1."""

    exit_code = EXIT_RUN_FAILED
