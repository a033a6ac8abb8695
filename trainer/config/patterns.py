"""Compiles regular expressions of the user's file for Python's `re`, unless they could take very long.

`re` backtracks: ``(a+)+b`` takes 2^n steps on n letters. Refused are repeats of a group that itself repeats or has
alternatives, and more than a few repeats and alternatives in a row.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import lru_cache

_MAX_LENGTH = 400  # characters of an expression
_MAX_CHOICES = 4  # in a row; a name of 50 characters then takes some milliseconds at worst
_LITERAL = re.compile(r"\(\?#[^)]*\)|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|~", re.DOTALL)
_GROUP_KIND = re.compile(r"\(\?(?:[:=!>]|<[=!]|P<\w+>|[a-zA-Z-]+:)")
_INNERMOST_GROUP = re.compile(r"\(([^()]*)\)")


class PatternError(ValueError):
    """An expression that cannot be used; its text is the reason."""


@lru_cache(maxsize=64)
def read_pattern(text: str) -> re.Pattern[str]:
    """Compiles a regular expression.

    Raises:
        PatternError: It is not a regular expression, or could take very long to match.
    """
    if len(text) > _MAX_LENGTH:
        raise PatternError(f"it is longer than {_MAX_LENGTH} characters")
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"it is not a regular expression: {error}") from None
    # The rest has only the characters that repeat or separate alternatives, and a ~ for each of them within a group.
    rest = _GROUP_KIND.sub("(", _LITERAL.sub("x", text))
    rest = re.sub(r"([*+?}])[?+]", r"\1", rest)
    while (shorter := _INNERMOST_GROUP.sub(lambda group: "~" * _choices(group[1]) or "x", rest)) != rest:
        rest = shorter
        if re.search(r"~[*+{]", rest):
            raise PatternError("it repeats a group that itself repeats or chooses, which can take very long")
    if _choices(rest.replace("|", "\n")) > _MAX_CHOICES:
        rule = f"it has more than {_MAX_CHOICES} of * + ? {{}} and (a|b) in a row"
        raise PatternError(f"{rule}, which can take very long")
    return pattern


def _choices(text: str) -> int:
    """Counts the repeats in the longest alternative of a text without groups; alternatives count as one more."""
    alternatives = re.split(r"[|\n]", text)
    return max(len(re.findall(r"[*+?{~]", alternative)) for alternative in alternatives) + ("|" in text)


def wider_pattern(pattern: str, names: Collection[str]) -> str:
    """Returns a pattern with * and ? that begins or ends with more * and matches a name; empty if there is none."""
    for wider in (f"{pattern}.*", f"{pattern}*", f"*{pattern}", f"*{pattern}*"):
        if any(fnmatchcase(name, wider) for name in names):
            return wider
    return ""
