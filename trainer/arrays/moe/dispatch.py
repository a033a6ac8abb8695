"""The token dispatchers "alltoall" and "allgather" of Megatron-LM, on arrays.

Both have the methods and results of `CpuExperts`, which serves a rank that has all experts.

Legend: N tokens of a rank, D hidden, E experts, k chosen by a token, S ranks that hold all experts, e = E / S experts
of a rank, R rows of this rank's tokens, Q rows that it receives.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.arrays.memory import combine_expert_rows, empty, gates_of_rows, rows_of_tokens
from trainer.arrays.moe.experts import CpuExperts, ExpertGradients, ExpertWeights, SavedExperts
from trainer.data.batches.context import ContextShard
from trainer.ops.routing import Routing, SharedTokens, local_routing, route_received_rows

if TYPE_CHECKING:
    from trainer.config.schema.moe import MoEConfig
    from trainer.parallel.host_group import CpuGroup


def token_dispatcher(
    experts: CpuExperts, moe: MoEConfig, group: CpuGroup | None
) -> CpuExperts | AllToAllExperts | AllGatherExperts:
    """Returns the dispatcher that computes the experts of a layer.

    Args:
        group: The ranks that shard the experts; None: this rank has all of them.
    """
    if group is None:
        return experts
    if moe.moe_token_dispatcher_type == "allgather":
        return AllGatherExperts(experts, group)
    return AllToAllExperts(experts, group)


class _Exchanged(NamedTuple):
    """The arrays that `AllToAllExperts` saves for its backward pass."""

    send_S: np.ndarray
    receive_S: np.ndarray
    rows_QD: np.ndarray
    local: Routing
    saved: SavedExperts
    out_RD: np.ndarray


class AllToAllExperts:
    """Sends rows to the ranks of their experts, and results back.

    A rank's rows are sorted by expert, so the rows for one rank are neighbours. The ranks exchange how many rows there
    are for each expert; rows, results and both gradients then travel in all-to-alls of exactly these sizes.
    """

    def __init__(self, experts: CpuExperts, group: CpuGroup) -> None:
        self.experts = experts
        self.group = group

    def forward(
        self, x_ND: np.ndarray, gates_Nk: np.ndarray, weights: ExpertWeights, routing: Routing
    ) -> tuple[np.ndarray, _Exchanged]:
        """Returns the sums of all experts of each token, [N, D], and the saved arrays for `backward`."""
        rows_RD = rows_of_tokens(x_ND, routing.token_R)
        sent_Se = routing.counts_E.reshape(self.group.size, -1)
        received_Se = np.stack(self.group.all_to_all(list(sent_Se), [sent_Se[0].shape] * self.group.size))
        send_S = sent_Se.sum(1)
        receive_S = received_Se.sum(1)
        rows_QD = self._exchange(rows_RD, send_S, receive_S, int(receive_S.sum()))
        local = route_received_rows(received_Se)
        out_QD, saved = self.experts.forward(rows_QD, np.ones((len(rows_QD), 1), np.float32), weights, local)
        out_RD = self._exchange(out_QD, receive_S, send_S, len(rows_RD))
        out_ND = empty(*x_ND.shape)
        combine_expert_rows(out_RD, routing.row_Nk, gates_Nk, out_ND)
        return out_ND, _Exchanged(send_S, receive_S, rows_QD, local, saved, out_RD)

    def backward(
        self, x_ND: np.ndarray, gates_Nk: np.ndarray, weights: ExpertWeights, routing: Routing, saved: _Exchanged,
        grad_ND: np.ndarray, trained: Collection[str],
    ) -> ExpertGradients:  # fmt: skip
        """Returns the gradients of tokens, gates and weights; `trained` has fields of `ExpertWeights`."""
        grad_RD = rows_of_tokens(grad_ND, routing.token_R)
        grad_gate_R = np.einsum("rd,rd->r", saved.out_RD, grad_RD)
        grad_RD *= gates_of_rows(gates_Nk, routing.row_Nk, len(grad_RD))[:, None]
        grad_QD = self._exchange(grad_RD, saved.send_S, saved.receive_S, len(saved.rows_QD))
        ones_Q1 = np.ones((len(saved.rows_QD), 1), np.float32)
        gradients = self.experts.backward(
            saved.rows_QD, ones_Q1, weights, saved.local, saved.saved, grad_QD, trained
        )
        grad_rows_RD = self._exchange(gradients.x_ND, saved.receive_S, saved.send_S, len(grad_RD))
        grad_x_ND = empty(*x_ND.shape)
        combine_expert_rows(grad_rows_RD, routing.row_Nk, None, grad_x_ND)
        return ExpertGradients(grad_x_ND, grad_gate_R[routing.row_Nk], gradients.weights)

    def _exchange(self, rows_RD: np.ndarray, send_S: np.ndarray, receive_S: np.ndarray, number: int) -> np.ndarray:
        """Sends `send_S` rows to the ranks, and returns the received rows, padded with zeros to `number` rows."""
        total = int(receive_S.sum())
        result = empty(number, rows_RD.shape[1])
        result[total:] = 0
        self.group.all_to_all_into(
            np.split(rows_RD[: send_S.sum()], np.cumsum(send_S)[:-1]),
            np.split(result[:total], np.cumsum(receive_S)[:-1]),
        )
        return result


class _Gathered(NamedTuple):
    """The arrays that `AllGatherExperts` saves for its backward pass, with the M tokens of all ranks."""

    x_MD: np.ndarray
    gates_Mk: np.ndarray
    local: Routing
    saved: SavedExperts


class AllGatherExperts:
    """Gathers the tokens of all ranks; each rank computes its experts for them, and a reduce-scatter sums the results.

    The ranks have equally many tokens.
    """

    def __init__(self, experts: CpuExperts, group: CpuGroup) -> None:
        self.experts = experts
        self.group = group

    def forward(
        self, x_ND: np.ndarray, gates_Nk: np.ndarray, weights: ExpertWeights, routing: Routing
    ) -> tuple[np.ndarray, _Gathered]:
        """Returns the sums of all experts of each token, [N, D], and the saved arrays for `backward`."""
        experts = len(routing.counts_E)
        kept_Nk = np.where(routing.row_Nk < routing.counts_E.sum(), routing.experts_Nk, np.int32(experts))
        experts_Mk = self.group.all_gather_rows(kept_Nk)
        local = local_routing(experts_Mk, self.group.rank, experts // self.group.size)
        x_MD = self.group.all_gather_rows(x_ND)
        gates_Mk = self.group.all_gather_rows(gates_Nk)
        out_MD, saved = self.experts.forward(x_MD, gates_Mk, weights, local)
        return self.group.reduce_scatter(out_MD), _Gathered(x_MD, gates_Mk, local, saved)

    def backward(
        self, x_ND: np.ndarray, gates_Nk: np.ndarray, weights: ExpertWeights, routing: Routing, saved: _Gathered,
        grad_ND: np.ndarray, trained: Collection[str],
    ) -> ExpertGradients:  # fmt: skip
        """Returns the gradients of tokens, gates and weights; `trained` has fields of `ExpertWeights`."""
        grad_MD = self.group.all_gather_rows(grad_ND)
        gradients = self.experts.backward(
            saved.x_MD, saved.gates_Mk, weights, saved.local, saved.saved, grad_MD, trained
        )
        grad_x_ND = self.group.reduce_scatter(gradients.x_ND)
        return ExpertGradients(grad_x_ND, self.group.reduce_scatter(gradients.gates_Nk), gradients.weights)


class TokenSharingGroup:
    """The ranks that share the tokens of each micro-batch; capacity and auxiliary loss count the tokens of all of them.

    Args:
        group: The context-parallel ranks with their tensor-parallel ranks, which are neighbours and have equally many
            of their common token rows.
        tokens: The tokens of each sequence that this rank shares with its tensor-parallel ranks.
    """

    def __init__(self, group: CpuGroup, tokens: ContextShard) -> None:
        self.group = group
        self.tokens = tokens
        self.shared_tokens = functools.cache(self._shared_tokens)

    def _shared_tokens(self, sequences: int, tokens: int) -> SharedTokens:
        """Returns the sharing of a micro-batch of `sequences` sequences, of which each rank has `tokens` tokens."""
        length = tokens * self.group.size // sequences
        parts = (self.tokens._replace(rank=rank) for rank in range(self.tokens.ranks))
        rows = np.stack([part.rows(sequences, length) for part in parts]).reshape(self.group.size, -1)
        return SharedTokens(rows, self.group.rank, length, self.group.all_gather)
