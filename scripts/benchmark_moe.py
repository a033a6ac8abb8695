"""`benchmark.py moe`: experts against a dense model, against PyTorch, by their number, and with a capacity."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark_tools import (
    ROOT,
    SETTLING_STEPS,
    Line,
    Measurement,
    RunFailed,
    conclude,
    paired_ratio,
    run_torch,
    run_trainer,
    torch_sizes,
    usable_cores,
)
from rich.console import Console

from trainer.config import Config, load_config

EXPERTS = (4, 8, 16, 32, 64)
LAYERS_FEW, LAYERS_MANY = 4, 16
CAPACITY_FACTOR = 1.25
_MODEL = "--model.model_config"
_EXPERTS = f"{_MODEL}.moe_config"


def variant_flags(config: Config) -> dict[str, list[str]]:
    """Flags of each run of a round, by variant; every `experts N` has as many active weights as `dense`."""
    moe = config.decoder.experts
    if moe is None or moe.effective_capacity is not None:
        raise RunFailed("this benchmark needs a model with experts that drops nothing: moe_config without a capacity")
    flags = {f"experts {number}": [f"{_EXPERTS}.expert_num", str(number)] for number in _numbers(config)}
    dense_width = str(moe.num_experts_chosen * config.decoder.expert_size)
    flags["dense"] = [_EXPERTS, "null", f"{_MODEL}.intermediate_size", dense_width]
    flags["capacity"] = [f"{_EXPERTS}.use_gmm", "False", f"{_EXPERTS}.capacity_factor", str(CAPACITY_FACTOR)]
    return flags


def _numbers(config: Config) -> list[int]:
    """Numbers of experts to measure, including the configured one."""
    return sorted({*EXPERTS, config.decoder.experts.expert_num})


def speed_line(
    name: str, limit: float, ours: Sequence[Measurement], theirs: Sequence[Measurement], *, binding: bool = True
) -> Line:
    """Returns the line with the ratio of the speeds of alternating runs."""
    mine, other = ([run.tokens_per_second for run in runs] for runs in (ours, theirs))
    ratio, low, high = paired_ratio(mine, other)
    detail = f"{statistics.median(mine):.0f} / {statistics.median(other):.0f} tokens/s, rounds {low:.2f} to {high:.2f}"
    return Line(name, ratio, limit, True, detail, binding)


def moe_lines(
    runs: Mapping[str, Sequence[Measurement]], compilation: Mapping[int, Measurement], experts: int
) -> list[Line]:
    """Judges the runs by their targets.

    Args:
        runs: Of each variant and of PyTorch (`torch`), one a round.
        compilation: Runs with one row a batch, by number of layers.
        experts: Their configured number.
    """
    ours = runs[f"experts {experts}"]
    lines = [
        speed_line(f"tokens/s, {experts} experts / dense of equal active weights", 0.6, ours, runs["dense"]),
        speed_line(f"tokens/s, {experts} experts, trainer / PyTorch's loop over experts", 1.0, ours, runs["torch"]),
    ]
    fewest, most = min(EXPERTS), max(EXPERTS)
    for number in EXPERTS[1:]:
        more, few = ([run.steady_step_seconds for run in runs[f"experts {each}"]] for each in (number, fewest))
        ratio, low, high = paired_ratio(more, few)
        detail = f"{1000 * statistics.median(more):.0f} / {1000 * statistics.median(few):.0f} ms"
        detail += f", rounds {low:.2f} to {high:.2f}"
        lines.append(Line(f"step, {number} / {fewest} experts", ratio, 2.0, False, detail, number == most))
    name = f"tokens/s, capacity {CAPACITY_FACTOR:g} / dropless"
    lines.append(speed_line(name, 1.0, runs["capacity"], ours, binding=False))
    few, many = (compilation[layers].first_extra_seconds for layers in (LAYERS_FEW, LAYERS_MANY))
    detail = f"{many:.2f} / {few:.2f} s: first less a later step"
    return [*lines, Line(f"compilation, {LAYERS_MANY} / {LAYERS_FEW} layers", many / few, 1.5, False, detail)]


def moe(options: argparse.Namespace, console: Console) -> int:
    config = load_config(options.config, [])
    flags, sizes = variant_flags(config), torch_sizes(config)
    runs: dict[str, list[Measurement]] = {name: [] for name in (*flags, "torch")}
    said: dict[str, Any] = {}
    for number in range(1, options.rounds + 1):
        for name, extra in flags.items():
            console.print(f"round {number} of {options.rounds}: {name}")
            runs[name].append(run_trainer(options.trainer, options.config, options.steps, *extra))
        console.print(f"round {number} of {options.rounds}: PyTorch")
        run, said = run_torch(options.torch_python, sizes, "eager", options.steps, options.threads)
        runs["torch"].append(run)
    console.print(f"one row a batch, {LAYERS_FEW} and {LAYERS_MANY} layers")
    compilation = {
        layers: run_trainer(options.trainer, options.config, SETTLING_STEPS + 3, "--runner_config.batch_size", "1",
                            f"{_MODEL}.num_layers", str(layers))
        for layers in (LAYERS_FEW, LAYERS_MANY)
    }
    lines = moe_lines(runs, compilation, config.decoder.experts.expert_num)
    return conclude(
        "moe", "A model with experts", lines, console, sizes=sizes,
        machine={"torch": said["torch"], "matmul_gflops": said["matmul_gflops"]},
        runs={name: [asdict(run) for run in group] for name, group in runs.items()},
        compilation={str(layers): asdict(run) for layers, run in compilation.items()},
    )


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("moe", help="experts against a dense model, PyTorch, their number and a capacity")
    command.add_argument("--torch_python", required=True, help="the Python of an environment with torch")
    command.add_argument("--config", default=str(ROOT / "configs" / "bench_moe.yaml"))
    command.add_argument("--trainer", type=Path, default=ROOT / "run_trainer.py", help="the program to measure")
    command.add_argument("--rounds", type=int, default=3, help="alternating runs of each side")
    command.add_argument("--steps", type=int, default=20,
                         help=f"steps a run; the first {1 + SETTLING_STEPS} are not counted")
    command.add_argument("--threads", type=int, default=usable_cores(), help="threads of PyTorch")
