"""The marker of a checkpoint, with the length and the checksum of each of its files, and reading a file against it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from trainer.input_files import open_file, read_bytes
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.storage.checksums import DIGEST_PATTERN, checksum_of_bytes, checksum_of_file
from trainer.storage.json_files import Count, JsonError, StrictModel, parse_json

MARKER = "COMPLETE"

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}$")]
Checksum = Annotated[str, Field(pattern=DIGEST_PATTERN)]


class Marker(StrictModel):
    """Content of the marker.

    Attributes:
        step: Optimizer steps done.
        save_number: Grows with every save of a run.
        file_bytes: Length of each file.
        checksums: Of each file, see `trainer.storage.checksums`; None in a checkpoint from before there were any.
        part_checksums: Of the parts of large files, in checkpoints of earlier versions; they are not compared.
        checksum: Of the marker itself without this field.
    """

    step: Count
    save_number: Count
    file_bytes: dict[FileName, Count]
    checksums: dict[FileName, Checksum] | None = None
    part_checksums: dict[FileName, list[Checksum]] | None = None
    checksum: Checksum | None = None

    @model_validator(mode="after")
    def is_consistent(self) -> Marker:
        if self.checksums is None:
            if self.checksum is not None or self.part_checksums is not None:
                raise ValueError("checksums is missing, and other checksums are there")
            return self
        if self.checksums.keys() != self.file_bytes.keys():
            raise ValueError("checksums and file_bytes name other files")
        if self.checksum != _checksum_of(self.model_dump(exclude={"checksum"}, exclude_unset=True)):
            raise ValueError("it has changed since it was written: its own checksum is another")
        return self


def marker_content(marker: Mapping[str, Any]) -> bytes:
    """The marker's file, for its fields without its own checksum."""
    return (json.dumps({**marker, "checksum": _checksum_of(marker)}, indent=1) + "\n").encode()


def _checksum_of(marker: Mapping[str, Any]) -> str:
    """The marker's own checksum, for its fields without it."""
    return checksum_of_bytes(json.dumps(marker, sort_keys=True).encode())


def matches_checksum(path: Path, marker: Marker, world: World = SINGLE_PROCESS) -> bool:
    """Whether the checksum of a file that was saved with this marker is that of the marker.

    The first rank of each host compares it. Where it finds another one it ends before the ranks of the job meet, and
    then no rank begins to train.

    Raises:
        OSError: It cannot be read.
    """
    if marker.checksums is None or world.local_rank > 0:
        return True
    return checksum_of_file(path) == marker.checksums[path.name]


def read_saved(path: Path, limit: int | None = None) -> bytes:
    """The content of a file, which is checked where it was saved with a checkpoint.

    Raises:
        OSError: As `trainer.input_files.read_bytes`, or the file is not what was saved.
    """
    content = read_bytes(path, limit)
    _check(path, len(content), lambda marker: checksum_of_bytes(content) == marker.checksums[path.name])
    return content


def check_saved(path: Path, world: World = SINGLE_PROCESS) -> None:
    """`read_saved` for a file that may be large, without its content; `world` as in `matches_checksum`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
    _check(path, size, lambda marker: matches_checksum(path, marker, world))


def _check(path: Path, size: int, is_same: Callable[[Marker], bool]) -> None:
    """Raises an OSError where a file was saved with a checkpoint, and not with this length and checksum."""
    try:
        marker = parse_json(read_bytes(path.with_name(MARKER)), Marker, MARKER)
    except FileNotFoundError:
        return
    except (OSError, JsonError) as error:
        raise OSError(errno.EIO, f"the checkpoint that it belongs to is damaged: {error}") from None
    has_checksum = path.name in (marker.checksums or {})
    if size != marker.file_bytes.get(path.name, size) or (has_checksum and not is_same(marker)):
        what = "length"
        if has_checksum:
            what = "checksum"
        raise OSError(errno.EIO, f"it is not what was saved with the checkpoint: its {what} differs")
