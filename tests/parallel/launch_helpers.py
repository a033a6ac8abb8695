"""Starts launchers as a user does, with stand-ins for the workers and mostly for MindSpore's msrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
from fork_server import FORKED, FORKED_PYTHON, ensure_server

from trainer.launch.msrun import MSRUN_VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "run_trainer.py"
HERE = Path(__file__).resolve().parent
WORKER = HERE / "stand_in_worker.py"
MSRUN = HERE / "stand_in_msrun.py"
FORKED_MSRUN = HERE / "forked_msrun.py"
MARK = "RUN_TRAINER_TEST"

LIMIT_SECONDS = 15.0
"""A failure anywhere must have ended everything by then."""
_AGENTS_END_SECONDS = 10.0


_OF_THIS_THREAD = threading.local()


def _started() -> list[Launcher]:
    return _OF_THIS_THREAD.__dict__.setdefault("started", [])


def end_all() -> None:
    """Kills what is left of all launchers that this thread has started."""
    while _started():
        _started().pop().kill_family()


def _environment() -> dict[str, str]:
    """Returns the environment without the variable that pytest changes while tests run in threads."""
    return {name: os.environ[name] for name in os.environ if name != "PYTEST_CURRENT_TEST"}


class Launcher:
    """A running launcher, whose whole family of processes can be found.

    Args:
        folder: Working directory; logs are in its folder `logs`.
        command: Of the launcher.
        environment: What differs from this process.
    """

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str]) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.forks_msrun = environment.get(MSRUN_VARIABLE) == str(FORKED_MSRUN)
        _started().append(self)
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**_environment(), **environment, MARK: self.mark},
            )

    @property
    def printed(self) -> str:
        return self.out.read_text(encoding="utf-8")

    @property
    def errors(self) -> str:
        return self.err.read_text(encoding="utf-8")

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def log(self, rank: int) -> str:
        path = self.logs / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def facts(self, rank: int) -> dict:
        """Returns what a stand-in worker printed about itself."""
        first = self.log(rank).splitlines()[0]
        return json.loads(first.removeprefix("facts "))

    def family(self) -> list[psutil.Process]:
        """Returns every living process that descends from this launcher, itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def wait_until(self, holds: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not holds():
            if time.monotonic() > deadline:
                self.kill_family()
                said = [(each.process.poll(), each.printed[-500:], each.errors[-2000:]) for each in {self, *_started()}]
                raise AssertionError(f"it did not happen; exit code, output and errors of each launcher: {said}")
            time.sleep(0.05)

    def wait_for_step(self, step: int, ranks: range = range(2)) -> None:
        self.wait_until(lambda: all(f"did step {step}\n" in self.log(rank) for rank in ranks))

    def end(self, timeout_seconds: float = 60.0) -> int:
        """Waits for its end; nothing may be left then."""
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill_family()
            raise AssertionError(f"it did not end; {self.printed[-500:]!r} {self.errors[-2000:]!r}") from None
        # The agents of a forked msrun are children of the fork server, and not of the launcher: it releases them, and
        # they end by themselves. What the launcher has started itself ends before it.
        deadline = time.monotonic() + (_AGENTS_END_SECONDS if self.forks_msrun else 0)
        while (family := self.family()) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [process.cmdline() for process in family if process.is_running()]
        if left:
            self.kill_family()
        assert not left, left
        return code

    def end_soon(self) -> int:
        """Waits for its end, which comes within `LIMIT_SECONDS`."""
        began = time.monotonic()
        code = self.end()
        assert time.monotonic() - began < LIMIT_SECONDS
        return code

    def kill_family(self) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        if self.process.poll() is None:
            self.process.wait(10)


def launch(
    folder: Path,
    *words: object,
    options: tuple[object, ...] = (),
    hangup: signal.Handlers | None = None,
    forked: bool = True,
    **more: str,
) -> Launcher:
    """Launches two stand-in workers.

    Args:
        folder: Working directory.
        words: Arguments of the workers.
        options: Further ones of `launch`.
        hangup: The launcher's handler for SIGHUP when it starts; None: whatever these tests run under.
        forked: In a process of the fork server, which starts in half the time; the launcher is then not
            `Launcher.process` itself, but handles and ends as that does.
        more: Environment variables.
    """
    own = ["--nproc", 2, "--log_dir", "logs", "--script", WORKER, *options]
    command = [*(forked_python() if forked and hangup is None else [sys.executable]), PROGRAM, "launch", *own, *words]
    environment = {"RUN_TRAINER_MSRUN": str(MSRUN), **more}
    if hangup is not None:  # what the launcher inherits for SIGHUP
        inherit = f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.{hangup.name})"
        command = [sys.executable, "-c", f"{inherit}; os.execv(sys.argv[1], sys.argv[1:])", *command]
    return Launcher(folder, [str(word) for word in command], environment)


def forked_python() -> list[str]:
    ensure_server()
    return [sys.executable, str(FORKED)]


def python_program(forked: bool = True) -> str:
    """Returns the interpreter for msrun_launcher.sh; a forked process of it starts in half the time."""
    ensure_server()
    return str(FORKED_PYTHON) if forked else sys.executable


def call(folder: Path, *words: object) -> tuple[int, str, str]:
    """Runs another command of the trainer."""
    command = [*forked_python(), str(PROGRAM), *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr
