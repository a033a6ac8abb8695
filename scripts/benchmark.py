#!/usr/bin/env python3
"""Measures the trainer against PyTorch on this machine, and against its own targets.

    python scripts/benchmark.py dense --torch_python /path/to/torch-env/bin/python > result.json
    python scripts/benchmark.py step > result.json
    python scripts/benchmark.py moe --torch_python /path/to/torch-env/bin/python > result.json
    python scripts/benchmark.py parallel > result.json
    python scripts/benchmark.py targets --torch_python /path/to/torch-env/bin/python > result.json
    python scripts/benchmark.py profile > result.json
    python scripts/benchmark.py soak > result.json

`dense` trains the model of configs/bench_dense.yaml in both (the sizes are read from that file), each run in a
process of its own, alternating (A B A B), in several rounds. Prints a table on stderr and JSON on stdout. Exit code
0 when every target is met, 1 when one is missed, 2 when a run failed. It takes about ten minutes on two cores; run
nothing else meanwhile.

`step` measures what the parts of the training step cost: accumulation, clipping, loss scaling, freezing, recomputation.

`moe` trains the model of configs/bench_moe.yaml: against a dense model of equal active weights and against PyTorch, by
the number of experts, and with a capacity.

`parallel` divides these two models between two ranks, by each kind of parallelism.

`targets` compares a figure or two of everything with its target: training in float32 and bfloat16, experts, LoRA,
latent attention, windows, dropout, preferences, memory, prediction, evaluation, start, and what watching a run costs.
Some groups compare with transformers, PEFT and TRL. A round of all groups takes half an hour; `--only` names some. With
`--before EARLIER/run_trainer.py` some groups also measure an earlier checkout, in turns. With `--isa avx2` both sides
compute as on a processor without AVX-512.

`profile` says where the time of a training step goes, against what the machine can do at most.

`soak` trains tiny models for thousands of steps and measures whether their processes grow.

PyTorch needs an environment of its own: `python -m venv torch-env && torch-env/bin/pip install torch`. The groups
qwen3, qwen3_lora and wide_lora of `targets` also need transformers and peft there, and preferences needs trl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))
import benchmark_launch  # noqa: E402
import benchmark_moe  # noqa: E402
import benchmark_parallel  # noqa: E402
import benchmark_profile  # noqa: E402
import benchmark_soak  # noqa: E402
import benchmark_step  # noqa: E402
import benchmark_targets  # noqa: E402
from benchmark_tools import (  # noqa: E402
    IMPORT_ALLOWANCE_BYTES,
    ROOT,
    SETTLING_STEPS,
    Line,
    Measurement,
    RunFailed,
    conclude,
    last_json,
    median_of,
    mib,
    paired_ratio,
    run_process,
    run_torch,
    run_trainer,
    torch_sizes,
    usable_cores,
)

from trainer.config import load_config  # noqa: E402
from trainer.errors import TrainerError  # noqa: E402

NO_FOLDING = 160  # columns of a table that goes to a file or a pipe
DEEP_LAYERS = 32
ACCUMULATION = 8


def speed_line(name: str, ours: Sequence[Measurement], theirs: Sequence[Measurement], *, binding: bool) -> Line:
    """Returns the line with the ratio of the speeds of alternating runs; without a value if one side has no runs."""
    if not theirs:
        return Line(name, None, 0.9, True, "left out", binding)
    mine, other = ([run.tokens_per_second for run in runs] for runs in (ours, theirs))
    ratio, low, high = paired_ratio(mine, other)
    speeds = f"{statistics.median(mine):.0f} / {statistics.median(other):.0f} tokens/s"
    return Line(name, ratio, 0.9, True, f"{speeds}, rounds {low:.2f} to {high:.2f}", binding)


def dense_lines(ours: Sequence[Measurement], eager: Sequence[Measurement], compiled: Sequence[Measurement],
                compilation: dict[int, Measurement], accumulated: Measurement,
                bare: dict[str, list[float]] | None) -> list[Line]:
    """Judges the runs of `dense` by its targets.

    What a first step costs more than a later one is compilation, and the first touch of the memory that activations
    need, which grows with layers and batch (PyTorch pays it too). So compilation is measured with one row a batch.

    Args:
        ours: The trainer's runs, one a round.
        eager: PyTorch's runs, one a round.
        compiled: The same through torch.compile; empty when they were left out.
        compilation: Runs of the trainer with one row a batch, by number of layers: as configured, and DEEP_LAYERS.
        accumulated: A run with ACCUMULATION micro-batches.
        bare: ``trainer_seconds`` and ``bare_seconds`` of benchmark_bare.py; None when it was left out.
    """
    first = median_of(ours, lambda run: run.first_step_seconds)
    (layers, shallow), (deep_layers, deep) = sorted((n, run.first_extra_seconds) for n, run in compilation.items())
    peak = median_of(ours, lambda run: run.peak_rss_bytes)
    eager_peak = median_of(eager, lambda run: run.peak_rss_bytes)
    eager_first = median_of(eager, lambda run: run.first_step_seconds)
    allowed = 1.5 * eager_peak + IMPORT_ALLOWANCE_BYTES
    lines = [
        speed_line("tokens/s, trainer / PyTorch eager", ours, eager, binding=True),
        speed_line("tokens/s, trainer / torch.compile", ours, compiled, binding=False),
        Line("first step, seconds", first, 5.0, False, f"PyTorch eager {eager_first:.1f} s"),
        Line(f"compilation, {deep_layers} / {layers} layers", deep / shallow, 1.5, False,
             f"{deep:.2f} / {shallow:.2f} s: first less a later step"),
        Line("peak memory / allowed", peak / allowed, 1.0, False,
             f"{mib(peak)} of 1.5 x {mib(eager_peak)} + {mib(IMPORT_ALLOWANCE_BYTES)}"),
        Line(f"peak memory, accumulation {ACCUMULATION} / 1", accumulated.peak_rss_bytes / peak, 1.05, False,
             f"{mib(accumulated.peak_rss_bytes)} / {mib(peak)}"),
    ]
    if bare is None:
        return [*lines, Line("step, trainer / bare loop", None, 1.03, False, "left out")]
    trainer_step, bare_step = statistics.median(bare["trainer_seconds"]), statistics.median(bare["bare_seconds"])
    return [*lines, Line("step, trainer / bare loop", trainer_step / bare_step, 1.03, False,
                         f"{1000 * trainer_step:.1f} / {1000 * bare_step:.1f} ms")]


def dense(options: argparse.Namespace, console: Console) -> int:
    config = load_config(options.config, [])
    sizes = torch_sizes(config)
    modes = ["eager"] if options.no_compile else ["eager", "compile"]
    ours: list[Measurement] = []
    theirs: dict[str, list[Measurement]] = {"eager": [], "compile": []}
    said: dict[str, Any] = {}
    for number in range(1, options.rounds + 1):
        console.print(f"round {number} of {options.rounds}: trainer")
        ours.append(run_trainer(options.trainer, options.config, options.steps))
        for mode in modes:
            console.print(f"round {number} of {options.rounds}: PyTorch {mode}")
            run, said = run_torch(options.torch_python, sizes, mode, options.steps, options.threads)
            theirs[mode].append(run)
    short = SETTLING_STEPS + 3
    console.print(f"trainer with one row, {sizes['layers']} and {DEEP_LAYERS} layers, then accumulation {ACCUMULATION}")
    compilation = {
        layers: run_trainer(options.trainer, options.config, short, "--runner_config.batch_size", "1",
                            "--model.model_config.num_layers", str(layers))
        for layers in (sizes["layers"], DEEP_LAYERS)
    }
    accumulated = run_trainer(options.trainer, options.config, short,
                              "--gradient_accumulation_steps", str(ACCUMULATION))
    bare = None
    if not options.no_bare:
        console.print("trainer and bare loop, alternating")
        program = ROOT / "scripts" / "benchmark_bare.py"
        bare = last_json(run_process([sys.executable, program, "--config", options.config]))
    lines = dense_lines(ours, theirs["eager"], theirs["compile"], compilation, accumulated, bare)
    runs = {"trainer": ours, **{f"torch_{mode}": theirs[mode] for mode in modes},
            "compilation": list(compilation.values()), "accumulated": [accumulated]}
    return conclude(
        "dense", "Trainer on MindSpore against PyTorch and its targets", lines, console, sizes=sizes,
        machine={"torch": said["torch"], "torch_python": said["python"], "matmul_gflops": said["matmul_gflops"]},
        runs={name: [asdict(run) for run in group] for name, group in runs.items()}, bare=bare,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("dense", help="a dense decoder against PyTorch")
    command.add_argument("--torch_python", required=True, help="the Python of an environment with torch")
    command.add_argument("--config", default=str(ROOT / "configs" / "bench_dense.yaml"))
    command.add_argument("--trainer", default=ROOT / "run_trainer.py", help="the program to measure")
    command.add_argument("--rounds", type=int, default=3, help="alternating runs of each side")
    command.add_argument("--steps", type=int, default=20,
                         help=f"steps a run; the first {1 + SETTLING_STEPS} are not counted")
    command.add_argument("--threads", type=int, default=usable_cores(), help="threads of PyTorch")
    command.add_argument("--no_compile", action="store_true",
                         help="skip torch.compile, which compiles for half a minute in every round")
    command.add_argument("--no_bare", action="store_true", help="skip the comparison with a bare loop")
    benchmark_step.add_command(commands)
    benchmark_moe.add_command(commands)
    benchmark_launch.add_command(commands)
    benchmark_parallel.add_command(commands)
    benchmark_profile.add_command(commands)
    benchmark_soak.add_command(commands)
    benchmark_targets.add_command(commands)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or ("steps" in options and options.steps < SETTLING_STEPS + 2):
        parser.error(f"--rounds must be at least 1 and --steps at least {SETTLING_STEPS + 2}")
    console = Console(stderr=True, width=None if sys.stderr.isatty() else NO_FOLDING)
    try:
        measured = {
            "dense": dense, "step": benchmark_step.step, "moe": benchmark_moe.moe, "launch": benchmark_launch.launch,
            "parallel": benchmark_parallel.parallel, "profile": benchmark_profile.profile, "soak": benchmark_soak.soak,
            "targets": benchmark_targets.targets,
        }[options.command]
        return measured(options, console)
    except (RunFailed, TrainerError) as failure:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
