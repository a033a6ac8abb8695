"""Reads the idx files of MNIST, plain or gzipped: a big-endian header (magic number, length of each axis), then bytes.

The format is described at the end of http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.errors import UserError

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
"""0x00000803 and 0x00000801: unsigned bytes (08) of three axes, and of one."""

_GZIP_MAGIC = b"\x1f\x8b"
_KINDS = {IMAGES_MAGIC: "images", LABELS_MAGIC: "labels"}


class IdxFile(NamedTuple):
    """A file with its header."""

    path: Path
    shape: tuple[int, ...]
    header_bytes: int
    is_gzipped: bool


def read_header(path: Path, magic: int) -> IdxFile:
    """Reads the header, and checks the size of a file that is not compressed.

    Raises:
        UserError: The file cannot be read, is cut short or is another kind of file.
    """
    wanted = _KINDS[magic]
    axes = magic & 0xFF
    header_bytes = 4 * (1 + axes)
    try:
        with path.open("rb") as file:
            is_gzipped = file.read(2) == _GZIP_MAGIC
        with _open(path, is_gzipped) as file:
            header = file.read(header_bytes)
        size_bytes = path.stat().st_size
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from None
    if len(header) < 4:
        raise _wrong(path, f"{len(header)} bytes are no idx file of {wanted}", _again(path))
    found = struct.unpack(">i", header[:4])[0]
    if found != magic:
        what = f"a file of {_KINDS[found]} ({found})" if found in _KINDS else f"{found}, which is no idx file"
        raise _wrong(path, f"it starts with the number of {what}, and {wanted} have {magic}", _again(path))
    if len(header) < header_bytes:
        raise _wrong(path, f"it ends within its header of {header_bytes} bytes", _again(path))
    shape = struct.unpack(f">{axes}i", header[4:])
    if min(shape) < 1:
        raise _wrong(path, f"its header says {' x '.join(map(str, shape))}: there is nothing in it", _again(path))
    if not is_gzipped:
        _check_size(path, size_bytes, shape, header_bytes)
    return IdxFile(path, shape, header_bytes, is_gzipped)


def read_array(file: IdxFile) -> np.ndarray:
    """The numbers of a file: uint8 in the shape of its header; mapped into memory where it is not compressed.

    Raises:
        UserError: A compressed file is damaged or cut short.
    """
    if not file.is_gzipped:
        return np.memmap(file.path, np.uint8, "r", file.header_bytes, file.shape)
    try:
        with gzip.open(file.path) as stream:
            data = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(file.path, error) from None
    _check_size(file.path, len(data), file.shape, file.header_bytes)
    return np.frombuffer(data, np.uint8, offset=file.header_bytes).reshape(file.shape)


def _open(path: Path, is_gzipped: bool):
    return gzip.open(path) if is_gzipped else path.open("rb")


def _check_size(path: Path, size_bytes: int, shape: tuple[int, ...], header_bytes: int) -> None:
    wanted_bytes = header_bytes + math.prod(shape)
    if size_bytes != wanted_bytes:
        state = "cut short" if size_bytes < wanted_bytes else "too long"
        sizes = f"{' x '.join(map(str, shape))} take {wanted_bytes:,} bytes, and it has {size_bytes:,}"
        raise _wrong(path, f"it is {state}: {sizes}", _again(path))


def _damaged(path: Path, error: Exception) -> UserError:
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        return _wrong(path, f"it is cut short or damaged ({str(error).rstrip('.')})", _again(path))
    return _wrong(path, f"it cannot be read ({getattr(error, 'strerror', None) or error})", "make it readable")


def _again(path: Path) -> str:
    return f"copy {path.name} anew"


def _wrong(path: Path, rule: str, fix: str) -> UserError:
    return UserError(f"{path}: {rule}", fix=fix)
