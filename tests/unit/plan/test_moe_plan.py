"""What `plan` says of experts and multi-token prediction modules."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tolerances import PLANNED_MEMORY

from trainer.config import Config, Override, load_config
from trainer.ops.select import kernel_notes
from trainer.plan.experts import experts_plan
from trainer.plan.plan import Plan
from trainer.plan.render import plan_dict, plan_text
from trainer.run.prepare import build_plan

REPOSITORY = Path(__file__).resolve().parents[3]
MIB = 1 << 20
MOE = "model__model_config__moe_config__"


def config_of(name: str, **flags: object) -> Config:
    overrides = [Override(key.replace("__", "."), str(value)) for key, value in flags.items()]
    return load_config(str(REPOSITORY / "configs" / f"{name}.yaml"), overrides)


def plan_of(name: str, **flags: object) -> Plan:
    return build_plan(config_of(name, **flags))


def moe(**keys: object) -> dict[str, object]:
    return {MOE + key: value for key, value in keys.items()}


def test_it_says_what_an_expert_takes_and_which_tokens_go() -> None:
    plan = plan_of("moe_tiny")
    text = " ".join(plan_text(plan).split())
    for part in (
        "EXPERTS",
        "softmax scores, 2 of 8 experts, weights that sum to 1",
        "8 of width 192",
        "layers 0-3 of 4",
        # 32 rows of 128 tokens; 2 x 4096 / 8 = 1024 a fair share.
        "an expert takes 1,280 of a micro-batch's 4,096, 1.25 times its share of 1,024; beyond, those with the lowest",
        "are dropped, in training only",
        "loss times 0.01, z loss times 0.001",
    ):
        assert part in text, part
    assert plan_dict(plan)["model"]["experts"]["router"].startswith("softmax scores")
    by_position = plan_of("moe_tiny", **moe(drop_policy="position")).model.experts["tokens"]
    assert "the last of a micro-batch are dropped" in by_position
    predicts = config_of("moe_tiny", run_mode="predict", load_checkpoint="somewhere", predict_data="a")
    assert experts_plan(predicts)["tokens"] == "none is dropped"


def test_it_says_when_nothing_is_dropped_and_why() -> None:
    assert plan_of("moe_dropless").model.experts["tokens"] == "none is dropped (use_gmm)"
    unbounded = plan_of("moe_dropless", **moe(use_gmm=False))
    assert unbounded.model.experts["tokens"] == "none is dropped (no capacity_factor)"


def test_it_says_all_of_a_deepseek_like_model() -> None:
    assert plan_of("moe_mtp").model.experts == {
        "router": "sigmoid scores, 4 of 16 experts, weights that sum to 1, times 2",
        "experts": "16 of width 64",
        "groups": "a token goes to the best 2 of 4 groups",
        "shared expert": "width 64, for every token",
        "layers": "layers 1-3 of 4; the others are dense, of width 352",
        "tokens": "none is dropped (use_gmm)",
        "balance": "loss times 0.0001, an expert bias, moved by 0.003 a step",
        "further tokens": "1 module with experts, losses times 0.3, in training only",
    }


def test_a_dense_model_has_no_section_unless_it_predicts_further() -> None:
    assert plan_of("quickstart").model.experts == {} and "EXPERTS" not in plan_text(plan_of("quickstart"))
    assert plan_of("quickstart", model__model_config__mtp_depth=2).model.experts == {
        "further tokens": "2 modules, losses times 0.3, in training only"
    }


def test_it_counts_all_weights_and_those_that_compute_a_token() -> None:
    plan = plan_of("moe_tiny")
    expert = 3 * 128 * 192
    assert plan.model.weights - plan.model.active_weights == 4 * (8 - 2) * expert
    assert f"{plan.model.weights:,}; {plan.model.active_weights:,} active per token" in plan_text(plan)
    dense = plan_of("quickstart")
    assert dense.model.active_weights == dense.model.weights and "active per token" not in plan_text(dense)
    # The expert bias is no weight: neither trained nor frozen.
    mtp = plan_of("moe_mtp")
    assert mtp.model.frozen.tensors == 0
    assert mtp.model.weights == plan_of("moe_mtp", **moe(balance_via_topk_bias=False)).model.weights


def test_it_names_the_kernels_of_experts() -> None:
    kernels = {choice.kernel: choice.asked for choice in plan_of("moe_dropless").model.kernels}
    assert kernels["grouped_matmul"] == "use_gmm: true"
    assert kernels["token_permute"] == "use_fused_ops_permute: false"
    assert "grouped_matmul" not in {choice.kernel for choice in plan_of("quickstart").model.kernels}


@pytest.mark.parametrize(
    ("name", "flags", "measured_mib"),
    [
        ("moe_tiny", {}, 689),
        ("moe_tiny", {"runner_config__batch_size": 16}, 603),
        ("moe_dropless", {}, 715),
        ("moe_mtp", {}, 738),
        ("moe_mtp", {"model__model_config__mtp_depth": 0}, 653),
        ("moe_mtp", {"model__model_config__mtp_depth": 0} | moe(first_k_dense_replace=0), 659),
        ("bench_moe", {}, 818),
        ("bench_moe", {"model__model_config__num_layers": 12}, 1291),
        ("bench_moe", {"model__model_config__num_layers": 12, "recompute_config__recompute": True}, 1172),
    ],
)
def test_the_memory_estimate_is_near_what_was_measured(name: str, flags: dict, measured_mib: int) -> None:
    """Peaks (VmHWM) of runs with MindSpore 2.10 on two cores."""
    assert plan_of(name, **flags).memory_bytes["total"] / MIB == pytest.approx(measured_mib, rel=PLANNED_MEMORY)


def test_recomputed_experts_need_less() -> None:
    kept = plan_of("moe_tiny").memory_bytes["activations"]
    again = plan_of("moe_tiny", recompute_config__select_recompute="[mlp]").memory_bytes["activations"]
    assert again < 0.8 * kept and math.isfinite(again)


def test_a_fused_permutation_that_is_not_there_is_told_once() -> None:
    asked = {"use_gmm": True, "use_fused_ops_permute": True}
    told = list(kernel_notes(plan_of("moe_dropless", **moe(**asked), context__device_target="CPU").model.kernels))
    assert told == [
        "use_fused_ops_permute: the reference sorts the tokens, moe_token_permute exists only on Ascend; device is CPU"
    ]
    for changes in ({"use_fused_ops_permute": False}, {"use_gmm": False}):  # the latter has a note of its own
        plan = plan_of("moe_dropless", **moe(**asked | changes), context__device_target="CPU")
        assert not list(kernel_notes(plan.model.kernels))
