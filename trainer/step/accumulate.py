"""Gradients of a step's micro-batches, normalised once by all loss tokens of the global batch.

On a device nothing is read between micro-batches: one is dispatched while the one before it computes. At the end the
host reads losses, token counts, norms and router rates together, in one small tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from mindspore import Tensor, ops

from trainer.arrays.vocabulary.preferences import REWARDS
from trainer.data.batches.batch import IGNORE_INDEX, Batch
from trainer.ops.measures import metric_functions, read_together
from trainer.ops.routing import RouterRates, RoutingCounts
from trainer.parallel.communicator import Communicator
from trainer.parallel.gradients import GradientReducer, ReducedGradients
from trainer.step.clip import GradientNorms, NormGroups

RankFlags: TypeAlias = Callable[[], Sequence[float]]
"""Returns this rank's flags for all ranks, as numbers; the same count on every rank."""

_TOTALS = "totals"
_LOSS = "loss"
_WEIGHTS = "weights"
_RATES = "rates"
_SQUARES = "squares"
_FLAGS = "rank_flags"
_WAITS = "waits"
_LOW = 4096  # a count travels as two float32 numbers, quotient and remainder by this, and so arrives exactly


@dataclass(frozen=True)
class MicroBatch:
    """Result of one forward and backward pass; its tensors may still be computed.

    Attributes:
        loss_sum: Sum of the token losses; None if another rank reports them.
        other_sums: Auxiliary losses before their factors, by their name in the metrics: the sum (None if another rank
            reports it), and the number of labels to divide it by.
    """

    loss_sum: Tensor | None
    other_sums: Mapping[str, tuple[Tensor | None, float]]
    routing: RoutingCounts | None  # None for a dense model
    gradients: Sequence[Tensor]


class NormContribution(NamedTuple):
    """How a rank with shards of the gradients contributes to the squared norms of all gradients."""

    factors: np.ndarray
    """Factor of the squared norm of each of its gradients, [P]: 1 if this rank counts it, 0 if another rank does."""
    places: Sequence[int]
    """Index of this rank's gradient for each trained parameter of the model; P where only other ranks have it."""


PipelineRun: TypeAlias = "Callable[[Sequence[int], Tensor, MicroBatchTotals], tuple[list[Tensor], float | None]]"
"""(numbers of micro-batches, factor, their totals, which it adds to) -> the sums of this rank's gradients over the
micro-batches, and the share of the time in which it waited for other stages, which is None on a device."""


@dataclass(frozen=True)
class StepGradients:
    """Loss, tokens and gradients of one step.

    Attributes:
        loss: Mean loss of the loss tokens in nats, with the weights that they have; or mean loss of the pairs.
        tokens: Loss tokens of the global batch.
        empty: Micro-batches of all ranks without a loss token.
        gradients: Gradients of the minimised loss times the loss scale, one for each parameter; None if the global
            batch has no loss token.
        others: Auxiliary losses by name, before their factors, each a mean over its labels. A mean reward of answers
            that the global batch lacks is left out.
        routing: Counts over all ranks, tensors on a device.
        norms: Norms of the gradients, if they were requested.
        reduce_seconds: Time to sum the gradients over the ranks, including the wait for the last rank; None where
            they are summed during the backward pass.
        rank_flags: Sums of the flags over the ranks, if they were requested.
        bubble_share: Share of the time of forward and backward passes in which a stage of a pipeline waited for others,
            mean over the ranks; None without a pipeline.
    """

    loss: float
    tokens: int
    empty: int
    gradients: Sequence[Tensor] | None
    others: Mapping[str, float] = field(default_factory=dict)
    routing: RoutingCounts | None = None
    router_rates: RouterRates | None = None
    norms: GradientNorms | None = None
    reduce_seconds: float | None = None
    rank_flags: Sequence[float] | None = None
    bubble_share: float | None = None


def count_loss_tokens(batch: Batch) -> int:
    """Counts the loss tokens of a batch: the labels that are not masked."""
    return int(np.count_nonzero(batch.labels != IGNORE_INDEX))


def accumulate(
    micro_batches: Sequence[Batch], backward: Callable[[Batch, int, Tensor], MicroBatch], loss_scale: float = 1.0,
    communicator: Communicator | None = None, skips_empty: bool = True, reducer: GradientReducer | None = None,
    norm_groups: NormGroups | None = None, rank_flags: RankFlags | None = None,
    norm_contribution: NormContribution | None = None, run_pipeline: PipelineRun | None = None,
    count_items: Callable[[Batch], float] = count_loss_tokens,
) -> StepGradients:  # fmt: skip
    """Runs forward and backward passes of a step, and sums gradients over its micro-batches and then over the ranks.

    The loss tokens of all ranks are summed before the first backward pass; on a device the host does not wait for it.
    Every micro-batch's loss is divided by that total, so the summed gradients equal those of one large batch, however
    the tokens are distributed.

    Args:
        micro_batches: This rank's micro-batches; all ranks have equally many. The last step of an epoch may have fewer.
        backward: (batch, its number in the step, loss scale / tokens of the global batch) -> losses as sums over
            tokens, and their gradients times the factor. It is not called for a micro-batch without a loss token, whose
            gradient is zero, unless all of this rank's are: every rank must take part in the sums.
        skips_empty: False: `backward` is called for all micro-batches, as every rank takes part in sums of each.
        reducer: Sums the gradients over the ranks; None: for a single process.
        norm_groups: The norms to compute; None: no norms.
        rank_flags: Called after the last backward pass; its numbers travel with the sums.
        norm_contribution: None where each rank has the summed gradients of all parameters.
        run_pipeline: Computes all micro-batches in place of `backward`.
        count_items: Counts what the loss of a batch is a sum over, or sums their weights; the text above says "loss
            tokens" for these.
    """
    if communicator is None:
        communicator = Communicator()
    if reducer is None:
        reducer = GradientReducer()
    counts = [count_items(batch) for batch in micro_batches]
    local_counts: list[float] = [0, 0]
    if communicator.reports_tokens:
        local_counts = [sum(counts), counts.count(0)]
    if count_items is not count_loss_tokens:
        local_counts.append(communicator.reports_tokens * sum(map(count_loss_tokens, micro_batches)))
    [totals] = communicator.all_reduce([np.array([divmod(count, _LOW) for count in local_counts], np.float64)])
    if not isinstance(totals, Tensor) and not totals[0].any():
        return StepGradients(0.0, 0, _count(totals[1]), None, reduce_seconds=0.0)
    factor = _factor(loss_scale, totals)
    numbers = [number for number, count in enumerate(counts) if count or not skips_empty] or [0]
    results = MicroBatchTotals()
    if run_pipeline is not None:
        total, results.waits = run_pipeline(numbers, factor, results)
        reduced = reducer.reduce_total(total)
    else:
        reduced = _run_in_turn(micro_batches, numbers, backward, factor, reducer, results)
    return _reduce_and_read(
        totals, sum(counts), results, reduced, communicator, norm_groups, rank_flags, norm_contribution
    )


def _run_in_turn(
    micro_batches: Sequence[Batch], numbers: Sequence[int], backward: Callable[[Batch, int, Tensor], MicroBatch],
    factor: Tensor, reducer: GradientReducer, results: MicroBatchTotals,
) -> ReducedGradients:  # fmt: skip
    """Runs the micro-batches with these numbers one after the other."""
    total = None
    for number in numbers[:-1]:
        result, total = reducer.add(total, partial(backward, micro_batches[number], number, factor))
        results.add(result)
    last = numbers[-1]
    result, reduced = reducer.add_last(total, partial(backward, micro_batches[last], last, factor))
    results.add(result)
    return reduced


class MicroBatchTotals:
    """The results of a step's micro-batches, apart from their gradients."""

    def __init__(self) -> None:
        self.losses: list[Tensor | float] = []
        self.others: dict[str, list[tuple[Tensor | float, float]]] = {}
        self.routing: RoutingCounts | None = None
        self.waits: float | None = None  # share of the time, in a pipeline on CPUs

    def add(self, result: MicroBatch) -> None:
        """Adds the result of a micro-batch, or of a stage's part of it."""
        keep = metric_functions().keep_scalar
        if result.loss_sum is not None:
            self.losses.append(keep(result.loss_sum))
        for name, (value, weight) in result.other_sums.items():
            kept = 0.0
            if value is not None:
                kept = keep(value)
            self.others.setdefault(name, []).append((kept, weight))
        if result.routing is not None:
            if self.routing is None:
                self.routing = result.routing
            else:
                self.routing = self.routing + result.routing


def _reduce_and_read(
    totals: np.ndarray | Tensor, local_items: float, results: MicroBatchTotals, reduced: ReducedGradients,
    communicator: Communicator, norm_groups: NormGroups | None, rank_flags: RankFlags | None,
    norm_contribution: NormContribution | None,
) -> StepGradients:  # fmt: skip
    """Sums the results over the ranks and copies what the host needs to the host."""
    measures = metric_functions()
    others = results.others
    routing = results.routing
    sums = {name: measures.sum_scalars([value for value, _ in pairs]) for name, pairs in others.items()}
    if results.losses:
        sums[_LOSS] = measures.sum_scalars(results.losses)
    else:
        sums[_LOSS] = 0.0
    if others:
        sums[_WEIGHTS] = np.array([sum(weight for _, weight in pairs) for pairs in others.values()], np.float64)
    if routing is not None:
        sums |= {"kept": routing.kept, "requested": routing.requested, "entropy_sum": routing.entropy_sum}
    if rank_flags is not None:
        sums[_FLAGS] = np.array(rank_flags(), np.float64)
    if results.waits is not None:
        sums[_WAITS] = results.waits / communicator.size
    squares = None
    if norm_groups is not None:
        squares = measures.squares(reduced.gradients)
    if squares is not None and norm_contribution is not None:
        sums[_SQUARES] = measures.scatter_squares(squares, norm_contribution.factors, norm_contribution.places)
    sums = dict(zip(sums, communicator.all_reduce(list(sums.values())), strict=True))
    squares = sums.pop(_SQUARES, squares)
    to_read = {_TOTALS: totals}
    if routing is not None:
        routing = RoutingCounts(routing.layers, sums.pop("kept"), sums.pop("requested"), sums.pop("entropy_sum"))
        to_read[_RATES] = measures.router_rates(routing)
    if norm_groups is not None:
        groups = list(norm_groups.groups.values())
        to_read[_SQUARES] = measures.square_sums(squares, groups, bool(norm_groups.per_gradient))
    to_read |= sums
    read = dict(zip(to_read, read_together(list(to_read.values())), strict=True))
    items = _amount(read[_TOTALS][0])
    empty = _count(read[_TOTALS][1])
    items = max(items, local_items)  # a step with gradients is never taken for an empty one
    tokens = int(items)
    if len(read[_TOTALS]) > 2:  # the items are pairs, or weights
        tokens = _count(read[_TOTALS][2])
    flags = None
    if _FLAGS in read:
        flags = read[_FLAGS].tolist()
    if items == 0:
        return StepGradients(0.0, 0, empty, None, rank_flags=flags)
    weights = read.get(_WEIGHTS, ())
    router_rates = None
    if routing is not None:
        router_rates = RouterRates(routing.layers, *read[_RATES])
    norms = None
    if norm_groups is not None:
        norms = norm_groups.norms(read[_SQUARES])
    bubble_share = None
    if _WAITS in read:
        bubble_share = float(read[_WAITS])
    return StepGradients(
        loss=float(read[_LOSS]) / items,
        tokens=tokens,
        empty=empty,
        gradients=reduced.gradients,
        others={
            name: float(read[name]) / (weight or 1)  # weights of records may sum to less than 1
            for name, weight in zip(others, weights, strict=True)
            if weight or name not in REWARDS
        },
        routing=routing,
        router_rates=router_rates,
        norms=norms,
        reduce_seconds=reduced.seconds,
        rank_flags=flags,
        bubble_share=bubble_share,
    )


def _count(high_and_low: np.ndarray) -> int:
    return int(_amount(high_and_low))


def _amount(high_and_low: np.ndarray) -> float:
    """Returns a count, or a sum of weights, from its quotient and remainder by `_LOW`."""
    return float(high_and_low[0]) * _LOW + float(high_and_low[1])


def _factor(loss_scale: float, totals: np.ndarray | Tensor) -> Tensor:
    """Returns loss scale / loss tokens as a tensor.

    MindSpore keeps a kernel for every new Python number that an operator gets.
    """
    if not isinstance(totals, Tensor):
        return Tensor(np.float32(loss_scale / _amount(totals[0])))
    tokens = (totals[0] * Tensor(np.array([_LOW, 1], np.float32))).sum()
    return Tensor(np.float32(loss_scale)) / ops.maximum(tokens, Tensor(np.float32(1)))
