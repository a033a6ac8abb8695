"""The secret of a job with several nodes, by which their launchers know each other."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import stat
import tempfile
from pathlib import Path

from trainer.errors import RunError, UserError
from trainer.launch.processes import Identity, identity, is_alive

SECRET_VARIABLE = "RUN_TRAINER_SECRET"
"""Environment variable with the secret, the same on all nodes; without it node 0 makes a file."""

_LEAST_CHARACTERS = 16
_MAX_BYTES = 4096


def given_secret() -> bytes | None:
    """The secret of the environment; None where it has none.

    Raises:
        UserError: It is too short to be one.
    """
    text = os.environ.get(SECRET_VARIABLE, "")
    if text and len(text) < _LEAST_CHARACTERS:
        rule = f"must have at least {_LEAST_CHARACTERS} characters"
        raise UserError(rule, key=SECRET_VARIABLE, fix="make one with `openssl rand -hex 32`, the same on all nodes")
    return os.fsencode(text) or None


def secret_file(folder: Path, port: int) -> Path:
    """The file with the secret of the job whose launchers use this port, in a folder that all nodes share."""
    return folder.expanduser().absolute() / f".launchers-{port}.secret"


def make_secret(path: Path) -> bytes:
    """Writes a new secret to a file that only this user can read, and returns it. Files of launchers that were killed
    on this machine are removed.

    Raises:
        UserError: The folder cannot be written.
    """
    secret, unfinished = secrets.token_hex(32).encode("ascii"), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        descriptor, unfinished = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # of mode 600
        with open(descriptor, "wb") as file:
            file.write(b"\n".join((secret, json.dumps([_machine(), identity(os.getpid())]).encode("ascii"))))
        os.replace(unfinished, path)
    except OSError as error:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
        rule = f"the launchers' secret cannot be written there: {error.strerror or error}"
        fix = f"choose a folder you may write to, or set {SECRET_VARIABLE} to the same secret on all nodes"
        raise UserError(rule, key="output_dir", value=str(path.parent), fix=fix) from None
    return secret


def _machine() -> str:
    """Where the numbers of processes mean the same: this start of the system, and the container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()


def _remove_abandoned(folder: Path) -> None:
    """Removes secrets, and unfinished files of them, whose launchers ran on this machine and are gone. Of another
    machine's nobody here knows whether its job still runs."""
    for path in folder.glob(".launchers-*.secret*"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            if path.is_symlink() or not path.is_file() or path.stat().st_uid != os.getuid():
                continue
            machine, launcher = json.loads(path.read_bytes()[:_MAX_BYTES].partition(b"\n")[2])
            if machine == _machine() and not is_alive(Identity(*launcher)):
                path.unlink()


def read_secret(path: Path) -> bytes | None:
    """The secret that node 0 has made; None while there is none.

    Raises:
        RunError: Others could have read or written it.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                    return file.read(_MAX_BYTES).partition(b"\n")[0] or None
        except FileNotFoundError:
            raise
        except OSError as error:
            rule = f"the launchers' secret cannot be read: {error.strerror}"
        else:
            rule = "the launchers' secret is no file of this user alone (mode 600)"
        fix = f"remove it and start all nodes as one user, or set {SECRET_VARIABLE} on all nodes"
        raise RunError(rule, key="secret", value=str(path), fix=fix)
    return None
