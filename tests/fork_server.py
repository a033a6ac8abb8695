"""Forks processes of the trainer from one that has imported MindSpore: 2.5 CPU seconds of each are saved.

    python tests/fork_server.py serve SOCKET          imports, then forks a process for each request, until it is ended
    python tests/fork_server.py SCRIPT [arguments]    runs a script, for example run_trainer.py, in such a process
    python tests/fork_server.py -m pytest [...]       runs a module
    python tests/fork_server.py at SOCKET [...]       either of the two, by another server than that of the environment

The process of such a command stands for the forked one, which has the same input, output, folder, environment, cores
and exit code. It hands signals on, and the other does not outlive it. Not for tests of what the two cannot share: a
terminal, SIGSTOP, what happens while MindSpore is imported, and variables that MindSpore reads then.

Such a command imports little of the standard library, so it starts within some hundredths of a second: what only the
server needs is imported where it is used.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import selectors

FORKED = Path(__file__).resolve()
"""Stands for Python in a command: [sys.executable, FORKED, script, ...]."""
FORKED_PYTHON = FORKED.parent / "forked" / "python"
"""The same as one program, whose name is that of an interpreter."""
REPOSITORY = FORKED.parents[1]
SOCKET_VARIABLE = "RUN_TRAINER_FORK_SERVER"
"""Environment variable with the path of the server's socket."""
_PYTHON_VARIABLE = "RUN_TRAINER_FORK_PYTHON"  # the interpreter that FORKED_PYTHON runs

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
USAGE_VARIABLE = "RUN_TRAINER_FORK_USAGE"
"""Environment variable with a file that gets the `End` of each process, as a line of JSON."""
_READY = b"ready\n"
# While MindSpore compiles, glibc spends a tenth of the time on freed memory; with longer lists of it, a thirtieth. But
# a thread then keeps up to 65,535 blocks of each size that it frees and another one allocates: a training grows by
# 0.1 MB a step, and by nothing without it. What measures memory must not start here. With huge pages the tests that
# compile take 6 % less.
_TUNABLES = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535:glibc.malloc.hugetlb=1"}


class End(NamedTuple):
    """How a process ended and what it used, the processes that it started too."""

    code: int
    cpu_seconds: float
    memory_gb: float


def ensure_server() -> None:
    """Starts the server of this process and those that it starts, if there is none yet; ends it with this process."""
    if not os.environ.get(SOCKET_VARIABLE):
        os.environ[SOCKET_VARIABLE] = start_server(os.environ)
    os.environ[_PYTHON_VARIABLE] = sys.executable


def start_server(environment: Mapping[str, str]) -> str:
    """Starts a server, which ends with this process; returns the path of its socket."""
    import subprocess
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="fork_server-")
    path = os.path.join(folder.name, "socket")
    server = subprocess.Popen(
        [sys.executable, FORKED, "serve", path], env={**_TUNABLES, **environment}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip

    def end() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    assert server.stdout.readline() == _READY, "the fork server did not start"
    return path


def serve(path: str) -> None:
    """Serves requests until it is killed, or its input ends: that is a pipe from the process that started it.

    A line on standard output says that it listens.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # each process gets the cores of its client
    sys.path[0] = str(REPOSITORY)
    atexit.register(_end_at_once)  # the first that is registered runs last
    import gc
    import runpy  # noqa: F401  here, for all processes
    import selectors
    import shutil

    import mindspore  # noqa: F401  here, since the trainer imports it late
    import pytest  # noqa: F401

    import trainer.cli.main
    import trainer.run.loop
    import trainer.run.session  # noqa: F401
    from trainer.config import parse_config

    parse_config("any.yaml", "{model: {model_config: {num_layers: 1}}}")  # builds the validators, once for all
    gc.freeze()  # a process that collects garbage need not copy what it shares
    gc.set_threshold(20_000, 20, 20)  # as in conftest.py
    awake, wake = os.pipe()
    for descriptor in (awake, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    clients: dict[int, socket.socket] = {}
    listener, selector = socket.socket(socket.AF_UNIX), selectors.DefaultSelector()
    listener.bind(path)
    listener.listen(64)
    selector.register(listener, selectors.EVENT_READ)
    selector.register(awake, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    os.write(1, _READY)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                request, descriptors = _request(client)
                pid = os.fork()
                if not pid:
                    for one in (listener, selector, client, *clients.values()):
                        one.close()
                    os.close(awake)
                    os.close(wake)
                    return _become(request, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                clients[pid] = client
                selector.register(client, selectors.EVENT_READ, pid)
            elif key.fileobj == 0:
                for pid in clients:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
                return os._exit(0)
            elif key.fileobj == awake:
                with contextlib.suppress(BlockingIOError):
                    os.read(awake, 1 << 12)
                _report_ends(clients, selector)
            else:
                _pass_on(key.fileobj, key.data, selector)


_exit_codes: list[int] = []
"""That of a forked process, when its script has ended."""


def _end_at_once() -> None:
    """Ends the process without taking MindSpore's modules apart, which costs 0.3 CPU seconds and copies shared
    memory."""
    if _exit_codes:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_exit_codes[0])


def _request(client: socket.socket) -> tuple[dict, list[int]]:
    """Receives the request of a client, with its input, output and error output."""
    data, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 20)
    return json.loads(data), descriptors


def _become(request: dict, descriptors: list[int]) -> None:
    """Makes the new process what its client stands for, and runs the script."""
    import runpy

    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *HANDED_ON):
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for descriptor, target in zip(descriptors, range(3), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["cores"]:
        os.sched_setaffinity(0, request["cores"])
    sys.stdout.reconfigure(write_through=request["unbuffered"])
    script, *arguments = request["words"]
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    try:
        if script == "-m":
            sys.argv, sys.path[:1] = arguments, [os.getcwd(), *more]
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:1] = [script, *arguments], [str(Path(script).resolve().parent), *more]
            runpy.run_path(script, run_name="__main__")
        _exit_codes.append(0)
    except SystemExit as ending:
        _exit_codes.append(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
        raise
    except Exception:
        _exit_codes.append(1)
        raise


def _report_ends(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Tells clients that their processes have ended, and how."""
    while clients:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if not pid:
            return
        client = clients.pop(pid)
        end = End(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)
        with contextlib.suppress(OSError):
            client.sendall(json.dumps(end).encode() + b"\n")
        with contextlib.suppress(KeyError):
            selector.unregister(client)
        client.close()


def _pass_on(client: socket.socket, pid: int, selector: selectors.BaseSelector) -> None:
    """Sends the signals that a client got; the end of a client kills its process."""
    data = b""
    with contextlib.suppress(OSError):
        data = client.recv(64)
    if not data:
        selector.unregister(client)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for number in data:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def run_forked(path: str, words: list[str]) -> int:
    """Runs a script in a process of the server at `path`; returns its exit code, or ends by the signal that ended it.
    """
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        ignored = [number for number in HANDED_ON if signal.getsignal(number) is signal.SIG_IGN]
        request = {
            "words": words,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "ignored": ignored,
            "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
            "unbuffered": sys.stdout.write_through,
        }
        for number in HANDED_ON:  # the process decides what it ignores
            signal.signal(number, lambda number, frame: server.send(bytes([number])))
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        answer = b""
        while not answer.endswith(b"\n"):
            part = server.recv(64)
            if not part:
                raise ConnectionError("the fork server has ended")
            answer += part
    if usage_file := os.environ.get(USAGE_VARIABLE):
        with open(usage_file, "ab") as file:
            file.write(answer)
    code = End(*json.loads(answer)).code
    if code < 0:
        if -code in HANDED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    elif sys.argv[1] == "at":
        sys.exit(run_forked(sys.argv[2], sys.argv[3:]))
    else:
        sys.exit(run_forked(os.environ[SOCKET_VARIABLE], sys.argv[1:]))
