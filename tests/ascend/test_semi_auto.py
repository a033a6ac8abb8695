"""Semi-automatic mode on the dry Ascend backend, sharded in each way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ascend_cases import CLASSIFIER, LEGACY_OF_CLASSIFIER, LEGACY_OF_GRAPH, LEGACY_OF_STAGES, SEMI, on_ascend

from trainer.config import parse_config
from trainer.dryrun.process import Measurement
from trainer.dryrun.report import planned_bytes
from trainer.parallel.world import World

CUTS = {
    "data 8": {"data_parallel": 8},
    "data 4, tensor 2": {"data_parallel": 4, "model_parallel": 2},
    "pipeline 2": {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2},
}
SHARED = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
# Nothing is computed, so large sizes cost nothing: with small ones the allocator's alignment would count.
SIZES = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 2048, "vocab_size": 16384, "seq_length": 1024}
ONE = {"num_layers": 1}  # of each layer the graph costs seconds
# Ranks of a stage compile the same graph; only a pipeline has others.
WHERE = [(name, shared, 0) for name in CUTS for shared in (False, True)] + [("pipeline 2", True, 7)]
CASES = {
    f"{name}{', hsdp' if shared else ''}, rank {rank}": on_ascend(
        SEMI,
        {
            "parallel_config": CUTS[name], "parallel": SHARED if shared else {},
            "context": {"jit_config": {"jit_level": "O1" if shared and "tensor" in name else "O0"}},
        },
        # The dtype and the attention are the defaults of an Ascend.
        model={"compute_dtype": None, "use_flash_attention": None, **(SIZES if "pipeline" in name else ONE)},
        ranks=8, rank=rank, process=f"{name if 'pipeline' in name else ''}{shared}",
    )
    for name, shared, rank in WHERE
}  # fmt: skip
IMAGES = {
    "use_parallel": True, "parallel_config": {"data_parallel": 8},
    "parallel": {"parallel_mode": 1, "enable_parallel_optimizer": False},
}  # fmt: skip
SHARED_SUMS = {"parallel_optimizer_threshold": 0, "optimizer_level": "level2"}
CASES |= {  # in processes that run anyway
    "classifier, rank 0": on_ascend(CLASSIFIER, IMAGES, ranks=8, rank=0, process="False"),
    "classifier evaluated, rank 0": on_ascend(
        CLASSIFIER, IMAGES, ranks=8, rank=0, process="False", task="trainer.dryrun.tasks:evaluation", steps=1
    ),
    "classifier, hsdp, rank 7": on_ascend(
        CLASSIFIER,
        IMAGES | {"parallel": SHARED | {"parallel_mode": 1, "parallel_optimizer_config": SHARED_SUMS}},
        ranks=8, rank=7, process="pipeline 2True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_runs(bench: Callable[[str], Measurement], name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found.get("updated", True)
    more = LEGACY_OF_STAGES if "pipeline" in name else LEGACY_OF_CLASSIFIER if "classifier" in name else frozenset()
    assert found.legacy.keys() <= LEGACY_OF_GRAPH | more


def test_the_host_reads_one_small_tensor_a_step(bench: Callable[[str], Measurement]) -> None:
    found = bench("data 8, rank 0")
    assert [count for count, _ in found.host_reads.values()] == [1], found.host_reads
    assert found.host_bytes < 100_000


def test_a_classifier_sums_its_gradients_or_shares_them(bench: Callable[[str], Measurement]) -> None:
    whole, shared = bench("classifier, rank 0"), bench("classifier, hsdp, rank 7")
    summed = sum(each.bytes for each in whole.collectives if each.name == "AllReduce")
    assert summed == pytest.approx(4 * whole.found["parameters"], abs=100)  # and some numbers beside them
    assert "AllGather" in {each.name for each in shared.collectives}
    assert shared.found["parameters"] < whole.found["parameters"] / 7


def test_tensor_parallelism_communicates_in_the_default_of_an_ascend(bench: Callable[[str], Measurement]) -> None:
    assert "bfloat16" in {each.dtype for each in bench("data 4, tensor 2, rank 0").collectives}


def test_hsdp_gathers_the_weights_that_the_ranks_share(bench: Callable[[str], Measurement]) -> None:
    whole, shared = bench("data 8, rank 0"), bench("data 8, hsdp, rank 0")
    assert shared.found["parameters"] * 8 == whole.found["parameters"]
    assert "AllGather" not in {each.name for each in whole.collectives}
    gathered = sum(each.bytes for each in shared.collectives if each.name == "AllGather")
    assert gathered >= 2 * shared.found["parameters"]  # in bfloat16 or float32
    assert shared.peak_bytes < whole.peak_bytes


def test_stages_send_each_other_what_the_other_receives(bench: Callable[[str], Measurement]) -> None:
    first, last = bench("pipeline 2, hsdp, rank 0"), bench("pipeline 2, hsdp, rank 7")
    for found, other in ((first, 4), (last, 3)):
        moves = [each for each in found.collectives if each.name in ("Send", "Receive")]
        assert moves and all(other in each.ranks for each in moves)
    sent, received = ([each.bytes for each in first.collectives if each.name == name] for name in ("Send", "Receive"))
    assert sent == [each.bytes for each in last.collectives if each.name == "Receive"]
    assert received == [each.bytes for each in last.collectives if each.name == "Send"]


@pytest.mark.parametrize("name", [name for name in CASES if "pipeline" in name])
def test_the_plan_estimates_the_memory_of_a_stage(bench: Callable[[str], Measurement], name: str) -> None:
    case, ranks, rank, _ = CASES[name]
    planned = planned_bytes(parse_config(name, case.config), World(rank, ranks, 0, 1))
    assert planned == pytest.approx(bench(name).peak_bytes, rel=0.1)
