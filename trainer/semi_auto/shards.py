"""Parameters that MindSpore shards: which shard each rank has, and how the whole arrays are gathered."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter, Tensor

from trainer.models.spec.init import initial_value
from trainer.models.spec.shapes import all_shapes, parameter_specs
from trainer.ops.measures import metric_functions
from trainer.optim.freeze import trained_shapes
from trainer.parallel.communicator import check_same_values
from trainer.parallel.sharding import Shard, ShardSpec
from trainer.storage.tensor_file import ArrayOrLazyArray, read_shard

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.world import World
    from trainer.semi_auto.cells import SemiAuto

PIECE_BYTES = 16 << 20


def parameter_shard(layout: Sequence, rank: int, rank_in_group: tuple[int, int] = (0, 1)) -> Shard:
    """The shard of a parameter that a rank has.

    Args:
        layout: What `Cell.parameter_layout_dict` says of the parameter after compiling: the grid of ranks of a stage,
            for each axis the dimension of the grid that shards it (counted from the last one, -1: none), the shape of
            a shard, two more, the group that shares the parameter's optimizer state, the shape of the whole.
        rank: Rank of the process, over all stages.
        rank_in_group: Rank and size of that group, which shards the first axis once more.
    """
    grid = tuple(layout[0])
    axes = layout[1]
    part = tuple(layout[2])
    whole = tuple(layout[6])
    coordinates = np.unravel_index(rank % math.prod(grid), grid)
    start = [0] * len(part)
    for axis, dimensions in enumerate(axes):
        index = 0
        for dimension in dimensions if isinstance(dimensions, (list, tuple)) else (dimensions,):
            if dimension >= 0:
                at = len(grid) - 1 - dimension
                index = index * grid[at] + int(coordinates[at])
        start[axis] = index * part[axis]
    shape, (number, size) = list(part), rank_in_group
    if size > 1:
        shape[0] //= size
        start[0] += number * shape[0]
    assert all(at + size <= full for at, size, full in zip(start, shape, whole, strict=True)), layout
    return Shard(tuple(start), tuple(shape))


def first_rank_per_shard(shards: Sequence[Shard | None]) -> dict[int, Shard]:
    """Every different shard of one array under the first rank that has it, from the shards of all ranks."""
    found = {}
    for rank, where in enumerate(shards):
        if where is not None and where not in found.values():
            found[rank] = where
    return found


def gather_arrays(
    shapes: Mapping[str, tuple[int, ...]],
    holders: Mapping[str, Mapping[int, Shard]],
    parts: Mapping[str, np.ndarray],
    communicator: Communicator,
) -> dict[str, np.ndarray]:
    """Gathers whole float32 arrays of these shapes from the shards of all ranks, one by one; rank 0 alone keeps them.

    `shapes` and `holders` (for each array the ranks that send a shard, see `first_rank_per_shard`) are the same on all
    ranks.
    """
    whole = {}
    for name, shape in shapes.items():
        where = holders[name]
        own_bytes = b""
        if communicator.rank in where:
            own_bytes = np.ascontiguousarray(parts[name], np.float32).tobytes()
        sizes = {rank: 4 * math.prod(own.shape) for rank, own in where.items()}
        received = {rank: bytearray() for rank in where}
        # In pieces, because every rank receives what all ranks send.
        for start in range(0, max(sizes.values()), PIECE_BYTES):
            every = communicator.gather_bytes(own_bytes[start : start + PIECE_BYTES])
            for rank, data in received.items() if communicator.rank == 0 else ():
                data += every[rank]
        if communicator.rank == 0:
            whole[name] = np.empty(shape, np.float32)
            for rank, own in where.items():
                whole[name][own.slices] = np.frombuffer(received[rank], np.float32).reshape(own.shape)
    return whole


class ShardedParameters:
    """The parameters of a compiled network, of which every rank has shards.

    Args:
        built: The compiled network.
        rank_in_group: Name of a group that shares optimizer state -> this rank's number in it, and its size.

    Attributes:
        shapes: Shapes of all whole parameters.
        own: The parameters that this rank has a shard of.
        trained: Names of all parameters that are trained, on any rank.
    """

    def __init__(
        self,
        built: SemiAuto,
        config: Config,
        world: World,
        communicator: Communicator,
        rank_in_group: Callable[[str], tuple[int, int]],
    ) -> None:
        self.config = config
        self.communicator = communicator
        self.shapes = all_shapes(config.network)
        by_name = {parameter.name: parameter for parameter in built.network.get_parameters()}
        if world.size == 1:
            found = {name: Shard((0,) * each.ndim, each.shape) for name, each in by_name.items()}
        else:
            found = {
                name: parameter_shard(layout, world.rank, rank_in_group(layout[5]) if layout[5] else (0, 1))
                for name, layout in built.network.parameter_layout_dict.items()
                if name in by_name
            }
        self.trained = list(trained_shapes(config))
        self.shards = {name: found[name] for name in self.shapes if name in found}
        self.local = {name: by_name[name] for name in self.shards}
        # The sums over micro-batches are sharded like the weights, but never further, like optimizer state.
        self.sums = {name: (by_name[name], where.shape) for name, where in found.items() if name not in self.shapes}
        every = [json.loads(data) for data in communicator.gather_bytes(json.dumps(self.shards).encode())]
        others = [{name: Shard(*map(tuple, where)) for name, where in each.items()} for each in every]
        # How many ranks have the same shard as this one, and for each shard the first rank that has it.
        self.copies = {name: sum(each.get(name) == own for each in others) for name, own in self.shards.items()}
        self.holders = {name: first_rank_per_shard([each.get(name) for each in others]) for name in self.shapes}

    def start(self, weights: Mapping[str, np.ndarray] | None) -> None:
        """Sets this rank's shards from given whole weights, or from the run's seed.

        Raises:
            RunError: Ranks have different values of the same weights.
        """
        settings = self.config.network
        seed = self.config.seed
        sums = {}
        specs = parameter_specs(settings)
        for name, parameter in self.local.items():
            if weights is None:
                whole = initial_value(specs[name], settings, seed)
            else:
                whole = weights[name]
            sums[name] = zlib.crc32(np.ascontiguousarray(whole))
            _set(parameter, self.part(name, whole))
        check_same_values(sums, "weights", self.communicator)
        for total, shape in self.sums.values():
            _set(total, np.zeros(shape, np.float32))

    def part(self, name: str, whole: ArrayOrLazyArray) -> np.ndarray:
        """This rank's shard of a whole array that is sharded like this parameter."""
        return read_shard(whole, ShardSpec(self.shapes[name], self.shards[name]))

    def gather(self, names: Iterable[str], parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Gathers arrays that are sharded like these parameters, on rank 0; all ranks must call it."""
        return gather_arrays({name: self.shapes[name] for name in names}, self.holders, parts, self.communicator)

    def squares(self, names: Sequence[str], squares_P: np.ndarray | Tensor) -> np.ndarray | Tensor:
        """What this rank adds to the sums of squares of whole gradients, in the order of `trained`.

        Args:
            names: The parameters of which this rank has gradients.
            squares_P: Sums of squares of the gradients of its shards. Of equal shards all ranks count a part.
        """
        place = {name: number for number, name in enumerate(names)}
        copies = np.array([self.copies[name] for name in names], np.float32)
        places = [place.get(name, len(names)) for name in self.trained]  # the last number: zero
        return metric_functions().scatter_squares(squares_P, 1 / copies, places)


def _set(parameter: Parameter, part: np.ndarray) -> None:
    parameter.set_data(Tensor(np.ascontiguousarray(part)), slice_shape=True)
