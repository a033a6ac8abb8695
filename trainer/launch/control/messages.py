"""What the launchers of several nodes say to each other, and the only shapes in which they take it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.launch.terminal import printable

_LONGEST_LINE = 2000
_MOST_LINES = 100

Line = Annotated[str, Field(max_length=_LONGEST_LINE), AfterValidator(printable)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class Message(BaseModel):
    """A message between launchers, or what a supervisor is told about them.

    Attributes:
        kind: hello: a node calls; welcome: node 0 takes it in, and the line may name the checkpoint to go on from;
            later, refused: it does not, and the line says why; start: all nodes are connected; beat: the launcher is
            there; moved: it is, and a rank got on since the last one; failed: a node's part of the job failed; stop: a
            launcher received a signal, which is for all workers; done: the workers of the node, and from node 0 of all
            nodes, have ended well; note: lines to print, never sent.
        number: The exit code of a failure, or the signal.
        attempt: How often the job has been started again.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: Literal["hello", "welcome", "later", "refused", "start", "beat", "moved", "failed", "stop", "done", "note"]
    node: Count = 0
    worker_num: Count = 0
    attempt: Count = 0
    number: Annotated[int, Field(ge=0, le=255)] = 0
    lines: Annotated[list[Line], Field(max_length=_MOST_LINES)] = []

    @model_validator(mode="after")
    def _check_number(self) -> Message:
        if self.kind == "failed" and not self.number:
            raise ValueError("a failure has an exit code")
        if self.kind == "stop" and self.number not in (signal.SIGINT, signal.SIGTERM):
            raise ValueError("it is not a signal to end")
        return self


def parse(data: bytes) -> Message | None:
    """Returns the message of a line; None for anything else."""
    try:
        return Message.model_validate_json(data)
    except ValidationError:
        return None


def note(line: str) -> Message:
    return Message(kind="note", lines=[line[:_LONGEST_LINE]])


def failed(exit_code: int, lines: Sequence[str]) -> Message:
    """Returns the message about a failure; long reports are cut."""
    return Message(kind="failed", number=exit_code, lines=[line[:_LONGEST_LINE] for line in lines[:_MOST_LINES]])
