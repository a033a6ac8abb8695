"""Ascend kernels of experts, with the signatures of cpu/moe.py. Nothing leaves the device.

`Permute` and `Unpermute` gather; `FusedPermute` and `FusedUnpermute` are the operators that do the same in one pass.

The fused operators have no CPU kernel: tests/parity/test_moe_ascend.py looks at exported graphs, and replaces the
operators by what their documentation says.

Legend: as in cpu/moe.py; A = N k assignments.
"""

from __future__ import annotations

from mindspore import dtype as mstype
from mindspore import mint, nn, ops

from trainer.ops.routing import RoutingRule


class Route(nn.Cell):
    """As in cpu/moe.py, but it returns a tuple, which a graph can hold. Stable sorts choose: operators for the best few
    define no order among equals."""

    def __init__(self, experts: int, chosen: int, **rule) -> None:
        super().__init__(auto_prefix=False)
        self.rule = RoutingRule(experts, chosen, **rule)
        self.is_grouped = self.rule.is_grouped

    def construct(self, scores_NE, bias_E, capacity, drop_policy):
        rule, scores_NE = self.rule, ops.stop_gradient(scores_NE)
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
            group_A = ops.select(full_A, ops.full_like(expert_A, rule.experts), expert_A)
        kept_E = self.count(group_A)
        counts_E = ops.maximum(kept_E, ops.ones_like(kept_E)) if rule.safe_tokens else kept_E
        row_A, token_R = self.rows(group_A, counts_E - kept_E)
        return experts_Nk, row_A.reshape(experts_Nk.shape), token_R, counts_E, requested_E, kept_E

    def in_best_groups(self, choice_NE):
        rule = self.rule
        choice_NGe = choice_NE.reshape(choice_NE.shape[0], rule.groups, -1)
        best = min(2 if rule.group_score == "two_best" else 1, choice_NGe.shape[2])
        score_NG = ops.topk(choice_NGe, best)[0].sum(-1)
        allowed_NG = ops.one_hot(_best(score_NG, rule.chosen_groups), rule.groups, 1.0, 0.0).sum(1)
        allowed_NGe = ops.broadcast_to(allowed_NG.expand_dims(-1), choice_NGe.shape) > 0
        return ops.select(allowed_NGe, choice_NGe, ops.full_like(choice_NGe, float("-inf"))).reshape(choice_NE.shape)

    def count(self, group_A):
        """How many there are of each expert, int64. Exact in float32 up to 2^24 assignments."""
        experts = ops.arange(self.rule.experts, dtype=mstype.int32)
        return (group_A.expand_dims(1) == experts.expand_dims(0)).astype(mstype.float32).sum(0).astype(mstype.int64)

    def place(self, expert_A, requested_E, probability_A):
        """How many assignments stand before each one at its expert: in token order, or by probability."""
        if probability_A is None:
            order_A = _sorted(expert_A)
        else:
            order_A = _sorted(probability_A, descending=True)
            order_A = ops.gather(order_A, _sorted(ops.gather(expert_A, order_A, 0)), 0)
        requested_E = requested_E.astype(mstype.int32)
        first_E = _ends(requested_E) - requested_E
        return _sorted(order_A) - ops.gather(first_E, expert_A, 0)

    def rows(self, group_A, safe_E):
        """The row of each assignment, and the token of each row."""
        tokens, size = group_A.shape[0] // self.rule.chosen, group_A.shape[0]
        token_A = ops.floor_divide(ops.arange(size, dtype=mstype.int32), self.rule.chosen)
        row_A = _sorted(_sorted(group_A))  # sorting a permutation inverts it
        if self.rule.safe_tokens:
            # Safe tokens before an expert's rows, and before those of dropped assignments.
            safe_E = safe_E.astype(mstype.int32)
            shift_E = _ends(safe_E)
            shift = ops.concat((shift_E - safe_E, shift_E[-1:]))
            row_A, size = row_A + ops.gather(shift, group_A, 0), size + self.rule.experts
        return row_A, ops.tensor_scatter_elements(ops.full((size,), tokens, dtype=mstype.int32), row_A, token_A)


def _sorted(values, descending: bool = False):
    """The order of values along the last axis, int32; equal ones keep theirs."""
    return mint.argsort(values, -1, descending, True).astype(mstype.int32)


def _best(scores, number: int):
    return _sorted(scores, descending=True)[:, :number]


def _ends(counts_E):
    """Where each group ends. int32 only: an Ascend has no cumsum of int64."""
    return ops.cumsum(counts_E, 0)


class GroupedMatmul(nn.Cell):
    """GroupedMatmul of one x and one stacked weight. The operator requires that the last group ends with the last row:
    the last expert takes the rows of no group too, which are set to zero before and after."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.product = ops.auto_generate.GroupedMatmul(split_item=3, group_type=0)
        self.weight = _UntrainedWithoutRows()

    def construct(self, x_RI, weight_EOI, counts_E):
        rows = x_RI.shape[0]
        ends_E = _ends(counts_E.astype(mstype.int32)).astype(mstype.int64)
        in_group_R1 = (ops.arange(rows, dtype=mstype.int64) < ends_E[-1]).expand_dims(1)
        ends_E = ops.stop_gradient(ops.concat((ends_E[:-1], ops.full((1,), rows, dtype=mstype.int64))))
        weight_EIO = ops.transpose(self.weight(weight_EOI, counts_E).astype(x_RI.dtype), (0, 2, 1))
        x_RI = _rows_or_zeros(in_group_R1, x_RI)
        y_RO = self.product([x_RI], [weight_EIO], None, None, None, None, None, ends_E)[0]
        return _rows_or_zeros(in_group_R1, y_RO)


class _UntrainedWithoutRows(nn.Cell):
    """The weight. Its gradient is zero for experts without rows, whatever the operator leaves there."""

    def construct(self, weight_EOI, counts_E):
        return weight_EOI

    def bprop(self, weight_EOI, counts_E, out, grad_EOI):
        has_rows_EOI = ops.broadcast_to((counts_E > 0).reshape(-1, 1, 1), weight_EOI.shape)
        return ops.select(has_rows_EOI, grad_EOI, ops.zeros_like(grad_EOI)), ops.zeros_like(counts_E)


def _rows_or_zeros(there_R1, x_RD):
    return ops.select(ops.broadcast_to(there_R1, x_RD.shape), x_RD, ops.zeros_like(x_RD))


class Permute(nn.Cell):
    """As in cpu/moe.py, by gathers."""

    def construct(self, x_ND, token_R, row_Nk):
        return _rows_of_tokens(x_ND, token_R, row_Nk)

    def bprop(self, x_ND, token_R, row_Nk, out, grad_RD):
        grad_ND = ops.gather(grad_RD, row_Nk.reshape(-1), 0).reshape(*row_Nk.shape, -1).sum(1)
        return grad_ND, ops.zeros_like(token_R), ops.zeros_like(row_Nk)


class Unpermute(nn.Cell):
    """As in cpu/moe.py, by gathers."""

    def construct(self, y_RD, gates_Nk, token_R, row_Nk):
        y_NkD = ops.gather(y_RD, row_Nk.reshape(-1), 0).reshape(*row_Nk.shape, -1)
        return (y_NkD * gates_Nk.astype(y_RD.dtype).expand_dims(-1)).sum(1)

    def bprop(self, y_RD, gates_Nk, token_R, row_Nk, out, grad_ND):
        grad_RD = _rows_of_tokens(grad_ND, token_R, row_Nk)
        products_R = (y_RD.astype(mstype.float32) * grad_RD.astype(mstype.float32)).sum(-1)
        grad_gates = ops.gather(products_R, row_Nk.reshape(-1), 0).reshape(row_Nk.shape).astype(gates_Nk.dtype)
        gate_R = ops.zeros((y_RD.shape[0],), y_RD.dtype)
        gate_R = ops.tensor_scatter_elements(gate_R, row_Nk.reshape(-1), gates_Nk.astype(y_RD.dtype).reshape(-1))
        grad_y = grad_RD * gate_R.expand_dims(-1)
        return grad_y, grad_gates, ops.zeros_like(token_R), ops.zeros_like(row_Nk)


def _rows_of_tokens(x_ND, token_R, row_Nk):
    """x[token_R], with zeros for safe tokens."""
    if token_R.shape[0] > row_Nk.shape[0] * row_Nk.shape[1]:
        x_ND = ops.concat((x_ND, ops.zeros((1, x_ND.shape[1]), x_ND.dtype)))
    return ops.gather(x_ND, token_R, 0)


class FusedPermute(nn.Cell):
    """As in cpu/moe.py, by moe_token_permute, which sorts by the rows: all differ, so ties do not matter."""

    def construct(self, x_ND, token_R, row_Nk):
        return ops.moe_token_permute(x_ND, row_Nk)[0]


class FusedUnpermute(nn.Cell):
    """As in cpu/moe.py, by moe_token_unpermute."""

    def construct(self, y_RD, gates_Nk, token_R, row_Nk):
        return ops.moe_token_unpermute(y_RD, row_Nk.reshape(-1), gates_Nk)
