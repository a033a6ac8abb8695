"""Smokes several files, as many at a time as cores and memory allow, each as a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer.ci.files import TrainingFile
from trainer.device.doctor import available_memory_bytes
from trainer.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_RUN_FAILED
from trainer.launch.processes import run_side_by_side, start_session

_COMMAND = (sys.executable, str(Path(__file__).resolve().parents[2] / "run_trainer.py"))
_RANK_BYTES = 1 << 30
"""Memory of a process of a smoke run; most take 0.6 GiB."""


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
    outcomes: dict[Path, FileOutcome] = {}
    printed: dict[Path, tuple[BinaryIO, BinaryIO]] = {}

    def start(file: TrainingFile, cores: Sequence[int]) -> subprocess.Popen:
        """Starts `smoke` of a file."""
        target = folder / file_folder(file.path)
        command = [*_COMMAND, "smoke", f"--config={file.path}", "--json", *flags, f"--output_dir={target}"]
        printed[file.path] = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        return start_session(command, os.environ, *printed[file.path])

    with contextlib.closing(run_side_by_side(files, jobs, start)) as ended:
        for file, code, seconds in ended:
            outcome = read_outcome(file, code, seconds, *printed[file.path])
            outcomes[file.path] = outcome
            first = next(iter(outcome.problem.splitlines()), "")
            report_progress(f"{outcome.verdict:<7} {file.path} ({seconds:.0f} s) {first}".rstrip())
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


def read_outcome(
    file: TrainingFile, code: int, seconds: float, output: BinaryIO, errors: BinaryIO
) -> FileOutcome:
    """Returns the outcome of a file, whose `smoke` ended with this exit code and has printed this."""
    with output, errors:
        output.seek(0)
        errors.seek(0)
        printed = output.read()
        complaints = errors.read().decode(errors="replace").strip()
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
    return FileOutcome(file, code, problem, values, seconds)
