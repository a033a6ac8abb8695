"""`benchmark.py launch`: cost of starting workers, of synchronising them and of sharding the optimizer's state."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmark_tools import (
    ROOT,
    SETTLING_STEPS,
    Line,
    RunFailed,
    conclude,
    measure_metrics_file,
    mib,
    paired_ratio,
    run_process,
)
from rich.console import Console

from trainer.launch.msrun import pick_free_port
from trainer.monitors.jsonl import read_metrics_records

MANY, FEW = 8, 2
START_LIMIT = 1.0
# A minimal job: what every worker must do before training.
MINIMAL = """
import sys, time
import numpy as np
import mindspore
from mindspore import Tensor, communication, ops
mindspore.set_device("CPU")
communication.init()
ops.AllReduce()(Tensor(np.ones(1, np.float32))).asnumpy()
print(time.time(), file=open(sys.argv[1] + str(communication.get_rank()), "w"))
"""
BIG = ("--model.model_config.vocab_size", "32768", "--runner_config.batch_size", "1")


def bare_start_seconds(workers: int) -> float:
    """Seconds from the command to the first collective, with msrun alone and only MindSpore in the workers."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        (folder / "minimal.py").write_text(MINIMAL)
        (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (folder / "python").chmod(0o755)
        began = time.time()
        run_process([sys.executable, "-m", "mindspore.parallel.cluster.run", f"--worker_num={workers}",
                     f"--local_worker_num={workers}", f"--master_port={pick_free_port()}",
                     f"--log_dir={folder / 'logs'}", "--join=True", folder / "minimal.py", folder / "done-"],
                    {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"})
        return float((folder / "done-0").read_text()) - began


def launched(options: argparse.Namespace, workers: int, steps: int, *flags: str) -> tuple[list[dict], float]:
    """Runs a job; returns its steps from metrics.jsonl, and the seconds from the command to the end of the first
    step."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, options.trainer, "launch", "--nproc", str(workers), "--log_dir", f"{folder}/log",
                   "--force", "--config", options.config, "--output_dir", folder, "--report", "False",
                   "--log_format", "plain", "--runner_config.stop_step", str(steps), *flags]
        began, first = time.time(), None
        with open(f"{folder}/said", "w+", encoding="utf-8") as said:
            process = subprocess.Popen([str(part) for part in command], stdout=said, stderr=subprocess.STDOUT)
            while process.poll() is None:
                if first is None and metrics.exists() and metrics.stat().st_size:
                    first = time.time() - began
                time.sleep(0.05)
            said.seek(0)
            if process.returncode or first is None:
                raise RunFailed(f"{workers} workers ended with exit code {process.returncode}:\n{said.read()[-2000:]}")
        return [record for record in read_metrics_records(metrics) if "step_seconds" in record], first


def alone_on_a_core(options: argparse.Namespace, steps: int, *flags: str) -> float:
    """Returns the tokens per second of one process on one core."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        core = str(min(os.sched_getaffinity(0)))
        run_process(["taskset", "-c", core, sys.executable, options.trainer, "--config", options.config,
                     "--output_dir", folder, "--runner_config.stop_step", str(steps), "--report", "False",
                     "--log_format", "plain", *flags])
        return measure_metrics_file(Path(folder) / "metrics.jsonl").tokens_per_second


def steady(steps: Sequence[dict], name: str) -> float:
    return statistics.median(step[name] for step in steps[1 + SETTLING_STEPS:])


def start_line(options: argparse.Namespace, console: Console) -> Line:
    """Compares the start of many workers with msrun alone, in turns, without the compilation of the model."""
    ours, bare = [], []
    for number in range(1, options.rounds + 1):
        console.print(f"round {number} of {options.rounds}: {MANY} workers, then msrun alone")
        small = ("--model.model_config.num_layers", "1", "--runner_config.batch_size", "1")
        steps, first = launched(options, MANY, SETTLING_STEPS + 2, *small)
        ours.append(first - (steps[0]["step_seconds"] - steady(steps, "step_seconds")))
        bare.append(bare_start_seconds(MANY))
    ratio, low, high = paired_ratio(ours, bare)
    detail = f"{statistics.median(ours):.1f} / {statistics.median(bare):.1f} s, rounds {low:.2f} to {high:.2f}"
    return Line(f"command to first step, {MANY} workers / bare msrun", ratio, START_LIMIT, False, detail)


def launch(options: argparse.Namespace, console: Console) -> int:
    lines = [start_line(options, console)]
    each, alone, share, jobs = [], [], [], []
    for number in range(1, options.rounds + 1):
        console.print(f"round {number} of {options.rounds}: {FEW} ranks, then one on a core")
        steps, _ = launched(options, FEW, options.steps)
        jobs.append(steps)
        each.append(steady(steps, "tokens_per_second") / FEW)
        share.append(steady(steps, "reduce_seconds") / steady(steps, "step_seconds"))
        alone.append(alone_on_a_core(options, options.steps))
    ratio, low, high = paired_ratio(each, alone)
    detail = f"{statistics.median(each):.0f} / {statistics.median(alone):.0f} tokens/s, rounds {low:.2f} to {high:.2f}"
    lines.append(Line(f"tokens/s and core, {FEW} ranks / 1", ratio, 0.85, True, detail, binding=False))
    detail = "share of a step, waiting for the slower rank included"
    lines.append(Line(f"sum of gradients, {FEW} ranks", statistics.median(share), 0.1, False, detail, binding=False))
    console.print("memory of a rank, optimizer state whole and shared")
    shared = ("--parallel.enable_parallel_optimizer", "True")
    whole, part = (
        launched(options, FEW, SETTLING_STEPS + 2, *BIG, *flags)[0][-1]["peak_rss_bytes"] for flags in ((), shared)
    )
    detail = f"{mib(part)} / {mib(whole)}, vocabulary 32,768"
    lines.append(Line(f"memory of a rank, state shared by {FEW} / whole", part / whole, 1.0, False, detail))
    return conclude("launch", "Several ranks", lines, console, steps=jobs)


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("launch", help="starting and synchronising workers, sharding optimizer state")
    command.add_argument("--config", default=str(ROOT / "configs" / "bench_dense.yaml"))
    command.add_argument("--trainer", type=Path, default=ROOT / "run_trainer.py", help="the program to measure")
    command.add_argument("--rounds", type=int, default=2, help="alternating runs of each side")
    command.add_argument("--steps", type=int, default=15,
                         help=f"steps a run; the first {1 + SETTLING_STEPS} are not counted")
