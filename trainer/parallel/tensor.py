"""Tensor and sequence parallelism: the collectives around sharded matrices.

A block has two pairs of matrices: the first is sharded by its outputs (column-parallel), the second by its inputs
(row-parallel; Shoeybi et al. 2019, section 3). The residual stream outside is replicated on every rank, or with
sequence parallelism (Korthikanti et al. 2022, section 4.2) sharded by tokens:

                     column-parallel input                   row-parallel output
tensor parallelism   copy; backward: all-reduce              all-reduce; backward: copy
with sequence p.     all-gather; backward: reduce-scatter    reduce-scatter; backward: all-gather
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mindspore import Tensor, nn, ops
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

    from trainer.parallel.layout import ModelLayout
    from trainer.parallel.mesh import MeshCoordinate


class TensorParallel(NamedTuple):
    """The tensor-parallel ranks that compute a model together.

    Attributes:
        sequence_parallel: The ranks shard the tokens of the residual stream (use_seq_parallel).
    """

    group: ProcessGroup
    sequence_parallel: bool = False

    def column_parallel_input(self) -> nn.Cell:
        """Returns the cell before a column-parallel matrix: residual stream [n, D] -> [N, D] on every rank."""
        if self.sequence_parallel:
            return AllGather(self.group)
        return CopyToTensorParallel(self.group)

    def row_parallel_output(self) -> nn.Cell:
        """Returns the cell after a row-parallel matrix: partial sums [N, D] on every rank -> residual stream [n, D]."""
        if self.sequence_parallel:
            return ReduceScatter(self.group)
        return ReduceFromTensorParallel(self.group)

    def gathered_rows(self, rows: int) -> int:
        """Returns how many rows `gather_tokens` makes of this number of rows."""
        if self.sequence_parallel:
            return rows * self.group.size
        return rows

    def gather_tokens(self, local_nD: np.ndarray) -> np.ndarray:
        """Makes the residual stream [n, D] -> [N, D] on every rank; for arrays, on CPUs.

        This is the forward pass of `column_parallel_input` and the backward pass of `row_parallel_output`.
        """
        if not self.sequence_parallel:
            return local_nD
        assert self.group.on_host
        return self.group.all_gather_rows(local_nD)

    def reduce_partial(self, partial_ND: np.ndarray) -> np.ndarray:
        """Makes partial sums [N, D] -> residual stream [n, D]; for arrays, on CPUs. May overwrite `partial_ND`.

        This is the forward pass of `row_parallel_output` and the backward pass of `column_parallel_input`.
        """
        assert self.group.on_host
        if self.sequence_parallel:
            return self.group.reduce_scatter(partial_ND)
        return self.group.all_reduce_into(partial_ND, partial_ND)

    def residual_shard(self, tokens: int) -> slice:
        """Returns which tokens of the residual stream this rank has: a shard with sequence parallelism, else all."""
        if self.sequence_parallel:
            return self.token_shard(tokens)
        return slice(0, tokens)

    def token_shard(self, tokens: int) -> slice:
        """Returns this rank's shard of the tokens, which it sends to experts."""
        return shard_range(tokens, self.group.rank, self.group.size)

    def column_shard(self, width: int) -> slice:
        """Returns this rank's columns of an activation that is sharded by columns."""
        return shard_range(width, self.group.rank, self.group.size)


class RowParallelOutputAfter(nn.Cell):
    """(x, made_from) -> `TensorParallel.row_parallel_output` of x, for blocks that are recomputed.

    Its backward pass gathers nothing before `made_from` exists, on which all earlier collectives of the sublayer lead.
    Otherwise the collectives of a recomputed block would not depend on each other, and ranks might call them in
    different orders.
    """

    def __init__(self, tensor: TensorParallel) -> None:
        super().__init__()
        self.row_parallel_output = tensor.row_parallel_output()
        self.sequence_parallel = tensor.sequence_parallel
        self.depend = P.Depend()
        self.gather = AllGather(tensor.group)

    def construct(self, x: Tensor, made_from: Tensor) -> Tensor:
        return self.row_parallel_output(x)

    def bprop(self, x: Tensor, made_from: Tensor, out: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers the gradient after `made_from` is computed, and returns zeros for `made_from`."""
        if self.sequence_parallel:
            grad = self.gather(self.depend(grad, made_from))
        return grad, ops.zeros(made_from.shape, made_from.dtype)


class RankModelShard(NamedTuple):
    """One rank's shard of a model, and the groups of ranks with which it computes the model.

    Attributes:
        tensor: The tensor-parallel ranks; None where matrices are not sharded.
        experts: The expert-parallel ranks; None where the rank has all experts.
        tokens: The rank's tokens of each sequence (context parallelism).
        sharing: The ranks that shard the tokens of a micro-batch for the experts; None where the rank has all tokens.
        ring, ulysses: The context-parallel ranks, see `trainer.parallel.process_groups`.
    """

    layout: ModelLayout
    coordinate: MeshCoordinate
    tensor: TensorParallel | None = None
    experts: ProcessGroup | None = None
    tokens: ContextShard = ContextShard(0, 1)
    sharing: ProcessGroup | None = None
    ring: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None

    def holds(self, name: str) -> bool:
        """Returns whether the rank has this parameter or a shard of it."""
        return self.layout.holds(name, self.coordinate)

    def shard_spec(self, name: str) -> ShardSpec:
        """Returns the spec of the rank's shard of a parameter."""
        return self.layout.shard_spec(name, self.coordinate)


class TensorShardedMatrices(NamedTuple):
    """The matrices that tensor-parallel ranks shard, for an optimizer that needs them unsharded (Muon)."""

    shard: RankModelShard

    def unshard(self, name: str, local: Tensor) -> Tensor:
        """Gathers a matrix, or a tensor like it, from the ranks' shards; all ranks must call this."""
        if self.shard.tensor is None or not self._is_sharded(name):
            return local
        one = self.shard.layout.parameters[name]
        group = self.shard.tensor.group
        shards = gather_shards(group, local)
        return ops.concat(shards[:: group.size // one.shards], one.dimension)

    def local_shard(self, name: str, unsharded: Tensor) -> Tensor:
        """Returns this rank's shard of an unsharded matrix."""
        if not self._is_sharded(name):
            return unsharded
        return unsharded[self.shard.shard_spec(name).shard.slices]

    def _is_sharded(self, name: str) -> bool:
        one = self.shard.layout.parameters[name]
        return one.by == "tp" and one.shards > 1
