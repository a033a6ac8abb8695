"""Experts, by plain kernels and by native layers, against literal float64 loops, central differences, and what they
must not do.

Both compute on the host; plain kernels are those of context.mode 1. Limit: tolerances.py, for three products one after
the other and back; the gates' gradient cancels, so that `scale` is 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mindspore
import numpy as np
import pytest
from decoder_settings import decoder_settings
from mindspore import Parameter, Tensor, nn
from numpy_kernels import assert_close, assert_same_bits, central_differences, distance, standard_normal, swiglu
from tolerances import FLOAT16_TWICE, rounding_limit

from trainer.arrays import memory
from trainer.arrays.moe import experts as native_experts
from trainer.arrays.numpy_operators import NumpyOperators
from trainer.arrays.tiles import Scratch
from trainer.device.threads import HostThreads
from trainer.errors import value_text
from trainer.ops import plain as plain_kernels
from trainer.ops import plain_moe
from trainer.ops.kernel_set import load_kernels
from trainer.ops.routing import Routing, RoutingRule, route
from trainer.ops.select import select_kernels

NAMES = ("gate", "up", "down")
TOKENS, EXPERTS, CHOSEN, HIDDEN, WIDTH = 6, 4, 2, 5, 3
LIMIT = rounding_limit(2 * (HIDDEN + WIDTH + EXPERTS + CHOSEN + 6), TOKENS, scale=3)
DROPLESS = (None, None, "position")  # no bias, no capacity
RANDOM = np.random.default_rng(5)
normal = partial(standard_normal, RANDOM)


def gradients(function: Callable[..., Tensor], arrays: list[np.ndarray], upstream: np.ndarray) -> list[np.ndarray]:
    weighted = mindspore.grad(lambda *args: (function(*args) * Tensor(upstream)).sum(), tuple(range(len(arrays))))
    found = weighted(*map(Tensor, arrays))
    return [value.asnumpy() for value in (found if isinstance(found, tuple) else (found,))]


def check(
    ours: Callable[..., Tensor], right: Callable[..., np.ndarray], arrays: list[np.ndarray]
) -> list[np.ndarray]:
    """Compares results and gradients of `ours` with `right`; returns the gradients."""
    expected = right(*(array.astype(np.float64) for array in arrays))
    upstream = normal(*expected.shape)
    assert distance(ours(*map(Tensor, arrays)).asnumpy(), expected) < LIMIT
    found = gradients(ours, arrays, upstream)
    assert_close(found, central_differences(right, arrays, upstream), LIMIT)
    return found


# How many rows each expert has, of 7.
COUNTS = {
    "even": [2, 2, 2, 1],
    "some_empty": [0, 3, 0, 4],
    "one_gets_all": [0, 0, 7, 0],
    "first_gets_all": [7, 0, 0, 0],
    "rows_of_nobody": [1, 0, 3, 0],
    "all_empty": [0, 0, 0, 0],
}


@pytest.mark.parametrize("name", COUNTS)
def test_grouped_matmul(name: str) -> None:
    counts = np.array(COUNTS[name])
    owners = np.repeat(np.arange(EXPERTS), counts)

    def right(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        y = np.zeros((7, WIDTH))
        for row, expert in enumerate(owners):
            y[row] = weight[expert] @ x[row]
        return y

    kernel = plain_moe.GroupedMatmul()
    arrays = [normal(7, HIDDEN), normal(EXPERTS, WIDTH, HIDDEN)]
    grad_x, grad_weight = check(lambda x, weight: kernel(x, weight, Tensor(counts)), right, arrays)
    assert not grad_x[len(owners) :].any() and not grad_weight[counts == 0].any()
    assert not kernel(Tensor(arrays[0]), Tensor(arrays[1]), Tensor(counts)).asnumpy()[len(owners) :].any()


class Sorted(NamedTuple):
    """A routing of few tokens, with experts that have none and with dropped assignments."""

    rule: RoutingRule
    routing: Routing
    scores: np.ndarray


def sorted_tokens(safe_tokens: bool, capacity: int | None, policy: str = "position") -> Sorted:
    scores = RANDOM.random((TOKENS, EXPERTS)).astype(np.float32)
    scores[:, 1] = -1  # nobody's choice
    rule = RoutingRule(EXPERTS, CHOSEN, safe_tokens=safe_tokens)
    cell = plain_moe.Route(rule)
    return Sorted(rule, cell(Tensor(scores), None, capacity, policy), scores)


ROUTINGS = pytest.mark.parametrize("safe_tokens", [False, True], ids=["plain", "safe"])
CAPACITIES = pytest.mark.parametrize("capacity", [None, 2], ids=["all", "dropping"])


@pytest.mark.parametrize("policy", ["position", "probability"])
@ROUTINGS
@CAPACITIES
def test_route_gives_tensors_of_the_routing(safe_tokens: bool, capacity: int | None, policy: str) -> None:
    bias = RANDOM.random(EXPERTS).astype(np.float32)
    scores = RANDOM.random((TOKENS, EXPERTS)).astype(np.float32)
    cell = plain_moe.Route(RoutingRule(EXPERTS, CHOSEN, safe_tokens=safe_tokens))
    ours = cell(Tensor(scores), Tensor(bias), capacity, policy)
    right = route(RoutingRule(EXPERTS, CHOSEN, safe_tokens=safe_tokens), scores, bias, capacity, policy)
    assert_same_bits(ours, right)
    assert [mine.asnumpy().dtype for mine in ours] == [expected.dtype for expected in right]


@ROUTINGS
@CAPACITIES
def test_permute(safe_tokens: bool, capacity: int | None) -> None:
    routing = sorted_tokens(safe_tokens, capacity).routing
    token_R = routing.token_R.asnumpy()

    def right(x: np.ndarray) -> np.ndarray:
        return np.stack([x[token] if token < TOKENS else np.zeros(HIDDEN) for token in token_R])

    kernel = plain_moe.Permute()
    check(lambda x: kernel(x, routing.token_R, routing.row_Nk), right, [normal(TOKENS, HIDDEN)])


@ROUTINGS
@CAPACITIES
def test_unpermute(safe_tokens: bool, capacity: int | None) -> None:
    routing = sorted_tokens(safe_tokens, capacity).routing
    row_Nk = routing.row_Nk.asnumpy()

    def right(y: np.ndarray, gates: np.ndarray) -> np.ndarray:
        return np.stack([sum(gates[token, i] * y[row_Nk[token, i]] for i in range(CHOSEN)) for token in range(TOKENS)])

    kernel = plain_moe.Unpermute()
    rows, sorting = len(routing.token_R), (routing.token_R, routing.row_Nk)
    check(lambda y, gates: kernel(y, gates, *sorting), right, [normal(rows, HIDDEN), normal(TOKENS, CHOSEN)])


class Chain(nn.Cell):
    """All of a layer's kernels of experts, one after the other: SwiGLU experts, weighted and added up."""

    def __init__(self) -> None:
        super().__init__()
        self.permute, self.unpermute = plain_moe.Permute(), plain_moe.Unpermute()
        self.gate, self.up, self.down = (plain_moe.GroupedMatmul() for _ in range(3))
        self.swiglu = plain_kernels.SwiGLU()

    def construct(self, x_ND, gates_Nk, gate_EFD, up_EFD, down_EDF, routing):
        rows_RD, counts_E = self.permute(x_ND, routing.token_R, routing.row_Nk), routing.counts_E
        inner_RF = self.swiglu(self.gate(rows_RD, gate_EFD, counts_E), self.up(rows_RD, up_EFD, counts_E))
        return self.unpermute(self.down(inner_RF, down_EDF, counts_E), gates_Nk, routing.token_R, routing.row_Nk)


class Native(nn.Cell):
    """The same by native layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = native_experts.CpuExperts(Scratch())

    def construct(self, x_ND, gates_Nk, gate_EFD, up_EFD, down_EDF, routing):
        weights = gate_EFD, up_EFD, down_EDF
        frozen = [isinstance(one, Parameter) and not one.requires_grad for one in weights]
        self.trained = [name for name, is_frozen in zip(NAMES, frozen, strict=True) if not is_frozen]
        self.arguments = (
            x_ND.asnumpy(), gates_Nk.asnumpy(), native_experts.ExpertWeights(*(one.asnumpy() for one in weights)),
            Routing(*(one.asnumpy() for one in routing)),
        )  # fmt: skip
        out_ND, self.saved = self.experts.forward(*self.arguments)
        return Tensor(out_ND)

    def bprop(self, x_ND, gates_Nk, gate_EFD, up_EFD, down_EDF, routing, out, grad_ND):
        found = self.experts.backward(*self.arguments, self.saved, grad_ND.asnumpy(), self.trained)
        found_weights = {name: Tensor(array) for name, array in found.weights.items()}
        of_weights = [
            found_weights.get(name, one) for name, one in zip(NAMES, (gate_EFD, up_EFD, down_EDF), strict=True)
        ]
        return Tensor(found.x_ND), Tensor(found.gates_Nk), *of_weights, *[None] * len(routing)


KERNELS = pytest.mark.parametrize("experts_kernel", [Chain, Native], ids=["plain", "native"])


def experts_literally(routing: Routing) -> Callable[..., np.ndarray]:
    """Computes one assignment after the other; those without a row in their expert's group add nothing."""
    experts_Nk, row_Nk, computed = routing.experts_Nk.asnumpy(), routing.row_Nk.asnumpy(), routing.counts_E.asnumpy()

    def compute(x, gates, gate, up, down) -> np.ndarray:
        out = np.zeros_like(x)
        for (token, choice), expert in np.ndenumerate(experts_Nk):
            if row_Nk[token, choice] < computed.sum():
                inner = swiglu(gate[expert] @ x[token], up[expert] @ x[token])
                out[token] += gates[token, choice] * (down[expert] @ inner)
        return out

    return compute


def layer_arrays(tokens: int, experts: int, hidden: int, width: int) -> list[np.ndarray]:
    weights = [normal(experts, width, hidden), normal(experts, width, hidden), normal(experts, hidden, width)]
    return [normal(tokens, hidden), RANDOM.random((tokens, CHOSEN)).astype(np.float32), *weights]


@pytest.mark.parametrize("policy", ["position", "probability"])
@ROUTINGS
@CAPACITIES
@KERNELS
def test_experts_of_a_layer(
    safe_tokens: bool, capacity: int | None, policy: str, experts_kernel: type[nn.Cell]
) -> None:
    routing = sorted_tokens(safe_tokens, capacity, policy).routing
    layer = experts_kernel()
    found = check(
        lambda *arrays: layer(*arrays, routing),
        experts_literally(routing),
        layer_arrays(TOKENS, EXPERTS, HIDDEN, WIDTH),
    )
    dropped_Nk = routing.row_Nk.asnumpy() >= routing.counts_E.asnumpy().sum()
    assert dropped_Nk.any() == (capacity is not None)
    assert not found[1][dropped_Nk].any(), "the gates of dropped assignments"
    assert not any(gradient[1].any() for gradient in found[2:]), "the weights of an expert without tokens"


def outputs_and_gradients(layer: nn.Cell, arrays: list[np.ndarray], routing: Routing) -> list[np.ndarray]:
    """Computes outputs and gradients as a run does: weights are parameters, and the gradient is that of a number."""
    inputs = [Tensor(array) for array in arrays[:2]]
    weights = [Parameter(Tensor(array), name=f"weight_{place}") for place, array in enumerate(arrays[2:])]
    kept: list[Tensor] = []

    def loss(x_ND: Tensor, gates_Nk: Tensor) -> Tensor:
        kept.append(layer(x_ND * 1.0, gates_Nk * 1.0, *weights, routing))
        return (kept[-1] * kept[-1]).sum()

    found = mindspore.grad(loss, (0, 1), weights)(*inputs)
    return [kept[0].asnumpy(), *(gradient.asnumpy() for gradient in (*found[0], *found[1]))]


def uneven_scores(tokens: int, experts: int) -> np.ndarray:
    """Returns scores by which every third expert gets nothing."""
    scores = RANDOM.random((tokens, experts)).astype(np.float32)
    scores[:, ::3] = 0
    return scores


@KERNELS
@pytest.mark.parametrize("capacity", [None, 40])
def test_an_expert_without_tokens_works_with_and_without_safe_tokens(
    capacity: int | None, experts_kernel: type[nn.Cell]
) -> None:
    """The case for which enable_gmm_safe_tokens was made. Here both settings work, and compute the same bits."""
    tokens, experts, hidden, width = 300, 16, 48, 72
    scores, arrays = uneven_scores(tokens, experts), layer_arrays(tokens, experts, hidden, width)
    results = []
    for safe_tokens in (False, True):
        routing = plain_moe.Route(RoutingRule(experts, CHOSEN, safe_tokens=safe_tokens))(
            Tensor(scores), None, capacity, "position"
        )
        assert (routing.counts_E.asnumpy() == 0).sum() == (0 if safe_tokens else 6)
        results.append(outputs_and_gradients(experts_kernel(), arrays, routing))
    for plain, safe in zip(*results, strict=True):
        assert plain.tobytes() == safe.tobytes()


def leave_dirty_memory(*shapes: tuple[int, ...]) -> None:
    """Frees memory of these sizes, filled with NaN, from which the next arrays are made."""
    arrays = [memory.empty(*shape) for shape in shapes for _ in range(12)]
    for array in arrays:
        array[:] = np.nan


@KERNELS
def test_experts_without_tokens_get_zero_gradients_after_a_full_batch(experts_kernel: type[nn.Cell]) -> None:
    """Never None, and never what the memory held before."""
    tokens, experts, hidden, width = 256, 8, 32, 40
    rows, arrays, layer = tokens * CHOSEN, layer_arrays(tokens, experts, hidden, width), experts_kernel()
    shapes = [(rows, hidden), (rows, width), (tokens, hidden), (experts, width, hidden), (experts, hidden, width)]
    scores = RANDOM.random((tokens, experts)).astype(np.float32)
    everybody = plain_moe.Route(RoutingRule(experts, CHOSEN))(Tensor(scores), *DROPLESS)
    assert all(everybody.counts_E.asnumpy())
    outputs_and_gradients(layer, arrays, everybody)

    nobody = Routing(
        *everybody[:3], Tensor(np.zeros(experts, np.int64)), everybody.requested_E, Tensor(np.zeros(experts, np.int64))
    )
    leave_dirty_memory(*shapes)
    for result in outputs_and_gradients(layer, arrays, nobody):
        assert not result.any(), "all experts empty: zeros everywhere"

    one = np.full((tokens, experts), 0.1, np.float32)
    one[:, :2] = 0.5
    two_experts = plain_moe.Route(RoutingRule(experts, CHOSEN))(Tensor(one), None, tokens // 2, "position")
    leave_dirty_memory(*shapes)
    out, grad_x, grad_gates, *grad_weights = outputs_and_gradients(layer, arrays, two_experts)
    for gradient in grad_weights:
        assert np.isfinite(gradient).all() and gradient[:2].any() and not gradient[2:].any()
    for kept in (out, grad_x, grad_gates):
        assert np.isfinite(kept).all()
        assert kept[: tokens // 2].any() and not kept[tokens // 2 :].any(), "whatever is dropped adds nothing"


@KERNELS
def test_the_same_bits_every_time(experts_kernel: type[nn.Cell]) -> None:
    tokens, experts = 512, 8
    arrays, scores = layer_arrays(tokens, experts, 64, 88), uneven_scores(tokens, experts)
    routing = plain_moe.Route(RoutingRule(experts, CHOSEN))(Tensor(scores), *DROPLESS)
    first = [array.tobytes() for array in outputs_and_gradients(experts_kernel(), arrays, routing)]
    for _ in range(5):
        assert [array.tobytes() for array in outputs_and_gradients(experts_kernel(), arrays, routing)] == first


@pytest.fixture
def multiplications(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the number of multiplications of each product; all of them are NumPy's."""
    counted: list[int] = []

    def counting(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        counted.append(a.shape[0] * a.shape[1] * b.shape[1])
        return matmul(a, b, out=out)

    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", counting)
    monkeypatch.setattr(native_experts, "operators", NumpyOperators)
    return counted


@pytest.mark.parametrize("experts", [2, 8, 64])
@pytest.mark.parametrize("capacity", [None, 10])
def test_the_cost_is_that_of_the_rows(experts: int, capacity: int | None, multiplications: list[int]) -> None:
    """Not of experts times tokens: three products of each kept row forwards, six backwards; none for empty experts."""
    tokens, hidden, width = 60, 8, 12
    arrays, scores = layer_arrays(tokens, experts, hidden, width), uneven_scores(tokens, experts)
    routing = plain_moe.Route(RoutingRule(experts, CHOSEN))(Tensor(scores), None, capacity, "position")
    kept_E = routing.kept_E.asnumpy()
    layer = Native()
    layer(*map(Tensor, arrays), routing)
    assert sum(multiplications) == 3 * kept_E.sum() * hidden * width
    assert len(multiplications) == 3 * np.count_nonzero(kept_E)
    multiplications.clear()
    outputs_and_gradients(layer, arrays, routing)
    assert sum(multiplications) == 9 * kept_E.sum() * hidden * width


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_expert_with_most_of_the_rows_is_cut(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few rows each, segments that several threads take, and the same bits as with one."""
    monkeypatch.setattr(native_experts, "_MOST_ROWS", 4)
    monkeypatch.setattr(native_experts, "host_threads", lambda: HostThreads(threads))
    random = np.random.default_rng(3)
    scores = random.random((23, EXPERTS)).astype(np.float32)
    scores[:, 2] += 1  # everybody's choice: four segments of more than four rows
    routing = plain_moe.Route(RoutingRule(EXPERTS, CHOSEN))(Tensor(scores), *DROPLESS)
    assert routing.counts_E.asnumpy()[2] == 23
    check(
        lambda *arrays: Native()(*arrays, routing),
        experts_literally(routing),
        layer_arrays(23, EXPERTS, HIDDEN, WIDTH),
    )


@pytest.mark.parametrize("frozen", ["gate", "up", "down"])
def test_native_layers_leave_out_the_gradients_of_frozen_experts(frozen: str, multiplications: list[int]) -> None:
    arrays, scores = layer_arrays(30, 4, 8, 12), uneven_scores(30, 4)
    routing = plain_moe.Route(RoutingRule(4, CHOSEN))(Tensor(scores), *DROPLESS)
    weights = [Parameter(Tensor(array), name=name) for name, array in zip(NAMES, arrays[2:], strict=True)]
    layer, products, found = Native(), [], []
    for is_frozen in (False, True):
        weights[NAMES.index(frozen)].requires_grad = not is_frozen
        trained = [weight for weight in weights if weight.requires_grad]
        loss = mindspore.grad(lambda x, g: (layer(x * 1.0, g, *weights, routing) ** 2).sum(), (0, 1), trained)
        multiplications.clear()
        of_inputs, of_weights = loss(*map(Tensor, arrays[:2]))
        products.append(sum(multiplications) // (60 * 8 * 12))
        kept = [g for g, weight in zip(of_weights, trained, strict=True) if weight.name != frozen]
        found.append([gradient.asnumpy().tobytes() for gradient in (*of_inputs, *kept)])
    assert products == [9, 8] and found[0] == found[1]


def test_half_precision_rounds_what_leaves_but_not_the_gradient_of_the_weight() -> None:
    kernel, counts = plain_moe.GroupedMatmul(), np.array([3, 0, 4])
    x, weight = normal(7, 32).astype(np.float16), normal(3, 24, 32)
    owners, rounded = np.repeat(np.arange(3), counts), weight.astype(np.float16).astype(np.float64)
    y = kernel(Tensor(x), Tensor(weight), Tensor(counts))
    exact = np.stack([rounded[expert] @ row for expert, row in zip(owners, x.astype(np.float64), strict=True)])
    assert y.dtype == mindspore.float16
    assert distance(y.asnumpy(), exact) < FLOAT16_TWICE

    upstream = normal(7, 24).astype(np.float16)
    loss = mindspore.grad(lambda *args: (kernel(*args, Tensor(counts)) * Tensor(upstream)).sum(), (0, 1))
    grad_x, grad_weight = loss(Tensor(x), Tensor(weight))
    assert (grad_x.dtype, grad_weight.dtype) == (mindspore.float16, mindspore.float32)
    right = np.zeros(weight.shape)
    for row, expert in enumerate(owners):
        right[expert] += np.outer(upstream[row].astype(np.float64), x[row].astype(np.float64))
    assert distance(grad_weight.asnumpy(), right) < LIMIT
    assert not grad_weight.asnumpy()[1].any()


def test_half_precision_of_sorting() -> None:
    routing = sorted_tokens(safe_tokens=True, capacity=2).routing
    sorting = routing.token_R, routing.row_Nk
    permute, unpermute = plain_moe.Permute(), plain_moe.Unpermute()
    gates = Tensor(normal(TOKENS, CHOSEN))

    def there_and_back(x: Tensor, gates: Tensor) -> Tensor:
        return unpermute(permute(x, *sorting), gates, *sorting)

    x = normal(TOKENS, HIDDEN).astype(np.float16)
    out = there_and_back(Tensor(x), gates)
    assert out.dtype == mindspore.float16
    assert distance(out.asnumpy(), x * gates.asnumpy().sum(1, keepdims=True)) < FLOAT16_TWICE
    found = mindspore.grad(lambda *args: there_and_back(*args).sum(), (0, 1))(Tensor(x), gates)
    assert [gradient.dtype for gradient in found] == [mindspore.float16, mindspore.float32]


settings_of = partial(decoder_settings, hidden_size=32, num_heads=2, seq_length=8)


def choices(device: str, moe: dict | None) -> dict[str, tuple[str, str, str]]:
    settings = settings_of(**({"moe_config": moe} if moe else {}))
    found = {choice.kernel: choice for choice in select_kernels(settings, device)}
    names = ("grouped_matmul", "token_permute")
    return {name: (found[name].asked, found[name].chosen, found[name].why) for name in names if name in found}


def test_only_models_with_experts_have_rows_of_their_kernels() -> None:
    assert choices("CPU", None) == {}
    assert load_kernels(select_kernels(settings_of(), "CPU")).grouped_matmul is plain_moe.GroupedMatmul


MOE = {"expert_num": 4, "num_experts_chosen": 2, "use_gmm": True}
ON_CPU, FUSED = "exists only on Ascend; device is CPU", "fused operator of Ascend"


@pytest.mark.parametrize(
    ("device", "changes", "product", "permute"),
    [
        ("CPU", {}, ("reference", ON_CPU), ("reference", "use_fused_ops_permute is off; device is CPU")),
        ("CPU", {"use_fused_ops_permute": True}, ("reference", ON_CPU), ("reference", ON_CPU)),
        ("Ascend", {}, ("GroupedMatmulV4", FUSED), ("reference", "use_fused_ops_permute is off")),
        ("Ascend", {"use_fused_ops_permute": True}, ("GroupedMatmulV4", FUSED), ("moe_token_permute", FUSED)),
        (
            "Ascend", {"use_fused_ops_permute": True, "enable_gmm_safe_tokens": True},
            ("GroupedMatmulV4", FUSED), ("reference", "enable_gmm_safe_tokens adds rows"),
        ),
        (
            "Ascend", {"use_fused_ops_permute": True, "use_gmm": False},
            ("GroupedMatmulV4", "experts never compute on the host"), ("reference", "use_gmm is off"),
        ),
    ],
)
def test_why_a_kernel_is_chosen(device: str, changes: dict, product: tuple[str, str], permute: tuple[str, str]) -> None:
    found = choices(device, MOE | changes)
    for name, (chosen, reason) in {"grouped_matmul": product, "token_permute": permute}.items():
        assert found[name][1] == chosen and reason in found[name][2]
    assert found["grouped_matmul"][0] == f"use_gmm: {value_text((MOE | changes)['use_gmm'])}"
