"""Mistakes of a configuration: where each stands, and all of them in one message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.location import NO_LOCATION, SourceLocation
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config.schema.root import Config

_SHOWN = 20
_FILES = 3
_LINE = re.compile(r":\d+$")
_FIND: Any = object()
NO_VALUE: Any = object()
"""For `problem`: the message names the key alone."""


class ConfigError(NamedTuple):
    """A mistake and its location."""

    place: SourceLocation
    error: UserError
    is_absent: bool = False
    """Whether a path is not there, which is no mistake in the plan of a run on another machine."""
    is_extra: bool = False
    """Whether it is about a key that resembles no other, so that all other values are those that were meant."""


def problem(config: Config, key: str, rule: str, fix: str, *, value: Any = _FIND, because: str = "") -> ConfigError:
    """A rule that a key of the configuration breaks.

    Args:
        config: Knows the value of the key and its location; the file as a whole is to blame for a default.
        key: Dotted, under the main names: ``model.model_config.num_heads``, ``callbacks.0.type``.
        rule: What is wrong, as a sentence without its full stop.
        fix: What to do about it.
        value: Shown in place of the key's own value, or `NO_VALUE`.
        because: A key whose location is shown where this one is not set.
    """
    source = config.source
    written = source.place(key)
    if value is _FIND:
        value = value_of(config, key)
        if value is None and written == NO_LOCATION:
            value = NO_VALUE
    places = (written, source.place(because), SourceLocation(0, source.path))
    place = next((place for place in places if place != NO_LOCATION), NO_LOCATION)
    return problem_at(place, source.name(key), rule, fix, value)


def data_error(config: Config, key: str, rule: str, fix: str) -> UserError:
    """The error for a key of a data set; the type of its loader is to blame for a default."""
    return problem(config, key, rule, fix, because=f"{key.split('.')[0]}.data_loader.type").error


def problem_at(place: SourceLocation, key: str, rule: str, fix: str, value: Any = NO_VALUE) -> ConfigError:
    """The same for a file that is no configuration yet."""
    if value is NO_VALUE:
        shown = {}
    else:
        shown = {"value": value}
    return ConfigError(place, UserError(rule, where=place.text, key=key, fix=fix, **shown))


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key; of a section what the file sets of it."""
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
    """More than one mistake: the first ones with their fixes, in the order of the file, and how many more there are."""

    def __init__(self, errors: Sequence[UserError], *, lists_all: bool = False) -> None:
        super().__init__(f"{len(errors)} problems")
        self.errors = tuple(errors)
        if lists_all:
            lines = list(map(str, self.errors))
        else:
            lines = [*map(str, self.errors[:_SHOWN]), *self._left_out()]
        self._show(*lines)

    @property
    def full(self) -> UserError:
        """The same with every problem and its fix, however many they are."""
        return ConfigErrors(self.errors, lists_all=True)

    @property
    def short(self) -> UserError:
        """The same with a line for each of the first problems, without its fix."""
        short = ConfigErrors(self.errors)
        lines = [f"  {str(error).splitlines()[0]}" for error in self.errors[:_SHOWN]]
        fix = f"  Fix: each of the {len(self.errors)}; --verbose says how."
        short._show(*lines, *(f"  {line}" for line in self._left_out()), fix)
        return short

    def _show(self, *lines: str) -> None:
        self.args = ("\n".join([f"{len(self.errors)} problems in the configuration.", *lines]),)

    def _left_out(self) -> Iterator[str]:
        """How many problems are not shown, and in which files or flags they are."""
        left = self.errors[_SHOWN:]
        places = list(dict.fromkeys(_LINE.sub("", error.where) for error in left if error.where))
        several = ""
        if len(places) > _FILES:
            several = f" and {len(places) - _FILES} other places"
        if left:
            yield f"... and {len(left)} more" + (f", in {', '.join(places[:_FILES])}{several}." if places else ".")


def raise_problems(problems: Sequence[ConfigError]) -> None:
    """Raises all problems as one error; does nothing when there are none.

    Raises:
        UserError: The only problem, or :class:`ConfigErrors`.
    """
    ordered = [problem.error for problem in sorted(problems, key=lambda problem: problem.place.order)]
    if len(ordered) == 1:
        raise ordered[0]
    if ordered:
        raise ConfigErrors(ordered)


def nearest(name: str, names: Sequence[str]) -> str:
    """The name that was probably meant, or an empty string."""
    exact = [candidate for candidate in names if candidate.lower() == name.lower()]
    return (exact or get_close_matches(name, names, n=1, cutoff=0.6) or [""])[0]


def one_of(names: Sequence[object]) -> str:
    """Lists names for a message: ``A, B or C``."""
    strings = [str(name) for name in names]
    if len(strings) == 1:
        return strings[0]
    return f"{', '.join(strings[:-1])} or {strings[-1]}"
