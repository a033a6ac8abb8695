"""How a worker reports steps, failures and signals to its launcher: through files, which need no thread and no answer.

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
    """Returns the file with the number of the worker's last step, or ``-`` before the first one.

    It is rewritten after every step, and now and then during other long work.
    """
    return job / f"rank-{rank}.beat"


class Announcement(NamedTuple):
    """An announcement of a worker: an exit code or a signal, and when, by the monotonic clock of its host."""

    number: int
    at_seconds: float


def announcement_file(job: Path, rank: int, kind: AnnouncementKind) -> Path:
    """Returns the file in which a worker announces its failure, or a signal to end that it received.

    A failure is announced long before the process ends.
    """
    return job / f"rank-{rank}.{kind}"


def read_announcement(job: Path, rank: int, kind: AnnouncementKind) -> Announcement | None:
    """Returns what a worker announced; None if it announced nothing valid."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        values = json.loads(announcement_file(job, rank, kind).read_text(encoding="ascii"))
        if isinstance(values, list) and [type(value) for value in values] == [int, float]:
            return Announcement(*values)
    return None


def start() -> None:
    """Lets this worker write its Python stacks to its log when the launcher asks for them."""
    if os.environ.get(JOB_VARIABLE):
        faulthandler.register(DUMP_SIGNAL, all_threads=True, chain=False)


def beat(step: int | None) -> None:
    """Reports a sign of progress; called after each optimizer step and during other long work, without which a job
    hangs.

    Args:
        step: The last finished step; None before the first one of this process.
    """
    descriptor = _open_beat_file()
    text = "-"
    if step is not None:
        text = str(step)
    if descriptor is not None:
        os.pwrite(descriptor, f"{text:<20}\n".encode("ascii"), 0)


def read_step(path: Path) -> int | None:
    """Returns the last step in a worker's `beat_file`; None before the first one."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def announce_failure(exit_code: int) -> None:
    """Announces that this worker is about to end with an error.

    Ending may take long, and other workers may notice it and end before: the launcher knows by this who failed first.
    """
    _announce("failed", exit_code)


def announce_signal(number: int) -> None:
    """Announces that this worker received a signal to end: all ranks may end before the launcher looks again."""
    _announce("signal", number)


def restart_info() -> dict[str, Any]:
    """Returns the number of this restart of the job and its reason; empty for the first start."""
    with contextlib.suppress(ValueError, RecursionError):
        info = json.loads(os.environ.get(RESTART_VARIABLE, ""))
        if isinstance(info, dict) and {name: type(value) for name, value in info.items()} == _RESTART:
            return info
    return {}


def _announce(kind: AnnouncementKind, number: int) -> None:
    if job := os.environ.get(JOB_VARIABLE):
        path = announcement_file(Path(job), _rank(), kind)
        unfinished = path.with_name(f"{path.name}.new")
        with contextlib.suppress(OSError):
            # Bytes: a text file looks its codec up, which fails in a signal handler that interrupts that very import.
            unfinished.write_bytes(json.dumps(Announcement(number, time.monotonic())).encode())
            os.replace(unfinished, path)


def _rank() -> int:
    return int(os.environ.get("RANK_ID", "0"))


@functools.cache
def _open_beat_file() -> int | None:
    job = os.environ.get(JOB_VARIABLE)
    if not job:
        return None
    with contextlib.suppress(OSError):
        return os.open(beat_file(Path(job), _rank()), os.O_WRONLY | os.O_CREAT, 0o644)
    return None
