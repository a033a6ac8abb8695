"""Two data-parallel ranks with unequal numbers of pairs, or of labels with a teacher, train as one rank with all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from golden_distillation_cases import write_drawn_model
from rank_job import on_rank_processes
from tolerances import RUN_NEAR_ZERO, RUN_NORMS

CASES = [("dpo", ""), ("ipo", "level2"), ("simpo", ""), ("orpo", "level1"), ("kto", "level1"), ("reward", "level1")]
TAUGHT = [("distillation", ""), ("distillation", "level2"), ("distillation", "level3")]
TEACHER = {
    "num_layers": 1, "hidden_size": 24, "num_heads": 3, "intermediate_size": 24, "vocab_size": 19, "seq_length": 12,
    "initializer_range": 0.3,
}  # fmt: skip
"""With the vocabulary and the length of the tiny trainer."""


def test_ranks_divide_by_the_pairs_of_all(tmp_path: Path) -> None:
    teacher = write_drawn_model(tmp_path / "teacher", 8, **TEACHER)
    cases = [(*case, "") for case in CASES] + [(*case, str(teacher)) for case in TAUGHT]
    ranks = on_rank_processes(2, "preference_cases_of_ranks:all_trained", cases)
    [alone] = on_rank_processes(1, "preference_cases_of_ranks:all_alone", cases)
    assert ranks[0] == ranks[1]
    for case, ours, right in zip(cases, ranks[0], alone, strict=True):
        np.testing.assert_allclose(ours, right, rtol=RUN_NORMS, atol=RUN_NEAR_ZERO, err_msg=str(case))
    assert len(alone[-1][0]) == 4 and alone[-1][0][3] > 0  # the divergence
