"""Runs programs, summarises their steps, and judges and prints the figures, for all benchmarks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from trainer.config import Config  # noqa: E402
from trainer.monitors.jsonl import read_metrics_records  # noqa: E402

# Steps after the first that do not count, until caches and allocators have settled.
SETTLING_STEPS = 2
# Memory of importing MindSpore alone, which PyTorch does not need.
IMPORT_ALLOWANCE_BYTES = 450e6


class RunFailed(Exception):
    """Says that a measured process failed; the message ends with its last output."""


@dataclass(frozen=True)
class Measurement:
    """The figures of a training run in one process.

    Attributes:
        first_step_seconds: Time of the first step, with compilation, without the start of the process.
        steady_step_seconds: Median of the steps after the first few.
        tokens_per_second: Tokens of a step / ``steady_step_seconds``.
        peak_rss_bytes: Highest resident memory of the process.
        eval_tokens_per_second: Speed of the run's last evaluation; None without one.
        first_loss: Loss of the first step; None if the program does not say it.
        trained: Number of trained weights; None if the program does not say it.
    """

    first_step_seconds: float
    steady_step_seconds: float
    tokens_per_second: float
    peak_rss_bytes: int
    eval_tokens_per_second: float | None = None
    first_loss: float | None = None
    trained: int | None = None

    @property
    def first_extra_seconds(self) -> float:
        """Returns the time of the first step beyond that of a later one."""
        return self.first_step_seconds - self.steady_step_seconds


def measure(step_seconds: Sequence[float], tokens_per_step: int, peak_rss_bytes: int) -> Measurement:
    """Summarises the seconds of all steps of a run; needs at least one step that counts."""
    steady = step_seconds[1 + SETTLING_STEPS:]
    if not steady:
        raise RunFailed(f"a run of {len(step_seconds)} steps, {SETTLING_STEPS + 2} are needed to measure it")
    median = statistics.median(steady)
    return Measurement(step_seconds[0], median, tokens_per_step / median, peak_rss_bytes)


def measure_report(report: dict[str, Any]) -> Measurement:
    """Summarises what a program of PyTorch prints."""
    found = measure(report["step_seconds"], report["tokens_per_step"], report["peak_rss_bytes"])
    return replace(found, first_loss=report.get("first_loss"), trained=report.get("trained"))


def measure_metrics_file(path: Path) -> Measurement:
    """Summarises a trainer run from its metrics.jsonl."""
    records = list(read_metrics_records(path))
    steps = [record for record in records if "step_seconds" in record]
    if not steps:
        raise RunFailed(f"{path} holds no step")
    found = measure([step["step_seconds"] for step in steps], steps[-1]["tokens"], steps[-1]["peak_rss_bytes"])
    found = replace(found, first_loss=steps[0].get("loss"))
    speeds = [record["eval_tokens"] / record["eval_seconds"] for record in records if "eval_seconds" in record]
    return replace(found, eval_tokens_per_second=speeds[-1]) if speeds else found


def median_of(runs: Sequence[Measurement], value: Callable[[Measurement], float]) -> float:
    return statistics.median(value(run) for run in runs)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Returns median, minimum and maximum of the ratios of alternating runs, from which slow drifts of the machine
    cancel."""
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


@dataclass(frozen=True)
class Line:
    """One line of the result.

    Attributes:
        name: What was measured.
        value: The figure, None when it was not measured.
        limit: What it must reach.
        at_least: Whether it must be at least (else at most) ``limit``.
        detail: The figures behind it, in words.
        binding: Whether missing the limit fails the benchmark; otherwise the limit is a goal.
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


def mib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"


def run_process(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    """Runs a command to its end and returns its stdout."""
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
    """Returns the JSON object of the last line that has one; libraries may print before and after it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise RunFailed(f"no JSON in the output:\n{text[-500:]}")


def run_json(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Runs a command to its end and returns the JSON object that it prints last."""
    text = run_process(command, environment)
    try:
        return last_json(text)
    except RunFailed as failure:
        raise RunFailed(f"{' '.join(map(str, command))}\n{failure}") from failure


def run_trainer(program: str | Path, config: str, steps: int, *flags: str) -> Measurement:
    """Runs the trainer ``program`` in a new process for ``steps`` optimizer steps."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        run_process([sys.executable, program, "--config", config, "--output_dir", folder,
                     "--runner_config.stop_step", str(steps), "--report", "False", "--log_format", "plain", *flags])
        return measure_metrics_file(Path(folder) / "metrics.jsonl")


def run_torch(
    python: str, sizes: dict[str, float], mode: str, steps: int, threads: int, *more: str, cache: str | None = None
) -> tuple[Measurement, dict[str, Any]]:
    """Runs the PyTorch model; also returns the JSON that it prints. `cache` is a folder for what torch.compile has
    compiled; None: it compiles anew."""
    report = torch_report(python, sizes, mode, threads, "--steps", str(steps), *more, cache=cache)
    return measure_report(report), report


def torch_report(
    python: str, sizes: dict[str, float], mode: str, threads: int, *more: str, cache: str | None = None
) -> dict[str, Any]:
    """Returns what the model in PyTorch prints."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache or folder}
        return peer_report(python, "benchmark_torch.py", sizes, threads, "--mode", mode, *more, environment=environment)


def peer_report(
    python: str, program: str, sizes: dict[str, float], threads: int, *more: str,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Returns what a program of `scripts` prints that needs an environment with torch."""
    command = [python, ROOT / "scripts" / program, "--threads", str(threads), *more,
               *(f"--{name}={size}" for name, size in sizes.items())]  # fmt: skip
    return run_json(command, environment)


def touch_memory(size: int) -> None:
    """Writes to `size` bytes of memory, or to what is available, in another process.

    A virtual machine takes memory from its host when it is first written to: up to 2 s per GB, against 0.1 s later. A
    first step would measure its host.
    """
    size = min(size, int(psutil.virtual_memory().available * 0.9))
    code = ("import mmap; memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
            "for place in range(0, SIZE, 4096): memory[place] = 1")  # fmt: skip
    run_process([sys.executable, "-c", code.replace("SIZE", str(size))])


def cpu_seconds(command: Sequence[str | Path]) -> float:
    """Returns user and system time of a command, which must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env=environment, cwd=ROOT)  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RunFailed(f"{' '.join(map(str, command))}\nended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def torch_sizes(config: Config) -> dict[str, float]:
    """Returns the sizes of model and batch as flags of benchmark_torch.py, which does not have all models."""
    decoder, runner = config.decoder, config.runner_config
    latent = decoder.multi_latent_attention
    odd_heads = not latent and (decoder.head_size * decoder.num_heads != decoder.hidden_size or decoder.use_qk_norm)
    if decoder.tie_word_embeddings or decoder.qkv_has_bias or odd_heads:
        raise RunFailed("the PyTorch model has an untied head, no q/k norm, no bias, heads that fill the hidden size")
    sizes: dict[str, float] = {
        "layers": decoder.num_layers, "hidden": decoder.hidden_size, "heads": decoder.num_heads,
        "kv_heads": decoder.kv_heads, "intermediate": decoder.ffn_size, "tokens": decoder.seq_length,
        "vocabulary": decoder.vocab_size, "batch": runner.batch_size, "accumulate": runner.gradient_accumulation_steps,
    }
    if latent:
        if decoder.q_lora_rank is None or decoder.rope_interleave or not decoder.use_qk_norm:
            raise RunFailed("the PyTorch model's latent attention has a latent vector of queries, norms on both latent"
                            " vectors, and rotates the halves of a head")
        sizes |= {"query_rank": decoder.q_lora_rank, "key_value_rank": decoder.kv_lora_rank,
                  "nope": decoder.qk_nope_head_dim, "rope": decoder.qk_rope_head_dim, "value": decoder.v_head_dim}
    if decoder.window_layers:
        if len(decoder.window_layers) != decoder.num_layers:
            raise RunFailed("the PyTorch model has a sliding window in all layers or in none")
        sizes["window"] = decoder.sliding_window or 0
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(decoder, name):
            sizes[name] = getattr(decoder, name)
    moe = decoder.experts
    if moe is None:
        return sizes
    if not all(decoder.is_moe_layer(layer) for layer in range(decoder.num_layers)) or decoder.shared_expert_size:
        raise RunFailed("the PyTorch model has experts in every layer, and no shared ones")
    if moe.score_function != "softmax" or moe.has_expert_bias or moe.n_group or not moe.norm_topk_prob:
        raise RunFailed("the PyTorch model's router has a softmax, and no groups, no bias, weights that sum to 1")
    return {**sizes, "intermediate": decoder.expert_size, "experts": moe.expert_num, "chosen": moe.num_experts_chosen}


def finetune_sizes(config: Config) -> dict[str, float]:
    """Returns the sizes of model, adapters and batch as flags of benchmark_finetune.py, which has Qwen3."""
    decoder, runner = config.decoder, config.runner_config
    adapters = decoder.pet_config
    if not (decoder.use_qk_norm and decoder.tie_word_embeddings) or decoder.experts or decoder.multi_latent_attention:
        raise RunFailed("the model in transformers is Qwen3 with a tied head")
    if adapters is not None and (adapters.lora_dropout or adapters.use_rslora or adapters.use_dora):
        raise RunFailed("the adapters in PEFT are plain LoRA of q, k, v and o without dropout")
    sizes: dict[str, float] = {
        "layers": decoder.num_layers, "hidden": decoder.hidden_size, "heads": decoder.num_heads,
        "kv_heads": decoder.kv_heads, "head_size": decoder.head_size, "intermediate": decoder.ffn_size,
        "vocabulary": decoder.vocab_size, "tokens": decoder.seq_length, "batch": runner.batch_size,
    }
    if adapters is not None:
        sizes |= {"lora_rank": adapters.lora_rank, "lora_alpha": adapters.lora_alpha}
    return sizes


def describe_machine() -> dict[str, Any]:
    """Returns machine, commit and versions of the measurement."""
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
    """Returns the name of the processor, from Linux or else from Python."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def render(title: str, lines: Sequence[Line], console: Console) -> None:
    """Shows the result as a table."""
    table = Table(title=title)
    for name in ("measure", "value", "target", "verdict", "from"):
        table.add_column(name, justify="right" if name in ("value", "target") else "left")
    style = {"pass": "green", "FAIL": "bold red", "not yet": "yellow", "not measured": "yellow"}
    for line in lines:
        table.add_row(line.name, "-" if line.value is None else f"{line.value:.3f}",
                      f"{'>=' if line.at_least else '<='} {line.limit:g}", line.verdict, line.detail,
                      style=style[line.verdict])
    console.print(table)


def conclude(benchmark: str, title: str, lines: Sequence[Line], console: Console, **more: Any) -> int:
    """Shows the result, prints it as JSON with the machine and whatever else was measured, and returns the exit code.
    `machine` among the latter adds to what is said of the machine."""
    render(title, lines, console)
    machine = {**describe_machine(), **more.pop("machine", {})}
    judged = [{**asdict(line), "verdict": line.verdict} for line in lines]
    print(json.dumps({"benchmark": benchmark, "machine": machine, "lines": judged, **more}, indent=2))
    return int(any(line.verdict == "FAIL" for line in lines))
