"""Reads MindRecord files without MindSpore, whose import takes seconds: rows of named arrays, located by an index.

A file ``x.mindrecord`` begins with the size of its header (uint64) and the header (JSON). The header has the schema
with the type of each column, the columns that are arrays (`blob_fields`), and the sizes of header and pages. Its index,
``x.mindrecord.db``, is an SQLite file; the table INDEXES lists the page on which each row begins and ends. A row is its
size (uint64), then the arrays one after the other. If there are several, each follows its size (uint64, big-endian).

From version 3.0 on, integers are compressed: their number (uint32, big-endian), then two bits for each (0 to 3: 1, 2, 4
or 8 bytes; the first in the highest bits), then each as a little-endian integer of that size.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.source.indexed import Location
from trainer.errors import UserError
from trainer.input_files import open_file

IS_MINDRECORD = re.compile(r"mindrecord\d*$")
_VERSIONS = ("2.0", "3.0")
_MAX_HEADER_BYTES = 1 << 27
_LENGTH_BYTES = 8
_SAMPLED_ROWS = 16
_ROWS = "SELECT PAGE_ID_BLOB, PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END FROM INDEXES ORDER BY ROW_ID"


@dataclass(frozen=True)
class MindRecordFile:
    """A memory-mapped file."""

    path: Path
    data: np.ndarray  # uint8 [bytes]
    starts: np.ndarray  # int64 [rows], the byte at which each row begins with its size
    ends: np.ndarray  # int64 [rows]
    types: dict[str, str]  # of all columns, for example int32
    arrays: tuple[str, ...]  # the columns that are arrays, in the order of a row
    is_compressed: bool
    shards: tuple[str, ...]  # the names of all files that were written together

    def read(self, row: int, columns: Sequence[str]) -> list[np.ndarray]:
        """Reads the arrays of integers in these columns of a row: int64 [elements] each.

        Raises:
            UserError: The row is damaged.
        """
        content = self.data[self.starts[row] : self.ends[row]].tobytes()
        try:
            return [self._array(content, column) for column in columns]
        except (ValueError, IndexError) as error:
            fix = "copy the file and its .db again, or make them again"
            raise UserError(f"row {row} is damaged ({error})", where=str(self.path), fix=fix) from None

    def _array(self, content: bytes, column: str) -> np.ndarray:
        if int.from_bytes(content[:_LENGTH_BYTES], "little") != len(content) - _LENGTH_BYTES:
            raise ValueError("its size is not the one in the index")
        part = content[_LENGTH_BYTES:]
        names = self.arrays
        if len(names) == 1:
            names = ()
        for name in names:
            end = _LENGTH_BYTES + int.from_bytes(part[:_LENGTH_BYTES], "big")
            if end > len(part):
                raise ValueError("an array ends beyond the row")
            if name == column:
                part = part[_LENGTH_BYTES:end]
                break
            part = part[end:]
        kind = np.dtype(self.types[column]).newbyteorder("<")
        if self.is_compressed:
            return _decompress(part)
        return np.frombuffer(part, kind).astype(np.int64)

    def sample_rows(self) -> list[int]:
        """Returns the numbers of some rows that are spread over the file."""
        last = len(self.starts) - 1
        return sorted({last * number // (_SAMPLED_ROWS - 1) for number in range(_SAMPLED_ROWS)})

    def sample_bytes(self) -> Iterable[bytes]:
        """Yields the places of all rows and the content of some rows, to identify the file."""
        yield self.starts.tobytes() + self.ends.tobytes()
        for row in self.sample_rows():
            yield self.data[self.starts[row] : self.ends[row]].tobytes()


def _decompress(part: bytes) -> np.ndarray:
    """Decompresses the integers of an array: int64 [elements]."""
    content = np.frombuffer(part, np.uint8)
    count = int.from_bytes(part[:4], "big")
    first = 4 + (count + 3) // 4
    kinds = (content[4:first, None] >> np.array([6, 4, 2, 0]) & 3).reshape(-1)[:count].astype(np.int64)
    sizes = 1 << kinds
    ends = first + np.cumsum(sizes)
    end = first
    if len(ends):
        end = int(ends[-1])
    if len(kinds) != count or end != len(part):
        raise ValueError("a compressed array has another length than it says")
    numbers = np.empty(count, np.int64)
    for kind in np.unique(kinds).tolist():
        size = 1 << kind
        has_size = kinds == kind
        places = (ends[has_size] - size)[:, None] + np.arange(size)
        numbers[has_size] = np.ascontiguousarray(content[places]).view(f"<i{size}")[:, 0]
    return numbers


def open_mindrecord(path: Path, location: Location) -> MindRecordFile:
    """Opens a file and its index ``.db``.

    Raises:
        UserError: One of the two is missing, unreadable, truncated or of another format.
    """
    index = path.with_name(f"{path.name}.db")
    again = "copy the file and its .db again, or make them again"

    def fail(name: str, rule: str, fix: str = again) -> UserError:
        return UserError(f"{name}: {rule}", where=location.where, key=location.key, value=str(path), fix=fix)

    for each, fix in ((path, "name a MindRecord file or a folder of them"),
                      (index, "copy the .db beside the file: it is the index of its rows")):
        if not each.is_file():
            raise fail(each.name, f"there is no such file in {path.parent}", fix)
    try:
        with open_file(path) as stream:
            size = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            content = b""
            if size <= _MAX_HEADER_BYTES:
                content = stream.read(size)
        header = json.loads(content)
        schema = header["schema"][0]
        version = header["version"]
        types = {name: str(column["type"]) for name, column in schema["schema"].items()}
        arrays = tuple(schema["blob_fields"])
        has_integers = any("shape" in column and column["type"] in ("int32", "int64")
                           for column in schema["schema"].values())
        first_page = int(header["header_size"])
        page_size = int(header["page_size"])
        shards = tuple(map(str, header["shard_addresses"]))
        tokens = [name for name in arrays if types[name] in ("int32", "int64")]
    except OSError as error:
        raise fail(path.name, f"it cannot be read ({error.strerror or error})", "make it readable") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError):
        rule = "its header is not that of a MindRecord file, or is truncated"
        raise fail(path.name, rule) from None
    if version not in _VERSIONS:
        raise fail(path.name, f"it has version {version}, and {' and '.join(_VERSIONS)} can be read")
    try:
        with closing(sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True)) as database:
            rows = np.array(database.execute(_ROWS).fetchall(), np.int64).reshape(-1, 3)
        begin = first_page + page_size * rows[:, 0]
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        raise fail(index.name, f"it is not the index of a MindRecord file ({error})") from None
    if not len(rows):
        raise fail(index.name, "it has no row")
    data = np.asarray(np.memmap(path, np.uint8, mode="r"))
    file = MindRecordFile(
        path, data, begin + rows[:, 1], begin + rows[:, 2], types, arrays, version >= "3.0" and has_integers, shards
    )
    if int(file.ends.max()) > len(data):
        raise fail(path.name, f"it is truncated: {len(data):,} bytes, and its index says {int(file.ends.max()):,}")
    try:
        for row in file.sample_rows():
            file.read(row, tokens)
    except UserError as error:
        raise fail(path.name, f"{error.rule}: the .db is of another file, or the file is damaged") from None
    return file


def list_files(root: Path, location: Location) -> list[Path]:
    """Lists the MindRecord files of a folder, sorted by path, or the files that were written together with a file.

    Raises:
        UserError: The folder has no such file, or a file is missing.
    """
    if not root.is_dir():
        return [root.with_name(shard) for shard in open_mindrecord(root, location).shards]
    paths = sorted(path for path in root.rglob("*") if IS_MINDRECORD.search(path.name) and path.is_file())
    if not paths:
        rule = "the folder has no file whose name ends with mindrecord, or mindrecord and a number"
        fix = "name another"
        raise UserError(rule, where=location.where, key=location.key, value=str(root), fix=fix)
    return paths
