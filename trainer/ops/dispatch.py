"""How tokens meet experts where ranks of a device share both: Megatron-LM's token dispatcher "alltoall"
(`megatron/core/transformer/moe/token_dispatcher.py`). A CPU has it in `trainer.arrays.moe.dispatch`.

Legend: N tokens of a rank, D hidden, E experts, k chosen by a token, S ranks that hold all experts, e = E / S experts
of a rank, R rows of this rank's tokens, Q received rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from mindspore import Tensor, nn

from trainer.ops.routing import Routing, rows_of_experts
from trainer.parallel.collectives import DeviceGroup, exchange_counts, exchange_rows

Compute: TypeAlias = Callable[[Tensor, Tensor, Routing], Tensor]
"""(tokens [N, D], gates [N, k], where they go among this rank's experts) -> the weighted sums of their experts."""


class AllToAllDispatcher:
    """Sends rows to the ranks of their experts, and results back.

    A rank's rows stand sorted by expert, so those for one rank stand together. The ranks tell each other how many rows
    there are for each expert; rows, results and both gradients then travel in all-to-alls of exactly so many rows.

    Args:
        group: Its ranks hold equally many experts each, in their order.
        permute, unpermute: Kernels.
    """

    def __init__(self, group: DeviceGroup, permute: nn.Cell, unpermute: nn.Cell) -> None:
        self.group = group
        self.permute = permute
        self.unpermute = unpermute

    def __call__(self, y_ND: Tensor, gates_Nk: Tensor, routing: Routing, compute: Compute) -> Tensor:
        """The weighted sums of all experts of each token, [N, D]; `routing` has tensors."""
        row_Nk = routing[1]
        token_R = routing[2]
        counts_E = routing[3]
        rows_RD = self.permute(y_ND, token_R, row_Nk)
        counts_Se, received_counts_Se = exchange_counts(counts_E, self.group)
        send_S = counts_Se.sum(1)
        receive_S = received_counts_Se.sum(1)
        rows = None
        if not receive_S.any():
            received_counts_Se[0, 0] = rows = 1  # a row of zeros: an Ascend's operators may not take none
        rows_QD = _TokenAllToAll(self.group, send_S, receive_S, rows)(rows_RD)
        ones_Q1 = Tensor.from_numpy(np.ones((rows_QD.shape[0], 1), np.float32))
        out_QD = compute(rows_QD, ones_Q1, Routing(*map(Tensor.from_numpy, rows_of_experts(received_counts_Se))))
        out_RD = _TokenAllToAll(self.group, receive_S, send_S, rows_RD.shape[0])(out_QD)
        return self.unpermute(out_RD, gates_Nk, token_R, row_Nk)


class _TokenAllToAll(nn.Cell):
    """One all-to-all of rows [n, D], `send_S` of them to each rank and `receive_S` from each; backward, the way back.

    Rows after those that are sent get zero gradients. `rows`: with so many rows, zeros after those that come back.
    """

    def __init__(self, group: DeviceGroup, send_S: np.ndarray, receive_S: np.ndarray, rows: int | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.group = group
        self.send_S = send_S
        self.receive_S = receive_S
        self.rows = rows

    def construct(self, rows_RD: Tensor) -> Tensor:
        return exchange_rows(rows_RD, self.send_S, self.receive_S, self.group, self.rows)

    def bprop(self, rows_RD: Tensor, out: Tensor, grad: Tensor) -> tuple[Tensor]:
        return (exchange_rows(grad, self.receive_S, self.send_S, self.group, rows_RD.shape[0]),)
