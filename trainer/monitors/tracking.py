"""Passes the numbers of a run to trackers: TensorBoard's files, Weights & Biases, MLflow, SwanLab.

Each tracker has a thread, so that a slow disk or network does not slow the training. A tracker that fails is reported
in one note, and the run continues without it.
"""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.monitors.metrics import (
    EvalMetrics,
    Monitor,
    RunInfo,
    RunSummary,
    StepMetrics,
    describe_outcome,
    eval_record,
    step_record,
)

_MAX_WAITING = 10_000  # calls that wait for a slow tracker; further ones are dropped
_END_SECONDS = 60.0
_FLUSH_SECONDS = 5.0


class Tracker:
    """A service or file that stores the numbers of a run. One thread calls its methods; an exception ends it.

    Attributes:
        layers: The numbers of the MoE layers.
    """

    layers: Sequence[int] = ()

    def start(self, info: RunInfo) -> None:
        """Opens the tracker, which imports its package. It is called first."""
        raise NotImplementedError

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Stores numbers of a step."""
        raise NotImplementedError

    def step(self, metrics: StepMetrics) -> None:
        """Stores a step."""
        fields = {name: value for name, value in step_record(metrics).items() if name != "step"}
        self.log(flat_numbers(fields, self.layers), metrics.step)

    def flush(self) -> None:
        """Flushes what is buffered. It is called every few seconds."""

    def close(self, outcome: str) -> None:
        """Closes the tracker. It is called last; `outcome` is that of `describe_outcome`."""
        raise NotImplementedError


class TrackerMonitor(Monitor):
    """Passes a run's steps, evaluations and pauses to a tracker.

    Args:
        name: The name of the tracker in notes.
        make: Creates the tracker; called in its thread.
        note: Shows the user a note; called in the thread of the training.
        every: The tracker receives every n-th optimizer step, and the first and the last one.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], note: Callable[[str], None], every: int = 1) -> None:
        self._name = name
        self._make = make
        self._note = note
        self._every = every
        self._calls: queue.Queue[tuple[Any, ...]] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._dropped = 0
        self._failure_noted = False
        self._always: tuple[int, ...] = ()

    def on_start(self, info: RunInfo) -> None:
        self._always = (info.start_step + 1, info.last_step)
        self._thread = threading.Thread(target=self._work, args=(info,), name=self._name, daemon=True)
        self._thread.start()

    def on_step(self, metrics: StepMetrics) -> None:
        """Queues each `every`-th step, and the first and last one, for the tracker's thread."""
        if metrics.step % self._every == 0 or metrics.step in self._always:
            self._put("step", metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        numbers = {name: value for name, value in eval_record(metrics).items() if name.startswith("eval_")}
        self._put("log", flat_numbers(numbers), metrics.step)

    def on_samples(self, step: int, samples: Sequence[tuple[str, str]], seconds: float) -> None:
        self._put("log", {"sample_seconds": seconds}, step)

    def close(self, summary: RunSummary | None) -> None:
        """Lets the thread empty its queue, and waits at most `_END_SECONDS` for it."""
        if self._thread is None:
            return
        outcome = describe_outcome(summary, sys.exc_info()[1])
        if summary is not None and summary.save_wait_seconds:
            self._put("log", {"save_wait_seconds": summary.save_wait_seconds}, summary.last_step)
        thread = self._thread
        self._thread = None
        deadline = time.monotonic() + _END_SECONDS
        while thread.is_alive():  # a full queue is emptied first
            try:
                self._calls.put(("close", outcome), timeout=0.1)
                break
            except queue.Full:
                if time.monotonic() > deadline:
                    break
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            self._failure = f"did not end within {_END_SECONDS:.0f} s"
        self._note_failure()
        if self._dropped:
            self._note(f"{self._name}: {self._dropped} records were dropped, because it stores them too slowly")

    def _put(self, method: str, *arguments: object) -> None:
        """Queues a call of a method of the tracker."""
        if self._thread is None:
            return
        self._note_failure()
        if self._failure:
            return
        try:
            self._calls.put_nowait((method, *arguments))
        except queue.Full:
            self._dropped += 1

    def _note_failure(self) -> None:
        if self._failure and not self._failure_noted:
            self._failure_noted = True
            self._note(f"{self._name} stores nothing of this run from here on: {self._failure}")

    def _work(self, info: RunInfo) -> None:
        try:
            tracker = self._make()
            tracker.start(info)
            flushed = time.monotonic()
            method = ""
            while method != "close":
                with contextlib.suppress(queue.Empty):
                    method, *arguments = self._calls.get(timeout=_FLUSH_SECONDS)
                    getattr(tracker, method)(*arguments)
                if method != "close" and time.monotonic() - flushed >= _FLUSH_SECONDS:
                    tracker.flush()
                    flushed = time.monotonic()
        except BaseException as error:  # some packages end a process by SystemExit
            self._failure = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))


def flat_numbers(record: Mapping[str, object], layers: Sequence[int] = ()) -> dict[str, float]:
    """Returns the finite numbers of a record of metrics.jsonl, flat: ``drop_rate/layer_3``, ``local_norm/NAME``.

    Args:
        layers: The numbers of the MoE layers, for lists with a number per MoE layer.
    """
    values: dict[str, object] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            values |= {f"{name}/{key}": item for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            numbers = layers
            if len(layers) != len(value):
                numbers = range(len(value))
            values |= {f"{name}/layer_{number}": item for number, item in zip(numbers, value, strict=True)}
        else:
            values[name] = value
    known = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in known.items() if math.isfinite(value)}
