"""Writes metrics.jsonl and samples.jsonl of a training, and reads metrics.jsonl.

metrics.jsonl has a JSON object on each line: a step, an evaluation, a restart or a pause. samples.jsonl has the sampled
texts. A resumed run continues both files. Numbers that are not finite are written as ``null``, because JSON has none.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from trainer.errors import RunError
from trainer.monitors.files import atomic_file, write_failure
from trainer.monitors.metrics import EvalMetrics, Monitor, RunInfo, RunSummary, StepMetrics, eval_record, step_record

SAMPLES_FILE = "samples.jsonl"
MetricsRecord: TypeAlias = dict[str, Any]
"""A line of metrics.jsonl, which has at least an integer `step`."""


class JsonlMonitor(Monitor):
    """Writes metrics.jsonl, and samples.jsonl beside it once there are samples.

    A new run renames older files; a resumed run continues them after the step that it resumes from. Every line reaches
    the operating system at once, so that a killed run leaves all its steps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._samples = path.with_name(SAMPLES_FILE)
        self._file: TextIO | None = None

    def on_start(self, info: RunInfo) -> None:
        """Opens the file: a resumed run continues it, a new run renames an old one."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for path in (self._path, self._samples):
                if info.start_step > 0:
                    cut_after(path, info.start_step)
                else:
                    rename_old_metrics(path)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            path = Path(error.filename or self._path)
            raise write_failure(path, error, "metrics", "metrics file") from error
        if info.restarted:
            self._write({"step": info.start_step, "restart": info.restarted})

    def on_step(self, metrics: StepMetrics) -> None:
        self._write(step_record(metrics))

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._write(eval_record(metrics))

    def on_samples(self, step: int, samples: Sequence[tuple[str, str]], seconds: float) -> None:
        """Appends a line of JSON for each prompt to samples.jsonl, and their time to metrics.jsonl."""
        self._write({"step": step, "sample_seconds": seconds})
        try:
            # A prompt that is not UTF-8 has lone surrogates; as backslash escapes they are valid JSON.
            with self._samples.open("a", encoding="utf-8", errors="backslashreplace") as file:
                for prompt, text in samples:
                    file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise write_failure(self._samples, error, "samples", "samples file") from error

    def close(self, summary: RunSummary | None) -> None:
        if summary is not None and summary.save_wait_seconds:  # no step follows the last checkpoint, to report it
            with contextlib.suppress(RunError):  # the run has succeeded
                self._write({"step": summary.last_step, "save_wait_seconds": summary.save_wait_seconds})
        if self._file is not None:
            # After a full disk the buffer still has data, and closing would fail again.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, record: dict[str, object]) -> None:
        if self._file is None:  # the run has not started, so that the file of an earlier run stays as it is
            return
        try:
            self._file.write(json.dumps(finite_json(record), allow_nan=False) + "\n")
        except OSError as error:
            raise write_failure(self._path, error, "metrics", "metrics file") from error


def finite_json(value: Any) -> Any:
    """Returns a value with None in place of each number that is not finite, which JSON lacks, also within values."""
    if isinstance(value, Mapping):
        return {name: finite_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_metrics_records(path: Path) -> Iterator[MetricsRecord]:
    """Yields the records of a metrics file in order, without damaged or incomplete lines."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from filter(None, map(parse_line, lines))


def cut_after(path: Path, step: int) -> None:
    """Removes the lines after ``step``, because a resumed run writes them again. The file is replaced atomically.

    Raises:
        OSError: The file cannot be read or written.
    """
    if not path.exists():
        return
    with (
        atomic_file(path, flushed=True) as shortened,
        path.open(encoding="utf-8", errors="replace") as lines,
        shortened.open("w", encoding="utf-8") as kept,
    ):
        for line in lines:
            record = parse_line(line)
            if record is not None and record["step"] <= step:
                kept.write(line)


def rename_old_metrics(path: Path) -> Path | None:
    """Renames the metrics file of an earlier training to the first free ``metrics-1.jsonl``, ``metrics-2.jsonl`` ...

    Returns the new path; None if there is no file, or an empty one.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    number = 1
    while (new_path := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(new_path)
    return new_path


def parse_line(line: str) -> MetricsRecord | None:
    """Returns the record of a line of a metrics file; None for an incomplete line and one without a `step`."""
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("step"), int) and 0 <= record["step"] < 1 << 53:
        return record
    return None
