"""What a comparison says: the first tensor that differs, the next ones, and what could not be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.trace.compare import Comparison, Row

_NEXT = 3
_LISTED = 8


def comparison_lines(comparison: Comparison) -> list[str]:
    """Returns the result in lines: the verdict, the first difference and the next ones, and what was not compared."""
    other = comparison.other
    beyond = comparison.differing
    lines = [f"lost         rank {rank} {text}" for rank, text in sorted(other.lost.items())]
    lines += [f"lost         rank {rank} of the right trace {text}" for rank, text in comparison.right.lost.items()]
    for step, (common, ours, theirs) in comparison.batches.items():
        count = f"{common} sequences are in both traces, {ours} in the right and {theirs} in the other"
        lines.append(f"batch        step {step}: {count}; losses and gradients are not compared")
    if beyond:
        lines.append(f"first        {row_text(beyond[0])}")
        lines += [f"next         {row_text(row)}" for row in beyond[1 : 1 + _NEXT]]
        rest = len(beyond) - 1 - _NEXT
        if rest > 0:
            lines.append(f"             and {rest} more of {len(comparison.rows)} tensors")
    else:
        lines.append(f"same path    rounding explains every difference: {len(comparison.rows)} tensors")
        closest = max(comparison.rows, key=lambda row: row.deviation / row.bound, default=None)
        if closest is not None:
            lines.append(f"closest      {row_text(closest)}")
    if any(row.by_statistics for row in comparison.rows):
        count = sum(row.by_statistics for row in comparison.rows)
        lines.append(f"statistics   {count} tensors were compared by norm and mean alone, which show less")
    lines += _not_compared("right", comparison.only_right)
    lines += _not_compared("other", comparison.only_other)
    lines += _not_compared("dump", [f"{name}: {why}" for name, why in other.unmatched.items()])
    return lines


def _not_compared(which: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    texts = {"right": "only in the right trace", "other": "only in the other trace", "dump": "not matched in the dump"}
    listed = "; ".join(names[:_LISTED])
    more = ""
    if len(names) > _LISTED:
        more = f"; and {len(names) - _LISTED} more"
    return [f"not compared {len(names)} {texts[which]}: {listed}{more}"]


def row_text(row: Row) -> str:
    """Returns a sentence about a tensor: where it is, how much it differs, and what rounding explains."""
    where = f"step {row.key.step}, {row.key.kind} {row.key.name}"
    if row.layer is not None:
        where = f"step {row.key.step}, layer {row.layer}, {row.key.kind} {row.key.name}"
    if row.lost:
        return f"{where}: {row.lost}"
    if row.key.kind == "choice":
        return (
            f"{where}, {_ranks_text(row)}: other experts for {row.deviation:.2%} of the tokens, rounding explains"
            f" {row.bound:.2%}"
        )
    measured = f"{row.deviation:.2e}"
    if not math.isfinite(row.deviation):
        measured = "not finite"
    text = f"{where}, {_ranks_text(row)}: deviation {measured}, rounding explains {row.bound:.2e}"
    beyond, sequences = row.sequences
    if sequences > 1 and beyond:
        text += f", {beyond} of {sequences} sequences"
    if row.largest is not None:
        place = f"row {row.largest.row}, column {row.largest.column}"
        text += f"; most at {place}: {row.largest.other:.6g}, right is {row.largest.right:.6g}"
    return text


def _ranks_text(row: Row) -> str:
    ranks = row.ranks or row.holders
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if set(ranks) == set(row.holders):
        return f"all {len(ranks)} ranks that have it ({_listed(ranks)})"
    return f"ranks {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_LISTED]))
    if len(ranks) > _LISTED:
        return f"{shown}, ..."
    return shown
