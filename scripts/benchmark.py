#!/usr/bin/env python3
"""Measures the trainer against PyTorch on this machine, and against its own targets.

    python scripts/benchmark.py dense --torch_python /path/to/torch-env/bin/python > result.json

`dense` trains the model of configs/bench_dense.yaml in both (the sizes are read from that file), each run in a
process of its own, in turns (A B A B), several rounds. Prints a table on stderr and JSON on stdout. Exit code 0 when
every target is met, 1 when one is missed, 2 when a run failed. It takes some ten minutes on two cores: leave the
machine alone meanwhile.

PyTorch needs an environment of its own: `python -m venv torch-env && torch-env/bin/pip install torch "numpy<2"`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from trainer.config import Config, load_config  # noqa: E402
from trainer.errors import TrainerError  # noqa: E402
from trainer.monitors.jsonl import read_records  # noqa: E402

# Steps after the first that are not counted: caches and allocators settle.
SETTLING_STEPS = 2
DEEP_LAYERS = 32
ACCUMULATION = 8
# What importing MindSpore alone costs, which PyTorch does not pay.
IMPORT_ALLOWANCE_BYTES = 450e6


class RunFailed(Exception):
    """A process that was to be measured failed; the message ends with what it last wrote."""


@dataclass(frozen=True)
class Measurement:
    """One process' training.

    Attributes:
        first_step_seconds: The first step, with compilation, without the start of the process.
        steady_step_seconds: Median of the steps after the first few.
        tokens_per_second: Tokens of a step / ``steady_step_seconds``.
        peak_rss_bytes: Highest resident memory of the process.
    """

    first_step_seconds: float
    steady_step_seconds: float
    tokens_per_second: float
    peak_rss_bytes: int

    @property
    def first_extra_seconds(self) -> float:
        """What the first step costs more than a later one."""
        return self.first_step_seconds - self.steady_step_seconds


def measure(step_seconds: Sequence[float], tokens_per_step: int, peak_rss_bytes: int) -> Measurement:
    """Summarises the seconds of all steps of a run; it needs one more step than those that do not count."""
    steady = step_seconds[1 + SETTLING_STEPS:]
    if not steady:
        raise RunFailed(f"a run of {len(step_seconds)} steps, {SETTLING_STEPS + 2} are needed to measure it")
    median = statistics.median(steady)
    return Measurement(step_seconds[0], median, tokens_per_step / median, peak_rss_bytes)


def measure_metrics_file(path: Path) -> Measurement:
    """The same of a trainer run, from its metrics.jsonl."""
    steps = [record for record in read_records(path) if "step_seconds" in record]
    if not steps:
        raise RunFailed(f"{path} holds no step")
    return measure([step["step_seconds"] for step in steps], steps[-1]["tokens"], steps[-1]["peak_rss_bytes"])


def median_of(runs: Sequence[Measurement], value: Callable[[Measurement], float]) -> float:
    return statistics.median(value(run) for run in runs)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median, smallest and largest of the ratios of runs made in turn: slow drifts of the machine fall out of them."""
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


@dataclass(frozen=True)
class Line:
    """One line of the verdict.

    Attributes:
        name: What was measured.
        value: The number that is judged, None when it could not be measured.
        limit: What it must reach.
        at_least: Whether it must be at least (else at most) ``limit``.
        detail: The numbers behind it, in words.
        binding: Whether missing it fails the benchmark; otherwise it is a goal.
    """

    name: str
    value: float | None
    limit: float
    at_least: bool
    detail: str
    binding: bool = True

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if (self.value >= self.limit) if self.at_least else (self.value <= self.limit):
            return "pass"
        return "FAIL" if self.binding else "not yet"


def speed_line(name: str, ours: Sequence[Measurement], theirs: Sequence[Measurement], *, binding: bool) -> Line:
    """The ratio of speeds of runs made in turn; not measured when one side has no runs."""
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
             f"{_mb(peak)} of 1.5 x {_mb(eager_peak)} + {_mb(IMPORT_ALLOWANCE_BYTES)}"),
        Line(f"peak memory, accumulation {ACCUMULATION} / 1", accumulated.peak_rss_bytes / peak, 1.05, False,
             f"{_mb(accumulated.peak_rss_bytes)} / {_mb(peak)}"),
    ]
    if bare is None:
        return [*lines, Line("step, trainer / bare loop", None, 1.03, False, "left out")]
    trainer_step, bare_step = statistics.median(bare["trainer_seconds"]), statistics.median(bare["bare_seconds"])
    return [*lines, Line("step, trainer / bare loop", trainer_step / bare_step, 1.03, False,
                         f"{1000 * trainer_step:.1f} / {1000 * bare_step:.1f} ms")]


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def run_process(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    """Runs a command to its end and returns what it wrote to stdout."""
    try:
        result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False,
                                env={**os.environ, **(environment or {})})
    except OSError as error:
        raise RunFailed(f"{command[0]} cannot be started: {error.strerror}") from error
    if result.returncode != 0:
        last = "\n".join((result.stderr or result.stdout).strip().splitlines()[-15:])
        raise RunFailed(f"{' '.join(map(str, command))}\nended with exit code {result.returncode}:\n{last}")
    return result.stdout


def last_json(text: str) -> dict[str, Any]:
    """The JSON object on the last line that holds one; libraries may have printed before and after it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise RunFailed(f"no JSON in the output:\n{text[-500:]}")


def run_trainer(program: str | Path, config: str, steps: int, *flags: str) -> Measurement:
    """One run of the trainer ``program`` in a process of its own, ended after ``steps`` optimizer steps."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        run_process([sys.executable, program, "--config", config, "--output_dir", folder,
                     "--runner_config.stop_step", str(steps), "--report", "False", "--log_format", "plain", *flags])
        return measure_metrics_file(Path(folder) / "metrics.jsonl")


def run_torch(python: str, sizes: dict[str, int], mode: str, steps: int,
              threads: int) -> tuple[Measurement, dict[str, Any]]:
    """One run of the peer; also returns what it says about itself."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
        said = last_json(run_process(
            [python, ROOT / "scripts" / "benchmark_torch.py", "--mode", mode, "--steps", str(steps),
             "--threads", str(threads), *(f"--{name}={size}" for name, size in sizes.items())],
            {"TORCHINDUCTOR_CACHE_DIR": cache}))
    return measure(said["step_seconds"], said["tokens_per_step"], said["peak_rss_bytes"]), said


def torch_sizes(config: Config) -> dict[str, int]:
    """The sizes of the config's model and batch, by the peer's flags; refuses what the peer does not model."""
    decoder, runner = config.decoder, config.runner_config
    odd_heads = decoder.head_size * decoder.num_heads != decoder.hidden_size
    if decoder.tie_word_embeddings or decoder.use_qk_norm or decoder.qkv_has_bias or odd_heads:
        raise RunFailed("the PyTorch peer has an untied head, no q/k norm, no bias and heads that fill the hidden size")
    return {"layers": decoder.num_layers, "hidden": decoder.hidden_size, "heads": decoder.num_heads,
            "kv_heads": decoder.kv_heads, "intermediate": decoder.ffn_size, "tokens": decoder.seq_length,
            "vocabulary": decoder.vocab_size, "batch": runner.batch_size,
            "accumulate": runner.gradient_accumulation_steps}


def describe_machine() -> dict[str, Any]:
    """Where and with what it was measured."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "mindspore": importlib.metadata.version("mindspore"),
        "numpy": importlib.metadata.version("numpy"),
    }


def cpu_model(cpuinfo: Path) -> str:
    """The processor's name as Linux gives it, elsewhere as Python does."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def render(lines: Sequence[Line], console: Console) -> None:
    table = Table(title="Trainer on MindSpore against PyTorch and its targets")
    for name in ("measure", "value", "target", "verdict", "from"):
        table.add_column(name, justify="right" if name in ("value", "target") else "left")
    style = {"pass": "green", "FAIL": "bold red", "not yet": "yellow", "not measured": "yellow"}
    for line in lines:
        table.add_row(line.name, "-" if line.value is None else f"{line.value:.3f}",
                      f"{'>=' if line.at_least else '<='} {line.limit:g}", line.verdict, line.detail,
                      style=style[line.verdict])
    console.print(table)


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
        console.print("trainer and bare loop in turns")
        program = ROOT / "scripts" / "benchmark_bare.py"
        bare = last_json(run_process([sys.executable, program, "--config", options.config]))
    lines = dense_lines(ours, theirs["eager"], theirs["compile"], compilation, accumulated, bare)
    render(lines, console)
    machine = {**describe_machine(), "torch": said["torch"], "torch_python": said["python"],
               "matmul_gflops": said["matmul_gflops"]}
    runs = {"trainer": ours, **{f"torch_{mode}": theirs[mode] for mode in modes},
            "compilation": list(compilation.values()), "accumulated": [accumulated]}
    print(json.dumps({
        "benchmark": "dense", "machine": machine, "sizes": sizes,
        "lines": [{**asdict(line), "verdict": line.verdict} for line in lines],
        "runs": {name: [asdict(run) for run in group] for name, group in runs.items()}, "bare": bare,
    }, indent=2))
    return int(any(line.verdict == "FAIL" for line in lines))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("dense", help="a dense decoder against PyTorch")
    command.add_argument("--torch_python", required=True, help="the python of an environment that holds torch")
    command.add_argument("--config", default=str(ROOT / "configs" / "bench_dense.yaml"))
    command.add_argument("--trainer", default=ROOT / "run_trainer.py", help="the program to measure")
    command.add_argument("--rounds", type=int, default=3, help="how often every side runs, in turns")
    command.add_argument("--steps", type=int, default=20,
                         help=f"steps a run; the first {1 + SETTLING_STEPS} are not counted")
    command.add_argument("--threads", type=int, default=usable_cores(), help="threads of PyTorch")
    command.add_argument("--no_compile", action="store_true",
                         help="leave torch.compile out, which compiles for half a minute every round")
    command.add_argument("--no_bare", action="store_true", help="leave the comparison with a bare loop out")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < SETTLING_STEPS + 2:
        parser.error(f"--rounds must be at least 1 and --steps at least {SETTLING_STEPS + 2}")
    console = Console(stderr=True)
    try:
        return dense(options, console)
    except (RunFailed, TrainerError) as failure:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
