"""Reference kernels of experts: right on every device, and fast on a CPU. They compute on the host, with NumPy.

How many rows an expert has changes from call to call. To MindSpore every number of rows is a new shape, which costs two
to four times as much the first time, and a slice of the stacked weights is a slow operator. NumPy knows no such costs:
a product for each expert that has rows, written where it belongs, takes the time of one dense product. It sees tensors
in the host's memory as arrays without copying them, and so does MindSpore with its results.

So these cells run operator by operator only. MindSpore runs `construct` and `bprop` of a cell with a `bprop` without
recording them. Arithmetic is float32; what leaves has the dtype of what came in.

Legend: N tokens, R rows sorted by expert, E experts, k experts chosen by each token, D hidden, I/O in/out features.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from trainer.ops.routing import DropPolicy, Routing, RoutingRule, route


class Route(nn.Cell):
    """(scores_NE, bias_E or None, capacity or None, drop_policy) -> Routing of tensors. No gradient flows through it.

    The arguments of the cell are those of `RoutingRule`.
    """

    def __init__(self, experts: int, chosen: int, **rule) -> None:
        super().__init__(auto_prefix=False)
        self.rule = RoutingRule(experts, chosen, **rule)

    def construct(
        self, scores_NE: Tensor, bias_E: Tensor | None, capacity: int | None, drop_policy: DropPolicy
    ) -> Routing:
        bias = None if bias_E is None else _on_host(bias_E)
        routing = route(self.rule, _on_host(scores_NE), bias, capacity, drop_policy)
        return Routing(*map(Tensor.from_numpy, routing))


class GroupedMatmul(nn.Cell):
    """Every expert's rows times its weight: y_RO from (x_RI, weight_EOI, counts_E).

    An expert without rows costs nothing, and its gradient is zero. Rows after the last expert's are not read; they give
    zeros, and zero gradients. The weight is rounded to the dtype of x; its gradient is not.

    Give it the parameter itself: to see a view of it, MindSpore copies it.
    """

    def construct(self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        x, weight, counts = _on_host(x_RI), _on_host(weight_EOI, x_RI.dtype), counts_E.asnumpy()
        y = _rows_like(x, weight.shape[1], counts)
        for expert, rows in _groups(counts):
            np.matmul(x[rows], weight[expert].T, out=y[rows])
        return _from_host(y, x_RI.dtype)

    def bprop(self, x_RI, weight_EOI, counts_E, out, grad_RO):
        x, weight, counts = _on_host(x_RI), _on_host(weight_EOI, x_RI.dtype), counts_E.asnumpy()
        grad = _on_host(grad_RO)
        grad_x, grad_weight = _rows_like(x, x.shape[1], counts), np.empty_like(weight)
        grad_weight[counts == 0] = 0
        for expert, rows in _groups(counts):
            np.matmul(grad[rows], weight[expert], out=grad_x[rows])
            np.matmul(grad[rows].T, x[rows], out=grad_weight[expert])
        return _from_host(grad_x, x_RI.dtype), _from_host(grad_weight, weight_EOI.dtype), None


def _groups(counts_E: np.ndarray) -> list[tuple[int, slice]]:
    """Experts that have rows, and these."""
    ends = np.cumsum(counts_E)
    return [(expert, slice(ends[expert] - counts_E[expert], ends[expert])) for expert in np.flatnonzero(counts_E)]


def _rows_like(x: np.ndarray, width: int, counts_E: np.ndarray) -> np.ndarray:
    """Rows to be written group by group; those in no group are zeros already."""
    rows = np.empty((len(x), width), np.float32)
    rows[counts_E.sum() :] = 0
    return rows


class Permute(nn.Cell):
    """rows_RD from (x_ND, routing): each row is the one of its token."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.core = _PermuteCore()

    def construct(self, x_ND: Tensor, routing: Routing) -> Tensor:
        return self.core(x_ND, routing.token_R, routing.row_Nk)


class _PermuteCore(nn.Cell):
    def construct(self, x_ND, token_R, row_Nk):
        return _from_host(_rows_of_tokens(_on_host(x_ND), token_R.asnumpy(), row_Nk.size), x_ND.dtype)

    def bprop(self, x_ND, token_R, row_Nk, out, grad_RD):
        grad_x = _on_host(grad_RD)[row_Nk.asnumpy()].sum(1)
        return _from_host(grad_x, x_ND.dtype), None, None


class Unpermute(nn.Cell):
    """out_ND from (y_RD, gates_Nk, routing): the sum of each token's rows, weighted by their gates."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.core = _UnpermuteCore()

    def construct(self, y_RD: Tensor, gates_Nk: Tensor, routing: Routing) -> Tensor:
        return self.core(y_RD, gates_Nk, routing.token_R, routing.row_Nk)


class _UnpermuteCore(nn.Cell):
    def construct(self, y_RD, gates_Nk, token_R, row_Nk):
        rows_NkD = _on_host(y_RD)[row_Nk.asnumpy()]
        return _from_host(np.einsum("nk,nkd->nd", _on_host(gates_Nk), rows_NkD), y_RD.dtype)

    def bprop(self, y_RD, gates_Nk, token_R, row_Nk, out, grad_ND):
        row = row_Nk.asnumpy()
        grad_y = _rows_of_tokens(_on_host(grad_ND), token_R.asnumpy(), row.size)
        grad_gates = np.einsum("rd,rd->r", _on_host(y_RD), grad_y)[row]
        gate_R = np.zeros(len(grad_y), np.float32)
        gate_R[row] = _on_host(gates_Nk)
        grad_y *= gate_R[:, None]
        return _from_host(grad_y, y_RD.dtype), _from_host(grad_gates, gates_Nk.dtype), None, None


def _rows_of_tokens(x: np.ndarray, token_R: np.ndarray, assignments: int) -> np.ndarray:
    """x[token_R], and zeros where there is no such token."""
    rows = np.empty((len(token_R), x.shape[1]), np.float32)
    np.take(x, token_R, axis=0, out=rows, mode="clip")  # other modes copy `out`
    if len(token_R) > assignments:
        rows[token_R == len(x)] = 0
    return rows


def _on_host(tensor: Tensor, rounded_to=mstype.float32) -> np.ndarray:
    """The numbers of a tensor, which are only to be read, in float32."""
    if rounded_to != mstype.float32:
        tensor = tensor.astype(rounded_to)
    return tensor.astype(mstype.float32).asnumpy()


def _from_host(array: np.ndarray, dtype) -> Tensor:
    return Tensor.from_numpy(array).astype(dtype)
