"""Processes of the operating system: identities that outlive a reused number, ends, and shares of the cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Identity(NamedTuple):
    """A process number, and when that process began, in seconds since boot: setting the clock does not change it."""

    pid: int
    start: float


def identity(pid: int, ended: bool = False) -> Identity | None:
    """The process that has this number now; None without one.

    Args:
        ended: Whether one that has ended but is not reaped yet counts too.
    """
    import psutil  # an agent does without it and starts sooner

    try:
        process = psutil.Process(pid)
        if not ended and process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        return Identity(pid, round(process.create_time() - psutil.boot_time(), 2))
    except (psutil.Error, ValueError, OverflowError):  # no number that a process could have
        return None


def is_alive(process: Identity) -> bool:
    return identity(process.pid) == process


def send_signal(process: Identity, number: int) -> bool:
    """Sends a signal to exactly this process; whether it was still there."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
            return True
    return False


def is_stopped(process: Identity) -> bool:
    """Whether a signal such as SIGSTOP keeps it from running."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return is_alive(process) and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    return False


def kill_group(pid: int) -> None:
    """Kills what is left of the process group that a process leads or led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; without one most signals would end it. psutil does not tell."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def start_session(command: Sequence[str], environment: Mapping[str, str], output: BinaryIO | int) -> subprocess.Popen:
    """Starts a program without input in a session of its own; the system kills it when this process is gone."""
    parent = os.getpid()

    def die_with_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has gone already
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def adopt_orphans() -> None:
    """From now on descendants of this process whose parents end become its children, and not those of the system."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: agents note that their connection is gone
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_children(timeout_seconds: float = 5.0) -> None:
    """Kills all descendants of this process, and reaps those that are, or become, its children.

    A look at the descendants misses those whose parent ends during it, so that the end is when the system says that
    there is no child left: after `adopt_orphans` there is no descendant without one.
    """
    import psutil

    me = psutil.Process()
    deadline = time.monotonic() + timeout_seconds
    while _has_children() and time.monotonic() < deadline:
        descendants = me.children(recursive=True)
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(descendants, timeout=0.02)


def _has_children() -> bool:
    """Whether this process has children, ended ones that are not reaped yet included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def share_of_cores(cores: Sequence[int], place: int, workers: int) -> list[int]:
    """The cores of one of several workers on a host: neighbours, and as many as for the others, give or take one.

    With more workers than cores each worker has one core, and every core about as many workers.

    Args:
        place: The worker's place among those of its host, from 0.
    """
    ordered = sorted(cores)
    begin = place * len(ordered) // workers
    end = (place + 1) * len(ordered) // workers
    return ordered[begin : max(end, begin + 1)]
