"""The events of a run as plain values, the hooks of a monitor that receive them, and the totals of a run."""

from __future__ import annotations

import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.ops.routing import RouterRates

DROP_RATE = "drop_rate"
LOAD_IMBALANCE = "load_imbalance"
ROUTER_ENTROPY = "router_entropy"
"""Fields of metrics.jsonl, each a list with a number for each MoE layer."""

_STEP_FIELDS = (
    "step", "epoch", "loss", "lr", "global_norm", "loss_scale", "overflow", "tokens", "tokens_per_second",
    "input_tokens_per_second", "mfu", "step_seconds", "data_wait_seconds", "peak_rss_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class RunInfo:
    """What is known before the first step. All steps are optimizer steps."""

    output_dir: Path
    total_steps: int  # of the whole schedule
    last_step: int  # step after which this run ends: total_steps, or stop_step if that is smaller
    start_step: int = 0  # steps that an earlier run has done
    epochs: int = 1  # of the whole schedule
    steps_per_epoch: int = 0
    resumed_from: Path | None = None  # the checkpoint that this run continues
    restarted: Mapping[str, object] = field(default_factory=dict)  # number, reason ... of a job that starts again
    compiles: bool = True  # whether the first step compiles
    samples_per_step: int = 0  # sequences or images of a full window, over all ranks
    ranks: int = 1
    flops_per_step: float = 0.0  # floating-point operations of the model in a full window, by the plan's count


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, and one line of metrics.jsonl. Steps and epochs count from 1.

    Attributes:
        extra: Values that models add, for example ``{"aux_loss": 1.02}``; the console shows them too. In report.png
            the part before the first dot names the panel.
        details: Values for metrics.jsonl alone, for example the norm of each gradient, or a number for each MoE layer.
    """

    step: int
    last_step: int  # step after which this run ends
    epoch: int
    epochs: int  # of the whole schedule
    step_in_epoch: int
    steps_per_epoch: int
    loss: float  # sum of token losses of the window divided by its valid tokens, in nats
    lr: float
    global_norm: float | None  # before clipping; None when it was not requested
    loss_scale: float  # 1.0 without scaling
    overflow: bool  # whether the gradient was not finite, so that the update was skipped
    tokens: int  # valid tokens of the window, over all micro-batches and ranks
    tokens_per_second: float  # valid tokens
    input_tokens_per_second: float  # all tokens that are computed: with prompts and padding, over all ranks
    step_seconds: float  # wall-clock time, including the wait for data
    data_wait_seconds: float  # the wait for data
    peak_rss_bytes: int  # highest resident memory of this process so far
    extra: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""  # why the step updated nothing
    details: Mapping[str, object] = field(default_factory=dict)
    labels: str = "tokens"  # the unit of tokens: "images" for a classifier
    flops_per_second: float = 0.0  # of the model, by the plan's count; 0 where that is not known
    mfu: float | None = None  # model FLOPs utilization, 0 to 1; None where the devices have no published peak


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation."""

    step: int  # optimizer steps done before it; 0 before training
    epoch: int  # from 1
    loss: float  # mean per valid token, in nats
    perplexity: float  # exp(loss)
    tokens: int  # valid tokens evaluated
    seconds: float  # wall-clock time
    accuracy: float | None = None  # fraction of the images that are classified right; None for a decoder


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run, for its last lines. Values are None where the run made no step or no evaluation."""

    outcome: str  # how it ended, for example "finished" or "stopped by SIGTERM"
    steps: int  # optimizer steps of this run
    last_step: int  # number of the last optimizer step; total_steps when the schedule is complete
    total_steps: int  # of the whole schedule
    tokens: int  # valid tokens this run trained on
    seconds: float  # wall-clock time from the start of the first step
    # Medians over the steps except the first, which compiles; the first if it is alone.
    tokens_per_second: float
    input_tokens_per_second: float
    first_step_seconds: float  # compilation included
    first_loss: float | None
    last_loss: float | None
    best_eval: EvalMetrics | None  # the one with the lowest loss
    last_eval: EvalMetrics | None
    peak_rss_bytes: int
    paths: Mapping[str, Path]  # files of the run by name, for example {"metrics": Path("output/metrics.jsonl")}
    skipped: Mapping[str, int] = field(default_factory=dict)  # steps that updated nothing, by reason
    labels: str = "tokens"  # the unit of tokens, as in StepMetrics
    save_wait_seconds: float = 0.0  # how long the training waited for checkpoints after its last step


class Monitor:
    """The hooks of a run, which do nothing: a monitor overrides those that it needs."""

    def on_start(self, info: RunInfo) -> None:
        """Called before the first step."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Called after every optimizer step: must stay far below a millisecond."""

    def on_activity(self, name: str, done: int = 0, total: int = 0) -> None:
        """Called when the run begins with something that is no step, such as "evaluating", as often as it gets on, and
        with an empty name when it is over. Must be as quick as `on_step`."""

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Called after an evaluation."""

    def on_samples(self, step: int, samples: Sequence[tuple[str, str]], seconds: float) -> None:
        """Called with prompts, what the model of ``step`` adds to each, and how long that took."""

    def on_checkpoint(self, path: Path, step: int) -> None:
        """Called when the checkpoint of ``step`` is complete at ``path``."""

    def on_note(self, text: str) -> None:
        """Called with something that the user should know: a sentence or a few lines."""

    def close(self, summary: RunSummary | None) -> None:
        """Called at the end to release resources; ``summary`` is None when the run failed."""


def step_record(metrics: StepMetrics) -> dict[str, object]:
    """The fields of a step in metrics.jsonl, in order."""
    if metrics.skipped:
        skipped = {"skipped": metrics.skipped}
    else:
        skipped = {}
    fields = {name: getattr(metrics, name) for name in _STEP_FIELDS}
    if metrics.mfu is None:
        del fields["mfu"]
    return fields | skipped | {**metrics.extra, **metrics.details}


def eval_record(metrics: EvalMetrics) -> dict[str, object]:
    """The fields of an evaluation in metrics.jsonl: ``step``, ``epoch``, and the others with the prefix ``eval_``."""
    fields = {name: value for name, value in asdict(metrics).items() if (name, value) != ("accuracy", None)}
    return {name if name in ("step", "epoch") else f"eval_{name}": value for name, value in fields.items()}


def routing_details(rates: RouterRates) -> dict[str, list[float]]:
    """The router statistics of a step for metrics.jsonl.

    The drop rate is counted (assignments dropped / requested), not estimated from the router's scores. The load
    imbalance is the busiest expert's load over the mean, 1 for an even load. The entropy of scores is in nats
    and at most log(experts).
    """
    found = {DROP_RATE: rates.drop_rate, LOAD_IMBALANCE: rates.load_imbalance, ROUTER_ENTROPY: rates.entropy}
    return {name: [float(value) for value in values] for name, values in found.items()}


def peak_rss_bytes() -> int:
    """Highest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # psutil has no peak, and getrusage includes the memory of the parent process before exec.
        line = next((line for line in status.read_text(errors="replace").splitlines() if line.startswith("VmHWM")), "")
        if line:
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


class Totals(Monitor):
    """Collects the figures of the summary; stores 16 bytes a step."""

    def __init__(self) -> None:
        self._info: RunInfo | None = None
        self._started_at = time.perf_counter()
        self._rates = array("d")  # tokens per second of every step
        self._input_rates = array("d")
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
        self._input_rates.append(metrics.input_tokens_per_second)
        if metrics.skipped:
            self._skipped[metrics.skipped.partition(":")[0]] += 1
        self._tokens += metrics.tokens
        self._first = self._first or metrics
        self._last = metrics

    def on_eval(self, metrics: EvalMetrics) -> None:
        self._last_eval = metrics
        # A NaN is never the best loss, even when it came first.
        if self._best_eval is None or metrics.loss < self._best_eval.loss or math.isnan(self._best_eval.loss):
            self._best_eval = metrics

    def summary(self, outcome: str, paths: Mapping[str, Path], save_wait_seconds: float = 0.0) -> RunSummary:
        """The summary of the run so far."""
        if self._info:
            start_step = self._info.start_step
            total_steps = self._info.total_steps
        else:
            start_step = 0
            total_steps = 0
        return RunSummary(
            outcome=outcome,
            steps=len(self._rates),
            last_step=self._last.step if self._last else start_step,
            total_steps=total_steps,
            tokens=self._tokens,
            seconds=time.perf_counter() - self._started_at,
            tokens_per_second=steady_rate(self._rates) or 0.0,
            input_tokens_per_second=steady_rate(self._input_rates) or 0.0,
            first_step_seconds=self._first.step_seconds if self._first else 0.0,
            first_loss=self._first.loss if self._first else None,
            last_loss=self._last.loss if self._last else None,
            best_eval=self._best_eval,
            last_eval=self._last_eval,
            peak_rss_bytes=peak_rss_bytes(),
            paths=dict(paths),
            skipped=dict(self._skipped),
            labels=self._last.labels if self._last else "tokens",
            save_wait_seconds=save_wait_seconds,
        )


def steady_rate(rates: array[float]) -> float | None:
    """The median over steps without the first one, which compiles; of the first if it is alone, None without any. It is
    tokens/s wherever one number stands for a run."""
    import numpy as np

    # sorting a million takes half a second
    if rates:
        return float(np.median(np.array(rates[1:] or rates)))
    return None
