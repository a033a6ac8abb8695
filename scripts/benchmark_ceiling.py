"""What this machine reaches at most in float32 products, in the threads that compute layers."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.arrays.memory import host_threads, row_blocks  # noqa: E402
from trainer.arrays.operators import operators  # noqa: E402

_ROWS, _WIDTH, _TRIALS = 256, 1024, 8


def product_ceiling() -> float:
    """Returns GFLOP/s of all cores together, in tiles of `_ROWS` rows; the fastest of some trials."""
    threads = host_threads()
    rows = 16 * _ROWS * threads.threads
    # Not zeros: their pages are one and the same until something is written to them.
    x = np.ones((rows, _WIDTH), np.float32)
    weight = np.ones((_WIDTH, _WIDTH), np.float32)
    out = np.empty((rows, _WIDTH), np.float32)
    shortest = float("inf")
    for _ in range(_TRIALS):
        began = time.perf_counter()
        threads.run(row_blocks(slice(0, rows), _ROWS), lambda part, _: operators().matmul(x[part], weight, out[part]))
        shortest = min(shortest, time.perf_counter() - began)
    return 2 * rows * _WIDTH * _WIDTH / shortest / 1e9


if __name__ == "__main__":
    print(json.dumps({"gflops": max(product_ceiling() for _ in range(3))}))
