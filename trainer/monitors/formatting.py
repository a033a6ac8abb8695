"""Formats the lines that a run prints, its numbers and its summary."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trainer.monitors.metrics import DROP_RATE, EvalMetrics, RunInfo, RunSummary, StepMetrics

StepLine = Callable[[StepMetrics, float | None], str]


def count(number: float) -> str:
    """Formats a count in at most five characters: ``987``, ``12.3k``, ``4.56M``."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (float("inf"), 1e9, "G")):
        # The limit leaves room for rounding, so that 999999 is 1.00M and not 1000k.
        if number < limit * 0.9995:
            scaled = number / divisor
            digits = 0
            if unit and scaled < 9.995:
                digits = 2
            elif unit and scaled < 99.95:
                digits = 1
            return f"{scaled:.{digits}f}{unit}"
    return str(number)


def duration(seconds: float) -> str:
    """Formats a duration: ``0.42s``, ``12s``, ``3m05s``, ``2h07m``, ``3d04h``."""
    if not seconds < float("inf"):
        return "?"
    if seconds < 9.95:
        if seconds >= 0.1:
            return f"{seconds:.2g}s"
        return f"{seconds * 1000:.0f}ms"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def size(number_bytes: float) -> str:
    """Formats a memory size: ``512 MiB``, ``1.43 GiB``."""
    if number_bytes < 1 << 20:
        return f"{number_bytes / (1 << 10):.0f} KiB"
    if number_bytes < 1 << 30:
        return f"{number_bytes / (1 << 20):.0f} MiB"
    return f"{number_bytes / (1 << 30):.2f} GiB"


def rate(metrics: StepMetrics | RunSummary) -> str:
    """Formats the tokens per second, and those with a loss if they are fewer than 95 % of all."""
    text = f"{count(metrics.input_tokens_per_second)} {metrics.labels}/s"
    if metrics.tokens_per_second >= 0.95 * metrics.input_tokens_per_second:
        return text
    return f"{text}, {count(metrics.tokens_per_second)} with loss"


def utilization(metrics: StepMetrics) -> str:
    """Formats ``mfu 41.5 %``, or ``83.2 GFLOP/s`` if the device has no published peak; empty if FLOPs are unknown."""
    if metrics.mfu is not None:
        return f"mfu {100 * metrics.mfu:.1f} %"
    if not metrics.flops_per_second:
        return ""
    if metrics.flops_per_second >= 1e12:
        return f"{metrics.flops_per_second / 1e12:.3g} TFLOP/s"
    return f"{metrics.flops_per_second / 1e9:.3g} GFLOP/s"


def plain_step(metrics: StepMetrics, eta_seconds: float | None) -> str:
    """Formats ``step 20/100 | epoch 1/2 | loss 5.6123 | lr 5.00e-05 | norm 0.981 | 12.3k tokens/s | eta 1m05s``."""
    width = len(str(metrics.last_step))
    parts = [
        f"step {metrics.step:>{width}}/{metrics.last_step}",
        f"epoch {metrics.epoch}/{metrics.epochs}",
        f"loss {metrics.loss:.4f}",
        f"lr {metrics.lr:.2e}",
    ]
    if metrics.global_norm is not None:
        parts.append(f"norm {metrics.global_norm:.3g}")
    if metrics.loss_scale != 1.0:
        parts.append(f"scale {metrics.loss_scale:g}")
    if metrics.overflow:
        parts.append("OVERFLOW, update skipped")
    parts += [f"{name} {value:.4g}" for name, value in metrics.extra.items()]
    parts.append(rate(metrics))
    if utilization(metrics):
        parts.append(utilization(metrics))
    if eta_seconds is not None:
        parts.append(f"eta {duration(eta_seconds)}")
    return " | ".join(parts)


def mindformers_step(metrics: StepMetrics, eta_seconds: float | None) -> str:
    """Formats a step as MindSpore Transformers does, for tools that read its logs; without a norm if it is None."""
    epochs = f"Epoch:[{metrics.epoch:>3}/{metrics.epochs:>3}]"
    steps = f"step:[{metrics.step_in_epoch:>5}/{metrics.steps_per_epoch:>5}]"
    norm = ""
    if metrics.global_norm is not None:
        norm = f", global_norm: {metrics.global_norm:.3f}"
    extra = "".join(f", {name}: {value:.6f}" for name, value in metrics.extra.items())
    scale = f"overflow cond: {metrics.overflow}, loss_scale: {float(metrics.loss_scale)}"
    return (
        f"{{ {epochs}, {steps}, loss: {metrics.loss:.6f}, per_step_time: {metrics.step_seconds * 1000:.0f}ms, "
        f"lr: {_scientific(metrics.lr)}, {scale}{norm}{extra} }}"
    )


def mindspore_step(metrics: StepMetrics, eta_seconds: float | None) -> str:
    """Formats a step as MindSpore's LossMonitor does: ``epoch: 1 step: 100, loss is 7.793933868408203``."""
    return f"epoch: {metrics.epoch} step: {metrics.step_in_epoch}, loss is {metrics.loss}"


STEP_LINES: dict[str, StepLine] = {
    "rich": plain_step, "plain": plain_step, "mindformers": mindformers_step, "mindspore": mindspore_step,
}  # fmt: skip
"""The format of a step's line by `log_format`; ``rich`` has plain lines outside a terminal."""


def _scientific(number: float) -> str:
    """Formats a number with float32's eight digits, without trailing zeros: ``5.0e-05``, ``2.5641026e-08``."""
    return re.sub(r"(?<=\.\d)(\d*?)0+e", r"\1e", f"{number:.7e}")


def drop_rate_lines(metrics: StepMetrics, layers: Sequence[int]) -> list[str]:
    """Formats the drop rates of a step as MindSpore Transformers does, a line per MoE layer.

    Args:
        layers: The numbers of the MoE layers; MTP modules continue after the last layer.
    """
    rates = metrics.details.get(DROP_RATE)  # missing in a step without a loss token
    if not isinstance(rates, list):
        return []
    return [f"layer: {layer}, drop_rate: {rate:.5f}" for layer, rate in zip(layers, rates, strict=True)]


def eval_line(metrics: EvalMetrics) -> str:
    """Formats ``eval at step 20: loss 2.2510, perplexity 9.497 (16.4k tokens in 1.2s)``; step 0 is left out."""
    name = "eval"
    if metrics.step:
        name = f"eval at step {metrics.step}"
    tokens = f"{count(metrics.tokens)} tokens in {duration(metrics.seconds)}"
    if metrics.accuracy is not None and metrics.margin is not None:
        accuracy = f"accuracy {100 * metrics.accuracy:.2f} %, margin {metrics.margin:.4g}"
        return f"{name}: loss {metrics.loss:.4f}, {accuracy} ({tokens})"
    if metrics.accuracy is not None:
        images = f"{count(metrics.tokens)} images in {duration(metrics.seconds)}"
        return f"{name}: loss {metrics.loss:.4f}, accuracy {100 * metrics.accuracy:.2f} % ({images})"
    divergence = ""
    if metrics.kl is not None:
        divergence = f", kl {metrics.kl:.4g}"
    return f"{name}: loss {metrics.loss:.4f}, perplexity {metrics.perplexity:.4g}{divergence} ({tokens})"


def start_line(info: RunInfo) -> str:
    """Formats ``training: steps 51 to 100 of 200 (2 epochs of 100), continuing output/checkpoints/step-00000050``."""
    epochs = ""
    if info.epochs > 1 and info.total_steps <= info.epochs * info.steps_per_epoch:  # no ramp-up of the batch
        epochs = f" ({info.epochs} epochs of {info.steps_per_epoch})"
    origin = ""
    if info.resumed_from:
        origin = f", continuing {info.resumed_from}"
    return f"training: steps {info.start_step + 1} to {info.last_step} of {info.total_steps}{epochs}{origin}"


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """Returns the closing summary as rows of name and value, without rows for what the run did not do."""
    done = "1 step"
    if summary.steps != 1:
        done = f"{summary.steps} steps"
    where = f"{summary.outcome} at step {summary.last_step} of {summary.total_steps}"
    rows = [("run", f"{where}: {done} in {duration(summary.seconds)}")]
    if summary.steps:
        after = ""
        if summary.steps > 1:
            after = f" (median; first step {duration(summary.first_step_seconds)})"
        rows.append((summary.labels, f"{count(summary.tokens)}, {rate(summary)}{after}"))
    if summary.skipped:
        reasons = ", ".join(f"{number} x {reason}" for reason, number in summary.skipped.items())
        rows.append(("skipped", f"{sum(summary.skipped.values())} steps changed no weight: {reasons}"))
    if summary.first_loss is not None and summary.last_loss is not None:
        rows.append(("loss", f"{summary.first_loss:.4f} -> {summary.last_loss:.4f}"))
    if summary.best_eval and summary.last_eval:
        best = summary.best_eval
        last = summary.last_eval
        last_text = f"last {last.loss:.4f} at step {last.step}"
        rows.append(("eval loss", f"best {best.loss:.4f} at step {best.step}, {last_text}"))
        if last.accuracy is not None:
            rows.append(("accuracy", f"last {100 * last.accuracy:.2f} % at step {last.step}"))
    rows.append(("peak memory", size(summary.peak_rss_bytes)))
    rows += [(name, str(path)) for name, path in summary.paths.items()]
    return rows


def summary_lines(summary: RunSummary) -> list[str]:
    """Formats the closing summary as aligned lines."""
    rows = summary_rows(summary)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]
