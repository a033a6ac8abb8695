"""Reads documents from text files, in chunks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from trainer.data.source import files as sources
from trainer.data.source.compression import DAMAGE, damage_error, open_content
from trainer.data.source.files import DataSource, SourceFile
from trainer.errors import UserError

_WHITESPACE = b" \t\r\n"
_READ_BYTES = 1 << 20


class TextChunk(NamedTuple):
    """A chunk of a document, or all of it."""

    text: bytes  # UTF-8, cut only between characters
    ends_document: bool  # the next chunk starts another document
    source_bytes: int  # bytes of the source that this chunk consumed, for progress


def read_text_chunks(source: DataSource, chunk_bytes: int) -> Iterator[TextChunk]:
    """Reads a source of text files, a chunk at a time.

    Empty documents are left out. A text file of more than `chunk_bytes` (at least 4) is split, at line ends if it has
    any.

    Raises:
        UserError: A file is not UTF-8 text (with ``stdlib`` it is skipped).
    """
    for file in source.files:
        if source.kind == sources.STDLIB:
            with sources.open_source_file(source, file) as stream:
                content = stream.read()
            if not is_text(content):
                continue
        yield from _split_file(source, file, chunk_bytes)


def is_text(content: bytes) -> bool:
    """Checks whether `content` is UTF-8 text without NUL bytes."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _split_file(source: DataSource, file: SourceFile, chunk_bytes: int) -> Iterator[TextChunk]:
    """Splits one file into chunks; keeps at most two of them in memory."""
    text = b""
    offset = 0
    consumed_bytes = 0
    with open_content(source, file) as opened:
        while chunk := _read(source, file, opened.stream, chunk_bytes):
            text += chunk
            if len(text) <= chunk_bytes:
                continue
            cut = _split_point(text)
            _check_text(source, file, text[:cut], offset)
            read_bytes = opened.raw.tell() - consumed_bytes
            consumed_bytes += read_bytes
            yield TextChunk(text[:cut], False, read_bytes)
            text = text[cut:]
            offset += cut
    if text:
        _check_text(source, file, text, offset)
        yield TextChunk(text, True, file.size_bytes - consumed_bytes)


def _read(source: DataSource, file: SourceFile, stream: BinaryIO, size_bytes: int) -> bytes:
    try:
        return stream.read(size_bytes)
    except DAMAGE as error:
        raise damage_error(source, file, error, str(file.path)) from None


def _split_point(text: bytes) -> int:
    """Finds where to split: before the last line that does not start with white space, else before the last character.

    Tokenizers join white space across line ends, but never a line end and the word after it. So a split there changes
    no token.
    """
    cut = text.rfind(b"\n", 0, len(text) - 1) + 1
    while cut > 0 and text[cut] in _WHITESPACE:
        cut = text.rfind(b"\n", 0, cut - 1) + 1
    if cut > 0:
        return cut
    cut = len(text) - 1
    while cut > max(1, len(text) - 4) and text[cut] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        cut -= 1
    return max(cut, 1)


def _check_text(source: DataSource, file: SourceFile, text: bytes, offset_bytes: int) -> None:
    nul = text.find(b"\0")
    if nul >= 0:
        raise _not_text(source, file, offset_bytes + nul, "it looks like a binary file: a NUL byte is")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        reason = f"byte 0x{text[error.start]:02x} ({error.reason}) is"
        raise _not_text(source, file, offset_bytes + error.start, reason) from None


def _not_text(source: DataSource, file: SourceFile, offset_bytes: int, reason: str) -> UserError:
    """Returns the error for a file that is not UTF-8 text; `offset_bytes` is the first wrong byte of its content."""
    with open_content(source, file) as opened:
        line = 1
        remaining_bytes = offset_bytes
        while remaining_bytes > 0 and (chunk := opened.stream.read(min(remaining_bytes, _READ_BYTES))):
            line += chunk.count(b"\n")
            remaining_bytes -= len(chunk)
    rule = f"a text file must be UTF-8 text; {reason} at byte {offset_bytes}"
    fix = "convert it (iconv -f latin1 -t utf-8 FILE), or leave it out with data_loader.patterns"
    return UserError(rule, where=f"{file.path}:{line}", fix=fix)
