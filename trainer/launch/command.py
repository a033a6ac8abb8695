"""The commands `launch`, `status` and `stop`."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, RunError, UserError
from trainer.launch.agent import SOCKET_VARIABLE
from trainer.launch.arguments import (
    DEVICES_VARIABLE,
    LOG_FOLDER,
    LaunchOptions,
    to_arguments,
    visible_devices,
)
from trainer.launch.control.messages import NodeMessage
from trainer.launch.control.nodes import Nodes, connect_nodes
from trainer.launch.control.secret import SECRET_VARIABLE
from trainer.launch.heartbeat import JOB_VARIABLE, RESTART_VARIABLE
from trainer.launch.job import (
    JobFiles,
    JobState,
    Outcome,
    RestartPlan,
    WorkerState,
    describe_exit_code,
    job_files,
    lost_rank,
    may_restart,
    new_state,
    prepare_job_folder,
    read_job_state,
    refuse_running,
    stopped_outcome,
    write_job_state,
    write_outcome,
)
from trainer.launch.msrun import (
    ENCODING_VARIABLE,
    SCHEDULER,
    pick_free_port,
    scratch_folder,
    socket_path,
    start_msrun,
    trainer_command,
)
from trainer.launch.pool import WorkerHandle, WorkerPool
from trainer.launch.processes import adopt_orphans, allow_open_files, is_alive, send_signal, worker_cores
from trainer.launch.supervisor import Supervisor, collect_signals, stop_signal
from trainer.launch.terminal import LogTail, Screen, tail_file, tail_pipe, terminal_size
from trainer.launch.wire import AgentMessage, ListeningSocket, wait_for_data
from trainer.parallel.world import LOCAL_SIZE_VARIABLE, SHARED_PORT

_DETACHED_START_SECONDS = 20.0
_RECONNECT_SECONDS = 600
"""The longest wait from the end of a node's workers until all nodes are connected for a restart. In that time node 0
reads a checkpoint's files once."""
_POLL_SECONDS = 0.05
_FILES_OF_A_WORKER = 4  # sockets to it, in the launcher and in MindSpore's scheduler, with some to spare
_FILES_OF_A_PROCESS = 256
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_HEARTBEAT = "MS_NODE_TIMEOUT"
_HEARTBEAT_SECONDS = 3600  # how long MindSpore's scheduler waits for one


class Restart(NamedTuple):
    """The number of this restart and its reason, for the log and metrics of the job."""

    number: int = 0  # how often the job has been started again
    most: int = 0
    reason: str = ""  # how the previous start ended
    ranks: int = 0


_FIRST_START = Restart()


def launch(options: LaunchOptions, restart_plan: RestartPlan | None = None, device: str = "") -> int:
    """Runs a job on this host and returns its exit code: that of the first worker that failed, or of the signal.

    Args:
        restart_plan: What `check_launch` returns; only a job on one node without restarts needs none.
        device: Of the workers; empty if they may use any.

    Raises:
        UserError: An option or the configuration is wrong.
        RunError: This host cannot run the job.
    """
    files = job_files(options.log_dir, options.node_rank, options.nodes)
    refuse_running(files)
    if options.master_port is None and options.nodes > 1:
        options = replace(options, master_port=SHARED_PORT)
    if not options.join:
        return _detach(options, files)
    allow_open_files(_FILES_OF_A_WORKER * options.worker_num + _FILES_OF_A_PROCESS)
    signals: deque[int] = deque()
    with collect_signals(signals):  # also those that arrive between two starts
        code = _start_and_restart(options, files, restart_plan, signals, device)
    for number in (signal.SIGTERM, signal.SIGINT):  # a late one must not change the exit code
        signal.signal(number, signal.SIG_IGN)
    return code


def _start_and_restart(
    options: LaunchOptions, files: JobFiles, restart_plan: RestartPlan | None, signals: deque[int], device: str
) -> int:
    """Runs the job until it succeeds, is asked to stop, or has used up its restarts."""
    previous: Outcome | None = None
    restart = _FIRST_START
    name = ""
    while True:
        nodes = _nodes(options, restart_plan, restart.number, name)
        try:
            attempt = options
            if options.master_port is None:
                attempt = replace(options, master_port=pick_free_port(options.master_addr))
            state = _prepare(attempt, files, restart)
            outcome = _wait_for_nodes(nodes, signals)
            if outcome is not None:
                write_outcome(files, state, outcome)
                _print_status(f"{outcome.words}.")
            else:
                if restart_plan is not None:
                    attempt = restart_plan.resume_from(attempt, nodes.resume)
                    state.command = [attempt.script_name, *attempt.arguments]
                outcome = _supervise(attempt, files, state, nodes, restart, signals, device)
        finally:
            nodes.close()
        if restart.number >= options.max_restarts or restart_plan is None or not may_restart(outcome):
            return outcome.exit_code
        is_first_node = options.node_rank == 0
        name = ""
        if is_first_node:
            name = restart_plan.find_newest()
        lost = None
        if options.elastic:
            lost = lost_rank(previous, outcome)
        if stop_signal(signals) is not None:
            _print_status("not restarting: the job was asked to stop")
            return outcome.exit_code
        if lost is not None:
            smaller = restart_plan.shrink(options, name)
            if smaller is None:
                _print_status(f"rank {lost} failed twice; no smaller number of ranks keeps the global batch")
                return outcome.exit_code
            options = replace(smaller, devices=_remaining_devices(options, lost))
            _print_status(f"rank {lost} failed twice; the job continues with --worker_num {options.worker_num}")
        reason = f"{outcome.words}: {describe_exit_code(outcome.exit_code)}"
        restart = Restart(restart.number + 1, options.max_restarts, reason, options.worker_num)
        since = "the checkpoint that node 0 names"
        if is_first_node:
            since = name or "where the job began"
        _print_status(f"restart {restart.number} of {restart.most}, from {since}")
        previous = outcome


def _print_status(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _remaining_devices(options: LaunchOptions, lost: int) -> tuple[int, ...]:
    """Returns the devices that are left for the ranks after the loss of one, as numbers of the host."""
    devices = options.devices or visible_devices() or tuple(range(options.local_worker_num))
    return tuple(device for place, device in enumerate(devices) if place != lost)


def _wait_for_nodes(nodes: Nodes, signals: deque[int]) -> Outcome | None:
    """Waits until the launchers of all nodes are connected; before a restart their workers have ended then.

    MindSpore alone would accept the workers of a node whose launcher does not know the secret or does not run.

    Returns None, or the outcome of the job if that fails.
    """
    while not nodes.connected:
        number = stop_signal(signals)
        if number is not None:
            nodes.send(NodeMessage(kind="stop", number=number, node=nodes.options.node_rank))
            return stopped_outcome(number)
        for event in nodes.poll(time.monotonic()):
            for line in event.lines:
                _print_status(line)
            if event.kind == "failed":
                return Outcome(event.number, "the launchers of all nodes did not connect")
            if event.kind == "stop":
                return stopped_outcome(event.number)
        wait_for_data(nodes.sources, _POLL_SECONDS)
    return None


def _prepare(options: LaunchOptions, files: JobFiles, restart: Restart) -> JobState:
    """Makes the job's folder with the state of the job, which it returns."""
    prepare_job_folder(files, options.ranks, is_single_node=options.nodes == 1)
    state = new_state(options, files, restart.number)
    write_job_state(files, state)
    count = "1 worker"
    if options.local_worker_num > 1:
        count = f"{options.local_worker_num} workers"
    if options.nodes > 1:
        count += f" of {options.worker_num} on node {options.node_rank} of {options.nodes}"
    cores = len(os.sched_getaffinity(0))
    _print_status(f"launching {count} on {cores} cores; logs: {files.log_dir}/rank-<n>.log")
    return state


def _supervise(
    options: LaunchOptions, files: JobFiles, state: JobState, nodes: Nodes, restart: Restart, signals: deque[int],
    device: str,
) -> Outcome:  # fmt: skip
    adopt_orphans()
    specs = worker_specs(options, files, restart, device)
    workers = {rank: WorkerHandle(rank) for rank in options.ranks}
    with scratch_folder() as folder, socket.socket(socket.AF_UNIX) as listening:
        scratch = Path(folder)
        listening.bind(os.fspath(socket_path(scratch)))  # only this user's processes reach it: its folder is private
        pool = WorkerPool(workers, WorkerHandle(None), ListeningSocket(listening), specs, files.folder)
        screen = _screen(specs[options.ranks[0]], scratch)
        msrun = start_msrun(options, files, scratch, device)
        return Supervisor(options, pool, msrun, files, state, nodes, screen, signals).run()


def _nodes(options: LaunchOptions, restart_plan: RestartPlan | None, attempt: int, resume: str) -> Nodes:
    if options.nodes == 1:
        return Nodes(options=options, resume=resume, connected=True)
    assert restart_plan is not None
    if attempt:
        longest = min(_RECONNECT_SECONDS, options.start_limit or _RECONNECT_SECONDS, options.cluster_time_out)
        options = replace(options, cluster_time_out=math.ceil(longest))
    return connect_nodes(options, restart_plan.shared, attempt, resume)


def _screen(followed: AgentMessage, scratch: Path) -> Screen:
    """Returns a screen that shows the worker of this spec to the user; on a terminal, as if it ran there alone."""
    if not sys.stdout.isatty():
        return Screen(LogTail(tail_file(Path(followed["log"])), sys.stdout.buffer))
    pipe = scratch / "terminal"
    followed["terminal"] = {"pipe": str(pipe), "size": terminal_size()}
    return Screen(LogTail(tail_pipe(pipe), sys.stdout.buffer), drawn=True)


def worker_specs(
    options: LaunchOptions, files: JobFiles, restart: Restart = _FIRST_START, device: str = ""
) -> dict[int | None, AgentMessage]:
    """Returns what each agent starts, by rank: command, environment, cores and log.

    The scheduler's spec is under None; workers on a CPU need none.
    """
    cores = sorted(os.sched_getaffinity(0))
    program = trainer_command()
    if options.script is not None:
        program = [sys.executable, "-u", str(options.script)]
    # Variables that only msrun and the agents get.
    unset = [SOCKET_VARIABLE, SECRET_VARIABLE]
    if ENCODING_VARIABLE not in os.environ:
        unset.append(ENCODING_VARIABLE)
    specs: dict[int | None, AgentMessage] = {}
    for place, rank in enumerate(options.ranks):
        local_cores = worker_cores(cores, place, options.local_worker_num)
        environment = {
            **_worker_environment(len(local_cores)),
            JOB_VARIABLE: str(files.folder),
            LOCAL_SIZE_VARIABLE: str(options.local_worker_num),
        }
        if restart.number:
            environment[RESTART_VARIABLE] = json.dumps(restart._asdict())
        if options.devices:
            environment[DEVICES_VARIABLE] = ",".join(map(str, options.devices))
        specs[rank] = {
            "command": [*program, *options.arguments],
            "environment": environment,
            "unset": unset,
            "cores": local_cores,
            "log": str(files.log(rank)),
        }
    if device != "CPU" and (options.node_rank == 0 or options.nodes == 1):
        specs[None] = {
            "command": [sys.executable, "-c", SCHEDULER],
            "environment": _worker_environment(1),
            "unset": unset,
            "cores": cores,
            "log": str(files.log(None)),
        }
    return specs


def _worker_environment(threads: int) -> dict[str, str]:
    """Returns PATH and encoding of the user, at most `threads` threads, and a long wait for heartbeats.

    By default MindSpore's scheduler, which ranks on CPUs do not use, ends a job whose machine was suspended for 30 s.
    The launchers detect dead and hung workers themselves. Without heartbeats (MS_DISABLE_HEARTBEAT=1) one of eight jobs
    ended with SIGSEGV.
    """
    environment = {"PATH": os.environ.get("PATH", os.defpath)}
    environment[_HEARTBEAT] = os.environ.get(_HEARTBEAT, str(_HEARTBEAT_SECONDS))
    if ENCODING_VARIABLE in os.environ:
        environment[ENCODING_VARIABLE] = os.environ[ENCODING_VARIABLE]
    for name in _THREAD_VARIABLES:
        limit = os.environ.get(name, "")
        environment[name] = str(threads)
        if limit.isdecimal() and int(limit):
            environment[name] = str(min(threads, int(limit)))
    return environment


def _detach(options: LaunchOptions, files: JobFiles) -> int:
    """Starts a launcher that outlives this process and its terminal, and prints where to find it."""
    files.log_dir.mkdir(parents=True, exist_ok=True)
    output = files.log_dir / f"{files.folder.name}.launcher"
    output.unlink(missing_ok=True)  # opening a pipe there would wait
    with output.open("wb") as log:
        launcher = subprocess.Popen(
            [*trainer_command(), "launch", *to_arguments(replace(options, join=True))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _DETACHED_START_SECONDS
    while time.monotonic() < deadline:
        state = read_job_state(files.folder)
        if state is not None and state.launcher.pid == launcher.pid:
            print(f"job: {files.folder}")
            print(f"  run_trainer.py status {files.log_dir}    what it does")
            print(f"  run_trainer.py stop {files.log_dir}      saves and ends it")
            return EXIT_OK
        if launcher.poll() is not None:
            break
        time.sleep(0.05)
    text = output.read_text(encoding="utf-8", errors="replace").strip()
    raise RunError(f"the job did not start: {text or 'its launcher printed nothing'}", key="launch")


def find_job(folder: Path) -> tuple[Path, JobState]:
    """Returns the job of a log folder, of an output_dir, or of a job's own folder.

    Raises:
        UserError: There is none.
    """
    where = folder.expanduser().absolute()
    for logs in (where, where / LOG_FOLDER):
        for path in (logs, logs / "job", *sorted(logs.glob("job-node-*[0-9]"))):
            state = read_job_state(path)
            if state is not None:
                return path, state
    fix = "name the --output_dir or --log_dir of a launch"
    raise UserError(f"{folder}: no job found", fix=fix)


def status(folder: Path, as_json: bool = False) -> int:
    """Prints what a job does or how it ended; returns exit code 0 if it runs or ended well, else 1."""
    path, state = find_job(folder)
    lost = state.exit_code is None and not is_alive(state.launcher)
    words = state.outcome or "runs"
    if lost:
        words = "lost: its launcher is gone, and its workers with it"
    if state.exit_code is not None:
        words += f", exit code {state.exit_code}"
    if as_json:
        print(json.dumps({**asdict(state), "running": state.exit_code is None and not lost, "lost": lost}, indent=1))
    else:
        print(f"{path}: {words}")
        until = state.ended or time.time()
        if state.restart:
            print(f"  restarts: {state.restart}")
        print(f"  {shlex.join(state.command)}; {until - state.began:.0f} s; launcher: process {state.launcher.pid}")
        for worker in state.workers:
            print(f"  {_worker_line(worker, lost)}")
    if lost or state.exit_code:
        return EXIT_RUN_FAILED
    return EXIT_OK


def _worker_line(worker: WorkerState, lost: bool) -> str:
    state = worker.state
    if lost and state == "running":
        state = "lost"
    words = [f"rank {worker.rank}:", state]
    if worker.pid is not None and worker.state == "running":
        words.append(f"(process {worker.pid})")
    if worker.exit_code is not None:
        words.append(f"with exit code {worker.exit_code}")
    if worker.step is not None:
        words.append(f"at step {worker.step}")
    if worker.role:
        words.append(f"({worker.role})")
    return " ".join([*words, worker.log])


def stop(folder: Path, timeout_seconds: float = 600.0) -> int:
    """Stops a job with SIGTERM, upon which it saves a checkpoint, and waits for its end.

    Raises:
        RunError: It still runs after the time-out.
    """
    path, state = find_job(folder)
    if not send_signal(state.launcher, signal.SIGTERM):  # one that is alive may be starting the job again
        print("; ".join(filter(None, [f"{path}: does not run", state.outcome])))
        return EXIT_OK
    deadline = time.monotonic() + timeout_seconds
    while is_alive(state.launcher):
        if time.monotonic() > deadline:
            rule = f"the job is still running {timeout_seconds:.0f} s after it was asked to stop"
            raise RunError(rule, key=str(path), fix="run stop again: then the job ends within some seconds")
        time.sleep(0.1)
    last_state = read_job_state(path)
    outcome = "ended"
    if last_state is not None and last_state.outcome:
        outcome = last_state.outcome
    print(f"{path}: {outcome}")
    return EXIT_OK
