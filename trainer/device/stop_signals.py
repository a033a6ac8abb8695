"""SIGINT and SIGTERM as flags that a run checks between steps, instead of exceptions anywhere."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from trainer.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM
from trainer.launch import heartbeat

EXIT_CODES = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_SIGTERM}
_ECHO_SECONDS = 0.4
_WAIT_SECONDS = 0.1
_FOREVER = 1e7  # seconds


class StopSignals:
    """Records SIGINT and SIGTERM instead of ending the process; a second signal of the same kind acts at once.

    A second one within _ECHO_SECONDS counts as the first: batch systems signal every process of a job, and a launcher
    then forwards the signal as well. Python handles signals only in the main thread: in other threads this records
    nothing.

    Args:
        before_second: Called with a second signal before that acts, which may end the process without any clean-up.
    """

    def __init__(self, before_second: Callable[[signal.Signals], None] = lambda number: None) -> None:
        self.received: signal.Signals | None = None
        self._before_second = before_second
        self._before: dict = {}
        self._remembered_at: dict[int, float] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def renew(self) -> None:
        """Installs the handlers again, see `receive_signals_in_a_thread`."""
        for number in self._before:
            signal.signal(number, signal.getsignal(number))

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._remembered_at.setdefault(number, now) < _ECHO_SECONDS:
            self.received = self.received or signal.Signals(number)
            heartbeat.announce_signal(self.received)
            return
        before = self._before[number]
        signal.signal(number, before)
        self._before_second(signal.Signals(number))
        if callable(before):
            before(number, frame)
        else:
            os.kill(os.getpid(), number)

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def name(self) -> str:
        """Returns what stopped the ranks: the name of the received signal; without one another rank received it."""
        if self.received:
            return self.received.name
        return "a signal to another rank"

    @property
    def exit_code(self) -> int:
        """Returns the exit code of a run that the received signal stopped; 0 without a signal."""
        if self.received:
            return EXIT_CODES[self.received]
        return EXIT_OK


def receive_signals_in_a_thread(ended: threading.Event | None = None) -> threading.Thread:
    """Starts a thread that receives SIGINT and SIGTERM and forwards them to the Python handlers of the main thread.

    At every call of a compiled function MindSpore 2.10 replaces SIGINT's handler by its own (in C), which raises
    SIGTERM and may crash the process. So the calling thread, and those that it starts, block both signals. Earlier
    threads, of NumPy or of a Jupyter kernel, still receive them: for these `StopSignals.renew` restores Python's
    handlers.

    Args:
        ended: The thread ends soon after this is set; None lets it run as long as the process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)
    wait_seconds = _WAIT_SECONDS
    if ended is None:
        wait_seconds = _FOREVER

    def forward() -> None:
        """Turns received stop signals into interrupts of the main thread."""
        while ended is None or not ended.is_set():
            received = signal.sigtimedwait(EXIT_CODES, wait_seconds)
            if received is not None:
                _thread.interrupt_main(signal.Signals(received.si_signo))

    receiver = threading.Thread(target=forward, name="signals", daemon=True)
    receiver.start()
    return receiver


@contextlib.contextmanager
def signals_in_a_thread() -> Iterator[None]:
    """Applies `receive_signals_in_a_thread` for the duration of the context; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ended = threading.Event()
    receiver = receive_signals_in_a_thread(ended)
    try:
        yield
    finally:
        ended.set()
        receiver.join()
        for number in EXIT_CODES:  # in the place of MindSpore's
            signal.signal(number, signal.getsignal(number))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
