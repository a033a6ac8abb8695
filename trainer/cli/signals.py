"""SIGINT and SIGTERM around the steps of a run, which has handlers of its own (`trainer.device.stop_signals`).

The first signal is an exception in the main thread, so that everything is cleaned up, and a second one ends the process
at once. Within MindSpore the first one does: MindSpore catches what is raised in it, prints it with its traceback or
makes another exception of it, and there is nothing to clean up that the next run does not.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from trainer.errors import EXIT_SIGINT, EXIT_SIGTERM
from trainer.launch import heartbeat

_BOTH = (signal.SIGINT, signal.SIGTERM)


class _EndAtOnce:
    """Ends the process without a clean-up: an exception while another one is handled would show tracebacks."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __call__(self, number: int, frame: FrameType | None) -> None:
        os._exit(self.code)


def handle_signals() -> None:
    """Makes SIGTERM a SystemExit and SIGINT a KeyboardInterrupt."""
    signal.signal(signal.SIGTERM, _terminate)
    # A script's shell starts its background jobs with SIGINT ignored: whoever sends it to this process means it.
    signal.signal(signal.SIGINT, _interrupt)


def end_at_next_signal(code: int) -> None:
    """Lets the next signal end the process at once with this exit code: it is ending anyway."""
    for number in _BOTH:
        signal.signal(number, _EndAtOnce(code))


def is_ending() -> bool:
    """Returns whether a signal has already arrived."""
    return isinstance(signal.getsignal(signal.SIGTERM), _EndAtOnce)


def _terminate(number: int, frame: FrameType | None) -> None:
    end_at_next_signal(EXIT_SIGTERM)
    heartbeat.announce_signal(number)
    print("stopped by SIGTERM", file=sys.stderr, flush=True)
    if _is_in_mindspore(frame):
        os._exit(EXIT_SIGTERM)
    raise SystemExit(EXIT_SIGTERM)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _is_in_mindspore(frame):
        heartbeat.announce_signal(number)
        print("stopped by SIGINT", file=sys.stderr, flush=True)
        os._exit(EXIT_SIGINT)
    raise KeyboardInterrupt


def _is_in_mindspore(frame: FrameType | None) -> bool:
    """Returns whether MindSpore runs a function or is being imported."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "mindspore":
            return True
        frame = frame.f_back
    return False
