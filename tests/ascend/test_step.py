"""A step on the dry Ascend backend: the host reads once, and gradients travel while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ascend_cases import DENSE, EXPERTS, on_ascend

from trainer.dryrun.process import Measurement

Bench = Callable[[str], Measurement]

MOST_BYTES = 100_000
RANKS, BUCKET_BYTES = 8, 200_000
DEEPSEEK = {
    "expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 64, "use_gmm": True, "n_group": 4,
    "topk_group": 2, "use_gating_sigmoid": True, "moe_router_enable_expert_bias": True, "z_loss_factor": 0.001,
    "aux_loss_factor": 0.001, "moe_router_load_balancing_type": "gbs_aux_loss",
}  # fmt: skip
SHARED = {
    "parallel": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 1}}
}
PLAIN = {"context": {"mode": 1}}
EVERY_NORM = {"runner_wrapper": {"clip_by_group": True, "local_norm": True}}
OVERLAPPED = {"task": "tests.ascend.step_tasks:overlapped", "bucket_bytes": BUCKET_BYTES, "ranks": RANKS, "rank": 3}
READS_ONCE = {
    "one read, every norm": on_ascend(DENSE, PLAIN | EVERY_NORM),
    "one read, experts and MTP": on_ascend(EXPERTS, PLAIN, model={"mtp_depth": 1, "moe_config": DEEPSEEK}),
    # Of compiled blocks, one of them recomputed.
    "one read, 8 ranks": on_ascend(DENSE, {"recompute_config": {"recompute": [1, 0]}}, **OVERLAPPED),
    "one read, 8 ranks with shared state": on_ascend(DENSE, PLAIN | SHARED, **OVERLAPPED),
    # The matrix of the embedding is used four times, and its gradient comes once.
    "one read, 8 ranks with experts": on_ascend(
        EXPERTS, PLAIN, model={"mtp_depth": 1, "tie_word_embeddings": True, "moe_config": DEEPSEEK}, ranks=RANKS, rank=3
    ),
}
CASES = dict(READS_ONCE)


@pytest.mark.parametrize("name", READS_ONCE)
def test_the_host_reads_one_small_tensor_a_step(bench: Bench, name: str) -> None:
    """Checks that the second micro-batch is dispatched before the loss of the first is read, and that the gradients
    stay on the device."""
    found = bench(name)
    assert found.failure is None
    assert found.found["updated"]
    assert not found.legacy
    assert found.peak_bytes > 0
    assert [count for count, _ in found.host_reads.values()] == [1], found.host_reads
    assert found.host_bytes < MOST_BYTES


@pytest.mark.parametrize("shared", [False, True])
def test_buckets_are_reduced_while_the_backward_pass_goes_on(bench: Bench, shared: bool) -> None:
    """In the last micro-batch alone, as soon as all gradients of a bucket are there, from the last layer to the first.

    With shared state the sums are scattered: a rank gets an eighth, and gathers the new weights after the update."""
    found = bench("one read, 8 ranks with shared state" if shared else "one read, 8 ranks").found
    sizes, events = found["sizes"], [tuple(event) for event in found["events"]]
    first, last = [place for place, event in enumerate(events) if event == ("backward", "ends")]
    assert [kind for kind, _ in events[:first]] == ["start_all_reduce"], "the counts of tokens, and no gradient"
    during = events[first + 1 : last]
    assert sorted(name for kind, name in during if kind == "gradient") == sorted(sizes)
    starts = [(place, *event) for place, event in enumerate(during) if event[0].startswith("start")]
    assert starts[0][0] < len(during) / 3 and starts[-1][0] >= len(during) - 2  # from early on until the end
    assert {kind for _, kind, _ in starts} == {"start_all_reduce", *(["start_reduce_scatter"] if shared else [])}
    assert sum(size for _, _, size in starts) == 4 * sum(sizes.values())
    arrived = 0
    for place, _, size in starts:
        arrived += size
        assert arrived <= 4 * sum(sizes[name] for kind, name in during[:place] if kind == "gradient")
    read, *after = events[last + 1 :]
    assert read[0] == "start_all_reduce" and read[1] < MOST_BYTES
    gathered = [size for kind, size in after if kind == "start_all_gather"]
    assert after[0] == ("update", "begins") and len(after) == 1 + len(gathered)
    scattered = sum(size for _, kind, size in starts if kind == "start_reduce_scatter")
    assert RANKS * sum(gathered) == scattered
    assert bool(gathered) == shared
    assert found["dtypes"] == ["Float32"]


def test_collectives_of_a_step(bench: Bench) -> None:
    """The counts of tokens, the gradients, what the host will read, the new weights; what a rank gives of each."""
    calls = [(each.name, each.bytes) for each in bench("one read, 8 ranks with shared state").collectives]
    names = [name for name, _ in calls]
    gradients = len(names) - names.count("AllGather") - 1
    assert calls[0] == ("AllReduce", 4 * 4) and calls[gradients][0] == "AllReduce" and calls[gradients][1] < 1000
    assert set(names[1:gradients]) == {"ReduceScatter", "AllReduce"}
    assert set(names[gradients + 1 :]) == {"AllGather"}
