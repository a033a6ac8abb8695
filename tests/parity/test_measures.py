"""What a device computes of a step's results is what the host computes of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor
from tolerances import SEVERAL_OPERATORS

from trainer.arrays import measures as of_host
from trainer.ops.ascend import measures as of_device
from trainer.ops.measures import read_together
from trainer.ops.routing import Routing, RoutingCounts

RANDOM = np.random.default_rng(5)


def with_numpy(function: Callable) -> Callable:
    """Returns a function of arrays, for tensors."""

    def array(value: Any) -> Any:
        return [array(one) for one in value] if isinstance(value, list) else np.asarray(value)

    def call(*arguments: Any, **more: Any) -> Tensor:
        numbers = [argument if isinstance(argument, (int, float)) else array(argument) for argument in arguments]
        return Tensor(np.asarray(function(*numbers, **more), np.float32))

    return call


# What mint's documentation says of the operators, which have no kernel on a CPU.
MINT = {
    "stack": np.stack, "cat": np.concatenate, "max": np.max, "mean": np.mean, "sign": np.sign, "log": np.log,
    "zeros_like": np.zeros_like, "ones_like": np.ones_like, "zeros": np.zeros, "isfinite": np.isfinite,
    "norm": lambda x, dtype: np.sqrt((x.astype(np.float64) ** 2).sum()),
    "sum": lambda x, dim=None, keepdim=False: np.sum(x, dim, keepdims=keepdim),
    "index_select": lambda x, dim, index: np.take(x, index, dim), "where": np.where,
    "clamp": np.maximum, "amax": np.max,
}  # fmt: skip


@pytest.fixture(autouse=True)
def mint_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = SimpleNamespace(**{name: with_numpy(function) for name, function in MINT.items()})
    monkeypatch.setattr(of_device, "mint", functions)


@pytest.mark.parametrize("bad", [None, np.inf, np.nan])
def test_norms_of_gradients(bad: float | None) -> None:
    gradients = [RANDOM.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (5,), (2, 2, 2), (1,))]
    if bad is not None:
        gradients[1][2] = bad
    found = []
    for module in (of_host, of_device):
        squares = module.squares([Tensor(each) for each in gradients])
        spread = module.scatter_squares(squares, np.array([1.0, 0.5, 1.0, 0.25]), [2, 4, 0])
        [sums, spread] = read_together([module.square_sums(squares, [[0, 2], [1, 3]], True), spread])
        found.append(np.concatenate([sums, spread]))
    assert found[0][1] == (0 if bad is None else 3)
    np.testing.assert_allclose(found[1], found[0], SEVERAL_OPERATORS)


def test_routing_of_micro_batches_and_the_bias_that_balances() -> None:
    found = []
    for module, of in ((of_host, np.asarray), (of_device, Tensor)):
        random, total = np.random.default_rng(6), None
        for _ in range(2):
            scores = [random.random((12, 4)).astype(np.float32) for _ in range(3)]
            requested = [random.multinomial(24, [0.1, 0.2, 0.3, 0.4]) for _ in scores]
            requested[1] *= 0  # a layer without assignments
            kept = [np.minimum(each, 7) for each in requested]
            routings = [
                Routing(None, None, None, None, *(of(each.astype(np.int64)) for each in pair))
                for pair in zip(requested, kept, strict=True)
            ]
            counts = module.routing_counts((1, 2, 4), routings, [of(each) for each in scores])
            assert isinstance(counts, RoutingCounts)
            total = counts if total is None else total + counts
        bias = Parameter(Tensor(np.array([0.1, -0.2, 0.0, 0.3], np.float32)))
        module.update_expert_bias(bias, total.requested[0], 0.001)
        found.append([*read_together([module.router_rates(total)]), bias.asnumpy()])
    rates, moved = found[0]
    assert rates[0, 0] > 0 and rates[1, 0] > 1 and rates[0, 1] == 0 and rates[1, 1] == 1
    np.testing.assert_allclose(found[1][0], rates, SEVERAL_OPERATORS, SEVERAL_OPERATORS)
    np.testing.assert_allclose(found[1][1], moved, SEVERAL_OPERATORS)
    assert (moved != np.array([0.1, -0.2, 0.0, 0.3], np.float32)).any()


def test_losses_add_up() -> None:
    scalars = [Tensor(np.float32(number)) for number in (1.5, 2.25, -0.5)]
    for module in (of_host, of_device):
        for number in (1, 3):
            kept = [module.keep_scalar(scalar) for scalar in scalars[:number]]
            [total] = read_together([module.sum_scalars(kept)])
            assert total == (1.5, None, 3.25)[number - 1]
