"""Reads records, which are dictionaries of named fields, from files of several formats in bounded memory.

The suffix of a file tells its format. A further suffix ``.gz`` or ``.zst`` means that it is compressed:

- ``.json``: an array of objects, or one object on each line
- ``.parquet``
- ``.arrow``: Arrow's file or stream format
- any other suffix: JSON lines, one object on each line; empty lines are left out
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trainer.data.source.compression import DAMAGE, OpenFile, damage_error, import_pyarrow, open_content
from trainer.data.source.files import DataSource, SourceFile, suffix_of, unreadable_error
from trainer.errors import UserError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20
_MAX_RECORD_BYTES = 1 << 28
_BATCH_ROWS = 256
# The longest token of JSON that the end of a chunk may cut, other than a string: ``\ud83d\ude00``.
_LONGEST_TOKEN = 16
_LINES_FIX = "write one JSON object on each line"
_ARRAY_FIX = "write an array of JSON objects, or one object on each line"

Report = Callable[[UserError], None]
"""Takes the error of a bad record: it raises the error, or notes it so that the record is left out."""


class Record(NamedTuple):
    """One record of a file."""

    fields: dict[str, Any]
    where: str  # "file:line" in JSON lines, elsewhere "file: record N" (N from 1)
    source_bytes: int  # bytes of the file that reading it consumed, for progress


def raise_error(error: UserError) -> None:
    """Raises the error of a bad record, which ends the reading: the default `Report`."""
    raise error


def read_records(source: DataSource, file: SourceFile, report: Report = raise_error) -> Iterator[Record]:
    """Reads a file record by record.

    Raises:
        UserError: The file is damaged, or needs pyarrow, which is missing. `report` may raise its error for a record
            that is not a JSON object.
    """
    suffix, compression = suffix_of(file.path)
    if suffix in (".parquet", ".arrow"):
        if compression:
            rule = f"a {suffix} file is compressed inside, and a {compression} file around it cannot be read"
            raise UserError(rule, where=str(file.path), fix="decompress it")
        read_batches = _arrow_batches
        if suffix == ".parquet":
            read_batches = _parquet_batches
        yield from _columnar_records(source, file, read_batches)
        return
    with open_content(source, file) as opened:
        if suffix == ".json" and _starts_array(source, file, opened):
            yield from _array_records(source, file, opened, report)
        else:
            yield from _line_records(source, file, opened, report)


def _starts_array(source: DataSource, file: SourceFile, opened: OpenFile) -> bool:
    try:
        start = opened.stream.peek(1)
    except DAMAGE as error:
        raise damage_error(source, file, error, f"{file.path}: record 1") from None
    return start.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"["


def _line_records(source: DataSource, file: SourceFile, opened: OpenFile, report: Report) -> Iterator[Record]:
    number = 0
    consumed_bytes = 0
    lines = iter(opened.stream)
    while True:
        number += 1
        where = f"{file.path}:{number}"
        try:
            line = next(lines, b"")
        except DAMAGE as error:
            raise damage_error(source, file, error, where) from None
        if not line:
            return
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line.strip():
            continue
        try:
            fields = _parse_line(line, where)
        except UserError as error:
            report(error)
            continue
        read_bytes = opened.raw.tell() - consumed_bytes
        consumed_bytes += read_bytes
        yield Record(fields, where, read_bytes)


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"JSON must be UTF-8 text ({error.reason})", where=where, fix=_LINES_FIX) from None
    except json.JSONDecodeError as error:
        rule = f"this line is not JSON ({error.msg} at column {error.colno})"
        raise UserError(rule, where=where, fix=_LINES_FIX) from None
    except RecursionError:
        raise UserError("this line is not JSON (nested too deep)", where=where, fix=_LINES_FIX) from None
    except ValueError:  # Python's limit of digits
        raise UserError("this line has a number of thousands of digits", where=where, fix=_LINES_FIX) from None
    return _object(value, where, _LINES_FIX)


def _object(value: object, where: str, fix: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:80] + "..."
    raise UserError(f"a record must be a JSON object, not {type(value).__name__} {shown}", where=where, fix=fix)


def _array_records(source: DataSource, file: SourceFile, opened: OpenFile, report: Report) -> Iterator[Record]:
    """Reads an array of objects; keeps only the current chunk and record in memory."""
    text = _JsonText(opened)
    number = 0
    consumed_bytes = 0
    try:
        text.skip()  # the bracket that starts the array
        while text.peek() != "]" or number:
            number += 1
            value = text.value()
            end = text.peek()
            if end not in (",", "]"):
                reason = "it is cut short"
                if end:
                    reason = f"{end!r} where a comma or the end of the array must be"
                raise _BadJson(reason)
            where = f"{file.path}: record {number}"
            try:
                fields = _object(value, where, _ARRAY_FIX)
            except UserError as error:
                report(error)
            else:
                read_bytes = opened.raw.tell() - consumed_bytes
                consumed_bytes += read_bytes
                yield Record(fields, where, read_bytes)
            if end == "]":
                break
            text.skip()
        text.skip()
        number += 1
        if text.peek():
            raise _BadJson("there is more after the end of the array")
    except (_BadJson, RecursionError) as error:
        reason = "nested too deep"
        if isinstance(error, _BadJson):
            reason = str(error)
        rule = f"the file is not JSON ({reason})"
        raise UserError(rule, where=f"{file.path}: record {max(number, 1)}", fix=_ARRAY_FIX) from None
    except UnicodeDecodeError as error:
        where = f"{file.path}: record {max(number, 1)}"
        raise UserError(f"JSON must be UTF-8 text ({error.reason})", where=where, fix=_ARRAY_FIX) from None
    except DAMAGE as error:
        raise damage_error(source, file, error, f"{file.path}: record {max(number, 1)}") from None


class _BadJson(Exception):
    """The reason why a file is not JSON."""


class _JsonText:
    """The text of a JSON file, decoded a chunk at a time.

    Its methods raise _BadJson, UnicodeDecodeError, RecursionError and the errors of `DAMAGE`.
    """

    def __init__(self, opened: OpenFile) -> None:
        self._stream = opened.stream
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._error: UnicodeDecodeError | None = None
        self._json = json.JSONDecoder()
        self._text = ""  # everything before `_at` is skipped
        self._at = 0

    def peek(self) -> str:
        """Returns the next character after white space; empty at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def skip(self) -> None:
        """Skips the character that `peek` shows."""
        self.peek()
        self._at += 1

    def value(self) -> Any:
        """Parses the next value."""
        if not self.peek():
            raise _BadJson("it is cut short")
        while True:
            try:
                value, self._at = self._json.raw_decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                may_go_on = error.msg.startswith("Unterminated string")
                may_go_on = may_go_on or error.pos >= len(self._text) - _LONGEST_TOKEN
                if not may_go_on:
                    raise _BadJson(error.msg) from None
                if len(self._text) - self._at > _MAX_RECORD_BYTES:
                    raise _BadJson(f"it is longer than {_MAX_RECORD_BYTES >> 20} MiB") from None
                if not self._read():
                    raise _BadJson(f"it is cut short: {error.msg}") from None
            except ValueError:  # Python's limit of digits
                raise _BadJson("it has a number of thousands of digits") from None

    def _read(self) -> bool:
        """Reads a chunk; returns False at the end of the file.

        It is as long as the remaining text, so that a long record is parsed a few times only.
        """
        if self._error is not None:
            raise self._error
        remaining = self._text[self._at :]
        chunk = self._stream.read(max(_CHUNK_BYTES, len(remaining)))
        try:
            text = self._utf8.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            self._error = error  # raised when the text before it is used up
            text = error.object[: error.start].decode()
        self._text = remaining + text
        self._at = 0
        return bool(chunk) or bool(text)


def _columnar_records(source: DataSource, file: SourceFile, read_batches: Callable) -> Iterator[Record]:
    """Reads a file of Arrow's record batches."""
    pyarrow = import_pyarrow(file.path)
    number = 0
    consumed_bytes = 0
    try:
        for batch, done_bytes in read_batches(file):
            read_bytes = done_bytes - consumed_bytes
            consumed_bytes = done_bytes
            batch = _prepare_columns(batch, file)
            nested = [field.name for field in batch.schema if pyarrow.types.is_nested(field.type)]
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in _rows(batch.slice(start, _BATCH_ROWS)):
                    number += 1
                    for name in nested:
                        row[name] = _without_nulls(row[name])
                    yield Record(row, f"{file.path}: record {number}", read_bytes)
                    read_bytes = 0
    except UnicodeDecodeError as error:
        rule = f"text must be UTF-8 ({error.reason})"
        fix = "write the file anew with strings in UTF-8"
        raise UserError(rule, where=f"{file.path}: record {number + 1}", fix=fix) from None
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable_error(file.path, error, source.key, source.where) from None
        reason = str(error).split("\n")[0].rstrip(". ")
        where = f"{file.path}: record {number + 1}"
        rule = f"the {file.path.suffix} file is damaged or cut short ({reason})"
        raise UserError(rule, where=where, fix=f"copy or write {file.path.name} anew, or leave it out") from None


def _prepare_columns(batch: Any, file: SourceFile) -> Any:
    """Replaces dates and times by nulls: no sample has any, and Python cannot hold all of them.

    Raises:
        UserError: Two columns have the same name.
    """
    import pyarrow

    names = batch.schema.names
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise UserError(f"the file has two columns named {name}", where=str(file.path), fix="rename one of them")
    columns = [
        pyarrow.nulls(len(column)) if pyarrow.types.is_temporal(column.type) else column for column in batch.columns
    ]
    return pyarrow.RecordBatch.from_arrays(columns, names=names)


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of a batch as dictionaries; all rows before a damaged one precede its error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            yield from batch.slice(index, 1).to_pylist()


def _without_nulls(value: Any) -> Any:
    """Removes fields that are null: in a column of objects, each has the fields of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _parquet_batches(file: SourceFile) -> Iterator[tuple[Any, int]]:
    """Yields the batches of a parquet file, each with the bytes of the file up to its end, estimated by the rows."""
    from pyarrow import parquet

    with parquet.ParquetFile(file.path, pre_buffer=False) as opened:
        rows = 0
        num_rows = opened.metadata.num_rows
        for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
            rows += batch.num_rows
            yield batch, file.size_bytes * rows // max(num_rows, 1)


def _arrow_batches(file: SourceFile) -> Iterator[tuple[Any, int]]:
    """Yields the batches of a file in Arrow's file or stream format, each with the bytes of the file up to its end."""
    import pyarrow

    with pyarrow.memory_map(str(file.path)) as stream:
        start = stream.read(6)
        if start == b"ARROW1":
            reader = pyarrow.ipc.open_file(stream)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index), file.size_bytes * (index + 1) // reader.num_record_batches
            return
        # A mark ends a complete stream; without this check a file cut between two batches looks complete.
        mark = b"\0\0\0\0"
        if start[:4] == b"\xff\xff\xff\xff":
            mark = b"\xff\xff\xff\xff\0\0\0\0"
        stream.seek(max(file.size_bytes - len(mark), 0))
        if stream.read() != mark:
            raise pyarrow.ArrowInvalid("the mark at the end of the stream is missing")
        stream.seek(0)
        for batch in pyarrow.ipc.open_stream(stream):
            yield batch, stream.tell()
