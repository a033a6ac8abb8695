"""metrics.jsonl as curves: read as it grows, and thinned out so that a long run takes no more memory than a short one,
but for the two rates of each step, of which the median is told.

Each point of a curve stands for some consecutive steps, a power of two of them: one while the run is short. Of these
steps it keeps the mean, the lowest and the highest value, so that no spike is lost.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainer.monitors.jsonl import parse_line
from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE, ROUTER_ENTROPY, median_rate

LAYER_FIELDS = (DROP_RATE, LOAD_IMBALANCE, ROUTER_ENTROPY)
"""Fields that are lists with a number for each MoE layer: a curve for each, ``drop_rate.0``, ``drop_rate.1`` ..."""
RATES = ("input_tokens_per_second", "tokens_per_second")
MAX_POINTS = 1024  # of a curve; a longer one has between half as many and as many
_NO_CURVE = frozenset(("step", "epoch", "overflow", "save_wait_seconds"))
_NAN = math.nan


class Series:
    """A field of the steps over the points of a run.

    Attributes:
        means, lows, highs: Of the steps of each point; NaN where none of them has the field, or no finite number in it.
        counts: How many of them have it.
    """

    def __init__(self, points: int = 0) -> None:
        self.means, self.lows, self.highs = (array("d", [_NAN]) * points for _ in range(3))
        self.counts = array("q", [0]) * points

    def open_point(self) -> None:
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

    def halved(self) -> Series:
        """With each two neighbouring points as one; of an odd number the last stays alone."""
        found = Series()
        for at in range(0, len(self.counts), 2):
            pair = [each for each in (at, at + 1) if each < len(self.counts) and self.counts[each]]
            count = sum(self.counts[each] for each in pair)
            found.counts.append(count)
            found.means.append(sum(self.means[each] * (self.counts[each] / count) for each in pair) if pair else _NAN)
            found.lows.append(min((self.lows[each] for each in pair), default=_NAN))
            found.highs.append(max((self.highs[each] for each in pair), default=_NAN))
        return found

    @property
    def has_values(self) -> bool:
        return any(self.counts)


@dataclass
class Curves:
    """The steps of a run, thinned out.

    Attributes:
        steps: The last step of each point.
        tokens: Valid tokens from the first step of the file to that step.
        seconds: Wall-clock seconds of the steps up to it, without evaluations and checkpoints.
        fields: The numbers of each step by their names in metrics.jsonl.
        stride: Steps of a point; the last one may have fewer.
    """

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    fields: dict[str, Series] = field(default_factory=dict)
    stride: int = 1
    _in_last: int = 0

    def has_values(self, name: str) -> bool:
        """Whether a field has any number."""
        return name in self.fields and self.fields[name].has_values

    def means(self, name: str) -> Sequence[float]:
        """The curve of a field; empty where no step has it."""
        if name in self.fields:
            return self.fields[name].means
        return ()

    def add(self, record: dict[str, object]) -> None:
        """Adds a step: its line of metrics.jsonl."""
        if not self.steps or self._in_last == self.stride:
            self._open_point()
        self._in_last += 1
        self.steps[-1] = int(record["step"])  # type: ignore[arg-type]
        self.tokens[-1] += int(_number(record.get("tokens"), 0))
        self.seconds[-1] += _number(record.get("step_seconds"), 0.0)
        for name, value in _numbers(record):
            if name not in self.fields:
                self.fields[name] = Series(len(self.steps))
            if not math.isnan(value):
                self.fields[name].add(value)

    def halved(self) -> Curves:
        """With each two neighbouring points as one."""
        last = len(self.steps) - 1
        kept = [min(at + 1, last) for at in range(0, last + 1, 2)]
        return Curves(
            [self.steps[at] for at in kept],
            [self.tokens[at] for at in kept],
            [self.seconds[at] for at in kept],
            {name: series.halved() for name, series in self.fields.items()},
            2 * self.stride,
        )

    def _open_point(self) -> None:
        if len(self.steps) == MAX_POINTS:
            less = self.halved()
            self.steps = less.steps
            self.tokens = less.tokens
            self.seconds = less.seconds
            self.fields = less.fields
            self.stride = less.stride
        self._in_last = 0
        self.steps.append(0)
        self.tokens.append(self.tokens[-1] if self.tokens else 0)
        self.seconds.append(self.seconds[-1] if self.seconds else 0.0)
        for series in self.fields.values():
            series.open_point()


def _numbers(record: dict[str, object]) -> Iterator[tuple[str, float]]:
    """The fields of a step that make a curve; NaN for null, which a number that is not finite is written as."""
    for name, value in record.items():
        if name in LAYER_FIELDS and isinstance(value, list):
            yield from ((f"{name}.{layer}", _number(number, _NAN)) for layer, number in enumerate(value))
        elif name not in _NO_CURVE and (value is None or isinstance(value, (int, float))):
            yield name, _number(value, _NAN)


def _number(value: object, otherwise: float) -> float:
    try:
        number = otherwise
        if isinstance(value, (int, float)):
            number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return otherwise
    if math.isfinite(number):
        return number
    return otherwise


class Evaluation(NamedTuple):
    step: int
    loss: float  # nats a token; NaN where it was not finite
    seconds: float
    accuracy: float | None  # of a classifier


class Skipped(NamedTuple):
    """A step that updated nothing."""

    step: int
    reason: str


class Pause(NamedTuple):
    """Time that the training waited between two steps."""

    step: int  # the one before it
    kind: str  # "evaluation", "sampling" or "checkpoint"
    seconds: float


@dataclass
class Metrics:
    """The content of metrics.jsonl.

    Attributes:
        damaged: Numbers of the lines that are no records; they are left out.
        first_step: The first one in the file; None without any.
        last_loss: Of the last step whose loss is finite; None without any.
        rates: The `RATES` of each step that has them.
        data_wait_seconds: Of all steps; part of their time.
        restarts: The records of a job that has started again: `number`, `most`, `reason`, `ranks`, with their `step`.
    """

    curves: Curves = field(default_factory=Curves)
    evaluations: list[Evaluation] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    restarts: list[dict[str, object]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    first_step: int | None = None
    last_loss: float | None = None
    data_wait_seconds: float = 0.0
    rates: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in RATES})

    def rate(self, name: str) -> float | None:
        """One of the `RATES` for the whole file, as the last lines of a run tell it; None where no step has it."""
        return median_rate(self.rates[name])

    @property
    def last_step(self) -> int:
        """0 before the first step."""
        if self.curves.steps:
            return self.curves.steps[-1]
        return 0

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the lowest loss, of equal ones the first."""
        finite = [each for each in self.evaluations if math.isfinite(each.loss)]
        return min(finite, key=lambda each: each.loss, default=None)

    def add(self, record: dict[str, object]) -> None:
        """Adds a line of the file."""
        step = int(record["step"])  # type: ignore[arg-type]
        if "eval_loss" in record:
            loss = _number(record["eval_loss"], _NAN)
            seconds = _number(record.get("eval_seconds"), 0.0)
            accuracy = record.get("eval_accuracy")
            if accuracy is None:
                right = None
            else:
                right = _number(accuracy, _NAN)
            self.evaluations.append(Evaluation(step, loss, seconds, right))
            self.pauses.append(Pause(step, "evaluation", seconds))
        elif "loss" in record:
            self._add_step(step, record)
        elif "sample_seconds" in record:
            self.pauses.append(Pause(step, "sampling", _number(record["sample_seconds"], 0.0)))
        elif isinstance(record.get("restart"), dict):
            self.restarts.append({**record["restart"], "step": step})  # type: ignore[dict-item]
        elif "save_wait_seconds" in record:  # of the last checkpoint, which no step comes after
            self.pauses.append(Pause(step, "checkpoint", _number(record["save_wait_seconds"], 0.0)))

    def _add_step(self, step: int, record: dict[str, object]) -> None:
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
    """Follows a metrics file: each `read` adds the lines that were written since the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Metrics()
        self._inode = 0
        self._read_bytes = 0
        self._read_lines = 0

    def read(self) -> Metrics:
        """What the file holds now; nothing where there is none. An incomplete last line is left for the next time.

        Raises:
            OSError: It cannot be read.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._begin(0)
            return self.metrics
        if status.st_ino != self._inode or status.st_size < self._read_bytes:  # another file, or one that was cut
            self._begin(status.st_ino)
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                self._read_lines += 1
                record = parse_line(line.decode("utf-8", errors="replace"))
                if record is not None:
                    self.metrics.add(record)
                elif line.strip():
                    self.metrics.damaged.append(self._read_lines)
        return self.metrics

    def _begin(self, inode: int) -> None:
        self.metrics = Metrics()
        self._inode = inode
        self._read_bytes = 0
        self._read_lines = 0


def read_metrics(path: Path) -> Metrics:
    """The content of a metrics file; empty where there is none. Raises OSError where it cannot be read."""
    return MetricsReader(path).read()
