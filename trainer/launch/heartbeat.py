"""What a worker tells its launcher, through files, which need no thread and no answer: a step, a failure, a signal.

Outside a job all of it does nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

JOB_VARIABLE = "RUN_TRAINER_JOB"
"""Environment variable with the path of the job's folder."""

RESTART_VARIABLE = "RUN_TRAINER_RESTART"
"""Environment variable of the workers of a job that has been started again: a JSON object with its number and why."""

_RESTART = {"number": int, "most": int, "reason": str, "ranks": int}

AnnouncementKind = Literal["failed", "signal"]

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a worker write the Python stacks of its threads to its log."""


def beat_file(job: Path, rank: int) -> Path:
    """Holds the number of the last step, ``-`` before the first one; it is written again after every step, and now and
    then during other long work."""
    return job / f"rank-{rank}.beat"


class Announcement(NamedTuple):
    """What a worker announces: an exit code or a signal, and when, by the monotonic clock of its host."""

    number: int
    at_seconds: float


def announcement_file(job: Path, rank: int, kind: AnnouncementKind) -> Path:
    """Returns the file of the announcement that a worker fails, which may be long before its process ends, or that it
    received a signal to end, whoever sent it."""
    return job / f"rank-{rank}.{kind}"


def read_announcement(job: Path, rank: int, kind: AnnouncementKind) -> Announcement | None:
    """Returns what a worker announced; None where it announced nothing, or nonsense."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        values = json.loads(announcement_file(job, rank, kind).read_text(encoding="ascii"))
        if isinstance(values, list) and [type(value) for value in values] == [int, float]:
            return Announcement(*values)
    return None


def start() -> None:
    """To be called when a worker starts: from now on it answers when the launcher asks for its Python stacks."""
    if os.environ.get(JOB_VARIABLE):
        faulthandler.register(DUMP_SIGNAL, all_threads=True, chain=False)


def beat(step: int | None) -> None:
    """To be called after each optimizer step, and during other long work: a job that does not call it for long hangs.

    Args:
        step: The last one that is finished; None before the first one of this process.
    """
    descriptor = _open_beat_file()
    if descriptor is not None:
        os.pwrite(descriptor, f"{'-' if step is None else step:<20}\n".encode("ascii"), 0)


def read_step(path: Path) -> int | None:
    """Returns the last step of the worker of this `beat_file`; None before the first one."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def failed(exit_code: int) -> None:
    """To be called when the worker is about to end with an error.

    Ending may take long, and the other workers may note and end before: so the launcher knows who failed first.
    """
    _announce("failed", exit_code)


def signalled(number: int) -> None:
    """To be called when the worker receives a signal to end: all ranks may end before the launcher looks again."""
    _announce("signal", number)


def restarted() -> dict[str, Any]:
    """The number of this start of the job and why the one before failed; empty for the first one, and for a variable
    that the launcher has not written."""
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(os.environ.get(RESTART_VARIABLE, ""))
        if isinstance(told, dict) and {name: type(value) for name, value in told.items()} == _RESTART:
            return told
    return {}


def _announce(kind: AnnouncementKind, number: int) -> None:
    job = os.environ.get(JOB_VARIABLE)
    if job:
        path = announcement_file(Path(job), _rank(), kind)
        unfinished = path.with_name(f"{path.name}.new")
        with contextlib.suppress(OSError):
            unfinished.write_text(json.dumps(Announcement(number, time.monotonic())), encoding="ascii")
            os.replace(unfinished, path)


def _rank() -> int:
    return int(os.environ.get("RANK_ID", "0"))


@functools.cache
def _open_beat_file() -> int | None:
    job = os.environ.get(JOB_VARIABLE)
    with contextlib.suppress(OSError):
        if job:
            return os.open(beat_file(Path(job), _rank()), os.O_WRONLY | os.O_CREAT, 0o644)
        return None
    return None
