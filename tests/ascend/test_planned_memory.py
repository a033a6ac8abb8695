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
# A layer of a graph costs seconds.
SMALLER = {
    name: LAYOUTS[name]._replace(model=LAYOUTS[name].model | ({"num_layers": 2} if LAYOUTS[name].is_graph else {}))
    for name in NAMES
}
CASES = {name: OnAscend(Case(layout.text), layout.ranks, layout.rank) for name, layout in SMALLER.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_near_the_peak(bench: Callable[[str], Measurement], name: str) -> None:
    found = bench(name)
    assert found.failure is None
    compared = Comparison(planned_parts(name, SMALLER[name]), found.peak_bytes, found.seconds)
    assert compared.ratio == pytest.approx(1, abs=PLANNED_MEMORY)
