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

from trainer.launch.heartbeat import DUMP_SIGNAL
from trainer.launch.processes import catches, kill_group, start_session
from trainer.launch.terminal import WorkerTerminal
from trainer.launch.wire import Channel, Message, scaled, wakeup_pipe

SOCKET_VARIABLE = "RUN_TRAINER_LAUNCHER"
"""Environment variable with the path of the launcher's socket."""

_GRACE_WITHOUT_LAUNCHER_SECONDS = 8.0
_STARTED_TOO_LATE = 1


def main() -> int:
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
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        role = "scheduler"
    channel.send({"hello": role, "rank": int(os.environ.get("RANK_ID", "0")), "pid": os.getpid()})
    return _Agent(channel).serve()


def _pass(number: int, frame: object) -> None:
    """A handler, and not SIG_IGN, which the worker would inherit."""


class _Agent:
    """An agent of one worker, which it may not have started yet."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.selector = selectors.DefaultSelector()
        self.process: subprocess.Popen | None = None
        self.terminal: WorkerTerminal | None = None
        self.running = False
        self.released = False
        self.kill_at: float | None = None

    def serve(self) -> int:
        awake, wake = wakeup_pipe()
        signal.signal(signal.SIGCHLD, _pass)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.selector.register(awake, selectors.EVENT_READ)
        self.selector.register(self.channel, selectors.EVENT_READ)
        while not self.released:
            self.selector.select(timeout=1.0 if self.kill_at is None else 0.1)
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 1 << 12)
            for message in self.channel.receive():
                self.handle(message)
            if self.terminal is not None and not self.terminal.pump():
                self.close_terminal()
            if self.channel.closed:  # the launcher is gone
                shutil.rmtree(os.path.dirname(os.environ[SOCKET_VARIABLE]), ignore_errors=True)
                if not self.running:
                    return _STARTED_TOO_LATE
                if self.kill_at is None:
                    self.selector.unregister(self.channel)
                    self.process.send_signal(signal.SIGTERM)
                    self.kill_at = time.monotonic() + scaled(_GRACE_WITHOUT_LAUNCHER_SECONDS)
            if self.running:
                self.check_worker()
        return 0

    def handle(self, message: Message) -> None:
        if "start" in message:
            self.start(message["start"])
        elif "size" in message and self.terminal is not None:
            self.terminal.resize(message["size"])
        elif "signal" in message and self.running:
            self.process.send_signal(message["signal"])
        elif "dump" in message and self.running and catches(self.process.pid, DUMP_SIGNAL):
            self.process.send_signal(DUMP_SIGNAL)
        elif "kill" in message and self.running:
            kill_group(self.process.pid)
        elif "release" in message:
            self.released = True

    def start(self, spec: Message) -> None:
        """Starts the worker as the leader of its own session, on its cores, with its output in its log."""
        if spec["cores"] and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, spec["cores"])
        environment = {**os.environ, **spec["environment"]}
        for name in spec["without"]:
            environment.pop(name, None)
        try:
            log = open(spec["log"], "ab", buffering=0)  # noqa: SIM115  the terminal keeps it
            if spec.get("terminal"):
                self.terminal = WorkerTerminal(log, spec["terminal"]["pipe"], spec["terminal"]["size"])
            if self.terminal is None:
                output = log
            else:
                output = self.terminal.slave
            self.process = start_session(spec["command"], environment, output)
        except OSError as error:
            self.channel.send({"ended": 127, "at_seconds": time.monotonic(), "why": str(error)})
            return
        self.running = True
        if self.terminal is None:
            log.close()
        else:
            os.close(self.terminal.slave)  # the worker has it now: when the worker ends, so does the terminal
            self.selector.register(self.terminal.master, selectors.EVENT_READ)
        self.channel.send({"started": self.process.pid})

    def close_terminal(self) -> None:
        if self.terminal is not None:
            self.selector.unregister(self.terminal.master)
            self.terminal.close()
            self.terminal = None

    def check_worker(self) -> None:
        """Reports the worker's end, once; processes that it started end with it."""
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            kill_group(self.process.pid)
        # Its number is still its own while it is not reaped, and so is that of its group.
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return
        at_seconds = time.monotonic()
        kill_group(self.process.pid)
        self.running = False
        self.close_terminal()
        self.channel.send({"ended": self.process.wait(), "at_seconds": at_seconds})
