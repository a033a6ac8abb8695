"""A job from the start of msrun to the last process: decides who is stopped when, and tells the user how it ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import EXIT_HANG, EXIT_RUN_FAILED
from trainer.launch.job import JobFiles, JobState, write_state
from trainer.launch.nodes import Event, Nodes
from trainer.launch.outcome import End, Outcome, judge, report, shell_code
from trainer.launch.pool import WorkerHandle, WorkerPool
from trainer.launch.processes import end_children
from trainer.launch.screen import Screen

GRACE_SECONDS = 8.0
"""From telling workers to end to killing them."""

_TICK_SECONDS = 0.1
_FILES_EVERY_SECONDS = 0.5
_STATE_EVERY_SECONDS = 1.0
_DUMP_SECONDS = 2.0
_ENGINE_SECONDS = 3.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Timers:
    """Moments of the monotonic clock; None while they do not apply."""

    began: float
    kill_at: float | None = None
    dumped_at: float | None = None
    last_step_at: float | None = None
    files_at: float = 0.0
    state_at: float = 0.0


class Supervisor:
    """Supervises one job on one host.

    Args:
        wards: The processes to come; their orders are set.
        start_engine: Starts msrun, or what stands in for it.
        files: Of the job.
        state: Of the job, for others to read.
        nodes: The other nodes.
        hang_timeout: Seconds without a step that count as a hang; 0: none do.
        screen: What the user sees.
    """

    def __init__(
        self,
        pool: WorkerPool,
        start_engine: Callable[[], subprocess.Popen],
        files: JobFiles,
        state: JobState,
        nodes: Nodes,
        hang_timeout: float,
        screen: Screen,
    ) -> None:
        self.pool, self.files, self.state, self.nodes, self.screen = pool, files, state, nodes, screen
        self.hang_timeout = hang_timeout
        self._start_engine = start_engine
        self.engine: subprocess.Popen | None = None
        self.signals: deque[int] = deque()
        self.stopped_by: int | None = None
        self.stop_requests = 0
        self.hung_seconds: float | None = None
        self.engine_failure: End | None = None
        self.elsewhere: Event | None = None
        self.said_done = False
        self.resized = False
        self.timers = Timers(time.monotonic())

    def run(self) -> Outcome:
        """Starts the job, waits for its end and leaves no process behind."""
        awake, wake = os.pipe()
        for end in (awake, wake):
            os.set_blocking(end, False)
        before = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, signal.SIGWINCH)}
        for number in _STOP_SIGNALS:
            if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:  # nohup stays in force
                signal.signal(number, lambda number, frame: self.signals.append(number))
        signal.signal(signal.SIGWINCH, self._resize)
        old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            self.engine = self._start_engine()
            while not self.over():
                self._wait(awake)
                self._turn()
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

    def _resize(self, number: int, frame: object) -> None:
        self.resized = True

    def over(self) -> bool:
        """Whether the workers of this node have ended, and nothing is to be awaited from the others."""
        if not self.pool.ended:
            return False
        if self.pool.told_at is not None:
            return True
        if not self.said_done:
            self.said_done = True
            self.nodes.done()
        return self.nodes.finished

    def _wait(self, awake: int) -> None:
        with selectors.DefaultSelector() as selector:
            for source in (awake, self.pool.listener, *self.pool.sources, *self.nodes.sources):
                selector.register(source, selectors.EVENT_READ)
            selector.select(_TICK_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.read(awake, 1 << 12)

    def _turn(self) -> None:
        now = time.monotonic()
        while self.signals:
            number = self.signals.popleft()
            self._stop(signal.SIGTERM if number == signal.SIGHUP else number, now)
            self.nodes.stop(int(self.stopped_by))
        for event in self.nodes.turn(now):
            self._hear(event, now)
        self.pool.accept()
        changed = self.pool.hear()
        if now >= self.timers.files_at:
            self.timers.files_at = now + _FILES_EVERY_SECONDS
            if self.pool.read_files(self.files.folder):
                self.timers.last_step_at = now
        self._look_at_engine()
        self._look_for_failures(now)
        self._look_for_a_hang(now)
        self._keep_deadlines(now)
        self._show()
        if changed or now >= self.timers.state_at:
            self.timers.state_at = now + _STATE_EVERY_SECONDS
            self._write_state()

    # ---- reasons to end ----------------------------------------------------------------------------------------------

    def _stop(self, number: int, now: float) -> None:
        """Hands a signal to every worker. They save and end; the second time they have little time, then none."""
        self.stop_requests += 1
        self.stopped_by = self.stopped_by or number
        self.pool.closing = True
        name = signal.Signals(number).name
        if self.stop_requests == 1:
            self.screen.tell([f"{name}: the workers finish their step and save; once more ends them without that."])
        self.pool.tell_workers({"signal": number})
        if self.stop_requests > 2:
            self._kill(now)
        elif self.stop_requests == 2 or self.timers.last_step_at is None:
            self.timers.kill_at = self.timers.kill_at or now + GRACE_SECONDS

    def _hear(self, event: Event, now: float) -> None:
        if event.kind == "note":
            self.screen.tell(event.lines)
        elif event.kind == "stop":
            self._stop(event.number, now)
        elif self.pool.told_at is None and self.elsewhere is None:
            self.elsewhere = event
            if event.number == EXIT_HANG:
                self._dump(now)
            else:
                self._end_workers(now, GRACE_SECONDS)

    def _look_at_engine(self) -> None:
        """msrun that ends before all its processes have called will not start them any more."""
        if self.engine is None or self.engine.poll() is None or self.pool.closing:
            return
        if any(ward.channel is None for ward in self.pool.workers.values()) and self.engine_failure is None:
            code = shell_code(self.engine.returncode) or EXIT_RUN_FAILED
            self.engine_failure = End(None, code, time.monotonic(), process="msrun")

    def _look_for_failures(self, now: float) -> None:
        if self.pool.told_at is not None:
            return
        announced = [ward.failed for ward in self.pool.workers.values() if ward.failed is not None and not ward.end]
        engine = [self.engine_failure] if self.engine_failure is not None else []
        outcome = judge([*self._ends(), *announced, *engine], self.stopped_by, None)
        if outcome.first is not None:
            self._end_workers(now, GRACE_SECONDS)
            self.nodes.failed(outcome.exit_code, self._failure_lines(outcome))

    def _end_workers(self, now: float, grace_seconds: float) -> None:
        self.pool.closing = True
        self.pool.told_at = now
        if self.engine is not None:
            self.engine.kill()  # it would kill the others without grace
        self.pool.tell_workers({"signal": int(signal.SIGTERM)})
        self.timers.kill_at = now + grace_seconds

    def _look_for_a_hang(self, now: float) -> None:
        timers = self.timers
        if timers.dumped_at is not None:
            if now - timers.dumped_at > _DUMP_SECONDS and self.pool.told_at is None:
                self._end_workers(now, GRACE_SECONDS / 2)
        elif self.hang_timeout and timers.last_step_at is not None and self.pool.told_at is None:
            if now - timers.last_step_at > self.hang_timeout:
                self.hung_seconds = now - timers.last_step_at
                self._dump(now)
                self.nodes.failed(EXIT_HANG, [f"error: no step was finished for {self.hung_seconds:.0f} s."])

    def _dump(self, now: float) -> None:
        self.timers.dumped_at = now
        self.pool.tell_workers({"dump": True})

    def _keep_deadlines(self, now: float) -> None:
        if self.timers.kill_at is not None and now > self.timers.kill_at:
            self._kill(now)

    def _kill(self, now: float) -> None:
        self.pool.told_at = self.pool.told_at or now
        self.pool.kill_all()
        self.timers.kill_at = now + 1.0  # and again those that appear meanwhile

    def _ends(self) -> list[End]:
        return [ward.end for ward in self.pool.all if ward.end is not None]

    # ---- what others see ---------------------------------------------------------------------------------------------

    def _show(self) -> None:
        if self.resized:
            self.resized = False
            self.pool.tell_workers({"size": self.screen.size})
        started = sum(ward.process is not None for ward in self.pool.workers.values())
        seconds = time.monotonic() - self.timers.began
        self.screen.update(started, len(self.pool.workers), seconds, quiet=self.pool.closing)

    def _write_state(self, outcome: Outcome | None = None) -> None:
        for worker in self.state.workers:
            ward = self.pool.workers[worker.rank]
            worker.pid = ward.process.pid if ward.process else None
            worker.exit_code = ward.end.exit_code if ward.end else None
            worker.state = "ended" if ward.end else "running" if ward.process else "waiting"
        if outcome is not None:
            self._write_roles(outcome)
            self.state.outcome, self.state.exit_code, self.state.ended = outcome.words, outcome.exit_code, time.time()
        write_state(self.files, self.state)

    def _write_roles(self, outcome: Outcome) -> None:
        others = {end.rank for end in outcome.others}
        for worker in self.state.workers:
            if outcome.first is not None and worker.rank == outcome.first.rank:
                worker.role = "failed first"
            elif worker.rank in others:
                worker.role = "ended because of that"

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> Outcome:
        """All workers have ended: lets go of everything else, and tells how it went."""
        self.pool.closing = True
        ends = [*self._ends(), *([self.engine_failure] if self.engine_failure else [])]
        outcome = judge(ends, self.stopped_by, self.hung_seconds)
        if self.elsewhere is not None:
            outcome = Outcome(self.elsewhere.number, "ended because of another node")
        self.pool.scheduler.kill()
        self.pool.release_all()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.engine is not None and not outcome.exit_code:
                self.engine.wait(_ENGINE_SECONDS)
        end_children()
        self._show()
        self.screen.close()
        self._write_state(outcome)
        if outcome.exit_code:
            self._tell_of(outcome)
        return outcome

    def _tell_of(self, outcome: Outcome) -> None:
        if self.elsewhere is not None:
            lines = [*self.elsewhere.lines, "  The workers of this node ended because of that."]
        elif self.stopped_by is not None and outcome.first is None and self.hung_seconds is None:
            lines = [f"{outcome.words}."]
        else:
            lines = self._failure_lines(outcome)
        self.screen.tell(lines)

    def _failure_lines(self, outcome: Outcome) -> list[str]:
        first = outcome.first
        log = None if first is None else self._log_of(first)
        lines = report(outcome, log, first.at_seconds - self.timers.began if first else 0.0)
        if self.hung_seconds is not None:
            where = self.files.log_dir
            lines.append(f"  Ranks that still answer have their Python stacks at the end of their logs: {where}")
        return lines

    def _log_of(self, end: End) -> Path:
        if end is self.engine_failure:
            return self.files.msrun_log
        ward: WorkerHandle = self.pool.scheduler if end.rank is None else self.pool.workers[end.rank]
        return ward.log
