"""Finds the training files to try: named ones, those below a folder, and those that changed in a git repository."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.errors import UserError
from trainer.report.record import is_run_folder

_SUFFIXES = (".yaml", ".yml")
_TRAINING_KEYS = frozenset(
    ("model", "model_config", "train_dataset", "runner_config", "training", "lr_schedule", "lr_scheduler", "optimizer",
     "trainer", "parallel_config", "parallelism")
)  # fmt: skip
_MOST_BYTES = 1 << 20


class TrainingFile(NamedTuple):
    """A file to try."""

    path: Path
    old_text: str | None
    """Its text in the version with which it is compared; None if it is new there, or without a comparison."""


def find_training_files(names: Sequence[str], against: str | None) -> list[TrainingFile]:
    """Returns the files to try, each once, in order.

    Args:
        names: Files, and folders whose training files are taken. Empty: those that changed since `against`.
        against: A git revision. Files are compared with the last commit that it has in common with HEAD.

    Raises:
        UserError: A path does not exist, or git does not know the revision.
    """
    paths = [path for name in names for path in _paths_of(name)]
    base = ""
    if against is not None:
        base = _base(against)
        if not names:
            paths = _changed(base)
    unique = list(dict.fromkeys(Path(os.path.relpath(path)) for path in paths))
    return [TrainingFile(path, _old_text(path, base)) for path in unique]


def is_training_file(path: Path) -> bool:
    """Returns whether the keys of a YAML file, valid or not, are those of a training."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return False
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    if re.search(r"^run_mode:\s*['\"]?(predict|eval|chat|export)\b", text, re.MULTILINE):
        return False
    keys = set(re.findall(r"^([a-z_]+):", text, re.MULTILINE))
    return len(keys & _TRAINING_KEYS) >= 2


def _paths_of(name: str) -> Iterator[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        yield from _files_in(path)
    elif path.exists():
        yield path
    else:
        raise UserError("there is no such file or folder", where="argument FILE", value=name, fix="correct the path")


def _files_in(folder: Path) -> Iterator[Path]:
    """Yields the training files below a folder, without hidden folders and the folders of runs."""
    for root, folders, names in os.walk(folder):
        if is_run_folder(Path(root)):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(root, name) for name in sorted(names) if name.endswith(_SUFFIXES))
        yield from (path for path in paths if is_training_file(path))


def _base(revision: str) -> str:
    """Returns the last commit that a revision and HEAD have in common."""
    _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", revision=revision)
    try:
        return _git("merge-base", revision, "HEAD", revision=revision).strip()
    except UserError:  # a shallow clone, or histories without a common commit
        return revision


def _changed(base: str) -> list[Path]:
    """Returns the training files that were added or changed since a commit."""
    top = Path(_git("rev-parse", "--show-toplevel", revision=base).strip())
    listed = _git("diff", "--name-only", "-z", "--no-renames", "--diff-filter=AMT", base, "--", revision=base)
    return [top / name for name in listed.split("\0") if name.endswith(_SUFFIXES) and is_training_file(top / name)]


def _old_text(path: Path, base: str) -> str | None:
    if not base:
        return None
    try:
        return _git("show", f"{base}:./{path.name}", revision=base, folder=path.parent)
    except UserError:
        return None


def _git(*arguments: str, revision: str, folder: Path = Path()) -> str:
    """Returns what git prints; raises a UserError if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, errors="replace")
    except OSError as error:
        fix = "install git, or name the files"
        raise UserError(f"git cannot be started: {error.strerror}", where="flag --against", fix=fix) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["git knows no such revision"]
        fix = "name a commit or branch of this repository, and fetch it first"
        raise UserError(lines[-1], where="flag --against", key="--against", value=revision, fix=fix)
    return done.stdout
