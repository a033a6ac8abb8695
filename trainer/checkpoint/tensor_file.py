"""Writes safetensors files, with their checksum. Needs numpy only.

The library's own writer holds Python's lock until the whole file is written, so that nothing runs beside it, and for a
checksum the file would have to be read again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.storage.checksums import RunningChecksum

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "uint64": "U64", "int32": "I32",
    "uint32": "U32", "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
"""safetensors' name of each dtype of numpy."""
BFLOAT16 = "BF16"
_BUFFER_BYTES, _BLOCK_BYTES = 256 << 10, 1 << 20


class Entry(NamedTuple):
    """A tensor of a file: its dtype in safetensors' words, its shape, and its size in bytes."""

    code: str
    shape: tuple[int, ...]
    nbytes: int


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Writes arrays of any memory layout; returns the file's checksum.

    The largest items come first, as the library sorts them, so that every tensor begins at a multiple of its item size.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    entries = {name: Entry(CODES[arrays[name].dtype.name], arrays[name].shape, arrays[name].nbytes) for name in names}
    return write_tensors(path, entries, (arrays[name] for name in names))


def write_tensors(path: Path, entries: Mapping[str, Entry], arrays: Iterable[np.ndarray]) -> str:
    """Writes the array of each entry, in order, each when it is its turn; returns the file's checksum.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    # transformers asks for this word, in whose name it reads tensors without conversion.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (code, shape, nbytes) in entries.items():
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = RunningChecksum()
    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        for data in itertools.chain([memoryview(len(text).to_bytes(8, "little") + text)], map(_bytes_of, arrays)):
            for start in range(0, len(data), _BLOCK_BYTES):  # a block that was just written is in the processor's cache
                block = data[start : start + _BLOCK_BYTES]
                file.write(block)
                checksum.update(block)
    return checksum.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
    """An array's values in C order, little-endian; without a copy where they are so already."""
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return memoryview(plain.reshape(-1).view(np.uint8)) if plain.size else memoryview(b"")
