"""Regular expressions that a user writes, for Python's `re`.

`re` goes back and tries again: ``(a+)+b`` takes 2^n steps on n letters. Expressions that can take long are refused
instead: a repeat of what itself repeats or chooses, and more than a few choices in a row.
"""

from __future__ import annotations

import re
from functools import lru_cache

_MAX_LENGTH = 200  # characters of an expression
_MAX_CHOICES = 4  # on the way through an expression; a name of 50 characters then takes some milliseconds at worst
_LITERAL = re.compile(r"\(\?#[^)]*\)|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|~", re.DOTALL)
_GROUP_KIND = re.compile(r"\(\?(?:[:=!>]|<[=!]|P<\w+>|[a-zA-Z-]+:)")
_INNERMOST_GROUP = re.compile(r"\(([^()]*)\)")


class PatternError(ValueError):
    """Why an expression cannot be used, as the end of a sentence."""


@lru_cache(maxsize=64)
def read_pattern(text: str) -> re.Pattern[str]:
    """Compiles an expression.

    Raises:
        PatternError: It is not a regular expression, or could take long to match.
    """
    if len(text) > _MAX_LENGTH:
        raise PatternError(f"it is longer than {_MAX_LENGTH} characters")
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"it is not a regular expression: {error}") from None
    # What is left has only the characters that repeat or choose, and a ~ for each such choice within a group.
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
    """Returns how many choices the longest alternative of a text without groups has."""
    alternatives = re.split(r"[|\n]", text)
    return max(len(re.findall(r"[*+?{~]", one)) for one in alternatives) + ("|" in text)
