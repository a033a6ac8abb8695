"""Experts of semi-automatic mode over the ranks of a job, each of which has some of them, against one rank with all.

A CPU has no AlltoAllV. Here it is an equal exchange of rows that are filled up to the most that there can be; the sizes
that the experts give it decide which of them arrive, as of the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from unittest import mock

import mindspore
import numpy as np
from expert_operators import GroupedMatmul, operators_of_a_cpu
from mindspore import Tensor, nn, ops

from trainer.ops import plain
from trainer.parallel.host_group import CpuGroup
from trainer.semi_auto import experts

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 6, 5, 3, 8, 2
MOST = TOKENS * CHOSEN + EXPERTS
NAMES = ("y", "gates", "gate", "up", "down")


def exchanged_experts(group: CpuGroup) -> dict[str, np.ndarray]:
    """Returns sum and gradients of this rank, and those of one rank that has all experts."""
    every = [tokens_of(rank) for rank in range(group.size)]
    matrices = weights()
    own = slice(group.rank * EXPERTS // group.size, (group.rank + 1) * EXPERTS // group.size)
    with (
        operators_of_a_cpu(),
        mock.patch.object(experts.P, "MoveTo", lambda: to_host),
        mock.patch.object(experts, "all_to_all", lambda x, name, ranks: AllToAll(group)(x)),
        mock.patch.object(experts, "all_to_all_rows", partial(exchange, group)),
    ):
        mine = computed(group.size, *every[group.rank], [matrix[own] for matrix in matrices])
        all_tokens = [np.concatenate(arrays) for arrays in zip(*every, strict=True)]
        right = computed(1, *all_tokens, matrices)
    rows = slice(group.rank * TOKENS, (group.rank + 1) * TOKENS)
    right = [array[rows if number < 3 else own] for number, array in enumerate(right)]
    named = zip(("out", *NAMES), mine, right, strict=True)
    return {f"experts {name}": np.stack([one, other]) for name, one, other in named}


def tokens_of(rank: int) -> tuple[np.ndarray, ...]:
    """Returns a rank's tokens, their gates and experts, and the gradient of the sum; nobody chooses the last expert."""
    random = np.random.default_rng(400 + rank)
    chosen = np.array([random.choice(EXPERTS - 1, CHOSEN, replace=False) for _ in range(TOKENS)], np.int32)
    y, grad = random.normal(size=(2, TOKENS, WIDTH)).astype(np.float32)
    return y, random.uniform(size=chosen.shape).astype(np.float32), chosen, grad


def weights() -> list[np.ndarray]:
    random = np.random.default_rng(7)
    shapes = (EXPERTS, HIDDEN, WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def computed(
    ranks: int, y: np.ndarray, gates: np.ndarray, chosen: np.ndarray, grad: np.ndarray, matrices: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns the output of the experts, and the gradients of tokens, gates and weights."""
    settings = SimpleNamespace(experts=SimpleNamespace(expert_num=EXPERTS, num_experts_chosen=CHOSEN))
    cells = SimpleNamespace(grouped_matmul=GroupedMatmul, gated=lambda activation: plain.SwiGLU())
    layer = experts.RoutedExperts(settings, cells, experts.ExpertRanks(ranks, 1, ranks, "all", TOKENS))
    chosen, grad = Tensor(chosen), Tensor(grad)

    def forward(y_ND: Tensor, gates_Nk: Tensor, *matrices: Tensor) -> tuple[Tensor, Tensor]:
        out_ND = layer.compute(y_ND, gates_Nk, chosen, *matrices)
        return (out_ND * grad).sum(), out_ND

    inputs = [Tensor(array) for array in (y, gates, *matrices)]
    differentiated = mindspore.value_and_grad(forward, tuple(range(len(inputs))), has_aux=True)
    (_, out_ND), gradients = differentiated(*inputs)
    return [array.asnumpy() for array in (out_ND, *gradients)]


def to_host(counts: Tensor, *_: object) -> tuple[int, ...]:
    return tuple(map(int, counts.asnumpy()))


class AllToAll(nn.Cell):
    """Sends the r-th n rows of [ranks n, ...] to rank r, which gets them in the order of ranks; backward, the same."""

    def __init__(self, group: CpuGroup) -> None:
        super().__init__()
        self.group = group

    def construct(self, x: Tensor) -> Tensor:
        parts = np.split(x.asnumpy(), self.group.size)
        return Tensor(np.concatenate(self.group.all_to_all(parts, [parts[0].shape] * self.group.size)))

    def bprop(self, x: Tensor, out: Tensor, grad: Tensor) -> tuple[Tensor]:
        return (self.construct(grad),)


def exchange(group: CpuGroup, rows: Tensor, send: Sequence[int], receive: Sequence[int], name: str) -> Tensor:
    """Exchanges rows as `collectives.all_to_all_rows` does."""
    parts = ops.split(rows, list(send))
    filled = [ops.concat((part, ops.zeros((MOST - len(part), rows.shape[1])))) for part in parts]
    arrived = ops.split(AllToAll(group)(ops.concat(filled)), MOST)
    return ops.concat([part[:number] for part, number in zip(arrived, receive, strict=True)])
