"""The secret of a job with several nodes, by which their launchers know each other."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from trainer.errors import RunError, UserError

SECRET_VARIABLE = "RUN_TRAINER_SECRET"
"""Environment variable with the secret, the same on all nodes; without it node 0 makes a file."""

_FEWEST_CHARACTERS = 16


def secret_of_environment() -> bytes:
    """Returns the secret of the environment; empty without one.

    Raises:
        UserError: It is too short to be one.
    """
    text = os.environ.get(SECRET_VARIABLE, "")
    if text and len(text) < _FEWEST_CHARACTERS:
        rule = f"must have at least {_FEWEST_CHARACTERS} characters"
        raise UserError(rule, key=SECRET_VARIABLE, fix="make one with `openssl rand -hex 32`, the same on all nodes")
    return os.fsencode(text)


def make_secret(path: Path) -> bytes:
    """Writes a new secret to a file that only this user can read, and returns it.

    Raises:
        UserError: The folder cannot be written.
    """
    secret = secrets.token_hex(32).encode("ascii")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of an earlier job
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
    except OSError as error:
        rule = f"the launchers' secret cannot be written there: {error.strerror or error}"
        fix = f"choose a folder you may write to, or set {SECRET_VARIABLE} to the same secret on all nodes"
        raise UserError(rule, key="output_dir", value=str(path.parent), fix=fix) from None
    return secret


def read_secret(path: Path) -> bytes | None:
    """Returns the secret that node 0 has made, or None before that.

    Raises:
        RunError: Others could have read or written it.
    """
    rule = "the launchers' secret is no file of this user alone (mode 600)"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
                return file.read() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        rule = f"the launchers' secret cannot be read: {error.strerror}"
    fix = f"remove it and start all nodes as one user, or set {SECRET_VARIABLE} on all nodes"
    raise RunError(rule, key="secret", value=str(path), fix=fix)
