"""Ranks as threads of one process, for tests without MindSpore."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_LIMIT_SECONDS = 20


class ThreadRank:
    """One rank, with the methods of a `Communicator` that a save needs. Waiting forever is an error."""

    def __init__(self, rank: int, given: list[bytes], meeting: threading.Barrier) -> None:
        self.rank, self.size, self.given, self.meeting = rank, len(given), given, meeting

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.given[self.rank] = data
        self.meeting.wait(_LIMIT_SECONDS)
        every = list(self.given)
        self.meeting.wait(_LIMIT_SECONDS)
        return every


def on_ranks(ranks: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """Calls `work` on all ranks at once; returns each rank's result or exception."""
    given, meeting = [b""] * ranks, threading.Barrier(ranks)

    def run(rank: int) -> Any:
        try:
            return work(ThreadRank(rank, given, meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
