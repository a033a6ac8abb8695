"""Errors of a configuration with their locations, and the message that lists several of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.location import NO_LOCATION, SourceLocation
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config.schema.root import Config, ConfigSource

_SHOWN = 20
_FILES = 3
_LISTED = 15
"""The largest number of keys of a section that a message about an unknown key lists."""
_LINE = re.compile(r":\d+$")
_FIND: Any = object()
NO_VALUE: Any = object()
"""For `problem`: the message names the key alone."""


class ConfigError(NamedTuple):
    """An error and its location."""

    place: SourceLocation
    error: UserError
    is_absent: bool = False
    """Whether a path or package is missing, which is allowed in the plan of a run on another machine."""
    is_extra: bool = False
    """Whether the key resembles no known one, so that no known key lacks the value that was meant for it."""


def problem(config: Config, key: str, rule: str, fix: str, *, value: Any = _FIND, because: str = "") -> ConfigError:
    """Makes the error for a key of the configuration that breaks a rule.

    Args:
        config: Has the value of the key and its location. The location of a default is the file.
        key: Dotted, under the main names: ``model.model_config.num_heads``, ``callbacks.0.type``.
        rule: What is wrong, as a sentence without its full stop.
        fix: What to do about it.
        value: A value to show instead of the key's value, or `NO_VALUE`.
        because: A key whose location is shown if `key` is not set.
    """
    source = config.source
    place_of_key = source.place(key)
    if value is _FIND and place_of_key.value is not ...:
        value = place_of_key.value
    elif value is _FIND:
        value = value_of(config, key)
        if value is None and place_of_key == NO_LOCATION:
            value = NO_VALUE
    places = (place_of_key, source.place(because), SourceLocation(0, source.path))
    place = next((place for place in places if place != NO_LOCATION), NO_LOCATION)
    return problem_at(place, source.name(key), source.name_keys(rule), source.name_keys(fix, is_fix=True), value)


def rename_keys(problem: ConfigError, source: ConfigSource) -> ConfigError:
    """Returns an error in which rule and fix name the keys that the file has; its own key is the file's already."""
    error = problem.error
    texts = source.name_keys(error.rule), source.name_keys(error.fix, is_fix=True)
    return problem._replace(error=error.replace_texts(*texts))


def data_error(config: Config, key: str, rule: str, fix: str) -> UserError:
    """Makes the error for a key of a data set; the location of a default is that of the loader's type."""
    return problem(config, key, rule, fix, because=f"{key.split('.')[0]}.data_loader.type").error


def problem_at(place: SourceLocation, key: str, rule: str, fix: str, value: Any = NO_VALUE) -> ConfigError:
    """Makes the error for a key at a given location, before there is a configuration; see `problem`."""
    if value is NO_VALUE:
        return ConfigError(place, UserError(rule, where=place.text, key=key, fix=fix))
    return ConfigError(place, UserError(rule, where=place.text, key=key, value=value, fix=fix))


def unknown_key(
    place: SourceLocation, section: str, name: str, guess: str, homes: str, listed: Sequence[str]
) -> ConfigError:
    """Makes the error for an unknown key of a section, as the file writes both; the top level has no name.

    The fix is `guess`, the most similar key there, or `homes`, a sentence about other sections with a key of exactly
    this name. Without both it lists the keys of the section, if these are few.
    """
    if homes and guess.lower() != name.lower():
        fix = homes
    elif guess:
        fix = f"you probably mean {f'{section}.{guess}'.lstrip('.')}"
    elif len(listed) <= _LISTED:
        fix = f"remove it; the keys here are {', '.join(listed)}"
    else:
        fix = "remove it; `run_trainer.py schema` lists all keys"
    rule = "unknown key at the top level"
    if section:
        rule = f"unknown key in {section}"
    return problem_at(place, f"{section}.{name}".lstrip("."), rule, fix)._replace(is_extra=not (homes or guess))


def value_of(config: Config, key: str) -> Any:
    """Returns the value of a dotted key; for a section, a dictionary of the keys that the file sets."""
    value: Any = config
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)]
        else:
            value = getattr(value, value.attribute(part))
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_unset=True, by_alias=True)
    return value


class ConfigErrors(UserError):
    """Several errors: the message has the first ones with their fixes, in the order of the file, and counts the rest.

    Args:
        errors: The errors in the order of the file.
        lists_all: Whether the message has all errors.
    """

    def __init__(self, errors: Sequence[UserError], *, lists_all: bool = False) -> None:
        super().__init__(f"{len(errors)} problems")
        self.errors = tuple(errors)
        if lists_all:
            lines = list(map(str, self.errors))
        else:
            lines = [*map(str, self.errors[:_SHOWN]), *self._summarize_hidden()]
        self.args = ("\n".join([f"{len(self.errors)} problems in the configuration.", *lines]),)

    @property
    def full(self) -> UserError:
        """Returns an error whose message has every problem with its fix."""
        return ConfigErrors(self.errors, lists_all=True)

    def _summarize_hidden(self) -> Iterator[str]:
        """Yields a line with the number of problems that are not shown, and their files or flags."""
        hidden = self.errors[_SHOWN:]
        if not hidden:
            return
        places = list(dict.fromkeys(_LINE.sub("", error.where) for error in hidden if error.where))
        text = f"... and {len(hidden)} more"
        if places:
            text += f", in {', '.join(places[:_FILES])}"
        if len(places) > _FILES:
            text += f" and {len(places) - _FILES} other places"
        yield f"{text}."


def raise_problems(problems: Sequence[ConfigError]) -> None:
    """Raises all problems as one error; does nothing if the list is empty.

    Raises:
        UserError: The problem if it is the only one, else :class:`ConfigErrors`.
    """
    ordered = [problem.error for problem in sorted(problems, key=lambda problem: problem.place.order)]
    if len(ordered) == 1:
        raise ordered[0]
    if ordered:
        raise ConfigErrors(ordered)


def separate_errors(error: UserError) -> tuple[UserError, ...]:
    """Returns the errors of which one consists, in the order of the file."""
    if isinstance(error, ConfigErrors):
        return error.errors
    return (error,)


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns the most similar of `names`, or an empty string if none is similar: adam is AdamW, GPT not GptOss."""
    by_lower = {candidate.lower(): candidate for candidate in reversed(names)}
    alike = [by_lower[lower] for lower in get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.75)]
    return (alike or get_close_matches(name, names, n=1, cutoff=0.6) or [""])[0]


def one_of(names: Sequence[object]) -> str:
    """Lists names for a message: ``A, B or C``."""
    strings = [str(name) for name in names]
    if len(strings) == 1:
        return strings[0]
    return f"{', '.join(strings[:-1])} or {strings[-1]}"
