"""What each rank contributes in test_collectives.py, for its ranks and for the test that computes what comes out."""

from __future__ import annotations

import numpy as np

SHAPES = ((7, 5), (3,), (), (50, 40), (1, 1, 9), (300,), (64, 64))
SUBLAYERS = (1, 4)  # those in float16
TWICE = (3, 4, 6)  # those that a loss uses twice, as a tied embedding is used
SHARDED = (0, 3, 4, 5)  # those of which a rank gets its range alone where they are summed as on a device


def numbers_of(rank: int) -> list[float]:
    """Numbers whose bits must arrive as they are."""
    every = np.random.default_rng(rank).bytes(8 * 37)  # all kinds of bits, NaNs with a payload too
    return [rank + 0.1, -0.0, 1e-310, np.inf, -np.inf, np.pi * 10**300, 2.0**53 + 2, *np.frombuffer(every)]


def text_of(rank: int) -> bytes:
    """Returns bytes of another length on every rank; none at all on rank 1."""
    return b"" if rank == 1 else bytes(range(256)) * (rank + 1) + "später"[: rank + 1].encode()


def gradients_of(rank: int) -> list[np.ndarray]:
    """Returns random gradients of `SHAPES`."""
    random = np.random.default_rng(100 + rank)
    dtypes = [np.float16 if number in SUBLAYERS else np.float32 for number in range(len(SHAPES))]
    return [random.normal(size=shape).astype(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]


def shared_tensors() -> list[np.ndarray]:
    """Tensors of which each rank has a part."""
    return [array.astype(np.float32) for array in gradients_of(0) if array.size > 4]


PAIRS = ("AllReduce", "AllGather", "ReduceScatter", "CopyToTensorParallel", "ReduceFromTensorParallel")


def pair_input(rank: int, ranks: int) -> np.ndarray:
    """Returns what a rank sends to each pair: [2 ranks, 3]."""
    return np.random.default_rng(200 + rank).normal(size=(2 * ranks, 3)).astype(np.float32)


def factors_of(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the gradient of a rank's loss, which is the sum of the results times these factors."""
    return np.random.default_rng(300 + rank).normal(size=shape).astype(np.float32)


def pair_output(name: str, every_x: np.ndarray, rank: int) -> np.ndarray:
    """Returns what a rank receives from a pair, for every_x [ranks, 2 ranks, 3]."""
    ranks = len(every_x)
    by_rank = every_x.reshape(ranks, ranks, 2, 3)  # from whom, for whom
    return {
        "AllReduce": lambda: every_x.sum(0),
        "AllGather": lambda: every_x.reshape(-1, 3),
        "ReduceScatter": lambda: by_rank[:, rank].sum(0),
        "CopyToTensorParallel": lambda: every_x[rank],
        "ReduceFromTensorParallel": lambda: every_x.sum(0),
    }[name]()


def pair_gradient(name: str, ranks: int, rank: int) -> np.ndarray:
    """Returns the gradient of the sum of all ranks' losses with respect to what this rank gave; that of a pair of
    tensor parallelism takes what all ranks have alike for one thing, so its gradient is that of its name alone."""
    shapes = {"AllGather": (2 * ranks * ranks, 3), "ReduceScatter": (2, 3)}
    every_g = np.stack([factors_of(each, shapes.get(name, (2 * ranks, 3))) for each in range(ranks)])
    if name in ("AllReduce", "CopyToTensorParallel"):
        return every_g.sum(0)
    if name == "ReduceFromTensorParallel":
        return every_g[rank]
    if name == "AllGather":
        return every_g.sum(0).reshape(ranks, -1, 3)[rank]
    assert name == "ReduceScatter"
    return every_g.reshape(-1, 3)
