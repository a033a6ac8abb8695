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
        """Of a worker, or of the scheduler, whose rank is None."""
        if rank is None:
            return self.folder / "scheduler.log"
        return self.log_dir / f"rank-{rank}.log"

    @property
    def msrun_log(self) -> Path:
        return self.folder / "msrun.log"


@dataclass
class WorkerState:
    """What is known of a worker."""

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
    """The files of a job; each of several nodes, which may share the log folder, has its own job folder."""
    absolute = log_dir.expanduser().absolute()
    return JobFiles(absolute, absolute / (f"job-node-{node_rank}" if nodes > 1 else "job"))


def prepare(files: JobFiles, ranks: range, whole_host: bool) -> None:
    """Makes the job's folder. The logs and the folder of an earlier job stay there with a number.

    That number is the same for all files of one job, one more than any other file has.

    Args:
        ranks: Those of this node.
        whole_host: Whether there is one node only, so that logs of other ranks are of an earlier job too.

    Raises:
        UserError: A job that uses the folder is running.
        RunError: The folder cannot be written.
    """
    try:
        files.log_dir.mkdir(parents=True, exist_ok=True)
        refuse_running(files)
        present = []
        last = 0
        own = {files.log(rank).name for rank in ranks} | {files.folder.name}
        for path in files.log_dir.iterdir():
            if path.name in own or (whole_host and re.fullmatch(r"rank-\d+\.log", path.name)):
                present.append(path)
            elif match := _NUMBERED.fullmatch(path.name):
                last = max(last, int(match[1]))
        for path in present:
            path.rename(path.with_name(f"{path.stem}.{last + 1}{path.suffix}"))
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


def write_state(files: JobFiles, state: JobState) -> None:
    """Replaces the file in one go. A full disk is no reason to end a job: then the file stays as it was."""
    _read_steps(files.folder, state)
    unfinished = files.folder / "state.new"
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        os.replace(unfinished, files.folder / _STATE)


def read_state(folder: Path) -> JobState | None:
    """The state of the job of a folder, steps included; None where there is no job, or nonsense in its file."""
    from pydantic import TypeAdapter, ValidationError

    try:
        state = TypeAdapter(JobState).validate_json((folder / _STATE).read_bytes())
    except (OSError, ValidationError):
        return None
    if state.exit_code is None:
        _read_steps(folder, state)
    return state


def _read_steps(folder: Path, state: JobState) -> None:
    for worker in state.workers:
        worker.step = read_step(beat_file(folder, worker.rank))


def new_state(options: LaunchOptions, files: JobFiles, restart: int = 0) -> JobState:
    """The state of a job that this process starts now."""
    me = identity(os.getpid())
    assert me is not None
    workers = [WorkerState(rank, log=str(files.log(rank))) for rank in options.ranks]
    command = [options.script_name, *options.arguments]
    master = f"{options.master_addr}:{options.master_port}"
    return JobState(me, command, time.time(), workers, options.worker_num, options.node_rank, master, restart=restart)


@dataclass
class End:
    """The end of a worker, or of another process of the job, whose rank is None."""

    rank: int | None
    exit_code: int  # as a shell gives it: 128 + n for signal n
    at_seconds: float  # when it failed or ended, by the monotonic clock of its host
    by_launcher: bool = False  # whether it ended after the launcher had told it to
    why: str = ""  # the system's message when it could not be started
    process: str = "the scheduler"  # its name when it is no worker

    @property
    def name(self) -> str:
        if self.rank is None:
            return self.process
        return f"rank {self.rank}"


@dataclass
class Outcome:
    """The end of a job, in one sentence without its full stop, and with which exit code."""

    exit_code: int
    words: str
    first: End | None = None  # the first failure
    others: list[End] = field(default_factory=list)  # those that ended with an error after it
    progressed: bool = False  # whether any step was finished
    stopped_by: int | None = None  # the signal that told the job to end, before or after the failure


class RestartPlan(NamedTuple):
    """How a job that failed goes on; made by `trainer.launch.restart`.

    Attributes:
        shared: A folder that all nodes see.
        newest: The name of the newest undamaged checkpoint that the job has saved; empty without one.
        resumed: The job from that checkpoint on.
        fewer: The job on fewer ranks, to go on from that checkpoint; None where its batch does not allow it.
    """

    shared: Path
    newest: Callable[[], str]
    resumed: Callable[[LaunchOptions, str], LaunchOptions]
    fewer: Callable[[LaunchOptions, str], LaunchOptions | None]


def may_restart(outcome: Outcome) -> bool:
    """Whether a job that ended so could go on: not where it is done or was stopped, nor after bad input."""
    over = outcome.exit_code in (EXIT_OK, EXIT_BAD_INPUT, EXIT_SIGINT, EXIT_SIGTERM)
    return not over and outcome.stopped_by is None


def lost_rank(before: Outcome | None, last: Outcome) -> int | None:
    """The rank that failed first twice, without a step since the first time: it is taken for lost for good."""
    if before is None or before.first is None or last.first is None or last.progressed:
        return None
    if last.first.rank == before.first.rank:
        return last.first.rank
    return None


def shell_code(returncode: int) -> int:
    """The exit code that a shell gives for that of `subprocess`."""
    if returncode < 0:
        return 128 - returncode
    return returncode


def how(exit_code: int) -> str:
    """An exit code in words."""
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(exit_code - 128).name}"
    return f"exit code {exit_code}"


def decide_outcome(ends: Sequence[End], stopped_by: int | None, hang: str = "") -> Outcome:
    """The outcome of a job from the ends of its processes and the signal that stopped it.

    Args:
        hang: What took too long, where the job was ended for that.
    """
    if hang:
        return Outcome(EXIT_HANG, hang, stopped_by=stopped_by)
    # A worker that ended by the signal that stopped the job did not fail.
    fine = {EXIT_OK} | ({128 + stopped_by} if stopped_by else set())
    failed = sorted((end for end in ends if end.exit_code not in fine), key=lambda end: end.at_seconds)
    own = [end for end in failed if not end.by_launcher]
    if own:
        first = own[0]
        others = [end for end in failed if end is not own[0]]
        return Outcome(first.exit_code, f"{first.name} failed", first, others, stopped_by=stopped_by)
    if stopped_by is not None and (failed or any(end.exit_code for end in ends) or not ends):
        return stopped(stopped_by)
    if failed:  # told to end though nobody had failed: the caller knows the reason
        return Outcome(EXIT_RUN_FAILED, "the job was ended", None, failed)
    return Outcome(EXIT_OK, "finished")


def stopped(number: int) -> Outcome:
    """The outcome of a job that ended because of this signal."""
    return Outcome(128 + number, f"stopped by {signal.Signals(number).name}", stopped_by=number)


def report(outcome: Outcome, log: Path | None, duration_seconds: float) -> list[str]:
    """The lines about a failure: which process, how, when, its log and the last lines of it."""
    if outcome.first is None:
        return [f"error: {outcome.words}."]
    first = outcome.first
    lines = [f"error: {first.name} failed first: {how(first.exit_code)}, {duration_seconds:.0f} s after the start."]
    if first.why:
        lines.append(f"  It could not be started: {first.why}")
    if first.exit_code == 128 + signal.SIGKILL:
        lines.append("  Nobody here sent that signal: often the system does, when memory is exhausted (see dmesg).")
    if first.exit_code in (EXIT_SIGINT, EXIT_SIGTERM):
        lines.append("  No launcher sent that signal: another rank or another process did.")
    if log is not None:
        lines.append(f"  Log: {log}")
        tail = [f"  | {line}" for line in last_lines(log)]
        found = _NO_HEARTBEAT.search("\n".join(tail))
        if found:
            of_ranks = ""
            if found[1]:
                of_ranks = f" of rank {found[1].replace(', ', ' and ')}"
            lines += [
                f"  MindSpore's scheduler got no heartbeat{of_ranks} in time: the machine was suspended or overloaded.",
                "  Fix: go on with --resume_training. A job outlives an hour of that where the environment has no"
                " MS_NODE_TIMEOUT.",
            ]
        elif tail:
            lines += ["  Its last lines:", *tail]
    if outcome.others:
        others = sorted(outcome.others, key=lambda end: -1 if end.rank is None else end.rank)
        ended = ", ".join(f"{end.name} ({how(end.exit_code)})" for end in others)
        lines.append(f"  Ended because of that: {ended}.")
    return lines
