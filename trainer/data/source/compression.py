"""Opens files that may be compressed, and reports damaged ones."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, NamedTuple

from trainer.data.source.files import DataSource, SourceFile, open_source_file, suffix_of, unreadable_error
from trainer.errors import UserError

DAMAGE = (OSError, EOFError, zlib.error)
"""The errors of reading a file: the file system fails, or compressed content is damaged or truncated."""


class OpenFile(NamedTuple):
    """A file opened for reading."""

    stream: io.BufferedReader  # its content, decompressed
    raw: BinaryIO  # its bytes on disk; ``raw.tell()`` tells how many of them were read

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.raw.close()


def open_content(source: DataSource, file: SourceFile) -> OpenFile:
    """Opens a file of the source for reading; ``.gz`` and ``.zst`` are decompressed.

    Reading it may raise the errors of `DAMAGE`; `damage_error` turns them into a UserError.

    Raises:
        UserError: The file cannot be opened, or it needs pyarrow, which is missing.
    """
    compression = suffix_of(file.path)[1]
    pyarrow = None
    if compression == ".zst":
        pyarrow = import_pyarrow(file.path)
    raw = open_source_file(source, file)
    if compression == ".gz":
        return OpenFile(io.BufferedReader(gzip.GzipFile(fileobj=raw)), raw)
    if pyarrow is not None:
        return OpenFile(io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")), raw)
    return OpenFile(raw, raw)


def import_pyarrow(path: Path) -> ModuleType:
    """Imports pyarrow, which only some formats need; raises a UserError that names `path` if it is missing."""
    try:
        import pyarrow
    except ImportError as error:
        rule = f"reading {''.join(path.suffixes[-1:])} files needs pyarrow, which cannot be imported ({error})"
        raise UserError(rule, where=str(path), fix="pip install 'run-trainer[arrow]'") from None
    return pyarrow


def damage_error(source: DataSource, file: SourceFile, error: Exception, where: str) -> UserError:
    """Returns the error for a file that could not be read at `where` (``file:line`` or ``file: record N``)."""
    compression = suffix_of(file.path)[1]
    if not compression or (isinstance(error, OSError) and error.errno is not None):
        return unreadable_error(file.path, error, source.key, source.where)
    rule = f"the compressed file is damaged or cut short ({str(error).rstrip('.')})"
    return UserError(rule, where=where, fix=f"copy or compress {file.path.name} anew, or leave it out")
