"""Ranks that are threads of one process, for what needs no MindSpore."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_LIMIT_SECONDS = 20


class ThreadPeers:
    """One of several ranks; has what a save asks of a `Communicator`. Waiting for ever is an error."""

    def __init__(self, rank: int, given: list[bytes], meeting: threading.Barrier) -> None:
        self.rank, self.size, self.given, self.meeting = rank, len(given), given, meeting

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.given[self.rank] = data
        self.meeting.wait(_LIMIT_SECONDS)
        every = list(self.given)
        self.meeting.wait(_LIMIT_SECONDS)
        return every


def on_ranks(ranks: int, work: Callable[[ThreadPeers], Any]) -> list[Any]:
    """Does something on all ranks at once; of each rank the result, or the exception that ended it."""
    given, meeting = [b""] * ranks, threading.Barrier(ranks)

    def run(rank: int) -> Any:
        try:
            return work(ThreadPeers(rank, given, meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
