"""What a comparison says: the first tensor that differs, the next ones, and what could not be compared."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from trainer.trace.compare import BatchDifference, Comparison, Row

_NEXT = 3
_LISTED = 8


def comparison_lines(comparison: Comparison) -> list[str]:
    """Returns the result in lines: the verdict, the first difference and the next ones, and what was not compared."""
    other = comparison.other
    beyond = comparison.differing
    lines = [
        f"model        {name}: {comparison.right.facts[name]} in the right trace, {other.facts[name]} in the other"
        for name in ("model", "layers")
        if comparison.right.facts.get(name) != other.facts.get(name, comparison.right.facts.get(name))
    ]
    lines += [f"lost         rank {rank} {text}" for rank, text in sorted(other.lost.items())]
    lines += [f"lost         rank {rank} of the right trace {text}" for rank, text in comparison.right.lost.items()]
    for step, batch in comparison.batches.items():
        lines += _batch_lines(step, batch)
    if beyond:
        lines.append(f"first        {row_text(beyond[0])}")
        lines += [f"next         {row_text(row)}" for row in beyond[1 : 1 + _NEXT]]
        rest = len(beyond) - 1 - _NEXT
        if rest > 0:
            lines.append(f"             and {rest} more of {len(comparison.rows)} tensors")
    else:
        label = "same path"
        if not comparison.is_same_path:
            label = "not equal"
        lines.append(f"{label:<12} {verdict(comparison)}")
        closest = max(comparison.rows, key=lambda row: row.deviation / row.bound, default=None)
        if closest is not None:
            lines.append(f"closest      {row_text(closest)}")
    if any(row.by_statistics for row in comparison.rows):
        count = sum(row.by_statistics for row in comparison.rows)
        lines.append(f"statistics   {count} tensors were compared by norm and mean alone, which show less")
    return lines + list(_not_compared(comparison))


def verdict(comparison: Comparison) -> str:
    """Returns what the exit code says in a sentence without its full stop."""
    if beyond := comparison.differing:
        return f"the first difference is {row_text(beyond[0])}"
    compared = f"rounding explains every difference of {len(comparison.rows)} tensors"
    if len(comparison.rows) == 1:
        compared = compared.removesuffix("s")
    reasons = []
    if comparison.other.lost or comparison.right.lost:
        reasons.append("records of ranks are lost")
    if comparison.batches:
        reasons.append("the batches differ")
    if not reasons:
        return compared
    return f"{' and '.join(reasons)}; {compared} that both traces have"


def _batch_lines(step: int, batch: BatchDifference) -> Iterator[str]:
    """Yields lines about the sequences of a step that one trace alone has."""
    count = f"{batch.common} sequences are in both traces, {batch.right} in the right and {batch.other} in the other"
    yield f"batch        step {step}: {count}; losses and gradients are not compared"
    for which, names in (("right", batch.only_right), ("other", batch.only_other)):
        if names:
            yield f"             only the {which} trace has these sequences of micro-batches: {_listed(names)}"


def _not_compared(comparison: Comparison) -> Iterator[str]:
    """Yields a line for each reason why something was not compared."""
    texts = {
        "steps of the right trace that the other lacks": list(map(str, comparison.steps_right)),
        "steps of the other trace that the right one lacks": list(map(str, comparison.steps_other)),
        "of other micro-batches in each trace": comparison.divided,
        "only in the right trace": _kinds(comparison.only_right),
        "only in the other trace": _kinds(comparison.only_other),
    }
    for text, names in texts.items():
        if names:
            yield f"not compared {text}: {_listed(names, '; ')}"
    by_reason: dict[str, list[str]] = {}
    for name, why in comparison.other.unmatched.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        yield f"not compared {'; '.join(_kinds(names))}: {why}"


def _kinds(names: Sequence[str]) -> list[str]:
    """Returns names that differ in a number alone as one with a star, and how many there are."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    for kind, members in by_kind.items():
        if len(members) > 1:
            members[:] = [f"{kind} ({len(members)})"]
    return [text for [text] in by_kind.values()]


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


def _listed(items: Sequence[object], separator: str = ", ") -> str:
    shown = separator.join(map(str, items[:_LISTED]))
    if len(items) > _LISTED:
        return f"{shown}{separator}and {len(items) - _LISTED} more"
    return shown
