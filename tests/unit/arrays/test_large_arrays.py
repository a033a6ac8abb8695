"""Large arrays: the system hands out their memory in huge pages, where it has them."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from trainer.arrays.memory import empty

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BYTES = 1 << 26


@pytest.mark.skipif(
    not MODES.exists() or "[never]" in MODES.read_text(), reason="this system has no transparent huge pages"
)
def test_a_large_array_costs_few_page_faults() -> None:
    tensor, array = empty(BYTES // 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array.fill(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert np.shares_memory(array, tensor.asnumpy())
    assert faults < BYTES // resource.getpagesize() // 2
