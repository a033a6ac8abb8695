"""Writes and reads safetensors files: whole files with their checksum, or the parts of tensors that a rank has.

The library's own writer holds Python's lock until the whole file is written, so that nothing runs beside it, and for a
checksum the file would have to be read again. Its reader maps the file into memory, of which a process then has as much
as it has touched; here parts are read into their own arrays alone.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import xxhash

from trainer.input_files import open_file
from trainer.parallel.sharding import Shard, ShardedArray, ShardSpec, full_shard_spec
from trainer.storage.bfloat16 import as_float32

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "uint64": "U64", "int32": "I32",
    "uint32": "U32", "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
"""safetensors' name of each dtype of numpy."""
BFLOAT16 = "BF16"
_DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in CODES.items()} | {BFLOAT16: np.dtype("<u2")}
_BUFFER_BYTES = 256 << 10
_BLOCK_BYTES = 1 << 20
_SPAN_BYTES = 4 << 20
"""How many bytes of a file are read at once for what lies scattered among them."""
_LENGTH_BYTES = 8  # of the length of the header, with which a file begins


class TensorInfo(NamedTuple):
    """A tensor of a file: its dtype in safetensors' words, its shape, and its size in bytes."""

    code: str
    shape: tuple[int, ...]
    nbytes: int


TensorInfos = Mapping[str, TensorInfo]
ShardedTensors = Mapping[str, Sequence[ShardedArray]]


def array_infos(arrays: Mapping[str, np.ndarray]) -> dict[str, TensorInfo]:
    """The tensors of a file with these arrays, in its order.

    The largest items come first, as the library sorts them, so that every tensor begins at a multiple of its item size.
    """
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    return {name: TensorInfo(CODES[arrays[name].dtype.name], arrays[name].shape, arrays[name].nbytes) for name in names}


def float32_infos(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """The tensors of a file with float32 arrays of these shapes, in its order."""
    return {name: TensorInfo("F32", shapes[name], 4 * math.prod(shapes[name])) for name in sorted(shapes)}


def build_header(entries: TensorInfos) -> tuple[bytes, dict[str, int]]:
    """What a file of these tensors begins with, and where each tensor begins."""
    # transformers asks for this word, in whose name it reads tensors without conversion.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    offsets = {}
    for name, (code, shape, nbytes) in entries.items():
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offsets[name] = offset
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = _LENGTH_BYTES + len(text)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, {name: start + at for name, at in offsets.items()}


def write_tensors(path: Path, entries: TensorInfos, arrays: Iterable[np.ndarray]) -> str:
    """Writes the numbers of each entry, in order, each array when it is its turn; returns the file's checksum.

    Args:
        arrays: Of any memory layout; one for each entry, or consecutive ranges of it.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    checksum = xxhash.xxh3_128()
    with path.open("wb", buffering=_BUFFER_BYTES) as file:
        for data in itertools.chain([memoryview(build_header(entries)[0])], map(_bytes_of, arrays)):
            for start in range(0, len(data), _BLOCK_BYTES):  # a block that was just written is in the processor's cache
                block = data[start : start + _BLOCK_BYTES]
                file.write(block)
                checksum.update(block)
    return checksum.hexdigest()


def order_shards(entries: TensorInfos, pieces: ShardedTensors) -> Iterator[np.ndarray]:
    """The numbers of pieces that make up whole tensors, as `write_tensors` takes them."""
    for name in entries:
        flat = [piece.array.reshape(-1) for piece in pieces[name]]
        runs = ((*run, array) for piece, array in zip(pieces[name], flat, strict=True) for run in piece.spec.runs())
        for _, at, count, array in sorted(runs, key=lambda run: run[0]):
            yield array[at : at + count]


def create_tensor_file(path: Path, entries: TensorInfos) -> None:
    """Makes a file for these tensors, which `write_shards` fills."""
    header, _ = build_header(entries)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(entry.nbytes for entry in entries.values()))


def write_shards(path: Path, entries: TensorInfos, pieces: ShardedTensors) -> None:
    """Writes pieces to their places in a file that `create_tensor_file` has made.

    Raises:
        OSError: The file is not there, or the disk is full or cannot be written.
    """
    # For writing alone: of a file that is open for reading too, NFS writes whole pages, with what others write there.
    descriptor = os.open(path, os.O_WRONLY)
    _, offsets = build_header(entries)
    try:
        for name, of_tensor in pieces.items():
            for part, array in of_tensor:
                data = _bytes_of(array)
                size = array.itemsize
                for position, at, count in part.runs():
                    _write_at(descriptor, data[at * size : (at + count) * size], offsets[name] + position * size)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        data = data[count:]
        offset = offset + count


def _bytes_of(array: np.ndarray) -> memoryview:
    """An array's values in C order, little-endian; without a copy where they are so already."""
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    if plain.size:
        return memoryview(plain.reshape(-1).view(np.uint8))
    return memoryview(b"")


# ---- reading ---------------------------------------------------------------------------------------------------------


class LazyArray:
    """An array on a disk, or what is made of such arrays, of which parts are read.

    A slice of it is one too, as a slice of an array of numpy is a view.

    Args:
        shape: Of all of it.
        read: Gives the numbers of a part, in the part's shape.
    """

    def __init__(self, shape: Sequence[int], read: Callable[[ShardSpec], np.ndarray]) -> None:
        self.shape = tuple(shape)
        self._read = read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def read(self, part: ShardSpec | None = None) -> np.ndarray:
        """The numbers of a part, or all of them, as an array of its own."""
        return self._read(full_shard_spec(self.shape) if part is None else part)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read().astype(dtype, copy=False)

    def __getitem__(self, key: slice | tuple[slice, ...]) -> LazyArray:
        if isinstance(key, tuple):
            keys = key
        else:
            keys = (key,)
        keys += (slice(None),) * (self.ndim - len(keys))
        begins, ends, _ = zip(*(one.indices(size) for one, size in zip(keys, self.shape, strict=True)), strict=True)

        def read(part: ShardSpec) -> np.ndarray:
            start = tuple(begin + at for begin, at in zip(begins, part.shard.start, strict=True))
            return self._read(ShardSpec(self.shape, Shard(start, part.shard.shape), part.flat_range))

        return LazyArray([max(0, end - begin) for begin, end in zip(begins, ends, strict=True)], read)


ArrayOrLazyArray = np.ndarray | LazyArray


def read_shard(array: ArrayOrLazyArray, part: ShardSpec | None = None) -> np.ndarray:
    """The numbers of a part of an array, or all of them; of an array in memory without a copy where they lie together.
    """
    if isinstance(array, LazyArray):
        return array.read(part)
    if part is None:
        return array
    own = part.shard.of(array.reshape(part.global_shape))
    if part.flat_range is None:
        return own
    return own.reshape(-1)[part.flat_range]


def row_blocks(array: ArrayOrLazyArray) -> Iterator[np.ndarray]:
    """All of an array, some rows (of its first axis) at a time."""
    if not isinstance(array, LazyArray):
        yield array
        return
    rows = max(1, _SPAN_BYTES // (4 * math.prod(array.shape[1:]) or 1))
    for start in range(0, array.shape[0] if array.shape else 1, rows):
        yield array[start : start + rows].read() if array.shape else array.read()


def stack_arrays(arrays: Sequence[ArrayOrLazyArray]) -> ArrayOrLazyArray:
    """numpy.stack."""
    if not isinstance(arrays[0], LazyArray):
        return np.stack(arrays)
    return LazyArray((len(arrays), *arrays[0].shape), lambda part: _assemble(arrays, part, part.items()))


def concatenate_arrays(arrays: Sequence[ArrayOrLazyArray]) -> ArrayOrLazyArray:
    """numpy.concatenate."""
    if not isinstance(arrays[0], LazyArray):
        return np.concatenate(arrays)
    bounds = list(itertools.accumulate((array.shape[0] for array in arrays), initial=0))
    shape = (bounds[-1], *arrays[0].shape[1:])
    return LazyArray(shape, lambda part: _assemble(arrays, part, part.rows(bounds)))


def _assemble(
    arrays: Sequence[LazyArray], part: ShardSpec, found: Iterator[tuple[int, ShardSpec, slice]]
) -> np.ndarray:
    whole: np.ndarray | None = None
    for number, one, own in found:
        values = arrays[number].read(one)
        if whole is None:
            whole = np.empty(part.size, values.dtype)
        whole[own] = values.reshape(-1)
    return (np.empty(0, np.float32) if whole is None else whole).reshape(part.shape)


class TensorFile:
    """A safetensors file that is open.

    Attributes:
        entries: Its tensors.

    Raises:
        OSError: It cannot be read.
        safetensors.SafetensorError: It is damaged.
    """

    def __init__(self, path: Path) -> None:
        with open_file(path) as file, safetensors.safe_open(path, "numpy"):  # which checks the header
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        header.pop("__metadata__", None)
        self.entries = {}
        self._offsets = {}
        for name, about in header.items():
            begin, end = about["data_offsets"]
            self.entries[name] = TensorInfo(about["dtype"], tuple(about["shape"]), end - begin)
            self._offsets[name] = _LENGTH_BYTES + length + begin

    def tensor(self, name: str) -> LazyArray:
        """A tensor; its numbers are float32 where they are bfloat16 on the disk, which numpy lacks.

        Reading raises an OSError where the file has become shorter or cannot be read, and a TypeError for a dtype that
        numpy lacks.
        """
        return LazyArray(self.entries[name].shape, lambda part: self._read(name, part))

    def _read(self, name: str, part: ShardSpec) -> np.ndarray:
        code = self.entries[name].code
        offset = self._offsets[name]
        if code not in _DTYPES:
            raise TypeError(f"numpy has no dtype {code}")
        values = np.empty(part.size, _DTYPES[code])
        size = values.itemsize
        data = memoryview(values.view(np.uint8))
        for runs in _close_together(part.runs(), _SPAN_BYTES // size):
            (first, at, count), last = runs[0], runs[-1]
            if len(runs) == 1:
                self._fill(data[at * size : (at + count) * size], offset + first * size)
                continue
            span = np.empty(last[0] + last[2] - first, values.dtype)
            self._fill(memoryview(span.view(np.uint8)), offset + first * size)
            for position, at, count in runs:
                values[at : at + count] = span[position - first : position - first + count]
        if code == BFLOAT16:
            values = as_float32(values)
        return values.reshape(part.shape)

    def _fill(self, data: memoryview, offset: int) -> None:
        filled = 0
        while filled < len(data):
            count = os.preadv(self._descriptor, [data[filled:]], offset + filled)
            if not count:
                raise OSError(f"it ends {len(data) - filled} bytes too early")
            filled += count


def _close_together(runs: Iterable[tuple[int, int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Groups of consecutive runs that begin and end within so many numbers; a longer one is alone."""
    group: list[tuple[int, int, int]] = []
    for run in runs:
        if group and run[0] + run[2] - group[0][0] > most:
            yield group
            group = []
        group.append(run)
    if group:
        yield group
