"""Supervises a job from the start of msrun to the end of its last process: whom to stop when, and how the job ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from trainer.errors import EXIT_HANG, EXIT_RUN_FAILED
from trainer.launch.arguments import LaunchOptions
from trainer.launch.control.messages import NodeMessage, failure_message
from trainer.launch.control.nodes import Nodes
from trainer.launch.job import (
    JobFiles,
    JobState,
    Outcome,
    ProcessExit,
    decide_outcome,
    failure_lines,
    shell_code,
    stopped_outcome,
    write_job_state,
    write_outcome,
)
from trainer.launch.pool import WorkerPool
from trainer.launch.processes import end_children, is_stopped
from trainer.launch.terminal import Screen, terminal_size
from trainer.launch.wire import scale_timeout, wait_for_data, wakeup_pipe

GRACE_SECONDS = 8.0
"""From telling workers to end to killing them."""

_TICK_SECONDS = 0.1
_LOOK_SECONDS = 0.5
_ECHO_SECONDS = 2.0
_DUMP_SECONDS = 2.0
_MSRUN_SECONDS = 3.0
_UNKILLABLE_SECONDS = 15.0
_STANDSTILL_SECONDS = 5.0
"""The launcher looks every tenth of a second; after so long without a look its machine gave it no time."""
_KILLED = "killed by the launcher when the job was to end"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def collect_signals(signals: deque[int]) -> Iterator[None]:
    """Collects signals to end the job, and of a resized terminal, which have no other effect meanwhile."""
    before = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, signal.SIGWINCH)}
    for number in before:
        if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, lambda number, frame: signals.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_signal(signals: deque[int]) -> int | None:
    """Returns the first signal to end the job that is not handled yet; SIGHUP counts as SIGTERM."""
    for number in signals:
        if number in _STOP_SIGNALS:
            return _without_hangup(number)
    return None


def _without_hangup(number: int) -> int:
    """Returns a signal number, with SIGTERM in place of SIGHUP."""
    if number == signal.SIGHUP:
        return int(signal.SIGTERM)
    return int(number)


@dataclass
class _Timers:
    """Moments of the monotonic clock, in seconds."""

    started_at: float = field(default_factory=time.monotonic)  # the workers
    polled_at: float = field(default_factory=time.monotonic)
    woke_at: float = 0.0  # the end of the last standstill
    moved_at: float | None = None  # the last sign that a rank of any node gets on
    blocked_since: float | None = None  # since when a process of a job that is to end has been stopped
    dumped_at: float | None = None
    kill_at: float | None = None
    killed_at: float | None = None  # for the first time
    look_at: float = 0.0  # the next look at the workers' files

    @property
    def last_sign_at(self) -> float:
        """Returns when the job last gave a sign of progress, or could not give one."""
        return max(self.started_at, self.moved_at or 0.0, self.woke_at)


@dataclass
class _StopState:
    """The signals to end the job that have arrived."""

    signal: int | None = None
    source: str = ""  # the rank or node that received the first one; empty: this launcher
    requests: int = 0
    at_seconds: float = 0.0


@dataclass
class _Failures:
    """The failures that end the job, apart from the exits of its workers."""

    hang: str = ""  # what took too long, once that counts as a hang
    msrun: ProcessExit | None = None
    elsewhere: NodeMessage | None = None  # of another node
    stopped_lines: list[str] = field(default_factory=list)  # about processes that a signal had stopped by then


@dataclass
class Supervisor:
    """Supervises one job on one host.

    Attributes:
        signals: Signals that have arrived and are not handled yet, see `collect_signals`.
    """

    options: LaunchOptions
    pool: WorkerPool
    msrun: subprocess.Popen
    files: JobFiles
    state: JobState  # for other processes to read
    nodes: Nodes
    screen: Screen
    signals: deque[int]
    timers: _Timers = field(default_factory=_Timers)
    stop: _StopState = field(default_factory=_StopState)
    failures: _Failures = field(default_factory=_Failures)
    named: dict[int, str] = field(default_factory=dict)  # the ranks that hold the others up, and why

    def run(self) -> Outcome:
        """Waits for the end of the job and leaves no process behind."""
        awake, wake = wakeup_pipe()
        old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            while not self._is_over():
                self._wait(awake)
                self._poll(time.monotonic())
            return self._finish()
        finally:
            self.pool.kill_all()
            self.pool.release_all()
            self.nodes.close()
            end_children()
            signal.set_wakeup_fd(old_wake)
            os.close(awake)
            os.close(wake)

    def _is_over(self) -> bool:
        """Returns whether the workers of this node have ended, and the other nodes need not be waited for."""
        if not self.pool.has_ended or self.pool.is_ending:
            return self.pool.has_ended
        return self.nodes.report_done()

    def _wait(self, awake: int) -> None:
        wait_for_data((awake, *self.pool.sources, *self.nodes.sources), _TICK_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.read(awake, 1 << 12)

    def _poll(self, now: float) -> None:
        timers = self.timers
        self._check_standstill(now)
        self._handle_signals(now)
        for event in self.nodes.poll(now):
            self._handle_event(event, now)
        if self.pool.poll():
            self._write_state()
        if now >= timers.look_at:
            timers.look_at = now + _LOOK_SECONDS
            if self.pool.read_files():
                timers.moved_at = now
                self.nodes.report_progress()
            if not self.pool.is_ending:
                self._check_blocked_stop(now)
                self._name_ranks_behind(now)
            self._write_state()
        self._end_msrun()
        if not self.pool.is_ending:
            self._check_received_signal(now)
            self._check_failures(now)
            self._check_hang(now)
        if timers.kill_at is not None and now > timers.kill_at:
            self._kill(now)
        self._show(now)

    def _check_standstill(self, now: float) -> None:
        """Notes when the machine gave this process no time: the ranks had none either, so this time does not count as a
        hang."""
        seconds = now - self.timers.polled_at
        self.timers.polled_at = now
        if seconds > _STANDSTILL_SECONDS:
            self.timers.woke_at = now
            reason = f"the launcher could not run for {seconds:.0f} s: this machine was suspended, or is overloaded"
            self.screen.print([f"{reason}. The job goes on; that time does not count as a hang."])

    def _handle_signals(self, now: float) -> None:
        while self.signals:
            number = self.signals.popleft()
            if number == signal.SIGWINCH:
                self.pool.send_to_workers({"size": terminal_size()})
            else:
                number = _without_hangup(number)
                if self._stop(number, now, ""):
                    self.nodes.send(NodeMessage(kind="stop", number=number, node=self.options.node_rank))

    def _handle_event(self, event: NodeMessage, now: float) -> None:
        if event.kind == "note":
            self.screen.print(event.lines)
        elif event.kind == "stop":
            self._stop(event.number, now, f"node {event.node}")
        elif event.kind == "moved":
            self.timers.moved_at = now
        elif not self.pool.is_ending and self.failures.elsewhere is None:
            self.failures.elsewhere = event
            if event.number == EXIT_HANG:
                self._dump(now)
            else:
                self._end_workers(now, GRACE_SECONDS)

    def _check_received_signal(self, now: float) -> None:
        """Treats a signal that one rank received as one for the job: all ranks of a training act on it together."""
        received = None
        if self.stop.signal is None:
            received = self.pool.received_signal()
        if received is not None:
            rank, number = received
            self._stop(number, now, f"rank {rank}")
            self.nodes.send(NodeMessage(kind="stop", number=number, node=self.options.node_rank))

    def _stop(self, number: int, now: float, source: str) -> bool:
        """Forwards a signal to every worker. They save and end; after a second signal they have little time, then none.

        Returns whether it is a new signal: batch systems signal all launchers and all ranks at once.

        Args:
            source: The rank or node that received it; empty means this launcher.
        """
        stop = self.stop
        if stop.requests and source != stop.source and now - stop.at_seconds < _ECHO_SECONDS:
            return False
        stop.requests += 1
        self.pool.closing = True
        if stop.requests == 1:
            stop.signal = number
            stop.source = source
            stop.at_seconds = now
            name = signal.Signals(number).name
            who = name
            if source:
                who = f"{name}, which {source} received"
            again = "send it again to end them without saving"
            self.screen.print([f"{who}: the workers finish their step and save; {again}."])
            self.pool.forward_signal(number)
        else:
            self.pool.send_to_workers({"signal": number})
        if stop.requests > 2:
            self._kill(now)
        elif stop.requests == 2 or not self.pool.stepped:
            self.timers.kill_at = self.timers.kill_at or now + scale_timeout(GRACE_SECONDS)
        return True

    def _check_blocked_stop(self, now: float) -> None:
        """Kills the workers after a signal to end if one of them is stopped (SIGSTOP).

        A stopped worker can neither finish its step nor save, and the others wait for it.
        """
        if self.stop.signal is None:
            return
        lines = self._stopped_lines()
        self.failures.stopped_lines = lines
        if not lines:
            self.timers.blocked_since = None
            return
        self.timers.blocked_since = max(self.timers.blocked_since or now, self.timers.moved_at or 0.0)
        if now - self.timers.blocked_since > scale_timeout(GRACE_SECONDS):
            words = f"{stopped_outcome(self.stop.signal).words}; not all ranks could save."
            self.nodes.send(failure_message(128 + self.stop.signal, [words, *lines]))
            self._kill(now)

    def _name_ranks_behind(self, now: float) -> None:
        """Prints the ranks of this host for which the others wait: once, and again when they make progress."""
        if self.stop.signal is not None or self.failures.hang:
            return
        behind = self.pool.ranks_behind(now - self.timers.last_sign_at)
        self.screen.print([f"rank {rank} is making progress again." for rank in self.named if rank not in behind])
        self.screen.print([f"rank {rank} {why}" for rank, why in behind.items() if self.named.get(rank) != why])
        self.named = behind

    def _end_msrun(self) -> None:
        """Ends msrun once it has started all agents.

        When an agent dies, msrun would kill the others at once, and no process could report which one died first.
        """
        if self.msrun.poll() is None:
            if self.options.needs_msrun and self.pool.is_complete:
                self.msrun.kill()
        elif not self.pool.closing and not self.pool.is_complete and self.failures.msrun is None:
            code = shell_code(self.msrun.returncode) or EXIT_RUN_FAILED  # it will not start the others any more
            self.failures.msrun = ProcessExit(None, code, time.monotonic(), process="msrun")

    def _check_failures(self, now: float) -> None:
        workers = self.pool.workers.values()
        announced = [worker.failed for worker in workers if worker.failed is not None and not worker.end]
        outcome = decide_outcome([*self._ends(), *announced], self.stop.signal)
        if outcome.first is not None:
            self._end_workers(now, GRACE_SECONDS)
            self.nodes.send(failure_message(outcome.exit_code, self._failure_lines(outcome)))

    def _check_hang(self, now: float) -> None:
        timers = self.timers
        if self.pool.is_ending:  # by now
            return
        if timers.dumped_at is not None:
            if now - timers.dumped_at > scale_timeout(_DUMP_SECONDS):
                self._end_workers(now, GRACE_SECONDS / 2)
            return
        limit = self.options.start_limit
        if self.pool.stepped:
            limit = self.options.hang_timeout
        if not limit or now - timers.last_sign_at <= limit:
            return
        if self.pool.stepped:
            hang = f"no step was finished for {limit:g} s (--hang_timeout)"
        else:
            since = "the last text that was tokenized"
            if timers.moved_at is None:
                since = "the start"
            hang = f"the first step was not finished within {limit:g} s of {since} (--start_timeout)"
        self.failures.hang = hang
        self.failures.stopped_lines = self._stopped_lines()
        self._dump(now)
        self.nodes.send(failure_message(EXIT_HANG, [f"error: {hang}.", *self.failures.stopped_lines]))

    def _stopped_lines(self) -> list[str]:
        """Returns lines about ranks that a signal has stopped."""
        processes = {f"rank {rank}": worker.process for rank, worker in self.pool.workers.items() if worker.is_pending}
        agents = {f"the agent of rank {rank}": worker.agent for rank, worker in self.pool.workers.items()}
        return [
            f"  Stopped by a signal (SIGSTOP or the like): {name}, process {process.pid}."
            for name, process in (processes | agents).items()
            if process is not None and is_stopped(process)
        ]

    def _dump(self, now: float) -> None:
        """Asks the workers for their Python stacks; `_check_hang` ends them soon after."""
        self.timers.dumped_at = now
        self.pool.send_to_workers({"dump": True})

    def _end_workers(self, now: float, grace_seconds: float) -> None:
        self.pool.closing = True
        self.pool.ending_since = now
        self.msrun.kill()  # it may not have started all yet
        self.pool.send_to_workers({"signal": int(signal.SIGTERM)})
        self.timers.kill_at = now + scale_timeout(grace_seconds)

    def _kill(self, now: float) -> None:
        timers = self.timers
        self.pool.ending_since = self.pool.ending_since or now
        timers.killed_at = timers.killed_at or now
        self.pool.kill_all()
        timers.kill_at = now + scale_timeout(1.0)  # and again those that appear meanwhile, and stopped agents
        if now - timers.killed_at > scale_timeout(_UNKILLABLE_SECONDS):
            self.pool.give_up()

    def _ends(self) -> list[ProcessExit]:
        ends = [worker.end for worker in self.pool.handles if worker.end is not None]
        stop = self.stop
        if stop.signal is not None and not self.pool.stepped:
            # While Python loads it ends with an error at a signal. Before the first step nothing is lost.
            for place, end in enumerate(ends):
                if end.at_seconds >= stop.at_seconds:
                    ends[place] = replace(end, by_launcher=True)
        if self.failures.msrun is None:
            return ends
        return [*ends, self.failures.msrun]

    def _show(self, now: float) -> None:
        started = sum(worker.process is not None for worker in self.pool.workers.values())
        self.screen.update(started, len(self.pool.workers), now - self.timers.started_at, quiet=self.pool.closing)

    def _write_state(self, outcome: Outcome | None = None) -> None:
        for state in self.state.workers:
            worker = self.pool.workers[state.rank]
            if worker.process is not None:
                state.pid = worker.process.pid
                state.state = "running"
            if worker.end is not None:
                state.state = "ended"
                state.exit_code = worker.end.exit_code
                if worker.kills and worker.end.by_launcher and state.exit_code == 128 + signal.SIGKILL:
                    state.role = _KILLED
                elif outcome is not None and worker.end is outcome.first:
                    state.role = "failed first"
                elif outcome is not None and worker.end in outcome.others:
                    state.role = "ended because of that"
        if outcome is not None:
            write_outcome(self.files, self.state, outcome)
        else:
            write_job_state(self.files, self.state)

    def _finish(self) -> Outcome:
        """Releases all agents after the last worker has ended, prints how the job ended, and returns the outcome."""
        self.pool.closing = True
        failures = self.failures
        outcome = decide_outcome(self._ends(), self.stop.signal, failures.hang)
        if failures.elsewhere is not None:
            words = "ended because of another node"
            outcome = Outcome(failures.elsewhere.number, words, stopped_by=self.stop.signal)
        outcome.progressed = self.pool.stepped
        self.pool.scheduler.kill()
        self.pool.release_all()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not outcome.exit_code:
                self.msrun.wait(_MSRUN_SECONDS)
        end_children()
        self._show(time.monotonic())
        self.screen.close()
        self._write_state(outcome)
        if failures.elsewhere is not None:
            self.screen.print([*failures.elsewhere.lines, "  The workers of this node ended because of that."])
        elif self.stop.signal is not None and outcome.first is None and not failures.hang and outcome.exit_code:
            self.screen.print([f"{outcome.words}.", *failures.stopped_lines])
        elif outcome.exit_code:
            self.screen.print(self._failure_lines(outcome))
        return outcome

    def _failure_lines(self, outcome: Outcome) -> list[str]:
        first = outcome.first
        if first is None:
            lines = failure_lines(outcome, None, 0.0)
        else:
            log = self.files.log(first.rank)
            if first is self.failures.msrun:
                log = self.files.msrun_log
            lines = failure_lines(outcome, log, first.at_seconds - self.timers.started_at)
        if self.failures.hang:
            lines += self.failures.stopped_lines
            where = self.files.log_dir
            lines.append(f"  Ranks that still answer have their Python stacks at the end of their logs: {where}")
            option = "start_timeout"
            if self.pool.stepped:
                option = "hang_timeout"
            lines.append(f"  Fix: if a step may take that long, give a larger --{option}; 0 is no limit.")
        return lines
