"""The processes of a job on this host as the launcher sees them: each behind the connection of its warden."""

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
from trainer.launch.outcome import End, shell_code
from trainer.launch.processes import Identity, identity, kill_group, send_signal
from trainer.launch.wire import Channel, Message


@dataclass
class WorkerHandle:
    """A worker or the scheduler.

    Attributes:
        rank: None for the scheduler.
        log: Its output.
        channel: To its warden; None before that has called.
        process: The worker proper; None before it runs.
        end: Once it has ended, or was found to be lost.
        failed: When it said that it fails, and with which exit code; it may still run.
        beat: When its heartbeat file changed last, in nanoseconds; None before the first step.
    """

    rank: int | None
    log: Path
    channel: Channel | None = None
    warden: Identity | None = None
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
        """Kills it with its children, through its warden or, where that is gone, directly."""
        self.send({"kill": True})
        if self.process is not None and (self.channel is None or self.channel.closed):
            kill_group(self.process.pid)
            send_signal(self.process, signal.SIGKILL)


@dataclass
class WorkerPool:
    """All processes of a job on this host, and the socket at which their wardens call.

    Attributes:
        workers: By rank.
        scheduler: Started by msrun where it believes to be on the master's host.
        told_at: When they were first told to end for a failure; None before that.
    """

    workers: dict[int, WorkerHandle]
    scheduler: WorkerHandle
    listener: socket.socket
    orders: dict[int | None, Message] = field(default_factory=dict)
    told_at: float | None = None
    closing: bool = False
    _callers: list[Channel] = field(default_factory=list)

    @property
    def all(self) -> list[WorkerHandle]:
        return [*self.workers.values(), self.scheduler]

    @property
    def ended(self) -> bool:
        """Whether no worker runs, and none will."""
        waits = not self.closing
        return not any(ward.pending or (waits and ward.end is None) for ward in self.workers.values())

    @property
    def sources(self) -> list[Channel]:
        """What may have something to say."""
        pool = [ward.channel for ward in self.all if ward.channel is not None and not ward.channel.closed]
        return [*pool, *self._callers]

    def accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._callers.append(Channel(self.listener.accept()[0]))

    def hear(self) -> bool:
        """Takes in what the wardens say; whether anything changed."""
        changed = False
        for caller in list(self._callers):
            for message in caller.receive()[:1]:
                self._callers.remove(caller)
                self._greet(caller, message)
                changed = True
            if caller.closed and caller in self._callers:
                self._callers.remove(caller)
        for ward in self.all:
            if ward.channel is None or ward.channel.closed:
                continue
            for message in ward.channel.receive():
                self._note(ward, message)
                changed = True
            if ward.channel.closed and ward.end is None:
                self._lost(ward)
                changed = True
        return changed

    def _greet(self, channel: Channel, message: Message) -> None:
        ward = self.scheduler if message.get("hello") == "scheduler" else self.workers.get(message.get("rank", -1))
        order = None if ward is None else self.orders.get(ward.rank)
        if ward is None or ward.channel is not None or self.closing or order is None:
            channel.send({"release": True})
            return
        ward.channel, ward.warden = channel, identity(message["pid"])
        ward.send({"start": order})

    def _note(self, ward: WorkerHandle, message: Message) -> None:
        if "started" in message:
            ward.process = identity(message["started"]) or Identity(message["started"], 0)
        elif "ended" in message:
            self._end(ward, shell_code(message["ended"]), message["at_seconds"], message.get("why", ""))

    def _lost(self, ward: WorkerHandle) -> None:
        """The warden was killed, and with it the worker."""
        self._end(ward, 128 + signal.SIGKILL, time.monotonic(), "")
        ward.kill()

    def _end(self, ward: WorkerHandle, exit_code: int, at_seconds: float, why: str) -> None:
        told = self.told_at is not None and at_seconds >= self.told_at
        ward.end = End(ward.rank, exit_code, at_seconds, told, why)
        if ward.failed is not None:  # it failed when it said so; what it takes to end is not its exit code
            ward.end.at_seconds, ward.end.by_launcher = ward.failed.at_seconds, False
            if told:
                ward.end.exit_code = ward.failed.exit_code

    def read_files(self, folder: Path) -> bool:
        """Looks at heartbeats and announced failures; whether any worker has done another step."""
        moved = False
        for rank, ward in self.workers.items():
            if not ward.running:
                continue
            with contextlib.suppress(OSError):
                beat = beat_file(folder, rank).stat().st_mtime_ns
                moved, ward.beat = moved or beat != ward.beat, beat
            if ward.failed is None:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    data = json.loads(failure_file(folder, rank).read_text(encoding="ascii"))
                    ward.failed = End(rank, data["exit_code"], data["at_seconds"])
        return moved

    def tell_workers(self, message: Message) -> None:
        """Sends to all workers but those that are failing: they are busy with that."""
        for ward in self.workers.values():
            if ward.pending and ward.failed is None:
                ward.send(message)

    def kill_all(self) -> None:
        for ward in self.all:
            if ward.pending or ward.running:
                ward.kill()

    def release_all(self) -> None:
        for ward in self.all:
            ward.send({"release": True})


def listen(path: Path) -> socket.socket:
    """The launcher's socket; only this user's processes reach it, as its folder is private."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen(1024)
    listener.setblocking(False)
    return listener
