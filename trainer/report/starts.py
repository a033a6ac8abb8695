"""Writes and reads run.json in the output folder: every start of a training, its process, and how it ended.

It is written when a run starts and when it ends, so that a killed run has a start without an end.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from trainer import __version__
from trainer.device.doctor import processor_name
from trainer.errors import RunError
from trainer.input_files import read_bytes
from trainer.monitors.files import write_text
from trainer.monitors.metrics import Monitor, RunInfo, RunSummary, StepMetrics, describe_outcome
from trainer.storage.json_files import Count, JsonError, LenientModel, parse_json

RUN_FILE = "run.json"
_GIT_SECONDS = 5.0


class RunStart(LenientModel):
    """One start of a training, new or resumed.

    Attributes:
        began, ended: ISO 8601 with the offset from UTC; `ended` is empty while it runs, and if it was killed.
        step: The number of optimizer steps before it.
        last_step: The step after which it ends.
        resumed_from: The checkpoint that it continues; empty for a new run.
        processor: The processor of rank 0.
        host, pid, process_start: The process of rank 0; `process_start` in clock ticks since the machine booted.
        commit: The git commit of the trainer, with ``-dirty`` if files were changed; empty without a git folder.
        outcome: ``finished``, ``stopped early``, ``stopped by SIGTERM``, ``failed: ...``; empty while it runs.
        end_step: The last step that it did.
        peak_rss_bytes: Highest resident memory of rank 0, with its last evaluation and checkpoint; 0 if it failed.
    """

    began: str
    step: Count
    last_step: Count
    total_steps: Count = 0
    resumed_from: str = ""
    device: str = ""
    processor: str = ""
    ranks: Count = 1
    host: str = ""
    pid: Count = 0
    process_start: Count = 0
    commit: str = ""
    versions: dict[str, str] = {}
    command: list[str] = []
    ended: str = ""
    outcome: str = ""
    end_step: Count = 0
    peak_rss_bytes: Count = 0

    @property
    def is_alive(self) -> bool | None:
        """Returns whether its process exists; None if another machine runs it."""
        if self.host != socket.gethostname():
            return None
        return process_start(self.pid) == self.process_start != 0


class RunFile(LenientModel):
    """The content of run.json."""

    starts: list[RunStart]


def read_starts(folder: Path) -> tuple[tuple[RunStart, ...], str]:
    """Returns the starts of the training in an output folder, in order, and a note about a damaged file.

    There are no starts if the file is missing, because an earlier version wrote the folder, or damaged.
    """
    path = folder / RUN_FILE
    try:
        return tuple(parse_json(read_bytes(path), RunFile, str(path)).starts), ""
    except JsonError as error:
        return (), f"{error}; the run is shown without its starts"
    except OSError:
        return (), ""


class StartMonitor(Monitor):
    """Writes run.json. A run that resumes adds to it."""

    def __init__(self, folder: Path, device: str, ranks: int) -> None:
        self._folder = folder
        self._device = device
        self._ranks = ranks
        self._starts: list[RunStart] = []
        self._step = 0

    def on_start(self, info: RunInfo) -> None:
        """Records the start of this run after those of the runs that it resumes."""
        earlier: tuple[RunStart, ...] = ()
        if info.start_step > 0:
            earlier = read_starts(self._folder)[0]
        self._step = info.start_step
        self._starts = [*earlier, _new_start(info, self._device, self._ranks)]
        self._write()

    def on_step(self, metrics: StepMetrics) -> None:
        self._step += 1

    def on_second_signal(self, outcome: str) -> None:
        """Records the end now: within MindSpore the process ends without `close`."""
        self._write_end(outcome)

    def close(self, summary: RunSummary | None) -> None:
        """Records how the run ended, also when it failed."""
        peak_bytes = 0
        if summary is not None:
            peak_bytes = summary.peak_rss_bytes
        self._write_end(describe_outcome(summary, sys.exc_info()[1]), peak_bytes)

    def _write_end(self, outcome: str, peak_bytes: int = 0) -> None:
        if not self._starts:  # the run ended before the first step
            return
        changes = {"ended": _now(), "outcome": outcome, "end_step": self._step, "peak_rss_bytes": peak_bytes}
        self._starts[-1] = self._starts[-1].model_copy(update=changes)
        with contextlib.suppress(RunError):  # a full disk must not hide how the run ended
            self._write()

    def _write(self) -> None:
        write_text(self._folder / RUN_FILE, RunFile(starts=self._starts).model_dump_json(indent=1) + "\n")


def _new_start(info: RunInfo, device: str, ranks: int) -> RunStart:
    return RunStart(
        began=_now(),
        step=info.start_step,
        last_step=info.last_step,
        total_steps=info.total_steps,
        resumed_from=str(info.resumed_from or ""),
        device=device,
        processor=_describe_processor(),
        ranks=ranks,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=process_start(os.getpid()),
        commit=git_commit(Path(__file__).resolve().parent),
        versions=_package_versions(),
        command=[os.fsencode(word).decode(errors="replace") for word in sys.argv],  # JSON stores UTF-8 only
    )


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def process_start(pid: int) -> int:
    """Returns when a process started, in clock ticks since the machine booted; 0 if it does not exist.

    It identifies a process together with its pid, because the system uses pids again.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(status.rpartition(")")[2].split()[19])  # field 22; the second one, a name, may have spaces
    except (OSError, ValueError, IndexError):
        return 0


def _describe_processor() -> str:
    """Returns the name of the processor and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        return f"{processor_name()}, 1 core"
    return f"{processor_name()}, {cores} cores"


def _package_versions() -> dict[str, str]:
    """Returns the versions of this program, Python, MindSpore and NumPy."""
    versions = {"run_trainer": __version__, "python": platform.python_version()}
    for package in ("mindspore", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def git_commit(folder: Path) -> str:
    """Returns the commit of the git folder that has `folder`; empty without a git folder, or without git."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12",
               "--exclude=*"]  # fmt: skip
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
        if result.returncode == 0:
            return result.stdout.strip()
    return ""
