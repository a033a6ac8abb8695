"""Ranks that hold a running job up: one line for each, when it is noticed, and another when it gets on."""

from __future__ import annotations

import contextlib

from trainer.launch.heartbeat import beat_file
from trainer.launch.pool import WorkerHandle, WorkerPool
from trainer.launch.processes import is_stopped
from trainer.launch.wire import scaled

QUIET_SECONDS = 10.0
"""Nobody is in trouble before no rank of the host has given a sign for so long: ranks wait for each other at each step,
so that all of them are quiet when one of them is."""


class Trouble:
    """Finds them and remembers which ones it has named."""

    def __init__(self) -> None:
        self._named: dict[int, str] = {}

    def lines(self, pool: WorkerPool, quiet_seconds: float) -> list[str]:
        """What is new: `quiet_seconds` is for how long no rank has given a sign."""
        found = self._find(pool) if quiet_seconds > scaled(QUIET_SECONDS) else {}
        over = [f"rank {rank} gets on." for rank in self._named if rank not in found]
        new = [f"rank {rank} {what}" for rank, what in found.items() if self._named.get(rank) != what]
        self._named = found
        return [*over, *new]

    def _find(self, pool: WorkerPool) -> dict[int, str]:
        """Which ranks hold the others up, and why."""
        running = {rank: worker for rank, worker in pool.workers.items() if worker.pending and worker.process}
        found = {
            rank: f"was stopped by a signal (SIGSTOP or the like, process {worker.process.pid}); the others wait."
            for rank, worker in running.items()
            if is_stopped(worker.process)
        }
        steps = {rank: _step(pool, worker) for rank, worker in running.items()}
        most = max(steps.values(), default=0)
        for rank, step in steps.items():
            if rank not in found and step < most:
                found[rank] = f"has done step {step}, others {most}; nothing moves any more."
        return found


def _step(pool: WorkerPool, worker: WorkerHandle) -> int:
    """The last step that a worker has finished; 0 before the first one."""
    with contextlib.suppress(OSError, ValueError):
        return int(beat_file(pool.folder, worker.rank).read_text(encoding="ascii"))
    return 0
