"""Ascend kernels of experts, with the signatures of plain_moe.py. Nothing leaves the device.

`Permute` and `Unpermute` gather; `FusedPermute` and `FusedUnpermute` are the operators that do the same in one pass.

The fused operators have no CPU kernel: tests/parity/test_moe_ascend.py looks at exported graphs, and replaces the
operators by what their documentation says.

Legend: as in plain_moe.py; A = N k assignments.
"""

from __future__ import annotations

from mindspore import Parameter, mint, nn, ops
from mindspore import dtype as mstype

from trainer.ops.plain import OneHot
from trainer.ops.routing import RoutingRule


class Route(nn.Cell):
    """As in plain_moe.py, but it returns a tuple, which a graph can hold. Stable sorts choose: operators for the best
    few define no order among equals."""

    def __init__(self, rule: RoutingRule) -> None:
        super().__init__(auto_prefix=False)
        self.rule = rule
        self.is_grouped = rule.is_grouped
        self.of_experts = OneHot(rule.experts)
        self.of_groups = OneHot(rule.groups)

    def construct(self, scores_NE, bias_E, capacity, drop_policy):
        rule = self.rule
        scores_NE = ops.stop_gradient(scores_NE)
        choice_NE = scores_NE if bias_E is None else scores_NE + ops.stop_gradient(bias_E)
        if self.is_grouped:
            choice_NE = self.in_best_groups(choice_NE)
        experts_Nk = _best(choice_NE, rule.chosen)
        expert_A = experts_Nk.reshape(-1)
        requested_E = self.count(expert_A)
        group_A = expert_A
        if capacity is not None:
            probability_A = None
            if drop_policy == "probability":
                probability_A = ops.gather_elements(scores_NE, 1, experts_Nk).reshape(-1)
            full_A = self.place(expert_A, requested_E, probability_A) >= capacity
            group_A = ops.select(full_A, ops.zeros(expert_A.shape, expert_A.dtype) + rule.experts, expert_A)
        kept_E = self.count(group_A)
        counts_E = ops.maximum(kept_E, ops.ones(kept_E.shape, kept_E.dtype)) if rule.safe_tokens else kept_E
        row_A, token_R = self.rows(group_A, counts_E - kept_E)
        return experts_Nk, row_A.reshape(experts_Nk.shape), token_R, counts_E, requested_E, kept_E

    def in_best_groups(self, choice_NE):
        rule = self.rule
        choice_NGe = choice_NE.reshape(choice_NE.shape[0], rule.groups, -1)
        best = min(2 if rule.group_score == "two_best" else 1, choice_NGe.shape[2])
        best_NGb = stable_order(choice_NGe, descending=True)[:, :, :best]
        score_NG = ops.gather_elements(choice_NGe, 2, best_NGb).sum(-1)
        allowed_NG = self.of_groups(_best(score_NG, rule.chosen_groups)).sum(1)
        allowed_NGe = ops.broadcast_to(allowed_NG.expand_dims(-1), choice_NGe.shape) > 0
        never_NGe = ops.zeros(choice_NGe.shape, choice_NGe.dtype) - float("inf")
        return ops.select(allowed_NGe, choice_NGe, never_NGe).reshape(choice_NE.shape)

    def count(self, group_A):
        """How many there are of each expert, int64. Exact in float32 up to 2^24 assignments."""
        return self.of_experts(group_A).sum(0).astype(mstype.int64)

    def place(self, expert_A, requested_E, probability_A):
        """How many assignments stand before each one at its expert: in token order, or by probability."""
        if probability_A is None:
            order_A = stable_order(expert_A)
        else:
            order_A = stable_order(probability_A, descending=True)
            order_A = _take(order_A, stable_order(_take(expert_A, order_A)))
        requested_E = requested_E.astype(mstype.int32)
        return stable_order(order_A) - _take(mint.cumsum(requested_E, 0) - requested_E, expert_A)

    def rows(self, group_A, safe_E):
        """The row of each assignment, and the token of each row."""
        tokens = group_A.shape[0] // self.rule.chosen
        size = group_A.shape[0]
        order_A = stable_order(group_A)
        row_A = stable_order(order_A)  # sorting a permutation inverts it
        token_A = ops.floor_divide(order_A, self.rule.chosen)
        if not self.rule.safe_tokens:
            return row_A, token_A
        # Safe tokens before an expert's rows, and before those of dropped assignments.
        safe_E = safe_E.astype(mstype.int32)
        shift_E = mint.cumsum(safe_E, 0)
        row_A = row_A + _take(ops.concat((shift_E - safe_E, shift_E[-1:])), group_A)
        no_token_R = ops.zeros((size + self.rule.experts,), mstype.int32) + tokens
        return row_A, mint.scatter(no_token_R, 0, _take(row_A, order_A).astype(mstype.int64), token_A)


def stable_order(values, descending: bool = False):
    """Returns the order of values along the last axis, int32; equal ones keep theirs.

    As float32, which the AI cores sort; integers go to the AI CPU. Exact up to 2^24 assignments.
    """
    return mint.argsort(values.astype(mstype.float32), -1, descending, True).astype(mstype.int32)


def _best(scores, number: int):
    return stable_order(scores, descending=True)[:, :number]


def _take(values, index):
    """Numbers of a vector."""
    return ops.gather_elements(values, 0, index)


class GroupedMatmul(nn.Cell):
    """Every expert's rows times its weight, as in plain_moe.py.

    Args:
        fills_rows: Whether every row is one of some expert, so that none has to be set to zero.
        reaches_all: Whether every expert has a row, so that the gradient of none has to be set to zero.
    """

    def __init__(self, fills_rows: bool = False, reaches_all: bool = False) -> None:
        super().__init__(auto_prefix=False)
        self.fills_rows = fills_rows
        self.trained, self.frozen = (_GroupedMatmulCore(trained, reaches_all) for trained in (True, False))

    def construct(self, x_RI, weight_EOI, counts_E):
        cast_EOI = weight_EOI.astype(x_RI.dtype)
        is_frozen = isinstance(weight_EOI, Parameter) and not weight_EOI.requires_grad
        product = self.frozen if is_frozen else self.trained
        if self.fills_rows:
            return product(x_RI, cast_EOI, counts_E)
        # The operator leaves rows after the last group as they were in memory, and so does its gradient.
        after_R1 = (mint.arange(x_RI.shape[0], dtype=mstype.int64) >= counts_E.sum()).expand_dims(1)
        return ops.masked_fill(product(ops.masked_fill(x_RI, after_R1, 0.0), cast_EOI, counts_E), after_R1, 0.0)


class _GroupedMatmulCore(nn.Cell):
    """GroupedMatmulV4 of one x and one stacked weight, with `group_list` the sizes of the groups.

    The weight is read as a transposed view, which CANN takes as it is, and the gradients are written so that nothing is
    transposed in memory: that of x is a product with the weight itself, and that of the weight sums over the rows of
    each group (group_type 2), which gives it in the weight's own layout.
    """

    def __init__(self, trained: bool, reaches_all: bool) -> None:
        super().__init__(auto_prefix=False)
        self.is_trained = trained
        self.reaches_all = reaches_all

    def construct(self, x_RI, weight_EOI, counts_E):
        return _grouped_product(x_RI, mint.transpose(weight_EOI, 1, 2), counts_E, 0)

    def bprop(self, x_RI, weight_EOI, counts_E, out, grad_RO):
        grad_x = _grouped_product(grad_RO, weight_EOI, counts_E, 0)
        no_grad_E = ops.zeros(counts_E.shape, counts_E.dtype)
        if not self.is_trained:
            return grad_x, ops.zeros(weight_EOI.shape, weight_EOI.dtype), no_grad_E
        grad_weight = _grouped_product(mint.transpose(grad_RO, 0, 1), x_RI, counts_E, 2)
        if self.reaches_all:
            return grad_x, grad_weight, no_grad_E
        # Zero for experts without rows, whatever the operator leaves there.
        return grad_x, ops.masked_fill(grad_weight, (counts_E == 0).reshape(-1, 1, 1), 0.0), no_grad_E


def _grouped_product(x, weight, counts_E, group_type: int):
    """Each group's rows of x times its weight; with group_type 2 each group's columns of x times its rows of `weight`,
    one matrix a group."""
    # By position, as a graph with keywords cannot be exported. Last: split_item 3, and sizes of groups, not their ends.
    return ops.auto_generate.grouped_matmul_v4(
        [x], [weight], None, None, None, None, None, None, counts_E, None, None, None, 3, group_type, 1
    )[0]


class _OfTokens(nn.Cell):
    """A cell that gathers rows of tokens.

    Args:
        has_safe_tokens: Whether some rows belong to no token. Default None: the shapes tell, which a graph that
            MindSpore shards cannot compare.
    """

    def __init__(self, has_safe_tokens: bool | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.has_safe_tokens = bool(has_safe_tokens)
        self.shapes_tell = has_safe_tokens is None

    def rows_of_tokens(self, x_ND, token_R, row_Nk):
        """x[token_R], with zeros for safe tokens."""
        if self.has_safe_tokens:
            return _rows_or_zeros(x_ND, token_R)
        if self.shapes_tell:
            if token_R.shape[0] > row_Nk.shape[0] * row_Nk.shape[1]:
                return _rows_or_zeros(x_ND, token_R)
        return mint.index_select(x_ND, 0, token_R)


def _rows_or_zeros(x_ND, token_R):
    return mint.index_select(ops.concat((x_ND, ops.zeros((1, x_ND.shape[1]), x_ND.dtype))), 0, token_R)


class Permute(_OfTokens):
    """As in plain_moe.py, by gathers."""

    def construct(self, x_ND, token_R, row_Nk):
        return self.rows_of_tokens(x_ND, token_R, row_Nk)

    def bprop(self, x_ND, token_R, row_Nk, out, grad_RD):
        grad_ND = mint.index_select(grad_RD, 0, row_Nk.reshape(-1)).reshape(*row_Nk.shape, -1).sum(1)
        return grad_ND, *_no_gradients(token_R, row_Nk)


class Unpermute(_OfTokens):
    """As in plain_moe.py, by gathers."""

    def construct(self, y_RD, gates_Nk, token_R, row_Nk):
        y_NkD = mint.index_select(y_RD, 0, row_Nk.reshape(-1)).reshape(*row_Nk.shape, -1)
        return (y_NkD * gates_Nk.astype(y_RD.dtype).expand_dims(-1)).sum(1)

    def bprop(self, y_RD, gates_Nk, token_R, row_Nk, out, grad_ND):
        grad_RD = self.rows_of_tokens(grad_ND, token_R, row_Nk)
        row_A = row_Nk.reshape(-1)
        products_R = (y_RD.astype(mstype.float32) * grad_RD.astype(mstype.float32)).sum(-1)
        grad_gates = _take(products_R, row_A).reshape(row_Nk.shape).astype(gates_Nk.dtype)
        gate_R = ops.zeros((y_RD.shape[0],), y_RD.dtype)
        gate_R = mint.scatter(gate_R, 0, row_A.astype(mstype.int64), gates_Nk.astype(y_RD.dtype).reshape(-1))
        return grad_RD * gate_R.expand_dims(-1), grad_gates, *_no_gradients(token_R, row_Nk)


def _no_gradients(token_R, row_Nk):
    return ops.zeros(token_R.shape, token_R.dtype), ops.zeros(row_Nk.shape, row_Nk.dtype)


class FusedPermute(nn.Cell):
    """As in plain_moe.py, by moe_token_permute, which sorts by the rows: all differ, so ties do not matter."""

    def construct(self, x_ND, token_R, row_Nk):
        return ops.moe_token_permute(x_ND, row_Nk)[0]


class FusedUnpermute(nn.Cell):
    """As in plain_moe.py, by moe_token_unpermute."""

    def construct(self, y_RD, gates_Nk, token_R, row_Nk):
        return ops.moe_token_unpermute(y_RD, row_Nk.reshape(-1), gates_Nk)
