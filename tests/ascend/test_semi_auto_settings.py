"""Settings of semi-automatic mode on the dry Ascend backend: ranks of the first, a middle and the last stage of
pipelines, and a rank without one. A case has as much at once as goes together: compiling is what costs.

Every case has a process of its own: MindSpore 2.10 takes the shards of one graph for those of the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from ascend_cases import SEMI, on_ascend

from trainer.dryrun.process import Measurement

Bench = Callable[[str], Measurement]

STAGES = {
    "parallel": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 8}},
    "parallel_config": {
        "data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2, "use_seq_parallel": True,
    },
    "recompute_config": {"recompute": True},
    "freeze": {"embeddings": True, "layers": 0},  # all of the first stage
}  # fmt: skip
TIED = {"tie_word_embeddings": True, "mtp_depth": 1}
INTERLEAVED = {
    "parallel": {"pipeline_config": {"pipeline_interleave": True}},
    "parallel_config": {"data_parallel": 2, "pipeline_stage": 4, "micro_batch_num": 4},
    "recompute_config": {"select_recompute": True},
}  # fmt: skip
ONE = {"num_layers": 1}  # where no stage needs more: of each layer the graph costs seconds
PARTS = {
    "parallel": {
        "enable_parallel_optimizer": True, "full_batch": False,
        "parallel_optimizer_config": {"parallel_optimizer_threshold": 8, "optimizer_level": "level2"},
    },
    "parallel_config": {"data_parallel": 4, "model_parallel": 2, "use_seq_parallel": True},
    "runner_config": {"batch_size": 1, "gradient_accumulation_steps": 2},
    "recompute_config": {"recompute": True, "select_comm_recompute": True},
}  # fmt: skip
WINDOW = {
    "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0, **ONE,
    "hidden_dropout": 0.1, "attention_dropout": 0.1,
    "pet_config": {"lora_rank": 8, "lora_dropout": 0.1, "target_modules": ".*(q|o|up|down)_proj"},
}  # fmt: skip
MOE = {"expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 64, "use_gmm": True}
CASES = {
    "first stage": on_ascend(SEMI, STAGES, model=TIED, ranks=8, rank=1, process="first stage"),
    "last stage": on_ascend(SEMI, STAGES, model=TIED, ranks=8, rank=6, process="last stage"),
    "a middle stage": on_ascend(
        SEMI, INTERLEAVED, model={"num_layers": 8, "pp_interleave_num": 2}, ranks=8, rank=2, process="middle stage"
    ),
    "shared gradients": on_ascend(SEMI, PARTS, model=WINDOW, ranks=8, rank=3, process="shared gradients"),
    "evaluation of parts": on_ascend(
        SEMI, PARTS, model=ONE | {"moe_config": MOE, "embedding_size": 64}, ranks=8, rank=4, process="evaluation",
        task="trainer.dryrun.tasks:evaluation", steps=1,
    ),
}  # fmt: skip


def collectives_of(found: Measurement) -> Counter[str]:
    return Counter(each.name for each in found.collectives)


@pytest.mark.parametrize("name", CASES)
def test_it_runs(bench: Bench, name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found.get("updated", True), found.found
    assert found.host_bytes < 100_000, found.host_reads
