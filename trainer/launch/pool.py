"""The processes of a job on this host as the launcher sees them: each behind the connection of its worker agent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainer.launch.heartbeat import beat_file, failure_file
from trainer.launch.job import End, shell_code
from trainer.launch.processes import Identity, identity, kill_group, send_signal
from trainer.launch.wire import Channel, Message


@dataclass
class WorkerHandle:
    """A worker or the scheduler.

    Attributes:
        rank: None for the scheduler.
        log: Its output.
        channel: To its agent; None before that has connected.
        process: The worker proper; None before it runs.
        end: Once it has ended, or was found to be lost.
        failed: When it said that it fails, and with which exit code; it may still run.
        beat: When its heartbeat file changed last, in nanoseconds; None before the first step.
    """

    rank: int | None
    log: Path
    channel: Channel | None = None
    process: Identity | None = None
    end: End | None = None
    failed: End | None = None
    beat: int | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.end is None

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
    """All processes of a job on this host, and the socket to which their agents connect.

    Attributes:
        workers: By rank.
        scheduler: msrun starts it on the host of master_addr.
        specs: What each agent starts, by rank; that of the scheduler under None.
        ending_since: When the workers were first told to end because of a failure; None before that.
        closing: Whether agents that connect from now on start nothing.
    """

    workers: dict[int, WorkerHandle]
    scheduler: WorkerHandle
    listener: socket.socket
    specs: dict[int | None, Message]
    ending_since: float | None = None
    closing: bool = False
    _unidentified: list[Channel] = field(default_factory=list)

    @property
    def all(self) -> list[WorkerHandle]:
        return [*self.workers.values(), self.scheduler]

    @property
    def ended(self) -> bool:
        """Whether no worker runs, and none will."""
        return not any(worker.pending or (worker.end is None and not self.closing) for worker in self.workers.values())

    @property
    def sources(self) -> list[Channel]:
        """The connections to wait for."""
        own = [worker.channel for worker in self.all if worker.channel is not None and not worker.channel.closed]
        return [*own, *self._unidentified]

    def poll(self) -> bool:
        """Accepts agents and handles what they report; whether anything changed."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unidentified.append(Channel(self.listener.accept()[0]))
        changed = False
        for channel in list(self._unidentified):
            messages = channel.receive()[:1]  # an agent sends nothing more before it is told what to start
            if messages:
                self._register(channel, messages[0])
                changed = True
            if messages or channel.closed:
                self._unidentified.remove(channel)
        for worker in self.all:
            if worker.channel is None or worker.channel.closed:
                continue
            for message in worker.channel.receive():
                self._handle(worker, message)
                changed = True
            if worker.channel.closed and worker.end is None:  # the agent was killed, and with it the worker
                self._record_end(worker, 128 + signal.SIGKILL, time.monotonic(), "")
                worker.kill()
                changed = True
        return changed

    def _register(self, channel: Channel, message: Message) -> None:
        worker = self.scheduler if message.get("hello") == "scheduler" else self.workers.get(message.get("rank", -1))
        spec = None if worker is None else self.specs.get(worker.rank)
        if worker is None or worker.channel is not None or self.closing or spec is None:
            channel.send({"release": True})
            return
        worker.channel = channel
        worker.send({"start": spec})

    def _handle(self, worker: WorkerHandle, message: Message) -> None:
        if "started" in message:
            worker.process = identity(message["started"]) or Identity(message["started"], 0)
        elif "ended" in message:
            self._record_end(worker, shell_code(message["ended"]), message["at_seconds"], message.get("why", ""))

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
            if not worker.running:
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
            if worker.pending or worker.running:
                worker.kill()

    def release_all(self) -> None:
        for worker in self.all:
            worker.send({"release": True})


def listen(path: Path) -> socket.socket:
    """The launcher's socket; only this user's processes reach it, as its folder is private."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen(1024)
    listener.setblocking(False)
    return listener
