"""How a run communicates with the other ranks: sums, flags, bytes.

Every decision about the course of a run (tokens, norms, overflow, signals, the end of the data) uses the results of
these methods, which are the same on every rank. So all ranks decide alike, and none waits for a rank that has left. A
single process is a group of one, which exchanges nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.errors import RunError
from trainer.models.spec.sublayers import attention_spec
from trainer.parallel.connections import Connections
from trainer.parallel.gradients import GradientReducer
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.layout import SHARD_GROUPS, SUM_GROUPS, SumGroup
from trainer.parallel.mesh import Degrees, build_mesh
from trainer.parallel.process_groups import process_groups

if TYPE_CHECKING:
    from mindspore import Parameter

    from trainer.config.schema.model import ModelConfig
    from trainer.parallel.collectives import ProcessGroup
    from trainer.parallel.layout import ModelLayout
    from trainer.parallel.mesh import MeshCoordinate
    from trainer.parallel.process_groups import ProcessGroups


class Communicator:
    """The ranks of a job, among them this one.

    Args:
        group: All ranks of the job; None: a single process.
        groups: The groups of this rank, where ranks shard a model by its matrices, experts, tokens or stages; None:
            each rank is a replica of the model with different batches.
        layout: How they shard the model; None without `groups`.
        coordinate: This rank's coordinate in the mesh; None without `groups`.
        shard_groups: The groups of this rank where only some data-parallel ranks share the shards of ZeRO; None: all.

    Attributes:
        data_rank: Index of this rank's batches and dropout masks; ranks that compute one replica have the same.
        shards_model: Whether ranks shard the model and so communicate during each pass: none may stop alone.
        skips_empty: Whether this rank may skip a batch without a loss token. It must not where its experts are on
            ranks with other batches.
        reports_losses: Whether this rank's losses are counted: it is the first rank that computes them.
        reports_tokens: Whether the tokens of its batches are counted: it is the first rank with these batches.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        groups: ProcessGroups | None = None,
        layout: ModelLayout | None = None,
        coordinate: MeshCoordinate | None = None,
        shard_groups: ProcessGroups | None = None,
    ) -> None:
        self.group: ProcessGroup = group or CpuGroup(Connections(0, {}), [0])
        self.groups = groups
        self.layout = layout
        self.coordinate = coordinate
        self.shard_groups = shard_groups
        self.rank = self.group.rank
        self.size = self.group.size
        self.shards_model = groups is not None
        if groups is None or layout is None or coordinate is None:
            self.data_rank = self.rank
            self.skips_empty = True
            self.reports_losses = True
            self.reports_tokens = True
        else:
            self.data_rank = coordinate.data
            self.skips_empty = groups.ep is None
            self.reports_losses = coordinate.tensor == 0 and coordinate.pipeline == layout.degrees.pipeline_stage - 1
            self.reports_tokens = self.reports_losses and coordinate.context == 0

    def all_reduce_exact(self, values: Sequence[float]) -> list[float]:
        """Sums numbers over all ranks, rounded once from the exact sum: the same bits for any order of ranks."""
        return _exact_sums(values, self.group)

    def all_reduce(self, values: Sequence[Any]) -> list[Any]:
        """Sums each number, array or tensor over all ranks.

        A device sums in float32 and returns tensors, for which the host does not wait. A CPU returns arrays, rounded as
        by `all_reduce_exact`. A single process returns the values as they are.
        """
        return _sums(values, self.group)

    def all_reduce_stage(self, values: Sequence[Any]) -> list[Any]:
        """Sums each value, as `all_reduce` does, over the ranks of this pipeline stage."""
        if self.groups is None:
            return self.all_reduce(values)
        if self.groups.stage is None:
            return list(values)
        return _sums(values, self.groups.stage)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers the bytes of every rank, in the order of ranks."""
        return self.group.gather_bytes(data)

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is true on any rank."""
        return self.all_reduce_exact([float(flag)])[0] > 0

    def gradient_reducer(
        self,
        parameters: Mapping[str, Parameter],
        is_sharded: Sequence[bool],
        in_float32: bool = True,
        shards_gradients: bool = False,
    ) -> GradientReducer:
        """Makes the `GradientReducer` of these parameters; see there for the arguments."""
        if self.size == 1:
            groups = []
        else:
            groups = [self._reduction_groups(*each) for each in zip(parameters, is_sharded, strict=True)]
        return GradientReducer(
            list(parameters.values()), is_sharded, groups,
            shards_gradients=shards_gradients, overlaps=not self.group.on_host, in_float32=in_float32,
        )  # fmt: skip

    def groups_of(self, name: str) -> dict[SumGroup, ProcessGroup]:
        """Returns the groups over which the gradient of a parameter is summed, one after the other."""
        if self.groups is None or self.layout is None:
            return {"dp_cp": self.group}
        groups = {kind: getattr(self.groups, kind) for kind in SUM_GROUPS if kind in self.layout.parameters[name].sums}
        return {kind: group for kind, group in groups.items() if group is not None}

    def optimizer_state_group(self, name: str) -> ProcessGroup | None:
        """Returns the ranks with the same shard of a parameter, which may shard its optimizer state; None: only this.
        """
        if self.shard_groups is not None:
            return getattr(self.shard_groups, SHARD_GROUPS[self._data_group(name)][0])
        if self.groups is None or self.layout is None:
            return self.group
        return getattr(self.groups, self._data_group(name))

    def _data_group(self, name: str) -> SumGroup:
        """Returns the group of the ranks with the same shard of a parameter."""
        if self.layout is not None and "expert_dp" in self.layout.parameters[name].sums:
            return "expert_dp"
        return "dp_cp"

    def _reduction_groups(self, name: str, is_sharded: bool) -> dict[SumGroup, ProcessGroup]:
        """Returns the groups of `groups_of`; a sharded gradient is summed over its shards first, then over replicas."""
        groups = self.groups_of(name)
        if not is_sharded or self.shard_groups is None:
            return groups
        kinds = [part for kind in groups for part in SHARD_GROUPS.get(kind, (kind,))]
        split = {kind: groups.get(kind) or getattr(self.shard_groups, kind) for kind in kinds}
        return {kind: group for kind, group in split.items() if group is not None}

    def norm_weights(self, names: Sequence[str], scattered: Collection[str] = ()) -> np.ndarray:
        """Returns the factors of this rank's squared norms in sums over all ranks: 1, or 0 if another rank counts.

        Args:
            names: The parameters of this rank.
            scattered: The parameters of whose gradients this rank has only its range.
        """
        return np.array([float(self.should_save(name, name in scattered)) for name in names])

    def should_save(self, name: str, is_sharded: bool = False) -> bool:
        """Returns whether this rank saves its shard of a parameter: it is the first rank with this shard.

        Args:
            is_sharded: The ranks with this shard each have and save a range of it (ZeRO), the first one with each.
        """
        if is_sharded and self.shard_groups is not None:
            replicas = getattr(self.shard_groups, SHARD_GROUPS[self._data_group(name)][1])
            if replicas is not None and replicas.rank > 0:
                return False
        if self.layout is None or self.coordinate is None:
            return is_sharded or self.rank == 0
        return self.layout.is_first_holder(name, self.coordinate, is_sharded)


def data_parallel(group: ProcessGroup, sharding: int = 0) -> Communicator:
    """Makes the communicator of ranks that each have the model; for `sharding` see `group_ranks`."""
    if sharding in (0, group.size):
        return Communicator(group)
    mesh = build_mesh(Degrees(data_parallel=group.size), group.size)
    return Communicator(group, shard_groups=process_groups(group, mesh, sharding=sharding))


def model_parallel(
    group: ProcessGroup, settings: ModelConfig, layout: ModelLayout, ulysses: int = 1, sharding: int = 0
) -> Communicator:
    """Makes the communicator of ranks that shard a model.

    Args:
        group: All ranks of the job.
        ulysses, sharding: See `group_ranks`.
    """
    mesh = build_mesh(layout.degrees, group.size)
    groups = process_groups(group, mesh, attention_spec(settings).shared_kv_heads, ulysses, sharding)
    shard_groups = None
    if sharding not in (0, layout.degrees.data_parallel):
        shard_groups = groups
    return Communicator(group, groups, layout, mesh.coordinate_of(group.rank), shard_groups)


def _exact_sums(values: Sequence[float], group: ProcessGroup) -> list[float]:
    columns = group.all_gather(np.array(values, np.float64)).T.tolist()
    return [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in columns]


def _sums(values: Sequence[Any], group: ProcessGroup) -> list[Any]:
    if group.size == 1:
        return list(values)
    if not group.on_host:
        from trainer.parallel.collectives import sum_on_device

        return sum_on_device(values, group)
    arrays = [np.asarray(value) for value in values]
    total = np.array(_exact_sums([float(number) for array in arrays for number in array.ravel()], group))
    parts = np.split(total, np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape).astype(array.dtype) for part, array in zip(parts, arrays, strict=True)]


def check_same_values(values: Mapping[str, object], what: str, communicator: Communicator) -> None:
    """Checks that all ranks have the same number or string for each name; a rank need not have all names.

    Args:
        what: What the values describe, for the message.

    Raises:
        RunError: Values differ. The message names the ranks that differ from the first rank that has a name.
    """
    first: dict[str, tuple[int, object]] = {}
    differing = set()
    right = set()
    for rank, data in enumerate(communicator.gather_bytes(json.dumps(values).encode())):
        for name, value in json.loads(data).items():
            first_rank, first_value = first.setdefault(name, (rank, value))
            if first_value != value:
                differing.add(rank)
                right.add(first_rank)
    if differing:
        raise RunError(
            f"the {what} of rank {', '.join(map(str, sorted(differing)))} differ from those of rank"
            f" {', '.join(map(str, sorted(right)))} before the first step",
            fix="use the same configuration, data, checkpoint and versions of MindSpore and NumPy on every host",
        )
