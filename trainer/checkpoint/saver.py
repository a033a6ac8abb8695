"""Saves the checkpoints of a run, one at a time: while the training waits, or in the background (`async_save`).

A thread does the work of each stage of a save. Only the main thread communicates: in every step the ranks exchange
whether their work is done; when all are done, they gather its results and start the next stage. A save of one process
needs no exchange, so its thread does all stages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from trainer.checkpoint.writing import (
    StageResult,
    Stages,
    StageWork,
    gather_results,
    run_catching_disk_errors,
    run_stages,
)
from trainer.parallel.communicator import Communicator

_LOOK_SECONDS = 1.0
_FLUSH_SECONDS = 3600.0
"""How long a disk may take to flush or remove a file: a save that writes nothing for longer counts as hanging."""


@dataclass
class Saver:
    """Saves into one folder.

    Attributes:
        on_saved: Called with each checkpoint that is complete, and its step, on every rank.
        on_wait: Called every second while the training waits for a thread that writes.
        waited_seconds: How long the training has waited for saves since this was last set to 0.
    """

    folder: Path
    communicator: Communicator
    in_background: bool
    on_saved: Callable[[Path, int], None]
    on_wait: Callable[[], None] = field(default=lambda: None)
    waited_seconds: float = 0.0
    _stages: Stages | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)
    _thread: _Thread | None = field(default=None, init=False)

    def save(self, make_stages: Callable[[], Stages], step: int) -> None:
        """Starts a save once an earlier save is complete; all ranks must call this.

        Args:
            make_stages: Makes the stages of the save. The arrays that they write must not change during training.

        Raises:
            RunError: This save or the one before cannot be written.
        """
        self.finish()
        began = time.perf_counter()
        self._step = step
        self._stages = make_stages()
        if self.communicator.size == 1:
            stages = self._stages
            self._thread = _Thread(lambda: run_stages(stages, self.folder, self.communicator))
        else:
            work = next(self._stages)
            while not work.takes_long:
                result = self._start(work).result(self.on_wait)  # removing files may take long, too
                assert isinstance(result, StageResult)
                work = self._stages.send(gather_results(result, self.communicator))
            self._thread = self._start(work)
        self.waited_seconds += time.perf_counter() - began
        if not self.in_background:
            self.finish()

    @property
    def is_ready(self) -> bool:
        """Returns whether this rank's work is done, so that `advance` would not wait; True without a save."""
        return self._thread is None or not self._thread.is_alive()

    def advance(self) -> None:
        """Starts the next stage of a save when the work of all ranks is done; all ranks must call this.

        Raises:
            RunError: The checkpoint cannot be written.
        """
        if self._thread is not None:
            began = time.perf_counter()
            self._next_stage(self._thread)
            if self.communicator.size > 1:  # a single process has exchanged nothing
                self.waited_seconds += time.perf_counter() - began

    def finish(self) -> None:
        """Waits until a save in progress is complete; all ranks must call this.

        Raises:
            RunError: The checkpoint cannot be written.
        """
        if self._thread is None:
            return
        began = time.perf_counter()
        while self._thread is not None:
            self._next_stage(self._thread)
        self.waited_seconds += time.perf_counter() - began

    def _next_stage(self, thread: _Thread) -> None:
        """Waits for the thread of a stage; starts the next stage, or after the last one calls `on_saved`."""
        self._thread = None
        result = thread.result(self.on_wait)
        if isinstance(result, StageResult):
            assert self._stages is not None
            try:
                self._thread = self._start(self._stages.send(gather_results(result, self.communicator)))
                return
            except StopIteration as end:
                result = end.value
        self._stages = None
        self.on_saved(result, self._step)

    def _start(self, work: StageWork) -> _Thread:
        return _Thread(lambda: run_catching_disk_errors(work, self.folder))


class _Thread(threading.Thread):
    """A thread that does some work; a process that is stopped at once does not wait for it."""

    def __init__(self, work: Callable[[], Path | StageResult]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._work = work
        self._outcome: Future[Path | StageResult] = Future()
        self.start()

    def run(self) -> None:
        """Does the work."""
        try:
            self._outcome.set_result(self._work())
        except BaseException as error:
            self._outcome.set_exception(error)

    def _written_bytes(self) -> float:
        """Returns the bytes that the thread has written so far; if unknown, another number at each call."""
        try:
            counters = Path(f"/proc/self/task/{self.native_id}/io").read_text(encoding="ascii")
            return int(next(line for line in counters.splitlines() if line.startswith("wchar:")).split()[1])
        except (OSError, StopIteration):
            return time.monotonic()

    def result(self, on_wait: Callable[[], None]) -> Path | StageResult:
        """Waits for the work and returns its result, or raises its error.

        Calls `on_wait` every second, until the thread has written nothing for `_FLUSH_SECONDS`: a flush shows no
        progress.
        """
        written = self._written_bytes()
        wrote_at = time.monotonic()
        while self.is_alive():
            self.join(_LOOK_SECONDS)
            before = written
            written = self._written_bytes()
            if written != before:
                wrote_at = time.monotonic()
            if self.is_alive() and time.monotonic() - wrote_at < _FLUSH_SECONDS:
                on_wait()
        return self._outcome.result()
