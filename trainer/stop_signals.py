"""SIGINT and SIGTERM as something that a run asks about, instead of something that ends it anywhere."""

from __future__ import annotations

import signal

from trainer.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM

EXIT_CODES = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_SIGTERM}


class StopSignals:
    """Remembers SIGINT and SIGTERM instead of dying of them; a second one of the same kind acts at once."""

    _CODES = EXIT_CODES

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict = {}

    def __enter__(self) -> StopSignals:
        for number in self._CODES:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: object) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, self._before[number])

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        return self._CODES[self.received] if self.received else EXIT_OK
