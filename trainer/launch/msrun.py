"""The real msrun: its command, its environment, a `python` for it that starts agents, and a port for its scheduler."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from trainer.errors import RunError
from trainer.launch.agent import SOCKET_VARIABLE
from trainer.launch.arguments import PROGRAM, REPOSITORY, LaunchOptions
from trainer.launch.control.secret import SECRET_VARIABLE
from trainer.launch.job import JobFiles
from trainer.launch.processes import start_session
from trainer.parallel.world import RENDEZVOUS_VARIABLE

MSRUN_VARIABLE = "RUN_TRAINER_MSRUN"
"""Environment variable with a Python file to start in the place of MindSpore's msrun, with the same arguments."""

ENCODING_VARIABLE = "PYTHONIOENCODING"
"""Environment variable that msrun gets from the launcher; workers get it as the user has set it."""

_CLUSTER_VARIABLES = ("MS_ROLE", "MS_WORKER_NUM", "MS_NODE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT", "RANK_SIZE")
"""What msrun sets for MindSpore's cluster."""

# Isolated from the working directory and from PYTHON* variables: an agent needs the standard library and this package.
_IN_REPOSITORY = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})"
_RUN_AGENT = f"{_IN_REPOSITORY}; from trainer.launch.agent import run_agent; sys.exit(run_agent())"
_AGENT = [sys.executable, "-I", "-c", _RUN_AGENT]
_RUN_AGENTS = f"{_IN_REPOSITORY}; from trainer.launch.agent import start_agents; start_agents({_AGENT!r}, sys.argv[1:])"
_TRAINER = f"{_IN_REPOSITORY}; from trainer.cli.main import program; program()"

# The scheduler only exchanges the addresses of workers. MindSpore's C++ part alone loads in a fifth of the time. So it
# listens before the first worker asks: a worker that finds no scheduler asks again only some seconds later.
SCHEDULER = """
import importlib.util, os, sys, types
try:
    package = types.ModuleType("mindspore")
    package.__path__ = list(importlib.util.find_spec("mindspore").submodule_search_locations)
    sys.modules["mindspore"] = package
    from mindspore._c_expression import init_cluster
except Exception:
    for name in [name for name in sys.modules if name.split(".")[0] == "mindspore"]:
        del sys.modules[name]
    from mindspore.communication import init as init_cluster
try:
    init_cluster()
except Exception as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
os._exit(0)
"""

_LONGEST_PARENT_BYTES = 70
_FIRST_PORT = 20_000
_ATTEMPTS = 200


def scratch_folder() -> tempfile.TemporaryDirectory:
    """Returns a private folder for the launcher's socket and the `python` that msrun finds."""
    # The path of a socket has about 100 bytes at most; every system has /tmp.
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) >= _LONGEST_PARENT_BYTES:
        parent = "/tmp"
    return tempfile.TemporaryDirectory(prefix="run_trainer-", dir=parent, ignore_cleanup_errors=True)


def socket_path(scratch: Path) -> Path:
    """Returns the path of the launcher's socket."""
    return scratch / "launcher"


def _write_shim(scratch: Path) -> None:
    """Writes the `python` that msrun starts: it becomes an agent.

    Raises:
        RunError: Programs in this folder cannot run.
    """
    shim = scratch / "python"
    shim.write_text(f"#!/bin/sh\nexec {shlex.join(_AGENT)}\n", encoding="utf-8", errors="surrogateescape")
    shim.chmod(0o700)
    if not os.access(shim, os.X_OK):
        rule = f"programs in {scratch} cannot run, and msrun needs one there"
        raise RunError(rule, fix="set TMPDIR to a folder on a file system that is not mounted with noexec")


def trainer_command() -> list[str]:
    """Returns the command that runs this trainer; an installed one has no run_trainer.py beside it."""
    if PROGRAM.is_file():
        return [sys.executable, "-u", str(PROGRAM)]
    return [sys.executable, "-u", "-c", _TRAINER]


def start_msrun(options: LaunchOptions, files: JobFiles, scratch: Path, device: str) -> subprocess.Popen:
    """Starts msrun, or its stand-in, in a session of its own, because a terminal's Ctrl-C is for the launcher.

    msrun does not learn what the workers run: the launcher tells their agents. Workers on the CPU of one node need
    nothing of MindSpore, which msrun takes seconds to load: their agents start without it. For a single worker only an
    agent starts.
    """
    search = f"{scratch}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": search, SOCKET_VARIABLE: str(socket_path(scratch))}
    environment.pop(SECRET_VARIABLE, None)  # for launchers alone
    environment.pop(RENDEZVOUS_VARIABLE, None)  # of a job that this one is part of
    if options.nodes == 1:
        environment[RENDEZVOUS_VARIABLE] = str(scratch / "rendezvous")
    without_msrun = device == "CPU" and options.nodes == 1 and not os.environ.get(MSRUN_VARIABLE)
    if without_msrun or not options.needs_msrun:
        for name in _CLUSTER_VARIABLES:  # of a job that this one is part of
            environment.pop(name, None)
    if options.needs_msrun and without_msrun:
        environment["MS_WORKER_NUM"] = str(options.worker_num)
        environment["MS_TOPO_TIMEOUT"] = str(options.cluster_time_out)
        command = [sys.executable, "-I", "-c", _RUN_AGENTS, *map(str, options.ranks)]
    elif options.needs_msrun:
        _write_shim(scratch)
        msrun = ["-m", "mindspore.parallel.cluster.run"]
        if os.environ.get(MSRUN_VARIABLE):
            msrun = [os.environ[MSRUN_VARIABLE]]
        node_rank = []
        if options.nodes > 1:
            node_rank = [f"--node_rank={options.node_rank}"]
        command = [
            sys.executable,
            *msrun,
            f"--worker_num={options.worker_num}",
            f"--local_worker_num={options.local_worker_num}",
            f"--master_addr={options.master_addr}",
            f"--master_port={options.master_port}",
            f"--log_dir={files.folder / 'msrun'}",  # of the agents, which print nothing
            "--join=True",
            f"--cluster_time_out={options.cluster_time_out}",
            f"--tail_worker_log={options.worker_num}",  # a rank that does not exist: the launcher follows the logs
            *node_rank,
            options.script_name,
        ]
        # msrun prints its command, which may contain any characters.
        environment[ENCODING_VARIABLE] = "utf-8:backslashreplace"
    else:
        command = _AGENT
        environment["RANK_ID"] = "0"
    with files.msrun_log.open("ab", buffering=0) as output:
        return start_session(command, environment, output)


def listen_error(host: str, port: int) -> int:
    """Returns the error number that a server would get at this port of this machine now, or 0 without error.

    Args:
        host: A name or an address, also in brackets ([::1]); empty: all addresses of this machine.
        port: 0: any port.
    """
    try:
        addresses = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing do no harm
            probe.bind(address)
            probe.listen()
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EADDRINUSE
    return 0


def pick_free_port(host: str = "") -> int:
    """Returns a free port below the range of outgoing connections, so that no other process takes it by chance.

    Raises:
        RunError: No port is free.
    """
    first_outgoing = 32_768
    with contextlib.suppress(OSError, ValueError, IndexError):
        setting = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        first_outgoing = int(setting.split()[0])
    ports = range(_FIRST_PORT, max(first_outgoing, _FIRST_PORT + 1000))
    for _ in range(_ATTEMPTS):
        port = random.choice(ports)
        if not listen_error(host, port):
            return port
    rule = f"no free port found among {ports.start} to {ports.stop - 1}"
    raise RunError(rule, key="master_port", fix="give one with --master_port")
