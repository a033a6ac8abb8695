"""Schedules of a pipeline: which micro-batch each stage computes when. Pure Python.

A stage has one or more model chunks of consecutive layers (`pp_interleave_num`, Megatron-LM's virtual stages); chunk c
of stage s is chunk c * stages + s of the model. A schedule lists the actions of each stage in their order:

* 1F1B (Narayanan et al. 2019, "PipeDream", and 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
  Using Megatron-LM", section 2.2): stage s starts with stages - s - 1 forward passes, then alternates one forward and
  one backward pass. It holds the activations of at most stages - s micro-batches, however many there are.
* Interleaved 1F1B (the same paper of 2021, section 2.2.2): with v chunks a stage starts with
  2 (stages - s - 1) + (v - 1) stages forward passes, and takes its chunks in turns of `stages` micro-batches. The
  bubble is v times smaller, at the cost of v times as many messages.

* GPipe (Huang et al. 2019): all forward passes, then all backward passes.
* MindSpore's sequence pipelines, seqpipe, seqvpp and seqsmartvpp: see `sequence_pipeline`.

Two stages take each other's messages in the order in which they are sent, so that messages need no names. A stage that
sends without waiting for the receiver cannot deadlock: `simulate` is the proof for each schedule.

Legend: p stages, m micro-batches, v chunks of a stage, s slices of a sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]
SEQUENCE_PIPELINES = ("seqpipe", "seqvpp", "seqsmartvpp")


class Action(NamedTuple):
    """One pass of a micro-batch, or of a slice of its sequences, through a chunk of a stage."""

    kind: Kind
    micro_batch: int
    chunk: int
    slice_number: int = 0


class StageMessage(NamedTuple):
    """The result of an action that another stage waits for: activations, or their gradient."""

    sender: int
    action: Action


class Cost(NamedTuple):
    """Time that the forward and the backward pass of an action take, in any unit."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Schedule:
    """The actions of each stage, in order."""

    stages: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]

    def input_message(self, stage: int, action: Action) -> StageMessage | None:
        """Returns the message that an action of a stage needs from another stage, or None.

        The first chunk of the model reads token ids, and the backward pass of the last one starts at the loss.
        """
        last = self.stages * self.chunks - 1
        source = action.chunk * self.stages + stage
        if action.kind == "forward":
            source -= 1
        else:
            source += 1
        if not 0 <= source <= last:
            return None
        chunk, sender = divmod(source, self.stages)
        return StageMessage(sender, action._replace(chunk=chunk))

    def receiver(self, stage: int, action: Action) -> int | None:
        """Returns the stage that receives the result of an action; None if no stage needs it."""
        last = self.stages * self.chunks - 1
        target = action.chunk * self.stages + stage
        if action.kind == "forward":
            target += 1
        else:
            target -= 1
        if not 0 <= target <= last:
            return None
        return target % self.stages


def directions(stages: int, chunks: int) -> list[tuple[int, int]]:
    """Returns the pairs (sender, receiver) of stages between which tensors travel, in one order for all stages."""
    links = [(stage, stage + 1) for stage in range(stages - 1)]
    if chunks > 1:  # the last stage sends to the next chunk of the first one
        links.append((stages - 1, 0))
    pairs = [pair for first, second in links for pair in ((first, second), (second, first))]
    return list(dict.fromkeys(pairs))


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Returns the 1F1B schedule, or with several chunks interleaved 1F1B.

    Interleaved 1F1B takes micro-batches in turns of `stages`, and Megatron-LM requires a multiple of it. Here the
    remaining micro-batches, as in the last step of an epoch, follow: all forward passes, then all backward passes.
    """
    return Schedule(stages, chunks, tuple(tuple(_actions(stages, micro_batches, chunks, s)) for s in range(stages)))


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Returns the GPipe schedule: all forward passes, then all backward passes.

    It waits as long as 1F1B, but a stage holds the activations of all micro-batches.
    """
    actions = _alternating(stages, range(micro_batches), chunks, warm_up=micro_batches * chunks)
    return Schedule(stages, chunks, (tuple(actions),) * stages)


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Returns a schedule without backward passes, for evaluation."""
    numbers = range(micro_batches)
    actions = tuple(Action("forward", number, chunk) for turn in _turns(numbers, stages) for chunk in range(chunks)
                    for number in turn)  # fmt: skip
    return Schedule(stages, chunks, (actions,) * stages)


def _turns(micro_batches: Sequence[int], stages: int) -> list[Sequence[int]]:
    return [micro_batches[first : first + stages] for first in range(0, len(micro_batches), stages)]


def _actions(stages: int, micro_batches: int, chunks: int, stage: int) -> Iterator[Action]:
    behind = stages - stage - 1
    if chunks == 1:
        yield from _alternating(stages, range(micro_batches), chunks, warm_up=behind)
        return
    in_turns = micro_batches - micro_batches % stages
    yield from _alternating(stages, range(in_turns), chunks, warm_up=2 * behind + (chunks - 1) * stages)
    remaining = range(in_turns, micro_batches)
    yield from _alternating(stages, remaining, chunks, warm_up=len(remaining) * chunks)


def _alternating(stages: int, micro_batches: range, chunks: int, warm_up: int) -> Iterator[Action]:
    """Yields `warm_up` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    if chunks == 1:
        turns = [micro_batches]
    else:
        turns = _turns(micro_batches, stages)
    forward = [Action("forward", n, chunk) for turn in turns for chunk in range(chunks) for n in turn]
    backward = [Action("backward", n, chunk) for turn in turns for chunk in reversed(range(chunks)) for n in turn]
    warm_up = min(warm_up, len(forward))
    yield from forward[:warm_up]
    for pair in zip(forward[warm_up:], backward, strict=False):
        yield from pair
    yield from backward[len(forward) - warm_up :]


class Slot(NamedTuple):
    """An action of a stage with its start and end, in the unit of `Cost`."""

    start: float
    end: float
    action: Action


class Timeline(NamedTuple):
    """A schedule in time: the slots of each stage, in order."""

    slots: tuple[tuple[Slot, ...], ...]

    @property
    def end(self) -> float:
        """Returns when the last stage ends."""
        return max((slots[-1].end for slots in self.slots if slots), default=0.0)

    def busy(self, stage: int) -> float:
        """Returns for how long a stage computes."""
        return sum(slot.end - slot.start for slot in self.slots[stage])

    @property
    def bubble_share(self) -> float:
        """Returns the share of the step in which a stage waits, mean over the stages.

        Where all stages take the same time it is (p - 1) / (v m + p - 1). The papers' bubble, (p - 1) / (v m), divides
        the same time by the time of the computation alone.
        """
        if not self.end:
            return 0.0
        return 1 - sum(self.busy(stage) for stage in range(len(self.slots))) / (len(self.slots) * self.end)


class Deadlock(Exception):
    """Each stage waits for what another one has not computed."""


def simulate(schedule: Schedule, cost: Callable[[int, Action], Cost] = lambda stage, action: Cost(1, 2)) -> Timeline:
    """Computes the timeline: an action starts when its stage is free and its message is there; sending takes no time.

    Args:
        cost: (stage, action) -> how long the passes of that micro-batch through that chunk take.

    Raises:
        Deadlock: The remaining actions wait for each other.
    """
    ended: dict[StageMessage, float] = {}
    slots: list[list[Slot]] = [[] for _ in range(schedule.stages)]
    went_on = True
    while went_on:
        went_on = False
        for stage, actions in enumerate(schedule.actions):
            for action in islice(actions, len(slots[stage]), None):
                awaited = []
                message = schedule.input_message(stage, action)
                if message is not None:
                    awaited.append(message)
                if action.kind == "backward":
                    awaited.append(StageMessage(stage, action._replace(kind="forward")))
                if not all(one in ended for one in awaited):
                    break
                free = 0.0
                if slots[stage]:
                    free = slots[stage][-1].end
                start = max([free, *(ended[one] for one in awaited)])
                end = start + getattr(cost(stage, action), action.kind)
                slots[stage].append(Slot(start, end, action))
                ended[StageMessage(stage, action)] = end
                went_on = True
    for stage, (done, actions) in enumerate(zip(slots, schedule.actions, strict=True)):
        if len(done) < len(actions):
            raise Deadlock(f"stage {stage} never takes {actions[len(done)]}")
    return Timeline(tuple(map(tuple, slots)))


def passes_in_flight(schedule: Schedule, stage: int) -> dict[tuple[int, ...], int]:
    """Returns how many forward passes of each chunk of a stage wait for their backward pass at the same time.

    One key for each different state of a stage that goes from forward to backward passes. Its value is how many
    messages the stage has sent by the last time that it is in this state.
    """
    counts = [0] * schedule.chunks
    states: dict[tuple[int, ...], int] = {}
    sent = 0
    before = ""
    for action in schedule.actions[stage]:
        if action.kind == "forward":
            counts[action.chunk] += 1
        else:
            if before == "forward":
                states[tuple(counts)] = sent
            counts[action.chunk] -= 1
        before = action.kind
        sent += schedule.receiver(stage, action) is not None
    return states


def max_in_flight(schedule: Schedule, stage: int, chunk: int | None = None) -> int:
    """Returns how many forward passes of a stage, or of one of its chunks, wait for their backward pass at most.

    The stage keeps the activations of these passes.
    """
    most = now = 0
    for action in schedule.actions[stage]:
        if chunk in (None, action.chunk):
            if action.kind == "forward":
                now += 1
            else:
                now -= 1
            most = max(most, now)
    return most


def sequence_pipeline(scheduler: str, stages: int, micro_batches: int, chunks: int, slices: int) -> Schedule:
    """Returns the schedule of one of `SEQUENCE_PIPELINES`, MindSpore's pipelines of slices of sequences.

    A pass takes one slice of a micro-batch's sequences. The slices of a sequence go forward in order, because each
    attends to the keys and values of those before it, and backward in the reverse order. So a pipeline fills as fast as
    one with s times as many micro-batches. With one slice seqpipe and seqvpp are interleaved 1F1B, if the stages divide
    the micro-batches.

    The order is that of `SeqpipeScheduler` in MindSpore's source code (https://github.com/mindspore-ai/mindspore, file
    mindspore/ccsrc/frontend/parallel/pipeline_transformer/seqpipe_scheduler.cc):

    * A stage takes its chunks in turns of micro-batches, each micro-batch slice by slice. A turn has as many
      micro-batches as there are stages; for seqvpp and seqsmartvpp as many slices, so that fewer of them wait.
      Micro-batches that remain make the first turns longer.
    * It starts with (v - 1) turns, s - 1 slices, and one pass for each stage behind it; two with several chunks, but
      for seqsmartvpp. Then forward and backward passes alternate.
    * Backward passes take micro-batches in the order of the forward passes, of each the last slice of the last chunk
      first.
    """
    turns = _equal_turns(micro_batches, turn_size(scheduler, stages, slices))
    forward = [
        Action("forward", number, chunk, part)
        for turn in turns for chunk in range(chunks) for number in turn for part in range(slices)
    ]  # fmt: skip
    first_turns = (chunks - 1) * len(turns[0]) * slices + slices - 1
    passes_of_stage = 2
    if chunks == 1 or scheduler == "seqsmartvpp":
        passes_of_stage = 1
    actions = []
    for stage in range(stages):
        warm_up = min(first_turns + (stages - stage - 1) * passes_of_stage, len(forward) - 1)
        actions.append(tuple(_alternating_slices(forward, warm_up)))
    return Schedule(stages, chunks, tuple(actions))


def turn_size(scheduler: str, stages: int, slices: int) -> int:
    """Returns how many micro-batches a turn of a chunk has, unless some remain."""
    if scheduler == "seqpipe":
        return stages
    return max(1, stages // slices)


def keys_of_slice(number: int, slices: int) -> float:
    """Returns how many keys a slice attends to, relative to the mean of all: later ones have more before them."""
    return (2 * number + 1) / slices


def never_waits_for_ever(scheduler: str, stages: int, slices: int) -> bool:
    """Returns whether no stage waits for ever: a turn of seqvpp with fewer slices than stages may not come around."""
    return scheduler != "seqvpp" or stages % slices == 0


def _equal_turns(micro_batches: int, size: int) -> list[range]:
    """Divides the micro-batches into turns of this size; those that remain make the first turns longer."""
    number = max(1, micro_batches // size)
    share, longer = divmod(micro_batches, number)
    turns = []
    first = 0
    for turn in range(number):
        last = first + share + (turn < longer)
        turns.append(range(first, last))
        first = last
    return turns


def _alternating_slices(forward: Sequence[Action], warm_up: int) -> Iterator[Action]:
    """Yields `warm_up` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    waiting: dict[int, list[Action]] = defaultdict(list)
    for number in range(len(forward) + warm_up):
        if number < len(forward):
            action = forward[number]
            waiting[action.micro_batch].append(action)
            yield action
        if number >= warm_up:
            micro_batch = forward[number - warm_up].micro_batch
            yield waiting[micro_batch].pop()._replace(kind="backward")
