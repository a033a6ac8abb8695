"""What the launchers of several nodes say to each other, and the only shapes in which they take it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from trainer.launch.terminal import printable

_LONGEST_LINE = 2000
_MOST_LINES = 100

Line = Annotated[str, Field(max_length=_LONGEST_LINE), AfterValidator(printable)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Hello(_Message):
    """Of a node that connects."""

    kind: Literal["hello"] = "hello"
    node: Count
    worker_num: Count
    attempt: Count  # how often the job has been started again


class Welcome(_Message):
    """Node 0 takes the node in.

    Attributes:
        resume: The checkpoint from which a job that starts again continues; empty: as its arguments say.
    """

    kind: Literal["welcome"] = "welcome"
    resume: Line = ""


class Start(_Message):
    """The launchers of all nodes are connected, so each starts its workers."""

    kind: Literal["start"] = "start"


class Refused(_Message):
    """Node 0 does not take the node in.

    Attributes:
        for_now: Whether the node is to call again.
    """

    kind: Literal["refused"] = "refused"
    reason: Line
    for_now: bool = False


class Beat(_Message):
    """The launcher is there.

    Attributes:
        moved: Whether a rank has shown since the last one that it gets on, so that no node takes its own for hanging.
    """

    kind: Literal["beat"] = "beat"
    moved: bool = False


class Failed(_Message):
    """A node's part of the job failed, which ends the job."""

    kind: Literal["failed"] = "failed"
    exit_code: Annotated[int, Field(ge=1, le=255)]
    lines: Annotated[list[Line], Field(max_length=_MOST_LINES)]


class Stop(_Message):
    """A launcher received a signal, which is for all workers.

    Attributes:
        node: The one that received it.
    """

    kind: Literal["stop"] = "stop"
    node: Count
    number: Literal[signal.SIGINT.value, signal.SIGTERM.value]


class Done(_Message):
    """The workers of a node have ended well."""

    kind: Literal["done"] = "done"


class Finished(_Message):
    """Node 0: those of all nodes have."""

    kind: Literal["finished"] = "finished"


Message = Annotated[
    Hello | Welcome | Start | Refused | Beat | Failed | Stop | Done | Finished,
    Field(discriminator="kind"),
]
_ANY: TypeAdapter[Message] = TypeAdapter(Message)


def parse(data: bytes) -> Message | None:
    """The message of a line; None for anything else."""
    try:
        return _ANY.validate_json(data)
    except ValidationError:
        return None


def failed(exit_code: int, lines: Sequence[str]) -> Failed:
    """The message about a failure; long reports are cut."""
    return Failed(exit_code=exit_code, lines=[line[:_LONGEST_LINE] for line in lines[:_MOST_LINES]])
