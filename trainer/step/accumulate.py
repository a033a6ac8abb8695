"""Gradients of a window of micro-batches, normalised once by all valid tokens of the window.

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

from trainer.data.batches.batch import IGNORE_INDEX, Batch
from trainer.ops.measures import metric_functions, read_together
from trainer.ops.routing import RouterRates, RoutingCounts
from trainer.parallel.communicator import Communicator
from trainer.parallel.gradients import GradientReducer, ReducedGradients
from trainer.step.clip import GradientNorms, NormGroups

RankFlags: TypeAlias = Callable[[], Sequence[float]]
"""What this rank has to say to all others, as numbers; the same count on every rank."""

_TOTALS = "totals"
_LOSS = "loss"
_WEIGHTS = "weights"
_RATES = "rates"
_SQUARES = "squares"
_VOTES = "rank_flags"
_WAITS = "waits"
_LOW = 4096  # a count travels as two float32 numbers, its multiple of this and the rest, and so arrives exactly


@dataclass(frozen=True)
class MicroBatch:
    """Result of one forward and backward pass; its tensors may still be computed.

    Attributes:
        loss_sum: Sum of the token losses.
        other_sums: Auxiliary losses before their factors, by their name in the metrics: the sum, and the number of
            labels to divide it by.
    """

    loss_sum: Tensor
    other_sums: Mapping[str, tuple[Tensor, float]]
    routing: RoutingCounts | None  # None for a dense model
    gradients: Sequence[Tensor]


class NormContribution(NamedTuple):
    """What a rank that has shards of the gradients contributes to the squares of their norms."""

    factors: np.ndarray
    """Of the squared norm of each of its gradients, [P]: 1 where this rank counts it, 0 where another one does."""
    places: Sequence[int]
    """For each trained parameter of the whole model the index of its gradient here; P for one of other ranks."""


PipelineRun: TypeAlias = "Callable[[Sequence[int], Tensor, MicroBatchTotals], tuple[list[Tensor], float]]"
"""(numbers of micro-batches, factor, what takes their results) -> the sums of this rank's gradients over the
micro-batches, and the share of the time in which it waited for other stages."""


@dataclass(frozen=True)
class StepGradients:
    """Loss, tokens and gradients of one window.

    Attributes:
        loss: Sum of token losses / valid tokens, in nats.
        tokens: Valid tokens of the window.
        empty: Micro-batches of the window without a valid token, on all ranks.
        gradients: Gradients of the minimised loss times the loss scale, one for each parameter; None when the window
            has no valid token.
        others: Auxiliary losses by name, each the mean over its own labels, before their factors.
        routing: Counts over all ranks, tensors on a device.
        norms: Of the gradients, if they were asked for.
        reduce_seconds: Time to sum the gradients over the ranks, including the wait for the last rank; None where
            they are summed during the backward pass.
        rank_flags: Sums over the ranks of what each was asked for; None if it was not asked.
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
    """Number of labels that carry a loss."""
    return int(np.count_nonzero(batch.labels != IGNORE_INDEX))


def accumulate(
    micro_batches: Sequence[Batch],
    backward: Callable[[Batch, int, Tensor], MicroBatch],
    loss_scale: float = 1.0,
    communicator: Communicator | None = None,
    skips_empty: bool = True,
    reducer: GradientReducer | None = None,
    norm_groups: NormGroups | None = None,
    rank_flags: RankFlags | None = None,
    norm_contribution: NormContribution | None = None,
    run_pipeline: PipelineRun | None = None,
) -> StepGradients:
    """Forward and backward over a window, summing gradients over its micro-batches and then over the ranks.

    The number of valid tokens of all ranks is summed before the first backward pass; on a device the host does not
    wait for it. Every micro-batch's loss is divided by that total, so the summed gradients equal those of one large
    batch, however the tokens are distributed.

    Args:
        micro_batches: This rank's window; all ranks have equally many. The last window of an epoch may be shorter.
        backward: (batch, its number in the window, loss scale / tokens of the window) -> losses as sums over tokens,
            and their gradients times the factor. It is not called for a micro-batch without a valid token, whose
            gradient is zero, unless this rank has no other one: every rank must take part in the sums.
        skips_empty: False: it is called for those too, as every rank takes part in sums of each micro-batch.
        reducer: Sums the gradients over the ranks; None: those of a single process.
        norm_groups: Asks for norms of the gradients.
        rank_flags: Asked after the last backward pass; its numbers travel with the sums.
        norm_contribution: None where each rank has the summed gradients of the whole model.
        run_pipeline: Computes the whole window in place of `backward`.
    """
    if communicator is None:
        communicator = Communicator()
    if reducer is None:
        reducer = GradientReducer()
    counts = [count_loss_tokens(batch) for batch in micro_batches]
    if communicator.reports_tokens:
        given = (sum(counts), counts.count(0))
    else:
        given = (0, 0)
    [totals] = communicator.all_reduce([np.array([divmod(count, _LOW) for count in given])])
    if not isinstance(totals, Tensor) and not totals[0].any():
        return StepGradients(0.0, 0, _count(totals[1]), None, reduce_seconds=0.0)
    factor = _factor(loss_scale, totals)
    taken = [number for number, count in enumerate(counts) if count or not skips_empty] or [0]
    results = MicroBatchTotals()
    if run_pipeline is not None:
        total, results.waits = run_pipeline(taken, factor, results)
        reduced = reducer.reduce_total(total)
    else:
        reduced = _in_turn(micro_batches, taken, backward, factor, reducer, results)
    return _window(totals, sum(counts), results, reduced, communicator, norm_groups, rank_flags, norm_contribution)


def _in_turn(
    micro_batches: Sequence[Batch],
    taken: Sequence[int],
    backward: Callable[[Batch, int, Tensor], MicroBatch],
    factor: Tensor,
    reducer: GradientReducer,
    results: MicroBatchTotals,
) -> ReducedGradients:
    """One micro-batch after the other."""
    total = None
    for number in taken:
        run = partial(backward, micro_batches[number], number, factor)
        if number == taken[-1]:
            part, reduced = reducer.add_last(total, run)
        else:
            part, total = reducer.add(total, run)
        results.add(part)
    return reduced


class MicroBatchTotals:
    """What micro-batches have computed, apart from their gradients."""

    def __init__(self) -> None:
        self.losses: list[Tensor | float] = []
        self.others: dict[str, list[tuple[Tensor | float, float]]] = {}
        self.routing: RoutingCounts | None = None
        self.waits: float | None = None  # share of the time, in a pipeline

    def add(self, part: MicroBatch) -> None:
        """A part of a pipeline gives the losses that it computes; None for the token losses of another one."""
        keep = metric_functions().keep_scalar
        if part.loss_sum is not None:
            self.losses.append(keep(part.loss_sum))
        for name, (value, weight) in part.other_sums.items():
            self.others.setdefault(name, []).append((0.0 if value is None else keep(value), weight))
        if part.routing is not None:
            if self.routing is None:
                self.routing = part.routing
            else:
                self.routing = self.routing + part.routing


def _window(
    totals: np.ndarray | Tensor,
    local_token_ids: int,
    results: MicroBatchTotals,
    reduced: ReducedGradients,
    communicator: Communicator,
    wanted: NormGroups | None,
    rank_flags: RankFlags | None,
    norm_contribution: NormContribution | None,
) -> StepGradients:
    """Sums the results over the ranks and reads what the host needs of them."""
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
        sums[_VOTES] = np.array(rank_flags(), np.float64)
    if results.waits is not None:
        sums[_WAITS] = results.waits / communicator.size
    if wanted is None:
        squares = None
    else:
        squares = measures.squares(reduced.gradients)
    if squares is not None and norm_contribution is not None:
        sums[_SQUARES] = measures.scatter_squares(squares, norm_contribution.factors, norm_contribution.places)
    sums = dict(zip(sums, communicator.all_reduce(list(sums.values())), strict=True))
    squares = sums.pop(_SQUARES, squares)
    to_read = {_TOTALS: totals}
    if routing is not None:
        routing = RoutingCounts(routing.layers, sums.pop("kept"), sums.pop("requested"), sums.pop("entropy_sum"))
        to_read[_RATES] = measures.router_rates(routing)
    if squares is not None:
        to_read[_SQUARES] = measures.square_sums(squares, list(wanted.groups.values()), wanted.each)
    to_read |= sums
    read = dict(zip(to_read, read_together(list(to_read.values())), strict=True))
    tokens = _count(read[_TOTALS][0])
    empty = _count(read[_TOTALS][1])
    tokens = max(tokens, local_token_ids)  # a window that has gradients is never taken for an empty one
    if tokens == 0:
        return StepGradients(0.0, 0, empty, None, rank_flags=read.get(_VOTES))
    weights = read.get(_WEIGHTS, ())
    return StepGradients(
        loss=float(read[_LOSS]) / tokens,
        tokens=tokens,
        empty=empty,
        gradients=reduced.gradients,
        others={name: float(read[name]) / max(weight, 1) for name, weight in zip(others, weights, strict=True)},
        routing=routing,
        router_rates=None if routing is None else RouterRates(routing.layers, *read[_RATES]),
        norms=None if squares is None else wanted.norms(read[_SQUARES]),
        reduce_seconds=reduced.seconds,
        rank_flags=read.get(_VOTES),
        bubble_share=None if results.waits is None else float(read[_WAITS]),
    )


def _count(high_and_low: np.ndarray) -> int:
    return int(high_and_low[0]) * _LOW + int(high_and_low[1])


def _factor(loss_scale: float, totals: np.ndarray | Tensor) -> Tensor:
    """The loss scale over all valid tokens. As a tensor: MindSpore keeps a kernel for every new Python number that an
    operator gets."""
    if not isinstance(totals, Tensor):
        return Tensor(np.float32(loss_scale / _count(totals[0])))
    tokens = (totals[0] * Tensor(np.array([_LOW, 1], np.float32))).sum()
    return Tensor(np.float32(loss_scale)) / ops.maximum(tokens, Tensor(np.float32(1)))
