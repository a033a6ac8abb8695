"""What ranks of test_rank_job.py compute."""

from __future__ import annotations

import os
import signal

import numpy as np
from mindspore import Tensor, nn, ops

from trainer.parallel import collectives
from trainer.parallel.collectives import ProcessGroup
from trainer.parallel.mesh import Degrees, build_mesh
from trainer.parallel.process_groups import process_groups

_TOKENS = 10_000  # for each rank, more than what travels at once


class TwoLayers(nn.Cell):
    """x -> sum over the ranks of tanh(x a) b, with a's columns and b's rows divided, operator by operator."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.enter = collectives.CopyToTensorParallel(group)
        self.leave = collectives.ReduceFromTensorParallel(group)

    def construct(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.leave(ops.matmul(ops.tanh(ops.matmul(self.enter(x), a)), b))


def sharded_layers(world: ProcessGroup, tensor: int) -> list[np.ndarray]:
    """Returns output and gradients of two layers, the second with the weights of the first, on 2 x `tensor` ranks."""
    groups = process_groups(world, build_mesh(Degrees(data_parallel=world.size // tensor, model_parallel=tensor),
                                              world.size))  # fmt: skip
    x, a, b, dout = (Tensor(each) for each in whole(groups.dp.rank))
    columns = slice(groups.tp.rank * a.shape[1] // tensor, (groups.tp.rank + 1) * a.shape[1] // tensor)
    layer = TwoLayers(groups.tp)

    def twice(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return layer(layer(x, a, b), a, b)

    a, b = Tensor(a.asnumpy()[:, columns].copy()), Tensor(b.asnumpy()[columns].copy())
    gradients = ops.GradOperation(get_all=True, sens_param=True)(twice)(x, a, b, dout)
    return [each.asnumpy() for each in (twice(x, a, b), *gradients)]


def whole(number: int) -> list[np.ndarray]:
    draw = np.random.default_rng(number)
    x, dout = draw.normal(size=(2, 6, 8)).astype(np.float32)
    weights = np.random.default_rng(9)
    return [x, *(weights.normal(size=shape).astype(np.float32) / 3 for shape in ((8, 12), (12, 8))), dout]


def fails_on_one(group: ProcessGroup, rank: int) -> None:
    if group.rank == rank:
        raise ValueError("this rank fails")
    group.all_reduce(np.ones(1))


def dies_in_exchange(group: ProcessGroup, rank: int) -> None:
    """Sends tokens to experts; `rank` has sent half of its tokens when it is killed."""
    exchange = group.connections.exchange

    def half(sent: dict[int, list[memoryview]], received: dict[int, list[memoryview]]) -> None:
        exchange({to: [view[: len(view) // 2] for view in views] for to, views in sent.items()}, {})
        os.kill(os.getpid(), signal.SIGKILL)

    if group.rank == rank:
        group.connections.exchange = half
    rows = list(np.ones((group.size, _TOKENS, 4), np.float32))
    group.all_to_all(rows, [rows[0].shape] * group.size)
