"""The messages between the launchers of several nodes, and the schema that they must fit."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.launch.terminal import printable

LONGEST_LINE = 2000
_MOST_LINES = 100

Line = Annotated[str, Field(max_length=LONGEST_LINE), AfterValidator(printable)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class NodeMessage(BaseModel):
    """A message between launchers, or an event for the supervisor of a node.

    Attributes:
        kind: hello: a node calls; welcome: node 0 accepts it, and the line may name the checkpoint to continue from;
            later, refused: node 0 does not accept it, and the line says why; start: all nodes are connected; beat: a
            heartbeat; moved: a heartbeat, and a rank made progress since the last one; failed: a node's part of the job
            failed; stop: a launcher received a signal, which is for all workers; done: the workers of the node, and
            from node 0 of all nodes, have ended well; note: lines to print, never sent.
        number: The exit code of a failure, or the signal.
        attempt: How often the job has been restarted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: Literal["hello", "welcome", "later", "refused", "start", "beat", "moved", "failed", "stop", "done", "note"]
    node: Count = 0
    worker_num: Count = 0
    attempt: Count = 0
    number: Annotated[int, Field(ge=0, le=255)] = 0
    lines: Annotated[list[Line], Field(max_length=_MOST_LINES)] = []

    @model_validator(mode="after")
    def _check_number(self) -> NodeMessage:
        if self.kind == "failed" and not self.number:
            raise ValueError("a failure has an exit code")
        if self.kind == "stop" and self.number not in (signal.SIGINT, signal.SIGTERM):
            raise ValueError("it is not a signal to end")
        return self


def parse(data: bytes) -> NodeMessage | None:
    """Parses the message of a line; returns None for anything else."""
    try:
        return NodeMessage.model_validate_json(data)
    except ValidationError:
        return None


def failure_message(exit_code: int, lines: Sequence[str]) -> NodeMessage:
    """Returns the message about a failure; long reports are cut."""
    return NodeMessage(kind="failed", number=exit_code, lines=[line[:LONGEST_LINE] for line in lines[:_MOST_LINES]])
