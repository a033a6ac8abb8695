"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.parallel.connections import connect
from trainer.parallel.host_group import CpuGroup

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


def on_groups(ranks: int, work: Callable[[CpuGroup], Any], on_one_host: bool = True) -> list[Any]:
    """Calls `work` with the group of all ranks on each of them; returns their results, or raises the first error."""

    def run(rank: ThreadRank) -> Any:
        found = connect(rank.rank, rank.size, rank.gather_bytes, on_one_host, _LIMIT_SECONDS)
        try:
            return work(CpuGroup(found, range(rank.size)))
        finally:
            found.close()

    results = on_ranks(ranks, run)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
