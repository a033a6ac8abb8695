"""A job on two "hosts": two network namespaces joined by a cable, the nine-argument launcher on each, 2 + 2 workers.

Each host has addresses, ports, a loopback and a folder of its own: what one knows of the other went over the cable.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_helpers import MSRUN

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = REPOSITORY / "scripts" / "msrun_launcher.sh"
PORT = 8118
LIMIT_SECONDS = 15
"""A failure anywhere ends the job everywhere within this."""

# Sums the ranks over both hosts, says so, and goes on until the file `stop` is there.
_SUMS = """
import os, sys, time
from pathlib import Path
import numpy as np
from mindspore import Tensor, ops, set_device
from mindspore.communication import get_group_size, get_rank, init

set_device("CPU")
init()
total = ops.AllReduce()(Tensor(np.array([get_rank() + 1.0], np.float32)))
print(f"rank {get_rank()} of {get_group_size()} on {os.environ['DEVICE_ID']}: {total.asnumpy()[0]:g}", flush=True)
Path(sys.argv[1], f"ready-{get_rank()}").touch()
while not Path(sys.argv[1], "stop").exists():
    time.sleep(0.05)
"""
_TALKS = "import os\nprint(os.environ['RANK_ID'], os.environ['MS_WORKER_NUM'], os.getcwd(), flush=True)\n"


@dataclass
class Host:
    """One end of the cable."""

    name: str
    address: str
    folder: Path
    node: int

    def start(self, script: Path, *arguments: object, master: str, real: bool = False) -> subprocess.Popen:
        """Starts the launcher there, as its user would, with nine arguments, and with MindSpore's msrun if `real`."""
        workers = 4
        order = " ".join([str(script), *map(str, arguments)])
        words = [order, workers, workers // 2, master, PORT, self.node, "logs", True, 60]
        command = ["ip", "netns", "exec", self.name, "bash", str(LAUNCHER), *map(str, words)]
        environment = {**os.environ, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
        environment["RUN_TRAINER_SECRET"] = "that both hosts know"  # they share no folder
        environment |= {} if real else {"RUN_TRAINER_MSRUN": str(MSRUN)}
        with (self.folder / "terminal").open("wb") as terminal:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
            )

    @property
    def terminal(self) -> str:
        return (self.folder / "terminal").read_text(errors="replace")

    def worker_pids(self) -> list[int]:
        state = json.loads((self.folder / "logs" / f"job-node-{self.node}" / "state.json").read_text())
        return [worker["pid"] for worker in state["workers"]]

    def pids(self) -> list[int]:
        """Returns every process on this host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(word) for word in found.stdout.split()]

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank-{rank}.log").read_text(errors="replace")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def _join(first: str, second: str, addresses: list[str]) -> None:
    """Makes two namespaces and the cable between them."""
    for name in (first, second):
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
    for name, address in zip((first, second), addresses, strict=True):
        _ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
        _ip("-n", name, "link", "set", "cable", "up")


@pytest.fixture(scope="module")
def cabled() -> Iterator[tuple[list[str], list[str]]]:
    """Names and addresses of two hosts; skips where this user may not make network namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2: there is no `ip` here")
    names, addresses = [f"run-trainer-{os.getpid()}-{letter}" for letter in "ab"], ["10.213.77.1", "10.213.77.2"]
    try:
        _join(*names, addresses)
    except (OSError, subprocess.SubprocessError) as error:
        _unplug(names)
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        pytest.skip(f"network namespaces are not permitted here: {reason}")
    yield names, addresses
    _unplug(names)


def _unplug(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.fixture
def hosts(cabled: tuple[list[str], list[str]], tmp_path: Path) -> Iterator[list[Host]]:
    """Provides both hosts with a folder each; afterwards nothing runs on them."""
    made = []
    for node, (name, address) in enumerate(zip(*cabled, strict=True)):
        folder = tmp_path / f"host-{node}"
        folder.mkdir()
        made.append(Host(name, address, folder, node))
    yield made
    for host in made:
        for pid in host.pids():
            os.kill(pid, signal.SIGKILL)


def _wait(condition: Callable[[], bool], seconds: float, hosts: list[Host], what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        told = "\n".join(f"--- node {host.node}\n{host.terminal[-3000:]}" for host in hosts)
        assert time.monotonic() < deadline, f"{what} took more than {seconds:.0f} s\n{told}"
        time.sleep(0.1)


def _script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def _end(jobs: list[subprocess.Popen], hosts: list[Host], seconds: float) -> list[int]:
    """Waits for both launchers; their exit codes."""
    _wait(lambda: all(job.poll() is not None for job in jobs), seconds, hosts, "the end of both launchers")
    return [job.returncode for job in jobs]


@pytest.mark.slow
def test_killing_the_workers_of_one_host_ends_those_of_the_other(hosts: list[Host], tmp_path: Path) -> None:
    script, (first, second) = _script(tmp_path, _SUMS), hosts
    jobs = [host.start(script, tmp_path, master=first.address, real=True) for host in hosts]
    _wait(lambda: len(list(tmp_path.glob("ready-*"))) == 4, 150, hosts, "the start of four workers")
    for host, ranks in ((first, (0, 1)), (second, (2, 3))):
        for place, rank in enumerate(ranks):
            assert f"rank {rank} of 4 on {place}: 10\n" in host.log(rank)
    assert not (first.folder / "logs" / "rank-2.log").exists()
    began = time.monotonic()
    for pid in second.worker_pids():
        os.kill(pid, signal.SIGKILL)
    codes = _end(jobs, hosts, LIMIT_SECONDS)
    assert time.monotonic() - began < LIMIT_SECONDS
    assert codes == [128 + signal.SIGKILL] * 2, "the exit code is that of the first failure, on both hosts"
    for host in hosts:  # both say who failed first, and where its log is
        assert re.search("error: rank [23] failed first: ended by SIGKILL", host.terminal), host.terminal
        assert f"{second.folder}/logs/rank-" in host.terminal
    assert "The workers of this node ended because of that" in first.terminal
    _wait(lambda: not first.pids() and not second.pids(), 3, hosts, "the end of every process")


@pytest.mark.slow
def test_both_hosts_end_well_and_know_their_ranks(hosts: list[Host], tmp_path: Path) -> None:
    script, (first, second) = _script(tmp_path, _TALKS), hosts
    later = second.start(script, master=first.address)  # a node need not wait for node 0 to start
    time.sleep(1)
    assert _end([first.start(script, master=first.address), later], hosts, 60) == [0, 0]
    for host, ranks in ((first, (0, 1)), (second, (2, 3))):
        assert [host.log(rank) for rank in ranks] == [f"{rank} 4 {host.folder}\n" for rank in ranks]
    assert not first.pids() and not second.pids()


@pytest.mark.slow
def test_a_cut_cable_ends_the_job_on_both_hosts(hosts: list[Host], tmp_path: Path) -> None:
    script = _script(tmp_path, "import sys, time\nfrom pathlib import Path\n"
                     "Path(sys.argv[1], f'ready-{time.time_ns()}').touch()\ntime.sleep(600)\n")  # fmt: skip
    jobs = [host.start(script, tmp_path, master=hosts[0].address) for host in hosts]
    _wait(lambda: len(list(tmp_path.glob("ready-*"))) == 4, 60, hosts, "the start of four workers")
    _ip("-n", hosts[1].name, "link", "set", "cable", "down")
    try:
        codes = _end(jobs, hosts, LIMIT_SECONDS + 5)
    finally:
        _ip("-n", hosts[1].name, "link", "set", "cable", "up")
    assert all(code not in (0, None) for code in codes), codes
    assert "is lost" in hosts[0].terminal and "is lost" in hosts[1].terminal
    _wait(lambda: not hosts[0].pids() and not hosts[1].pids(), 3, hosts, "the end of every process")
