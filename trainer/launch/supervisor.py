"""A job from the start of msrun to the end of its last process: which worker is stopped when, and how the job ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.errors import EXIT_HANG, EXIT_RUN_FAILED
from trainer.launch.job import End, JobFiles, JobState, Outcome, decide_outcome, report, shell_code, write_state
from trainer.launch.nodes import Event, Hub, Spoke
from trainer.launch.pool import WorkerPool
from trainer.launch.processes import end_children
from trainer.launch.terminal import Screen, terminal_size
from trainer.launch.wire import scaled, wakeup_pipe

GRACE_SECONDS = 8.0
"""From telling workers to end to killing them."""

_TICK_SECONDS = 0.1
_FILES_EVERY_SECONDS = 0.5
_STATE_EVERY_SECONDS = 1.0
_DUMP_SECONDS = 2.0
_MSRUN_SECONDS = 3.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Supervisor:
    """Supervises one job on one host. Names with `_at` are moments of the monotonic clock."""

    pool: WorkerPool
    start_msrun: Callable[[], subprocess.Popen]
    files: JobFiles
    state: JobState  # for other processes to read
    nodes: Hub | Spoke
    hang_timeout: float  # seconds without a step that count as a hang; 0: none do
    screen: Screen
    msrun: subprocess.Popen = field(init=False)
    signals: deque[int] = field(default_factory=deque)  # those that have arrived and are not handled yet
    stopped_by: int | None = None
    stop_requests: int = 0
    hung_seconds: float | None = None  # for how long no step was finished, once that counts as a hang
    msrun_failure: End | None = None
    failure_elsewhere: Event | None = None  # of another node, which ends this one
    reported_done: bool = False
    began: float = field(default_factory=time.monotonic)
    kill_at: float | None = None
    dumped_at: float | None = None
    last_step_at: float | None = None
    files_at: float = 0.0
    state_at: float = 0.0

    def run(self) -> Outcome:
        """Starts the job, waits for its end and leaves no process behind."""
        awake, wake = wakeup_pipe()
        before = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, signal.SIGWINCH)}
        for number in before:
            if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:  # nohup stays in force
                signal.signal(number, lambda number, frame: self.signals.append(number))
        old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            self.msrun = self.start_msrun()
            while not self.over():
                self._wait(awake)
                self._poll()
            return self._finish()
        finally:
            self.pool.kill_all()
            self.pool.release_all()
            self.nodes.close()
            end_children()
            signal.set_wakeup_fd(old_wake)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(awake)
            os.close(wake)

    def over(self) -> bool:
        """Whether the workers of this node have ended, and the other nodes need not be waited for."""
        if not self.pool.ended or self.pool.ending_since is not None:
            return self.pool.ended
        if not self.reported_done:
            self.reported_done = True
            self.nodes.done()
        return self.nodes.finished

    def _wait(self, awake: int) -> None:
        with selectors.DefaultSelector() as selector:
            for source in (awake, *self.pool.listener.sources, *self.pool.channels, *self.nodes.sources):
                selector.register(source, selectors.EVENT_READ)
            selector.select(_TICK_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.read(awake, 1 << 12)

    def _poll(self) -> None:
        now = time.monotonic()
        while self.signals:
            number = self.signals.popleft()
            if number == signal.SIGWINCH:
                self.pool.send_to_workers({"size": terminal_size()})
            else:
                self._stop(signal.SIGTERM if number == signal.SIGHUP else number, now)
                self.nodes.stop(int(self.stopped_by))
        for event in self.nodes.poll(now):
            self._handle(event, now)
        changed = self.pool.poll()
        if now >= self.files_at:
            self.files_at = now + _FILES_EVERY_SECONDS
            if self.pool.read_files(self.files.folder):
                self.last_step_at = now
        self._check_failures(now)
        self._check_hang(now)
        if self.kill_at is not None and now > self.kill_at:
            self._kill(now)
        self._show()
        if changed or now >= self.state_at:
            self.state_at = now + _STATE_EVERY_SECONDS
            self._write_state()

    def _stop(self, number: int, now: float) -> None:
        """Hands a signal to every worker. They save and end; the second time they have little time, then none."""
        self.stop_requests += 1
        self.stopped_by = self.stopped_by or number
        self.pool.closing = True
        name = signal.Signals(number).name
        if self.stop_requests == 1:
            again = "send it again to end them without saving"
            self.screen.print([f"{name}: the workers finish their step and save; {again}."])
        self.pool.send_to_workers({"signal": number})
        if self.stop_requests > 2:
            self._kill(now)
        elif self.stop_requests == 2 or self.last_step_at is None:
            self.kill_at = self.kill_at or now + scaled(GRACE_SECONDS)

    def _handle(self, event: Event, now: float) -> None:
        if event.kind == "note":
            self.screen.print(event.lines)
        elif event.kind == "stop":
            self._stop(event.number, now)
        elif self.pool.ending_since is None and self.failure_elsewhere is None:
            self.failure_elsewhere = event
            if event.number == EXIT_HANG:
                self._dump(now)
            else:
                self._end_workers(now, GRACE_SECONDS)

    def _check_failures(self, now: float) -> None:
        workers = self.pool.workers.values()
        if self.msrun.poll() is not None and not self.pool.closing and self.msrun_failure is None:
            if any(worker.channel is None for worker in workers):  # msrun will not start the others any more
                code = shell_code(self.msrun.returncode) or EXIT_RUN_FAILED
                self.msrun_failure = End(None, code, time.monotonic(), process="msrun")
        if self.pool.ending_since is not None:
            return
        announced = [worker.failed for worker in workers if worker.failed is not None and not worker.end]
        outcome = decide_outcome([*self._ends(), *announced], self.stopped_by, None)
        if outcome.first is not None:
            self._end_workers(now, GRACE_SECONDS)
            self.nodes.failed(outcome.exit_code, self._failure_lines(outcome))

    def _end_workers(self, now: float, grace_seconds: float) -> None:
        self.pool.closing = True
        self.pool.ending_since = now
        self.msrun.kill()  # it would kill the others without grace
        self.pool.send_to_workers({"signal": int(signal.SIGTERM)})
        self.kill_at = now + scaled(grace_seconds)

    def _check_hang(self, now: float) -> None:
        if self.pool.ending_since is not None:
            return
        if self.dumped_at is not None:
            if now - self.dumped_at > scaled(_DUMP_SECONDS):
                self._end_workers(now, GRACE_SECONDS / 2)
        elif self.hang_timeout and self.last_step_at is not None and now - self.last_step_at > self.hang_timeout:
            self.hung_seconds = now - self.last_step_at
            self._dump(now)
            self.nodes.failed(EXIT_HANG, [f"error: no step was finished for {self.hung_seconds:.0f} s."])

    def _dump(self, now: float) -> None:
        """Asks the workers for their Python stacks; `_check_hang` ends them soon after."""
        self.dumped_at = now
        self.pool.send_to_workers({"dump": True})

    def _kill(self, now: float) -> None:
        self.pool.ending_since = self.pool.ending_since or now
        self.pool.kill_all()
        self.kill_at = now + 1.0  # and again those that appear meanwhile

    def _ends(self) -> list[End]:
        ends = [worker.end for worker in self.pool.all if worker.end is not None]
        return ends if self.msrun_failure is None else [*ends, self.msrun_failure]

    def _show(self) -> None:
        started = sum(worker.process is not None for worker in self.pool.workers.values())
        seconds = time.monotonic() - self.began
        self.screen.update(started, len(self.pool.workers), seconds, quiet=self.pool.closing)

    def _write_state(self, outcome: Outcome | None = None) -> None:
        for state in self.state.workers:
            worker = self.pool.workers[state.rank]
            state.pid = worker.process.pid if worker.process else None
            state.exit_code = worker.end.exit_code if worker.end else None
            state.state = "ended" if worker.end else "running" if worker.process else "waiting"
            if outcome is not None and outcome.first is not None and state.rank == outcome.first.rank:
                state.role = "failed first"
            elif outcome is not None and any(state.rank == end.rank for end in outcome.others):
                state.role = "ended because of that"
        if outcome is not None:
            self.state.outcome, self.state.exit_code, self.state.ended = outcome.words, outcome.exit_code, time.time()
        write_state(self.files, self.state)

    def _finish(self) -> Outcome:
        """All workers have ended: releases everything else, and tells how it went."""
        self.pool.closing = True
        outcome = decide_outcome(self._ends(), self.stopped_by, self.hung_seconds)
        if self.failure_elsewhere is not None:
            outcome = Outcome(self.failure_elsewhere.number, "ended because of another node")
        self.pool.scheduler.kill()
        self.pool.release_all()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not outcome.exit_code:
                self.msrun.wait(_MSRUN_SECONDS)
        end_children()
        self._show()
        self.screen.close()
        self._write_state(outcome)
        if not outcome.exit_code:
            return outcome
        if self.failure_elsewhere is not None:
            self.screen.print([*self.failure_elsewhere.lines, "  The workers of this node ended because of that."])
        elif self.stopped_by is not None and outcome.first is None and self.hung_seconds is None:
            self.screen.print([f"{outcome.words}."])
        else:
            self.screen.print(self._failure_lines(outcome))
        return outcome

    def _failure_lines(self, outcome: Outcome) -> list[str]:
        first, log = outcome.first, None
        if first is not None:
            log = self.files.msrun_log if first is self.msrun_failure else self.files.log(first.rank)
        lines = report(outcome, log, first.at_seconds - self.began if first else 0.0)
        if self.hung_seconds is not None:
            where = self.files.log_dir
            lines.append(f"  Ranks that still answer have their Python stacks at the end of their logs: {where}")
        return lines
