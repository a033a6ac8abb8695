"""Megatron-LM's indexed token files: a ``.bin`` with the tokens of all documents, an ``.idx`` with where each is.

The ``.idx`` is little-endian::

    9 bytes  MMIDIDX, 0, 0
    uint64   version: 1
    uint8    code of the tokens' type, see `DTYPES`
    uint64   D, number of documents (Megatron-LM calls them sequences)
    uint64   G, number of group marks
    int32 [D]  tokens of each document
    int64 [D]  where each begins in the .bin, in bytes
    int64 [G]  groups of documents, which a language model does not use
    int8 [D]   modes, in files for images and text only
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.errors import UserError

DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
"""The type of each code in an index; tokens are never floats."""

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_SCANNED_TOKENS = 64 << 20
_PIECES = 64
_PIECE_BYTES = 4096


class Location(NamedTuple):
    """Where the configuration names a file, for messages."""

    key: str
    where: str


@dataclass(frozen=True)
class IndexedTokens:
    """Memory-mapped documents of tokens."""

    prefix: str  # the common path of the two files
    tokens: np.ndarray  # of an integer type [tokens]
    starts: np.ndarray  # int64 [documents], first token of each
    lengths: np.ndarray  # int32 [documents], tokens of each

    def token_range(self) -> tuple[int, int]:
        """Returns the smallest and the largest token; in a file beyond 64 Mi tokens, of samples spread over it."""
        parts = [self.tokens]
        if len(self.tokens) > _SCANNED_TOKENS:
            size = _SCANNED_TOKENS // _PIECES
            parts = [self.tokens[start : start + size] for start in self._sample_starts(size)]
        return int(min(part.min() for part in parts)), int(max(part.max() for part in parts))

    def sample_bytes(self) -> Iterable[bytes]:
        """Yields the lengths of the documents and samples of the tokens spread over the file, to identify it."""
        yield np.ascontiguousarray(self.lengths).tobytes()
        size = _PIECE_BYTES // self.tokens.itemsize
        for start in self._sample_starts(size):
            yield self.tokens[start : start + size].tobytes()

    def _sample_starts(self, size: int) -> list[int]:
        last = max(len(self.tokens) - size, 0)
        return sorted({last * number // (_PIECES - 1) for number in range(_PIECES)})


def open_indexed(prefix: str, location: Location) -> IndexedTokens:
    """Opens `prefix`.idx and `prefix`.bin.

    Raises:
        UserError: One of them is missing or unreadable. Or the ``.idx`` is truncated, is not an index or has a type
            that is not an integer, or the ``.bin`` has another length than the index says.
    """
    root = os.path.expanduser(prefix)
    index = Path(f"{root}.idx")
    data = Path(f"{root}.bin")

    def fail(path: Path, rule: str, fix: str) -> UserError:
        return UserError(f"{path.name}: {rule}", where=location.where, key=location.key, value=prefix, fix=fix)

    for path in (index, data):
        if not path.is_file():
            fix = "name the common path of the two files, without .idx and .bin; scripts/make_megatron.py writes them"
            raise fail(path, f"there is no such file in {path.parent}", fix)
    again = "copy the two files again, or make them again"
    try:
        content = np.empty(0, np.uint8)
        if index.stat().st_size:
            content = np.memmap(index, np.uint8, mode="r")
        data_bytes = data.stat().st_size
        header = content[: _HEADER.size].tobytes()
        if not header.startswith(_MAGIC):
            raise fail(index, "it is not an index of Megatron-LM: it does not begin with MMIDIDX", "name another file")
        if len(header) < _HEADER.size:
            raise fail(index, f"it is truncated: {len(header)} bytes, and its header has {_HEADER.size}", again)
        _, version, code, documents, groups = _HEADER.unpack(header)
        if version != 1:
            raise fail(index, f"it has version {version}, and only version 1 can be read", "make the two files again")
        if code not in DTYPES or not np.issubdtype(DTYPES[code], np.integer):
            known = ", ".join(f"{code} {np.dtype(kind)}" for code, kind in DTYPES.items() if code not in (6, 7))
            raise fail(index, f"the code {code} is no type of tokens ({known})", "make the two files again")
        needed = _HEADER.size + 12 * documents + 8 * groups
        if len(content) not in (needed, needed + documents):  # the latter with a mode for each
            state = "it is too long"
            if len(content) < needed:
                state = "it is truncated"
            raise fail(index, f"{state}: {len(content):,} bytes, and {documents:,} documents need {needed:,}", again)
        if not documents:
            raise fail(index, "it has no document", "name another file")
        dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        end = _HEADER.size + 4 * documents
        lengths = np.frombuffer(content, "<i4", documents, _HEADER.size)
        offsets = np.frombuffer(content, "<i8", documents, end)
        expected = int((offsets + lengths.astype(np.int64) * dtype.itemsize).max())
        if int(lengths.min()) < 0 or int(offsets.min()) < 0 or (offsets % dtype.itemsize).any():
            raise fail(index, "it is damaged: a document has a negative length or begins inside a token", again)
        if data_bytes != expected:
            raise fail(data, f"it has {data_bytes:,} bytes, and the index says {expected:,}", again)
        if not data_bytes:
            raise fail(data, "it has no token", "name another file")
        tokens = np.asarray(np.memmap(data, dtype, mode="r"))
    except OSError as error:
        rule = f"it cannot be read ({error.strerror or error})"
        raise fail(Path(error.filename or index), rule, "make the files readable") from None
    return IndexedTokens(prefix, tokens, offsets // dtype.itemsize, lengths)


def write_indexed(prefix: Path, documents: Iterable[np.ndarray], vocab_size: int) -> int:
    """Writes documents as Megatron-LM does, with uint16 below 65,500 ids and int32 from there on; returns their number.

    The index is written last and renamed when it is complete: a writer that is killed leaves no pair of files.
    """
    code = 4
    if vocab_size < 65500:
        code = 8
    dtype = np.dtype(DTYPES[code])
    lengths = []
    with open(f"{prefix}.bin", "wb") as data:
        for document in documents:
            data.write(np.ascontiguousarray(document, dtype).tobytes())
            lengths.append(len(document))
    sizes = np.array(lengths, np.int32)
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    temporary = Path(f"{prefix}.idx.building")
    with open(temporary, "wb") as index:
        index.write(_HEADER.pack(_MAGIC, 1, code, len(sizes), len(sizes) + 1))
        index.write(sizes.tobytes() + (ends - sizes * np.int64(dtype.itemsize)).tobytes())
        index.write(np.arange(len(sizes) + 1, dtype=np.int64).tobytes())
    os.replace(temporary, f"{prefix}.idx")
    return len(sizes)
