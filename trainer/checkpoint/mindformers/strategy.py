"""Strategy files of MindSpore: how a job of MindSpore Transformers sharded its parameters over the ranks of a stage.

A file is a protobuf message ParallelStrategyMap of MindSpore's node_strategy.proto.
"""

from __future__ import annotations

import functools
import math
import runpy
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from trainer.input_files import read_bytes


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
    from google.protobuf.message import DecodeError

    try:
        items = _message_class().FromString(read_bytes(path)).parallel_layout_item
        layouts = {item.param_name: _source_layout(item.parallel_layouts) for item in items}
        if not all(isinstance(name, str) for name in layouts):  # protobuf may return what is not UTF-8 as bytes
            raise ValueError("a name that is not UTF-8")
    except (DecodeError, ValueError) as error:
        raise StrategyError(f"{path.name} is not a strategy file that can be read here ({error})") from None
    if not layouts:
        raise StrategyError(f"{path.name} has no layouts of parameters")
    return layouts


@functools.cache
def _message_class() -> Any:
    """Returns MindSpore's class of these messages, without loading MindSpore."""
    package = find_spec("mindspore")
    assert package is not None and package.submodule_search_locations is not None
    return runpy.run_path(f"{package.submodule_search_locations[0]}/train/node_strategy_pb2.py")["ParallelStrategyMap"]


def _source_layout(layouts: Any) -> SourceLayout:
    """Returns the layout in a message ParallelLayouts; raises a ValueError if it is not known here."""
    if len(layouts.dev_matrix) != 1 or any(shape.dim for shape in layouts.param_split_shape):
        raise ValueError("a parameter is split into pieces of different sizes")
    device_matrix = tuple(layouts.dev_matrix[0].dim)
    tensor_map = [tuple(axes.dim) for axes in layouts.tensor_map if axes.dim]
    if len(layouts.tensor_map) == 1:
        tensor_map = [(axis,) for axis in layouts.tensor_map[0].dim]
    optimizer_ranks = 0
    if layouts.opt_weight_shard_step:
        optimizer_ranks = layouts.opt_weight_shard_size
    sharding = tuple(tuple(axis for axis in axes if axis != -1) for axes in tensor_map)
    if not sharding or min(device_matrix) < 1 or optimizer_ranks < -1:
        raise ValueError("a layout without axes or ranks")
    if any(axis not in range(len(device_matrix)) for axes in sharding for axis in axes):
        raise ValueError("an axis that the device matrix does not have")
    return SourceLayout(device_matrix, sharding, optimizer_ranks)
