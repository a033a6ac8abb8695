"""What a layer of semi-automatic mode holds, on the dry Ascend backend: experts, as ranks of eight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ascend_cases import SEMI, on_ascend

from trainer.dryrun.process import Measurement

MOE = {"expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 64, "use_gmm": True, "aux_loss_factor": 0.001}
SHARED = {"moe_config": MOE | {"shared_expert_num": 1}, "num_layers": 1}
BALANCED = {
    "use_gating_sigmoid": True, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.001, "n_group": 4,
    "topk_group": 2, "z_loss_factor": 0.001,
}  # fmt: skip
TENSOR = {"parallel_config": {"data_parallel": 4, "model_parallel": 2, "expert_parallel": 4}}
STAGES = {
    "parallel_config": {
        "data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2, "expert_parallel": 4,
    },
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
STAGED = {"moe_config": MOE | BALANCED} | LATENT | DROPOUT
CASES = {
    "experts, middle rank": on_ascend(SEMI, TENSOR, model=SHARED, ranks=8, rank=3),
    "experts, first stage": on_ascend(SEMI, STAGES, model=STAGED, ranks=8, rank=0),
    "experts, last stage": on_ascend(SEMI, STAGES, model=STAGED, ranks=8, rank=7),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_runs(bench: Callable[[str], Measurement], name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found["updated"], found.found


def test_the_losses_of_routers_travel_with_the_residual_stream(bench: Callable[[str], Measurement]) -> None:
    """One number of the first stage for each micro-batch, and its gradient back."""
    for stage in ("first", "last"):
        moves = [each for each in bench(f"experts, {stage} stage").collectives if each.bytes == 4]
        assert [sum(each.name == way for each in moves) for way in ("Send", "Receive")] == [2, 2]
