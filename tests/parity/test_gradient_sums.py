"""Sums of gradients with Add instead of AddN: same numbers, and no AddN is left in a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exported_graphs import Graph, export
from mindspore import Tensor, jit, nn, ops
from mindspore.graph._parse import standard_method
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import SplitWithSize
from tolerances import OPERATOR

from trainer.ops.ascend.gradient_sums import sum_gradients_with_add

RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((3, 4)).astype(np.float32)
MASK = RANDOM.random((3, 2)) < 0.5


class Uses(nn.Cell):
    """Uses its input, both results of an operator, and a mask of bools twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = SplitWithSize()
        self.choose = P.Select()

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        first, second = self.cut(x, (2, 2), 1)
        chosen = self.choose(mask, first, second) * self.choose(mask, second, first * second)
        return (chosen * first).sum() + (x * x).sum()


class Gradient(nn.Cell):
    """x, mask -> the gradient of x."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Uses()
        self.gradient = ops.GradOperation(get_all=True)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.gradient(self.of)(x, mask)[0]


def graph_and_numbers(file: Path) -> tuple[Graph, np.ndarray]:
    inputs = [Tensor(X), Tensor(MASK)]
    return export(Gradient(), inputs, file), jit(Gradient().construct)(*inputs).asnumpy()


@pytest.mark.parametrize(("in_one_graph", "additions"), [(False, 8), (True, 6)])
def test_gradients_are_the_same_without_addn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_one_graph: bool, additions: int
) -> None:
    """In one graph there are no additions of zeros; otherwise those of both results of the operator."""
    before, right = graph_and_numbers(tmp_path / "before")
    monkeypatch.setattr(standard_method, "hyper_add", standard_method.hyper_add)  # it comes back after the test
    sum_gradients_with_add(in_one_graph=in_one_graph)
    after, found = graph_and_numbers(tmp_path / "after")
    assert before.operators["AddN"]
    assert (after.operators["AddN"], after.operators["Add"]) == (0, additions)
    np.testing.assert_allclose(found, right, rtol=OPERATOR)
