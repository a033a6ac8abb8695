"""`benchmark.py parallel`: two ranks that shard a model, against two data-parallel ranks with as many tokens."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

from benchmark_launch import launched, steady
from benchmark_tools import ROOT, SETTLING_STEPS, Line, conclude, paired_ratio
from rich.console import Console

RANKS = 2
DEGREE = "--parallel_config."


class Division(NamedTuple):
    """Describes a job that shards a model, and the data-parallel job that it is compared with.

    Attributes:
        limit: Lowest tokens per second relative to data parallelism.
    """

    name: str
    config: str
    flags: tuple[str, ...]
    data_parallel: tuple[str, ...]
    limit: float


def _batch(sequences: int) -> tuple[str, ...]:
    return "--runner_config.batch_size", str(sequences)


def divisions(sequences: int = 8, micro_batches: int = 8) -> list[Division]:
    """Returns the jobs to compare; a step of each has `sequences` sequences a rank, in a pipeline as many
    micro-batches."""
    dense, whole, own = "bench_dense.yaml", _batch(RANKS * sequences), _batch(sequences)
    tensor, context = (f"{DEGREE}model_parallel", "2"), (f"{DEGREE}context_parallel", "2")
    stages = (f"{DEGREE}pipeline_stage", "2", f"{DEGREE}micro_batch_num", str(micro_batches))
    accumulated = (*own, "--gradient_accumulation_steps", str(micro_batches // RANKS))
    return [
        Division("tensor", dense, (*whole, *tensor), own, 0.7),
        Division("tensor and sequence", dense, (*whole, *tensor, f"{DEGREE}use_seq_parallel", "True"), own, 0.7),
        Division("expert", "bench_moe.yaml", (*own, f"{DEGREE}expert_parallel", "2"), own, 0.8),
        Division("pipeline", dense, (*own, *stages), accumulated, 0.75),
        Division("context", dense, (*whole, *context), own, 0.8),
    ]


def parallel(options: argparse.Namespace, console: Console) -> int:
    lines, steps = [], {}
    for one in divisions():
        if options.only and one.name not in options.only:
            continue
        options.config = str(ROOT / "configs" / one.config)
        divided, data, jobs = [], [], []
        for number in range(1, options.rounds + 1):
            console.print(f"round {number} of {options.rounds}: {one.name} parallelism, then data parallelism")
            for flags, speeds in ((one.flags, divided), (one.data_parallel, data)):
                job, _ = launched(options, RANKS, options.steps, "--use_parallel", "True", *flags)
                # A rank of a divided model writes the tokens of the whole step, as a data-parallel one does.
                speeds.append(steady(job, "tokens") / steady(job, "step_seconds"))
                jobs.append(job)
        ratio, low, high = paired_ratio(divided, data)
        speeds = f"{statistics.median(divided):.0f} / {statistics.median(data):.0f} tokens/s"
        detail = f"{speeds}, rounds {low:.2f} to {high:.2f}"
        name = f"tokens/s, {one.name} / data parallelism, {RANKS} ranks"
        lines.append(Line(name, ratio, one.limit, True, detail))
        steps[one.name] = jobs
    return conclude("parallel", "Ranks that divide a model", lines, console, steps=steps)


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("parallel", help="two ranks that divide a model, against two data-parallel ones")
    command.add_argument("--trainer", type=Path, default=ROOT / "run_trainer.py", help="the program to measure")
    command.add_argument("--only", nargs="+", choices=[one.name for one in divisions()], help="leave out the others")
    command.add_argument("--rounds", type=int, default=3, help="alternating runs of each side")
    command.add_argument("--steps", type=int, default=12,
                         help=f"steps a run; the first {1 + SETTLING_STEPS} are not counted")
