"""Which kernels an Ascend is given: current ones (aclnn), and no legacy ones (ACLOP).

A kernel is prepared once in a process, so that a legacy one shows only in the first case that meets it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ascend_cases import DENSE, EXPERTS, on_ascend
from no_decoder import NO_DECODER

from trainer.dryrun.process import Measurement

Bench = Callable[[str], Measurement]


def moe(**changes: object) -> dict:
    return {"moe_config": changes}


ASCEND = {"context": {"device_target": "Ascend"}}
SAFE = {"enable_gmm_safe_tokens": True, "use_fused_ops_permute": False}
CAPACITY = {"use_gmm": False, "capacity_factor": 1.1, "use_fused_ops_permute": False}
DEEPSEEK = {
    "use_gating_sigmoid": True, "n_group": 4, "topk_group": 2, "balance_via_topk_bias": True,
    "topk_bias_update_rate": 0.001, "shared_expert_num": 1, "z_loss_factor": 0.001,
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_kv_heads": 4,
}  # fmt: skip
NO_SWITCH = {
    "compute_dtype": None, "use_flash_attention": None, "use_fused_rope": False, "use_fused_swiglu": False,
    "moe_config": {"use_gmm": None, "use_fused_ops_permute": False},
}  # fmt: skip
# Compiling takes most of the time: one model with many parts is compiled, the others run operator by operator. Experts
# recomputed: see test_explicit.py.
PLAIN, PLAIN_EXPERTS = ({**base, "context": {**base["context"], "mode": 1}} for base in (DENSE, EXPERTS))
WITH_EXPERTS = {
    "all parts": on_ascend(EXPERTS, model=LATENT | {"tie_word_embeddings": True} | moe(**DEEPSEEK)),
    "experts by default": on_ascend(PLAIN_EXPERTS, model=NO_SWITCH),
    "safe tokens": on_ascend(PLAIN_EXPERTS, model=moe(**SAFE)),
    "capacity by position": on_ascend(PLAIN_EXPERTS, model=moe(**CAPACITY, moe_token_drop_policy="position")),
    "capacity by probability": on_ascend(PLAIN_EXPERTS, model=moe(**CAPACITY, moe_token_drop_policy="probability")),
    "loss of the step": on_ascend(PLAIN_EXPERTS, model=moe(moe_router_load_balancing_type="gbs_aux_loss")),
    "experts frozen": on_ascend(PLAIN_EXPERTS, {"freeze": {"include": ["*.mlp.experts.*"]}}),
    "experts by Muon": on_ascend(PLAIN_EXPERTS, {"optimizer": {"type": "Muon"}}),
    "experts evaluated": on_ascend(PLAIN_EXPERTS, task="tests.ascend.step_tasks:evaluation"),
    "experts predicted": on_ascend(PLAIN_EXPERTS, task="tests.ascend.step_tasks:prediction", steps=3),
}
OTHERS = {
    "latent attention predicted": on_ascend(PLAIN, model=LATENT, task="tests.ascend.step_tasks:prediction", steps=3),
    "bias in the projections": on_ascend(PLAIN, model={"qkv_has_bias": True}),
    "nothing fused": on_ascend(PLAIN, model={
        "compute_dtype": "float32", "use_flash_attention": False, "use_fused_rope": False, "use_fused_swiglu": False,
    }),
    "nesterov": on_ascend(PLAIN, {"optimizer": {"type": "SGD", "momentum": 0.9, "nesterov": True}}),
    "images": on_ascend(NO_DECODER, ASCEND),
    "images evaluated": on_ascend(NO_DECODER, ASCEND, task="tests.ascend.step_tasks:evaluation"),
}  # fmt: skip
CASES = WITH_EXPERTS | OTHERS


@pytest.mark.parametrize("name", CASES)
def test_it_runs_with_current_kernels(bench: Bench, name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found.get("updated", True), found.found
    assert not found.legacy
