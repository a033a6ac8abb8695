"""Adds a run's steps and evaluations up to the figures of its closing summary."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from trainer.monitors.metrics import EvalMetrics, Monitor, RunInfo, RunSummary, StepMetrics, peak_rss_bytes


class Totals(Monitor):
    """Collects what ``summary`` tells; keeps 8 bytes a step."""

    def __init__(self) -> None:
        self._info: RunInfo | None = None
        self._started_at = time.perf_counter()
        self._rates = array("d")  # tokens per second of every step
        self._tokens = 0
        self._skipped: Counter[str] = Counter()
        self._first: StepMetrics | None = None
        self._last: StepMetrics | None = None
        self._best_eval: EvalMetrics | None = None
        self._last_eval: EvalMetrics | None = None

    def on_start(self, info: RunInfo) -> None:
        self._info = info
        self._started_at = time.perf_counter()

    def on_step(self, metrics: StepMetrics) -> None:
        self._rates.append(metrics.tokens_per_second)
        if metrics.skipped:
            self._skipped[metrics.skipped.partition(":")[0]] += 1
        self._tokens += metrics.tokens
        self._first = self._first or metrics
        self._last = metrics

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._last_eval = metrics
        # A loss that is not a number is never the best, not even when it came first.
        if self._best_eval is None or metrics.loss < self._best_eval.loss or math.isnan(self._best_eval.loss):
            self._best_eval = metrics

    def summary(self, outcome: str, places: Mapping[str, Path]) -> RunSummary:
        """The run so far.

        Args:
            outcome: How it ended, for example ``"finished"``.
            places: What lies where, in the order to show.
        """
        start_step, total_steps = (self._info.start_step, self._info.total_steps) if self._info else (0, 0)
        steady = self._rates[1:] or self._rates
        return RunSummary(
            outcome=outcome,
            steps=len(self._rates),
            last_step=self._last.step if self._last else start_step,
            total_steps=total_steps,
            tokens=self._tokens,
            seconds=time.perf_counter() - self._started_at,
            tokens_per_second=statistics.median(steady) if steady else 0.0,
            first_step_seconds=self._first.step_seconds if self._first else 0.0,
            first_loss=self._first.loss if self._first else None,
            last_loss=self._last.loss if self._last else None,
            best_eval=self._best_eval,
            last_eval=self._last_eval,
            peak_rss_bytes=peak_rss_bytes(),
            places=dict(places),
            skipped=dict(self._skipped),
            labels=self._last.labels if self._last else "tokens",
        )
