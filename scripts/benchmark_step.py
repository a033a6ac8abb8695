"""`benchmark.py step`: what accumulation, clipping, loss scaling, freezing and recomputation cost."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmark_tools import (
    ROOT,
    SETTLING_STEPS,
    Line,
    Measurement,
    conclude,
    last_json,
    median_of,
    mib,
    paired_ratio,
    run_process,
    run_trainer,
)
from rich.console import Console

ACCUMULATIONS = (1, 2, 4, 8, 16)
RECOMPUTE_LAYERS = 16
ROWS_MANY, ROWS_FEW = 8, 1
_VARIANT_LINES = {
    "clipping": ("step, clipping every time / without", 1.02, True),
    "dynamic scale": ("step, dynamic loss scale / without", 1.02, True),
    "half frozen": ("step, embedding and half of the layers frozen / none", 1.0, True),
    "recompute": ("step, every block recomputed / none", 1.4, False),
}


def accumulation_lines(runs: Mapping[int, Sequence[Measurement]]) -> list[Line]:
    """Compares time per token and memory of each number of micro-batches with one micro-batch.

    Args:
        runs: Runs by number of micro-batches, one per round.
    """
    speeds = {number: [1 / run.tokens_per_second for run in group] for number, group in runs.items()}
    lines = []
    for number in list(runs)[1:]:
        ratio, low, high = paired_ratio(speeds[number], speeds[1])
        detail = f"{1 / statistics.median(speeds[number]):.0f} tokens/s, rounds {low:.2f} to {high:.2f}"
        lines.append(Line(f"time per token, accumulation {number} / 1", ratio, 1.03, False, detail))
    peaks = {number: median_of(group, lambda run: run.peak_rss_bytes) for number, group in runs.items()}
    most = max(runs)
    detail = f"{mib(peaks[most])} / {mib(peaks[1])}"
    return [*lines, Line(f"peak memory, accumulation {most} / 1", peaks[most] / peaks[1], 1.05, False, detail)]


def variant_lines(seconds: Mapping[str, Sequence[float]]) -> list[Line]:
    """Compares the median step of each variant with the plain step.

    Args:
        seconds: Step times of `benchmark_variants.py` by variant.
    """
    plain = statistics.median(seconds["plain"])
    lines = []
    for name, (title, limit, binding) in _VARIANT_LINES.items():
        median = statistics.median(seconds[name])
        detail = f"{1000 * median:.0f} / {1000 * plain:.0f} ms"
        lines.append(Line(title, median / plain, limit, False, detail, binding))
    return lines


def activation_bytes(many: Measurement, few: Measurement) -> float:
    """Returns the memory that grows with the batch, for ROWS_MANY sequences; constant memory cancels out."""
    return (many.peak_rss_bytes - few.peak_rss_bytes) * ROWS_MANY / (ROWS_MANY - ROWS_FEW)


def memory_line(title: str, limit: float, with_it: float, without: float) -> Line:
    name = f"activations of {RECOMPUTE_LAYERS} layers, {title}"
    return Line(name, with_it / without, limit, False, f"{mib(with_it)} / {mib(without)}")


def step(options: argparse.Namespace, console: Console) -> int:
    runs: dict[int, list[Measurement]] = {number: [] for number in ACCUMULATIONS}
    steps = SETTLING_STEPS + 4
    for number in range(1, options.rounds + 1):
        for micro_batches in ACCUMULATIONS:
            console.print(f"round {number} of {options.rounds}: accumulation {micro_batches}")
            # Equally many micro-batches in each run, and at least three steps that count.
            count = max(steps, SETTLING_STEPS + 1 + options.micro_batches // micro_batches)
            runs[micro_batches].append(
                run_trainer(options.trainer, options.config, count, "--gradient_accumulation_steps", str(micro_batches))
            )
    console.print("clipping, loss scale, freezing and recomputation, alternating")
    seconds = run_script("benchmark_variants.py", "--config", options.config)
    console.print("AdamW against copying, alternating")
    adamw = run_script("benchmark_adamw.py", options.config)
    memory = measure_activations(options, console, SETTLING_STEPS + 2)
    lines = [
        *accumulation_lines(runs),
        *variant_lines(seconds),
        memory_line("recomputed / none", 0.25, memory["recompute"], memory["plain"]),
        memory_line("half of them frozen / none", 0.75, memory["frozen"], memory["plain"]),
        Line("AdamW / copying weights, gradients and moments once", adamw["ratio"], 1.5, False,
             f"{1000 * adamw['adamw_seconds']:.1f} / {1000 * adamw['copy_seconds']:.1f} ms"),
    ]
    return conclude(
        "step", "The training step", lines, console,
        runs={str(number): [asdict(run) for run in group] for number, group in runs.items()},
        variants=seconds, adamw=adamw, activation_bytes=memory,
    )


def run_script(name: str, *arguments: str) -> dict:
    """Runs a script of this folder, and returns the JSON line that it prints."""
    return last_json(run_process([sys.executable, ROOT / "scripts" / name, *arguments]))


def measure_activations(options: argparse.Namespace, console: Console, steps: int) -> dict[str, float]:
    """Returns the bytes of activations by variant, with RECOMPUTE_LAYERS layers."""
    half = f"[embeddings, 'layers: 0-{RECOMPUTE_LAYERS // 2 - 1}']"
    flags = {"plain": [], "recompute": ["--recompute_config.recompute", "True"], "frozen": ["--freeze.include", half]}
    layers = ["--model.model_config.num_layers", str(RECOMPUTE_LAYERS)]
    found = {}
    for name, extra in flags.items():
        console.print(f"memory with {RECOMPUTE_LAYERS} layers: {name}")
        many, few = (
            run_trainer(options.trainer, options.config, steps, *layers, *extra, "--batch_size", str(rows))
            for rows in (ROWS_MANY, ROWS_FEW)
        )
        found[name] = activation_bytes(many, few)
    return found


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("step", help="accumulation, clipping, loss scale, freezing, recomputation")
    command.add_argument("--config", default=str(ROOT / "configs" / "bench_dense.yaml"))
    command.add_argument("--trainer", type=Path, default=ROOT / "run_trainer.py", help="the program to measure")
    command.add_argument("--rounds", type=int, default=2, help="alternating runs of each accumulation")
    command.add_argument("--micro_batches", type=int, default=24, help="micro-batches of a run that count")
