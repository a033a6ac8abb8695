"""Parameters that MindSpore shards: the shard of each rank, and the gathering of unsharded arrays."""

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
    """Returns the shard of a parameter that a rank has.

    Args:
        layout: The entry of `Cell.parameter_layout_dict` for the parameter after compiling. Its fields are the grid of
            ranks of a stage; for each axis the dimension of the grid that shards it (counted from the last one, -1:
            none); the shape of a shard; two more; the group that shards the optimizer state; the unsharded shape.
        rank: Rank of the process, over all stages.
        rank_in_group: Rank in that group, which shards the first axis once more, and its size.
    """
    grid = tuple(layout[0])
    shape = list(layout[2])
    coordinates = np.unravel_index(rank % math.prod(grid), grid)
    start = [0] * len(shape)
    for axis, dimensions in enumerate(layout[1]):
        index = 0
        if not isinstance(dimensions, (list, tuple)):
            dimensions = (dimensions,)
        for dimension in dimensions:
            if dimension >= 0:
                coordinate = len(grid) - 1 - dimension
                index = index * grid[coordinate] + int(coordinates[coordinate])
        start[axis] = index * shape[axis]
    number, size = rank_in_group
    if size > 1:
        shape[0] //= size
        start[0] += number * shape[0]
    assert all(first + size <= full for first, size, full in zip(start, shape, layout[6], strict=True)), layout
    return Shard(tuple(start), tuple(shape))


def first_rank_per_shard(shards: Sequence[Shard | None]) -> dict[int, Shard]:
    """Returns for each different shard of an array the first rank that has it; `shards` has one entry for each rank."""
    shard_by_rank: dict[int, Shard] = {}
    for rank, shard in enumerate(shards):
        if shard is not None and shard not in shard_by_rank.values():
            shard_by_rank[rank] = shard
    return shard_by_rank


def gather_arrays(
    shapes: Mapping[str, tuple[int, ...]],
    senders: Mapping[str, Mapping[int, Shard]],
    shards: Mapping[str, np.ndarray],
    communicator: Communicator,
) -> dict[str, np.ndarray]:
    """Gathers float32 arrays of these shapes from the shards of all ranks, one by one. Only rank 0 keeps them.

    Args:
        shapes: The unsharded shapes, equal on all ranks.
        senders: For each array the result of `first_rank_per_shard`, equal on all ranks.
        shards: The shards of this rank.
    """
    arrays = {}
    for name, shape in shapes.items():
        local_bytes = b""
        if communicator.rank in senders[name]:
            local_bytes = np.ascontiguousarray(shards[name], np.float32).tobytes()
        largest = max(4 * math.prod(shard.shape) for shard in senders[name].values())
        received = {rank: bytearray() for rank in senders[name]}
        # In pieces, because every rank receives the bytes of all ranks.
        for start in range(0, largest, PIECE_BYTES):
            gathered = communicator.gather_bytes(local_bytes[start : start + PIECE_BYTES])
            if communicator.rank == 0:
                for rank, data in received.items():
                    data += gathered[rank]
        if communicator.rank == 0:
            arrays[name] = np.empty(shape, np.float32)
            for rank, shard in senders[name].items():
                arrays[name][shard.slices] = np.frombuffer(received[rank], np.float32).reshape(shard.shape)
    return arrays


class ShardedParameters:
    """The parameters of a compiled network, of which every rank has shards.

    Args:
        built: The cells, whose network is compiled.
        rank_in_group: Name of a group that shards optimizer state -> this rank's number in it, and its size.

    Attributes:
        shapes: The unsharded shapes of all parameters.
        local: The parameters of which this rank has a shard.
        trained: The names of all trainable parameters, on any rank.
        sums: The sums of gradients over micro-batches and other parameters without a weight, with their local shapes.
        replicas: For each parameter the number of ranks with the same shard as this rank.
        senders: For each parameter the result of `first_rank_per_shard`.
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
        self.shapes = all_shapes(config.decoder)
        by_name = {parameter.name: parameter for parameter in built.network.get_parameters()}
        if world.size == 1:
            shards = {name: Shard((0,) * each.ndim, each.shape) for name, each in by_name.items()}
        else:
            shards = {
                name: parameter_shard(layout, world.rank, rank_in_group(layout[5]) if layout[5] else (0, 1))
                for name, layout in built.network.parameter_layout_dict.items()
                if name in by_name
            }
        self.trained = list(trained_shapes(config))
        self.shards = {name: shards[name] for name in self.shapes if name in shards}
        self.local = {name: by_name[name] for name in self.shards}
        # The sums over micro-batches are sharded like the weights, without the further sharding of optimizer state.
        self.sums = {name: (by_name[name], shard.shape) for name, shard in shards.items() if name not in self.shapes}
        gathered = [json.loads(data) for data in communicator.gather_bytes(json.dumps(self.shards).encode())]
        all_shards = [{name: Shard(*map(tuple, shard)) for name, shard in each.items()} for each in gathered]
        self.replicas = {
            name: sum(each.get(name) == shard for each in all_shards) for name, shard in self.shards.items()
        }
        self.senders = {name: first_rank_per_shard([each.get(name) for each in all_shards]) for name in self.shapes}

    def start(self, weights: Mapping[str, np.ndarray] | None) -> None:
        """Sets this rank's shards from unsharded weights, or from the run's seed.

        Raises:
            RunError: The ranks have different values of the same weights.
        """
        settings = self.config.decoder
        seed = self.config.seed
        checksums = {}
        specs = parameter_specs(settings)
        for name, parameter in self.local.items():
            if weights is None:
                unsharded = initial_value(specs[name], settings, seed)
            else:
                unsharded = weights[name]
            checksums[name] = zlib.crc32(np.ascontiguousarray(unsharded).data)
            _set(parameter, self.local_shard(name, unsharded))
        check_same_values(checksums, "weights", self.communicator)
        for total, shape in self.sums.values():
            _set(total, np.zeros(shape, np.float32))

    def local_shard(self, name: str, unsharded: ArrayOrLazyArray) -> np.ndarray:
        """Returns this rank's shard of an array that is sharded like this parameter."""
        return read_shard(unsharded, ShardSpec(self.shapes[name], self.shards[name]))

    def gather(self, names: Iterable[str], shards: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Gathers on rank 0 arrays that are sharded like these parameters; all ranks must call it."""
        return gather_arrays({name: self.shapes[name] for name in names}, self.senders, shards, self.communicator)

    def squares(self, names: Sequence[str], squares_P: np.ndarray | Tensor) -> np.ndarray | Tensor:
        """Returns this rank's contributions to the sums of squares of the unsharded gradients.

        They are in the order of `trained`. Ranks with the same shard contribute equal parts of its sum.

        Args:
            names: The parameters of which this rank has gradients.
            squares_P: The sums of squares of the gradients of this rank's shards.
        """
        numbers = {name: number for number, name in enumerate(names)}
        replicas = np.array([self.replicas[name] for name in names], np.float32)
        places = [numbers.get(name, len(names)) for name in self.trained]  # the number after the last means zero
        return metric_functions().scatter_squares(squares_P, 1 / replicas, places)


def _set(parameter: Parameter, shard: np.ndarray) -> None:
    parameter.set_data(Tensor(np.ascontiguousarray(shard)), slice_shape=True)
