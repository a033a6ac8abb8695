"""Schedules of a pipeline against theory: order, memory, bubble, and that no stage waits for ever."""

from __future__ import annotations

import json
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.cli.main import dispatch
from trainer.config import Override, load_config
from trainer.errors import UserError
from trainer.parallel.schedule import (
    Action,
    Cost,
    Deadlock,
    Schedule,
    directions,
    forward_only,
    gpipe,
    max_in_flight,
    one_forward_one_backward,
    passes_in_flight,
    simulate,
)
from trainer.parallel.world import World
from trainer.plan.memory import memory_estimate
from trainer.plan.render import plan_text
from trainer.run.prepare import build_plan

REPOSITORY = Path(__file__).resolve().parents[3]
DRAWN = random.Random(18)
SIZES = [(p, m, v) for p in (1, 2, 3, 4) for v in (1, 2, 3) for m in (1, 2, 3, 4, 7, 8)]
SIZES += [(DRAWN.randint(2, 8), DRAWN.randint(1, 24), DRAWN.randint(1, 4)) for _ in range(30)]


def check_passes(schedule: Schedule, micro_batches: int, kinds: tuple[str, ...]) -> None:
    """Checks that each pass comes once, each backward after its forward pass, and messages are received in the order
    in which they are sent."""
    every = {Action(kind, n, c) for kind in kinds for n in range(micro_batches) for c in range(schedule.chunks)}
    for stage, actions in enumerate(schedule.actions):
        assert set(actions) == every and len(actions) == len(every)
        places = {action: place for place, action in enumerate(actions)}
        assert all(places[a._replace(kind="forward")] <= place for a, place in places.items())
        for sender in range(schedule.stages):
            sent = [a for a in schedule.actions[sender] if schedule.receiver(sender, a) == stage]
            needed = [one for a in actions if (one := schedule.input_message(stage, a)) is not None]
            assert sent == [one.action for one in needed if one.sender == sender] or sender == stage


@pytest.mark.parametrize("v", [1, 2])
def test_a_stage_has_sent_a_message_of_each_pass_that_another_stage_needs(v: int) -> None:
    """Further micro-batches come in the middle of the schedule: what a stage has sent grows by theirs."""
    p = 4
    some, more = (one_forward_one_backward(p, m, v) for m in (4 * p, 6 * p))
    for stage in range(p):
        fullest = max(passes_in_flight(some, stage), key=sum)
        messages = 2 * v - (stage == 0) - (stage == p - 1)
        added = passes_in_flight(more, stage)[fullest] - passes_in_flight(some, stage)[fullest]
        assert added == 2 * p * messages


@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_every_schedule_ends_in_the_time_and_the_memory_of_theory(p: int, m: int, v: int) -> None:
    schedule = one_forward_one_backward(p, m, v)
    check_passes(schedule, m, ("forward", "backward"))
    timeline = simulate(schedule)  # raises where stages wait for each other
    if v == 1 or m % p == 0:
        assert timeline.bubble_share == pytest.approx((p - 1) / (v * m + p - 1))
        computing = 3 * m * v  # of each stage: the bubble over it is (p - 1) / m / v, as in the papers
        assert (timeline.end - computing) / computing == pytest.approx((p - 1) / m / v)
    for stage in range(p):
        warm_up = p - stage - 1 if v == 1 else 2 * (p - stage - 1) + (v - 1) * p
        bound = min(warm_up + 1, m * v)
        assert max_in_flight(schedule, stage) == bound or (v > 1 and m % p)
        assert max_in_flight(schedule, stage) <= max(bound, m % p * v)
        assert max(map(sum, passes_in_flight(schedule, stage))) == max_in_flight(schedule, stage)
    at_once = gpipe(p, m, v)
    check_passes(at_once, m, ("forward", "backward"))
    assert max_in_flight(at_once, 0) == m * v
    evaluated = forward_only(p, m, v)
    check_passes(evaluated, m, ("forward",))
    assert simulate(evaluated).end > 0
    if p > 1:
        used = {(one.sender, stage) for stage, own in enumerate(schedule.actions) for action in own
                if (one := schedule.input_message(stage, action))}  # fmt: skip
        assert used <= set(directions(p, v))
        assert ends_where_transfers_meet(schedule, lambda pair: pair)
        assert all(ends_where_transfers_meet(one, lambda pair: pair) for one in (at_once, evaluated))


def ends_where_transfers_meet(schedule: Schedule, stream_of: Callable[[tuple[int, int]], object]) -> bool:
    """Returns whether devices come to the end of a schedule where a transfer needs both of them at once.

    A device takes the transfers of a stream one after the other. Those of other streams go on meanwhile, and what it
    computes waits for what it receives alone.

    Args:
        stream_of: (sender, taker) -> the stream that both use for it.
    """
    left: list[list[tuple[str, tuple[int, int]]]] = []
    for stage, actions in enumerate(schedule.actions):
        steps = []
        for action in actions:
            needed, taker = schedule.input_message(stage, action), schedule.receiver(stage, action)
            steps += [("receive", (needed.sender, stage))] if needed else []
            steps += [] if taker is None else [("send", (stage, taker))]
        left.append(steps[::-1])
    streams: dict[tuple[int, object], deque[tuple[str, tuple[int, int]]]] = defaultdict(deque)
    waits, went_on = [False] * schedule.stages, True
    while went_on:
        went_on = False
        for stage, steps in enumerate(left):
            while steps and not waits[stage]:
                kind, pair = step = steps.pop()
                streams[stage, stream_of(pair)].append(step)
                waits[stage], went_on = kind == "receive", True
        for pair in directions(schedule.stages, schedule.chunks):
            sender, taker = (streams[stage, stream_of(pair)] for stage in pair)
            if sender and taker and sender[0] == ("send", pair) and taker[0] == ("receive", pair):
                sender.popleft()
                taker.popleft()
                waits[pair[1]], went_on = False, True
    return not any(left) and not any(streams.values())


def test_one_stream_for_both_directions_would_be_a_deadlock() -> None:
    for v in (1, 2):
        schedule = one_forward_one_backward(4, 8, v)
        assert not ends_where_transfers_meet(schedule, frozenset) and not ends_where_transfers_meet(schedule, len)


def test_uneven_stages_wait_for_the_slowest() -> None:
    p, m = 4, 12
    schedule = one_forward_one_backward(p, m)
    found = simulate(schedule, lambda stage, chunk: Cost(1, 2) if stage < 3 else Cost(2, 4))
    # The slowest stage never waits between its first and its last pass; the passage through the others comes on top.
    assert found.end == 6 * m + 3 * (p - 1)
    assert found.bubble_share == pytest.approx(1 - m * (3 * 3 + 6) / (p * found.end))


@pytest.mark.parametrize("stage", range(3))
def test_stages_that_wait_for_each_other_are_found(stage: int) -> None:
    schedule = one_forward_one_backward(4, 6)
    actions = list(schedule.actions)
    own = list(actions[stage])
    own.insert(stage, own.pop(own.index(Action("backward", 5, 0))))  # before its own forward pass
    actions[stage] = tuple(own)
    with pytest.raises(Deadlock, match="never takes"):
        simulate(replace(schedule, actions=tuple(actions)))


def test_plan_tells_and_draws_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Semi-automatic mode, whose file is planned on any machine.
    flags = ["plan", "--config", str(REPOSITORY / "configs" / "mindformers_llama.yaml"), "--ranks", "2"]
    flags += "--use_parallel True --parallel.parallel_mode 1 --device_target Ascend".split()
    flags += "--parallel_config.pipeline_stage 2 --parallel_config.micro_batch_num 4".split()
    flags += "--parallel_config.data_parallel 1 --runner_config.gradient_accumulation_steps 1".split()
    flags += "--model.model_config.num_layers 5 --model.model_config.offset 0".split()
    assert dispatch([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found, held = plan["pipeline"], plan["division"]["stages"]
    assert [stage["layers"] for stage in held] == [["0-1"], ["2-4"]]
    assert [stage["in_flight"] for stage in found["stages"]] == [2, 1]
    assert found["even_bubble_share"] == pytest.approx(1 / 5) and found["bubble_share"] > 1 / 5
    picture = tmp_path / "schedule.png"
    assert dispatch([*flags, "--schedule", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split()[2:] == "F0 F1 . . B0 B0 F2 B1 B1 F3 B2 B2 . B3 B3".split()
    assert lines[-1].split()[2:] == ". F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 . .".split()
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="names a PNG file"):
        dispatch([*flags, "--schedule", "schedule.svg"])
    more = ["--parallel_config.micro_batch_num", "64"]
    assert dispatch([*flags, *more, "--schedule", str(picture)]) == 0
    assert capsys.readouterr().out.startswith("2 stages, 16 micro-batches where a step has 64: F3 forward")


def test_a_stage_has_its_part_of_the_memory_and_of_the_data() -> None:
    file = str(REPOSITORY / "configs" / "quickstart.yaml")
    flags = {"use_parallel": True, "parallel_config.pipeline_stage": 2, "parallel_config.micro_batch_num": 8}
    flags["parallel.pipeline_config.pipeline_scheduler"] = "gpipe"
    plan = build_plan(load_config(file, [Override(key, str(value)) for key, value in flags.items()]), World(3, 4, 3, 4))
    assert plan.backend.data_ranks == (1, 2) and plan.steps.micro_batches == 8
    assert plan.steps.rows_per_step == 2 * 8 * 32
    assert plan.pipeline is not None and [stage.in_flight for stage in plan.pipeline.stages] == [8, 8]
    assert "GPipe, 2 stages, 8 micro-batches" in plan_text(plan)
    assert plan.memory_bytes["weights"] < 0.6 * memory_estimate(load_config(file), True, "CPU")["weights"]
