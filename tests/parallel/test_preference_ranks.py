"""Two data-parallel ranks with unequal numbers of pairs train as one rank with all pairs."""

from __future__ import annotations

import numpy as np
from rank_job import on_rank_processes
from tolerances import RUN_NEAR_ZERO, RUN_NORMS

CASES = [("dpo", ""), ("ipo", "level2"), ("simpo", ""), ("orpo", "level1"), ("kto", "level1"), ("reward", "level1")]


def test_ranks_divide_by_the_pairs_of_all() -> None:
    ranks = on_rank_processes(2, "preference_cases_of_ranks:all_trained", CASES)
    [alone] = on_rank_processes(1, "preference_cases_of_ranks:all_alone", CASES)
    assert ranks[0] == ranks[1]
    for case, ours, right in zip(CASES, ranks[0], alone, strict=True):
        np.testing.assert_allclose(ours, right, rtol=RUN_NORMS, atol=RUN_NEAR_ZERO, err_msg=str(case))
