"""Ascend kernels of experts, with the signatures of plain_moe.py. All values stay on the device.

`Permute` and `Unpermute` gather rows; `FusedPermute` and `FusedUnpermute` are operators that do this in one pass.

The fused operators have no CPU kernel: tests/parity/test_moe_ascend.py looks at exported graphs, and replaces the
operators by functions that follow their documentation.

Legend: as in plain_moe.py; A = N k assignments, each of a token to one of its experts; G groups of e experts, and the b
best of a group. A safe token is a row of zeros for an expert without tokens, so that each expert has a row.
"""

from __future__ import annotations

from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore import dtype as mstype

from trainer.ops.plain_moe import OneHot
from trainer.ops.routing import DropPolicy, RoutingRule


class Route(nn.Cell):
    """(scores_NE, bias_E or None, capacity or None, drop_policy) -> a tuple like `Routing`, without a gradient.

    Experts are chosen by stable sorts, because operators for the k largest numbers define no order among equal ones.
    """

    def __init__(self, rule: RoutingRule) -> None:
        super().__init__(auto_prefix=False)
        self.rule = rule
        self.is_grouped = rule.is_grouped
        self.expert_one_hot = OneHot(rule.experts)
        self.group_one_hot = OneHot(rule.groups)

    def construct(
        self, scores_NE: Tensor, bias_E: Tensor | None, capacity: int | None, drop_policy: DropPolicy
    ) -> tuple[Tensor, ...]:
        """Chooses the experts, drops assignments over the capacity, and sorts the rest by expert."""
        rule = self.rule
        scores_NE = ops.stop_gradient(scores_NE)
        choice_NE = scores_NE if bias_E is None else scores_NE + ops.stop_gradient(bias_E)
        if self.is_grouped:
            choice_NE = self.exclude_other_groups(choice_NE)
        experts_Nk = _best(choice_NE, rule.chosen)
        expert_A = experts_Nk.reshape(-1)
        requested_E = self.count(expert_A)
        group_A = expert_A  # of the grouped product: an expert, or E for assignments that are dropped
        if capacity is not None:
            probability_A = None
            if drop_policy == "probability":
                probability_A = ops.gather_elements(scores_NE, 1, experts_Nk).reshape(-1)
            is_over_A = self.position_in_expert(expert_A, requested_E, probability_A) >= capacity
            group_A = ops.select(is_over_A, ops.zeros(expert_A.shape, expert_A.dtype) + rule.experts, expert_A)
        kept_E = self.count(group_A)
        counts_E = ops.maximum(kept_E, ops.ones(kept_E.shape, kept_E.dtype)) if rule.safe_tokens else kept_E
        row_A, token_R = self.rows(group_A, counts_E - kept_E)
        return experts_Nk, row_A.reshape(experts_Nk.shape), token_R, counts_E, requested_E, kept_E

    def exclude_other_groups(self, choice_NE: Tensor) -> Tensor:
        """Sets the scores of experts outside the best groups to minus infinity."""
        rule = self.rule
        choice_NGe = choice_NE.reshape(choice_NE.shape[0], rule.groups, -1)
        best = min(2 if rule.group_score == "two_best" else 1, choice_NGe.shape[2])
        best_NGb = _best(choice_NGe, best)
        score_NG = ops.gather_elements(choice_NGe, 2, best_NGb).sum(-1)
        allowed_NG = self.group_one_hot(_best(score_NG, rule.chosen_groups)).sum(1)
        allowed_NGe = ops.broadcast_to(allowed_NG.expand_dims(-1), choice_NGe.shape) > 0
        never_NGe = ops.zeros(choice_NGe.shape, choice_NGe.dtype) - float("inf")
        return ops.select(allowed_NGe, choice_NGe, never_NGe).reshape(choice_NE.shape)

    def count(self, group_A: Tensor) -> Tensor:
        """Counts the assignments to each expert, int64. Float32 is exact up to 2^24 assignments."""
        return self.expert_one_hot(group_A).sum(0).astype(mstype.int64)

    def position_in_expert(self, expert_A: Tensor, requested_E: Tensor, probability_A: Tensor | None) -> Tensor:
        """Returns the number of assignments before each one at its expert, in token order or by probability."""
        if probability_A is None:
            order_A = stable_order(expert_A)
        else:
            order_A = stable_order(probability_A, descending=True)
            order_A = _take(order_A, stable_order(_take(expert_A, order_A)))
        requested_E = requested_E.astype(mstype.int32)
        return stable_order(order_A) - _take(mint.cumsum(requested_E, 0) - requested_E, expert_A)

    def rows(self, group_A: Tensor, safe_E: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the row of each assignment, and the token of each row."""
        tokens = group_A.shape[0] // self.rule.chosen
        size = group_A.shape[0]
        order_A = stable_order(group_A)
        row_A = stable_order(order_A)  # sorting a permutation inverts it
        token_A = ops.floor_divide(order_A, self.rule.chosen)
        if not self.rule.safe_tokens:
            return row_A, token_A
        # The number of safe tokens before the rows of each expert, and before those of dropped assignments.
        safe_E = safe_E.astype(mstype.int32)
        shift_E = mint.cumsum(safe_E, 0)
        all_safe_1 = mint.narrow(shift_E, 0, self.rule.experts - 1, 1)
        row_A = row_A + _take(ops.concat((shift_E - safe_E, all_safe_1)), group_A)
        no_token_R = ops.zeros((size + self.rule.experts,), mstype.int32) + tokens
        return row_A, mint.scatter(no_token_R, 0, _take(row_A, order_A).astype(mstype.int64), token_A)


def stable_order(values: Tensor, descending: bool = False) -> Tensor:
    """Returns the stable order of values along the last axis, int32.

    Values are sorted as float32, which the AI cores sort; the AI CPU sorts integers. Integers are exact up to 2^24.
    """
    return mint.argsort(values.astype(mstype.float32), -1, descending, True).astype(mstype.int32)


def _best(scores: Tensor, number: int) -> Tensor:
    """Returns the indices of the best scores of each row, the best first."""
    # An index would be a StridedSlice in a graph, which is a legacy kernel.
    return mint.narrow(stable_order(scores, descending=True), -1, 0, number)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Returns values[index] for a vector."""
    return ops.gather_elements(values, 0, index)


class GroupedMatmul(nn.Cell):
    """(x_RI, weight_EOI, counts_E) -> y_RO: the rows of each expert times its weight.

    Args:
        fills_rows: Whether every row belongs to an expert. Otherwise the rows after the last expert's are set to zero.
        in_graph: Whether the cell is in one graph of the whole step, where every expert has a row and MindSpore removes
            unused gradients. Elsewhere the cell sets the gradients of experts without rows to zero, and computes none
            for a frozen Parameter.
    """

    def __init__(self, fills_rows: bool = False, in_graph: bool = False) -> None:
        super().__init__(auto_prefix=False)
        self.fills_rows = fills_rows
        self.in_graph = in_graph
        self.trained = _GroupedProduct(True, in_graph)
        self.frozen = _GroupedProduct(False, in_graph)

    def construct(self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        """Casts the weight to the dtype of x, and sets rows without an expert to zero."""
        cast_EOI = weight_EOI.astype(x_RI.dtype)
        product = self.trained
        if not self.in_graph and isinstance(weight_EOI, Parameter) and not weight_EOI.requires_grad:
            product = self.frozen
        if self.fills_rows:
            return product(x_RI, cast_EOI, counts_E)
        # The operator leaves rows after the last group as they were in memory, and so does its gradient.
        after_R1 = (mint.arange(x_RI.shape[0], dtype=mstype.int64) >= counts_E.sum()).expand_dims(1)
        return ops.masked_fill(product(ops.masked_fill(x_RI, after_R1, 0.0), cast_EOI, counts_E), after_R1, 0.0)


class _GroupedProduct(nn.Cell):
    """GroupedMatmulV4 of one x and one stacked weight; `group_list` has the sizes of the groups.

    Nothing is transposed in memory. The forward pass reads the weight as a transposed view, which CANN supports. The
    gradient of x is a product with the weight itself. The gradient of the weight sums over the rows of each group
    (group_type 2), which gives it the layout of the weight.
    """

    def __init__(self, trained: bool, reaches_all: bool) -> None:
        super().__init__(auto_prefix=False)
        self.is_trained = trained
        self.reaches_all = reaches_all

    def construct(self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        return _grouped_product(x_RI, mint.transpose(weight_EOI, 1, 2), counts_E, 0)

    def bprop(
        self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, out: Tensor, grad_RO: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of x and the weight, and zeros for the counts."""
        grad_x = _grouped_product(grad_RO, weight_EOI, counts_E, 0)
        no_grad_E = ops.zeros(counts_E.shape, counts_E.dtype)
        if not self.is_trained:
            return grad_x, ops.zeros(weight_EOI.shape, weight_EOI.dtype), no_grad_E
        grad_weight = _grouped_product(mint.transpose(grad_RO, 0, 1), x_RI, counts_E, 2)
        if self.reaches_all:
            return grad_x, grad_weight, no_grad_E
        # The operator does not write the gradients of experts without rows.
        return grad_x, ops.masked_fill(grad_weight, (counts_E == 0).reshape(-1, 1, 1), 0.0), no_grad_E


def _grouped_product(x: Tensor, weight: Tensor, counts_E: Tensor, group_type: int) -> Tensor:
    """Multiplies the rows of x of each group by the weight of the group.

    With group_type 2, it multiplies the columns of x of each group by the rows of `weight` of the group. The result has
    one matrix for each group.
    """
    # Positional: a graph with keywords cannot be exported. The last three: split_item, group_type, group_list_type.
    return ops.auto_generate.grouped_matmul_v4(
        [x], [weight], None, None, None, None, None, None, counts_E, None, None, None, 3, group_type, 1
    )[0]


class _TokenRows(nn.Cell):
    """A cell that gathers the rows of tokens.

    Args:
        has_safe_tokens: Whether some rows belong to no token. Default None: this follows from the shapes, which cannot
            be compared in a graph that MindSpore shards.
    """

    def __init__(self, has_safe_tokens: bool | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.has_safe_tokens = bool(has_safe_tokens)
        self.compares_shapes = has_safe_tokens is None

    def rows_of_tokens(self, x_ND: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
        """Returns x[token_R], with zeros for safe tokens."""
        if self.has_safe_tokens:
            return _rows_or_zeros(x_ND, token_R)
        if self.compares_shapes:
            if token_R.shape[0] > row_Nk.shape[0] * row_Nk.shape[1]:
                return _rows_or_zeros(x_ND, token_R)
        return mint.index_select(x_ND, 0, token_R)


def _rows_or_zeros(x_ND: Tensor, token_R: Tensor) -> Tensor:
    return mint.index_select(ops.concat((x_ND, ops.zeros((1, x_ND.shape[1]), x_ND.dtype))), 0, token_R)


class Permute(_TokenRows):
    """(x_ND, token_R, row_Nk) -> rows_RD: gathers the token of each row, or zeros for a row without a token."""

    def construct(self, x_ND: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
        return self.rows_of_tokens(x_ND, token_R, row_Nk)

    def bprop(self, x_ND: Tensor, token_R: Tensor, row_Nk: Tensor, out: Tensor, grad_RD: Tensor) -> tuple[Tensor, ...]:
        """Sums the gradients of each token's rows."""
        grad_ND = mint.index_select(grad_RD, 0, row_Nk.reshape(-1)).reshape(*row_Nk.shape, -1).sum(1)
        return grad_ND, *_no_gradients(token_R, row_Nk)


class Unpermute(_TokenRows):
    """(y_RD, gates_Nk, token_R, row_Nk) -> out_ND: the sum of each token's rows, weighted by its gates."""

    def construct(self, y_RD: Tensor, gates_Nk: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
        y_NkD = mint.index_select(y_RD, 0, row_Nk.reshape(-1)).reshape(*row_Nk.shape, -1)
        return (y_NkD * gates_Nk.astype(y_RD.dtype).expand_dims(-1)).sum(1)

    def bprop(
        self, y_RD: Tensor, gates_Nk: Tensor, token_R: Tensor, row_Nk: Tensor, out: Tensor, grad_ND: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of the rows and the gates."""
        grad_RD = self.rows_of_tokens(grad_ND, token_R, row_Nk)
        row_A = row_Nk.reshape(-1)
        products_R = (y_RD.astype(mstype.float32) * grad_RD.astype(mstype.float32)).sum(-1)
        grad_gates = _take(products_R, row_A).reshape(row_Nk.shape).astype(gates_Nk.dtype)
        gate_R = ops.zeros((y_RD.shape[0],), y_RD.dtype)
        gate_R = mint.scatter(gate_R, 0, row_A.astype(mstype.int64), gates_Nk.astype(y_RD.dtype).reshape(-1))
        return grad_RD * gate_R.expand_dims(-1), grad_gates, *_no_gradients(token_R, row_Nk)


def _no_gradients(token_R: Tensor, row_Nk: Tensor) -> tuple[Tensor, Tensor]:
    return ops.zeros(token_R.shape, token_R.dtype), ops.zeros(row_Nk.shape, row_Nk.dtype)


class FusedPermute(nn.Cell):
    """`Permute` by moe_token_permute. The operator sorts by row numbers, which are all different."""

    def construct(self, x_ND: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
        return ops.moe_token_permute(x_ND, row_Nk)[0]


class FusedUnpermute(nn.Cell):
    """`Unpermute` by moe_token_unpermute."""

    def construct(self, y_RD: Tensor, gates_Nk: Tensor, token_R: Tensor, row_Nk: Tensor) -> Tensor:
        return ops.moe_token_unpermute(y_RD, row_Nk.reshape(-1), gates_Nk)
