"""Ascend kernels of experts, behind the signatures of `moe_reference.py`. All of it happens in the graph.

`Permute` and `Unpermute` gather; `FusedPermute` and `FusedUnpermute` are the operators that do the same in one pass.
The fused operators have no CPU kernel: tests/parity/test_moe_ascend.py looks at exported graphs, and puts what their
documentation says in their place.

Legend: as in moe_reference.py; A = N k assignments.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from trainer.ops.routing import DropPolicy, Routing, RoutingRule


class Route(nn.Cell):
    """As `moe_reference.Route`. Sorts by keys that differ, because the operator's order of equal keys is unspecified;
    topk takes the first among equals."""

    def __init__(self, experts: int, chosen: int, **rule) -> None:
        super().__init__(auto_prefix=False)
        self.rule = RoutingRule(experts, chosen, **rule)

    def construct(
        self, scores_NE: Tensor, bias_E: Tensor | None, capacity: int | None, drop_policy: DropPolicy
    ) -> Routing:
        rule, scores_NE = self.rule, ops.stop_gradient(scores_NE)
        choice_NE = scores_NE if bias_E is None else scores_NE + ops.stop_gradient(bias_E)
        if rule.is_grouped:
            choice_NE = self.in_best_groups(choice_NE)
        experts_Nk = ops.topk(choice_NE, rule.chosen)[1].astype(mstype.int32)
        expert_A, requested_E = experts_Nk.reshape(-1), self.count(experts_Nk.reshape(-1))
        group_A = expert_A
        if capacity is not None:
            probability_A = ops.gather_elements(scores_NE, 1, experts_Nk).reshape(-1)
            order_A = None if drop_policy == "position" else ops.topk(probability_A, expert_A.shape[0])[1]
            place_A = self.place(expert_A, requested_E, order_A)
            group_A = ops.select(place_A < capacity, expert_A, ops.full_like(expert_A, rule.experts))
        kept_E = self.count(group_A)
        counts_E = ops.maximum(kept_E, ops.ones_like(kept_E)) if rule.safe_tokens else kept_E
        row_A, token_R = self.rows(group_A, counts_E, counts_E - kept_E)
        return Routing(experts_Nk, row_A.reshape(experts_Nk.shape), token_R, counts_E, requested_E, kept_E)

    def in_best_groups(self, choice_NE):
        rule = self.rule
        choice_NGe = choice_NE.reshape(choice_NE.shape[0], rule.groups, -1)
        best = min(2 if rule.group_score == "two_best" else 1, choice_NGe.shape[2])
        score_NG = ops.topk(choice_NGe, best)[0].sum(-1)
        allowed_NG = ops.one_hot(ops.topk(score_NG, rule.chosen_groups)[1], rule.groups, 1.0, 0.0).sum(1)
        allowed_NGe = ops.broadcast_to(allowed_NG.expand_dims(-1), choice_NGe.shape) > 0
        lowest_NGe = ops.full_like(choice_NGe, float("-inf"))
        return ops.select(allowed_NGe, choice_NGe, lowest_NGe).reshape(choice_NE.shape)

    def count(self, group_A):
        """How many there are of each expert, int64. Exact in float32 up to 2^24 assignments."""
        experts = ops.arange(self.rule.experts, dtype=mstype.int32)
        return (group_A.expand_dims(1) == experts.expand_dims(0)).astype(mstype.float32).sum(0).astype(mstype.int64)

    def place(self, expert_A, requested_E, order_A):
        """How many assignments the expert of each one takes before it, in `order_A` or in token order."""
        before_A = ops.arange(expert_A.shape[0], dtype=mstype.int32)
        if order_A is not None:
            before_A = _inverse(order_A)
        rank_A = _inverse(ops.argsort(expert_A * expert_A.shape[0] + before_A))
        first_E = (ops.cumsum(requested_E, 0) - requested_E).astype(mstype.int32)
        return rank_A - ops.gather(first_E, expert_A, 0)

    def rows(self, group_A, counts_E, safe_E):
        """The row of each assignment, and the token of each row."""
        tokens, assignments = group_A.shape[0] // self.rule.chosen, group_A.shape[0]
        number_A = ops.arange(assignments, dtype=mstype.int32)
        row_A = _inverse(ops.argsort(group_A * assignments + number_A))
        size = assignments
        if self.rule.safe_tokens:
            # Safe tokens before an expert's rows, and before those of dropped assignments.
            shift_E = ops.cumsum(safe_E, 0)
            shift = ops.concat((shift_E - safe_E, shift_E[-1:])).astype(mstype.int32)
            row_A, size = row_A + ops.gather(shift, group_A, 0), assignments + self.rule.experts
        token_R = ops.full((size,), tokens, dtype=mstype.int32)
        return row_A, ops.tensor_scatter_elements(token_R, row_A, ops.floor_divide(number_A, self.rule.chosen))


def _inverse(order):
    """Where each place went: the inverse of a permutation, int32."""
    return ops.argsort(order.astype(mstype.int32)).astype(mstype.int32)


class GroupedMatmul(nn.Cell):
    """GroupedMatmul of one x and one stacked weight. The operator wants the last group to end with the last row: the
    last expert takes the rows of no group too, which are made zeros before and after."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.product = ops.auto_generate.GroupedMatmul(split_item=3, group_type=0)

    def construct(self, x_RI, weight_EOI, counts_E):
        rows = x_RI.shape[0]
        ends_E = ops.cumsum(counts_E, 0)
        in_group_R1 = (ops.arange(rows, dtype=mstype.int64) < ends_E[-1]).expand_dims(1)
        last_end = ops.full((1,), rows, dtype=mstype.int64)
        ends_E = ops.stop_gradient(ops.concat((ends_E[:-1], last_end)))
        weight_EIO = ops.transpose(weight_EOI.astype(x_RI.dtype), (0, 2, 1))
        x_RI = _rows_or_zeros(in_group_R1, x_RI)
        y_RO = self.product([x_RI], [weight_EIO], None, None, None, None, None, ends_E)[0]
        return _rows_or_zeros(in_group_R1, y_RO)


def _rows_or_zeros(there_R1, x_RD):
    return ops.select(ops.broadcast_to(there_R1, x_RD.shape), x_RD, ops.zeros_like(x_RD))


class Permute(nn.Cell):
    """As `moe_reference.Permute`, by gathers."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.core = _PermuteCore()

    def construct(self, x_ND, routing):
        return self.core(x_ND, routing.token_R, routing.row_Nk)


class _PermuteCore(nn.Cell):
    def construct(self, x_ND, token_R, row_Nk):
        return _rows_of_tokens(x_ND, token_R, row_Nk)

    def bprop(self, x_ND, token_R, row_Nk, out, grad_RD):
        grad_ND = ops.gather(grad_RD, row_Nk.reshape(-1), 0).reshape(*row_Nk.shape, -1).sum(1)
        return grad_ND, ops.zeros_like(token_R), ops.zeros_like(row_Nk)


class Unpermute(nn.Cell):
    """As `moe_reference.Unpermute`, by gathers."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.core = _UnpermuteCore()

    def construct(self, y_RD, gates_Nk, routing):
        return self.core(y_RD, gates_Nk, routing.token_R, routing.row_Nk)


class _UnpermuteCore(nn.Cell):
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
    """moe_token_permute, sorting by the rows themselves: they differ, so that the order cannot."""

    def construct(self, x_ND, routing):
        return ops.moe_token_permute(x_ND, routing.row_Nk)[0]


class FusedUnpermute(nn.Cell):
    """moe_token_unpermute."""

    def construct(self, y_RD, gates_Nk, routing):
        return ops.moe_token_unpermute(y_RD, routing.row_Nk.reshape(-1), gates_Nk)
