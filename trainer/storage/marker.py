"""The completion marker of a checkpoint, with the length and checksum of each file, and reading files against it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
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
    """The content of the marker.

    Attributes:
        step: Optimizer steps done.
        save_number: Grows with every save of a run.
        file_bytes: Length of each file.
        checksums: Checksum of each file; None in a checkpoint of a version that did not compute them.
        part_checksums: Checksums of ranges of large files, in checkpoints of earlier versions; they are not compared.
        checksum: Checksum of the marker itself, without this field.
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
                raise ValueError("checksums is missing, but other checksums are present")
            return self
        if self.checksums.keys() != self.file_bytes.keys():
            raise ValueError("checksums and file_bytes name different files")
        if self.checksum != _checksum_of(self.model_dump(exclude={"checksum"}, exclude_unset=True)):
            raise ValueError("it was modified: its field checksum does not match its content")
        return self


def marker_content(marker: Mapping[str, Any]) -> bytes:
    """Returns the content of the marker's file, for the marker's fields without `checksum`."""
    return (json.dumps({**marker, "checksum": _checksum_of(marker)}, indent=1) + "\n").encode()


def _checksum_of(marker: Mapping[str, Any]) -> str:
    """Computes the checksum of the marker itself, for its fields without `checksum`."""
    return checksum_of_bytes(json.dumps(marker, sort_keys=True).encode())


def difference(path: Path, marker: Marker, world: World = SINGLE_PROCESS) -> str:
    """Returns how a file differs from what the marker of its checkpoint says; empty if it does not.

    Only the first rank of each host (`world`) computes its checksum. If that is another one, this rank ends before the
    ranks of the job connect, and then no rank begins to train.

    Raises:
        OSError: The file cannot be read.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
    saved = marker.file_bytes.get(path.name, size)
    if size != saved:
        return f"{path.name} has {size:,} bytes, not the {saved:,} that were saved"
    checksum = (marker.checksums or {}).get(path.name)
    if checksum is not None and world.local_rank == 0 and checksum_of_file(path) != checksum:
        return f"the checksum of {path.name} does not match {MARKER}"
    return ""


def read_saved(path: Path, limit: int | None = None) -> bytes:
    """Reads a file, and checks it as `check_saved` does.

    Raises:
        OSError: The file cannot be read, has more than `limit` bytes, or differs from what was saved.
    """
    content = read_bytes(path, limit)
    check_saved(path)
    return content


def check_saved(path: Path, world: World = SINGLE_PROCESS) -> None:
    """Checks a file if there is a checkpoint's marker beside it.

    Raises:
        OSError: The file cannot be read, or differs from what was saved.
    """
    try:
        marker: Marker = parse_json(read_bytes(path.with_name(MARKER)), Marker, MARKER)
    except FileNotFoundError:
        return
    except (OSError, JsonError) as error:
        raise OSError(errno.EIO, f"the checkpoint that it belongs to is damaged: {error}") from None
    if problem := difference(path, marker, world):
        raise OSError(errno.EIO, problem)
