"""Compares two traces: which tensors of which ranks differ by more than rounding explains, in the order of a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np

from trainer.errors import UserError
from trainer.trace.bounds import UNIT_ROUNDOFFS, Rounding, coarsest
from trainer.trace.folder import JoinedTensor, Trace, join_pieces, joined_scale, layer_of, position, right_keys
from trainer.trace.record import Key, Piece
from trainer.trace.sketch import Summary, as_numbers, cell_bounds, deviation, join_summaries

_CHUNK = 1 << 20  # numbers of a file that are in memory at once
_STATISTICS = 1e-6
_OF_A_SEQUENCE = ("weight", "activation", "choice")
"""Kinds that do not depend on the other sequences of the batch."""
_FEW_TOKENS = 2.0  # whose two best experts may be equally good by chance
_FLIPS = 24.0
"""The share of tokens whose choice of experts rounding may change, in units of the rounding of the router's input."""


class LargestDifference(NamedTuple):
    """The element in which two tensors differ most."""

    row: int
    column: int
    right: float
    other: float


@dataclass(frozen=True)
class Row:
    """How much a tensor differs; of the sequences of a step, the one that differs most.

    Attributes:
        deviation: The norm of the difference relative to the norm; infinite where numbers are not finite.
        bound: The deviation that rounding explains.
        ranks: The ranks whose numbers differ by more than that; all that have the tensor if it cannot be told.
        holders: The ranks that have the tensor in the other trace.
        sequences: How many sequences differ by more than the bound, and how many there are.
        lost: Why its numbers cannot be compared: some are missing, or shapes differ; "" if they can.
        by_statistics: Whether only statistics were there to compare, which show less.
        largest: None where the tensors themselves are not in both traces.
    """

    key: Key
    layer: int | None
    deviation: float
    bound: float
    ranks: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()
    sequences: tuple[int, int] = (0, 1)
    lost: str = ""
    by_statistics: bool = False
    largest: LargestDifference | None = None

    @property
    def is_beyond(self) -> bool:
        """Returns whether rounding does not explain the difference."""
        return bool(self.lost) or not self.deviation <= self.bound


class BatchDifference(NamedTuple):
    """How the batches of a step differ.

    Attributes:
        common, right, other: Numbers of sequences in both traces, in the right and in the other one.
        only_right, only_other: The micro-batches with sequences that one trace alone has.
    """

    common: int
    right: int
    other: int
    only_right: Sequence[str]
    only_other: Sequence[str]


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison; rows are in the order in which a step computes.

    Attributes:
        only_right, only_other: Names of tensors, with their kinds, that one trace alone has.
        divided: Names of tensors that both have, but of other micro-batches.
        steps_right, steps_other: Steps that one trace alone has.
        batches: The steps whose batches differ. Their losses and gradients are not compared.
    """

    right: Trace
    other: Trace
    rounding: Rounding
    rows: Sequence[Row]
    only_right: Sequence[str]
    only_other: Sequence[str]
    divided: Sequence[str]
    steps_right: Sequence[int]
    steps_other: Sequence[int]
    batches: Mapping[int, BatchDifference]

    @property
    def differing(self) -> list[Row]:
        """Returns the rows that rounding does not explain."""
        return [row for row in self.rows if row.is_beyond]

    @property
    def is_same_path(self) -> bool:
        """Returns whether rounding explains every difference, and no rank and no sequence is missing."""
        return not (self.differing or self.batches or self.other.lost or self.right.lost)


def compare_traces(right: Trace, other: Trace) -> Comparison:
    """Compares a trace with one whose numbers are right.

    Raises:
        UserError: They have no tensor in common, or no sequence of the batch.
    """
    rounding = _rounding(right, other)
    comparer = _Comparer(right, other, rounding)
    keys = sorted(set(other.pieces), key=position)
    common = [key for key in keys if comparer.has_right(key)]
    if not common:
        rule = "has no tensor that --output has, too"
        fix = "compare traces of one model, or a dump of it"
        raise UserError(rule, where="flag --against", value=str(other.folder), fix=fix)
    if any(key.kind == "activation" for key in keys) and all(key.kind != "activation" for key in common):
        rule = "no sequence of the batch is in both traces, so that nothing that a layer computes can be compared"
        fix = "give both runs the same data, seed, and sequences of a step: batch_size x accumulation x replicas"
        raise UserError(rule, where="flag --against", value=str(other.folder), fix=fix)
    batches = _different_batches(right, other)
    common = [key for key in common if key.step not in batches or key.kind in _OF_A_SEQUENCE]
    by_tensor: dict[tuple[int, str, str], list[Row]] = {}
    for key in common:
        by_tensor.setdefault(key[:3], []).append(comparer.compare(key))
    rows = [_worst(group) for group in by_tensor.values()]
    rows.sort(key=lambda row: position(row.key))
    names = [{key[:3] for key in trace.pieces} for trace in (right, other)]
    steps = [{step for step, _, _ in each} for each in names]
    of_both = steps[0] & steps[1]
    ours, theirs = ({f"{kind} {name}" for step, kind, name in each if step in of_both} for each in names)
    of_both -= batches.keys()
    divided = {f"{kind} {name}" for step, kind, name in (names[0] & names[1]) - by_tensor.keys() if step in of_both}
    return Comparison(
        right, other, rounding, rows, sorted(ours - theirs), sorted(theirs - ours), sorted(divided),
        sorted(steps[0] - steps[1]), sorted(steps[1] - steps[0]), batches,
    )  # fmt: skip


def _different_batches(right: Trace, other: Trace) -> dict[int, BatchDifference]:
    """Returns the steps of both traces whose batches differ."""
    by_step: list[dict[int, set[str]]] = []
    for trace in (right, other):
        sequences: dict[int, set[str]] = {}
        for key in trace.pieces:
            if key.kind == "activation":
                sequences.setdefault(key.step, set()).update(key.sequence.split("+"))
        by_step.append(sequences)
    differences = {}
    for step, ours in by_step[0].items():
        theirs = by_step[1].get(step, ours)
        if theirs != ours:
            differences[step] = BatchDifference(
                len(ours & theirs), len(ours), len(theirs), _micro_batches_beyond(right, step, theirs),
                _micro_batches_beyond(other, step, ours),
            )  # fmt: skip
    return differences


def _micro_batches_beyond(trace: Trace, step: int, sequences: Collection[str]) -> list[str]:
    """Returns the micro-batches of a step with other sequences than these; of ranks that share one, the first."""
    micro_batches: dict[tuple[str, ...], str] = {}
    for rank, steps in sorted(trace.micro_batches.items()):
        for number, micro_batch in enumerate(chain(*steps[step - 1 : step]), 1):
            if not set(micro_batch) <= set(sequences):
                micro_batches.setdefault(tuple(micro_batch), f"{number} of rank {rank}")
    return list(micro_batches.values())


def _rounding(right: Trace, other: Trace) -> Rounding:
    """Returns what is known about the rounding of both runs."""
    facts = right.facts
    dtypes = [facts["compute_dtype"], other.facts.get("compute_dtype", facts["compute_dtype"])]
    rates = [trace.facts.get("learning_rates", []) for trace in (right, other)]
    for step, (ours, theirs) in enumerate(zip(*rates, strict=False), 1):
        if ours != theirs:
            rule = f"has learning rate {theirs:g} in step {step}, and --output {ours:g}, so that weights must differ"
            raise UserError(rule, where="flag --against", value=str(other.folder), fix="give both runs one lr_schedule")
    matrices = [pieces[0].summary for key, pieces in right.pieces.items()
                if key.kind == "weight" and pieces[0].place.shape[1] > 1]  # fmt: skip
    drift = max((2 / each.norm * math.sqrt(each.size) for each in matrices if each.norm > 0), default=0.0)
    rates_of_both = list(map(max, zip_longest(*rates, fillvalue=0.0)))
    return Rounding(coarsest(dtypes), facts["layers"], facts["summands"], rates_of_both, drift)


def _worst(rows: Sequence[Row]) -> Row:
    """Returns the row of the sequence that differs most; those that differ are counted."""
    beyond = sum(row.is_beyond for row in rows)
    worst = max(rows, key=lambda row: (bool(row.lost), row.deviation / row.bound))
    ranks = sorted({rank for row in rows if row.is_beyond for rank in row.ranks})
    holders = sorted({rank for row in rows for rank in row.holders})
    return replace(worst, sequences=(beyond, len(rows)), ranks=tuple(ranks), holders=tuple(holders))


class _Comparer:
    """Compares tensors of two traces."""

    def __init__(self, right: Trace, other: Trace, rounding: Rounding) -> None:
        self.right = right
        self.other = other
        self.rounding = rounding
        self.flipped = self._flipped()

    def has_right(self, key: Key) -> bool:
        """Returns whether the right trace has a tensor, or all sequences of a batch of it."""
        return all(part in self.right.pieces for part in right_keys(key, self.right))

    def _right_tensor(self, key: Key) -> JoinedTensor:
        tensors = [join_pieces(self.right.pieces[part]) for part in right_keys(key, self.right)]
        if len(tensors) == 1:
            return tensors[0]
        joined = join_summaries([tensor.summary for tensor in tensors])
        shape = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        if key.kind == "loss":  # the sum over the tokens of a micro-batch
            total = sum(tensor.summary.mean for tensor in tensors)
            joined = Summary(1, total, total, total, abs(total))
            shape = tensors[0].shape
        scale = joined_scale(tensors)
        is_complete = all(tensor.is_complete for tensor in tensors)
        return JoinedTensor(shape, replace(joined, sketch=None), [], is_complete, scale)

    def compare(self, key: Key) -> Row:
        """Compares a tensor."""
        right = self._right_tensor(key)
        pieces = self.other.pieces[key]
        other = join_pieces(pieces)
        layer = layer_of(key.name)
        holders = tuple(sorted({piece.rank for piece in pieces}))
        ranks = holders
        bound = self._bound(key, layer, right, pieces)
        lost = ""
        if right.shape != other.shape:
            lost = f"shapes differ: {_shape_text(other.shape)}, right is {_shape_text(right.shape)}"
        elif not other.is_complete:
            ranks, lost = self._lost_ranks(key, pieces)
        elif not right.is_complete:
            ranks = ()
            lost = "the right trace lacks numbers of it"
        if lost:
            return Row(key, layer, math.inf, bound, ranks, holders, (1, 1), lost)
        if key.kind == "choice":
            share = _flip_share(right.distinct, other.distinct)
            return Row(key, layer, share, self._flip_bound(key, layer, right), holders, holders)
        by_statistics = right.summary.sketch is None or other.summary.sketch is None
        by_statistics &= right.summary.size > 1  # those of one number are the number
        if by_statistics:  # the other program has computed them, in float32 or in the dtype of the tensor
            bound += 2 * max(UNIT_ROUNDOFFS.get(piece.dtype, 0.0) for piece in pieces) + _STATISTICS
        measured = deviation(right.summary, other.summary)
        if not by_statistics:
            by_rank = _deviations_of_ranks(right.summary, pieces)
            worst = max(by_rank.values(), default=0.0)
            if len(holders) > 1 and len(by_rank) == len(holders) and worst > bound:
                ranks = tuple(rank for rank, one in sorted(by_rank.items()) if one > bound)
                measured = max(measured, worst)
        largest = None
        if measured > bound:
            largest = _largest_difference(right.distinct, pieces, ranks)
        return Row(key, layer, measured, bound, ranks, holders, by_statistics=by_statistics, largest=largest)

    def _bound(self, key: Key, layer: int | None, right: JoinedTensor, pieces: Sequence[Piece]) -> float:
        stored = coarsest(piece.dtype for piece in (*right.distinct, *pieces))
        bound = self.rounding.bound(key, layer, stored, right.summary, right.scale)
        return bound + 2 * math.sqrt(self._flips_before(key, layer))

    def _lost_ranks(self, key: Key, pieces: Sequence[Piece]) -> tuple[tuple[int, ...], str]:
        """Returns the ranks that should have the missing numbers of a tensor, and a sentence about them."""
        having = {piece.rank for piece in pieces}
        axes = ["pipeline", "data"]
        if key.kind in ("weight", "gradient"):
            axes = ["pipeline"]
        where = {tuple(self.other.coordinates[rank][axis] for axis in axes) for rank in having
                 if self.other.coordinates.get(rank)}  # fmt: skip
        lacking = [
            rank
            for rank, coordinate in self.other.coordinates.items()
            if coordinate and rank not in having and tuple(coordinate[axis] for axis in axes) in where
        ]
        lacking += [rank for rank in self.other.lost if rank not in having]
        if not lacking:
            return tuple(sorted(having)), "its shards do not make up the tensor"
        names = ", ".join(map(str, sorted(lacking)))
        return tuple(sorted(lacking)), f"no shard of rank {names}"

    # Routers: where two experts are nearly as good, rounding decides, and the output of the layer changes for a token.

    def _flipped(self) -> dict[tuple[int, int, str], float]:
        """Returns the share of tokens with other experts by step, layer and sequence, up to what rounding explains."""
        flipped = {}
        for key, pieces in self.other.pieces.items():
            layer = layer_of(key.name)
            if key.kind != "choice" or layer is None or key not in self.right.pieces:
                continue
            right = join_pieces(self.right.pieces[key])
            other = join_pieces(pieces)
            if right.is_complete and other.is_complete:
                share = _flip_share(right.distinct, other.distinct)
                flipped[key.step, layer, key.sequence] = min(share, self._flip_bound(key, layer, right))
        return flipped

    def _flip_bound(self, key: Key, layer: int | None, right: JoinedTensor) -> float:
        tokens, choices = right.distinct[0].place.shape
        rounding = self.rounding.bound(key, layer, "float32", right.summary)
        return min(0.5, _FEW_TOKENS / tokens + _FLIPS / 6 * choices * rounding)

    def _flips_before(self, key: Key, layer: int | None) -> float:
        """Returns the share of tokens whose experts have changed before a tensor."""
        if not self.flipped or key.kind == "weight":
            return 0.0
        chosen = [
            share
            for (step, at, sequence), share in self.flipped.items()
            if step == key.step
            and (not key.sequence or sequence in key.sequence)
            and (key.kind != "activation" or layer is None or at <= layer)
        ]
        if key.sequence:
            return sum(chosen)
        sequences = {sequence for step, _, sequence in self.flipped if step == key.step}
        return sum(chosen) / max(1, len(sequences))


def _shape_text(shape: tuple[int, int]) -> str:
    """Returns the shape of a tensor, of a vector without the column that stands for it."""
    if shape[1] == 1:
        return f"[{shape[0]}]"
    return f"[{shape[0]}, {shape[1]}]"


def _deviations_of_ranks(right: Summary, pieces: Sequence[Piece]) -> dict[int, float]:
    """Returns how much the numbers of each rank differ; a rank whose numbers cannot be told apart is missing."""
    by_rank: dict[int, float] = {}
    for piece in pieces:
        if piece.summary.sketch is None:
            continue
        if piece.place.is_whole:
            measured = deviation(right, piece.summary)
        else:
            cells = piece.place.covered_cells()
            if right.sketch is None or not cells.any() or not _covers(piece, cells):
                continue
            measured = deviation(replace(right, checksum=None), piece.summary, cells)
        by_rank[piece.rank] = max(measured, by_rank.get(piece.rank, 0.0))
    return by_rank


def _covers(piece: Piece, cells: np.ndarray) -> bool:
    """Returns whether cells have all numbers of a piece."""
    rows, columns = (np.diff(cell_bounds(size)) for size in piece.place.shape)
    return bool(np.outer(rows, columns)[cells].sum() == piece.place.size)


def _assemble(pieces: Sequence[Piece]) -> np.ndarray | None:
    """Returns a small tensor from the files of its pieces."""
    shape = pieces[0].place.shape
    array = np.full(shape, np.nan, np.float32)
    for piece in pieces:
        if piece.file is None:
            return None
        array[piece.place.row_indices(), slice(*piece.place.columns)] = open_array(piece)[...]
    return array


def open_array(piece: Piece) -> np.ndarray:
    """Opens the file of a piece, [r, c]; the numbers stay on disk."""
    assert piece.file is not None
    rows = sum(stop - start for start, stop in piece.place.rows)
    try:
        return np.lib.format.open_memmap(piece.file, "r").reshape(rows, -1)
    except (OSError, ValueError) as error:
        fix = "record the trace again"
        raise UserError(f"cannot be read: {error}", where=str(piece.file), fix=fix) from None


def _flip_share(right: Sequence[Piece], other: Sequence[Piece]) -> float:
    """Returns the share of tokens for which another set of experts was chosen; 1 where it is not known."""
    arrays = _assemble(right), _assemble(other)
    if arrays[0] is None or arrays[1] is None or arrays[0].shape != arrays[1].shape:
        return 1.0
    return float(np.any(arrays[0] != arrays[1], axis=1).mean())


def _largest_difference(
    right: Sequence[Piece], pieces: Sequence[Piece], ranks: Sequence[int]
) -> LargestDifference | None:
    """Finds the element in which the named ranks' tensor differs most; reads both files in chunks."""
    if len(right) != 1 or right[0].file is None or not right[0].place.is_whole:
        return None
    unsharded = open_array(right[0])
    best: LargestDifference | None = None
    most = -1.0
    for piece in pieces:
        if piece.file is None or piece.rank not in ranks:
            continue
        other = open_array(piece)
        rows = piece.place.row_indices()
        columns = slice(*piece.place.columns)
        step = max(1, _CHUNK // max(1, other.shape[1]))
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            theirs = as_numbers(other[start : start + step])
            ours = as_numbers(unsharded[chunk[0] : chunk[-1] + 1])[chunk - chunk[0], columns]
            gaps = np.nan_to_num(np.abs(theirs - ours), nan=np.inf)
            at = int(gaps.argmax())
            row, column = divmod(at, gaps.shape[1])
            if gaps[row, column] > most:
                most = float(gaps[row, column])
                best = LargestDifference(
                    int(chunk[row]), columns.start + column, float(ours[row, column]), float(theirs[row, column])
                )
    return best
