"""MindSpore's sequence pipelines: the order of slices, and that no stage waits for ever."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from tolerances import FLOAT64_SUMS

from trainer.config import Config, parse_config
from trainer.parallel.schedule import (
    SEQUENCE_PIPELINES,
    Action,
    Cost,
    Deadlock,
    Schedule,
    max_in_flight,
    never_waits_for_ever,
    one_forward_one_backward,
    sequence_pipeline,
    simulate,
)
from trainer.plan.pipeline import _action_costs, _chunk_costs, pipeline_plan

SIZES = [
    (scheduler, p, m, v, s)
    for scheduler in SEQUENCE_PIPELINES for p in (2, 3, 4, 8) for m in (2, 4, 5, 8, 11, 16) for v in (1, 2, 3)
    for s in (1, 2, 3, 4)
    # MindSpore refuses the others.
    if (scheduler == "seqpipe" and m >= p) or (v > 1 and s <= p <= m * s and (scheduler == "seqvpp" or p % 2 == 0))
    if never_waits_for_ever(scheduler, p, s)
]  # fmt: skip


def check_order(schedule: Schedule, micro_batches: int, slices: int) -> None:
    """Checks that each pass comes once, and after those whose results it needs on its own stage."""
    for actions in schedule.actions:
        assert len(actions) == len(set(actions)) == 2 * micro_batches * schedule.chunks * slices
        places = {action: place for place, action in enumerate(actions)}
        for action, place in places.items():
            if action.kind == "backward":
                assert places[action._replace(kind="forward")] < place
        rows: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for kind, micro_batch, chunk, part in actions:
            rows[(kind, micro_batch, chunk)].append(part)
        for (kind, _, _), parts in rows.items():
            assert parts == sorted(range(slices), reverse=kind == "backward")


@pytest.mark.parametrize(("scheduler", "p", "m", "v", "s"), SIZES)
def test_slices_go_forward_in_order_and_backward_in_reverse(scheduler: str, p: int, m: int, v: int, s: int) -> None:
    schedule = sequence_pipeline(scheduler, p, m, v, s)
    check_order(schedule, m, s)
    timeline = simulate(schedule)  # raises where stages wait for each other
    if v == 1 or (scheduler == "seqpipe" and m % p == 0):
        assert timeline.bubble_share == pytest.approx((p - 1) / (v * m * s + p - 1), rel=FLOAT64_SUMS)
    if s == 1 and m % p == 0 and scheduler != "seqsmartvpp":
        assert schedule == one_forward_one_backward(p, m, v)
    if scheduler != "seqpipe" and m * s % p == 0 and p % s == 0:
        longer = sequence_pipeline("seqpipe", p, m, v, s)
        for stage in range(p):
            assert max_in_flight(schedule, stage) <= max_in_flight(longer, stage)


def test_slices_that_do_not_divide_the_stages_of_seqvpp_may_wait_for_ever() -> None:
    assert not never_waits_for_ever("seqvpp", 8, 3)
    with pytest.raises(Deadlock, match="never takes"):
        simulate(sequence_pipeline("seqvpp", 8, 4, 2, 3))


def configuration(seq_length: int = 1024, **order: object) -> Config:
    """Returns a pipeline of four stages."""
    return parse_config("sequence", json.dumps({
        "use_parallel": True, "context": {"device_target": "Ascend"}, "optimizer": {"type": "AdamW"},
        "parallel": {"parallel_mode": 1, "pipeline_config": {"pipeline_interleave": True} | order},
        "parallel_config": {"pipeline_stage": 4, "micro_batch_num": 8, "data_parallel": 1},
        "model": {"arch": {"type": "LlamaForCausalLM"}, "model_config": {
            "num_layers": 8, "hidden_size": 256, "num_heads": 4, "intermediate_size": 512, "vocab_size": 1024,
            "seq_length": seq_length,
        }},
    }))  # fmt: skip


def sliced(config: Config, number: int) -> Config:
    order = config.parallel.pipeline_config.with_slices(number)
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"pipeline_config": order})})


def test_later_slices_see_more_keys() -> None:
    """All slices together take what the micro-batch takes; attention of the last of 4 is 7 times that of the first."""
    whole = configuration(pipeline_scheduler="seqpipe")
    cost = _action_costs(sliced(whole, 4))
    of_slices = [cost(1, Action("forward", 0, 0, part)) for part in range(4)]
    assert sum(one.forward for one in of_slices) == pytest.approx(_chunk_costs(whole)[1][0].forward, rel=FLOAT64_SUMS)
    [attention] = _chunk_costs(whole, operators=("attention",))[1]
    for kind in Cost._fields:
        steps = [getattr(b, kind) - getattr(a, kind) for a, b in zip(of_slices, of_slices[1:], strict=False)]
        assert steps == pytest.approx([getattr(attention, kind) / 8] * 3, rel=FLOAT64_SUMS)


def test_slices_shorten_the_bubble() -> None:
    whole = configuration(pipeline_scheduler="seqpipe")
    plans = [pipeline_plan(sliced(whole, number), 4) for number in (1, 2, 4)]
    bubbles = [plan.bubble_share for plan in plans if plan is not None]
    assert bubbles[0] > bubbles[1] > bubbles[2] > 0
    one = pipeline_plan(configuration(), 4)
    assert one is not None and bubbles[0] == one.bubble_share
    assert [stage.in_flight for stage in plans[2].stages] == [7, 6, 5, 4]  # type: ignore[union-attr]
    # Where attention is most of the work, the last slice takes seven times as long as the first.
    uneven = pipeline_plan(sliced(configuration(65536, pipeline_scheduler="seqpipe"), 4), 4)
    assert uneven is not None and uneven.bubble_share > 1.5 * bubbles[2]


# The lines "seq_chunk, micro, chunk, is fp or bp" of MindSpore 2.10's log in dry runs of its Ascend backend (GLOG_v 1).
ORDERS_OF_MINDSPORE = {
    ("seqpipe", 2, 5, 2, 2, 0):
        "F0a0 F0a1 F1a0 F1a1 F2a0 F2a1 F0b0 F0b1 F1b0 F1b1 B0b1 F2b0 B0b0 F2b1 B1b1 F3a0 B1b0 F3a1 B2b1 F4a0 B2b0 F4a1 "
        "B0a1 F3b0 B0a0 F3b1 B1a1 F4b0 B1a0 F4b1 B2a1 B2a0 B3b1 B3b0 B4b1 B4b0 B3a1 B3a0 B4a1 B4a0",
    ("seqpipe", 4, 6, 1, 4, 3):
        "F0a0 F0a1 F0a2 F0a3 B0a3 F1a0 B0a2 F1a1 B0a1 F1a2 B0a0 F1a3 B1a3 F2a0 B1a2 F2a1 B1a1 F2a2 B1a0 F2a3 B2a3 F3a0 "
        "B2a2 F3a1 B2a1 F3a2 B2a0 F3a3 B3a3 F4a0 B3a2 F4a1 B3a1 F4a2 B3a0 F4a3 B4a3 F5a0 B4a2 F5a1 B4a1 F5a2 B4a0 F5a3 "
        "B5a3 B5a2 B5a1 B5a0",
    ("seqvpp", 4, 4, 2, 2, 0):
        "F0a0 F0a1 F1a0 F1a1 F0b0 F0b1 F1b0 F1b1 F2a0 F2a1 F3a0 F3a1 B0b1 F2b0 B0b0 F2b1 B1b1 F3b0 B1b0 F3b1 B0a1 B0a0 "
        "B1a1 B1a0 B2b1 B2b0 B3b1 B3b0 B2a1 B2a0 B3a1 B3a0",
    ("seqsmartvpp", 4, 4, 2, 2, 3):
        "F0a0 F0a1 F1a0 F1a1 F0b0 F0b1 B0b1 F1b0 B0b0 F1b1 B1b1 F2a0 B1b0 F2a1 B0a1 F3a0 B0a0 F3a1 B1a1 F2b0 B1a0 F2b1 "
        "B2b1 F3b0 B2b0 F3b1 B3b1 B3b0 B2a1 B2a0 B3a1 B3a0",
}


@pytest.mark.parametrize("case", ORDERS_OF_MINDSPORE)
def test_the_order_is_that_of_mindspore(case: tuple[str, int, int, int, int, int]) -> None:
    """F forward, B backward pass of micro-batch, chunk (a, b) and slice."""
    *sizes, stage = case
    actions = sequence_pipeline(*sizes).actions[stage]  # type: ignore[arg-type]
    order = " ".join(
        f"{kind[0].upper()}{micro_batch}{'ab'[chunk]}{part}" for kind, micro_batch, chunk, part in actions
    )
    assert order == ORDERS_OF_MINDSPORE[case]
