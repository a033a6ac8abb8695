"""The processes of a job on this host as the launcher sees them: each through the connection of its worker agent."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.launch.heartbeat import beat_file, failure_file
from trainer.launch.job import End, shell_code
from trainer.launch.processes import Identity, identity, kill_group, send_signal
from trainer.launch.wire import Channel, Listener, Message


@dataclass
class WorkerHandle:
    """A worker, or the scheduler, whose rank is None."""

    rank: int | None
    channel: Channel | None = None  # to its agent, once that has connected
    process: Identity | None = None  # the worker itself, not its agent
    end: End | None = None
    failed: End | None = None  # when it announced its failure, and the exit code; it may still run
    beat: int | None = None  # when its heartbeat file changed last, in nanoseconds

    @property
    def pending(self) -> bool:
        """Whether its end is still to come: it runs, or it was told to start."""
        return self.channel is not None and self.end is None

    def send(self, message: Message) -> None:
        if self.channel is not None:
            self.channel.send(message)

    def kill(self) -> None:
        """Kills it with its children, through its agent or, where that is gone, directly."""
        self.send({"kill": True})
        if self.process is not None and (self.channel is None or self.channel.closed):
            kill_group(self.process.pid)
            send_signal(self.process, signal.SIGKILL)


@dataclass
class WorkerPool:
    """All processes of a job on this host."""

    workers: dict[int, WorkerHandle]
    scheduler: WorkerHandle  # msrun starts it on the host of master_addr
    listener: Listener  # where the agents connect
    specs: dict[int | None, Message]  # what each agent starts, by rank; that of the scheduler under None
    ending_since: float | None = None  # when the workers were first told to end because of a failure
    closing: bool = False  # whether agents that connect from now on start nothing

    @property
    def all(self) -> list[WorkerHandle]:
        return [*self.workers.values(), self.scheduler]

    @property
    def ended(self) -> bool:
        """Whether no worker runs, and none will."""
        return not any(worker.pending or (worker.end is None and not self.closing) for worker in self.workers.values())

    @property
    def channels(self) -> list[Channel]:
        return [worker.channel for worker in self.all if worker.channel is not None and not worker.channel.closed]

    def poll(self) -> bool:
        """Accepts agents and handles what they report; whether anything changed."""
        changed = False
        for channel, message in self.listener.accept():  # an agent sends nothing more before it has its answer
            self._register(channel, message)
            changed = True
        for worker in self.all:
            if worker.channel is None or worker.channel.closed:
                continue
            for message in worker.channel.receive():
                changed = True
                if "started" in message:
                    worker.process = identity(message["started"]) or Identity(message["started"], 0)
                elif "ended" in message:
                    code = shell_code(message["ended"])
                    self._record_end(worker, code, message["at_seconds"], message.get("why", ""))
            if worker.channel.closed and worker.end is None:  # the agent was killed, and with it the worker
                self._record_end(worker, 128 + signal.SIGKILL, time.monotonic(), "")
                worker.kill()
                changed = True
        return changed

    def _register(self, channel: Channel, message: Message) -> None:
        worker = self.scheduler if message.get("hello") == "scheduler" else self.workers.get(message.get("rank", -1))
        if worker is None or worker.channel is not None or self.closing or worker.rank not in self.specs:
            channel.send({"release": True})
        else:
            worker.channel = channel
            worker.send({"start": self.specs[worker.rank]})

    def _record_end(self, worker: WorkerHandle, exit_code: int, at_seconds: float, why: str) -> None:
        by_launcher = self.ending_since is not None and at_seconds >= self.ending_since
        worker.end = End(worker.rank, exit_code, at_seconds, by_launcher, why)
        if worker.failed is not None:  # it failed when it said so; what it takes to end is not its exit code
            worker.end.at_seconds, worker.end.by_launcher = worker.failed.at_seconds, False
            if by_launcher:
                worker.end.exit_code = worker.failed.exit_code

    def read_files(self, folder: Path) -> bool:
        """Looks at heartbeats and announced failures; whether any worker has done another step."""
        moved = False
        for rank, worker in self.workers.items():
            if worker.process is None or worker.end is not None:
                continue
            with contextlib.suppress(OSError):
                beat = beat_file(folder, rank).stat().st_mtime_ns
                moved, worker.beat = moved or beat != worker.beat, beat
            if worker.failed is None:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    data = json.loads(failure_file(folder, rank).read_text(encoding="ascii"))
                    worker.failed = End(rank, data["exit_code"], data["at_seconds"])
        return moved

    def send_to_workers(self, message: Message) -> None:
        """Sends to all workers but those that are failing: they are busy with that."""
        for worker in self.workers.values():
            if worker.pending and worker.failed is None:
                worker.send(message)

    def kill_all(self) -> None:
        for worker in self.all:
            if worker.end is None:
                worker.kill()

    def release_all(self) -> None:
        for worker in self.all:
            worker.send({"release": True})
