"""The real msrun: its command, its environment, a `python` for it that starts agents, and a port for its scheduler."""

from __future__ import annotations

import errno
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trainer.errors import RunError
from trainer.launch.agent import SOCKET_VARIABLE
from trainer.launch.arguments import PROGRAM, REPOSITORY, LaunchOptions
from trainer.launch.processes import die_with

# Isolated from the working directory and from PYTHON* variables: an agent needs the standard library and this package.
_AGENT = "import sys; sys.path.insert(0, {root!r}); from trainer.launch.agent import main; sys.exit(main())"
_TRAINER = "import sys; sys.path.insert(0, {root!r}); from trainer.cli.main import main; main()"

# MindSpore's scheduler only exchanges addresses. Its C++ part alone starts in a fifth of the time, in two thirds of the
# memory: so it listens before the first worker asks, which would otherwise wait some seconds before it asks again.
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


class Scratch:
    """A private folder with the launcher's socket and the `python` that msrun finds; `close` removes it."""

    def __init__(self) -> None:
        # The path of a socket has about 100 bytes at most; every system has /tmp.
        parent = tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) < _LONGEST_PARENT_BYTES else "/tmp"
        self._folder = tempfile.TemporaryDirectory(prefix="run_trainer-", dir=parent, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self.socket = self.path / "launcher"

    def write_shim(self) -> None:
        """Writes the `python` that msrun starts: it becomes an agent.

        Raises:
            RunError: Programs in this folder cannot run.
        """
        shim = self.path / "python"
        shim.write_text(f"#!/bin/sh\nexec {shlex.join(agent_command())}\n", encoding="utf-8", errors="surrogateescape")
        shim.chmod(0o700)
        if not os.access(shim, os.X_OK):
            raise RunError(
                f"programs in {self.path} cannot run, and msrun needs one there",
                fix="set TMPDIR to a folder on a file system that is not mounted with noexec",
            )

    def close(self) -> None:
        self._folder.cleanup()


def trainer_command() -> list[str]:
    """What runs this trainer in the launching interpreter; installed, it has no run_trainer.py beside it."""
    if PROGRAM.is_file():
        return [sys.executable, "-u", str(PROGRAM)]
    return [sys.executable, "-u", "-c", _TRAINER.format(root=str(REPOSITORY))]


def worker_command(options: LaunchOptions) -> list[str]:
    program = trainer_command() if options.script is None else [sys.executable, "-u", str(options.script)]
    return [*program, *options.arguments]


def agent_command() -> list[str]:
    return [sys.executable, "-I", "-c", _AGENT.format(root=str(REPOSITORY))]


def msrun_command(options: LaunchOptions, log_dir: Path) -> list[str]:
    """The command line of msrun. What the workers run, and with which arguments, the launcher tells their agents."""
    command = [sys.executable, "-m", "mindspore.parallel.cluster.run"]
    command += [
        f"--worker_num={options.worker_num}",
        f"--local_worker_num={options.local_worker_num}",
        f"--master_addr={options.master_addr}",
        f"--master_port={options.master_port}",
        f"--log_dir={log_dir}",
        "--join=True",
        f"--cluster_time_out={options.cluster_time_out}",
        f"--tail_worker_log={options.worker_num}",  # a rank that does not exist: the launcher follows the logs
    ]
    if options.nodes > 1:
        command.append(f"--node_rank={options.node_rank}")
    return [*command, options.script_name]


def start_msrun(command: list[str], scratch: Scratch, log: Path, more: Mapping[str, str]) -> subprocess.Popen:
    """Starts msrun, or what stands in for it, in a session of its own: a terminal's Ctrl-C is for the launcher."""
    me = os.getpid()
    search = f"{scratch.path}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, **more, "PATH": search, SOCKET_VARIABLE: str(scratch.socket)}
    with log.open("ab", buffering=0) as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: die_with(me),
        )


def listen_error(host: str, port: int) -> int:
    """The number of the error that a server would meet at this port now; 0 for none.

    Args:
        host: A name or address of this machine; empty for all of them.
        port: 0 for any.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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


def pick_free(host: str = "") -> int:
    """A free port that the system gives to no outgoing connection: nobody takes it by chance before it is used.

    Raises:
        RunError: There is none.
    """
    ports = range(_FIRST_PORT, max(_first_outgoing_port(), _FIRST_PORT + 1000))
    for _ in range(_ATTEMPTS):
        port = random.choice(ports)
        if not listen_error(host, port):
            return port
    raise RunError(
        f"no free port found among {ports.start} to {ports.stop - 1}",
        key="master_port",
        fix="give one with --master_port",
    )


def _first_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
