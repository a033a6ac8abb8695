"""What a run tells its monitors: plain values, one kind for each event, and the hooks that receive them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RunInfo:
    """What is known when the first step is about to run.

    Attributes:
        output_dir: Where the run writes.
        total_steps: Optimizer steps of the whole schedule.
        last_step: The step after which this run ends: ``total_steps``, or ``stop_step`` when that comes earlier.
        start_step: Optimizer steps already done by an earlier run; 0 for a fresh one.
        epochs: Epochs of the whole schedule.
        steps_per_epoch: Optimizer steps of one epoch.
        resumed_from: The checkpoint that this run continues, or None.
    """

    output_dir: Path
    total_steps: int
    last_step: int
    start_step: int = 0
    epochs: int = 1
    steps_per_epoch: int = 0
    resumed_from: Path | None = None


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, and one line of metrics.jsonl.

    Attributes:
        step: 1-based number of the optimizer step just done.
        total_steps: Optimizer steps of the whole schedule.
        epoch: 1-based epoch of the step.
        epochs: Epochs of the whole schedule.
        step_in_epoch: 1-based number of the step within its epoch.
        steps_per_epoch: Optimizer steps of one epoch.
        loss: Sum of token losses of the window divided by its valid tokens, in nats.
        lr: Learning rate the step was made with.
        global_norm: Norm of the gradient before clipping; None when nobody asked for it.
        loss_scale: Factor the loss was multiplied with for the backward pass; 1.0 without scaling.
        overflow: Whether the gradient was not finite, so that the update was skipped.
        tokens: Valid tokens of the window, over all micro-batches and ranks.
        tokens_per_second: ``tokens / step_seconds``.
        step_seconds: Wall-clock time of the step, waiting for data included.
        peak_rss_bytes: Highest resident memory of this process so far.
        extra: What models add, for example ``{"aux_loss": 1.02}``; the console shows it too. The part before the first
            dot names the panel of report.png that shows it.
        skipped: Why the step updated nothing; empty when it did.
        details: What metrics.jsonl keeps beside, for example the norm of each parameter's gradient, or lists with a
            number for each layer with experts.
        labels: What ``tokens`` counts, in a word: images for a classifier.
    """

    step: int
    total_steps: int
    epoch: int
    epochs: int
    step_in_epoch: int
    steps_per_epoch: int
    loss: float
    lr: float
    global_norm: float | None
    loss_scale: float
    overflow: bool
    tokens: int
    tokens_per_second: float
    step_seconds: float
    peak_rss_bytes: int
    extra: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    labels: str = "tokens"


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation.

    Attributes:
        step: Optimizer steps done before it; 0 before training.
        epoch: 1-based epoch it happened in.
        loss: Mean loss of a valid token, in nats.
        perplexity: ``exp(loss)``.
        tokens: Valid tokens evaluated.
        seconds: Wall-clock time of the evaluation.
        accuracy: Part of the images whose likeliest class is theirs; None for a decoder.
    """

    step: int
    epoch: int
    loss: float
    perplexity: float
    tokens: int
    seconds: float
    accuracy: float | None = None


@dataclass(frozen=True)
class RunSummary:
    """What a run did, for its last lines.

    Attributes:
        outcome: How it ended, for example ``"finished"`` or ``"stopped by SIGTERM"``.
        steps: Optimizer steps this run made.
        last_step: Number of the last optimizer step; ``total_steps`` when the schedule is complete.
        total_steps: Optimizer steps of the whole schedule.
        tokens: Valid tokens this run trained on.
        seconds: Wall-clock time from the start of the first step.
        tokens_per_second: Median over this run's steps without its first, which compiles; of that one if it is alone.
        first_step_seconds: Time of this run's first step, compilation included.
        first_loss: Loss of this run's first step; None without a step.
        last_loss: Loss of this run's last step; None without a step.
        best_eval: The evaluation with the lowest loss; None without one.
        last_eval: The last evaluation; None without one.
        skipped: How many steps updated nothing, by reason.
        peak_rss_bytes: Highest resident memory of this process.
        places: What lies where, for example ``{"metrics": Path("output/metrics.jsonl")}``.
        labels: What ``tokens`` counts, as in `StepMetrics`.
    """

    outcome: str
    steps: int
    last_step: int
    total_steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    first_step_seconds: float
    first_loss: float | None
    last_loss: float | None
    best_eval: EvalMetrics | None
    last_eval: EvalMetrics | None
    peak_rss_bytes: int
    places: Mapping[str, Path]
    skipped: Mapping[str, int] = field(default_factory=dict)
    labels: str = "tokens"


class Monitor:
    """The hooks of a run, each of which does nothing: a monitor overrides those it needs."""

    def on_start(self, info: RunInfo) -> None:
        """The first step is about to run."""

    def on_step(self, metrics: StepMetrics) -> None:
        """An optimizer step is done. Called every step: must stay far below a millisecond."""

    def on_eval(self, metrics: EvalMetrics) -> None:
        """An evaluation is done."""

    def on_checkpoint(self, path: Path, step: int) -> None:
        """A checkpoint of ``step`` lies complete at ``path``."""

    def on_notice(self, text: str) -> None:
        """Something a user should know, one sentence or a few lines."""

    def close(self, summary: RunSummary | None) -> None:
        """The run is over; ``summary`` is None when it failed. Releases what the monitor holds."""


def step_record(metrics: StepMetrics) -> dict[str, object]:
    """The fields of a step that metrics.jsonl keeps, in its order: totals stay out, they are in config.yaml."""
    return {
        "step": metrics.step,
        "epoch": metrics.epoch,
        "loss": metrics.loss,
        "lr": metrics.lr,
        "global_norm": metrics.global_norm,
        "loss_scale": metrics.loss_scale,
        "overflow": metrics.overflow,
        "tokens": metrics.tokens,
        "tokens_per_second": metrics.tokens_per_second,
        "step_seconds": metrics.step_seconds,
        "peak_rss_bytes": metrics.peak_rss_bytes,
        **({"skipped": metrics.skipped} if metrics.skipped else {}),
        **metrics.extra,
        **metrics.details,
    }


def eval_record(metrics: EvalMetrics) -> dict[str, object]:
    """The fields of an evaluation that metrics.jsonl keeps: ``step``, ``epoch`` and the rest behind ``eval_``."""
    fields = {name: value for name, value in asdict(metrics).items() if (name, value) != ("accuracy", None)}
    return {name if name in ("step", "epoch") else f"eval_{name}": value for name, value in fields.items()}


def peak_rss_bytes() -> int:
    """Highest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would count the memory of the process that started this one, from before it did.
        line = next((line for line in status.read_text(errors="replace").splitlines() if line.startswith("VmHWM")), "")
        if line:
            return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
