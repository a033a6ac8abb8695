"""MindSpore's msrun, with the arguments of that, in a process that has imported MindSpore: fork_server.py."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fork_server import SOCKET_VARIABLE, run_forked  # noqa: E402

_FORKED = "forked"


def in_own_session(*arguments: Any, **more: Any) -> subprocess.Popen:
    """Starts a process in its own session: the fork server ends msrun with its whole group, to which the scheduler
    would belong."""
    return _popen(*arguments, **({} if "preexec_fn" in more else {"start_new_session": True}) | more)


if __name__ == "__main__":
    if sys.argv[1] != _FORKED:
        sys.exit(run_forked(os.environ[SOCKET_VARIABLE], [__file__, _FORKED, *sys.argv[1:]]))
    del sys.argv[1]
    _popen, subprocess.Popen = subprocess.Popen, in_own_session
    runpy.run_module("mindspore.parallel.cluster.run", run_name="__main__", alter_sys=True)
