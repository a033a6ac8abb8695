"""Explicit mode on the dry Ascend backend: every kind of model and run, alone and as one of eight ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from ascend_cases import DENSE, EXPERTS, LATENT, OF_IMAGES, SEMI, on_ascend
from tolerances import SUMS_BYTES

from trainer.config import parse_config
from trainer.config.checks.parallel import parallel_degrees, resolve_for_job
from trainer.dryrun.process import Measurement
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import World
from trainer.plan.division import rank_groups
from trainer.plan.weight_traffic import JobInfo, weight_calls

Bench = Callable[[str], Measurement]

LORA = {"pet_config": {"pet_type": "lora", "lora_rank": 4, "target_modules": ".*wq|.*w2"}}
SHIPPED_LORA = {
    "num_layers": 1, "tie_word_embeddings": True, "hidden_size": 144, "head_dim": 36, "attention_dropout": 0.05,
    "pet_config": LORA["pet_config"] | {"lora_dropout": 0.05, "target_modules": ".*wq|.*wk|.*wv|.*wo"},
}  # fmt: skip
"""The adapters of configs/lora.yaml, and its heads, which flash_attention_score does not take."""
ONE_BATCH = {"runner_config": {"gradient_accumulation_steps": 1}}
PLAIN = {"context": {"mode": 1}}
"""Operator by operator: what is compiled takes seven seconds a case."""
LONG = {"num_layers": 4, "seq_length": 1024}  # so that what is kept for the backward pass is most of the memory
TASKS = "tests.ascend.step_tasks"
CAPACITY = {"moe_config": {"capacity_factor": 1.5}}
SIGMOID = {
    "moe_config": {
        "scoring_func": "sigmoid", "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "topk_bias_update_rate": 0.001, "shared_expert_num": 1, "first_k_dense_replace": 1,
    }
}  # fmt: skip
ONE_RANK = {
    "long": on_ascend(DENSE, PLAIN, model=LONG),
    "long, recomputed": on_ascend(DENSE, PLAIN | {"recompute_config": {"recompute": True}}, model=LONG),
    "experts recomputed": on_ascend(EXPERTS, {"recompute_config": {"recompute": True}}),
    "mode 1": on_ascend(DENSE, PLAIN),
    "documents": on_ascend(DENSE, PLAIN, documents=3),
    "multi-token prediction": on_ascend(DENSE, PLAIN, model={"mtp_depth": 1}),
    "latent attention": on_ascend(DENSE, PLAIN, model=LATENT),
    "LoRA": on_ascend(DENSE, PLAIN, model=LORA),
    "LoRA, compiled": on_ascend(DENSE, ONE_BATCH, model=SHIPPED_LORA),
    "frozen": on_ascend(DENSE, PLAIN | {"freeze": {"include": ["embeddings", {"layers": 0}]}}),
    "dropout": on_ascend(DENSE, PLAIN, model={"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "float16 with a loss scale": on_ascend(
        DENSE, PLAIN | {"runner_wrapper": {"scale_sense": {"type": "DynamicLossScaleUpdateCell"}}},
        model={"compute_dtype": "float16"},
    ),
    "float32": on_ascend(DENSE, PLAIN, model={"compute_dtype": "float32", "use_flash_attention": False}),
    "SGD": on_ascend(DENSE, PLAIN | {"optimizer": {"type": "SGD"}}),
    "Muon": on_ascend(DENSE, PLAIN | {"optimizer": {"type": "Muon"}}),
    "no accumulation": on_ascend(DENSE, PLAIN | ONE_BATCH),
    "experts, mode 1": on_ascend(EXPERTS, PLAIN),
    "experts with a capacity": on_ascend(EXPERTS, PLAIN, model=CAPACITY),
    "experts chosen in groups": on_ascend(EXPERTS, PLAIN, model=SIGMOID),
    "experts with safe tokens": on_ascend(EXPERTS, PLAIN, model={"moe_config": {"enable_gmm_safe_tokens": True}}),
    "experts, sorted by gathers": on_ascend(EXPERTS, PLAIN, model={"moe_config": {"use_fused_ops_permute": False}}),
    "evaluation": on_ascend(DENSE, PLAIN, task=f"{TASKS}:evaluation"),
    "prediction": on_ascend(DENSE, PLAIN, task=f"{TASKS}:prediction", steps=3),
    "checkpoint": on_ascend(DENSE, PLAIN, task=f"{TASKS}:checkpoint", steps=1),
    "images": on_ascend(OF_IMAGES, PLAIN),
    "semi-automatic mode, not used": on_ascend(SEMI, PLAIN | {"use_parallel": False}),
}  # fmt: skip
SHARED = {"use_parallel": True, "parallel": {"enable_parallel_optimizer": True}}
LEVEL2 = {"parallel": SHARED["parallel"] | {"parallel_optimizer_config": {"optimizer_level": "level2"}}}
TENSOR = {"use_parallel": True, "parallel_config": {"model_parallel": 4}}
ROWS = {
    "parallel_config": {"model_parallel": 4, "use_seq_parallel": True},
    "model": {"model_config": LORA | {"hidden_dropout": 0.1, "attention_dropout": 0.1, "mtp_depth": 1}},
}
SEQUENCES = {
    "use_parallel": True,
    "parallel_config": {"context_parallel": 4},
    "model": {"model_config": {"hidden_dropout": 0.1, "mtp_depth": 1, "sliding_window": 8}},
}
COMPILED = TENSOR | ROWS | {"parallel_config": ROWS["parallel_config"] | {"context_parallel": 2}} | ONE_BATCH
EXCHANGED = {"use_parallel": True, "parallel_config": {"expert_parallel": 4}}
TOGETHER = {
    "use_parallel": True,
    "parallel_config": {
        "expert_parallel": 8, "model_parallel": 2, "context_parallel": 2, "use_seq_parallel": True, "data_parallel": 2,
    },
    "parallel": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {
        "optimizer_level": "level2", "parallel_optimizer_threshold": 1}},
    "model": {"model_config": {"mtp_depth": 1, "moe_config": {"shared_expert_num": 1}}},
}  # fmt: skip
RANKS = (3, 4)
"""The last one of the first half and the first one of the second: of most groups one is the first and one the last, and
each is in one of two stages."""
EIGHT_RANKS = {
    f"{name}, rank {rank} of 8": on_ascend(base, PLAIN | more, ranks=8, rank=rank, task=task)
    for rank in RANKS
    for name, base, more, task in (
        ("data parallel", DENSE, {"use_parallel": True}, f"{TASKS}:training"),
        ("shared state", DENSE, SHARED, f"{TASKS}:training"),
        ("shared gradients", DENSE, SHARED | LEVEL2, f"{TASKS}:training"),
        ("experts", EXPERTS, {"use_parallel": True}, f"{TASKS}:training"),
        ("tensor parallel", DENSE, TENSOR, f"{TASKS}:training"),
        ("tensor parallel, with all it may have", DENSE, TENSOR | ROWS, f"{TASKS}:training"),
        ("tensor parallel, evaluation", DENSE, TENSOR, f"{TASKS}:evaluation"),
        ("context parallel", DENSE, SEQUENCES, f"{TASKS}:training"),
        ("context parallel, evaluation", DENSE, SEQUENCES, f"{TASKS}:evaluation"),
        ("expert parallel", EXPERTS, EXCHANGED, f"{TASKS}:training"),
        ("expert parallel, evaluation", EXPERTS, EXCHANGED, f"{TASKS}:evaluation"),
        ("all degrees of a stage", EXPERTS, TOGETHER, f"{TASKS}:training"),
        ("collectives", DENSE, {"use_parallel": True}, f"{TASKS}:every_collective"),
    )
}
ACCUMULATION = {"runner_config": {"batch_size": 1, "global_batch_size": 16}}
STAGES = {
    "use_parallel": True,
    "parallel": {"pipeline_config": {"pipeline_interleave": True}},
    "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 4, "model_parallel": 2, "use_seq_parallel": True},
    "model": {"model_config": {"num_layers": 4, "pp_interleave_num": 2, "tie_word_embeddings": True, "mtp_depth": 1}},
}
DIVIDED = {
    **{
        f"pipeline{what}, rank {rank} of 8": on_ascend(
            DENSE, PLAIN | ONE_BATCH | STAGES, ranks=8, rank=rank, task=f"{TASKS}:{task}"
        )
        for rank in RANKS for what, task in (("", "training"), (", evaluation", "evaluation"))
    },
    "tensor and context parallel, compiled": on_ascend(
        DENSE, COMPILED | {"recompute_config": {"recompute": [1, 0]}}, ranks=8, rank=3, documents=3
    ),
}
OF_A_JOB = {
    "a batch of all ranks": on_ascend(
        DENSE, ACCUMULATION, ranks=8, rank=3, task="tests.ascend.step_tasks:micro_batches"
    )
}
TRAINED = ONE_RANK | EIGHT_RANKS | DIVIDED
CASES = TRAINED | OF_A_JOB


MOST_HOST_BYTES = 100_000


@pytest.mark.parametrize("name", TRAINED)
def test_it_runs(bench: Bench, name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found.get("updated", True), found.found
    assert not found.legacy
    assert found.peak_bytes > 0
    assert found.host_bytes <= MOST_HOST_BYTES


def test_the_host_reads_one_small_tensor_a_step(bench: Bench) -> None:
    """With compiled experts; others: see test_step.py."""
    found = bench("experts recomputed")
    assert [count for count, _ in found.host_reads.values()] == [1], found.host_reads


@pytest.mark.parametrize("kind", dict.fromkeys(name.rpartition(", rank ")[0] for name in EIGHT_RANKS))
def test_all_ranks_communicate_alike(bench: Bench, kind: str) -> None:
    """Compares collectives, their sizes and their order: with a difference a job waits forever."""
    first, other = ([each[:3] for each in bench(f"{kind}, rank {rank} of 8").collectives] for rank in RANKS)
    assert first and other == first


def test_every_gradient_is_summed_once(bench: Bench) -> None:
    found = bench("data parallel, rank 3 of 8")
    summed = sum(each.bytes for each in found.collectives if each.name == "AllReduce")
    assert summed == pytest.approx(4 * found.found["parameters"], abs=SUMS_BYTES)  # and some numbers beside them


@pytest.mark.parametrize("kind", ["shared state", "shared gradients", "all degrees of a stage"])
def test_the_plan_counts_the_sums_of_sharded_gradients(bench: Bench, kind: str) -> None:
    """Each gradient is reduce-scattered once a step, or with level2 once a micro-batch; the rest is all-reduced."""
    name = f"{kind}, rank 3 of 8"
    world = World(3, 8, 0, 1)
    config = resolve_for_job(parse_config(name, CASES[name].case.config), world)
    coordinate = Mesh(parallel_degrees(config, world)).coordinate_of(world.rank)
    groups = rank_groups(config, world, world.rank)
    planned = Counter[str]()
    for call in weight_calls(config, world, coordinate, JobInfo.from_config(config, world), on_host=False):
        if call.group == "dp_cp" and call.times:
            planned[call.kind] += call.times * call.input_bytes
    found = Counter[str]()
    for each in bench(name).collectives:
        if each.ranks == tuple(groups["dp_cp"]) and each.dtype == "float32":
            found[each.name] += each.bytes
    assert planned["reduce_scatter"] == found["ReduceScatter"] > 0
    assert planned["all_gather"] == found["AllGather"]
    assert planned["all_reduce"] == pytest.approx(found["AllReduce"], abs=SUMS_BYTES)


def test_a_pass_of_tensor_parallel_ranks(bench: Bench) -> None:
    """Two sums in each block each way, one of the embedding, one gather of two numbers of each token for the loss."""
    found = [each[:3] for each in bench("tensor parallel, rank 3 of 8").collectives if each.ranks == (0, 1, 2, 3)]
    stream = 64 * 128
    sums = [("AllReduce", "bfloat16", 2 * stream)]
    forward = [("AllReduce", "float32", 4 * stream), *4 * sums, ("AllGather", "float32", 2 * 4 * 64)]
    assert found[:-1] == 2 * [*forward, *5 * sums]
    assert found[-1] == ("AllReduce", "float32", 2 * 2 * 32 * 4)  # the gradients of the norms of queries and keys


@pytest.mark.parametrize("what", ["", ", evaluation"])
def test_stages_receive_what_others_send(bench: Bench, what: str) -> None:
    """Rank 3 and rank 7 of the other stage, of which rank 4 does the same with rank 0."""
    calls = {rank: bench(f"pipeline{what}, rank {rank} of 8").collectives for rank in RANKS}
    pairs = {rank: (rank % 4, rank % 4 + 4) for rank in RANKS}
    moved = {
        (rank, name): [each.bytes for each in calls[rank] if each.name == name and each.ranks == pairs[rank]]
        for rank in calls for name in ("Isend", "Irecv")
    }  # fmt: skip
    assert moved[3, "Isend"] == moved[4, "Irecv"] and moved[4, "Isend"] == moved[3, "Irecv"]
    # From each of four parts to the next, and back; a batch of an evaluation goes there alone.
    assert len(moved[3, "Isend"] + moved[4, "Isend"]) == (3 if what else 4 * 3 * 2)


def test_memory_that_settings_save(bench: Bench) -> None:
    peak = {name: bench(name).peak_bytes for name in TRAINED}
    assert peak["long, recomputed"] < 0.9 * peak["long"]
    assert peak["shared state, rank 3 of 8"] < 0.9 * peak["data parallel, rank 3 of 8"]
    assert peak["LoRA"] < peak["frozen"] < peak["mode 1"]
    assert peak["evaluation"] < 0.6 * peak["mode 1"]


def test_a_job_without_use_parallel_is_explicit(bench: Bench) -> None:
    assert not bench("semi-automatic mode, not used").legacy, "the graph of semi-automatic mode starts some"


def test_the_batch_of_all_ranks_is_divided(bench: Bench) -> None:
    assert bench("a batch of all ranks").found == {"micro_batches": 2}
