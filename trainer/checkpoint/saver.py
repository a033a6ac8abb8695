"""Saves the checkpoints of a run, one at a time: at once, or beside the training (`async_save`).

Each stage of a save is the work of a thread, beside the training or while the training waits for it. Only the main
thread communicates: the ranks tell each other in every step whether their work is done, and when all are, exchange what
it has given and begin the next stage. A save of one process needs no gather_results, so its thread does all stages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.writing import (
    StageResult,
    Stages,
    StageWork,
    do_stages,
    gather_results,
    run_catching_disk_errors,
)
from trainer.parallel.communicator import Communicator

_LOOK_SECONDS = 1.0
_FLUSH_SECONDS = 3600.0
"""How long a disk may take to flush or remove a file: from then on a save that writes nothing hangs."""


class Saver:
    """Saves into one folder.

    Args:
        on_saved: Called with each checkpoint that is complete, and its step, on every rank.
        on_wait: Called every second while the training waits for a thread that writes.

    Attributes:
        waited_seconds: For how long the training has waited since this was last set to 0.
    """

    def __init__(
        self,
        folder: Path,
        communicator: Communicator,
        in_background: bool,
        on_saved: Callable[[Path, int], None],
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.communicator = communicator
        self.in_background = in_background
        self.on_saved = on_saved
        self.on_wait = on_wait
        self.waited_seconds = 0.0
        self._stages: Stages | None = None
        self._step = 0
        self._thread: _Thread | None = None

    def save(self, make_stages: Callable[[], Stages], step: int) -> None:
        """Saves, after an earlier save is complete; all ranks must call it.

        Args:
            make_stages: Gives the stages of the save; what they write must not change while the training goes on.

        Raises:
            RunError: This save or the one before cannot be written.
        """
        self.finish()
        began = time.perf_counter()
        self._step = step
        self._stages = make_stages()
        if self.communicator.size == 1:
            stages = self._stages
            self._thread = _Thread(lambda: do_stages(stages, self.folder, self.communicator))
        else:
            work = next(self._stages)
            while not work.takes_long:
                done = self._start(work).result(self.on_wait)  # removing files may take long, too
                work = self._stages.send(gather_results(done, self.communicator))
            self._thread = self._start(work)
        self.waited_seconds += time.perf_counter() - began
        if not self.in_background:
            self.finish()

    @property
    def is_ready(self) -> bool:
        """Whether this rank's work is done, so that it would not wait in `advance`; True without a save."""
        return self._thread is None or not self._thread.is_alive()

    def advance(self) -> None:
        """Goes on with a save when the work of all ranks is done; all ranks must call it.

        Raises:
            RunError: The checkpoint cannot be written.
        """
        if self._thread is not None:
            began = time.perf_counter()
            self._go_on()
            if self.communicator.size > 1:  # a single process has exchanged nothing
                self.waited_seconds += time.perf_counter() - began

    def finish(self) -> None:
        """Waits until a save that is being written is complete; all ranks must call it. Raises as `advance` does."""
        if self._thread is None:
            return
        began = time.perf_counter()
        while self._thread is not None:
            self._go_on()
        self.waited_seconds += time.perf_counter() - began

    def _go_on(self) -> None:
        thread = self._thread
        self._thread = None
        path = self._next(thread.result(self.on_wait))
        if path is not None:
            self._stages = None
            self.on_saved(path, self._step)

    def _next(self, found: Path | StageResult) -> Path | None:
        """Begins the next stage; returns the folder after the last one."""
        if isinstance(found, Path):
            return found
        try:
            self._thread = self._start(self._stages.send(gather_results(found, self.communicator)))
        except StopIteration as end:
            return end.value
        return None

    def _start(self, work: StageWork) -> _Thread:
        return _Thread(lambda: run_catching_disk_errors(work, self.folder))


class _Thread:
    """StageWork in a thread, which a process that is told to end at once does not wait for."""

    def __init__(self, work: Callable[[], Path | StageResult]) -> None:
        self._found: Path | StageResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Path | StageResult]) -> None:
        try:
            self._found = work()
        except BaseException as error:
            self._error = error

    def _written_bytes(self) -> float:
        """What the thread has written so far; where the system does not tell, another number at each call."""
        try:
            counters = Path(f"/proc/self/task/{self._thread.native_id}/io").read_text(encoding="ascii")
            return int(next(line for line in counters.splitlines() if line.startswith("wchar:")).split()[1])
        except (OSError, StopIteration):
            return time.monotonic()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def result(self, on_wait: Callable[[], None]) -> Path | StageResult:
        """Waits for it, and calls `on_wait` every second unless it has written nothing for very long; raises what it
        raised. Nothing shows how far a flush is."""
        written = self._written_bytes()
        wrote_at = time.monotonic()
        while self.is_alive():
            self._thread.join(_LOOK_SECONDS)
            before = written
            written = self._written_bytes()
            if written != before:
                wrote_at = time.monotonic()
            if self.is_alive() and time.monotonic() - wrote_at < _FLUSH_SECONDS:
                on_wait()
        if self._error is not None:
            raise self._error
        return self._found
