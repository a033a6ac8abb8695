"""What each rank contributes in test_collectives.py, for its ranks and for the test that computes what comes out."""

from __future__ import annotations

import numpy as np

SHAPES = ((7, 5), (3,), (), (50, 40), (1, 1, 9), (300,), (64, 64))
HALVES = (1, 4)  # those in float16
ON_DEVICE = (0, 2, 3)  # those that are also summed as on a device


def numbers_of(rank: int) -> list[float]:
    """Numbers whose bits must arrive as they are."""
    every = np.random.default_rng(rank).bytes(8 * 37)  # all kinds of bits, NaNs with a payload too
    return [rank + 0.1, -0.0, 1e-310, np.inf, -np.inf, np.pi * 10**300, 2.0**53 + 2, *np.frombuffer(every)]


def text_of(rank: int) -> bytes:
    """Bytes of another length on every rank; none at all on rank 1."""
    return b"" if rank == 1 else bytes(range(256)) * (rank + 1) + "später"[: rank + 1].encode()


def gradients_of(rank: int) -> list[np.ndarray]:
    """Random gradients of `SHAPES`."""
    random = np.random.default_rng(100 + rank)
    dtypes = [np.float16 if number in HALVES else np.float32 for number in range(len(SHAPES))]
    return [random.normal(size=shape).astype(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]
