"""Compares runs: their results, the settings that differ, and the first step whose numbers differ."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError
from trainer.monitors import formatting
from trainer.monitors.jsonl import MetricsRecord, read_metrics_records
from trainer.report.curves import RATES
from trainer.report.record import METRICS_FILE, RunData, is_run_folder, read_run
from trainer.tables import Rows, Section

_COMPARED_FIELDS = ("loss", "lr", "global_norm", "tokens", "loss_scale", "overflow", "eval_loss")
"""Fields of metrics.jsonl whose bits are equal in two runs that compute the same. Times are not equal."""
_RUN_KEYS = frozenset(("output_dir", "resume_training"))
"""Keys that differ between runs of the same configuration."""
ABSENT = "-"


class FirstDifference(NamedTuple):
    """The first difference of two runs: a number, or a step that only one of them has.

    Attributes:
        field: The field of metrics.jsonl; "step" if a run does not have the step.
        left, right: The values; None if a run does not have it.
    """

    step: int
    field: str
    left: object
    right: object

    def text(self, left: str, right: str) -> str:
        """Describes the difference; `left` and `right` are the names of the runs."""
        if self.field == "step":
            shorter = right
            longer = left
            if self.left is None:
                shorter = left
                longer = right
            return f"{shorter} ends before step {self.step}, which {longer} has; the steps before it are the same"
        return f"step {self.step}: {self.field} {self.left!r} in {left}, {self.right!r} in {right}"


@dataclass(frozen=True)
class RunComparison:
    """Runs in the order in which they were named.

    Attributes:
        names: The names of the runs, all different.
        settings: The keys that differ, with the value in each run; `ABSENT` if a run does not have the key.
        differences: The first difference between the first run and each other one, None if all numbers are the same.
            Empty if `compare_runs` was called without them.
    """

    records: list[RunData]
    names: list[str]
    settings: list[tuple[str, list[Any]]]
    differences: list[FirstDifference | None]


def compare_runs(folders: Sequence[Path], with_differences: bool = True) -> RunComparison:
    """Reads and compares runs.

    Args:
        with_differences: Whether to find the first difference, step by step.

    Raises:
        UserError: A folder has no run, or is named twice.
    """
    places = [folder.resolve() for folder in folders]
    for number, (folder, place) in enumerate(zip(folders, places, strict=True)):
        if not is_run_folder(folder):
            fix = "name output_dir of a training; run_trainer.py runs lists them"
            raise UserError("there is no run in this folder", where="argument RUN", value=str(folder), fix=fix)
        if place in places[:number]:
            raise UserError("is named twice", where="argument RUN", value=str(folder), fix="name each run once")
    records = [read_run(folder) for folder in folders]
    names = [record.name for record in records]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    settings = list(_differing_settings([record.settings for record in records]))
    differences = []
    if with_differences:
        differences = [first_difference(records[0].folder, record.folder) for record in records[1:]]
    return RunComparison(records, names, settings, differences)


def _differing_settings(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yields the keys whose values differ, with the value in each run."""
    for key in dict.fromkeys(key for settings in runs for key in settings):
        values = [settings.get(key, ABSENT) for settings in runs]
        if key not in _RUN_KEYS and any(value != values[0] for value in values):
            yield key, values


def first_difference(left: Path, right: Path) -> FirstDifference | None:
    """Returns the first difference of metrics.jsonl in two run folders; None if all numbers are the same."""
    ended: MetricsRecord = {"step": math.inf}
    for left_record, right_record in itertools.zip_longest(_numbers(left), _numbers(right), fillvalue=ended):
        left_step = left_record["step"]
        right_step = right_record["step"]
        if left_step != right_step:
            earlier = min(left_record, right_record, key=operator.itemgetter("step"))
            name = next(name for name in ("eval_loss", "step") if name in earlier)  # only one run may have evaluated
            if earlier is left_record:
                return FirstDifference(left_step, name, left_record[name], None)
            return FirstDifference(right_step, name, None, right_record[name])
        for name in _COMPARED_FIELDS:
            if left_record.get(name) != right_record.get(name):
                return FirstDifference(int(left_step), name, left_record.get(name), right_record.get(name))
    return None


def _numbers(folder: Path) -> Iterator[MetricsRecord]:
    """Yields the records of all steps and evaluations, in order."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return
    for record in read_metrics_records(path):
        if "loss" in record or "eval_loss" in record:
            yield record


def _figures_table(comparison: RunComparison, loss: float | None) -> Rows:
    """Returns the table of results: a header, and a row for each run."""
    header = ["run", "state", "step", "loss", "best eval loss", "tokens", "median tokens/s", "peak memory"]
    if loss is not None:
        header.append(f"tokens to {loss:g}")
    table = [tuple(header)]
    for name, record in zip(comparison.names, comparison.records, strict=True):
        values = run_values(record)
        best_text = ABSENT
        if values["best_eval_loss"] is not None:
            best_text = f"{values['best_eval_loss']:.4f} at step {values['best_eval_step']}"
        row = [
            name, record.state, f"{record.step}/{record.last_step}", cell_text(values["loss"]), best_text,
            formatting.count(values["tokens"]), cell_text(values["input_tokens_per_second"], formatting.count),
            cell_text(values["peak_rss_bytes"], formatting.size),
        ]  # fmt: skip
        if loss is not None:
            row.append(cell_text(tokens_to_loss(record, loss), formatting.count))
        table.append(tuple(row))
    return table


def cell_text(value: float | None, write: Callable[[float], str] = "{:.4f}".format) -> str:
    """Formats a value for a table, by default a loss."""
    if value is None:
        return ABSENT
    return write(value)


def run_values(record: RunData) -> dict[str, Any]:
    """Returns the results of a run for tables and programs, by the names of metrics.jsonl.

    A value is None if it is unknown or not finite.
    """
    metrics = record.metrics
    best = metrics.best
    eval_loss = None
    if metrics.evaluations and math.isfinite(metrics.evaluations[-1].loss):
        eval_loss = metrics.evaluations[-1].loss
    return {
        "state": record.state,
        "outcome": record.outcome,
        "step": record.step,
        "last_step": record.last_step,
        "loss": metrics.last_loss,
        "eval_loss": eval_loss,
        "best_eval_loss": best and best.loss,
        "best_eval_step": best and best.step,
        "tokens": (metrics.curves.tokens or [0])[-1],
        **{name: metrics.rate(name) for name in RATES},
        "peak_rss_bytes": record.peak_rss_bytes,
        "began": record.start_time and record.start_time.isoformat(),
        "folder": str(record.folder),
        "notes": list(record.notes),
    }


def tokens_to_loss(record: RunData, loss: float) -> int | None:
    """Returns the number of loss tokens after which a run reached this loss; None if it did not.

    The loss is that of evaluations, and in a run without evaluations that of steps.
    """
    curves = record.metrics.curves
    if record.metrics.evaluations:
        reached = next((point.step for point in record.metrics.evaluations if point.loss <= loss), None)
    else:
        points = zip(curves.steps, curves.means("loss"), strict=False)
        reached = next((step for step, mean in points if mean <= loss), None)
    if reached is None or not curves.steps:
        return None
    if reached == 0:
        return 0
    return curves.tokens[min(bisect.bisect_left(curves.steps, reached), len(curves.steps) - 1)]


def comparison_tables(comparison: RunComparison, loss: float | None = None) -> list[Section]:
    """Returns the comparison as titled tables: results, differing settings, and first differences if they are known.

    Args:
        loss: Adds the number of tokens that each run needed to reach this loss, see `tokens_to_loss`.
    """
    settings: Rows = [(key, *map(str, values)) for key, values in comparison.settings]
    if not settings:
        settings = [("no key differs", *[""] * len(comparison.names))]
    tables = [
        ("runs", _figures_table(comparison, loss)),
        ("configuration", [("key", *comparison.names), *settings]),
    ]
    if comparison.differences:
        first, *others = comparison.names
        differences: Rows = [("run", f"compared with {first}")]
        for name, difference in zip(others, comparison.differences, strict=True):
            text = "all numbers are the same"
            if difference is not None:
                text = difference.text(first, name)
            differences.append((name, text))
        tables.append(("first difference", differences))
    return tables


def comparison_dict(comparison: RunComparison, loss: float | None = None) -> dict[str, Any]:
    """Returns the comparison for programs, with numbers that are not rounded."""
    runs = []
    for name, record in zip(comparison.names, comparison.records, strict=True):
        run = {"run": name, **run_values(record)}
        if loss is not None:
            run["tokens_to_loss"] = tokens_to_loss(record, loss)
        runs.append(run)
    settings: dict[str, dict[str, Any]] = {}
    for key, _ in comparison.settings:
        pairs = zip(comparison.names, comparison.records, strict=True)
        settings[key] = {name: record.settings[key] for name, record in pairs if key in record.settings}
    pairs_of_runs = zip(comparison.names[1:], comparison.differences, strict=True)
    first_differences = {name: difference and difference._asdict() for name, difference in pairs_of_runs}
    return {"runs": runs, "settings": settings, "first_difference": first_differences}
