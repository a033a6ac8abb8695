"""The plan's estimate of a rank's memory against the dry run, for some layouts of scripts/check_memory.py."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from ascend_cases import OnAscend
from fork_server import REPOSITORY
from tolerances import PLANNED_MEMORY

from trainer.dryrun.process import Case, Measurement

sys.path.insert(0, str(REPOSITORY / "scripts"))
from check_memory import LAYOUTS, Comparison, planned_parts  # noqa: E402

NAMES = (
    "dense, tp 2 cp 2 dp 2, level2, 2 micro-batches",
    "dense, pp 2 x 2 chunks, tp 2 sp",
    "dense, adapters in the last layers, 4 micro-batches",
    "experts, ep 4",
    "latent, tp 4 sp, attention recomputed",
    "graph: dense, dp 8, level1",
    "graph: dense, tp 2 dp 4, level3, mlp recomputed",
)
CASES = {
    name: OnAscend(Case(LAYOUTS[name].text), LAYOUTS[name].ranks, LAYOUTS[name].rank) for name in NAMES
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_near_the_peak(bench: Callable[[str], Measurement], name: str) -> None:
    found = bench(name)
    assert found.failure is None
    compared = Comparison(planned_parts(name, LAYOUTS[name]), found.peak_bytes, found.seconds)
    assert compared.ratio == pytest.approx(1, abs=PLANNED_MEMORY)
