"""Reads files that a user names, and checks paths; a file that cannot be read is an error at once, never a wait.

What a command writes replaces nothing that is there already, unless the user adds `--force`.

Opening a pipe waits for its writer, and a device such as /dev/zero never ends: both are refused before they are opened.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from trainer.errors import UserError, shorten_repr

# bytes, of Linux
_LONGEST_NAME = 255
_LONGEST_PATH = 4095

SPECIAL = "a pipe, a socket or a device, not a file"
"""Of what `open_file` refuses and `is_special` finds, for a message."""


def open_file(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading.

    Raises:
        OSError: The path does not exist, is a folder, a pipe, a socket or a device, or may not be read.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a zero byte, or half a character
        raise OSError(errno.EINVAL, f"not a file name: {error}") from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, SPECIAL)
    return open(path, "rb")


def read_bytes(path: str | Path, limit: int | None = None) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: The file cannot be read, see `open_file`, or is larger than `limit` bytes.
    """
    with open_file(path) as stream:
        if limit is None:
            return stream.read()
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes")
    return content


def is_special(path: Path) -> bool:
    """Returns whether a path is there and neither a file nor a folder, so that opening it may wait for ever."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def path_error(path: str) -> str:
    """Returns why a text cannot be a path on any disk; empty if it can.

    `~name` must be a user of this machine: otherwise it would be a folder of that name in the working directory.
    """
    if "\0" in path:
        return "a path cannot have a zero byte"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "a path cannot have half a character (a lone surrogate)"
    if path.startswith("~") and os.path.expanduser(path).startswith("~"):
        return f"this machine has no user {shorten_repr(path[1:].partition('/')[0])}"
    if len(encoded) > _LONGEST_PATH:
        return f"a path has at most {_LONGEST_PATH} bytes"
    if max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        return f"a name in a path has at most {_LONGEST_NAME} bytes"
    return ""


def replace_surrogates(text: str) -> str:
    """Replaces lone surrogates, which stand for bytes of a name that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


def user_path(path: str | Path, where: str, key: str = "") -> Path:
    """Converts an argument of the command line to a path, and expands its ``~``.

    Raises:
        UserError: The text cannot be a path.
    """
    if rule := path_error(str(path)):
        raise UserError(rule, where=where, key=key, value=str(path), fix="write another path")
    return Path(path).expanduser()


def require_new(path: Path, flag: str, force: bool) -> None:
    """Checks that an output replaces nothing; an empty folder is nothing.

    Args:
        force: The user lets the command replace what is there.

    Raises:
        UserError: There is something already.
    """
    if force or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    fix = f"give another {flag}, or add --force to replace it"
    raise UserError("is there already", where=f"flag {flag}", key=flag, value=str(path), fix=fix)


def write_output(path: Path, text: str, flag: str) -> None:
    """Writes a text file that a flag names.

    Raises:
        UserError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise UserError(rule, where=f"flag {flag}", key=flag, value=str(path), fix="name another file") from None


def links_out_of(folder: Path, paths: Iterable[Path]) -> list[str]:
    """Returns a rule for each of some paths in an output folder that is a link out of it: nothing is written there."""
    inside = os.path.realpath(folder)
    targets = {path: os.path.realpath(path) for path in paths if path.is_symlink()}
    return [
        f"{path.relative_to(folder)} in it is a link to {target}, and nothing is written outside of output_dir"
        for path, target in targets.items() if os.path.commonpath([inside, target]) != inside
    ]


def unwritable_reason(folder: str | Path) -> str:
    """Returns why nothing can be created in an existing folder: ``Read-only file system``; empty if it can be."""
    if os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return ""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    return os.strerror(errno.EACCES)


def missing_path_reason(path: str | Path) -> str:
    """Returns why a path cannot be found, to follow the words "the path": ``does not exist``; empty if it exists."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            return "is a broken link"
        return "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be reached ({getattr(error, 'strerror', None) or error})"
    return ""


def missing_path_fix(path: str | Path, fix: str) -> str:
    """Returns what to do about a path that does not exist: the existing path that it is most like, or else `fix`."""
    guess = _similar_path(Path(os.path.expanduser(path)))
    if guess is None:
        return fix
    return f"you probably mean {guess}"


def _similar_path(path: Path) -> Path | None:
    """Returns the path with its first missing name replaced by one that is there and has the same numbers; or None."""
    present = path
    missing: list[str] = []
    while not os.path.lexists(present) and present != present.parent:
        missing.insert(0, present.name)
        present = present.parent
    if not missing:
        return None
    try:
        names = os.listdir(present)
    except OSError:
        return None
    name = missing[0]
    numbers = re.findall(r"\d+", name)  # step-00000050 is no misspelt step-00000100
    guesses = get_close_matches(name, [other for other in names if re.findall(r"\d+", other) == numbers], n=1)
    for guess in guesses:
        similar = present.joinpath(guess, *missing[1:])
        if similar.exists():
            return similar
    return None
