"""Semi-automatic mode on the dry Ascend backend, cut in each way, as the first, a middle and the last rank of eight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ascend_cases import SEMI, on_ascend

from trainer.dryrun.process import Measurement

CUTS = {
    "data 8": {"data_parallel": 8},
    "data 4, tensor 2": {"data_parallel": 4, "model_parallel": 2},
    "pipeline 2": {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2},
}
SHARED = {"enable_parallel_optimizer": True, "parallel_optimizer_threshold": 0}
CASES = {
    f"{name}{', hsdp' if shared else ''}, rank {rank}": on_ascend(
        SEMI, {"parallel_config": cut, "parallel": SHARED if shared else {}}, ranks=8, rank=rank
    )
    for rank in (0, 7)
    for name, cut in CUTS.items()
    for shared in (False, True)
}


@pytest.mark.parametrize("name", CASES)
def test_it_runs(bench: Callable[[str], Measurement], name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found["updated"]
