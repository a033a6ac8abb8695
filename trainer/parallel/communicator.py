"""How a run talks to the other ranks: sums, flags, bytes, a barrier.

Every decision about the course of a run (tokens, norms, overflow, signals, the end of the data) uses the results of
these methods, which are the same on every rank. So all ranks decide alike, and none waits for a rank that has left. A
single process gets the same results without communication.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainer.errors import RunError
from trainer.models.spec.sublayers import attention_spec
from trainer.parallel.gradients import GradientReducer, ScatterDuringBackward, SumAfterBackward, SumDuringBackward
from trainer.parallel.layout import SUM_GROUPS, SumGroup
from trainer.parallel.mesh import build_mesh
from trainer.parallel.process_groups import process_groups

if TYPE_CHECKING:
    from mindspore import Parameter, Tensor

    from trainer.config import ModelConfig
    from trainer.parallel.collectives import Group
    from trainer.parallel.layout import ModelLayout
    from trainer.parallel.mesh import MeshCoordinate
    from trainer.parallel.process_groups import ProcessGroups


_BEFORE_SCATTER: tuple[SumGroup, ...] = ("tp", "kv")
_AFTER_SCATTER: tuple[SumGroup, ...] = ("embedding",)


class Communicator(Protocol):
    """The data-parallel ranks of a job, this one among them."""

    rank: int
    size: int
    data_rank: int
    """Which batches and dropout masks this rank has; ranks that compute parts of one model have the same."""
    counts_losses: bool
    """Whether this rank's losses count: of the ranks that compute the same ones, the first one's do."""
    counts_tokens: bool
    """Whether the tokens of its batches count: of the ranks that have the same batches, the first one's do."""
    divides_model: bool
    """Whether the ranks communicate during each pass of a model that they divide: none may stop alone."""
    skips_empty: bool
    """Whether it may leave out a batch without a valid token: not where ranks with other batches have its experts."""

    @property
    def stage(self) -> Communicator:
        """The ranks that compute the same layers."""

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, rounded once from the exact sum: the same bits for any order of ranks."""

    def sums(self, values: Sequence[Any]) -> list[Any]:
        """Each number, array or tensor summed over all ranks. A device sums in float32 and keeps the results, tensors;
        a CPU has arrays, as `all_sum` rounds them. A single process gets its own values."""

    def gradient_reducer(
        self,
        parameters: Mapping[str, Parameter],
        is_sharded: Sequence[bool],
        in_float32: bool = True,
        scatters: bool = False,
    ) -> GradientReducer:
        """Sums the gradients of these parameters over the ranks, step by step; the optimizer state of those that
        `is_sharded` names is divided among the ranks, and with `scatters` their summed gradients are, too.
        `in_float32` False leaves each gradient in its dtype."""

    def state_group(self, name: str) -> Group | None:
        """The ranks that have the same part of a parameter, and may share its optimizer state; None: no other has."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The data of every rank, in the order of ranks."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""

    def barrier(self) -> None:
        """Waits until every rank has called it."""

    def writes(self, name: str, is_sharded: bool = False) -> bool:
        """Whether this rank writes what it has of a parameter to a checkpoint: of the ranks that have the same, the
        first one does. Ranks that share the state of the optimizer each have some of it, which `is_sharded` says."""


class SingleProcess:
    """A run of one process."""

    rank, size = 0, 1
    counts_losses = counts_tokens = skips_empty = True
    divides_model = False

    @property
    def data_rank(self) -> int:
        return self.rank

    @property
    def stage(self) -> Communicator:
        return self

    def all_sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def sums(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def gradient_reducer(
        self,
        parameters: Mapping[str, Parameter],
        is_sharded: Sequence[bool],
        in_float32: bool = True,
        scatters: bool = False,
    ) -> SumAfterBackward:
        return SumAfterBackward()

    def state_group(self, name: str) -> None:
        return None

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self) -> None:
        return None

    def writes(self, name: str, is_sharded: bool = False) -> bool:
        return True


class ProcessGroup:
    """The ranks of a job, each with the whole model: a group of `trainer.parallel.collectives`."""

    counts_losses = counts_tokens = skips_empty = True
    divides_model = False

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size, self.data_rank = group, group.rank, group.size, group.rank
        self.gather_bytes = group.gather_bytes
        self.stage: Communicator = self

    def all_sum(self, values: Sequence[float]) -> list[float]:
        every = self.group.all_gather(np.array(values, np.float64)).T.tolist()
        return [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in every]

    def sums(self, values: Sequence[Any]) -> list[Any]:
        if not self.group.on_host:
            from trainer.parallel.collectives import sum_on_device

            return sum_on_device(values, self.group)
        arrays = [np.asarray(value) for value in values]
        total = np.array(self.all_sum([float(number) for array in arrays for number in array.ravel()]))
        parts = np.split(total, np.cumsum([array.size for array in arrays])[:-1])
        return [part.reshape(array.shape).astype(array.dtype) for part, array in zip(parts, arrays, strict=True)]

    def gradient_reducer(
        self,
        parameters: Mapping[str, Parameter],
        is_sharded: Sequence[bool],
        in_float32: bool = True,
        scatters: bool = False,
    ) -> GradientReducer:
        names, leaves = list(parameters), list(parameters.values())
        if not self.group.on_host:
            groups = [list(self.groups_of(name).values()) for name in names]
            return SumDuringBackward(leaves, is_sharded, groups, in_float32, scatters_each=scatters)
        if not scatters:
            return SumAfterBackward(partial(self.sum_gradients, names))
        from trainer.parallel.collectives import reduce_scatter_range

        kinds = list(zip(names, is_sharded, strict=True))
        scattered = [name for name, sharded in kinds if sharded]
        counted = np.array([float(self.writes(name, sharded)) for name, sharded in kinds], np.float32)

        def scatter(place: int, gradient: Tensor) -> Tensor:
            [gradient] = self.sum_gradients([names[place]], [gradient], _BEFORE_SCATTER)
            return reduce_scatter_range(gradient, self.state_group(names[place]))

        def sum_rest(gradients: list[Tensor]) -> list[Tensor]:
            return self.sum_gradients(names, gradients, scattered=scattered)

        return ScatterDuringBackward(leaves, is_sharded, scatter, sum_rest, counted, in_float32)

    def groups_of(self, name: str) -> dict[SumGroup, Group]:
        """The groups over which the gradient of a parameter is summed, one after the other."""
        return {"dp_cp": self.group}

    def sum_gradients(
        self,
        names: Sequence[str],
        gradients: Sequence[Tensor],
        kinds: Sequence[SumGroup] = SUM_GROUPS,
        scattered: Collection[str] = (),
    ) -> list[Tensor]:
        """Each gradient summed over its groups of these kinds, one after the other. The `scattered` ones are ranges,
        which are summed over what follows the scattering."""
        from trainer.parallel.collectives import all_reduce

        found, groups = list(gradients), [self.groups_of(name) for name in names]
        for kind in kinds:
            places = [place for place, name in enumerate(names)
                      if kind in groups[place] and (name not in scattered or kind in _AFTER_SCATTER)]  # fmt: skip
            if not places:
                continue
            group = groups[places[0]][kind]
            for place, total in zip(places, all_reduce([found[place] for place in places], group), strict=True):
                found[place] = total
        return found

    def state_group(self, name: str) -> Group:
        return self.group

    def any(self, flag: bool) -> bool:
        return self.all_sum([float(flag)])[0] > 0

    def barrier(self) -> None:
        self.group.all_gather(np.zeros(1, np.float32))

    def writes(self, name: str, is_sharded: bool = False) -> bool:
        return is_sharded or self.rank == 0


class ModelParallel(ProcessGroup):
    """The ranks of a job that divide a model among them, by its matrices, experts, tokens or stages.

    Args:
        groups: Those of this rank.
        where: Its coordinate in the mesh.
    """

    divides_model = True

    def __init__(self, groups: ProcessGroups, layout: ModelLayout, where: MeshCoordinate) -> None:
        super().__init__(groups.world)
        self.groups, self.layout, self.where, self.data_rank = groups, layout, where, where.data
        self.stage = SingleProcess() if groups.stage is None else ProcessGroup(groups.stage)
        self.skips_empty = groups.ep is None
        self.counts_losses = where.tensor == 0 and where.pipeline == layout.degrees.pipeline_stage - 1
        self.counts_tokens = self.counts_losses and where.context == 0

    def state_group(self, name: str) -> Group | None:
        is_expert = "expert_dp" in self.layout.parameters[name].sums
        return self.groups.expert_dp if is_expert else self.groups.dp_cp

    def groups_of(self, name: str) -> dict[SumGroup, Group]:
        found = {kind: getattr(self.groups, kind) for kind in SUM_GROUPS if kind in self.layout.parameters[name].sums}
        return {kind: group for kind, group in found.items() if group is not None}

    def counted(self, names: Sequence[str], scattered: Collection[str] = ()) -> np.ndarray:
        """What this rank's parts of these parameters count in sums over all ranks: 1, or 0 where another one's do. Of
        the `scattered` ones it has ranges."""
        return np.array([float(self.layout.counts(name, self.where, name in scattered)) for name in names])

    def writes(self, name: str, is_sharded: bool = False) -> bool:
        return self.layout.counts(name, self.where, is_sharded)


def model_parallel(group: Group, settings: ModelConfig, layout: ModelLayout, ulysses: int = 1) -> ModelParallel:
    """The ranks of a job, `group`, that divide a model; `ulysses` as in `group_ranks`."""
    mesh = build_mesh(layout.degrees, group.size)
    groups = process_groups(group, mesh, attention_spec(settings).shared_kv_heads, ulysses)
    return ModelParallel(groups, layout, mesh.coordinate_of(group.rank))


def check_same_values(own: Mapping[str, object], what: str, communicator: Communicator) -> None:
    """Checks that all ranks have the same number or string for each name; a rank need not have all names.

    Raises:
        RunError: Values differ. The message names the ranks that differ from the first rank that has a name.
    """
    first, differing, right = {}, set(), set()
    for rank, data in enumerate(communicator.gather_bytes(json.dumps(own).encode())):
        for name, value in json.loads(data).items():
            first_rank, first_value = first.setdefault(name, (rank, value))
            if first_value != value:
                differing.add(rank)
                right.add(first_rank)
    if differing:
        raise RunError(
            f"the {what} of rank {', '.join(map(str, sorted(differing)))} differ from those of rank"
            f" {', '.join(map(str, sorted(right)))} before the first step",
            fix="give every host the same configuration, data, checkpoint and versions of MindSpore and NumPy",
        )
