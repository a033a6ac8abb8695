"""Settings of semi-automatic mode, and experts, on the dry Ascend backend: ranks of the first, a middle and the last
stage of pipelines, and a rank without one. A case has as much at once as goes together: compiling is what costs.

Every case has a process of its own: MindSpore 2.10 takes the shards of one graph for those of the next one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from ascend_cases import LATENT, SEMI, on_ascend

from trainer.config import parse_config
from trainer.dryrun.process import Measurement
from trainer.models.spec.shapes import all_shapes

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
UNSHARDED = {"vocab_size": 511}  # two tensor-parallel ranks replicate it
INTERLEAVED = {
    "parallel": {"pipeline_config": {"pipeline_interleave": True}},
    "parallel_config": {"data_parallel": 8, "pipeline_stage": 3, "micro_batch_num": 3},
    "recompute_config": {"select_recompute": True},
}
PARTS = {
    "parallel": {
        "enable_parallel_optimizer": True, "full_batch": False,
        "parallel_optimizer_config": {"parallel_optimizer_threshold": 8, "optimizer_level": "level2"},
    },
    "parallel_config": {"data_parallel": 4, "model_parallel": 2, "use_seq_parallel": True},
    "runner_config": {"batch_size": 1, "gradient_accumulation_steps": 2},
    "recompute_config": {"recompute": True, "select_comm_recompute": True},
}  # fmt: skip
MOE = {"expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 64, "use_gmm": True, "aux_loss_factor": 0.001}
WINDOW = {
    "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0, "num_layers": 1,
    "hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_config": MOE | {"shared_expert_num": 1},
}  # fmt: skip
BALANCED = {
    "use_gating_sigmoid": True, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.001, "n_group": 4,
    "topk_group": 2, "z_loss_factor": 0.001,
}  # fmt: skip
EXPERT_STAGES = {
    "parallel_config": {
        "data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2, "expert_parallel": 4,
    },
}  # fmt: skip
ALL_RANKS = {
    "parallel_config": {"data_parallel": 4, "model_parallel": 2, "expert_parallel": 4},
    "freeze": {"include": ["*.layers.0.mlp.experts.*"]},
}
STAGED = {"moe_config": MOE | BALANCED, "hidden_dropout": 0.1, "attention_dropout": 0.1, **LATENT}
CASES = {
    "first stage": on_ascend(SEMI, STAGES, model=TIED | UNSHARDED, ranks=8, rank=1, process="first stage"),
    "last stage": on_ascend(
        SEMI, STAGES, model=TIED | {"moe_config": MOE}, ranks=8, rank=6, process="last stage"
    ),
    "first stage with experts": on_ascend(SEMI, EXPERT_STAGES, model=STAGED, ranks=8, rank=0, process="experts"),
    "experts over all ranks, some frozen": on_ascend(
        SEMI, ALL_RANKS, model={"moe_config": MOE}, ranks=8, rank=5, process="all ranks"
    ),
    "two parts of a middle stage": on_ascend(
        SEMI, INTERLEAVED, model={"num_layers": 6, "pp_interleave_num": 2}, ranks=24, rank=8, process="middle stage"
    ),
    "shared gradients, evaluated": on_ascend(
        SEMI, PARTS, model=WINDOW, ranks=8, rank=3, process="shared gradients",
        task="tests.ascend.step_tasks:sharded", evaluates=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_runs(bench: Bench, name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found.get("updated", True), found.found
    assert found.host_bytes < 100_000, found.host_reads


def test_the_losses_of_routers_travel_with_the_residual_stream(bench: Bench) -> None:
    """One number for each micro-batch, and its gradient back."""
    moves = [each for each in bench("first stage with experts").collectives if each.bytes == 4]
    assert [sum(each.name == way for each in moves) for way in ("Send", "Receive")] == [2, 2]


def test_ranks_share_weights_and_sums_of_micro_batches(bench: Bench) -> None:
    """Each of eight ranks has an eighth; of a matrix a tensor-parallel half is shared by four."""
    name = "shared gradients, evaluated"
    found = bench(name)
    decoder = parse_config(name, CASES[name].case.config).decoder
    numbers = sum(map(math.prod, all_shapes(decoder).values()))
    shapes = found.found["shapes"]
    sums = {weight: shape for weight, shape in shapes.items() if weight.startswith("accu_grads.")}
    shards = {weight: shape for weight, shape in shapes.items() if weight not in sums}
    assert shards.keys() == all_shapes(decoder).keys()
    assert sum(map(math.prod, shards.values())) < numbers / 7
    assert "AllGather" in {each.name for each in found.collectives}


def test_stages_hand_their_micro_batches_on(bench: Bench) -> None:
    """Each of two parts to that of the stage after it; gradients the other way."""
    calls = bench("two parts of a middle stage").collectives
    moves = {way: [each.ranks for each in calls if each.name == way] for way in ("Send", "Receive")}
    micro_batches, parts, ways = 3, 2, 2
    assert moves == dict.fromkeys(moves, [(0, 8, 16)] * micro_batches * parts * ways)
