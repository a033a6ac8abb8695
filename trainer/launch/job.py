"""The files and the end of a job: its folder, the state of its workers, the logs, and which worker failed first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_HANG,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    RunError,
    UserError,
)
from trainer.input_files import read_bytes
from trainer.launch.arguments import LaunchOptions
from trainer.launch.heartbeat import beat_file, read_step
from trainer.launch.processes import Identity, identity, is_alive
from trainer.launch.terminal import last_lines

_STATE = "state.json"
_NO_HEARTBEAT = re.compile(r"Timed out node list is: \[[^]]*\]\{([\d, ]+)\}|The state of the cluster is error")
"""What MindSpore's scheduler and its workers end with."""
_NUMBERED = re.compile(r"(?:rank-\d+|scheduler|job(?:-node-\d+)?)\.(\d+)(?:\.log)?")


@dataclass(frozen=True)
class JobFiles:
    """The files of a job: the logs are directly in `log_dir`, all others in the job's own folder in it."""

    log_dir: Path
    folder: Path

    def log(self, rank: int | None) -> Path:
        """Returns the log of a worker; rank None means the scheduler."""
        if rank is None:
            return self.folder / "scheduler.log"
        return self.log_dir / f"rank-{rank}.log"

    @property
    def msrun_log(self) -> Path:
        """Returns the log of msrun."""
        return self.folder / "msrun.log"


@dataclass
class WorkerState:
    """The state of a worker, as `status` prints it."""

    rank: int
    state: str = "waiting"  # for its process; then running, then ended
    pid: int | None = None
    exit_code: int | None = None  # as a shell gives it: 128 + n for signal n
    step: int | None = None  # the last finished one
    log: str = ""
    role: str = ""  # in a job that failed: failed first, or ended because of that


@dataclass
class JobState:
    """What `status` reads: only the launcher writes it, whenever it changes; `outcome` once the job has ended."""

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
    restart: int = 0  # how often the job has been started again


def job_files(log_dir: Path, node_rank: int, nodes: int) -> JobFiles:
    """Returns the files of a job. Several nodes may share the log folder, so each has its own job folder."""
    absolute = log_dir.expanduser().absolute()
    if nodes > 1:
        return JobFiles(absolute, absolute / f"job-node-{node_rank}")
    return JobFiles(absolute, absolute / "job")


def prepare_job_folder(files: JobFiles, ranks: range, is_single_node: bool) -> None:
    """Makes the job's folder; logs and folder of an earlier job get a number in their names.

    The number is the same for all files of one job, one more than the highest of other files.

    Args:
        ranks: The ranks of this node.
        is_single_node: Whether the job has one node, so that logs of other ranks are of an earlier job too.

    Raises:
        UserError: A job that uses the folder is running.
        RunError: The folder cannot be written.
    """
    try:
        files.log_dir.mkdir(parents=True, exist_ok=True)
        refuse_running(files)
        present = []
        last = 0
        names = {files.log(rank).name for rank in ranks} | {files.folder.name}
        for path in files.log_dir.iterdir():
            match = _NUMBERED.fullmatch(path.name)
            if path.name in names or (is_single_node and re.fullmatch(r"rank-\d+\.log", path.name)):
                present.append(path)
            elif match:
                last = max(last, int(match[1]))
        for path in present:
            path.rename(path.with_name(f"{path.stem}.{last + 1}{path.suffix}"))
        files.folder.mkdir()
    except FileExistsError:
        rule = "another job is starting with this folder"
        raise UserError(rule, key="log_dir", value=str(files.log_dir), fix="use another one") from None
    except OSError as error:
        raise RunError(f"the folder cannot be written: {error}", key="log_dir", value=str(files.log_dir)) from None


def refuse_running(files: JobFiles) -> None:
    """Raises UserError if a job that uses the folder is running."""
    state = read_job_state(files.folder)
    if state is not None and state.exit_code is None and is_alive(state.launcher):
        rule = f"a job is running with this folder (launcher: process {state.launcher.pid})"
        fix = f"use another --log_dir, or end that job with run_trainer.py stop {files.log_dir}"
        raise UserError(rule, key="log_dir", value=str(files.log_dir), fix=fix)


def write_job_state(files: JobFiles, state: JobState) -> None:
    """Replaces the state file at once. If the disk is full, the file stays as it was and the job goes on."""
    _read_steps(files.folder, state)
    unfinished = files.folder / "state.new"
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        os.replace(unfinished, files.folder / _STATE)


def write_outcome(files: JobFiles, state: JobState, outcome: Outcome) -> None:
    """Writes how a job has ended to its state file."""
    state.outcome = outcome.words
    state.exit_code = outcome.exit_code
    state.ended = time.time()
    write_job_state(files, state)


def read_job_state(folder: Path) -> JobState | None:
    """Returns the state of a folder's job with its steps; None if there is no job or its file is invalid."""
    from pydantic import TypeAdapter, ValidationError

    try:
        state = TypeAdapter(JobState).validate_json(read_bytes(folder / _STATE))
    except (OSError, ValidationError):
        return None
    if state.exit_code is None:
        _read_steps(folder, state)
    return state


def _read_steps(folder: Path, state: JobState) -> None:
    for worker in state.workers:
        worker.step = read_step(beat_file(folder, worker.rank))


def new_state(options: LaunchOptions, files: JobFiles, restart: int = 0) -> JobState:
    """Returns the state of a job that this process starts now."""
    me = identity(os.getpid())
    assert me is not None
    workers = [WorkerState(rank, log=str(files.log(rank))) for rank in options.ranks]
    command = [options.script_name, *options.arguments]
    master = f"{options.master_addr}:{options.master_port}"
    return JobState(me, command, time.time(), workers, options.worker_num, options.node_rank, master, restart=restart)


@dataclass
class ProcessExit:
    """The exit of a worker, or of another process of the job, whose rank is None."""

    rank: int | None
    exit_code: int  # as a shell gives it: 128 + n for signal n
    at_seconds: float  # when it failed or ended, by the monotonic clock of its host
    by_launcher: bool = False  # whether it ended after the launcher had told it to
    why: str = ""  # the system's message when it could not be started
    process: str = "the scheduler"  # its name when it is no worker

    @property
    def name(self) -> str:
        """Returns the rank, or the process that is no worker, for a message."""
        if self.rank is None:
            return self.process
        return f"rank {self.rank}"


@dataclass
class Outcome:
    """The outcome of a job: its exit code, and a sentence without its full stop."""

    exit_code: int
    words: str
    first: ProcessExit | None = None  # the first failure
    others: list[ProcessExit] = field(default_factory=list)  # those that ended with an error after it
    progressed: bool = False  # whether any step was finished
    stopped_by: int | None = None  # the signal that told the job to end, before or after the failure


class RestartPlan(NamedTuple):
    """How a job that failed continues; made by `trainer.launch.restart`.

    Attributes:
        shared: A folder that all nodes see.
        find_newest: Returns the name of the newest undamaged checkpoint that the job has saved; empty without one.
        resume_from: Returns the job that continues from that checkpoint.
        shrink: Returns the job on fewer ranks, to continue from that checkpoint; None if its batch does not allow it.
    """

    shared: Path
    find_newest: Callable[[], str]
    resume_from: Callable[[LaunchOptions, str], LaunchOptions]
    shrink: Callable[[LaunchOptions, str], LaunchOptions | None]


def may_restart(outcome: Outcome) -> bool:
    """Returns whether a restart may help: the job failed, and neither bad input nor a stop signal is the reason."""
    over = outcome.exit_code in (EXIT_OK, EXIT_BAD_INPUT, EXIT_SIGINT, EXIT_SIGTERM)
    return not over and outcome.stopped_by is None


def lost_rank(before: Outcome | None, last: Outcome) -> int | None:
    """Returns the rank that failed first twice without a step in between, which counts as failed permanently."""
    if before is None or before.first is None or last.first is None or last.progressed:
        return None
    if last.first.rank == before.first.rank:
        return last.first.rank
    return None


def shell_code(returncode: int) -> int:
    """Converts a return code of `subprocess` into the exit code that a shell reports."""
    if returncode < 0:
        return 128 - returncode
    return returncode


def describe_exit_code(exit_code: int) -> str:
    """Returns an exit code in words."""
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(exit_code - 128).name}"
    return f"exit code {exit_code}"


def decide_outcome(ends: Sequence[ProcessExit], stopped_by: int | None, hang: str = "") -> Outcome:
    """Returns the outcome of a job from the exits of its processes and the signal that stopped it.

    Args:
        hang: What took too long, if the job was ended for that.
    """
    if hang:
        return Outcome(EXIT_HANG, hang, stopped_by=stopped_by)
    # A worker that ended by the signal that stopped the job did not fail.
    fine = {EXIT_OK}
    if stopped_by:
        fine.add(128 + stopped_by)
    failed = sorted((end for end in ends if end.exit_code not in fine), key=lambda end: end.at_seconds)
    first = next((end for end in failed if not end.by_launcher), None)
    if first is not None:
        others = [end for end in failed if end is not first]
        return Outcome(first.exit_code, f"{first.name} failed", first, others, stopped_by=stopped_by)
    if stopped_by is not None and (failed or any(end.exit_code for end in ends) or not ends):
        return stopped_outcome(stopped_by)
    if failed:  # told to end though nobody had failed: the caller knows the reason
        return Outcome(EXIT_RUN_FAILED, "the job was ended", None, failed)
    return Outcome(EXIT_OK, "finished")


def stopped_outcome(number: int) -> Outcome:
    """Returns the outcome of a job that a signal stopped."""
    return Outcome(128 + number, f"stopped by {signal.Signals(number).name}", stopped_by=number)


def failure_lines(outcome: Outcome, log: Path | None, duration_seconds: float) -> list[str]:
    """Returns the lines about a failure: which process, how, when, its log and the last lines of it."""
    if outcome.first is None:
        return [f"error: {outcome.words}."]
    first = outcome.first
    how = describe_exit_code(first.exit_code)
    lines = [f"error: {first.name} failed first: {how}, {duration_seconds:.0f} s after the start."]
    if first.why:
        lines.append(f"  It could not be started: {first.why}")
    if first.exit_code == 128 + signal.SIGKILL:
        lines.append("  The launcher did not send SIGKILL. The kernel often does when memory runs out: see dmesg.")
    if first.exit_code in (EXIT_SIGINT, EXIT_SIGTERM):
        lines.append("  No launcher sent that signal: another rank or another process did.")
    if log is not None:
        lines.append(f"  Log: {log}")
        tail = [f"  | {line}" for line in last_lines(log)]
        if match := _NO_HEARTBEAT.search("\n".join(tail)):
            whose = ""
            if match[1]:
                whose = f" of rank {match[1].replace(', ', ' and ')}"
            lines += [
                f"  MindSpore's scheduler got no heartbeat{whose} in time: the machine was suspended or overloaded.",
                "  Fix: continue with --resume_training. Unset MS_NODE_TIMEOUT to tolerate interruptions of an hour.",
            ]
        elif tail:
            lines += ["  Its last lines:", *tail]
    if outcome.others:
        others = sorted(outcome.others, key=lambda end: (end.rank is not None, end.rank or 0))
        ended = ", ".join(f"{end.name} ({describe_exit_code(end.exit_code)})" for end in others)
        lines.append(f"  Ended because of that: {ended}.")
    return lines
