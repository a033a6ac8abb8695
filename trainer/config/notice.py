"""A note for the user, which is no error."""

from __future__ import annotations

from typing import Literal

NoticeKind = Literal["results", "parallel", "dtype", "ignored"]
"""What differs, by importance: the results, the degrees of parallelism, a dtype, or nothing: a key has no effect."""


class Notice(str):
    """A sentence that the user should know; a plain string in its place is about the results."""

    kind: NoticeKind

    def __new__(cls, text: str, kind: NoticeKind = "results") -> Notice:
        notice = super().__new__(cls, text)
        notice.kind = kind
        return notice
