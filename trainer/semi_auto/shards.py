"""Which part of each parameter a rank has where MindSpore cuts a graph, and how whole arrays come from the parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from trainer.parallel.communicator import Communicator


PIECE_BYTES = 16 << 20


class Shard(NamedTuple):
    """A box in an array: where it begins on each axis, and its size."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """The part of a whole array."""
        return array[self.slices]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


def region(layout: Sequence, rank: int, shard: tuple[int, int] = (0, 1)) -> Shard:
    """The part that a rank has.

    Args:
        layout: What MindSpore says of a parameter after compiling, `Cell.parameter_layout_dict`: the grid of ranks of
            a stage, for each axis the dimension of the grid that cuts it (counted from the last one, -1: none), the
            shape of a part, two more, the group that shares the parameter's state, the shape of the whole.
        rank: Of the process, over all stages.
        shard: Its number among the ranks of that group, and how many they are: they cut the first axis once more.
    """
    grid, axes, part, whole = tuple(layout[0]), layout[1], tuple(layout[2]), tuple(layout[6])
    place = np.unravel_index(rank % math.prod(grid), grid)
    start = [0] * len(part)
    for axis, cut_by in enumerate(axes):
        index = 0
        for dimension in cut_by if isinstance(cut_by, (list, tuple)) else (cut_by,):
            if dimension >= 0:
                at = len(grid) - 1 - dimension
                index = index * grid[at] + int(place[at])
        start[axis] = index * part[axis]
    shape = list(part)
    if shard[1] > 1:
        shape[0] //= shard[1]
        start[0] += shard[0] * shape[0]
    assert all(at + size <= full for at, size, full in zip(start, shape, whole, strict=True)), layout
    return Shard(tuple(start), tuple(shape))


def first_holders(regions: Sequence[Shard | None]) -> dict[int, Shard]:
    """Of the parts that ranks have of one array, each different one with the first rank that has it."""
    found = {}
    for rank, where in enumerate(regions):
        if where is not None and where not in found.values():
            found[rank] = where
    return found


def gather_whole(
    shapes: Mapping[str, tuple[int, ...]],
    holders: Mapping[str, Mapping[int, Shard]],
    parts: Mapping[str, np.ndarray],
    communicator: Communicator,
) -> dict[str, np.ndarray]:
    """Puts whole arrays together from the parts of all ranks, one after the other; rank 0 alone keeps them.

    Args:
        shapes: Of the whole arrays that are wanted, float32; the same on all ranks.
        holders: Of each array the ranks that give a part, see `first_holders`; the same on all ranks.
        parts: By name, of this rank.
        peers: The ranks.
    """
    found = {}
    for name, shape in shapes.items():
        where = holders[name]
        mine = np.ascontiguousarray(parts[name], np.float32).tobytes() if communicator.rank in where else b""
        sizes = {rank: 4 * math.prod(own.shape) for rank, own in where.items()}
        came = {rank: bytearray() for rank in where}
        # In pieces: what ranks gather, each of them has from all.
        for start in range(0, max(sizes.values()), PIECE_BYTES):
            every = communicator.gather_bytes(mine[start : start + PIECE_BYTES])
            for rank, data in came.items() if communicator.rank == 0 else ():
                data += every[rank]
        if communicator.rank == 0:
            found[name] = np.empty(shape, np.float32)
            for rank, own in where.items():
                found[name][own.slices] = np.frombuffer(came[rank], np.float32).reshape(own.shape)
    return found
