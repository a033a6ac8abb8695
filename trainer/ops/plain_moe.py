"""Plain kernels of experts, computed on the host: for `context.mode` 1, and for the audit, which counts operators.

The number of an expert's rows changes from call to call. To MindSpore every number of rows is a new shape, so these
cells run only in eager mode. MindSpore runs `construct` and `bprop` of a cell with a `bprop` without recording them.
Arithmetic is float32; results have the dtype of the inputs.

Legend: N tokens, R rows sorted by expert, E experts, k experts chosen by each token, D hidden, I/O in/out features.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from trainer.arrays.memory import cast, expert_rows, gates_of_rows, host_array, rows_of_tokens
from trainer.ops.routing import DropPolicy, Routing, RoutingRule, route


class OneHot(nn.Cell):
    """index [...] -> float32 [..., size]: 1 at the index and 0 elsewhere."""

    def __init__(self, size: int) -> None:
        super().__init__(auto_prefix=False)
        self.numbers = Tensor(np.arange(size, dtype=np.int32))

    def construct(self, index: Tensor) -> Tensor:
        return (index.expand_dims(-1) == self.numbers).astype(mstype.float32)


class Route(nn.Cell):
    """(scores_NE, bias_E or None, capacity or None, drop_policy) -> Routing of tensors, without a gradient."""

    def __init__(self, rule: RoutingRule) -> None:
        super().__init__(auto_prefix=False)
        self.rule = rule

    def construct(
        self, scores_NE: Tensor, bias_E: Tensor | None, capacity: int | None, drop_policy: DropPolicy
    ) -> Routing:
        bias = None
        if bias_E is not None:
            bias = host_array(bias_E)
        return Routing(*map(Tensor.from_numpy, route(self.rule, host_array(scores_NE), bias, capacity, drop_policy)))


class GroupedMatmul(nn.Cell):
    """(x_RI, weight_EOI, counts_E) -> y_RO: the rows of each expert times its weight.

    An expert without rows gets a zero gradient. Rows after the last expert's rows give zeros and get zero gradients.
    The weight is rounded to the dtype of x; its gradient is not.
    """

    def __init__(self, fills_rows: bool = False, in_graph: bool = False) -> None:
        """Accepts the arguments of `trainer.ops.ascend.moe.GroupedMatmul` and ignores them."""
        super().__init__(auto_prefix=False)

    def construct(self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        x = host_array(x_RI)
        weight = host_array(weight_EOI, x_RI.dtype)
        y = np.zeros((len(x), weight.shape[1]), np.float32)
        for expert, rows in expert_rows(counts_E.asnumpy()):
            y[rows] = x[rows] @ weight[expert].T
        return cast(Tensor.from_numpy(y), x_RI.dtype)

    def bprop(
        self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, out: Tensor, grad_RO: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """Returns the gradients of x and the weight, expert by expert."""
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
    """(x_ND, token_R, row_Nk) -> rows_RD: each row is a copy of its token, or zeros for a row without a token."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, x_ND: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
        return cast(Tensor.from_numpy(rows_of_tokens(host_array(x_ND), token_R.asnumpy())), x_ND.dtype)

    def bprop(
        self, x_ND: Tensor, token_R: Tensor, row_Nk: Tensor, out: Tensor, grad_RD: Tensor
    ) -> tuple[Tensor, None, None]:
        grad_x = host_array(grad_RD)[row_Nk.asnumpy()].sum(1)
        return cast(Tensor.from_numpy(grad_x), x_ND.dtype), None, None


class Unpermute(nn.Cell):
    """(y_RD, gates_Nk, token_R, row_Nk) -> out_ND: the sum of each token's rows, weighted by its gates."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, y_RD: Tensor, gates_Nk: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
        sums = (host_array(y_RD)[row_Nk.asnumpy()] * host_array(gates_Nk)[..., None]).sum(1)
        return cast(Tensor.from_numpy(sums), y_RD.dtype)

    def bprop(
        self, y_RD: Tensor, gates_Nk: Tensor, token_R: Tensor, row_Nk: Tensor, out: Tensor, grad_ND: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        """Returns the gradients of the rows and the gates."""
        y = host_array(y_RD)
        row = row_Nk.asnumpy()
        grad_y = rows_of_tokens(host_array(grad_ND), token_R.asnumpy())
        grad_gates = np.einsum("rd,rd->r", y, grad_y)[row]
        grad_y *= gates_of_rows(host_array(gates_Nk), row, len(y))[:, None]
        return (
            cast(Tensor.from_numpy(grad_y), y_RD.dtype), cast(Tensor.from_numpy(grad_gates), gates_Nk.dtype),
            None, None,
        )  # fmt: skip
