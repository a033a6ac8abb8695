"""Reference kernels of experts: right on every device, and fast on a CPU. They compute on the host, with NumPy.

How many rows an expert has changes from call to call. To MindSpore every number of rows is a new shape, which costs two
to four times as much the first time, and a slice of the stacked weights is a slow operator. NumPy has no such costs:
products of some hundred rows, shared among threads and written in place, take the time of one dense product. It reads
tensors in the host's memory as arrays without copying them, and MindSpore takes its results the same way.

So these cells run operator by operator only. MindSpore runs `construct` and `bprop` of a cell with a `bprop` without
recording them. Arithmetic is float32; what leaves has the dtype of what came in.

Legend: N tokens, R rows sorted by expert, E experts, k experts chosen by each token, D hidden, I/O in/out features.
"""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, nn

from trainer.arrays.memory import (
    MOST_MOVED,
    add_rows,
    cast,
    empty,
    expert_parts,
    expert_rows,
    host_threads,
    on_host,
    parts,
    take_tokens,
)
from trainer.ops.routing import DropPolicy, Routing, RoutingRule, SharedTokens, route

_MOST_ROWS = 512  # of one product


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
        return Routing(*map(Tensor.from_numpy, self.of_arrays(on_host(scores_NE), bias_E, capacity, drop_policy)))

    def of_arrays(
        self,
        scores_NE: np.ndarray,
        bias_E: Tensor | None,
        capacity: int | None,
        drop_policy: DropPolicy,
        shared: SharedTokens | None = None,
    ) -> Routing:
        """The same from an array of scores, as arrays; `shared` as in `route`."""
        bias = None if bias_E is None else on_host(bias_E)
        return route(self.rule, scores_NE, bias, capacity, drop_policy, shared)


class GroupedMatmul(nn.Cell):
    """Every expert's rows times its weight: y_RO from (x_RI, weight_EOI, counts_E).

    An expert without rows costs nothing, and its gradient is zero. Rows after the last expert's are not read; they give
    zeros, and zero gradients. The weight is rounded to the dtype of x; its gradient is not.

    Give it the parameter itself: MindSpore copies a view before NumPy sees it, and a view does not tell whether the
    parameter is trained. The gradient of one that is not is not computed.
    """

    def __init__(self, fills_rows: bool = False, reaches_all: bool = False) -> None:
        """Whether every row is one of an expert, and every expert has one, is for an Ascend."""
        super().__init__(auto_prefix=False)
        self.trained, self.frozen = _GroupedMatmulCore(True), _GroupedMatmulCore(False)

    def construct(self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        frozen = isinstance(weight_EOI, Parameter) and not weight_EOI.requires_grad
        return (self.frozen if frozen else self.trained)(x_RI, weight_EOI, counts_E)


class _GroupedMatmulCore(nn.Cell):
    def __init__(self, trained: bool) -> None:
        super().__init__(auto_prefix=False)
        self.trained = trained

    def construct(self, x_RI, weight_EOI, counts_E):
        x, weight, counts = on_host(x_RI), on_host(weight_EOI, x_RI.dtype), counts_E.asnumpy()
        result, y = empty(len(x), weight.shape[1])
        _multiply(x, weight.transpose(0, 2, 1), counts, y)
        return cast(result, x_RI.dtype)

    def bprop(self, x_RI, weight_EOI, counts_E, out, grad_RO):
        x, weight, counts = on_host(x_RI), on_host(weight_EOI, x_RI.dtype), counts_E.asnumpy()
        grad, (result, grad_x) = on_host(grad_RO), empty(*x.shape)
        _multiply(grad, weight, counts, grad_x)
        grad_weight_EOI = cast(weight_gradient(x, grad, counts), weight_EOI.dtype) if self.trained else None
        return cast(result, x_RI.dtype), grad_weight_EOI, None


def _multiply(x: np.ndarray, weight: np.ndarray, counts_E: np.ndarray, out: np.ndarray) -> None:
    """out = each expert's rows of x times its weight, and zeros after them."""
    out[counts_E.sum() :] = 0

    def multiply(part: tuple[int, slice], thread: int) -> None:
        expert, rows = part
        np.matmul(x[rows], weight[expert], out=out[rows])

    host_threads().run(expert_parts(counts_E, _MOST_ROWS), multiply)


def weight_gradient(x: np.ndarray, grad: np.ndarray, counts_E: np.ndarray) -> Tensor:
    """[E, O, I] from what went into a grouped product [R, I] and the gradient of what came out [R, O]."""
    result, grad_weight = empty(len(counts_E), grad.shape[1], x.shape[1])
    grad_weight[counts_E == 0] = 0

    def multiply(part: tuple[int, slice, slice], thread: int) -> None:
        expert, rows, columns = part
        np.matmul(grad[rows, columns].T, x[rows], out=grad_weight[expert, columns])

    # An expert with most of the rows would keep a single thread busy, so its matrix is computed in two halves.
    half = -(-grad.shape[1] // 2)
    halves = (slice(0, half), slice(half, None))
    host_threads().run(((*group, columns) for group in expert_rows(counts_E) for columns in halves), multiply)
    return result


class Permute(nn.Cell):
    """rows_RD from (x_ND, token_R, row_Nk of a routing): each row is the one of its token."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, x_ND, token_R, row_Nk):
        x, token, (result, rows_RD) = on_host(x_ND), token_R.asnumpy(), empty(len(token_R), x_ND.shape[1])

        def copy(rows: slice, thread: int) -> None:
            take_tokens(x, token[rows], rows_RD[rows])

        host_threads().run(parts(slice(0, len(token)), MOST_MOVED), copy)
        return cast(result, x_ND.dtype)

    def bprop(self, x_ND, token_R, row_Nk, out, grad_RD):
        (result, grad_x), row = empty(*x_ND.shape), row_Nk.asnumpy()
        add_rows(on_host(grad_RD), row, None, grad_x)
        return cast(result, x_ND.dtype), None, None


class Unpermute(nn.Cell):
    """out_ND from (y_RD, gates_Nk, token_R, row_Nk): the sum of each token's rows, weighted by their gates."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, y_RD, gates_Nk, token_R, row_Nk):
        result, sum_ND = empty(row_Nk.shape[0], y_RD.shape[1])
        add_rows(on_host(y_RD), row_Nk.asnumpy(), on_host(gates_Nk), sum_ND)
        return cast(result, y_RD.dtype)

    def bprop(self, y_RD, gates_Nk, token_R, row_Nk, out, grad_ND):
        y, grad, row, token = on_host(y_RD), on_host(grad_ND), row_Nk.asnumpy(), token_R.asnumpy()
        (result, grad_y), (gate_R, grad_gate_R) = empty(*y.shape), np.zeros((2, len(y)), np.float32)
        gate_R[row] = on_host(gates_Nk)

        def spread(rows: slice, thread: int) -> None:
            take_tokens(grad, token[rows], grad_y[rows])
            np.einsum("rd,rd->r", y[rows], grad_y[rows], out=grad_gate_R[rows])
            grad_y[rows] *= gate_R[rows, None]

        host_threads().run(parts(slice(0, len(token)), MOST_MOVED), spread)
        return cast(result, y_RD.dtype), cast(Tensor.from_numpy(grad_gate_R[row]), gates_Nk.dtype), None, None
