"""Hands the numbers of a run to what keeps them elsewhere: TensorBoard's files, Weights & Biases, MLflow, SwanLab.

A thread does it: a disk or a network that is slow, or hangs, costs the training nothing. What fails is told once, and
the run goes on without it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trainer.monitors.metrics import EvalMetrics, Monitor, RunInfo, RunSummary, StepMetrics, eval_record, step_record

_WAITING = 10_000  # events; a training that is that far ahead leaves the next ones out
_END_SECONDS = 60.0
_FLUSH_SECONDS = 5.0


class Tracker(Protocol):
    """What keeps the numbers of a run. All is called from one thread; any exception ends it."""

    def start(self, info: RunInfo) -> None:
        """Called first; here its package is imported."""

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluation(self, metrics: EvalMetrics) -> None: ...

    def wait(self, record: Mapping[str, float]) -> None:
        """A line of metrics.jsonl that is neither: its `step`, and how long the training waited there."""

    def flush(self) -> None:
        """Called after some seconds without a flush."""

    def close(self, outcome: str) -> None:
        """Called last; `outcome` is that of the summary, or ``failed``."""


class TrackerMonitor(Monitor):
    """Tells a tracker of a run's steps, evaluations and pauses.

    Args:
        name: For notes.
        make: Makes the tracker, in the thread.
        note: Takes what the user should know, in the thread of the training.
        every: Optimizer steps between two that the tracker is told of; the first and the last of a run are always told.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], note: Callable[[str], None], every: int = 1) -> None:
        self._name = name
        self._make = make
        self._note = note
        self._every = every
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._left_out = 0
        self._told = False
        self._always: tuple[int, ...] = ()

    def on_start(self, info: RunInfo) -> None:
        self._always = (info.start_step + 1, info.last_step)
        self._thread = threading.Thread(target=self._work, args=(info,), name=self._name, daemon=True)
        self._thread.start()

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step % self._every == 0 or metrics.step in self._always:
            self._put("step", metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._put("evaluation", metrics)

    def on_samples(self, step: int, samples: Sequence[tuple[str, str]], seconds: float) -> None:
        self._put("wait", {"step": step, "sample_seconds": seconds})

    def close(self, summary: RunSummary | None) -> None:
        if self._thread is None:
            return
        if summary is not None and summary.save_wait_seconds:
            self._put("wait", {"step": summary.last_step, "save_wait_seconds": summary.save_wait_seconds})
        thread = self._thread
        self._thread = None
        deadline = time.monotonic() + _END_SECONDS
        while thread.is_alive():  # a full queue is worked off first
            try:
                self._events.put(("close", "failed" if summary is None else summary.outcome), timeout=0.1)
                break
            except queue.Full:
                if time.monotonic() > deadline:
                    break
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            self._failure = f"did not end within {_END_SECONDS:.0f} s"
        self._tell()
        if self._left_out:
            self._note(f"{self._name}: {self._left_out} records were left out, it takes them too slowly")

    def _put(self, event: str, value: object) -> None:
        if self._thread is None:
            return
        self._tell()
        if self._failure:
            return
        try:
            self._events.put_nowait((event, value))
        except queue.Full:
            self._left_out += 1

    def _tell(self) -> None:
        if self._failure and not self._told:
            self._told = True
            self._note(f"{self._name} keeps nothing of this run from here on: {self._failure}")

    def _work(self, info: RunInfo) -> None:
        try:
            tracker = self._make()
            tracker.start(info)
            flushed = time.monotonic()
            while True:
                try:
                    event, value = self._events.get(timeout=_FLUSH_SECONDS)
                except queue.Empty:
                    event = ""
                    value = None
                if event:
                    getattr(tracker, event)(value)
                if event == "close":
                    return
                if time.monotonic() - flushed >= _FLUSH_SECONDS:
                    tracker.flush()
                    flushed = time.monotonic()
        except BaseException as error:  # some packages end a process by SystemExit
            text = " ".join(str(error).split())
            if text:
                self._failure = f"{type(error).__name__}: {text}"
            else:
                self._failure = type(error).__name__


def numbers_of(record: Mapping[str, object], layers: Sequence[int] = ()) -> dict[str, float]:
    """The finite numbers of a record of metrics.jsonl, flat: ``drop_rate/layer_3``, ``local_norm/NAME``.

    `layers` are the numbers of the MoE layers, which lists go by.
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{below}": number for below, number in value.items()}
        elif isinstance(value, (list, tuple)):
            if len(layers) == len(value):
                places = layers
            else:
                places = range(len(value))
            found |= {f"{name}/layer_{place}": number for place, number in zip(places, value, strict=True)}
        else:
            found[name] = value
    return {name: float(number) for name, number in found.items()
            if isinstance(number, (int, float)) and math.isfinite(number)}  # fmt: skip


def step_numbers(metrics: StepMetrics, layers: Sequence[int]) -> dict[str, float]:
    """The numbers of a step but its own."""
    return numbers_of({name: value for name, value in step_record(metrics).items() if name != "step"}, layers)


def eval_numbers(metrics: EvalMetrics) -> dict[str, float]:
    """The numbers of an evaluation but its step and epoch."""
    return numbers_of({name: value for name, value in eval_record(metrics).items() if name.startswith("eval_")})


def wait_numbers(record: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a pause but its step."""
    return numbers_of({name: value for name, value in record.items() if name != "step"})
