"""TCP ports of this host: whether one is free, and one that is."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from trainer.errors import RunError

_FIRST_PORT = 20_000
_ATTEMPTS = 200


def is_free(port: int, host: str = "") -> bool:
    """Whether a server could listen there now.

    Args:
        port: Its number.
        host: A name or address of this machine; empty for all of them.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are just closing do no harm
        try:
            probe.bind(address)
            probe.listen()
        except OSError:
            return False
    return True


def pick_free(host: str = "") -> int:
    """A free port that the system gives to no outgoing connection: nobody takes it by chance before it is used.

    Raises:
        RunError: There is none.
    """
    ports = range(_FIRST_PORT, max(_first_of_outgoing(), _FIRST_PORT + 1000))
    for _ in range(_ATTEMPTS):
        port = random.choice(ports)
        if is_free(port, host):
            return port
    raise RunError(
        f"no free port found among {ports.start} to {ports.stop - 1}",
        key="master_port",
        fix="give one with --master_port",
    )


def _first_of_outgoing() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
