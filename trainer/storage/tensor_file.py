"""Writes and reads safetensors files: complete files with their checksum, or the shards of tensors that a rank has.

The safetensors library's writer holds Python's lock until the file is complete, so that no other thread runs, and a
checksum would need a second pass over the file. Its reader maps the file into memory and keeps every page that was
touched. Here a shard is read into an array of its size.
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
"""The most bytes of a file that are read at once to pick scattered ranges from them."""
_LENGTH_BYTES = 8  # a file begins with the length of its header, in so many bytes


class TensorInfo(NamedTuple):
    """A tensor of a file."""

    code: str  # its dtype, as safetensors writes it
    shape: tuple[int, ...]
    nbytes: int


TensorInfos = Mapping[str, TensorInfo]
ShardedTensors = Mapping[str, Sequence[ShardedArray]]


def array_infos(arrays: Mapping[str, np.ndarray]) -> dict[str, TensorInfo]:
    """Describes the tensors of a file with these arrays, in the order of the file.

    The largest item sizes come first, as in the library, so that every tensor begins at a multiple of its item size.
    """
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    return {name: TensorInfo(CODES[arrays[name].dtype.name], arrays[name].shape, arrays[name].nbytes) for name in names}


def float32_infos(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """Describes the tensors of a file with float32 arrays of these shapes, in the order of the file."""
    return {name: TensorInfo("F32", shapes[name], 4 * math.prod(shapes[name])) for name in sorted(shapes)}


def build_header(entries: TensorInfos) -> tuple[bytes, dict[str, int]]:
    """Builds the header of a file of these tensors; returns it with the byte at which each tensor begins."""
    # transformers reads tensors without conversion only if the format is "pt".
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    offsets = {}
    for name, (code, shape, nbytes) in entries.items():
        content[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offsets[name] = offset
        offset += nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = _LENGTH_BYTES + len(text)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header, {name: start + offset for name, offset in offsets.items()}


def write_tensors(path: Path, entries: TensorInfos, arrays: Iterable[np.ndarray]) -> str:
    """Writes a file of these tensors and returns its checksum.

    Args:
        arrays: One array for each tensor, in order, or consecutive ranges of its values; of any memory layout.

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


def order_shards(entries: TensorInfos, shards: ShardedTensors) -> Iterator[np.ndarray]:
    """Yields the values of complete tensors, given by all of their shards, in the order for `write_tensors`."""
    for name in entries:
        flat = [shard.array.reshape(-1) for shard in shards[name]]
        runs = ((*run, array) for shard, array in zip(shards[name], flat, strict=True) for run in shard.spec.runs())
        for _, start, count, array in sorted(runs, key=lambda run: run[0]):
            yield array[start : start + count]


def create_tensor_file(path: Path, entries: TensorInfos) -> None:
    """Creates a file of the right size with a header for these tensors; `write_shards` writes their values."""
    header, _ = build_header(entries)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(entry.nbytes for entry in entries.values()))


def write_shards(path: Path, entries: TensorInfos, shards: ShardedTensors) -> None:
    """Writes shards of tensors to their places in a file that `create_tensor_file` has created.

    Raises:
        OSError: The file does not exist, or the disk is full or cannot be written.
    """
    # Write-only: if a file is open for reading too, NFS writes whole pages and overwrites what other ranks wrote there.
    descriptor = os.open(path, os.O_WRONLY)
    _, offsets = build_header(entries)
    try:
        for name, tensor_shards in shards.items():
            for spec, array in tensor_shards:
                data = _bytes_of(array)
                size = array.itemsize
                for position, start, count in spec.runs():
                    run = data[start * size : (start + count) * size]
                    _write_at(descriptor, run, offsets[name] + position * size)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        data = data[count:]
        offset = offset + count


def _bytes_of(array: np.ndarray) -> memoryview:
    """Returns an array's values in C order, little-endian; they are copied only if the array has another layout."""
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    if plain.size:
        return _memory_of(plain.reshape(-1))
    return memoryview(b"")


def _memory_of(flat: np.ndarray) -> memoryview:
    return flat.view(np.uint8).data


# ---- reading ---------------------------------------------------------------------------------------------------------


class LazyArray:
    """An array on a disk, or one composed of such arrays, whose values are read when they are needed.

    A slice of it is lazy too, like a view of a numpy array.

    Args:
        shape: The shape of the unsharded array.
        read: Returns the values of a shard, in the shard's shape.
        reads_from_start: Reading a part costs as much as all numbers up to its end: those of a random stream.
    """

    def __init__(
        self, shape: Sequence[int], read: Callable[[ShardSpec], np.ndarray], *, reads_from_start: bool = False
    ) -> None:
        self.shape = tuple(shape)
        self.reads_from_start = reads_from_start
        self._read = read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Returns how many numbers the array has."""
        return math.prod(self.shape)

    def read(self, spec: ShardSpec | None = None) -> np.ndarray:
        """Reads a shard, or everything, into a new array."""
        if spec is None:
            spec = full_shard_spec(self.shape)
        return self._read(spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        numbers = self.read()
        if dtype is None:
            return numbers
        return numbers.astype(dtype, copy=False)

    def __getitem__(self, key: slice | tuple[slice, ...]) -> LazyArray:
        if isinstance(key, tuple):
            keys = key
        else:
            keys = (key,)
        keys += (slice(None),) * (self.ndim - len(keys))
        ranges = [range(*one.indices(size)) for one, size in zip(keys, self.shape, strict=True)]
        assert all(one.step > 0 for one in ranges), "no array is read backwards"
        shape = tuple(map(len, ranges))

        def read(spec: ShardSpec) -> np.ndarray:
            start = tuple(one.start + at for one, at in zip(ranges, spec.shard.start, strict=True))
            return self._read(ShardSpec(self.shape, Shard(start, spec.shard.shape), spec.flat_range))

        def read_box(box: Shard) -> np.ndarray:
            """Reads all numbers of these steps, and returns the first of each step."""
            parts = [one[part] for one, part in zip(ranges, box.slices, strict=True)]
            bounds = tuple(slice(part.start, part.start + len(part) * part.step) for part in parts)
            return self[bounds].read()[tuple(slice(0, len(part) * part.step, part.step) for part in parts)]

        if all(one.step == 1 for one in ranges):
            return LazyArray(shape, read)
        return box_array(shape, read_box)


ArrayOrLazyArray = np.ndarray | LazyArray


def read_shard(array: ArrayOrLazyArray, spec: ShardSpec | None = None) -> np.ndarray:
    """Returns the values of a shard of an array, or all values.

    The result is a view if the array is in memory and the values are contiguous.
    """
    if isinstance(array, LazyArray):
        return array.read(spec)
    if spec is None:
        return array
    shard = spec.shard.of(array.reshape(spec.global_shape))
    if spec.flat_range is None:
        return shard
    return shard.reshape(-1)[spec.flat_range]


def read_row_blocks(array: ArrayOrLazyArray) -> Iterator[np.ndarray]:
    """Reads an array some rows (of its first axis) at a time."""
    if not isinstance(array, LazyArray):
        yield array
        return
    if not array.shape or array.reads_from_start:
        yield array.read()
        return
    rows = max(1, _SPAN_BYTES // (4 * math.prod(array.shape[1:]) or 1))
    for start in range(0, array.shape[0], rows):
        yield array[start : start + rows].read()


def stack_arrays(arrays: Sequence[ArrayOrLazyArray]) -> ArrayOrLazyArray:
    """Stacks arrays like numpy.stack; the result is lazy if all arrays are."""
    lazy = [array for array in arrays if isinstance(array, LazyArray)]
    if len(lazy) < len(arrays):
        return np.stack(arrays)
    return LazyArray((len(lazy), *lazy[0].shape), lambda spec: _assemble(lazy, spec, spec.items()))


def concatenate_arrays(arrays: Sequence[ArrayOrLazyArray]) -> ArrayOrLazyArray:
    """Concatenates arrays like numpy.concatenate; the result is lazy if all arrays are."""
    lazy = [array for array in arrays if isinstance(array, LazyArray)]
    if len(lazy) < len(arrays):
        return np.concatenate(arrays)
    bounds = list(itertools.accumulate((array.shape[0] for array in lazy), initial=0))
    shape = (bounds[-1], *lazy[0].shape[1:])
    return LazyArray(shape, lambda spec: _assemble(lazy, spec, spec.rows(bounds)))


def box_array(shape: Sequence[int], read_box: Callable[[Shard], np.ndarray]) -> LazyArray:
    """Returns a lazy array from a function that reads boxes of it; for a flat range it reads the rows around it."""

    def read(spec: ShardSpec) -> np.ndarray:
        """Reads a shard as a box, or the rows around a flat range."""
        if spec.flat_range is None:
            return read_box(spec.shard)
        row_size = max(1, math.prod(spec.shard.shape[1:]))
        first = spec.range.start // row_size
        last = -(-spec.range.stop // row_size)
        start = (spec.shard.start[0] + first, *spec.shard.start[1:])
        rows = read_box(Shard(start, (last - first, *spec.shard.shape[1:])))
        return rows.reshape(-1)[spec.range.start - first * row_size : spec.range.stop - first * row_size]

    return LazyArray(shape, read)


def merge_shards(shape: Sequence[int], shards: Mapping[tuple[int, ...], LazyArray]) -> LazyArray:
    """Returns the float32 array that these shards tile; each is given by its start on every axis."""

    def read_box(box: Shard) -> np.ndarray:
        """Reads the overlap of a box with each shard."""
        result = np.empty(box.shape, np.float32)
        for start, shard in shards.items():
            axes = list(zip(box.start, box.shape, start, shard.shape, strict=True))
            lows = [max(begin, at) for begin, _, at, _ in axes]
            highs = [min(begin + size, at + count) for begin, size, at, count in axes]
            if all(low < high for low, high in zip(lows, highs, strict=True)):
                source = tuple(slice(low - at, high - at) for low, high, at in zip(lows, highs, start, strict=True))
                place = tuple(slice(low - at, high - at) for low, high, at in zip(lows, highs, box.start, strict=True))
                result[place] = shard[source].read()
        return result

    return box_array(shape, read_box)


def _assemble(
    arrays: Sequence[LazyArray], spec: ShardSpec, blocks: Iterator[tuple[int, ShardSpec, slice]]
) -> np.ndarray:
    """Reads a shard of a composed array; a block is the number of an array, its shard, and its range in the result."""
    result: np.ndarray | None = None
    for number, block, place in blocks:
        values = arrays[number].read(block)
        if result is None:
            result = np.empty(spec.size, values.dtype)
        result[place] = values.reshape(-1)
    if result is None:
        result = np.empty(0, np.float32)
    return result.reshape(spec.shape)


class TensorFile:
    """An open safetensors file.

    Attributes:
        entries: The tensors of the file, by name.

    Raises:
        OSError: The file cannot be read.
        safetensors.SafetensorError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        with open_file(path) as file, safetensors.safe_open(path, "numpy"):  # the library checks the header
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
        """Returns a tensor, whose values are read later; bfloat16 becomes float32, since numpy has no bfloat16.

        Reading it raises an OSError if the file has become shorter or cannot be read, and a TypeError if numpy lacks
        the dtype.
        """
        return LazyArray(self.entries[name].shape, lambda spec: self._read(name, spec))

    def _read(self, name: str, spec: ShardSpec) -> np.ndarray:
        code = self.entries[name].code
        offset = self._offsets[name]
        if code not in _DTYPES:
            raise TypeError(f"numpy has no dtype {code}")
        values = np.empty(spec.size, _DTYPES[code])
        size = values.itemsize
        data = _memory_of(values)
        for runs in _close_together(spec.runs(), _SPAN_BYTES // size):
            first, start, count = runs[0]
            last = runs[-1]
            if len(runs) == 1:
                self._fill(data[start * size : (start + count) * size], offset + first * size)
                continue
            span = np.empty(last[0] + last[2] - first, values.dtype)
            self._fill(_memory_of(span), offset + first * size)
            for position, start, count in runs:
                values[start : start + count] = span[position - first : position - first + count]
        if code == BFLOAT16:
            values = as_float32(values)
        return values.reshape(spec.shape)

    def _fill(self, data: memoryview, offset: int) -> None:
        filled = 0
        while filled < len(data):
            count = os.preadv(self._descriptor, [data[filled:]], offset + filled)
            if not count:
                raise OSError(f"it ends {len(data) - filled} bytes too early")
            filled += count


def _close_together(runs: Iterable[tuple[int, int, int]], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Groups consecutive runs that span at most `limit` values; a longer run has its own group."""
    group: list[tuple[int, int, int]] = []
    for run in runs:
        if group and run[0] + run[2] - group[0][0] > limit:
            yield group
            group = []
        group.append(run)
    if group:
        yield group
