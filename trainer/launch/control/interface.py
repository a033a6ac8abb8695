"""The other nodes as a supervisor sees them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from trainer.launch.wire import Lines


class Event(NamedTuple):
    """What another node says, or what happens to it."""

    kind: Literal["failed", "stop", "note", "moved"]  # failed: its part of the job failed, or it is lost
    number: int  # the exit code, or the signal for all workers
    lines: list[str]  # to print; of a signal, who received it


class Nodes(Protocol):
    """The other nodes of a job."""

    @property
    def sources(self) -> Sequence[Lines | socket.socket]:
        """The sockets to wait for."""

    @property
    def connected(self) -> bool:
        """Whether the launchers of all nodes are, so that the workers may start."""

    @property
    def finished(self) -> bool:
        """Whether all nodes are done, as far as this one has to wait for that."""

    @property
    def resume(self) -> str:
        """The checkpoint from which node 0 lets a job that starts again continue; empty: as its arguments say."""

    def poll(self, now: float) -> list[Event]:
        """Sends a heartbeat and receives what the others sent. To be called a few times a second."""

    def moved(self) -> None:
        """Tells the others, with the next heartbeat, that a rank of this node gets on: theirs may be waiting for it."""

    def failed(self, exit_code: int, lines: list[str]) -> None:
        """Tells the others that this node's part of the job failed."""

    def stop(self, number: int) -> None:
        """Tells the others of a signal for all workers."""

    def done(self) -> None:
        """Tells the others that the workers of this node have ended well."""

    def close(self) -> None:
        """Ends the connections once the others have received everything."""


class NoOtherNodes:
    """A job on one node: nobody listens."""

    sources: Sequence[Lines | socket.socket] = ()
    connected = True

    def __init__(self, resume: str = "") -> None:
        self.resume = resume
        self.finished = False

    def poll(self, now: float) -> list[Event]:
        return []

    def moved(self) -> None:
        pass

    def failed(self, exit_code: int, lines: list[str]) -> None:
        pass

    def stop(self, number: int) -> None:
        pass

    def done(self) -> None:
        self.finished = True

    def close(self) -> None:
        pass
