"""The token dispatcher of expert parallelism on a device: Megatron-LM's "alltoall"
(`megatron/core/transformer/moe/token_dispatcher.py`). The dispatcher for a CPU is in `trainer.arrays.moe.dispatch`.

Legend: N tokens of a rank, D hidden, E experts, k chosen by a token, S ranks that hold all experts, e = E / S experts
of a rank, R rows of this rank's tokens, Q received rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from mindspore import Tensor, nn

from trainer.ops.routing import Routing, route_received_rows
from trainer.parallel.collectives import DeviceGroup, exchange_counts, exchange_rows

Compute: TypeAlias = Callable[[Tensor, Tensor, Routing], Tensor]
"""(tokens [N, D], gates [N, k], their routing to the experts of this rank) -> weighted sums of the experts' results."""


class AllToAllDispatcher:
    """Sends rows to the ranks of their experts, and the results back.

    A rank sorts its rows by expert, so the rows for one rank are neighbours. The ranks first exchange the number of
    rows for each expert. Rows, results and both gradients then travel in all-to-alls of exactly that many rows.

    Args:
        group: The expert-parallel group. Each rank has equally many experts, in the order of the ranks.
        permute, unpermute: Kernels of `KernelSet`.
    """

    def __init__(self, group: DeviceGroup, permute: nn.Cell, unpermute: nn.Cell) -> None:
        self.group = group
        self.permute = permute
        self.unpermute = unpermute

    def __call__(self, y_ND: Tensor, gates_Nk: Tensor, routing: Routing, compute: Compute) -> Tensor:
        """Returns the weighted sum of its experts' results for each token, [N, D]; `routing` contains tensors."""
        _, row_Nk, token_R, counts_E, *_ = routing  # by place: a device routes to a tuple without names
        rows_RD = self.permute(y_ND, token_R, row_Nk)
        counts_Se, received_counts_Se = exchange_counts(counts_E, self.group)
        send_S = counts_Se.sum(1)
        receive_S = received_counts_Se.sum(1)
        fill_to = None
        if not receive_S.any():  # one row of zeros for this rank's first expert: an Ascend's operators need a row
            fill_to = 1
            received_counts_Se[0, 0] = 1
        rows_QD = _TokenAllToAll(self.group, send_S, receive_S, fill_to)(rows_RD)
        ones_Q1 = Tensor.from_numpy(np.ones((rows_QD.shape[0], 1), np.float32))
        out_QD = compute(rows_QD, ones_Q1, Routing(*map(Tensor.from_numpy, route_received_rows(received_counts_Se))))
        out_RD = _TokenAllToAll(self.group, receive_S, send_S, rows_RD.shape[0])(out_QD)
        return self.unpermute(out_RD, gates_Nk, token_R, row_Nk)


class _TokenAllToAll(nn.Cell):
    """Sends `send_S` rows to each rank and receives `receive_S` rows from each; the backward pass sends gradients back.

    Rows that are not sent get zero gradients. With `fill_to`, zeros fill the result up to that number of rows.
    """

    def __init__(
        self, group: DeviceGroup, send_S: np.ndarray, receive_S: np.ndarray, fill_to: int | None = None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.group = group
        self.send_S = send_S
        self.receive_S = receive_S
        self.fill_to = fill_to

    def construct(self, rows_RD: Tensor) -> Tensor:
        return exchange_rows(rows_RD, self.send_S, self.receive_S, self.group, self.fill_to)

    def bprop(self, rows_RD: Tensor, out: Tensor, grad: Tensor) -> tuple[Tensor]:
        return (exchange_rows(grad, self.receive_S, self.send_S, self.group, rows_RD.shape[0]),)
