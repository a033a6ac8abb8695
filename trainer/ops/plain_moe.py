"""Plain kernels of experts, computed on the host: for context.mode 1, and where the audit counts what they replace.

How many rows an expert has changes from call to call. To MindSpore every number of rows is a new shape, so these cells
run operator by operator only. MindSpore runs `construct` and `bprop` of a cell with a `bprop` without recording them.
Arithmetic is float32; what leaves has the dtype of what came in.

Legend: N tokens, R rows sorted by expert, E experts, k experts chosen by each token, D hidden, I/O in/out features.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn

from trainer.arrays.memory import cast, expert_rows, host_array
from trainer.ops.routing import DropPolicy, Routing, RoutingRule, route


class Route(nn.Cell):
    """(scores_NE, bias_E or None, capacity or None, drop_policy) -> Routing of tensors, without a gradient."""

    def __init__(self, rule: RoutingRule) -> None:
        super().__init__(auto_prefix=False)
        self.rule = rule

    def construct(
        self, scores_NE: Tensor, bias_E: Tensor | None, capacity: int | None, drop_policy: DropPolicy
    ) -> Routing:
        bias = None if bias_E is None else host_array(bias_E)
        return Routing(*map(Tensor.from_numpy, route(self.rule, host_array(scores_NE), bias, capacity, drop_policy)))


class GroupedMatmul(nn.Cell):
    """Every expert's rows times its weight: y_RO from (x_RI, weight_EOI, counts_E).

    The gradient of an expert without rows is zero. Rows after the last expert's give zeros, and zero gradients. The
    weight is rounded to the dtype of x; its gradient is not.
    """

    def __init__(self, fills_rows: bool = False, reaches_all: bool = False) -> None:
        """Whether every row is one of an expert, and every expert has one, is for an Ascend."""
        super().__init__(auto_prefix=False)

    def construct(self, x_RI, weight_EOI, counts_E):
        x = host_array(x_RI)
        weight = host_array(weight_EOI, x_RI.dtype)
        y = np.zeros((len(x), weight.shape[1]), np.float32)
        for expert, rows in expert_rows(counts_E.asnumpy()):
            y[rows] = x[rows] @ weight[expert].T
        return cast(Tensor.from_numpy(y), x_RI.dtype)

    def bprop(self, x_RI, weight_EOI, counts_E, out, grad_RO):
        x = host_array(x_RI)
        weight = host_array(weight_EOI, x_RI.dtype)
        grad = host_array(grad_RO)
        grad_x = np.zeros(x.shape, np.float32)
        grad_weight = np.zeros(weight.shape, np.float32)
        for expert, rows in expert_rows(counts_E.asnumpy()):
            grad_x[rows] = grad[rows] @ weight[expert]
            grad_weight[expert] = grad[rows].T @ x[rows]
        return cast(Tensor.from_numpy(grad_x), x_RI.dtype), cast(Tensor.from_numpy(grad_weight), weight_EOI.dtype), None


class Permute(nn.Cell):
    """rows_RD from (x_ND, token_R, row_Nk of a routing): each row is the one of its token, or zeros without one."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, x_ND, token_R, row_Nk):
        return cast(Tensor.from_numpy(_rows_of_tokens(host_array(x_ND), token_R.asnumpy())), x_ND.dtype)

    def bprop(self, x_ND, token_R, row_Nk, out, grad_RD):
        grad_x = host_array(grad_RD)[row_Nk.asnumpy()].sum(1)
        return cast(Tensor.from_numpy(grad_x), x_ND.dtype), None, None


class Unpermute(nn.Cell):
    """out_ND from (y_RD, gates_Nk, token_R, row_Nk): the sum of each token's rows, weighted by their gates."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, y_RD, gates_Nk, token_R, row_Nk):
        sums = (host_array(y_RD)[row_Nk.asnumpy()] * host_array(gates_Nk)[..., None]).sum(1)
        return cast(Tensor.from_numpy(sums), y_RD.dtype)

    def bprop(self, y_RD, gates_Nk, token_R, row_Nk, out, grad_ND):
        y = host_array(y_RD)
        row = row_Nk.asnumpy()
        gate_R = np.zeros(len(y), np.float32)
        gate_R[row] = host_array(gates_Nk)
        grad_y = _rows_of_tokens(host_array(grad_ND), token_R.asnumpy())
        grad_gates = np.einsum("rd,rd->r", y, grad_y)[row]
        grad_y *= gate_R[:, None]
        return (
            cast(Tensor.from_numpy(grad_y), y_RD.dtype), cast(Tensor.from_numpy(grad_gates), gates_Nk.dtype),
            None, None,
        )  # fmt: skip


def _rows_of_tokens(x_ND: np.ndarray, token_R: np.ndarray) -> np.ndarray:
    rows_RD = np.zeros((len(token_R), x_ND.shape[1]), np.float32)
    is_token_R = token_R < len(x_ND)
    rows_RD[is_token_R] = x_ND[token_R[is_token_R]]
    return rows_RD
