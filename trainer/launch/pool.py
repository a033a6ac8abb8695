"""The processes of a job on this host as the launcher sees them: each through the connection of its worker agent."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainer.launch.heartbeat import beat_file, read_announcement, read_step
from trainer.launch.job import ProcessExit, shell_code
from trainer.launch.processes import Identity, identity, is_alive, is_stopped, kill_group, send_signal
from trainer.launch.wire import AgentMessage, Channel, ListeningSocket, scale_timeout

_SILENT_SECONDS = 5.0
"""How long an agent may take to report the end of its worker; one that a signal has stopped never does."""

_QUIET_SECONDS = 10.0
"""Nobody is in trouble before no rank of the host has given a sign for so long: ranks wait for each other at each step,
so that all of them are quiet when one of them is."""


@dataclass
class WorkerHandle:
    """A worker, or the scheduler, whose rank is None."""

    rank: int | None
    channel: Channel | None = None  # to its agent, once that has connected
    agent: Identity | None = None
    process: Identity | None = None  # the worker itself, not its agent
    end: ProcessExit | None = None
    failed: ProcessExit | None = None  # when it announced its failure, and the exit code; it may still run
    signalled: int | None = None  # the signal to end that it received, whoever sent it
    beat: int | None = None  # when its heartbeat file changed last, in nanoseconds
    gone_at: float | None = None  # when its process was first seen to be gone, without a word of its agent
    kills: int = 0

    @property
    def is_pending(self) -> bool:
        """Returns whether its exit is still to come: it runs, or was told to start."""
        return self.channel is not None and self.end is None

    def send(self, message: AgentMessage) -> None:
        """Sends a message to its agent, if that has connected."""
        if self.channel is not None:
            self.channel.send(message)

    def kill(self) -> None:
        """Kills it with its children. The second call kills its agent too: a stopped agent neither kills nor reports.
        """
        self.send({"kill": True})
        if self.process is not None and identity(self.process.pid, ended=True) in (self.process, None):
            kill_group(self.process.pid)
        self.kills += 1
        if self.kills > 1 and self.agent is not None:
            send_signal(self.agent, signal.SIGKILL)

    def check_agent(self, now: float) -> None:
        """Wakes, and later kills, an agent that does not report that its worker has ended."""
        if self.process is None or self.agent is None or is_alive(self.process):
            self.gone_at = None
            return
        self.gone_at = self.gone_at or now
        if now - self.gone_at > scale_timeout(_SILENT_SECONDS):
            send_signal(self.agent, signal.SIGKILL)
        elif now > self.gone_at:  # it is not just about to report
            send_signal(self.agent, signal.SIGCONT)


@dataclass
class WorkerPool:
    """All processes of a job on this host."""

    workers: dict[int, WorkerHandle]
    scheduler: WorkerHandle  # msrun starts it on the host of master_addr
    listener: ListeningSocket  # where the agents connect
    specs: dict[int | None, AgentMessage]  # what each agent starts, by rank; that of the scheduler under None
    folder: Path  # of the job, where workers leave heartbeats and what they announce
    ending_since: float | None = None  # when the workers were first told to end because of a failure
    closing: bool = False  # whether agents that connect from now on start nothing
    stepped: bool = False  # whether any worker has finished a step
    polled_at: float = field(default_factory=time.monotonic)
    unidentified: list[Channel] = field(default_factory=list)  # of agents that have not said yet what they are

    @property
    def handles(self) -> list[WorkerHandle]:
        """Returns the handles of all workers and of the scheduler."""
        return [*self.workers.values(), self.scheduler]

    @property
    def is_complete(self) -> bool:
        """Returns whether the agents of all workers have connected."""
        return all(worker.channel is not None for worker in self.workers.values())

    @property
    def is_ending(self) -> bool:
        """Returns whether the workers were told to end because of a failure."""
        return self.ending_since is not None

    @property
    def has_ended(self) -> bool:
        """Returns whether no worker runs and none will start."""
        workers = self.workers.values()
        return not any(worker.is_pending or (worker.end is None and not self.closing) for worker in workers)

    @property
    def sources(self) -> list[Channel | socket.socket]:
        """Returns the sockets to wait for."""
        channels = [each.channel for each in self.handles if each.channel is not None and not each.channel.closed]
        return [*self.listener.sources, *self.unidentified, *channels]

    def poll(self) -> bool:
        """Accepts agents and handles what they report; returns whether a process has started."""
        has_started = False
        before = self.polled_at
        self.polled_at = time.monotonic()
        callers = [*self.unidentified, *(Channel(connection) for connection, _ in self.listener.accept())]
        self.unidentified = []
        for channel in callers:
            messages = channel.receive()  # an agent sends nothing more before it has its answer
            if messages:
                self._register(channel, messages[0])
            elif not channel.closed:
                self.unidentified.append(channel)
        for worker in self.handles:
            if worker.channel is None or worker.channel.closed:
                continue
            for message in worker.channel.receive():
                if "started" in message:
                    worker.process = identity(message["started"]) or Identity(message["started"], 0)
                    has_started = True
                elif "ended" in message:
                    code = shell_code(message["ended"])
                    self._record_end(worker, code, message["at_seconds"], message.get("why", ""))
            if worker.channel.closed and worker.end is None:
                # The agent was killed, and with it the worker. It counts as ended at the last look, so that no failure
                # of another rank that this causes has an earlier time.
                self._record_end(worker, 128 + signal.SIGKILL, before, "")
                worker.kill()
        return has_started

    def _register(self, channel: Channel, message: AgentMessage) -> None:
        worker: WorkerHandle | None = self.scheduler
        if message.get("hello") != "scheduler":
            worker = self.workers.get(message.get("rank", -1))
        if worker is None or worker.channel is not None or self.closing or worker.rank not in self.specs:
            channel.send({"release": True})
        else:
            worker.channel = channel
            worker.agent = identity(message["pid"])
            worker.send({"start": self.specs[worker.rank]})

    def _record_end(self, worker: WorkerHandle, exit_code: int, at_seconds: float, why: str) -> None:
        self._read_announcements(worker)  # the last ones
        killed = worker.kills > 0 and exit_code == 128 + signal.SIGKILL  # clocks and looks differ by some hundredths
        by_launcher = self.ending_since is not None and (killed or at_seconds >= self.ending_since)
        worker.end = ProcessExit(worker.rank, exit_code, at_seconds, by_launcher, why)
        if worker.failed is not None:  # it failed when it said so; what it takes to end is not its exit code
            worker.end.at_seconds = worker.failed.at_seconds
            worker.end.by_launcher = False
            if by_launcher:
                worker.end.exit_code = worker.failed.exit_code

    def read_files(self) -> bool:
        """Reads heartbeats and announcements; returns whether any worker makes progress."""
        moved = False
        for rank, worker in self.workers.items():
            if worker.process is None or worker.end is not None:
                continue
            with contextlib.suppress(OSError):
                path = beat_file(self.folder, rank)
                beat = path.stat().st_mtime_ns
                if beat != worker.beat:
                    moved = True
                    worker.beat = beat
                    self.stepped = self.stepped or read_step(path) is not None
            self._read_announcements(worker)
            worker.check_agent(time.monotonic())
        return moved

    def _read_announcements(self, worker: WorkerHandle) -> None:
        if worker.rank is None:
            return
        if worker.failed is None:
            failure = read_announcement(self.folder, worker.rank, "failed")
            if failure is not None:
                worker.failed = ProcessExit(worker.rank, failure.number, failure.at_seconds)
        if worker.signalled is None:
            received = read_announcement(self.folder, worker.rank, "signal")
            if received is not None:
                worker.signalled = received.number

    def received_signal(self) -> tuple[int, int] | None:
        """Returns the lowest rank that received a signal to end, and the signal."""
        for rank, worker in self.workers.items():
            if worker.signalled is not None:
                return rank, worker.signalled
        return None

    def ranks_behind(self, quiet_seconds: float) -> dict[int, str]:
        """Returns the ranks for which the others wait, and why.

        Args:
            quiet_seconds: Seconds since any rank last gave a sign of progress.
        """
        if quiet_seconds <= scale_timeout(_QUIET_SECONDS):
            return {}
        processes: dict[int, Identity] = {}
        for rank, worker in self.workers.items():
            if worker.is_pending and worker.process is not None:
                processes[rank] = worker.process
        steps = {rank: read_step(beat_file(self.folder, rank)) or 0 for rank in processes}
        most = max(steps.values(), default=0)
        behind = {}
        for rank, process in processes.items():
            if is_stopped(process):
                signal_words = f"a signal (SIGSTOP or the like, process {process.pid})"
                behind[rank] = f"was stopped by {signal_words}; the others wait."
            elif steps[rank] < most:
                behind[rank] = f"is stuck after step {steps[rank]}; other ranks finished step {most} and are waiting."
        return behind

    def send_to_workers(self, message: AgentMessage) -> None:
        """Sends a message to all workers but those that are failing."""
        for worker in self.workers.values():
            if worker.is_pending and worker.failed is None:
                worker.send(message)

    def forward_signal(self, number: int) -> None:
        """Sends a signal to all workers that have not received it yet: a second one would make them end at once."""
        for worker in self.workers.values():
            if worker.is_pending and worker.failed is None and worker.signalled is None:
                worker.send({"signal": number})

    def kill_all(self) -> None:
        """Kills all processes that have not ended."""
        for worker in self.handles:
            if worker.end is None:
                worker.kill()

    def give_up(self) -> None:
        """Counts workers as ended that not even SIGKILL ends, because they wait in the system for a device or a disk.
        """
        for worker in self.workers.values():
            if worker.is_pending:
                why = "its process does not react to SIGKILL"
                if worker.process is not None:
                    why = f"process {worker.process.pid} does not react to SIGKILL"
                self._record_end(worker, 128 + signal.SIGKILL, time.monotonic(), why)

    def release_all(self) -> None:
        """Lets all agents end."""
        for worker in self.handles:
            worker.send({"release": True})
