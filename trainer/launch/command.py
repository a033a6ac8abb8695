"""The commands `launch`, `status` and `stop`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, RunError, UserError
from trainer.launch.agent import SOCKET_VARIABLE
from trainer.launch.arguments import SHARED_PORT, LaunchOptions, to_arguments
from trainer.launch.heartbeat import JOB_VARIABLE
from trainer.launch.job import (
    JobFiles,
    JobState,
    job_files,
    new_state,
    prepare,
    read_state,
    refuse_running,
    write_state,
)
from trainer.launch.msrun import (
    SCHEDULER,
    Scratch,
    agent_command,
    msrun_command,
    pick_free,
    start_msrun,
    trainer_command,
    worker_command,
)
from trainer.launch.nodes import CONTROL_PORT_VARIABLE, connect_nodes
from trainer.launch.pool import WorkerHandle, WorkerPool, listen
from trainer.launch.processes import adopt_orphans, is_alive, send_signal, share_of_cores
from trainer.launch.supervisor import Supervisor
from trainer.launch.terminal import Follower, Screen, growth_of, make_pipe, out_of_pipe, terminal_size
from trainer.launch.wire import Message

MSRUN_VARIABLE = "RUN_TRAINER_MSRUN"
"""Environment variable with a Python file to start in the place of MindSpore's msrun, with the same arguments."""

_DETACHED_START_SECONDS = 20.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ENCODING = "PYTHONIOENCODING"
_CLUSTER_VARIABLES = ("MS_ROLE", "MS_WORKER_NUM", "MS_NODE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT", "RANK_SIZE")


def launch(options: LaunchOptions, check: Callable[[LaunchOptions], object] | None = None) -> int:
    """Runs a job on this host and returns its exit code: that of the first worker that failed, or of the signal.

    Args:
        options: What to run where.
        check: Raises a UserError for what cannot work, before anything starts.

    Raises:
        UserError: Bad input.
        RunError: This host cannot run it.
    """
    if check is not None:
        check(options)
    files = job_files(options.log_dir, options.node_rank, options.nodes)
    refuse_running(files)
    if options.master_port is None:
        port = pick_free(options.master_addr) if options.nodes == 1 else SHARED_PORT
        options = replace(options, master_port=port)
    return _supervise(options, files) if options.join else _detach(options, files)


def _supervise(options: LaunchOptions, files: JobFiles) -> int:
    nodes = connect_nodes(options, _control_port(options))
    prepare(files, options.ranks, whole_host=options.nodes == 1)
    adopt_orphans()
    state = new_state([options.script_name, *options.arguments], options.ranks, options.worker_num, files)
    state.node_rank, state.master = options.node_rank, f"{options.master_addr}:{options.master_port}"
    write_state(files, state)
    scratch = Scratch()
    listener = listen(scratch.socket)
    specs = worker_specs(options, files)
    workers = {rank: WorkerHandle(rank, files.log(rank)) for rank in options.ranks}
    try:
        pool = WorkerPool(workers, WorkerHandle(None, files.scheduler_log), listener, specs)
        screen = _screen(specs[options.ranks[0]], scratch)
        supervisor = Supervisor(
            pool, lambda: _start(options, files, scratch), files, state, nodes, options.hang_timeout, screen
        )
        screen.print([_announcement(options, files)])
        code = supervisor.run().exit_code
        for number in (signal.SIGTERM, signal.SIGINT):  # a late one must not change the exit code
            signal.signal(number, signal.SIG_IGN)
        return code
    finally:
        listener.close()
        scratch.close()


def _screen(followed: Message, scratch: Scratch) -> Screen:
    """Shows the worker of this spec to the user; on a terminal, as if it were alone there."""
    if not sys.stdout.isatty():
        return Screen(Follower(growth_of(Path(followed["log"])), sys.stdout.buffer))
    pipe = scratch.path / "terminal"
    followed["terminal"] = {"pipe": str(pipe), "size": terminal_size(sys.stdout.fileno())}
    return Screen(Follower(out_of_pipe(make_pipe(pipe)), sys.stdout.buffer), drawn=True)


def _control_port(options: LaunchOptions) -> int:
    text = os.environ.get(CONTROL_PORT_VARIABLE, "")
    if not text:
        return options.master_port + 1
    if not text.isdecimal():
        raise UserError("must be the number of a port", key=CONTROL_PORT_VARIABLE, value=text, fix="write 8119")
    return int(text)


def _announcement(options: LaunchOptions, files: JobFiles) -> str:
    count, cores = options.local_worker_num, len(os.sched_getaffinity(0))
    workers = f"{count} worker{'s' if count > 1 else ''}"
    if options.nodes > 1:
        workers += f" of {options.worker_num} on node {options.node_rank} of {options.nodes}"
    return f"launching {workers} on {cores} cores; logs: {files.log_dir}/rank-<n>.log"


def needs_no_msrun(options: LaunchOptions) -> bool:
    """One worker of this trainer needs no scheduler and no cluster."""
    return options.worker_num == 1 and options.script is None


def _start(options: LaunchOptions, files: JobFiles, scratch: Scratch) -> subprocess.Popen:
    if needs_no_msrun(options):
        return start_msrun(agent_command(), scratch, files.msrun_log, {"RANK_ID": "0"})
    scratch.write_shim()
    log_dir = files.folder / "msrun"  # of the agents, which print nothing
    command = msrun_command(options, log_dir)
    if os.environ.get(MSRUN_VARIABLE):
        command[1:3] = [os.environ[MSRUN_VARIABLE]]
    # msrun prints its command, which may contain any characters.
    return start_msrun(command, scratch, files.msrun_log, {_ENCODING: "utf-8:backslashreplace"})


def worker_specs(options: LaunchOptions, files: JobFiles) -> dict[int | None, Message]:
    """What each agent starts: command, environment, cores and log, by rank; that of the scheduler under None."""
    cores = sorted(os.sched_getaffinity(0))
    specs: dict[int | None, Message] = {}
    for place, rank in enumerate(options.ranks):
        own = share_of_cores(cores, place, options.local_worker_num)
        specs[rank] = {
            "command": worker_command(options),
            "environment": {
                **_own_environment(len(own)),
                JOB_VARIABLE: str(files.folder),
                "RUN_TRAINER_LOCAL_SIZE": str(options.local_worker_num),
            },
            "without": [*_launchers_variables(), *(_CLUSTER_VARIABLES if needs_no_msrun(options) else ())],
            "cores": own,
            "log": str(files.log(rank)),
        }
    if options.node_rank == 0 or options.nodes == 1:
        specs[None] = {
            "command": [sys.executable, "-c", SCHEDULER],
            "environment": _own_environment(1),
            "without": _launchers_variables(),
            "cores": cores,
            "log": str(files.scheduler_log),
        }
    return specs


def _launchers_variables() -> list[str]:
    """Variables that only msrun and the agents get."""
    return [SOCKET_VARIABLE, *([_ENCODING] if _ENCODING not in os.environ else [])]


def _own_environment(threads: int) -> dict[str, str]:
    """PATH and encoding as the user has them, and at most so many threads."""
    environment = {"PATH": os.environ.get("PATH", os.defpath)}
    if _ENCODING in os.environ:
        environment[_ENCODING] = os.environ[_ENCODING]
    for name in _THREAD_VARIABLES:
        wanted = os.environ.get(name, "")
        environment[name] = str(min(threads, int(wanted)) if wanted.isdecimal() and int(wanted) else threads)
    return environment


# ---- in the background -----------------------------------------------------------------------------------------------


def _detach(options: LaunchOptions, files: JobFiles) -> int:
    """Starts a launcher that outlives this process and its terminal, and says where to find it."""
    files.log_dir.mkdir(parents=True, exist_ok=True)
    output = files.log_dir / f"{files.folder.name}.launcher"
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
        state = read_state(files.folder)
        if state is not None and state.launcher.pid == launcher.pid:
            print(f"job: {files.folder}")
            print(f"  run_trainer.py status {files.log_dir}    what it does")
            print(f"  run_trainer.py stop {files.log_dir}      saves and ends it")
            return EXIT_OK
        if launcher.poll() is not None:
            break
        time.sleep(0.05)
    text = output.read_text(encoding="utf-8", errors="replace").strip()
    raise RunError(f"the job did not start: {text or 'nothing was said about it'}", key="launch")


# ---- status and stop -------------------------------------------------------------------------------------------------


def find_job(folder: Path) -> tuple[Path, JobState]:
    """The job of a folder of logs, or a job's folder itself.

    Raises:
        UserError: There is none.
    """
    where = folder.expanduser().absolute()
    for path in (where, where / "job", *sorted(where.glob("job-node-*[0-9]"))):
        state = read_state(path)
        if state is not None:
            return path, state
    raise UserError(
        "there is no job in this folder", key="DIR", value=str(folder), fix="give the --log_dir of a launch"
    )


def status(folder: Path, as_json: bool = False) -> int:
    """Prints what a job does or how it ended; exit code 0 while it runs and where it ended well, else 1."""
    path, state = find_job(folder)
    lost = state.exit_code is None and not is_alive(state.launcher)
    words = "lost: its launcher is gone, and its workers with it" if lost else state.outcome or "runs"
    if as_json:
        print(json.dumps({**asdict(state), "running": state.exit_code is None and not lost, "lost": lost}, indent=1))
    else:
        print(f"{path}: {words}" + (f", exit code {state.exit_code}" if state.exit_code is not None else ""))
        until = state.ended or time.time()
        print(f"  {shlex.join(state.command)}; {until - state.began:.0f} s; launcher: process {state.launcher.pid}")
        for worker in state.workers:
            print(f"  {_worker_line(worker, lost)}")
    return EXIT_RUN_FAILED if lost or state.exit_code else EXIT_OK


def _worker_line(worker, lost: bool) -> str:
    words = [f"rank {worker.rank}:", "lost" if lost and worker.state == "running" else worker.state]
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
    """Lets a job save and end as SIGTERM does, and waits for that.

    Raises:
        RunError: It still runs after the time-out.
    """
    path, state = find_job(folder)
    if state.exit_code is not None or not send_signal(state.launcher, signal.SIGTERM):
        print(f"{path}: does not run" + (f"; {state.outcome}" if state.outcome else ""))
        return EXIT_OK
    deadline = time.monotonic() + timeout_seconds
    while is_alive(state.launcher):
        if time.monotonic() > deadline:
            raise RunError(
                f"the job still runs {timeout_seconds:.0f} s after it was told to end",
                key=str(path),
                fix="stop it once more: then it has some seconds left",
            )
        time.sleep(0.1)
    ended = read_state(path)
    print(f"{path}: {ended.outcome if ended and ended.outcome else 'ended'}")
    return EXIT_OK
