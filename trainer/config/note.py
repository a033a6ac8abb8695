"""Notes for the user."""

from __future__ import annotations

from typing import Literal

NoteKind = Literal["results", "parallel", "dtype", "ignored"]
"""The subject of a note, by importance: the results, the parallelism, a dtype, or a key without effect ("ignored")."""


class Note(str):
    """A sentence for the user about a setting. Code that expects a note takes a plain string as one about results."""

    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind = "results") -> Note:
        note = super().__new__(cls, text)
        note.kind = kind
        return note
