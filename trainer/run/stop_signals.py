"""SIGINT and SIGTERM as flags that a run checks between steps, instead of exceptions anywhere."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from trainer.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM
from trainer.launch import heartbeat

EXIT_CODES = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_SIGTERM}
_ECHO_SECONDS = 0.4


class StopSignals:
    """Remembers SIGINT and SIGTERM instead of ending the process; a second one of the same kind acts at once.

    A second one within _ECHO_SECONDS counts as the first: batch systems signal every process of a job, and a launcher
    then forwards the signal as well. Python handles signals in the main thread alone: elsewhere this remembers nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict = {}
        self._remembered_at: dict[int, float] = {}

    def __enter__(self) -> StopSignals:
        for number in EXIT_CODES if threading.current_thread() is threading.main_thread() else ():
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._remembered_at.setdefault(number, now) < _ECHO_SECONDS:
            self.received = self.received or signal.Signals(number)
            heartbeat.signalled(self.received)
            return
        before = self._before[number]
        signal.signal(number, before)
        if callable(before):
            before(number, frame)
        else:
            os.kill(os.getpid(), number)

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.received] if self.received else EXIT_OK
