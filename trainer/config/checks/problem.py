"""Several mistakes of one file in one message."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from trainer.errors import UserError

_SHOWN = 10


class SourceLocation(NamedTuple):
    """Where something is written, and in which order it is read: lines of the file first, then overrides."""

    order: int
    text: str


NOWHERE = SourceLocation(0, "")


class Problem(NamedTuple):
    """A mistake and where it stands."""

    place: SourceLocation
    error: UserError


class SeveralProblems(UserError):
    """More than one mistake: a line (and its fix) for each, in the order of the file."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__(f"{len(errors)} problems")
        self.errors = tuple(errors)
        lines = [f"{len(errors)} problems in the configuration."] + [str(error) for error in errors[:_SHOWN]]
        if len(errors) > _SHOWN:
            lines.append(f"... and {len(errors) - _SHOWN} more.")
        self.args = ("\n".join(lines),)


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raises all problems as one error; does nothing when there are none.

    Raises:
        UserError: The only problem, or :class:`SeveralProblems`.
    """
    ordered = [problem.error for problem in sorted(problems, key=lambda problem: problem.place.order)]
    if len(ordered) == 1:
        raise ordered[0]
    if ordered:
        raise SeveralProblems(ordered)


def nearest(name: str, names: Sequence[str]) -> str:
    """The name that was probably meant, or an empty string."""
    exact = [candidate for candidate in names if candidate.lower() == name.lower()]
    return (exact or get_close_matches(name, names, n=1, cutoff=0.6) or [""])[0]


def one_of(names: Sequence[object]) -> str:
    """Lists names for a message: ``A, B or C``."""
    texts = [str(name) for name in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
