"""The Ascend kernels of experts without an Ascend, as in test_ascend_kernels.py: exported graphs hold the fused
operators and their gradients, and with these operators as documented the kernels compute what the reference does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mindspore
import numpy as np
import pytest
from documented_operators import moe_token_permute, moe_token_unpermute, on_tensors
from exported_graphs import FLOAT, Backward, Graph, export
from mindspore import Tensor, nn
from numpy_kernels import assert_close, assert_same_bits, distance, standard_normal
from tolerances import OPERATOR

from trainer.ops import plain_moe as moe_reference
from trainer.ops.ascend import moe as moe_ascend
from trainer.ops.kernel_set import load_kernels
from trainer.ops.routing import Routing, RoutingRule, route
from trainer.ops.select import KernelChoice

TOKENS, EXPERTS, CHOSEN, HIDDEN, WIDTH = 12, 8, 2, 6, 5
ROWS = TOKENS * CHOSEN
RANDOM = np.random.default_rng(3)
normal = partial(standard_normal, RANDOM)


class RouteWith(nn.Cell):
    """A capacity and a policy are constants of a graph."""

    def __init__(self, capacity: int | None, policy: str, rule: RoutingRule) -> None:
        super().__init__()
        self.route, self.capacity, self.policy = moe_ascend.Route(rule), capacity, policy

    def construct(self, scores_NE, bias_E):
        return self.route(scores_NE, bias_E, self.capacity, self.policy)


class ThereAndBack(nn.Cell):
    """Permute, one grouped product, un-permute."""

    def __init__(self, permute: nn.Cell, unpermute: nn.Cell) -> None:
        super().__init__()
        self.permute, self.product, self.unpermute = permute, moe_ascend.GroupedMatmul(), unpermute

    def construct(self, x_ND, weight_EDD, gates_Nk, token_R, row_Nk, counts_E):
        y_RD = self.product(self.permute(x_ND, token_R, row_Nk), weight_EDD, counts_E)
        return self.unpermute(y_RD, gates_Nk, token_R, row_Nk)


RULES = {
    "plain": RoutingRule(EXPERTS, CHOSEN),
    "safe": RoutingRule(EXPERTS, CHOSEN, safe_tokens=True),
    "grouped": RoutingRule(EXPERTS, 3, groups=4, chosen_groups=2, group_score="two_best"),
    "grouped_safe": RoutingRule(EXPERTS, 3, groups=4, chosen_groups=2, group_score="best", safe_tokens=True),
}


@pytest.mark.parametrize(("name", "policy"), [("plain", "position"), ("grouped_safe", "probability")])
def test_front_end_builds_the_routing(name: str, policy: str, tmp_path: Path) -> None:
    rule = RULES[name]
    cell = RouteWith(3, policy, rule)
    graph = export(cell, [Tensor(normal(TOKENS, EXPERTS)), Tensor(normal(EXPERTS))], tmp_path / "route")
    assignments = (TOKENS, rule.chosen)
    rows = TOKENS * rule.chosen + EXPERTS * rule.safe_tokens
    assert graph.shapes == [assignments, assignments, (rows,), (EXPERTS,), (EXPERTS,), (EXPERTS,)]


def built(fused: bool, dtype: mindspore.Type, folder: Path) -> tuple[Graph, Graph]:
    """Returns the forward and the backward graph of permute, product and un-permute."""
    kernels = moe_ascend.Permute(), moe_ascend.Unpermute()
    if fused:
        kernels = moe_ascend.FusedPermute(), moe_ascend.FusedUnpermute()
    tensors = [Tensor(normal(TOKENS, HIDDEN), dtype), Tensor(normal(EXPERTS, HIDDEN, HIDDEN))]
    tensors += [Tensor(normal(TOKENS, CHOSEN)), Tensor(np.zeros(ROWS, np.int32))]
    tensors += [Tensor(np.zeros((TOKENS, CHOSEN), np.int32)), Tensor(np.zeros(EXPERTS, np.int64))]
    forward = export(ThereAndBack(*kernels), tensors, folder / "forward")
    upstream = Tensor(normal(TOKENS, HIDDEN), dtype)
    return forward, export(Backward(ThereAndBack(*kernels)), [*tensors, upstream], folder / "backward")


@pytest.mark.parametrize("dtype", [mindspore.float32, mindspore.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "gathers"])
def test_front_end_builds_the_fused_operators_and_their_gradients(
    fused: bool, dtype: mindspore.Type, tmp_path: Path
) -> None:
    forward, backward = built(fused, dtype, tmp_path)
    assert forward.shapes == [(TOKENS, HIDDEN)]
    assert backward.shapes[:3] == [(TOKENS, HIDDEN), (EXPERTS, HIDDEN, HIDDEN), (TOKENS, CHOSEN)]
    assert backward.dtypes[1:3] == [FLOAT, FLOAT], "gradients of weights and gates leave in float32"
    # The gradient of a grouped product is two more of them: of the rows, and of the weight.
    assert (forward.operators["GroupedMatmulV4"], backward.operators["GroupedMatmulV4"]) == (1, 3)
    permutes = {name for name in forward.operators if "MoeToken" in name}
    assert permutes == ({"MoeTokenPermute", "InnerMoeTokenUnpermute"} if fused else set())
    gradients = {name for name in backward.operators if "MoeToken" in name and name.endswith("Grad")}
    assert gradients == ({"MoeTokenPermuteGrad", "MoeTokenUnpermuteGrad"} if fused else set())
    scatters = ("SegmentSum", "GatherGrad", "GatherDGrad", "IndexAdd")
    assert not any(name for name in backward.operators if any(part in name for part in scatters))


@pytest.mark.parametrize("policy", ["position", "probability"])
@pytest.mark.parametrize("capacity", [None, 1, 3])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_routing_is_that_of_the_reference(
    name: str, ties: bool, capacity: int | None, policy: str, operators_as_documented: None
) -> None:
    rule = RULES[name]
    scores = RANDOM.integers(1, 4, (TOKENS, EXPERTS)) / 4 if ties else RANDOM.random((TOKENS, EXPERTS))
    scores = scores.astype(np.float32)
    scores[:, 3] = 0
    bias = np.where(np.arange(EXPERTS) == 3, -2, RANDOM.integers(0, 3, EXPERTS) / 4).astype(np.float32)
    kernel = moe_ascend.Route(rule)
    for added in (None, bias):
        ours = kernel(Tensor(scores), None if added is None else Tensor(added), capacity, policy)
        right = route(rule, scores, added, capacity, policy)
        assert_same_bits(Routing(*ours)._asdict(), right._asdict())
        assert [mine.asnumpy().dtype for mine in ours] == [expected.dtype for expected in right]


@pytest.mark.parametrize("counts", [[3, 0, 4, 0], [0, 0, 7, 0], [2, 0, 1, 0], [1, 0, 2, 1], [0, 0, 0, 0]], ids=str)
def test_grouped_matmul_is_that_of_the_reference(counts: list[int], operators_as_documented: None) -> None:
    ours, right = moe_ascend.GroupedMatmul(fills_rows=sum(counts) == 7), moe_reference.GroupedMatmul()
    x, weight, upstream = (Tensor(normal(*shape)) for shape in ((7, HIDDEN), (4, WIDTH, HIDDEN), (7, WIDTH)))
    results = []
    for kernel in (ours, right):
        def weighted(x: Tensor, weight: Tensor) -> Tensor:
            return kernel(x, weight, Tensor(np.array(counts))) * upstream  # noqa: B023
        gradients = mindspore.grad(weighted, (0, 1))(x, weight)
        results.append([array.asnumpy() for array in (weighted(x, weight), *gradients)])
    for mine, expected in zip(*results, strict=True):
        assert distance(mine, expected) < OPERATOR
        np.testing.assert_array_equal(mine[expected == 0], 0)


@pytest.mark.parametrize("safe_tokens", [False, True])
@pytest.mark.parametrize("capacity", [None, 2])
def test_gathers_are_those_of_the_reference(
    safe_tokens: bool, capacity: int | None, operators_as_documented: None
) -> None:
    """These have CPU kernels, and gradients written by hand."""
    scores = RANDOM.random((TOKENS, EXPERTS)).astype(np.float32)
    scores[:, 3] = 0
    rule = RoutingRule(EXPERTS, CHOSEN, safe_tokens=safe_tokens)
    routing = moe_reference.Route(rule)(Tensor(scores), None, capacity, "position")
    rows, sorting = len(routing.token_R), (routing.token_R, routing.row_Nk)
    x, y, gates = (Tensor(normal(*shape)) for shape in ((TOKENS, HIDDEN), (rows, HIDDEN), (TOKENS, CHOSEN)))
    above_R, above_N = Tensor(normal(rows, HIDDEN)), Tensor(normal(TOKENS, HIDDEN))
    results = []
    for room in (moe_ascend, moe_reference):
        permute, unpermute = room.Permute(), room.Unpermute()
        result = [permute(x, *sorting), unpermute(y, gates, *sorting)]
        result.append(mindspore.grad(lambda x: permute(x, *sorting) * above_R)(x))  # noqa: B023
        result += mindspore.grad(lambda *args: unpermute(*args, *sorting) * above_N, (0, 1))(y, gates)  # noqa: B023
        results.append([array.asnumpy() for array in result])
    assert_close(*results, OPERATOR)


@pytest.mark.parametrize("capacity", [None, 2])
def test_fused_sorting_is_that_of_the_reference(capacity: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_ascend.ops, "moe_token_permute", on_tensors(moe_token_permute))
    monkeypatch.setattr(moe_ascend.ops, "moe_token_unpermute", on_tensors(moe_token_unpermute))
    scores = Tensor(RANDOM.random((TOKENS, EXPERTS)).astype(np.float32))
    routing = moe_reference.Route(RoutingRule(EXPERTS, CHOSEN))(scores, None, capacity, "probability")
    sorting = routing.token_R, routing.row_Nk
    x, y, gates = (Tensor(normal(*shape)) for shape in ((TOKENS, HIDDEN), (ROWS, HIDDEN), (TOKENS, CHOSEN)))
    ours = moe_ascend.FusedPermute()(x, *sorting), moe_ascend.FusedUnpermute()(y, gates, *sorting)
    right = moe_reference.Permute()(x, *sorting), moe_reference.Unpermute()(y, gates, *sorting)
    assert_close(ours, right, OPERATOR)


@pytest.mark.parametrize(
    ("product", "permute", "kernels"),
    [
        ("reference", "reference", (moe_reference.GroupedMatmul, moe_reference.Permute, moe_reference.Unpermute)),
        ("GroupedMatmulV4", "reference", (moe_ascend.GroupedMatmul, moe_ascend.Permute, moe_ascend.Unpermute)),
        (
            "GroupedMatmulV4", "moe_token_permute",
            (moe_ascend.GroupedMatmul, moe_ascend.FusedPermute, moe_ascend.FusedUnpermute),
        ),
    ],
)
def test_choices_become_kernels(product: str, permute: str, kernels: tuple[type, type, type]) -> None:
    chosen = dict.fromkeys(("rotary_embedding", "swiglu", "attention", "rms_norm"), "reference")
    chosen |= {"grouped_matmul": product, "token_permute": permute}
    found = load_kernels([KernelChoice(kernel, "", name, "") for kernel, name in chosen.items()])
    assert (found.grouped_matmul, found.permute, found.unpermute) == kernels
    assert found.route is (moe_reference.Route if product == "reference" else moe_ascend.Route)
