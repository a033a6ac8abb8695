"""Several runs beside each other: what differs in their configurations, figures, and the first step that differs."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError
from trainer.monitors import formatting
from trainer.monitors.jsonl import read_metrics_records
from trainer.report.curves import RATES
from trainer.report.record import METRICS_FILE, RunData, is_run_folder, read_run

_SAME_IN_EQUAL_RUNS = ("loss", "lr", "global_norm", "tokens", "loss_scale", "overflow", "eval_loss")
"""Fields of metrics.jsonl that are the same bits in two runs that compute the same; times are not."""
_OF_THE_RUN = frozenset(("output_dir", "resume_training"))
ABSENT = "-"
Rows = list[tuple[str, ...]]


class FirstDifference(NamedTuple):
    """The first place where two runs are not the same: a number, or a step that one of them does not have."""

    step: int
    field: str  # "step" where it is missing
    left: object  # None where there is none
    right: object

    def text(self, left: str, right: str) -> str:
        if self.field == "step":
            if self.left is not None:
                has = left
                lacks = right
            else:
                has = right
                lacks = left
            return f"{lacks} ends before step {self.step}, which {has} has; the steps before it are the same"
        return f"step {self.step}: {self.field} {self.left!r} in {left}, {self.right!r} in {right}"


@dataclass(frozen=True)
class Comparison:
    """Runs in the order in which they were named.

    Attributes:
        names: One for each, all different.
        settings: Keys that are not the same in all runs, with the value in each; `ABSENT` where a run lacks it.
        differences: From the first run to each other one; None where all numbers are the same. Empty if not looked for.
    """

    records: list[RunData]
    names: list[str]
    settings: list[tuple[str, list[Any]]]
    differences: list[FirstDifference | None]


def compare(folders: Sequence[Path], with_differences: bool = True) -> Comparison:
    """Reads the runs.

    Args:
        with_differences: Whether the first difference is looked for, step by step.

    Raises:
        UserError: A folder holds no run, or is named twice.
    """
    places = [folder.resolve() for folder in folders]
    for number, (folder, place) in enumerate(zip(folders, places, strict=True)):
        if not is_run_folder(folder):
            fix = "name output_dir of a training; run_trainer.py runs lists them"
            raise UserError("there is no run in this folder", where="argument RUN", value=str(folder), fix=fix)
        if place in places[:number]:
            raise UserError("is named twice", where="argument RUN", value=str(folder), fix="name other runs")
    records = [read_run(folder) for folder in folders]
    own = [record.name for record in records]
    if len(set(own)) == len(own):
        names = own
    else:
        names = [str(folder) for folder in folders]
    settings = list(_settings([record.settings for record in records]))
    if with_differences:
        others = records[1:]
    else:
        others = []
    differences = [first_difference(records[0].folder, record.folder) for record in others]
    return Comparison(records, names, settings, differences)


def _settings(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    for key in dict.fromkeys(key for settings in runs for key in settings):
        values = [settings.get(key, ABSENT) for settings in runs]
        if key not in _OF_THE_RUN and any(value != values[0] for value in values):
            yield key, values


def first_difference(left: Path, right: Path) -> FirstDifference | None:
    """The first number of metrics.jsonl that is not the same in two run folders; None where all are."""
    pairs = itertools.zip_longest(_numbers(left), _numbers(right))
    for one, other in pairs:
        if one is None or other is None:
            step = (one or other)[0]
            return FirstDifference(step, "step", *(None if each is None else step for each in (one, other)))
        if one[0] != other[0]:
            step = min(one[0], other[0])
            return FirstDifference(step, "step", *(step if each[0] == step else None for each in (one, other)))
        for name in _SAME_IN_EQUAL_RUNS:
            if one[1].get(name) != other[1].get(name):
                return FirstDifference(one[0], name, one[1].get(name), other[1].get(name))
    return None


def _numbers(folder: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Step and fields of each step and evaluation, in order."""
    path = folder / METRICS_FILE
    for record in read_metrics_records(path) if path.is_file() else ():
        if "loss" in record or "eval_loss" in record:
            yield int(record["step"]), record  # type: ignore[call-overload]


def figures_table(comparison: Comparison, loss: float | None = None) -> tuple[tuple[str, ...], Rows]:
    """The table: a header, and a row for each run.

    Args:
        loss: Adds the tokens that a run took to this loss, of evaluations where it makes any, else of steps.
    """
    header = ("run", "state", "step", "loss", "best eval loss", "tokens", "median tokens/s", "peak memory")
    rows = []
    for name, record in zip(comparison.names, comparison.records, strict=True):
        found = run_values(record)
        best, rate, memory = (found[key] for key in ("best_eval_loss", "input_tokens_per_second", "peak_rss_bytes"))
        best_text = ABSENT
        if best is not None:
            best_text = f"{best:.4f} at step {found['best_eval_step']}"
        rate_text = ABSENT
        if rate is not None:
            rate_text = formatting.count(rate)
        memory_text = ABSENT
        if memory is not None:
            memory_text = formatting.size(memory)
        row = [
            name, record.state, f"{record.step}/{record.last_step}", loss_text(found["loss"]), best_text,
            formatting.count(found["tokens"]), rate_text, memory_text,
        ]  # fmt: skip
        if loss is not None:
            reached = tokens_to_loss(record, loss)
            row.append(ABSENT if reached is None else formatting.count(reached))
        rows.append(tuple(row))
    return (*header, f"tokens to {loss:g}") if loss is not None else header, rows


def loss_text(loss: float | None) -> str:
    if loss is None:
        return ABSENT
    return f"{loss:.4f}"


def run_values(record: RunData) -> dict[str, Any]:
    """What tables and programs are told of a run: plain values, by the names that metrics.jsonl has for them; None for
    what is not known or not finite."""
    curves = record.metrics.curves
    best = record.metrics.best
    if record.metrics.evaluations:
        evaluated = record.metrics.evaluations[-1].loss
    else:
        evaluated = math.nan
    return {
        "state": record.state,
        "outcome": record.outcome,
        "step": record.step,
        "last_step": record.last_step,
        "loss": record.metrics.last_loss,
        "eval_loss": evaluated if math.isfinite(evaluated) else None,
        "best_eval_loss": best.loss if best else None,
        "best_eval_step": best.step if best else None,
        "tokens": curves.tokens[-1] if curves.steps else 0,
        **{name: record.metrics.rate(name) for name in RATES},
        "peak_rss_bytes": record.peak_rss_bytes,
        "began": record.began.isoformat() if record.began else None,
        "folder": str(record.folder),
        "notes": list(record.notes),
    }


def tokens_to_loss(record: RunData, loss: float) -> int | None:
    """Tokens with a loss up to the first evaluation of at most this loss, or the first such step of a run without
    evaluations; None where there is none."""
    curves = record.metrics.curves
    if record.metrics.evaluations:
        reached = next((each.step for each in record.metrics.evaluations if each.loss <= loss), None)
    else:
        points = zip(curves.steps, curves.means("loss"), strict=False)
        reached = next((step for step, mean in points if mean <= loss), None)
    if reached is None or not curves.steps:
        return None
    if reached == 0:
        return 0
    return curves.tokens[min(bisect.bisect_left(curves.steps, reached), len(curves.steps) - 1)]


def comparison_tables(comparison: Comparison, loss: float | None = None) -> list[tuple[str, Rows]]:
    """The whole comparison as titled tables: figures, settings that differ, first steps that differ if known."""
    header, rows = figures_table(comparison, loss)
    settings = [(key, *map(str, values)) for key, values in comparison.settings]
    settings = settings or [("no key differs", *[""] * len(comparison.names))]
    tables: list[tuple[str, Rows]] = [
        ("runs", [header, *rows]),
        ("configuration", [("key", *comparison.names), *settings]),
    ]
    if comparison.differences:
        first, *others = comparison.names
        same = "all numbers are the same"
        steps = [(name, same if found is None else found.text(first, name))
                 for name, found in zip(others, comparison.differences, strict=True)]  # fmt: skip
        tables.append(("first difference", [("run", f"against {first}"), *steps]))
    return tables


def comparison_dict(comparison: Comparison, loss: float | None = None) -> dict[str, Any]:
    """The comparison for programs: numbers as they are, not as the tables round them."""
    names = comparison.names
    records = comparison.records
    runs = [{"run": name, **run_values(record)} for name, record in zip(names, records, strict=True)]
    if loss is not None:
        runs = [{**run, "tokens_to_loss": tokens_to_loss(record, loss)}
                for run, record in zip(runs, records, strict=True)]  # fmt: skip
    differences = [None if found is None else found._asdict() for found in comparison.differences]
    return {
        "runs": runs,
        "settings": {key: {name: record.settings[key] for name, record in zip(names, records, strict=True)
                           if key in record.settings} for key, _ in comparison.settings},
        "first_difference": dict(zip(names[1:], differences, strict=True)),
    }  # fmt: skip
