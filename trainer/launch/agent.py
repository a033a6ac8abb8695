"""The worker agent, a process between msrun and a worker: starts the worker, reports its end, and relays signals.

It stays after the worker has ended until the launcher releases it. When the launcher is gone, however that happened, it
ends the worker and itself; when the agent itself is killed, the system kills the worker.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import BinaryIO

from trainer.launch.heartbeat import DUMP_SIGNAL
from trainer.launch.processes import catches, kill_group, start_session
from trainer.launch.terminal import WorkerTerminal
from trainer.launch.wire import AgentMessage, Channel, scale_timeout, wakeup_pipe
from trainer.parallel.world import is_scheduler

SOCKET_VARIABLE = "RUN_TRAINER_LAUNCHER"
"""Environment variable with the path of the launcher's socket."""

_GRACE_WITHOUT_LAUNCHER_SECONDS = 8.0
_STARTED_TOO_LATE = 1


def run_agent() -> int:
    """Connects to the launcher, asks what to start, and serves until it is released. Returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the launcher decides; a worker gets its own
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _pass)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.environ[SOCKET_VARIABLE])
    except OSError:
        return _STARTED_TOO_LATE
    channel = Channel(connection)
    role = "worker"
    if is_scheduler():
        role = "scheduler"
    channel.send({"hello": role, "rank": int(os.environ.get("RANK_ID", "0")), "pid": os.getpid()})
    return _Agent(channel).serve()


def start_agents(command: Sequence[str], ranks: Sequence[str]) -> None:
    """Starts an agent for each rank of this node, as msrun does, and waits until they have ended.

    Each has a session of its own, and survives the end of this process.
    """
    agents = []
    for place, rank in enumerate(ranks):
        environment = {**os.environ, "RANK_ID": rank, "DEVICE_ID": str(place)}
        agents.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True))
    for agent in agents:
        agent.wait()


def _pass(number: int, frame: object) -> None:
    """Ignores a signal; unlike SIG_IGN, the worker does not inherit a handler."""


class _Agent:
    """The agent of one worker, which may not have started yet."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.selector = selectors.DefaultSelector()
        self.process: subprocess.Popen | None = None  # while it runs
        self.terminal: WorkerTerminal | None = None
        self.released = False
        self.kill_at: float | None = None

    def serve(self) -> int:
        """Handles messages of the launcher until it releases the agent; returns the exit code."""
        awake, wake = wakeup_pipe()
        signal.signal(signal.SIGCHLD, _pass)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.selector.register(awake, selectors.EVENT_READ)
        self.selector.register(self.channel, selectors.EVENT_READ)
        while not self.released:
            timeout = 1.0
            if self.kill_at is not None:
                timeout = 0.1
            self.selector.select(timeout)
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 1 << 12)
            for message in self.channel.receive():
                self.handle(message)
            if self.terminal is not None and not self.terminal.pump():
                self.close_terminal()
            if self.channel.closed and not self.released:  # the launcher is gone
                shutil.rmtree(os.path.dirname(os.environ[SOCKET_VARIABLE]), ignore_errors=True)
                if self.process is None:
                    return _STARTED_TOO_LATE
                if self.kill_at is None:
                    self.selector.unregister(self.channel)
                    self.process.send_signal(signal.SIGTERM)
                    self.kill_at = time.monotonic() + scale_timeout(_GRACE_WITHOUT_LAUNCHER_SECONDS)
            if self.process is not None:
                self.check_worker(self.process)
        return 0

    def handle(self, message: AgentMessage) -> None:
        """Does what a message of the launcher says; one for a worker that does not run is ignored."""
        process = self.process
        if "start" in message:
            self.start(message["start"])
        elif "size" in message and self.terminal is not None:
            self.terminal.resize(message["size"])
        elif "release" in message:
            self.released = True
        elif process is None:
            return
        elif "signal" in message:
            process.send_signal(message["signal"])
        elif "dump" in message and catches(process.pid, DUMP_SIGNAL):
            process.send_signal(DUMP_SIGNAL)
        elif "kill" in message:
            kill_group(process.pid)

    def start(self, spec: AgentMessage) -> None:
        """Starts the worker as the leader of its own session, on its cores, with its output in its log."""
        if spec["cores"] and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, spec["cores"])
        environment = {**os.environ, **spec["environment"]}
        for name in spec["unset"]:
            environment.pop(name, None)
        try:
            log = open(spec["log"], "ab", buffering=0)  # noqa: SIM115  the terminal keeps it
            if spec.get("terminal"):
                self.terminal = WorkerTerminal(log, spec["terminal"]["pipe"], spec["terminal"]["size"])
            output: BinaryIO | int = log
            if self.terminal is not None:
                output = self.terminal.slave
            self.process = start_session(spec["command"], environment, output)
        except OSError as error:
            self.channel.send({"ended": 127, "at_seconds": time.monotonic(), "why": str(error)})
            return
        if self.terminal is None:
            log.close()
        else:
            os.close(self.terminal.slave)  # the worker has it now: when the worker ends, so does the terminal
            self.selector.register(self.terminal.master, selectors.EVENT_READ)
        self.channel.send({"started": self.process.pid})

    def close_terminal(self) -> None:
        """Closes the worker's terminal, if it has one."""
        if self.terminal is not None:
            self.selector.unregister(self.terminal.master)
            self.terminal.close()
            self.terminal = None

    def check_worker(self, process: subprocess.Popen) -> None:
        """Reports the worker's exit, once, and kills the processes that it started."""
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            kill_group(process.pid)
        # Until it is reaped, the system gives its number, and that of its group, to no other process.
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return
        at_seconds = time.monotonic()
        kill_group(process.pid)
        self.process = None
        self.close_terminal()
        self.channel.send({"ended": process.wait(), "at_seconds": at_seconds})
