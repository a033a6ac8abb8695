"""Finds the C compiler, which makes functions of the array engine faster (`trainer.arrays.compiled`)."""

from __future__ import annotations

import os
import shlex
import shutil

_COMPILERS = ("cc", "gcc", "clang")


def find_compiler() -> list[str]:
    """Returns the command of the C compiler; empty where there is none.

    It is that of the environment variable CC, as for make, or the first of cc, gcc and clang. An empty CC means none.
    """
    chosen = os.environ.get("CC")
    if chosen is not None:
        command = shlex.split(chosen)
        if command and shutil.which(command[0]):
            return command
        return []
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    return []
