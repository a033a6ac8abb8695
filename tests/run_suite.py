"""Runs all tests in pytest processes of a few files each, and sums up what they say. Called by scripts/test.sh.

MindSpore keeps every function that it compiled, and its operators leak on a CPU: a process that runs file after file
grows to several GB. So a process ends after a few files. There is one process for each core, which it keeps to, because
MindSpore's threads poll and those of two processes on one core slow each other down. Beside these run the tests of
jobs, which use all cores and wait for the ranks to join, and the tests of the launcher, which mostly wait.

pytest-xdist instead, whose processes live on, takes a sixth more CPU seconds for tests/parity, and as many for
tests/integration; it has no place for jobs beside the cores.

One server forks these processes and most of those that the tests start: few of them import MindSpore (fork_server.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import psutil
from fork_server import FORKED, USAGE_VARIABLE, End, ensure_server

TESTS = Path(__file__).resolve().parent
MOST_PROCESSES = 4
# In the order in which their processes start, the long ones first.
FILES_PER_PROCESS = {"ascend": 4, "semi_auto": 1, "parallel": 1, "parity": 3, "integration": 2, "unit": 16}
# Files that one process runs because they share a job.
TOGETHER = (("parallel/test_collectives.py", "parallel/test_data_parallel.py"),)
# Tests that start jobs of several processes: one core would be too little for these.
JOBS = ("parallel/", "semi_auto/test_sharded_numbers.py", "integration/test_tutorial_run.py")
# Those of them that compute next to nothing.
WAITING = ("parallel/test_launcher_", "parallel/test_two_hosts.py")
WORDS = ("passed", "failed", "skipped", "error", "xfailed", "deselected")
SLOWEST = 15


class Batch(NamedTuple):
    """Files that one pytest process runs."""

    files: tuple[str, ...]
    jobs: bool  # whether they start jobs of several processes
    waits: bool = False  # whether these mostly wait


class Running(NamedTuple):
    """A pytest process; `core` is None for those beside the ones of the cores."""

    batch: Batch
    process: subprocess.Popen
    output: IO[str]
    used: Path  # what it and others that were forked for it used, when they have ended
    core: int | None
    began: float


def batches(tests: Path = TESTS) -> list[Batch]:
    """Returns every test file once, in groups that a process runs."""
    names = sorted(path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py"))
    found = []
    for folder in dict.fromkeys([*FILES_PER_PROCESS, *(name.partition("/")[0] for name in names)]):
        every = [name for name in names if name.startswith(f"{folder}/")]
        groups = [files for files in TOGETHER if set(files) <= set(every)]
        alone = [name for name in every if not any(name in files for files in groups)]
        most = FILES_PER_PROCESS.get(folder, 1)
        for kind in ((False, False), (True, False), (True, True)):
            alike = [name for name in alone if (name.startswith(JOBS), name.startswith(WAITING)) == kind]
            groups += [tuple(alike[start : start + most]) for start in range(0, len(alike), most)]
        for files in groups:
            paths = tuple(f"tests/{name}" for name in files)
            found.append(Batch(paths, files[0].startswith(JOBS), files[0].startswith(WAITING)))
    return found


def start(batch: Batch, core: int | None, root: Path) -> Running:
    output = tempfile.TemporaryFile("w+", encoding="utf-8")
    handle, used = tempfile.mkstemp()
    os.close(handle)
    command = [sys.executable, FORKED, "-m", "pytest", "-q", f"--durations={SLOWEST}", *batch.files]
    keep = None if core is None or batch.jobs else lambda: os.sched_setaffinity(0, {core})
    # With compiled modules on disk the many short processes of the tests start faster.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command, cwd=root, env={**environment, USAGE_VARIABLE: used}, stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.STDOUT, preexec_fn=keep,
    )  # fmt: skip
    return Running(batch, process, output, Path(used), core, time.monotonic())


def finished(running: list[Running]) -> tuple[Running, End]:
    """Waits for one of the processes; returns it, and its end with what all processes used that were forked for it."""
    while True:
        for one in running:
            if one.process.poll() is not None:
                ends = [End(*json.loads(line)) for line in one.used.read_text(encoding="ascii").splitlines()]
                one.used.unlink()
                memory_gb = max((end.memory_gb for end in ends), default=0.0)
                return one, End(one.process.returncode, sum(end.cpu_seconds for end in ends), memory_gb)
        time.sleep(0.05)


def counts(output: str) -> dict[str, int]:
    """Returns the counts of pytest's closing line."""
    closing = output.rstrip().rpartition("\n")[2]
    found = re.findall(rf"(\d+) ({'|'.join(WORDS)})s?\b", closing)
    return {word: int(number) for number, word in found}


def durations(output: str) -> Iterator[tuple[float, str]]:
    for seconds, what in re.findall(r"^([\d.]+)s ((?:call|setup|teardown) .+)$", output, re.M):
        yield float(seconds), what


def closing_line(total: dict[str, int], seconds: float) -> str:
    said = {word: total.get(word, 0) for word in WORDS}
    shown = [f"{number} {word}" for word, number in said.items() if number or word in ("passed", "failed", "skipped")]
    return f"{', '.join(shown)} in {seconds:.2f}s ({time.strftime('%H:%M:%S', time.gmtime(seconds))})"


def next_batch(waiting: Sequence[Batch], core: int | None, running: Sequence[Batch] = ()) -> Batch | None:
    """Returns the first batch for a core, or beside those of the cores: of these one with jobs and one that waits at a
    time. A core without a batch of its own takes one of them, a second one with jobs, too: at the end the cores would
    stand idle while the ranks of one job after the other join."""
    jobs, waiting_jobs = (sum(batch.jobs and batch.waits == waits for batch in running) for waits in (False, True))
    if core is None:
        free = {False: jobs < 1, True: waiting_jobs < 1}
        return next((batch for batch in waiting if batch.jobs and free[batch.waits]), None)
    beside = (batch for batch in waiting if batch.jobs and (batch.waits or jobs < 2))
    return next(iter([*(batch for batch in waiting if not batch.jobs), *beside]), None)


def run(waiting: list[Batch], cores: Sequence[int], root: Path = TESTS.parent) -> int:
    """Runs the batches, one at a time on each of the cores and two beside them; returns the exit code."""
    began, failed = time.monotonic(), False
    ensure_server()
    most_gb = 0.0
    running: list[Running] = []
    total: dict[str, int] = {}
    slowest: list[tuple[float, str]] = []
    free: list[int | None] = [*cores, None, None]
    batches_in_all = len(waiting)
    try:
        while waiting or running:
            for core in list(free):
                batch = next_batch(waiting, core, [one.batch for one in running])
                if batch is not None:
                    waiting.remove(batch)
                    free.remove(core)
                    running.append(start(batch, core, root))
            one, end = finished(running)
            running.remove(one)
            free.append(one.core)
            one.output.seek(0)
            text = one.output.read()
            one.output.close()
            slowest += durations(text)
            for word, number in counts(text).items():
                total[word] = total.get(word, 0) + number
            if end.code:
                failed = True
                print(text)
            seconds = time.monotonic() - one.began
            names = " ".join(file.removeprefix("tests/") for file in one.batch.files)
            done = f"[{batches_in_all - len(waiting) - len(running)}/{batches_in_all}]"
            closing = text.rstrip().rpartition("\n")[2]
            used = f"{seconds:.0f} s, {end.cpu_seconds:.0f} CPU s, {end.memory_gb:.1f} GB"
            print(f"{done} {closing} | {used} | {names}", flush=True)
            most_gb = max(most_gb, end.memory_gb)
    finally:
        for one in running:
            one.process.send_signal(signal.SIGINT)
    print(f"\nslowest {SLOWEST}:")
    for seconds, what in sorted(slowest, reverse=True)[:SLOWEST]:
        print(f"{seconds:.2f}s {what}")
    all_cpu_seconds = sum(sum(child.cpu_times()[:4]) for child in psutil.Process().children())  # of the fork server
    print(f"{all_cpu_seconds:.0f} CPU s; the largest process used {most_gb:.1f} GB")
    print(closing_line(total, time.monotonic() - began))
    return int(failed)


def main() -> int:
    return run(batches(), sorted(os.sched_getaffinity(0))[:MOST_PROCESSES])


if __name__ == "__main__":
    sys.exit(main())
