"""Ranks as forked processes: collectives as cells, and a rank that ends."""

from __future__ import annotations

import numpy as np
import pytest
from group_cases import whole
from rank_job import on_rank_processes
from tolerances import SEVERAL_OPERATORS


def test_sharded_layers_compute_what_whole_ones_do() -> None:
    """Two data-parallel times two tensor-parallel ranks."""
    found = on_rank_processes(4, "group_cases:sharded_layers", 2)
    for rank, (out, dx, da, db) in enumerate(found):
        x, a, b, dout = (each.astype(np.float64) for each in whole(rank // 2))
        hidden = [x]
        inner = []
        for _ in range(2):
            inner.append(np.tanh(hidden[-1] @ a))
            hidden.append(inner[-1] @ b)
        right_a, right_b, gradient = 0.0, 0.0, dout
        for layer in (1, 0):
            right_b = right_b + inner[layer].T @ gradient
            through = gradient @ b.T * (1 - inner[layer] ** 2)
            right_a = right_a + hidden[layer].T @ through
            gradient = through @ a.T
        columns = slice(rank % 2 * 6, rank % 2 * 6 + 6)
        for ours, right in ((out, hidden[-1]), (dx, gradient), (da, right_a[:, columns]), (db, right_b[columns])):
            np.testing.assert_allclose(ours, right, rtol=SEVERAL_OPERATORS, atol=SEVERAL_OPERATORS)


def test_a_rank_that_fails_ends_all() -> None:
    with pytest.raises(AssertionError, match="rank 0 lost its connection to rank 1"):
        on_rank_processes(2, "group_cases:fails_on_one", 1)


def test_a_rank_that_is_killed_in_an_all_to_all_ends_all() -> None:
    """Each of the others says whom it has lost, whatever it was waiting for."""
    with pytest.raises(AssertionError, match="exit codes") as caught:
        on_rank_processes(3, "group_cases:dies_in_exchange", 1, limit_seconds=60)
    told = str(caught.value)
    assert told.startswith("exit codes [1, -9, 1]")
    assert all(f"rank {other} lost its connection to rank 1, which has ended" in told for other in (0, 2))
