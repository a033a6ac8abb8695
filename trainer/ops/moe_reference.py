"""Reference kernels of experts: right on every device, and fast on a CPU. They compute on the host, with NumPy.

How many rows an expert has changes from call to call. To MindSpore every number of rows is a new shape, which costs two
to four times as much the first time, and a slice of the stacked weights is a slow operator. NumPy knows no such costs:
products of some hundred rows, shared among threads and written where they belong, take the time of one dense product.
It sees tensors in the host's memory as arrays without copying them, and so does MindSpore with its results.

So these cells run operator by operator only. MindSpore runs `construct` and `bprop` of a cell with a `bprop` without
recording them. Arithmetic is float32; what leaves has the dtype of what came in.

Results stand in memory of MindSpore's pool, which is used again and again: fresh memory from the operating system costs
a product another tenth of its time.

Legend: N tokens, R rows sorted by expert, E experts, k experts chosen by each token, D hidden, I/O in/out features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore import dtype as mstype

from trainer.host_threads import HostThreads
from trainer.ops.routing import DropPolicy, Routing, RoutingRule, route

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
        bias = None if bias_E is None else _on_host(bias_E)
        routing = route(self.rule, _on_host(scores_NE), bias, capacity, drop_policy)
        return Routing(*map(Tensor.from_numpy, routing))


class GroupedMatmul(nn.Cell):
    """Every expert's rows times its weight: y_RO from (x_RI, weight_EOI, counts_E).

    An expert without rows costs nothing, and its gradient is zero. Rows after the last expert's are not read; they give
    zeros, and zero gradients. The weight is rounded to the dtype of x; its gradient is not.

    Give it the parameter itself: MindSpore copies a view before NumPy sees it, and a view does not tell whether the
    parameter is trained. The gradient of one that is not is not computed.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.trained, self.frozen = _GroupedMatmulCore(True), _GroupedMatmulCore(False)

    def construct(self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        frozen = isinstance(weight_EOI, Parameter) and not weight_EOI.requires_grad
        return (self.frozen if frozen else self.trained)(x_RI, weight_EOI, counts_E)


class _GroupedMatmulCore(nn.Cell):
    def __init__(self, trained: bool) -> None:
        super().__init__(auto_prefix=False)
        self.trained, self.threads = trained, _threads()

    def construct(self, x_RI, weight_EOI, counts_E):
        x, weight, counts = _on_host(x_RI), _on_host(weight_EOI, x_RI.dtype), counts_E.asnumpy()
        result, y = _empty(len(x), weight.shape[1])
        y[counts.sum() :] = 0

        def multiply(part: tuple[int, slice], thread: int) -> None:
            expert, rows = part
            np.matmul(x[rows], weight[expert].T, out=y[rows])

        self.threads.run(_parts(counts), multiply)
        return _cast(result, x_RI.dtype)

    def bprop(self, x_RI, weight_EOI, counts_E, out, grad_RO):
        x, weight, counts = _on_host(x_RI), _on_host(weight_EOI, x_RI.dtype), counts_E.asnumpy()
        grad, (result, grad_x) = _on_host(grad_RO), _empty(*x.shape)
        grad_x[counts.sum() :] = 0

        def multiply(part: tuple[int, slice], thread: int) -> None:
            expert, rows = part
            np.matmul(grad[rows], weight[expert], out=grad_x[rows])

        self.threads.run(_parts(counts), multiply)
        grad_weight_EOI = _cast(self.weight_gradient(x, grad, counts), weight_EOI.dtype) if self.trained else None
        return _cast(result, x_RI.dtype), grad_weight_EOI, None

    def weight_gradient(self, x: np.ndarray, grad: np.ndarray, counts_E: np.ndarray) -> Tensor:
        result, grad_weight = _empty(len(counts_E), grad.shape[1], x.shape[1])
        grad_weight[counts_E == 0] = 0

        def multiply(part: tuple[int, slice, slice], thread: int) -> None:
            expert, rows, columns = part
            np.matmul(grad[rows, columns].T, x[rows], out=grad_weight[expert, columns])

        # An expert that has most of the rows would keep one thread busy: its matrix is cut instead.
        half = -(-grad.shape[1] // 2)
        halves = (slice(0, half), slice(half, None))
        self.threads.run(((*group, columns) for group in _groups(counts_E) for columns in halves), multiply)
        return result


@functools.cache
def _threads() -> HostThreads:
    """One pool for all products of the process."""
    return HostThreads()


def _groups(counts_E: np.ndarray) -> list[tuple[int, slice]]:
    """Experts that have rows, and these."""
    ends = np.cumsum(counts_E)
    return [(expert, slice(ends[expert] - counts_E[expert], ends[expert])) for expert in np.flatnonzero(counts_E)]


def _parts(counts_E: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Experts and at most so many of their rows that all threads have work until the end."""
    for expert, rows in _groups(counts_E):
        for start in range(rows.start, rows.stop, _MOST_ROWS):
            yield expert, slice(start, min(start + _MOST_ROWS, rows.stop))


class Permute(nn.Cell):
    """rows_RD from (x_ND, routing): each row is the one of its token."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.core = _PermuteCore()

    def construct(self, x_ND: Tensor, routing: Routing) -> Tensor:
        return self.core(x_ND, routing.token_R, routing.row_Nk)


class _PermuteCore(nn.Cell):
    def construct(self, x_ND, token_R, row_Nk):
        return _cast(_rows_of_tokens(_on_host(x_ND), token_R.asnumpy(), row_Nk.size)[0], x_ND.dtype)

    def bprop(self, x_ND, token_R, row_Nk, out, grad_RD):
        rows, row = _on_host(grad_RD), row_Nk.asnumpy()
        result, grad_x = _empty(*x_ND.shape)
        np.take(rows, row[:, 0], axis=0, out=grad_x, mode="clip")
        for choice in range(1, row.shape[1]):
            grad_x += rows[row[:, choice]]
        return _cast(result, x_ND.dtype), None, None


class Unpermute(nn.Cell):
    """out_ND from (y_RD, gates_Nk, routing): the sum of each token's rows, weighted by their gates."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.core = _UnpermuteCore()

    def construct(self, y_RD: Tensor, gates_Nk: Tensor, routing: Routing) -> Tensor:
        return self.core(y_RD, gates_Nk, routing.token_R, routing.row_Nk)


class _UnpermuteCore(nn.Cell):
    def construct(self, y_RD, gates_Nk, token_R, row_Nk):
        result, sum_ND = _empty(row_Nk.shape[0], y_RD.shape[1])
        np.einsum("nk,nkd->nd", _on_host(gates_Nk), _on_host(y_RD)[row_Nk.asnumpy()], out=sum_ND)
        return _cast(result, y_RD.dtype)

    def bprop(self, y_RD, gates_Nk, token_R, row_Nk, out, grad_ND):
        row = row_Nk.asnumpy()
        result, grad_y = _rows_of_tokens(_on_host(grad_ND), token_R.asnumpy(), row.size)
        grad_gates = Tensor.from_numpy(np.einsum("rd,rd->r", _on_host(y_RD), grad_y)[row])
        gate_R = np.zeros(len(grad_y), np.float32)
        gate_R[row] = _on_host(gates_Nk)
        grad_y *= gate_R[:, None]
        return _cast(result, y_RD.dtype), _cast(grad_gates, gates_Nk.dtype), None, None


def _rows_of_tokens(x: np.ndarray, token_R: np.ndarray, assignments: int) -> tuple[Tensor, np.ndarray]:
    """x[token_R], and zeros where there is no such token."""
    result, rows = _empty(len(token_R), x.shape[1])
    np.take(x, token_R, axis=0, out=rows, mode="clip")  # other modes copy `out`
    if len(token_R) > assignments:
        rows[token_R == len(x)] = 0
    return result, rows


def _empty(*shape: int) -> tuple[Tensor, np.ndarray]:
    """A tensor in the host's memory, and the array that writes to it."""
    tensor = mint.empty(shape, dtype=mstype.float32, device="CPU")
    return tensor, tensor.asnumpy()


def _on_host(tensor: Tensor, rounded_to=mstype.float32) -> np.ndarray:
    """The numbers of a tensor in float32, only to be read."""
    return _cast(_cast(tensor, rounded_to), mstype.float32).asnumpy()


def _cast(tensor: Tensor, dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)
