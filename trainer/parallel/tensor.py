"""Tensor and sequence parallelism: where a model's ranks exchange what they compute.

A block has two pairs of matrices, the first cut by its outputs, the second by its inputs (Shoeybi et al. 2019, section
3). A rank *enters* before the first and *leaves* after the second. The residual stream outside is whole on every rank,
or with sequence parallelism (Korthikanti et al. 2022, section 4.2) each rank has its own token rows of it:

              enter                                leave
plain         x; backward: sum                     sum; backward: the gradient itself
with rows     gather rows; backward: sum, scatter  sum, scatter; backward: gather rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mindspore import nn, ops
from mindspore.ops import operations as P

from trainer.data.batches.context import ContextShard
from trainer.parallel.collectives import (
    AllGather,
    CopyToTensorParallel,
    ProcessGroup,
    ReduceFromTensorParallel,
    ReduceScatter,
    gather_shards,
)
from trainer.parallel.sharding import ShardSpec, shard_range

if TYPE_CHECKING:
    import numpy as np
    from mindspore import Tensor

    from trainer.parallel.layout import ModelLayout
    from trainer.parallel.mesh import MeshCoordinate


class TensorParallel(NamedTuple):
    """The tensor-parallel ranks that compute a model together.

    Attributes:
        sequence_parallel: The residual stream is divided among the ranks by token rows (use_seq_parallel).
    """

    group: ProcessGroup
    sequence_parallel: bool = False

    def column_parallel_input(self) -> nn.Cell:
        """The residual stream [n, D] -> [N, D] on every rank."""
        return AllGather(self.group) if self.sequence_parallel else CopyToTensorParallel(self.group)

    def row_parallel_output(self) -> nn.Cell:
        """A part of each number of [N, D] on every rank -> the residual stream [n, D]."""
        return ReduceScatter(self.group) if self.sequence_parallel else ReduceFromTensorParallel(self.group)

    def gathered_rows(self, rows: int) -> int:
        """How many rows `gather` makes of so many."""
        return rows * self.group.size if self.sequence_parallel else rows

    def gather_tokens(self, local_nD: np.ndarray) -> np.ndarray:
        """`enter` of arrays, and the backward pass of `leave`: [n, D] -> [N, D]; of ranks on CPUs."""
        return self.group.all_gather_rows(local_nD) if self.sequence_parallel else local_nD

    def reduce_partial(self, partial_ND: np.ndarray) -> np.ndarray:
        """`leave` of arrays, and the backward pass of `enter`: [N, D] -> [n, D]; of ranks on CPUs. It is used up."""
        if self.sequence_parallel:
            return self.group.reduce_scatter(partial_ND)
        return self.group.all_reduce_into(partial_ND, partial_ND)

    def residual_shard(self, tokens: int) -> slice:
        """The token rows of the residual stream that this rank has."""
        return self.token_shard(tokens) if self.sequence_parallel else slice(0, tokens)

    def token_shard(self, tokens: int) -> slice:
        """The token rows that this rank sends to experts."""
        return shard_range(tokens, self.group.rank, self.group.size)

    def column_shard(self, width: int) -> slice:
        """The columns that this rank has of what is cut by columns."""
        return shard_range(width, self.group.rank, self.group.size)


class RowParallelOutputAfter(nn.Cell):
    """(x, made_from) -> `TensorParallel.row_parallel_output` of x, for code that a backward pass may run again.

    Its backward pass gathers nothing before there is `made_from`, which all earlier collectives of the sublayer lead
    to: those of `enter` and of attention. Otherwise the collectives of a block that is recomputed would not depend on
    each other, and each rank might call them in an order of its own.
    """

    def __init__(self, tensor: TensorParallel) -> None:
        super().__init__()
        self.row_parallel_output = tensor.row_parallel_output()
        self.sequence_parallel = tensor.sequence_parallel
        self.depend = P.Depend()
        self.gather = AllGather(tensor.group) if tensor.sequence_parallel else None

    def construct(self, x, made_from):
        return self.row_parallel_output(x)

    def bprop(self, x, made_from, out, grad):
        if self.sequence_parallel:
            grad = self.gather(self.depend(grad, made_from))
        return grad, ops.zeros(made_from.shape, made_from.dtype)


class RankModelShard(NamedTuple):
    """What one rank has of a model: parts of some of its parameters; and the ranks that it computes it with.

    Attributes:
        tensor: None where the rank computes whole matrices.
        experts: The ranks that hold all experts together; None where it has all of them.
        tokens: Those of each sequence that it has.
        sharing: The ranks that share the tokens of a micro-batch for the experts; None where it has all of them.
        ring, ulysses: The context-parallel ranks, see `trainer.parallel.process_groups`.
    """

    layout: ModelLayout
    where: MeshCoordinate
    tensor: TensorParallel | None = None
    experts: ProcessGroup | None = None
    tokens: ContextShard = ContextShard(0, 1)
    sharing: ProcessGroup | None = None
    ring: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None

    def holds(self, name: str) -> bool:
        """Whether the rank has this parameter, whole or a part of it."""
        return self.layout.holds(name, self.where)

    def shard_spec(self, name: str) -> ShardSpec:
        """What the rank has of a parameter."""
        return self.layout.shard_spec(name, self.where)


class TensorShardedMatrices(NamedTuple):
    """Matrices that tensor-parallel ranks share, for an update that needs them whole.

    Attributes:
        shard: What this rank has of them.
    """

    shard: RankModelShard

    def unshard(self, name: str, part: Tensor) -> Tensor:
        """The matrix, or a tensor like it, of which each rank has such a part; all ranks call it."""
        one = self.shard.layout.parameters[name]
        group = self.shard.tensor.group
        if not self._is_cut(name):
            return part
        parts = gather_shards(group, part)
        return ops.concat(parts[:: group.size // one.shards], one.dimension)

    def local_shard(self, name: str, unsharded: Tensor) -> Tensor:
        """This rank's part of it."""
        if not self._is_cut(name):
            return unsharded
        return unsharded[self.shard.shard_spec(name).shard.slices]

    def _is_cut(self, name: str) -> bool:
        one = self.shard.layout.parameters[name]
        return one.by == "tp" and one.shards > 1
