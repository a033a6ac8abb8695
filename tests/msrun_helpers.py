"""Starts small jobs through the real msrun; also imported by the workers, which it keeps to a core each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from fork_server import FORKED, FORKED_PYTHON, ensure_server
from ports import free_port

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent


def run_job(script: Path, *arguments: object, workers: int, folder: Path, limit_seconds: float = 150) -> None:
    """Runs a script in so many processes and waits for them.

    Args:
        script: Its processes find the modules beside it, those of the tests, and the trainer.
        arguments: Of the script.
        workers: Number of processes.
        folder: For logs.
        limit_seconds: A job that takes longer is ended.

    Raises:
        AssertionError: The job failed; the message ends with what the workers wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ensure_server()
    command = [sys.executable, str(FORKED), "-m", "mindspore.parallel.cluster.run", f"--worker_num={workers}"]
    command += [f"--local_worker_num={workers}", f"--master_port={free_port()}", f"--log_dir={folder}"]
    command += ["--join=True", "--cluster_time_out=100", str(script), *map(str, arguments)]
    # msrun starts its workers with the python that it finds first.
    path = os.pathsep.join([str(FORKED_PYTHON.parent), os.environ["PATH"]])
    paths = {"PATH": path, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{TESTS}"}
    with subprocess.Popen(command, env=os.environ | paths, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        try:
            output, _ = job.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            for process in (*psutil.Process(job.pid).children(recursive=True), job):
                process.kill()
            output, _ = job.communicate()
            output += f"\nended after {limit_seconds} s".encode()
    logs = "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(folder.glob("worker_*.log")))
    assert job.returncode == 0, f"{output.decode()[-2000:]}\n{logs}"


def take_a_core() -> None:
    """Keeps a worker to a core of its own: MindSpore's threads poll, and those of two workers on the same cores make
    each other many times slower."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ.get("DEVICE_ID", "0")) % len(cores)]})
