"""SIGINT and SIGTERM as something that a run asks about, instead of something that ends it anywhere."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from trainer.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM

EXIT_CODES = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_SIGTERM}


_ECHO_SECONDS = 0.4


class StopSignals:
    """Remembers SIGINT and SIGTERM instead of dying of them; a second one of the same kind acts at once.

    One that follows at once is the same one: batch systems signal every process of a job, and then a launcher
    hands it on as well.
    """

    _CODES = EXIT_CODES

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict = {}
        self._remembered_at: dict[int, float] = {}

    def __enter__(self) -> StopSignals:
        for number in self._CODES:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._remembered_at.setdefault(number, now) < _ECHO_SECONDS:
            self.received = self.received or signal.Signals(number)
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
        return self._CODES[self.received] if self.received else EXIT_OK
