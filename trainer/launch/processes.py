"""Processes of the operating system: identities that outlive a reused number, ends, and shares of the cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Identity(NamedTuple):
    """A process number and when that process began, in clock ticks since the machine started."""

    pid: int
    start: int


def identity(pid: int) -> Identity | None:
    """The process that has this number now; None without one. One that has ended and waits to be reaped is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return None if fields[0] in "ZX" else Identity(pid, int(fields[19]))


def is_alive(process: Identity) -> bool:
    return identity(process.pid) == process


def send_signal(process: Identity, number: int) -> bool:
    """Sends a signal to exactly this process; whether it was still there."""
    if not is_alive(process):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, number)
        return True
    return False


def kill_group(pid: int) -> None:
    """Kills what is left of the process group that a process leads or led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; without one most signals would end it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    masks = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return bool(int(masks["SigCgt"], 16) >> (number - 1) & 1)


def die_with(parent: int) -> None:
    """Makes the calling process be killed when its parent is gone; to be called in the child, before exec.

    Args:
        parent: The number of the parent, which may have gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """From now on processes below this one whose parents end become its children, and not those of the system."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: wardens notice that their connection is gone
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children(pid: int) -> list[int]:
    """All processes below one, however deep."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def end_children(seconds: float = 5.0) -> None:
    """Kills every process below this one and reaps those that are, or become, its children."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not children(os.getpid()):
            return
        time.sleep(0.02)


def share_of_cores(cores: Sequence[int], place: int, workers: int) -> list[int]:
    """The cores of one of several workers on a host: neighbours, and as many as for the others, give or take one.

    With more workers than cores each has one, and every core about as many workers.

    Args:
        cores: Numbers of the cores that the job may use.
        place: Of the worker among those of its host, from 0.
        workers: How many these are.
    """
    ordered = sorted(cores)
    begin, end = place * len(ordered) // workers, (place + 1) * len(ordered) // workers
    return ordered[begin : max(end, begin + 1)]
