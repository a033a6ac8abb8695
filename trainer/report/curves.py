"""Reads metrics.jsonl as curves, also while it grows.

Each point of a curve stands for a power of two of consecutive steps: for one step while the run is short. It has their
mean, minimum and maximum, so that no spike is lost, and a long run takes little memory. Only the two rates of each step
are all kept, for their median.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.input_files import open_file
from trainer.monitors.jsonl import MetricsRecord, parse_line
from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE, ROUTER_ENTROPY, median_rate

LAYER_FIELDS = (DROP_RATE, LOAD_IMBALANCE, ROUTER_ENTROPY)
"""Fields that are lists with a number per MoE layer. Each layer has a curve: ``drop_rate.0``, ``drop_rate.1`` ..."""
RATES = ("input_tokens_per_second", "tokens_per_second")
MAX_POINTS = 1024  # of a curve; when it is exceeded, two points become one
_NO_CURVE = frozenset(("step", "epoch", "overflow", "save_wait_seconds"))
_NAN = math.nan


class Series:
    """A field of the steps over the points of a run.

    Attributes:
        means, lows, highs: Mean, minimum and maximum over the steps of each point; NaN without a finite number.
        counts: The number of steps of each point with a finite number.
    """

    def __init__(self, points: int = 0) -> None:
        self.means, self.lows, self.highs = (array("d", [_NAN]) * points for _ in range(3))
        self.counts = array("q", [0]) * points

    def open_point(self) -> None:
        """Adds a point without steps."""
        for values in (self.means, self.lows, self.highs):
            values.append(_NAN)
        self.counts.append(0)

    def add(self, value: float) -> None:
        """Adds a step to the last point."""
        self.counts[-1] += 1
        if self.counts[-1] == 1:
            self.means[-1] = self.lows[-1] = self.highs[-1] = value
            return
        self.means[-1] += (value - self.means[-1]) / self.counts[-1]
        self.lows[-1] = min(self.lows[-1], value)
        self.highs[-1] = max(self.highs[-1], value)

    def halve(self) -> Series:
        """Returns the series with every two neighbouring points as one; an odd last point stays."""
        series = Series()
        for first in range(0, len(self.counts), 2):
            points = [point for point in range(first, min(first + 2, len(self.counts))) if self.counts[point]]
            count = sum(self.counts[point] for point in points)
            mean = _NAN
            if points:
                mean = sum(self.means[point] * (self.counts[point] / count) for point in points)
            series.counts.append(count)
            series.means.append(mean)
            series.lows.append(min((self.lows[point] for point in points), default=_NAN))
            series.highs.append(max((self.highs[point] for point in points), default=_NAN))
        return series

    @property
    def has_values(self) -> bool:
        """Returns whether any step has a finite number."""
        return any(self.counts)


@dataclass
class Curves:
    """The curves of a run's steps.

    Attributes:
        steps: The last step of each point.
        tokens: The loss tokens from the first step of the file to that step.
        seconds: The wall-clock seconds of the steps up to that step, without evaluations and checkpoints.
        fields: The numbers of the steps by their names in metrics.jsonl.
        stride: The number of steps of a point; the last point may have fewer.
    """

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    fields: dict[str, Series] = field(default_factory=dict)
    stride: int = 1
    _in_last: int = 0

    def has_values(self, name: str) -> bool:
        """Returns whether a field has any number."""
        return name in self.fields and self.fields[name].has_values

    def means(self, name: str) -> Sequence[float]:
        """Returns the curve of a field; empty if no step has it."""
        if name in self.fields:
            return self.fields[name].means
        return ()

    def add(self, record: MetricsRecord) -> None:
        """Adds a step by its line of metrics.jsonl."""
        if not self.steps or self._in_last == self.stride:
            self._open_point()
        self._in_last += 1
        self.steps[-1] = int(record["step"])
        self.tokens[-1] += int(_number(record.get("tokens"), 0))
        self.seconds[-1] += _number(record.get("step_seconds"), 0.0)
        for name, value in _numbers(record):
            if name not in self.fields:
                self.fields[name] = Series(len(self.steps))
            if not math.isnan(value):
                self.fields[name].add(value)

    def downsampled(self, most_points: int) -> Curves:
        """Returns the curves with fewer points, if they have more than this; those of a short run as they are."""
        if self.stride > 1 and len(self.steps) > most_points:
            return self.halve()
        return self

    def halve(self) -> Curves:
        """Returns the curves with every two neighbouring points as one."""
        last = len(self.steps) - 1
        ends = [min(point + 1, last) for point in range(0, last + 1, 2)]
        return Curves(
            [self.steps[point] for point in ends],
            [self.tokens[point] for point in ends],
            [self.seconds[point] for point in ends],
            {name: series.halve() for name, series in self.fields.items()},
            2 * self.stride,
        )

    def _open_point(self) -> None:
        if len(self.steps) == MAX_POINTS:
            vars(self).update(vars(self.halve()))
        self._in_last = 0
        self.steps.append(0)
        self.tokens.append((self.tokens or [0])[-1])
        self.seconds.append((self.seconds or [0.0])[-1])
        for series in self.fields.values():
            series.open_point()


def _numbers(record: MetricsRecord) -> Iterator[tuple[str, float]]:
    """Yields the fields of a step that have a curve; NaN for null, which stands for a number that is not finite."""
    for name, value in record.items():
        if name in LAYER_FIELDS and isinstance(value, list):
            yield from ((f"{name}.{layer}", _number(number, _NAN)) for layer, number in enumerate(value))
        elif name not in _NO_CURVE and (value is None or isinstance(value, (int, float))):
            yield name, _number(value, _NAN)


def _number(value: object, default: float) -> float:
    """Returns a finite number as it is, and the default for anything else."""
    if not isinstance(value, (int, float)):
        return default
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return default
    if math.isfinite(number):
        return number
    return default


class EvalPoint(NamedTuple):
    """An evaluation."""

    step: int
    loss: float  # nats per loss token; NaN if it was not finite
    seconds: float
    accuracy: float | None  # of images, or of answers that are compared
    margin: float | None = None  # of answers that are compared


class Skipped(NamedTuple):
    """A step that changed no weight."""

    step: int
    reason: str


class Pause(NamedTuple):
    """A pause of the training between two steps."""

    step: int  # the step before it
    kind: str  # "evaluation", "sampling" or "checkpoint"
    seconds: float


@dataclass
class Metrics:
    """The content of metrics.jsonl.

    Attributes:
        damaged: The numbers of damaged lines, which are skipped.
        first_step: The first step in the file; None without a step.
        last_loss: The loss of the last step whose loss is finite; None without one.
        rates: The `RATES` of each step that has them.
        data_wait_seconds: The wait for data in all steps; it is a part of their time.
        restarts: The restarts of the job: `number`, `most`, `reason`, `ranks` and `step`.
    """

    curves: Curves = field(default_factory=Curves)
    evaluations: list[EvalPoint] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    first_step: int | None = None
    last_loss: float | None = None
    data_wait_seconds: float = 0.0
    rates: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in RATES})

    def rate(self, name: str) -> float | None:
        """Returns the median of one of the `RATES`, as in the summary of a run; None if no step has it."""
        return median_rate(self.rates[name])

    @property
    def last_step(self) -> int:
        """Returns the newest step; 0 before the first step."""
        return (self.curves.steps or [0])[-1]

    @property
    def best(self) -> EvalPoint | None:
        """Returns the first evaluation with the lowest loss; None without a finite loss."""
        finite = [evaluation for evaluation in self.evaluations if math.isfinite(evaluation.loss)]
        return min(finite, key=lambda evaluation: evaluation.loss, default=None)

    def add(self, record: MetricsRecord) -> None:
        """Adds a line of the file."""
        step = int(record["step"])
        if "eval_loss" in record:
            loss = _number(record["eval_loss"], _NAN)
            seconds = _number(record.get("eval_seconds"), 0.0)
            more: list[float | None] = [None, None]
            for place, name in enumerate(("eval_accuracy", "eval_margin")):
                if record.get(name) is not None:
                    more[place] = _number(record[name], _NAN)
            self.evaluations.append(EvalPoint(step, loss, seconds, *more))
            self.pauses.append(Pause(step, "evaluation", seconds))
        elif "loss" in record:
            self._add_step(step, record)
        elif "sample_seconds" in record:
            self.pauses.append(Pause(step, "sampling", _number(record["sample_seconds"], 0.0)))
        elif isinstance(record.get("restart"), dict):
            self.restarts.append({**record["restart"], "step": step})
        elif "save_wait_seconds" in record:  # no step follows the last checkpoint, to report it
            self.pauses.append(Pause(step, "checkpoint", _number(record["save_wait_seconds"], 0.0)))

    def _add_step(self, step: int, record: MetricsRecord) -> None:
        if self.first_step is None:
            self.first_step = step
        self.curves.add(record)
        for name, rates in self.rates.items():
            if math.isfinite(rate := _number(record.get(name), _NAN)):
                rates.append(rate)
        loss = _number(record["loss"], _NAN)
        if math.isfinite(loss):
            self.last_loss = loss
        self.data_wait_seconds += _number(record.get("data_wait_seconds"), 0.0)
        if record.get("skipped") or record.get("overflow"):
            self.skipped.append(Skipped(step, str(record.get("skipped") or "overflow")))
        if "save_wait_seconds" in record:
            self.pauses.append(Pause(step - 1, "checkpoint", _number(record["save_wait_seconds"], 0.0)))


class MetricsReader:
    """Reads a metrics file while it grows: each `read` adds the lines that were written since the last one.

    Attributes:
        problem: Why the file exists and could not be read; empty if it could.
        is_cut: Whether the last line is incomplete: it is being written, or the process ended within it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Metrics()
        self.problem = ""
        self.is_cut = False
        self._inode = 0
        self._read_bytes = 0
        self._read_lines = 0

    def read(self) -> Metrics:
        """Returns the content of the file now; no content if it is missing or cannot be read.

        An incomplete last line is read next time.
        """
        self.problem = ""
        try:
            self._read_new_lines()
        except FileNotFoundError:
            self._begin(0)
        except OSError as error:
            self.problem = error.strerror or str(error)
        return self.metrics

    def _read_new_lines(self) -> None:
        status = self.path.stat()
        self.is_cut = False
        if status.st_ino != self._inode or status.st_size < self._read_bytes:  # the file was replaced or cut
            self._begin(status.st_ino)
        with open_file(self.path) as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    self.is_cut = True
                    break
                self._read_bytes += len(line)
                self._read_lines += 1
                record = parse_line(line.decode("utf-8", errors="replace"))
                if record is not None:
                    self.metrics.add(record)
                elif line.strip():
                    self.metrics.damaged.append(self._read_lines)

    def _begin(self, inode: int) -> None:
        self.metrics = Metrics()
        self._inode = inode
        self._read_bytes = 0
        self._read_lines = 0
