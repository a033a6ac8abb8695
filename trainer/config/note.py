"""A note for the user, which is no error."""

from __future__ import annotations

from typing import Literal

NoteKind = Literal["results", "parallel", "dtype", "ignored"]
"""What differs, by importance: the results, the degrees of parallelism, a dtype, or nothing: a key has no effect."""


class Note(str):
    """A sentence that the user should know; a plain string in its place is about the results."""

    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind = "results") -> Note:
        note = super().__new__(cls, text)
        note.kind = kind
        return note
