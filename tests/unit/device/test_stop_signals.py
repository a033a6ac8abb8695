"""Signals that a run asks about: remembered once, an echo is the same one, a real second one acts at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from trainer.device.stop_signals import StopSignals
from trainer.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, EXIT_SIGINT), (signal.SIGTERM, EXIT_SIGTERM)])
def test_a_signal_is_remembered(number: signal.Signals, code: int) -> None:
    with StopSignals() as stop:
        assert not stop and stop.exit_code == EXIT_OK
        signal.raise_signal(number)
        assert stop and stop.received is number and stop.exit_code == code


def test_an_echo_is_the_same_signal() -> None:
    with StopSignals() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert stop.received is signal.SIGINT


def test_a_second_one_acts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    told: list[signal.Signals] = []
    with StopSignals(told.append) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop and not told
        monkeypatch.setattr("trainer.device.stop_signals.time.monotonic", lambda: now + 5)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert told == [signal.SIGINT]


def test_the_first_kind_gives_the_exit_code() -> None:
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert stop.exit_code == EXIT_SIGTERM


_CLEANS_UP = """
import atexit, signal
from trainer.cli import main

def dispatch(argv):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        if argv:
            signal.raise_signal(signal.SIGTERM)

atexit.register(signal.raise_signal, signal.SIGTERM)
main.dispatch = dispatch
main.main()
"""


@pytest.mark.parametrize("words", [["within the clean-up"], []], ids=["within the clean-up", "at the end of Python"])
def test_a_second_sigterm_shows_no_traceback(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", _CLEANS_UP, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (EXIT_SIGTERM, "stopped by SIGTERM\n")


_WITHIN = """
import os, signal, sys
from trainer.cli.signals import handle_signals
handle_signals()
text = '''
import os, signal, time
try:
    os.kill(os.getpid(), signal.{name})
    time.sleep(5)
except BaseException:
    1 / 0
'''
exec(compile(text, "there", "exec"), {{"__name__": "{module}"}})
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", EXIT_SIGINT), ("SIGTERM", EXIT_SIGTERM)])
def test_a_signal_within_mindspore_ends_at_once(name: str, code: int) -> None:
    """MindSpore would make another exception of it, or print it."""
    script = _WITHIN.format(name=name, module="mindspore.common.api")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, f"stopped by {name}\n")
    elsewhere = subprocess.run(
        [sys.executable, "-c", script.replace("mindspore.", "elsewhere.")], capture_output=True, text=True, timeout=60
    )
    assert "ZeroDivisionError" in elsewhere.stderr
