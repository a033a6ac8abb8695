"""The files of a job: its folder, what is known of each worker, the logs, and those of earlier jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import RunError, UserError
from trainer.launch.heartbeat import beat_file
from trainer.launch.processes import Identity, identity, is_alive

_NUMBERED = re.compile(r"(?:rank-\d+|scheduler|job(?:-node-\d+)?)\.(\d+)(?:\.log)?")


@dataclass(frozen=True)
class JobFiles:
    """Where a job keeps what.

    Attributes:
        log_dir: Absolute; the logs are directly in it.
        folder: Of the job; the workers find it in the environment.
    """

    log_dir: Path
    folder: Path

    def log(self, rank: int) -> Path:
        return self.log_dir / f"rank-{rank}.log"

    @property
    def scheduler_log(self) -> Path:
        return self.folder / "scheduler.log"

    @property
    def msrun_log(self) -> Path:
        return self.folder / "msrun.log"

    @property
    def launcher_log(self) -> Path:
        return self.folder / "launcher.log"

    @property
    def state(self) -> Path:
        return self.folder / "state.json"


@dataclass
class WorkerState:
    """What is known of a worker.

    Attributes:
        state: ``waiting`` for its process, ``running`` or ``ended``.
        pid: Of the worker proper.
        exit_code: As a shell gives it: 128 + n for signal n.
        step: The last step that it did; None before the first.
        role: In a job that failed: ``failed first``, or ``ended because of that``.
    """

    rank: int
    state: str = "waiting"
    pid: int | None = None
    exit_code: int | None = None
    step: int | None = None
    log: str = ""
    role: str = ""


@dataclass
class JobState:
    """What `status` reads: written by the launcher alone, whenever it changes.

    Attributes:
        launcher: The process that supervises the job.
        outcome: Empty while it runs; then how it ended, in words.
    """

    launcher: Identity
    command: list[str]
    began: float
    workers: list[WorkerState]
    worker_num: int
    node_rank: int = 0
    master: str = ""
    outcome: str = ""
    exit_code: int | None = None
    ended: float | None = None
    notes: list[str] = field(default_factory=list)


def job_files(log_dir: Path, node_rank: int, nodes: int) -> JobFiles:
    """The places of a job; on several nodes, which may share the folder, each has its own job folder."""
    where = log_dir.expanduser().absolute()
    return JobFiles(where, where / (f"job-node-{node_rank}" if nodes > 1 else "job"))


def prepare(files: JobFiles, ranks: range, whole_host: bool) -> None:
    """Makes the job's folder; the logs and the folder of an earlier job stay there with a number.

    Args:
        files: Of the new job.
        ranks: Of this node.
        whole_host: Whether logs of other ranks are of an earlier job too: there is one node only.

    Raises:
        UserError: A job that uses the folder is running.
        RunError: The folder cannot be written.
    """
    try:
        files.log_dir.mkdir(parents=True, exist_ok=True)
        refuse_running(files)
        _put_aside(files, ranks, whole_host)
        files.folder.mkdir()
    except FileExistsError:
        raise UserError(
            "another job is starting with this folder", key="log_dir", value=str(files.log_dir), fix="use another one"
        ) from None
    except OSError as error:
        raise RunError(f"the folder cannot be written: {error}", key="log_dir", value=str(files.log_dir)) from None


def refuse_running(files: JobFiles) -> None:
    """Raises UserError when a job that uses the folder is running."""
    state = read_state(files.folder)
    if state is not None and state.exit_code is None and is_alive(state.launcher):
        raise UserError(
            f"a job is running with this folder (launcher: process {state.launcher.pid})",
            key="log_dir",
            value=str(files.log_dir),
            fix=f"use another --log_dir, or end that job with run_trainer.py stop {files.log_dir}",
        )


def _put_aside(files: JobFiles, ranks: range, whole_host: bool) -> None:
    """Gives the files of the last job one number, one more than any other has."""
    own = {files.log(rank).name for rank in ranks} | {files.folder.name}
    present = [path for path in files.log_dir.iterdir() if path.name in own]
    if whole_host:
        present += [p for p in files.log_dir.iterdir() if re.fullmatch(r"rank-\d+\.log", p.name) and p not in present]
    numbers = [int(match[1]) for path in files.log_dir.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    number = max(numbers, default=0) + 1
    for path in present:
        path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))


def write_state(files: JobFiles, state: JobState) -> None:
    """Replaces the file in one go. A full disk is no reason to end a job: then the file stays as it was."""
    for worker in state.workers:
        worker.step = _step(beat_file(files.folder, worker.rank))
    unfinished = files.state.with_suffix(".new")
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        os.replace(unfinished, files.state)


def read_state(folder: Path) -> JobState | None:
    """The state of the job of a folder, steps included; None where there is no job."""
    try:
        data: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        workers = [WorkerState(**worker) for worker in data.pop("workers")]
        state = JobState(**{**data, "launcher": Identity(*data["launcher"])}, workers=workers)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if state.exit_code is None:
        for worker in state.workers:
            worker.step = _step(beat_file(folder, worker.rank))
    return state


def new_state(command: list[str], ranks: range, worker_num: int, files: JobFiles) -> JobState:
    me = identity(os.getpid())
    assert me is not None
    workers = [WorkerState(rank, log=str(files.log(rank))) for rank in ranks]
    return JobState(me, command, time.time(), workers, worker_num)


def _step(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None
