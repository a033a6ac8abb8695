"""Processes of the operating system: identities that outlive a reused number, ends, and shares of the cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.1
_Item = TypeVar("_Item")


class Identity(NamedTuple):
    """A process number, and when that process began, in seconds since boot, which no change of the clock affects."""

    pid: int
    start: float


def identity(pid: int, ended: bool = False) -> Identity | None:
    """Returns the process that has this number now, or None.

    Args:
        ended: Whether to return one that has ended but is not reaped yet.
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
    """Returns whether this process still runs."""
    return identity(process.pid) == process


def send_signal(process: Identity, number: int) -> bool:
    """Sends a signal to exactly this process; returns whether it still existed."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
            return True
    return False


def is_stopped(process: Identity) -> bool:
    """Returns whether a signal such as SIGSTOP keeps the process from running."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return is_alive(process) and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    return False


def kill_group(pid: int) -> None:
    """Kills the rest of the process group that a process leads or led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal; without one most signals would end it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def start_session(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO | int, errors: BinaryIO | int | None = None
) -> subprocess.Popen:
    """Starts a program without input in a session of its own; the system kills it when this process is gone.

    Args:
        errors: Its standard error; None: as its standard output.
    """
    if errors is None:
        errors = output
    parent = os.getpid()

    def die_with_parent() -> None:
        """Lets the kernel kill this process when its parent dies."""
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has gone already
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def allow_open_files(count: int) -> None:
    """Raises the limit of open files to `count`, or as far as this user may, for this process and those it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        count = min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def adopt_orphans() -> None:
    """Makes descendants of this process its children when their parents end, instead of those of the system."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: agents note that their connection is gone
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_children(timeout_seconds: float = 5.0) -> None:
    """Kills all descendants of this process, and reaps those that are, or become, its children.

    A list of descendants misses those whose parent ends meanwhile. So it repeats until the system reports no children:
    after `adopt_orphans` each descendant has a parent here.
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
    """Returns whether this process has children, including ended ones that are not reaped yet."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def worker_cores(cores: Sequence[int], place: int, workers: int) -> list[int]:
    """Returns the cores of one of several workers on a host: neighbouring cores, equally many give or take one.

    With more workers than cores each worker has one core.

    Args:
        place: The worker's place among those of its host, from 0.
    """
    ordered = sorted(cores)
    begin = place * len(ordered) // workers
    end = (place + 1) * len(ordered) // workers
    return ordered[begin : max(end, begin + 1)]


def run_side_by_side(
    items: Iterable[_Item], jobs: int, start: Callable[[_Item, list[int]], subprocess.Popen],
    may_go_on: Callable[[list[subprocess.Popen]], bool] = lambda running: True,
) -> Generator[tuple[_Item, int, float], None, None]:  # fmt: skip
    """Runs a process for each item, `jobs` at a time; yields those that end, each with its exit code and seconds.

    Closing the iterator kills the processes that still run.

    Args:
        start: Starts the process of an item on these cores, which it inherits.
        may_go_on: Called several times a second with the running processes; returns whether further ones may start.
    """
    waiting = list(items)
    running: dict[int, tuple[_Item, subprocess.Popen, float]] = {}  # by their share of the cores
    all_cores = os.sched_getaffinity(0)
    try:
        while waiting or running:
            if not may_go_on([process for _, process, _ in running.values()]):
                waiting.clear()
            for place in sorted(set(range(jobs)) - running.keys())[: len(waiting)]:
                cores = worker_cores(list(all_cores), place, jobs)
                item = waiting.pop(0)
                began = time.monotonic()
                os.sched_setaffinity(0, cores)
                try:
                    running[place] = item, start(item, cores), began
                finally:
                    os.sched_setaffinity(0, all_cores)
            for place, (item, process, began) in list(running.items()):
                if process.poll() is not None:
                    del running[place]
                    yield item, process.returncode, time.monotonic() - began
            time.sleep(_LOOK_SECONDS)
    finally:
        for _, process, _ in running.values():
            kill_group(process.pid)
