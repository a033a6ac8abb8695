"""`benchmark.py profile`: where the time of a training step goes, against what this machine can do at most."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmark_ceiling import product_ceiling
from benchmark_tools import ROOT, Line, conclude
from rich.console import Console

from trainer.config import Config, Override, load_config
from trainer.plan.flops import flops_per_sequence
from trainer.profiling.host import NOT_EXPLAINED, patch_all, profile_rows, profile_table
from trainer.profiling.regions import RegionTimer

WARM_UP_STEPS = 3


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def needed_operations(config: Config) -> float:
    """Returns the floating-point operations of the products that a step needs."""
    runner = config.runner_config
    return flops_per_sequence(config) * runner.batch_size * runner.gradient_accumulation_steps


class Profile:
    """Runs steps of a training, alternately undisturbed and measured."""

    def __init__(self, config: Config) -> None:
        from trainer.data import build_datasets
        from trainer.run.session import open_training

        self.step, self.dataset = open_training(config, lambda update: 1e-4), build_datasets(config)[0]
        self.rows, self.window = config.runner_config.batch_size, config.runner_config.gradient_accumulation_steps
        self.regions, self.taken = RegionTimer(), 0
        for _ in range(WARM_UP_STEPS):
            self.plain()
        # Not before: their memory is that of the first step on.
        self.patches = patch_all(self.regions, self.step)

    def batches(self) -> list:
        first = self.taken
        self.taken += self.rows * self.window
        numbers = [number % self.dataset.num_sequences for number in range(first, self.taken)]
        return [self.dataset.batch(numbers[start : start + self.rows]) for start in range(0, len(numbers), self.rows)]

    def plain(self) -> float:
        return _seconds(lambda: self.step(self.batches()))

    def measured(self) -> float:
        def run() -> None:
            with self.regions.region(NOT_EXPLAINED):
                with self.regions.region("data"):
                    batches = self.batches()
                self.step(batches)

        with self.patches.applied():
            return _seconds(run)


def profile(options: argparse.Namespace, console: Console) -> int:
    path = options.config or str(ROOT / "configs" / f"bench_{options.model}.yaml")
    config = load_config(path, [Override(*pair.split("=", 1), "flag --set") for pair in options.set])
    measured = Profile(config)
    ceilings = [product_ceiling()]
    plain: list[float] = []
    profiled: list[float] = []
    for _ in range(options.rounds):
        plain.append(measured.plain())
        profiled.append(measured.measured())
        ceilings.append(product_ceiling())
    rows = profile_rows(measured.regions.rows, options.rounds)
    whole, step = sum(row.seconds for _, row in rows), statistics.median(plain)
    console.print(profile_table(f"A step of {Path(path).name}, mean of {options.rounds}", rows))
    needed = needed_operations(config)
    explained = 1 - sum(row.seconds for key, row in rows if key.name == NOT_EXPLAINED) / whole
    reached = needed / step / 1e9
    peak = max(ceilings)
    lines = [
        Line("share of the step that is explained", explained, 0.95, True, f"of {1000 * whole:.0f} ms"),
        Line("share of the float32 product peak", reached / peak, 0.7, True,
             f"{reached:.0f} / {peak:.0f} GFLOP/s: {needed / 1e9:.0f} GFLOP in {1000 * step:.0f} ms", False),
        Line("step, measured / plain", statistics.median(profiled) / step, 1.05, False,
             f"{1000 * statistics.median(profiled):.0f} / {1000 * step:.0f} ms", False),
    ]  # fmt: skip
    return conclude(
        "profile", f"Profile of {Path(path).name}", lines, console, ceiling=peak, step_seconds=plain,
        measured_seconds=profiled, needed_operations=needed,
        rows=[{**key._asdict(), **asdict(row)} for key, row in rows],
    )  # fmt: skip


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("profile", help="where the time of a step goes")
    command.add_argument("--model", choices=("dense", "moe"), default="dense", help="configs/bench_MODEL.yaml")
    command.add_argument("--config", help="another file in its place")
    command.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the configuration")
    command.add_argument("--rounds", type=int, default=10, help="steps as they are and measured, by turns")
