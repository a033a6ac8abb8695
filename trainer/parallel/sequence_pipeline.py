"""The schedules of MindSpore's sequence pipelines: seqpipe, seqvpp and seqsmartvpp. Pure Python.

A pass takes one slice of a micro-batch's sequences. The slices of a sequence go forward in order, because each attends
to the keys and values of those before it, and backward in the reverse order. So a pipeline fills as fast as one with s
times as many micro-batches, for s slices. With one slice seqpipe and seqvpp are interleaved 1F1B, if the stages divide
the micro-batches.

The order is that of `SeqpipeScheduler` in MindSpore's source code (https://github.com/mindspore-ai/mindspore, file
mindspore/ccsrc/frontend/parallel/pipeline_transformer/seqpipe_scheduler.cc):

* A stage takes its chunks in turns of micro-batches, each micro-batch slice by slice. A turn has as many micro-batches
  as there are stages; for seqvpp and seqsmartvpp as many slices, so that fewer of them wait. Micro-batches that remain
  make the first turns longer.
* It starts with (v - 1) turns, s - 1 slices, and one pass for each stage behind it; two with several chunks, but for
  seqsmartvpp. Then forward and backward passes alternate.
* Backward passes take micro-batches in the order of the forward passes, of each the last slice of the last chunk first.

Legend: p stages, m micro-batches, v chunks of a stage, s slices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from trainer.parallel.schedule import Action, Schedule

SEQUENCE_PIPELINES = ("seqpipe", "seqvpp", "seqsmartvpp")


def sequence_pipeline(scheduler: str, stages: int, micro_batches: int, chunks: int, slices: int) -> Schedule:
    """Returns the schedule of one of `SEQUENCE_PIPELINES`."""
    turns = _turns(micro_batches, turn_size(scheduler, stages, slices))
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
        actions.append(tuple(_alternating(forward, warm_up)))
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


def _turns(micro_batches: int, size: int) -> list[range]:
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


def _alternating(forward: Sequence[Action], warm_up: int) -> Iterator[Action]:
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
