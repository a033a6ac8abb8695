"""Defines the events of a run as plain values, the monitors that receive them, and the totals of a run."""

from __future__ import annotations

import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainer.errors import EXIT_SIGTERM, TrainerError

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
    restarted: Mapping[str, object] = field(default_factory=dict)  # number, most, reason and ranks of a restarted job
    compiles: bool = True  # whether the first step compiles
    ranks: int = 1


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, and one line of metrics.jsonl. Steps and epochs count from 1.

    Attributes:
        extra: Values that models add, for example ``{"aux_loss": 1.02}``; the console shows them, too. In report.png
            the text before the first dot of a name is the title of its panel.
        details: Values that only metrics.jsonl has, for example the norm of each gradient, or a number per MoE layer.
    """

    step: int
    last_step: int  # step after which this run ends
    epoch: int
    epochs: int  # of the whole schedule
    step_in_epoch: int
    steps_per_epoch: int
    loss: float  # mean over the loss tokens of the global batch, in nats
    lr: float
    global_norm: float | None  # before clipping; None when it was not requested
    loss_scale: float  # 1.0 without scaling
    overflow: bool  # whether the gradient was not finite, so that the update was skipped
    tokens: int  # loss tokens of the global batch
    tokens_per_second: float  # loss tokens
    input_tokens_per_second: float  # all tokens of the global batch, with prompts and padding
    step_seconds: float  # wall-clock time, including the wait for data
    data_wait_seconds: float  # the wait for data
    peak_rss_bytes: int  # highest resident memory of this process so far
    samples: int = 0  # sequences or images of the global batch
    samples_seen: int = 0  # by this step and all before
    extra: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""  # why the step updated nothing
    details: Mapping[str, object] = field(default_factory=dict)
    labels: str = "tokens"  # the unit of tokens, "tokens" or "images"
    flops_per_second: float = 0.0  # of the model, by the plan's count; 0 where that is not known
    mfu: float | None = None  # model FLOPs utilization, 0 to 1; None where the devices have no published peak


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation."""

    step: int  # optimizer steps done before it; 0 before training
    epoch: int  # from 1
    loss: float  # mean over the loss tokens, in nats
    perplexity: float | None  # exp(loss); None for a loss of preferences
    tokens: int  # loss tokens
    seconds: float  # wall-clock time
    accuracy: float | None = None  # fraction of the images, or of the pairs of answers, that are right
    margin: float | None = None  # of pairs of answers: mean reward of the chosen ones minus that of the rejected ones
    kl: float | None = None  # mean divergence from the teacher of a distillation, in nats


@dataclass(frozen=True)
class RunSummary:
    """The summary that a run prints at its end. Values are None without a step, or without an evaluation."""

    outcome: str  # how it ended, for example "finished" or "stopped by SIGTERM"
    steps: int  # optimizer steps of this run
    last_step: int  # number of the last optimizer step; total_steps when the schedule is complete
    total_steps: int  # of the whole schedule
    tokens: int  # loss tokens that this run trained on
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
        """Receives the facts of the run before its first step."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Receives every optimizer step; must take far less than a millisecond."""

    def on_activity(self, name: str, done: int = 0, total: int = 0) -> None:
        """Receives what the run does between steps, such as "evaluating", and its progress.

        The name is empty when the activity has ended. It must be as fast as `on_step`.
        """

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Receives an evaluation."""

    def on_samples(self, step: int, samples: Sequence[tuple[str, str]], seconds: float) -> None:
        """Receives prompts with the text that the model of ``step`` adds to each, and the time that it took."""

    def on_checkpoint(self, path: Path, step: int) -> None:
        """Receives the path of the checkpoint of ``step`` when it is complete."""

    def on_note(self, text: str) -> None:
        """Receives a note for the user: a sentence or a few lines."""

    def on_second_signal(self, outcome: str) -> None:
        """Receives that a second stop signal ends the run at once, maybe without `close`: within a signal handler."""

    def close(self, summary: RunSummary | None) -> None:
        """Releases resources at the end of the run; ``summary`` is None if the run failed or had nothing to do."""


def step_record(metrics: StepMetrics) -> dict[str, object]:
    """Returns the fields of a step in metrics.jsonl, in order."""
    fields: dict[str, object] = {name: getattr(metrics, name) for name in _STEP_FIELDS}
    if metrics.mfu is None:
        del fields["mfu"]
    if metrics.skipped:
        fields["skipped"] = metrics.skipped
    return fields | {**metrics.extra, **metrics.details}


def eval_record(metrics: EvalMetrics) -> dict[str, object]:
    """Returns the fields of an evaluation in metrics.jsonl: ``step``, ``epoch``, and ``eval_...`` for the others."""
    values = asdict(metrics)
    record = {name: values.pop(name) for name in ("step", "epoch")}
    return record | {f"eval_{name}": value for name, value in values.items() if value is not None}


def routing_details(rates: RouterRates) -> dict[str, list[float]]:
    """Returns the router statistics of a step for metrics.jsonl.

    The drop rate is the number of dropped assignments over the number of requested ones. The load imbalance is the
    busiest expert's load over the mean, 1 for an even load. The entropy of the router's scores is in nats and at most
    log(experts).
    """
    by_field = {DROP_RATE: rates.drop_rate, LOAD_IMBALANCE: rates.load_imbalance, ROUTER_ENTROPY: rates.entropy}
    return {name: [float(value) for value in values] for name, values in by_field.items()}


def peak_rss_bytes() -> int:
    """Returns the highest resident memory of this process so far, in bytes."""
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


def describe_outcome(summary: RunSummary | None, error: BaseException | None) -> str:
    """Returns in one line how a run ended: ``finished``, ``stopped early``, ``stopped by SIGTERM``, ``failed: ...``.

    Args:
        summary: None if the run failed, or a second signal ended it at once.
        error: What then ended it.
    """
    if summary is not None:
        return summary.outcome
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT"
    if isinstance(error, SystemExit) and error.code == EXIT_SIGTERM:
        return "stopped by SIGTERM"
    if error is None:
        return "failed"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TrainerError):
        text = str(error)
    return f"failed: {' '.join(text.split())[:300]}"


def final_state(outcome: str) -> Literal["finished", "stopped", "failed"]:
    """Returns the state of a run that ended with an outcome of `describe_outcome`; an early stop is a finished run."""
    if outcome == "stopped early" or outcome.startswith("finished"):
        return "finished"
    if outcome.startswith("stopped"):
        return "stopped"
    return "failed"


class Totals(Monitor):
    """Collects the figures of the summary; stores 16 bytes a step."""

    def __init__(self) -> None:
        self._info = RunInfo(Path(), 0, 0)
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
        """Adds the step to the totals."""
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
        """Returns the summary of the run so far."""
        summary = RunSummary(
            outcome=outcome,
            steps=len(self._rates),
            last_step=self._info.start_step,
            total_steps=self._info.total_steps,
            tokens=self._tokens,
            seconds=time.perf_counter() - self._started_at,
            tokens_per_second=median_rate(self._rates) or 0.0,
            input_tokens_per_second=median_rate(self._input_rates) or 0.0,
            first_step_seconds=0.0,
            first_loss=None,
            last_loss=None,
            best_eval=self._best_eval,
            last_eval=self._last_eval,
            peak_rss_bytes=peak_rss_bytes(),
            paths=dict(paths),
            skipped=dict(self._skipped),
            save_wait_seconds=save_wait_seconds,
        )
        if self._first is None or self._last is None:
            return summary
        return replace(
            summary,
            last_step=self._last.step,
            first_step_seconds=self._first.step_seconds,
            first_loss=self._first.loss,
            last_loss=self._last.loss,
            labels=self._last.labels,
        )


def median_rate(rates: array[float]) -> float | None:
    """Returns the median over all steps but the first, which compiles. This is "the" tokens/s of a run.

    With one step it is the rate of that step; without a step it is None.
    """
    if not rates:
        return None
    import numpy as np  # sorting a million numbers in Python takes half a second

    return float(np.median(np.array(rates[1:] or rates)))
