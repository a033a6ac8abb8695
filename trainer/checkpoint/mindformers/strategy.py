"""Strategy files of MindSpore: how a job of MindSpore Transformers sharded its parameters over the ranks of a stage.

A file is a protobuf message ParallelStrategyMap of MindSpore's node_strategy.proto, read here without MindSpore.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.input_files import read_bytes

# Fields of the messages.
_LAYOUT_ITEM = 3
_NAME = 1
_LAYOUTS = 2
_DEVICE_MATRIX = 1
_TENSOR_MAP = 2
_SPLIT_SHAPE = 3
_OPTIMIZER_STEP = 6
_OPTIMIZER_RANKS = 7
_DIM = 1


class StrategyError(ValueError):
    """A strategy file cannot be read, or says something else than this trainer knows."""


class SourceLayout(NamedTuple):
    """How a parameter is sharded over the ranks of a pipeline stage.

    Attributes:
        device_matrix: The ranks as a matrix, the last axis the fastest.
        tensor_map: For each axis of the parameter the axes of the matrix that shard it, counted from the last one.
        optimizer_ranks: Ranks that share each of these shards along the first axis; -1: all that have the same.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    optimizer_ranks: int

    def place(self, rank: int, local_shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns where the shard of a rank starts, and the shape of the unsharded parameter."""
        matrix = self.device_matrix
        index = digits_of(rank % math.prod(matrix), matrix)
        counts = []
        numbers = []
        for axes in self.tensor_map:
            places = [len(matrix) - 1 - axis for axis in axes]
            counts.append(math.prod(matrix[place] for place in places))
            numbers.append(_number([(index[place], matrix[place]) for place in places]))
        count, number = self._optimizer_shard(index)
        counts[0] *= count
        numbers[0] = numbers[0] * count + number
        start = tuple(number * size for number, size in zip(numbers, local_shape, strict=True))
        return start, tuple(count * size for count, size in zip(counts, local_shape, strict=True))

    def _optimizer_shard(self, index: list[int]) -> tuple[int, int]:
        """Returns the number of shards that optimizer parallelism makes of a shard, and which one the rank has."""
        matrix = self.device_matrix
        sharding = {len(matrix) - 1 - axis for axes in self.tensor_map for axis in axes}
        replicating = [place for place in range(len(matrix)) if place not in sharding and matrix[place] > 1]
        remaining = self.optimizer_ranks
        if remaining == -1:
            remaining = math.prod(matrix[place] for place in replicating)
        count = max(1, remaining)
        digits: list[tuple[int, int]] = []
        for place in reversed(replicating):
            if remaining <= 1:
                break
            size = min(remaining, matrix[place])
            digits.insert(0, (index[place] % size, size))
            remaining //= size
        if math.prod(size for _, size in digits) != count:
            raise StrategyError(f"optimizer parallelism over {self.optimizer_ranks} ranks does not fit {list(matrix)}")
        return count, _number(digits)


def digits_of(number: int, bases: Sequence[int]) -> list[int]:
    """Returns the digits of a number in these bases, the first one the highest; bases may be of any size."""
    digits: list[int] = []
    for base in reversed(bases):
        number, digit = divmod(number, base)
        digits.insert(0, digit)
    return digits


def _number(digits: list[tuple[int, int]]) -> int:
    """Returns the number with these digits, each given with its base, the first one the highest."""
    number = 0
    for digit, base in digits:
        number = number * base + digit
    return number


def read_strategy(path: Path) -> dict[str, SourceLayout]:
    """Returns the layout of each parameter in a strategy file; those of a merged file have the stage before the name.

    Raises:
        StrategyError: It is not such a file, or has a layout that is not known here.
        OSError: It cannot be read.
    """
    layouts = {}
    try:
        for number, item in _fields(read_bytes(path)):
            if number == _LAYOUT_ITEM:
                fields = dict(_fields(_as_bytes(item)))
                layouts[_as_bytes(fields[_NAME]).decode()] = _parameter_layout(_as_bytes(fields[_LAYOUTS]))
    except (IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
        raise StrategyError(f"{path.name} is not a strategy file that can be read here ({error})") from None
    if not layouts:
        raise StrategyError(f"{path.name} has no layouts of parameters")
    return layouts


def _parameter_layout(message: bytes) -> SourceLayout:
    fields = list(_fields(message))
    device_matrix, *others = [_numbers(value) for number, value in fields if number == _DEVICE_MATRIX]
    if others or any(_numbers(value) for number, value in fields if number == _SPLIT_SHAPE):
        raise ValueError("a parameter is split into pieces of different sizes")
    maps = [_numbers(value) for number, value in fields if number == _TENSOR_MAP]
    if len(maps) == 1:
        tensor_map = [(axis,) for axis in maps[0]]
    else:
        tensor_map = [axes for axes in maps if axes]
    numbers = {number: value for number, value in fields if isinstance(value, int)}
    optimizer_ranks = numbers.get(_OPTIMIZER_RANKS, 0)
    if not numbers.get(_OPTIMIZER_STEP, 0):
        optimizer_ranks = 0
    sharding = tuple(tuple(axis for axis in axes if axis != -1) for axes in tensor_map)
    if not sharding or min(device_matrix) < 1 or optimizer_ranks < -1:
        raise ValueError("a layout without axes or ranks")
    if any(axis not in range(len(device_matrix)) for axes in sharding for axis in axes):
        raise ValueError("an axis that the device matrix does not have")
    return SourceLayout(device_matrix, sharding, optimizer_ranks)


def _numbers(message: int | bytes) -> tuple[int, ...]:
    """Returns the repeated integers of a message, packed or not."""
    numbers: list[int] = []
    for number, value in _fields(_as_bytes(message)):
        if number == _DIM and isinstance(value, bytes):
            position = 0
            while position < len(value):
                packed, position = _varint(value, position)
                numbers.append(packed)
        elif number == _DIM:
            numbers.append(int(value))
    return tuple(numbers)


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message must be")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a protobuf message: their numbers and values, integers or bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == 0:
            value, position = _varint(message, position)
            yield tag >> 3, value
            continue
        if kind != 2:
            raise ValueError(f"a field of wire type {kind}")
        length, position = _varint(message, position)
        if length < 0 or position + length > len(message):
            raise ValueError("a field beyond the end")
        yield tag >> 3, message[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns a signed 64-bit integer of variable length, and the position behind it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    else:
        raise ValueError("a number of more than 10 bytes")
    if number >= 1 << 63:
        number -= 1 << 64
    return number, position
