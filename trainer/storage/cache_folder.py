"""The folder in which the trainer keeps what it can make again: token files, compiled libraries."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Returns the user's folder, which need not exist: ``$XDG_CACHE_HOME/run_trainer`` or ``~/.cache/run_trainer``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "run_trainer"
