"""The folder in which the trainer keeps what it can make again: token files, compiled libraries."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def user_cache() -> Path:
    """Returns the user's folder, which need not exist: ``$XDG_CACHE_HOME/run_trainer`` or ``~/.cache/run_trainer``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "run_trainer"


def build_once(target: Path, build: Callable[[Path], None]) -> None:
    """Makes a file or folder unless it is there; `build` writes it to the path that it takes.

    Several processes may build at once: each builds in its own folder, and renames what is complete.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as name:
        built = Path(name) / target.name
        build(built)
        try:
            built.replace(target)
        except OSError:  # a folder does not replace that of another process
            if not target.exists():
                raise
