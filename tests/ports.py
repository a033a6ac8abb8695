"""Gives each caller ports that no other test gets, in whatever process it runs."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from trainer.launch.msrun import listen_error

_PORTS = range(20_000, 32_766, 2)
"""Below the ports of outgoing connections."""


def free_port() -> int:
    """Returns a port at which, as at the next one, nobody listens; for about 6,000 calls nobody else gets either.

    A random port that is free now may be given to a second test before the first one listens: a launcher takes a
    second to start, several tests run at once, and a job of several nodes listens at the next port as well.
    """
    counter = Path(tempfile.gettempdir()) / f"run-trainer-test-ports-{os.getuid()}"
    with counter.open("a+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        turn = int(file.read() or 0)
        while any(listen_error("", _PORTS[turn % len(_PORTS)] + offset) for offset in (0, 1)):
            turn += 1
        file.truncate(0)
        file.write(str(turn + 1))
    return _PORTS[turn % len(_PORTS)]
