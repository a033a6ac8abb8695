"""Schedules of a pipeline: which micro-batch each stage computes when. Pure Python.

A stage has one or more chunks of consecutive layers (`pp_interleave_num`); chunk c of stage s is part c * stages + s of
the model. A schedule lists the actions of each stage in the order in which it takes them:

* 1F1B (Narayanan et al. 2019, "PipeDream", and 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
  Using Megatron-LM", section 2.2): stage s starts with stages - s - 1 forward passes, then alternates one forward and
  one backward pass. It holds the activations of at most stages - s micro-batches, however many there are.
* Interleaved 1F1B (the same paper of 2021, section 2.2.2): with v chunks a stage starts with
  2 (stages - s - 1) + (v - 1) stages forward passes, and takes its chunks in turns of `stages` micro-batches. The
  bubble is v times smaller, at the cost of v times as many messages.

Two stages take each other's messages in the order in which they are sent, so that messages need no names. A stage that
sends without waiting for the receiver cannot deadlock: `simulate` is the proof for each schedule.

Legend: p stages, m micro-batches, v chunks of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]


class Action(NamedTuple):
    """One pass of a micro-batch through a chunk of a stage."""

    kind: Kind
    micro_batch: int
    chunk: int


class StageMessage(NamedTuple):
    """The result of an action that another stage waits for: activations, or their gradient."""

    sender: int
    action: Action


class Cost(NamedTuple):
    """Time that the passes of a micro-batch through one chunk take, in any unit."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Schedule:
    """The actions of each stage, in order."""

    stages: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]

    def input_message(self, stage: int, action: Action) -> StageMessage | None:
        """What an action of a stage takes from another stage; None where it takes nothing: the first part of the model
        reads token ids, and the backward pass of the last one starts at the loss."""
        last = self.stages * self.chunks - 1
        part = action.chunk * self.stages + stage
        if part == (0 if action.kind == "forward" else last):
            return None
        chunk, sender = divmod(part - 1 if action.kind == "forward" else part + 1, self.stages)
        return StageMessage(sender, action._replace(chunk=chunk))

    def receiver(self, stage: int, action: Action) -> int | None:
        """The stage that takes the result of an action; None where none does."""
        last = self.stages * self.chunks - 1
        part = action.chunk * self.stages + stage
        if part == (last if action.kind == "forward" else 0):
            return None
        return (part + 1 if action.kind == "forward" else part - 1) % self.stages


def directions(stages: int, chunks: int) -> list[tuple[int, int]]:
    """The pairs (sender, taker) of stages between which tensors travel, the same order for all stages."""
    links = [(stage, stage + 1) for stage in range(stages - 1)]
    # The last stage hands on to the next chunk of the first one.
    links += [(stages - 1, 0)] if chunks > 1 else []
    pairs = [pair for first, second in links for pair in ((first, second), (second, first))]
    return list(dict.fromkeys(pairs))


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """1F1B, or with several chunks interleaved 1F1B.

    Interleaved 1F1B takes micro-batches in turns of `stages`. Megatron-LM refuses other numbers of them. Here those
    that are left over, as in the last step of an epoch, follow with all forward passes before all backward passes.
    """
    return Schedule(stages, chunks, tuple(tuple(_actions(stages, micro_batches, chunks, s)) for s in range(stages)))


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """For evaluation."""
    numbers = range(micro_batches)
    actions = tuple(Action("forward", number, chunk) for turn in _turns(numbers, stages) for chunk in range(chunks)
                    for number in turn)  # fmt: skip
    return Schedule(stages, chunks, (actions,) * stages)


def _turns(micro_batches: Sequence[int], stages: int) -> list[Sequence[int]]:
    return [micro_batches[first : first + stages] for first in range(0, len(micro_batches), stages)]


def _actions(stages: int, micro_batches: int, chunks: int, stage: int) -> Iterator[Action]:
    if chunks == 1:
        whole = micro_batches
    else:
        whole = micro_batches - micro_batches % stages
    behind = stages - stage - 1
    yield from _alternating(stages, range(whole), chunks, behind if chunks == 1 else 2 * behind + (chunks - 1) * stages)
    left = range(whole, micro_batches)
    yield from _alternating(stages, left, chunks, len(left) * chunks)


def _alternating(stages: int, micro_batches: range, chunks: int, warm_up: int) -> Iterator[Action]:
    """`warm_up` forward passes, then one forward and one backward pass in turn, then the backward passes left."""
    if chunks == 1:
        turns = [micro_batches]
    else:
        turns = _turns(micro_batches, stages)
    forward = [Action("forward", n, chunk) for turn in turns for chunk in range(chunks) for n in turn]
    backward = [Action("backward", n, chunk) for turn in turns for chunk in reversed(range(chunks)) for n in turn]
    warm_up = min(warm_up, len(forward))
    yield from forward[:warm_up]
    for one, other in zip(forward[warm_up:], backward, strict=False):
        yield one
        yield other
    yield from backward[len(forward) - warm_up :]


class Slot(NamedTuple):
    """When a stage takes an action."""

    start: float
    end: float
    action: Action


class Timeline(NamedTuple):
    """A schedule in time: the slots of each stage, in order."""

    slots: tuple[tuple[Slot, ...], ...]

    @property
    def end(self) -> float:
        return max((slots[-1].end for slots in self.slots if slots), default=0.0)

    def busy(self, stage: int) -> float:
        return sum(slot.end - slot.start for slot in self.slots[stage])

    @property
    def bubble_share(self) -> float:
        """Share of the window in which a stage waits, mean over the stages.

        Where all stages take the same time it is (p - 1) / (v m + p - 1): the papers' bubble, (p - 1) / (v m), is the
        same time over that of the computation alone.
        """
        if not self.end:
            return 0.0
        return 1 - sum(self.busy(stage) for stage in range(len(self.slots))) / (len(self.slots) * self.end)


class Deadlock(Exception):
    """Each stage waits for what another one has not computed."""


def simulate(schedule: Schedule, cost: Callable[[int, int], Cost] = lambda stage, chunk: Cost(1, 2)) -> Timeline:
    """Takes each action as soon as its stage is free and what it needs is there; sending takes no time.

    Args:
        cost: (stage, chunk) -> how long its passes take.

    Raises:
        Deadlock: The actions left wait for each other.
    """
    ended: dict[StageMessage, float] = {}
    slots: list[list[Slot]] = [[] for _ in range(schedule.stages)]
    went_on = True
    while went_on:
        went_on = False
        for stage, actions in enumerate(schedule.actions):
            for action in islice(actions, len(slots[stage]), None):
                needed = schedule.input_message(stage, action)
                own = StageMessage(stage, action._replace(kind="forward"))
                awaited = [one for one in (needed, own if action.kind == "backward" else None) if one is not None]
                if not all(one in ended for one in awaited):
                    break
                free = 0.0
                if slots[stage]:
                    free = slots[stage][-1].end
                start = max([free, *(ended[one] for one in awaited)])
                end = start + getattr(cost(stage, action.chunk), action.kind)
                slots[stage].append(Slot(start, end, action))
                ended[StageMessage(stage, action)] = end
                went_on = True
    for stage, (done, actions) in enumerate(zip(slots, schedule.actions, strict=True)):
        if len(done) < len(actions):
            raise Deadlock(f"stage {stage} never takes {actions[len(done)]}")
    return Timeline(tuple(map(tuple, slots)))


def max_in_flight(schedule: Schedule, stage: int, chunk: int | None = None) -> int:
    """The most forward passes of a stage, or of one of its chunks, whose activations wait for their backward pass."""
    most = now = 0
    for action in schedule.actions[stage]:
        if chunk in (None, action.chunk):
            now += 1 if action.kind == "forward" else -1
            most = max(most, now)
    return most
