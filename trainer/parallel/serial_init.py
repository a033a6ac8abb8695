"""Lets a process join a job in its first attempt. Pure Python."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def serialized_init() -> Iterator[None]:
    """Threads that start inside do not interrupt this one: it runs on one core, with a policy that waking threads do
    not break into.

    MindSpore 2.10 joins a job by connecting twice; when the thread that sees a connection is faster than the one that
    makes it, the connection counts as failed, and all begins anew half a second later. On two busy cores that took 10
    to 40 seconds, and takes 5 like this.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores, policy, threads = os.sched_getaffinity(0), os.sched_getscheduler(0), set(_thread_numbers())
    rank = int(os.environ.get("DEVICE_ID", "0"))
    with contextlib.suppress(OSError):  # where a container forbids it, joining takes longer
        os.sched_setaffinity(0, {sorted(cores)[rank % len(cores)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        for thread in (0, *set(_thread_numbers()) - threads):
            with contextlib.suppress(OSError):  # it has ended, or has never been changed
                os.sched_setaffinity(thread, cores)
                os.sched_setscheduler(thread, policy, os.sched_param(0))


def _thread_numbers() -> Iterator[int]:
    return map(int, os.listdir("/proc/self/task"))
