"""Smokes several files, as many at a time as cores and memory allow, each as a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer.ci.files import TrainingFile
from trainer.device.doctor import available_memory_bytes
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_RUN_FAILED
from trainer.launch.processes import kill_group, start_session, worker_cores

_COMMAND = (sys.executable, str(Path(__file__).resolve().parents[2] / "run_trainer.py"))
_RANK_BYTES = 1 << 30
"""Memory of a process of a smoke run; most take 0.6 GiB."""
_LOOK_SECONDS = 0.1


class FileOutcome(NamedTuple):
    """What became of a file."""

    file: TrainingFile
    exit_code: int
    problem: str  # empty where it passed
    values: dict[str, Any]  # what `smoke --json` printed
    seconds: float

    @property
    def verdict(self) -> str:
        """Returns PASS, FAIL (the small copy did not train as it should) or INVALID (the file is wrong)."""
        return {EXIT_OK: "PASS", EXIT_BAD_INPUT: "INVALID"}.get(self.exit_code, "FAIL")


class _Running(NamedTuple):
    file: TrainingFile
    process: subprocess.Popen
    place: int
    output: BinaryIO
    errors: BinaryIO
    began: float


def smoke_files(
    files: Sequence[TrainingFile], flags: Sequence[str], folder: Path, ranks: int,
    report_progress: Callable[[str], None],
) -> list[FileOutcome]:  # fmt: skip
    """Smokes files side by side and returns their outcomes in the order of the files.

    Args:
        flags: Arguments of each `smoke`.
        folder: Each file gets a folder in it.
        ranks: Processes of each.
    """
    _hide_from_git(folder)
    jobs = jobs_at_a_time(len(files), ranks, available_memory_bytes(), len(os.sched_getaffinity(0)))
    waiting = list(files)
    running: list[_Running] = []
    outcomes: dict[Path, FileOutcome] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                taken = {each.place for each in running}
                place = next(number for number in range(jobs) if number not in taken)
                running.append(_start(waiting.pop(0), flags, folder, place, jobs))
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                outcome = _outcome(each)
                outcomes[each.file.path] = outcome
                first = next(iter(outcome.problem.splitlines()), "")
                report_progress(f"{outcome.verdict:<7} {each.file.path} ({outcome.seconds:.0f} s) {first}".rstrip())
            time.sleep(_LOOK_SECONDS)
    finally:
        for each in running:
            each.process.send_signal(signal.SIGTERM)
            kill_group(each.process.pid)
    return [outcomes[file.path] for file in files]


def _hide_from_git(folder: Path) -> None:
    """Makes the folder, if it is not there, so that git ignores it: the next commit would try its files, too."""
    if folder.exists():
        return
    with contextlib.suppress(OSError):  # the outcome of each file tells it
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n", encoding="ascii")


def jobs_at_a_time(files: int, ranks: int, memory_bytes: int, cores: int) -> int:
    """Returns the number of files that are tried at a time."""
    fitting = memory_bytes // (ranks * _RANK_BYTES)
    return max(1, min(files, cores // ranks, fitting))


def file_folder(path: Path) -> str:
    """Returns the name of a file's folder; different paths have different ones."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", str(path.with_suffix(""))).strip("-.")
    return f"{plain[-80:]}-{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"


def _start(file: TrainingFile, flags: Sequence[str], folder: Path, place: int, jobs: int) -> _Running:
    target = folder / file_folder(file.path)
    command = [*_COMMAND, "smoke", f"--config={file.path}", "--json", *flags, f"--output_dir={target}"]
    output = tempfile.TemporaryFile()
    errors = tempfile.TemporaryFile()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, worker_cores(cores, place, jobs))
    try:
        process = start_session(command, os.environ, output, errors)
    finally:
        os.sched_setaffinity(0, cores)
    return _Running(file, process, place, output, errors, time.monotonic())


def _outcome(each: _Running) -> FileOutcome:
    with each.output, each.errors:
        each.output.seek(0)
        each.errors.seek(0)
        printed = each.output.read().decode(errors="replace")
        complaints = each.errors.read().decode(errors="replace").strip()
    seconds = time.monotonic() - each.began
    code = each.process.returncode
    values: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        values = json.loads(printed)
    problem = str(values.get("problem", ""))
    if not values:
        problem = complaints.removeprefix("error: ")
    if (code or not values) and not problem:
        problem = f"the process ended with exit code {code}"
    if code != EXIT_BAD_INPUT and (code or not values):  # also of a process that a signal ended
        code = EXIT_RUN_FAILED
    return FileOutcome(each.file, code, problem, values, seconds)
